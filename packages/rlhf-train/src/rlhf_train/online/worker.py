"""One data-parallel rank: the models it hosts, its shard of the step's rollouts, and what it computes from them."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rlhf_data.records import Rollout
from rlhf_models.actor import Actor
from rlhf_models.batch import TokenBatch
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
from rlhf_train.metrics import Max, Mean, Metric, Sum, merge_metrics
from rlhf_train.online.terms import actor_loss, critic_loss, mismatch_metrics, optimizer_steps
from rlhf_train.specs import ModelSpec

# What a rank without rows reads: two tokens, for a first one has neither a log-prob nor a value to be of use.
IDLE_TOKENS = np.zeros(2, np.int32)
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
        options: dict[str, Any] = {
            "dtype": spec.dtype,
            "attn_implementation": spec.attn_implementation,
            "packing": spec.packing,
        }
        if spec.optimizer is None:
            self._frozen[role] = load_reference(spec.path, **options).to(self._device)
            return
        load = {"actor": load_actor, "critic": load_critic}[role]
        model = without_dropout(load(spec.path, gradient_checkpointing=spec.gradient_checkpointing, **options))
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
        name = MODEL_COLUMNS[role]
        if role in self.engines:
            self.engines[role].module.eval()
        column = torch.zeros(self._experience.loss_mask.shape)
        entropy = Mean(0.0, 0.0)
        for rows in self._plan.forward_batches:
            outputs, mask = self._forward(role, rows)
            if not rows:
                continue
            values = outputs["values" if role == "critic" else "logprobs"]
            column[list(rows), : values.shape[1]] = values.float().cpu()
            if role == "actor":
                chosen = outputs["entropy"][mask]
                entropy = entropy.merge(Mean(float(chosen.sum()), float(chosen.numel())))
        self._experience.set_column(name, column)
        return {"policy/entropy": entropy, **mismatch_metrics(self._experience)} if role == "actor" else {}

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
            outputs, mask = self._forward(role, rows)
            loss, metrics = self._loss(role, rows, outputs, mask, mini_batch)
            engine.backward(loss, is_last=index == len(mini_batch.micro_batches) - 1)
            parts.append(metrics)
        stats = engine.step()
        losses = [f"{name}/loss", *(["kl/loss"] if role == "actor" and self._algorithm.use_kl_loss else [])]
        norm: dict[str, Metric] = {f"{name}/grad_norm": Mean(stats.grad_norm, 1)}
        norm[f"{name}/learning_rate"] = Max(stats.learning_rate)
        if role == "actor":
            norm["policy/rollout_passes"] = Sum(sum(map(len, mini_batch.micro_batches)))
        return merge_metrics([*parts, norm, optimizer_steps(losses, self._num_ranks)])

    def _loss(
        self, role: str, rows: Sequence[int], outputs: Mapping[str, Tensor], mask: Tensor, mini_batch: MiniBatch
    ) -> tuple[Tensor, dict[str, Metric]]:
        width, spec, denominators = mask.shape[1], self._algorithm, mini_batch.denominators
        if role == "critic":
            inputs = self._columns(rows, width, ("values", "returns"))
            return critic_loss(outputs["values"], mask, inputs, spec, denominators)
        names = ("old_logprobs", "advantages", *(("ref_logprobs",) if spec.use_kl_loss else ()))
        inputs = self._columns(rows, width, names)
        return actor_loss(outputs["logprobs"], mask, inputs, spec, denominators)

    def _forward(self, role: str, rows: Sequence[int]) -> tuple[dict[str, Tensor], Tensor]:
        """Run `role` on rows of the shard; without rows, on tokens that are not trained, to keep the ranks in step.

        Returns:
            The model's outputs as [b, t] tensors, one rollout a row whatever the layout, and their loss mask.
        """
        tokens = [self._experience.token_ids[row] for row in rows] or [IDLE_TOKENS]
        width = max(len(ids) for ids in tokens)
        mask = self._experience.loss_mask[list(rows), :width] if rows else torch.tensor([[False, True]])
        if self._specs[role].packing:
            batch = TokenBatch.packed(tokens, device=self._device)
        else:
            batch = TokenBatch.padded(tokens, pad_id=0, device=self._device)
        model = self.engines[role].forward if role in self.engines else self._frozen[role]
        if role == "critic":
            outputs = {"values": model(batch)}
        else:
            wanted = batch.lay_out([row[: len(ids)].numpy() for row, ids in zip(mask, tokens, strict=True)], torch.bool)
            outputs = model(batch, temperature=self._temperature, logits_mask=wanted)._asdict()
        rows_of = {name: _rows(batch.split(values), width) for name, values in outputs.items()}
        mask = mask.to(self._device)
        return rows_of, mask if rows else torch.zeros_like(mask)

    def _columns(self, rows: Sequence[int], width: int, names: Sequence[str]) -> dict[str, Tensor]:
        if not rows:
            return {name: torch.zeros(1, width, device=self._device) for name in names}
        return {name: self._experience.columns[name][list(rows), :width].to(self._device) for name in names}

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


def without_dropout(model: torch.nn.Module) -> torch.nn.Module:
    """Switch dropout off for good; returns the same model.

    Old log-probs come from eval mode and the engine has no dropout: with it the ratio of an update that has not begun
    would not be 1. The training mode itself stays, for gradient checkpointing needs it.
    """
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
        for name, value in vars(module).items():
            if "dropout" in name and isinstance(value, float):
                setattr(module, name, 0.0)
    return model


def _rows(sequences: Sequence[Tensor], width: int) -> Tensor:
    """Stack sequences of different lengths, filled up with 0.0 on the right; differentiable."""
    return torch.stack([torch.nn.functional.pad(sequence, (0, width - len(sequence))) for sequence in sequences])


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
