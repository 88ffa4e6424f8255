"""One data-parallel rank: the models it hosts, its shard of the step's rollouts, and the computations on them."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from rlhf_data.errors import EngineError
from rlhf_data.images.reader import open_image_reader
from rlhf_kernels import PolicyObjective
from rlhf_models.batch import TokenBatch, to_device
from rlhf_models.host_states import awake
from rlhf_train.algorithms.table import AlgorithmSpec
from rlhf_train.batching import Denominators, MiniBatch, RankPlan
from rlhf_train.engine.accelerate import join_groups, start_engine, start_frozen
from rlhf_train.engine.deepspeed import DeepSpeedEngine
from rlhf_train.engine.process_group import init_process_group
from rlhf_train.engine.residence import Residence, release_cache
from rlhf_train.learning import loss_metrics
from rlhf_train.learning.advantages import assign_advantages, values_before
from rlhf_train.learning.columns import RolloutColumns
from rlhf_train.learning.experience import Experience, column_of
from rlhf_train.learning.learning_spec import is_teacher
from rlhf_train.learning.micro_batches import lay_out, policy_stream, read_ahead, recounted, teacher_term, token_batch
from rlhf_train.learning.trained_tokens import (
    Pass,
    by_rollout,
    first_pass_metrics,
    token_values,
)
from rlhf_train.losses.teacher import teacher_column
from rlhf_train.run.ema import AveragedModel, WeightAverage
from rlhf_train.run.load_balance import LoadBalance, load_balance
from rlhf_train.run.metrics import METRIC_PREFIXES, Mean, Metric, merge_metrics, on_host
from rlhf_train.run.models import load_model, own_base, without_dropout, write_model
from rlhf_train.run.rank_state import StateWriter
from rlhf_train.specs import ModelSpec
from rlhf_train.tracing.token_values import TokenValues
from rlhf_train.tracing.trace import WORK


class TrainWorker:
    """Hosts the models of one rank of a rank set.

    Methods marked "collective" must be called on all ranks of the set. Methods return metrics by name as mergeable
    parts (`rlhf_train.run.metrics`). Ranks of a sequence or tensor group have the same shard and compute the same on
    it, but only the first of them counts: it reports the metrics, and adds its part to sums over shards.
    """

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
        ema_beta: float | None = None,
        pack_tokens: int | None = None,
        takes_turns: bool = False,
        trains_in_turn: bool = False,
    ) -> None:
        """Join the rank set and load the models. Collective.

        Args:
            models: role ("actor", "critic", "draft", "reference", or a `teacher_role`) to its model's settings.
            algorithm: what is optimized.
            temperature: sampling temperature of the rollouts; log-probs are computed at this temperature.
            rank, num_ranks: number of this process in its rank set, from 0, and of processes there.
            master: host and port where the ranks meet.
            device: "cuda" or "cpu".
            seed, num_threads: of PyTorch; None for its default number of CPU threads.
            ema_beta: decay per update of the moving average of the actor's weights; None for no average.
            pack_tokens, takes_turns: see `engine.accelerate.start_engine`.
            trains_in_turn: optimizer states are on the device only in updates of their model, and frozen models only
                when they run: at most one model has its states there.
        """
        if num_threads:
            torch.set_num_threads(num_threads)
        torch.manual_seed(seed)
        init_process_group(rank=rank, world_size=num_ranks, master=master, device=device)
        self.rank, self._num_ranks = rank, num_ranks
        spec = next(iter(models.values()))
        self._groups = join_groups(spec)
        self._num_shards = num_ranks // spec.ranks_per_batch
        self._leads_group = rank % spec.ranks_per_batch == 0
        self._algorithm, self._temperature = algorithm, temperature
        self._specs = dict(models)
        self._reader = open_image_reader(spec.path) if spec.images else None
        self._device = torch.device("cuda", torch.cuda.current_device()) if device == "cuda" else torch.device("cpu")
        self._frozen: dict[str, Callable] = {}
        self.engines: dict[str, DeepSpeedEngine] = {}
        self._residence = Residence(self.engines, self._frozen, self._device, trains_in_turn)
        self._balances: dict[str, LoadBalance | None] = {}
        averages = [role for role, spec in models.items() if spec.is_average]
        for role in [role for role in models if role not in averages]:
            self._load(role, models[role], device, pack_tokens=pack_tokens, takes_turns=takes_turns)
        self._average = None
        if ema_beta is not None and (actor := self.engines.get("actor")) is not None:
            actor.yields_everywhere = bool(averages)
            self._average = WeightAverage(ema_beta, actor.local_weights())
            self._frozen |= dict.fromkeys(averages, AveragedModel(actor, self._average))
        self._writer = StateWriter(rank, num_ranks)
        self._experience = Experience(RolloutColumns.of([], []))
        self._plan = RankPlan((), (), ())
        self._step_versions: Sequence[int] = (0,)
        self._passes: list[Pass] = []  # of the actor in the epoch that is under way
        self._computed: Tensor | None = None  # see `by_rollout`; None before the actor is updated

    def _load(self, role: str, spec: ModelSpec, device: str, **options: Any) -> None:
        if role == "reference" and spec.is_base_of(self._specs.get("actor")):
            self._frozen[role] = own_base(self.engines["actor"])
            return
        if spec.optimizer is None:
            self._frozen[role] = start_frozen(spec, self._device, **self._groups)
            return
        model = without_dropout(load_model(role, spec))
        self._balances[role] = load_balance(model, spec, self._groups["sequence_group"])
        options |= {"device": device, "num_ranks": self._num_ranks, **self._groups}
        self.engines[role] = start_engine(model, spec, **options)
        self._residence.loaded(role)

    def load_rollouts(self, columns: RolloutColumns, plan: RankPlan, step_versions: Sequence[int] = (0,)) -> None:
        """Store this step's shard.

        Args:
            columns: the rollouts of `plan.rows`, in that order.
            plan: mini-batches and micro-batches of the shard.
            step_versions: see `limit_staleness`; the last one is of the weights before the step's first update.
        """
        if columns.routes is not None:
            self.engines["actor"].module.model.base_model.router_replay.check(columns.routes)
        self._experience = Experience(columns)
        self._plan, self._step_versions = plan, step_versions
        self._computed = None

    @torch.no_grad()
    def run_model(self, role: str) -> dict[str, Metric]:
        """Compute the column of `role`: its log-probs, or the critic's values. Collective under ZeRO-3."""
        if role in self.engines:
            self.engines[role].module.eval()
        else:
            self._residence.reload_frozen()
        # All stay on the device until the end: copying the part of each pass would wait for it.
        keeps = role in self._plan.own_batches
        columns = self._experience.columns_to_fill(role, self._algorithm, self._device, keeps=keeps)
        entropy = Mean(0.0, 0.0)
        with awake(self._frozen.get(role)):
            for rows in read_ahead(self._reader, self._experience, self._plan.batches_of(role)):
                with WORK.doing("forward pass", **self._size(rows)):
                    outputs, mask = self._forward(role, rows)
                if not rows:
                    continue
                positions = to_device(torch.tensor(rows), self._device)
                for name, column in columns.items():
                    column[positions, : mask.shape[1]] = outputs[name].float()
                if role == "actor":
                    entropy = entropy.merge(loss_metrics.masked_mean(outputs["entropy"], mask))
        for name, column in columns.items():
            self._experience.set_column(name, column)
        return self._reported({"policy/entropy": entropy} if role == "actor" else {})

    def export_columns(self, names: Sequence[str]) -> dict[str, dict[str, np.ndarray]]:
        """Return columns for the ranks of another set; see `Experience.export`."""
        return self._experience.export(names)

    def adopt_columns(self, *parts: Mapping[str, Mapping[str, np.ndarray]]) -> None:
        """Store the columns of this shard from the exports of another set's ranks."""
        self._experience.adopt(*parts)
        if "trained" in self._experience.columns:
            # The actor's ranks dropped tokens with non-finite log-probs; the critic must skip the same tokens.
            self._experience.restrict(self._experience.columns["trained"] > 0)

    def assign_advantages(self, kl_coef: float) -> dict[str, Metric]:
        """Compute advantages, returns, and the weights that correct for the gap to the engine.

        Collective, because whitening uses the batch of all ranks. `kl_coef` is the weight of the KL in the reward, in
        reward units per nat.
        """
        metrics = assign_advantages(
            self._experience,
            self._algorithm,
            rows=self._plan.rows,
            step_versions=self._step_versions,
            kl_coef=kl_coef,
            device=self._device,
            counts=self._leads_group,
        )
        return self._reported(metrics)

    def update(
        self, role: str, *, max_epochs: int, seed: int, kl_coef: float = 0.0, entropy_coef: float = 0.0
    ) -> dict[str, Metric]:
        """Train `role` on the shard, one update per mini-batch and epoch. Collective.

        Args:
            role: "actor", "critic" or "draft".
            max_epochs: passes over the shard.
            seed: of the order of mini-batches, which differs between epochs.
            kl_coef, entropy_coef: weights in the actor's loss, of a KL that is a term there and of a bonus that adapts.

        Raises:
            EngineError: a gradient of the actor or the critic is not finite. The draft model's update is skipped and
                counted instead, because drafts change how fast responses are made, and not what they say.
        """
        with self._residence.in_turn(role):
            spec = self._algorithm
            objective = replace(spec.objective, kl_coef=kl_coef * spec.use_kl_loss)
            if spec.entropy.target is not None:
                objective = replace(objective, entropy_coef=entropy_coef)
            return self._update(role, objective, max_epochs=max_epochs, seed=seed)

    def _update(self, role: str, objective: PolicyObjective, *, max_epochs: int, seed: int) -> dict[str, Metric]:
        counted = self._trained_mask(role) & self._leads_group
        mini_batches = recounted(self._plan.mini_batches, counted, self._device)
        parts: list[Mapping[str, Metric]] = []
        for epoch in range(max_epochs):
            self._passes = []
            order = np.random.default_rng((seed, epoch)).permutation(len(mini_batches))
            # Only the step's first update measures the gap to the engine: later ones have moved the weights.
            parts += [
                self._update_once(role, mini_batches[index], objective, is_first=not epoch and not position)
                for position, index in enumerate(order)
            ]
        if self._passes:
            self._computed = by_rollout(self._experience, self._passes)
            self._passes = []  # which have memory of the device
        return self._reported(merge_metrics(parts))

    def token_values(self) -> TokenValues:
        """Return what this rank has computed for the tokens of its shard in this step."""
        return token_values(self._experience, self._computed)

    def _reported(self, metrics: Mapping[str, Metric]) -> dict[str, Metric]:
        """Return the metrics of this shard in host memory, or none if another rank reports them."""
        return on_host(metrics) if self._leads_group else {}

    def _trained_mask(self, role: str) -> Tensor:
        """Return the tokens that the loss of `role` includes, [B, T] bool."""
        return self._experience.policy_mask if role == "actor" else self._experience.loss_mask

    def _update_once(
        self, role: str, mini_batch: MiniBatch, objective: PolicyObjective, *, is_first: bool
    ) -> dict[str, Metric]:
        engine = self.engines[role]
        engine.module.train()
        parts: list[Mapping[str, Metric]] = []
        trained = self._trained_mask(role).any(dim=1)
        # Skip rows without trained tokens. Their log-probs may not be finite, and 0 times infinity is NaN.
        passes = [[row for row in planned if trained[row]] for planned in mini_batch.micro_batches]
        balance = self._balances[role]
        if balance is not None:
            balance.count([(partial(self._run_layers, role, rows), bool(rows)) for rows in passes])
        for index, rows in enumerate(read_ahead(self._reader, self._experience, passes)):
            with WORK.doing("forward and backward pass", **self._size(rows)):
                loss, metrics = self._loss(role, rows, mini_batch.denominators, objective, is_first)
                if balance is not None:
                    loss, metrics[f"{METRIC_PREFIXES[role]}/aux_loss"] = balance.add_to(loss, has_rows=bool(rows))
                engine.backward(loss, is_last=index == len(passes) - 1)
            parts.append(metrics)
        with WORK.doing("optimizer step"):
            stats = engine.step()
        if not math.isfinite(stats.grad_norm) and role != "draft":
            hint = f"lower the {role}'s learning rate; rollouts.jsonl has what it was trained on"
            raise EngineError(f"the gradient of the {role} is not finite ({stats.grad_norm})", hint=hint)
        if role == "actor" and self._average is not None:
            self._average.update(engine.local_weights())
        num_rollouts = sum(map(len, mini_batch.micro_batches))
        return loss_metrics.update_metrics(role, parts, stats, num_rollouts=num_rollouts, num_shards=self._num_shards)

    def _loss(
        self,
        role: str,
        rows: Sequence[int],
        denominators: Denominators,
        objective: PolicyObjective,
        is_first: bool,
    ) -> tuple[Tensor, dict[str, Metric]]:
        """Run a model on rows of the shard; return this micro-batch's share of the update's loss, and metrics."""
        if role == "actor":
            return self._actor_loss(rows, denominators, objective, is_first)
        outputs, mask = self._forward(role, rows)
        if role == "draft":
            return loss_metrics.draft_loss(outputs[column_of(role)], mask, denominators)
        columns = self._experience.columns
        inputs = {name: self._cut(columns[name], rows, mask.shape[1]) for name in ("values", "returns")}
        return loss_metrics.critic_loss(outputs["values"], mask, inputs, self._algorithm, denominators)

    def _actor_loss(
        self, rows: Sequence[int], denominators: Denominators, objective: PolicyObjective, is_first: bool
    ) -> tuple[Tensor, dict[str, Metric]]:
        """Do what `_loss` does for the actor."""
        spec = self._algorithm
        experience = self._experience
        batch = self._batch("actor", rows)
        stream = policy_stream(experience, rows, spec, denominators, self._device)
        term = teacher_term(experience, rows, spec, self._device)
        wanted = lay_out(experience.policy_mask, rows, batch)
        output = self.engines["actor"].forward(
            batch,
            logits_mask=wanted,
            temperature=self._temperature,
            max_tokens=self._max_tokens,
            stream=stream,
            objective=objective,
            term=term,
        )
        self._passes.append((rows, wanted, output.logprobs, output.entropy))
        metrics = loss_metrics.policy_metrics(output.metrics, spec, getattr(stream.own_loss, "metrics", None))
        if term is not None:
            sources = [experience.sources[row] for row in rows if experience.sources]
            metrics |= loss_metrics.teacher_metrics(term.divergence, experience.policy_mask[list(rows)], sources)
        if is_first and not spec.runs_actor:
            metrics |= first_pass_metrics(experience, spec, self._passes[-1], stream)
        return output.loss, metrics

    def _run_layers(self, role: str, rows: Sequence[int]) -> None:
        """Run the layers of a language model on rows of the shard."""
        batch = self._batch(role, rows)
        # Without a token for the LM head, its part costs nothing.
        self.engines[role].forward(batch, logits_mask=torch.zeros(batch.input_ids.shape, dtype=torch.bool))

    def _forward(self, role: str, rows: Sequence[int]) -> tuple[dict[str, Tensor], Tensor]:
        """Run `role` on rows of the shard; return its outputs by name and their loss mask, as [b, t] tensors.

        The outputs have one row per rollout, packed or not. Without rows there is one row, with an empty mask.
        """
        batch = self._batch(role, rows)
        loss_mask = self._experience.loss_mask
        mask = self._cut(loss_mask, rows, max(batch.lengths))
        model = self.engines[role].forward if role in self.engines else self._frozen[role]
        if role == "critic" and self._algorithm.bootstrap_truncated and not torch.is_grad_enabled():
            truncated = self._cut(self._experience.truncated[:, None], rows, 1)[:, 0]
            return values_before(batch.split(model(batch, after_token=True)), truncated, mask), mask
        if role == "critic":
            outputs = {"values": model(batch)}
        else:
            wanted = lay_out(loss_mask, rows, batch)
            options = {"temperature": self._temperature}
            if is_teacher(role) and self._algorithm.distribution is not None:
                options |= {"top_k": self._algorithm.distribution.top_k}
                outputs = {"teacher_logprobs": teacher_column(model, batch, wanted, **options)}
            else:
                output = model(batch, logits_mask=wanted, max_tokens=self._max_tokens, **options)
                outputs = {column_of(role): output.logprobs}
                if role == "actor":
                    outputs["entropy"] = output.entropy
        return {name: pad_sequence(batch.split(values), batch_first=True) for name, values in outputs.items()}, mask

    @property
    def _max_tokens(self) -> int | None:
        # Old and current log-probs shall come from the same code, and a teacher's term takes all logits at once.
        return self._plan.max_pass_tokens if self._algorithm.distribution is None else 0

    def _batch(self, role: str, rows: Sequence[int]) -> TokenBatch:
        """Return rows of the shard as a batch, packed or padded as `role` needs. Only the actor replays routes."""
        more = {"with_routes": role == "actor", "reader": self._reader}
        return token_batch(self._experience, rows, self._device, self._specs[role], **more)

    def _size(self, rows: Sequence[int]) -> dict[str, int]:
        """Return what the timeline shows of a pass."""
        return {"rollouts": len(rows), "tokens": sum(len(self._experience.token_ids[row]) for row in rows)}

    def _cut(self, column: Tensor, rows: Sequence[int], width: int) -> Tensor:
        """Return rows of a [B, T] tensor on the device, cut to `width` columns; without rows, one row of zeros."""
        if not rows:
            return torch.zeros(1, width, dtype=column.dtype, device=self._device)
        return to_device(column[list(rows), :width], self._device)

    def offload(self) -> None:
        """Move optimizer states and frozen models to host memory."""
        self._residence.offload()

    def release_cache(self) -> None:
        """Give back memory of the device that the allocator would keep from the engines' processes."""
        release_cache()

    def reload(self) -> None:
        """Move back to the device what `offload` moved. If models train in turn, updates move the states."""
        self._residence.reload()

    def save(self, role: str, path: str) -> None:
        """Write the model of `role` as a Hugging Face folder. Collective; rank 0 writes."""
        state = self.engines[role].state_dict(wanted=self.rank == 0)
        if self.rank == 0:
            write_model(self.engines[role].module, state, self._specs[role], Path(path))

    def save_average(self, path: str) -> None:
        """Write the moving average of the actor's weights as a Hugging Face folder. Collective; rank 0 writes."""
        assert self._average is not None
        with self._average.in_place_of(self.engines["actor"].local_weights()):
            self.save("actor", path)

    def save_state(self, folder: str) -> list[str]:
        """Copy this rank's part of all trained models to host memory, and write it to `folder` on a thread.

        Returns the names of the files. A receipt in the folder (`run.checkpoint.write_receipt`) tells when one is on
        the disk.
        """
        return self._writer.save(self.engines, Path(folder), self._average)

    def finish_state(self) -> None:
        """Wait until the files of the last `save_state` are written or have failed."""
        self._writer.finish()

    def load_state(self, folder: str) -> None:
        """Continue with the models in `folder`, which `save_state` wrote on all ranks. Collective."""
        for role, engine in self.engines.items():
            with self._residence.in_turn(role):
                self._writer.load({role: engine}, Path(folder), self._average)

    def peak_memory_bytes(self) -> int:
        """Return the peak of this process's allocated device memory in bytes; 0 on a CPU."""
        return torch.cuda.max_memory_allocated() if self._device.type == "cuda" else 0
