"""One data-parallel rank: the models it hosts, its shard of the step's rollouts, and what it computes from them."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rlhf_data.records import Rollout
from rlhf_models.actor import Actor
from rlhf_models.critic import Critic
from rlhf_models.loading import load_actor, load_critic, load_tokenizer, resolve_dtype
from rlhf_models.reference import load_reference
from rlhf_models.weights import save_hf
from rlhf_train.advantages import generalized_advantages, moments, token_rewards, whiten
from rlhf_train.algorithms import AlgorithmSpec
from rlhf_train.batching import MiniBatch, RankPlan
from rlhf_train.engine.deepspeed import DeepSpeedEngine, init_process_group
from rlhf_train.experience import Experience
from rlhf_train.kl import kl_estimate
from rlhf_train.metrics import Max, Mean, Metric, merge_metrics
from rlhf_train.online.layout import make_token_batch, to_rows
from rlhf_train.online.terms import actor_loss, critic_loss, mismatch_metrics
from rlhf_train.specs import ModelSpec

MODEL_COLUMNS = {"actor": "old_logprobs", "reference": "ref_logprobs", "critic": "values"}


class TrainWorker:
    """Hosts the models of one rank of one group. Methods marked collective are called on all ranks of the group."""

    def __init__(
        self,
        models: Mapping[str, ModelSpec],
        algorithm: AlgorithmSpec,
        *,
        temperature: float,
        rank: int,
        num_ranks: int,
        master: tuple[str, int],
        device: str,
        seed: int,
        num_threads: int | None = None,
    ) -> None:
        """Join the group and load the models. Collective."""
        if num_threads:
            torch.set_num_threads(num_threads)
        torch.manual_seed(seed)
        init_process_group(rank=rank, world_size=num_ranks, master_addr=master[0], master_port=master[1], device=device)
        self.rank = rank
        self._num_ranks = num_ranks
        self._algorithm = algorithm
        self._temperature = temperature
        self._specs = dict(models)
        self._device = torch.device("cuda", torch.cuda.current_device()) if device == "cuda" else torch.device("cpu")
        self._frozen: dict[str, torch.nn.Module] = {}
        self.engines: dict[str, DeepSpeedEngine] = {}
        for role, spec in models.items():
            self._load(role, spec, device)
        self._experience = Experience.from_rollouts([], [])
        self._plan = RankPlan((), (), ())

    def _load(self, role: str, spec: ModelSpec, device: str) -> None:
        load = {"actor": load_actor, "critic": load_critic, "reference": load_reference}[role]
        model = load(
            spec.path,
            dtype=spec.dtype,
            attn_implementation=spec.attn_implementation,
            gradient_checkpointing=spec.gradient_checkpointing,
            packing=spec.packing,
        )
        if spec.optimizer is None:
            self._frozen[role] = model.to(self._device).eval()
            return
        self.engines[role] = DeepSpeedEngine(
            model, spec.optimizer, zero_stage=spec.zero_stage, dtype=resolve_dtype(spec.dtype), device=device
        )

    def load_rollouts(self, rollouts: Sequence[Rollout], rewards: Sequence[float], plan: RankPlan) -> None:
        """Take this step's shard, in the order of `plan.rows`."""
        self._experience = Experience.from_rollouts(rollouts, rewards)
        self._plan = plan

    @torch.no_grad()
    def run_model(self, role: str) -> dict[str, Metric]:
        """Fill in the column of `role`: old or reference log-probs, or values. Collective under ZeRO-3."""
        column = torch.zeros(self._experience.loss_mask.shape)
        entropy = Mean(0.0, 0.0)
        for rows in self._plan.forward_batches:
            output, mask = self._forward(role, rows)
            if rows:
                values = output if role == "critic" else output.logprobs
                width = mask.shape[1]
                column[list(rows), :width] = self._to_rows(values, role, rows, width).float().cpu()
                if role == "actor":
                    chosen = self._to_rows(output.entropy, role, rows, width)[mask]
                    entropy = entropy.merge(Mean(float(chosen.sum()), float(chosen.numel())))
        self._experience.set_column(MODEL_COLUMNS[role], column)
        if role != "actor":
            return {}
        return {"policy/entropy": entropy, **mismatch_metrics(self._experience)}

    def export_columns(self, names: Sequence[str]) -> dict[str, dict[str, np.ndarray]]:
        """Return columns for ranks of another group."""
        return self._experience.export(names)

    def adopt_columns(self, *parts: Mapping[str, Mapping[str, np.ndarray]]) -> None:
        """Take this shard's columns out of other ranks' exports."""
        self._experience.adopt(*parts)

    def assign_advantages(self) -> dict[str, Metric]:
        """Turn rewards into advantages and returns. Collective: whitening is over the batch of all ranks."""
        spec, experience = self._algorithm, self._experience
        mask, columns = experience.loss_mask, experience.columns
        zeros = torch.zeros(mask.shape)
        kl = zeros
        if spec.uses_reference:
            kl = kl_estimate(columns["old_logprobs"], columns["ref_logprobs"], spec.kl_estimator)
        reward_kl_coef = 0.0 if spec.use_kl_loss else spec.kl_coef
        rewards = token_rewards(experience.rewards, kl, mask, kl_coef=reward_kl_coef)
        if spec.row.uses_critic:
            values, lambd = columns["values"], spec.lambd
        else:
            values, lambd = zeros, 1.0
        advantages, returns = generalized_advantages(rewards, values, mask, gamma=spec.gamma, lambd=lambd)
        if spec.row.whiten:
            total = moments(advantages, mask).to(self._device)
            torch.distributed.all_reduce(total)
            advantages = whiten(advantages, mask, total.cpu(), divide_by_std=spec.whiten_std)
        experience.set_column("advantages", advantages)
        experience.set_column("returns", returns)
        return _advantage_metrics(experience, kl if spec.uses_reference else None)

    def update(self, role: str, *, max_epochs: int, seed: int) -> dict[str, Metric]:
        """Train `role` on the shard: every mini-batch once an epoch, in an order drawn from `seed`. Collective."""
        parts: list[Mapping[str, Metric]] = []
        for epoch in range(max_epochs):
            order = np.random.default_rng((seed, epoch)).permutation(len(self._plan.mini_batches))
            parts += [self._optimizer_step(role, self._plan.mini_batches[index]) for index in order]
        return merge_metrics(parts)

    def _optimizer_step(self, role: str, mini_batch: MiniBatch) -> dict[str, Metric]:
        engine, name = self.engines[role], {"actor": "policy", "critic": "value"}[role]
        engine.module.train()
        parts: list[Mapping[str, Metric]] = []
        for index, rows in enumerate(mini_batch.micro_batches):
            output, mask = self._forward(role, rows)
            loss, metrics = self._loss(role, rows, output, mask, mini_batch)
            engine.backward(loss, is_last=index == len(mini_batch.micro_batches) - 1)
            parts.append(metrics)
        stats = engine.step()
        grad_norm = {f"{name}/grad_norm": Mean(stats.grad_norm, 1), f"{name}/learning_rate": Max(stats.learning_rate)}
        return merge_metrics([*parts, grad_norm])

    def _loss(
        self, role: str, rows: Sequence[int], output: Any, mask: Tensor, mini_batch: MiniBatch
    ) -> tuple[Tensor, dict[str, Metric]]:
        width = mask.shape[1]
        if role == "critic":
            values = self._to_rows(output, role, rows, width)
            inputs = self._columns(rows, width, ("values", "returns"))
            return critic_loss(values, mask, inputs, self._algorithm, mini_batch.denominators)
        logprobs = self._to_rows(output.logprobs, role, rows, width)
        names = ("old_logprobs", "advantages", *(("ref_logprobs",) if self._algorithm.use_kl_loss else ()))
        inputs = self._columns(rows, width, names)
        return actor_loss(logprobs, mask, inputs, self._algorithm, mini_batch.denominators)

    def _forward(self, role: str, rows: Sequence[int]) -> tuple[Any, Tensor]:
        """Run `role` on rows of the shard; without rows, on one row with nothing trained, to keep the ranks in step."""
        chosen = list(rows) or [0]
        tokens = [self._experience.token_ids[row] for row in chosen]
        width = max(len(ids) for ids in tokens)
        mask = self._experience.loss_mask[chosen, :width].to(self._device)
        if not rows:
            mask = torch.zeros_like(mask)
        batch = make_token_batch(tokens, packing=self._specs[role].packing, device=self._device)
        model = self.engines[role].forward if role in self.engines else self._frozen[role]
        if role == "critic":
            return model(batch), mask
        return model(batch, temperature=self._temperature), mask

    def _to_rows(self, values: Tensor, role: str, rows: Sequence[int], width: int) -> Tensor:
        lengths = [len(self._experience.token_ids[row]) for row in (list(rows) or [0])]
        return to_rows(values, lengths, packing=self._specs[role].packing, width=width)

    def _columns(self, rows: Sequence[int], width: int, names: Sequence[str]) -> dict[str, Tensor]:
        chosen = list(rows) or [0]
        return {name: self._experience.columns[name][chosen, :width].to(self._device) for name in names}

    def named_weights(self, role: str) -> Iterator[tuple[str, Tensor]]:
        """Yield the weights of `role` whole, under their Hugging Face names. Collective."""
        return self.engines[role].named_weights()

    def offload(self) -> None:
        """Move optimizer states off the device."""
        for engine in self.engines.values():
            engine.offload()
        if self._device.type == "cuda":
            torch.cuda.empty_cache()

    def reload(self) -> None:
        """Undo `offload`."""
        for engine in self.engines.values():
            engine.reload()

    def save(self, role: str, path: str) -> None:
        """Write `role` as a Hugging Face folder. Collective; rank 0 writes."""
        state = self.engines[role].state_dict()
        if self.rank == 0:
            module: Actor | Critic = self.engines[role].module
            save_hf(module, state, load_tokenizer(self._specs[role].path), Path(path))

    def peak_memory_bytes(self) -> int:
        """The most device memory this process has allocated; 0 on a CPU."""
        return torch.cuda.max_memory_allocated() if self._device.type == "cuda" else 0


def _advantage_metrics(experience: Experience, kl: Tensor | None) -> dict[str, Metric]:
    mask = experience.loss_mask
    count = float(mask.sum())
    metrics: dict[str, Metric] = {
        "policy/advantage_abs": Mean(float(experience.columns["advantages"].abs().sum()), count),
        "value/return": Mean(float(experience.columns["returns"].sum()), count),
    }
    if kl is not None:
        metrics["kl/reference"] = Mean(float(kl.masked_fill(~mask, 0.0).sum()), count)
    return metrics
