"""The settings of an offline run as frozen data, and the function that runs it."""

import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from rlhf_data.errors import ConfigError, unknown
from rlhf_models.backbone import replay_full_packs
from rlhf_models.fast.compiled import compile_layers, compile_unavailable_reason
from rlhf_models.loading import load_actor, load_tokenizer, resolve_dtype
from rlhf_models.lora import LoraSpec, adapters_off, add_lora, merge_adapter, save_adapter
from rlhf_models.reference import load_reference
from rlhf_models.reward import store_moments
from rlhf_models.weights import save_hf
from rlhf_train.engine.deepspeed import DeepSpeedEngine, init_process_group
from rlhf_train.engine.protocol import TrainEngine
from rlhf_train.offline.loop import Objective, OfflineSchedule, evaluate, train_offline
from rlhf_train.offline.reward_models import load_trainable_reward_model, score_moments
from rlhf_train.offline.sequences import with_reference
from rlhf_train.run.best_model import BestModel
from rlhf_train.run.observer import Observer
from rlhf_train.run.recorder import Recorder
from rlhf_train.specs import ModelSpec

logger = logging.getLogger(__name__)

ADAPTER_FOLDER = "adapter"  # within a saved model


@dataclass(frozen=True, slots=True, kw_only=True)
class OfflineJob:
    """One training run over fixed examples.

    Attributes:
        objective: the loss; it decides the kind of model and of examples.
        model: settings of the model to train, with an optimizer.
        reference: the reference policy of the loss, or the teacher for distillation. None for the model at the start of
            the run; with LoRA that is the model without its adapters.
        precompute_reference: run the reference once over all examples before the first update, instead of in each
            update.
        lora: train adapters instead of all weights; None for all weights.
        examples, eval_examples: in the form that the objective takes; the latter may be empty.
        eval_steps: updates between evaluations; None evaluates only at the start and the end.
        best_metric: evaluation metric, without "eval/", that decides which weights are saved in `best_path`. Lower is
            better for "loss", "nll" and "kl", higher for all others. None saves the last weights only.
        schedule: batch sizes, epochs and seed.
        model_path, best_path: folders for the final and the best model, in the Hugging Face layout. With LoRA the
            adapter is merged into the model, and also saved in the subfolder `adapter`.
        rank, num_ranks, master: rank of this process, number of data-parallel processes, and host and port where they
            meet. Every process runs the same job.
        device: "cuda" or "cpu".

    Raises:
        ConfigError: settings that contradict each other.
    """

    objective: Objective[Any]
    model: ModelSpec
    reference: ModelSpec | None = None
    precompute_reference: bool = False
    lora: LoraSpec | None = None
    examples: Sequence[Any]
    eval_examples: Sequence[Any] = field(default=())
    eval_steps: int | None = None
    best_metric: str | None = None
    schedule: OfflineSchedule
    model_path: Path
    best_path: Path | None = None
    rank: int = 0
    num_ranks: int = 1
    master: tuple[str, int] = ("127.0.0.1", 29500)
    device: str = "cpu"

    def __post_init__(self) -> None:
        compares = self.objective.needs_reference
        teacher = self.objective.needs_teacher
        needs_evaluation = self.eval_steps is not None or self.best_metric is not None
        limits_tokens = self.schedule.micro_batch_tokens is not None
        for is_wrong, message in (
            (self.model.optimizer is None, "the model to train needs an optimizer"),
            (limits_tokens and not self.model.packing, "micro_batch_tokens needs packed sequences"),
            (teacher and self.reference is None, "distillation needs a teacher"),
            (self.reference is not None and not (compares or teacher), "a reference has no effect on this objective"),
            (self.precompute_reference and not compares, "precompute_reference: this objective uses no reference"),
            (
                self.eval_steps is not None and self.eval_steps < 1,
                f"eval_steps is {self.eval_steps}; it must be at least 1",
            ),
            (needs_evaluation and not self.eval_examples, "eval_steps and best_metric need examples to evaluate on"),
            (self.best_metric is not None and self.best_path is None, "best_metric needs a folder for the best model"),
        ):
            if is_wrong:
                raise ConfigError(message)
        for examples in [part for part in (self.examples, self.eval_examples) if limits_tokens and part]:
            longest = max(map(self.objective.num_tokens, self.objective.items(examples)))
            if longest > self.schedule.micro_batch_tokens:
                message = f"--micro_batch_tokens is {self.schedule.micro_batch_tokens}, and the longest example has"
                hint = f"use --micro_batch_tokens {longest}, or a lower --max_len"
                raise ConfigError(f"{message} {longest} tokens", hint=hint)


def run_offline(job: OfflineJob, observer: Observer, recorder: Recorder | None = None) -> dict[str, float]:
    """Train, evaluate, and save the model. Collective over `job.num_ranks` processes.

    Args:
        job: the run; equal on all ranks except for `rank`.
        observer: receives the events of the run, on rank 0 only.
        recorder: receives the metrics, on rank 0 only; None to record nothing.

    Returns:
        Metrics of the first and of the last evaluation, as `eval/<name>_before` and `eval/<name>_after`.

    Raises:
        ConfigError: an unknown `best_metric`, or a model that cannot be loaded.
        DataError: examples that the objective cannot learn from.
    """
    if job.rank == 0:
        observer.starting("the model")
    run = _Run(job, observer, recorder)
    run.evaluate(0)
    if job.rank == 0:
        observer.progress(0, job.schedule.num_updates(len(job.examples)))
    train_offline(run.engine, run.objective, run.items, job.schedule, on_update=run.on_update)
    if job.rank == 0:
        observer.starting("to save the model")
    run.save(job.model_path)
    return run.final


class _Run:
    """The engine, objective and examples of a running job."""

    def __init__(self, job: OfflineJob, observer: Observer, recorder: Recorder | None) -> None:
        self.final: dict[str, float] = {}
        self._job = job
        self._observer = observer
        self._recorder = recorder
        self._eval_metrics: dict[str, float] = {}
        self._best: BestModel | None = None
        if job.best_metric is not None and job.best_path is not None:
            lowest = job.best_metric in ("loss", "nll", "kl")
            self._best = BestModel(f"eval/{job.best_metric}", job.best_path, lowest=lowest)
        torch.manual_seed(job.schedule.seed)
        init_process_group(rank=job.rank, world_size=job.num_ranks, master=job.master, device=job.device)
        spec = job.model
        load = load_trainable_reward_model if job.objective.model_kind == "reward" else load_actor
        model = load(spec.path, gradient_checkpointing=spec.gradient_checkpointing, **spec.load_options)
        if job.lora is not None:
            add_lora(model, job.lora)
        is_compiled = _compile(model.model, spec, job.device)
        # Stage 2 shards gradients over ranks. One rank has nothing to shard, and stage 1 does less work on the host.
        zero_stage = 1 if spec.zero_stage == 2 and job.num_ranks == 1 else spec.zero_stage
        self.engine = DeepSpeedEngine(
            model, spec.optimizer, zero_stage=zero_stage, dtype=resolve_dtype(spec.dtype), device=job.device
        )
        if is_compiled:
            self._replay(model.model.base_model)
        self.objective = replace(job.objective, packing=spec.packing)
        self.items = self.objective.items(job.examples)
        self._eval_items = self.objective.items(job.eval_examples) if job.eval_examples else ()
        self._add_reference()

    def _replay(self, backbone: Any) -> None:
        """Replay the passes over full packed sequences as CUDA graphs where that is possible, else log why not."""
        tokens = self._job.schedule.micro_batch_tokens
        sums = self.engine.gradient_sums
        unmet = {
            "packed sequences have no common length without --micro_batch_tokens": tokens is None,
            "only bfloat16 with ZeRO stage 0 or 1 keeps separate gradient sums": not sums,
            "gradient checkpointing is on": self._job.model.gradient_checkpointing,
        }
        if reasons := [reason for reason, holds in unmet.items() if holds]:
            logger.info("forward and backward passes are not replayed as CUDA graphs: %s", "; ".join(reasons))
        else:
            replay_full_packs(backbone, tokens, sums)

    def on_update(self, update: int, num_updates: int, metrics: Mapping[str, float]) -> None:
        """Report an update, and evaluate after every `eval_steps` updates and after the last. Collective."""
        if self._job.rank == 0:
            self._observer.update(update, num_updates, dict(metrics))
            if self._recorder is not None:
                self._recorder.step(update, metrics)
        if update == num_updates or (self._job.eval_steps and update % self._job.eval_steps == 0):
            self.evaluate(update)

    def evaluate(self, update: int) -> None:
        """Evaluate, and save the weights if they are the best so far. Collective."""
        if not self._eval_items:
            return
        self._eval_metrics = self._measure(self._eval_items)
        if self._job.rank == 0:
            self._observer.evaluation(update, dict(self._eval_metrics))
            if self._recorder is not None:
                self._recorder.metrics(update, self._eval_metrics)
        moment = "after" if update else "before"
        self.final |= {f"{name}_{moment}": value for name, value in self._eval_metrics.items()}
        best = self._best
        if best is None:
            return
        if best.metric not in self._eval_metrics:
            names = [name.removeprefix("eval/") for name in self._eval_metrics]
            raise ConfigError(unknown("best_metric", self._job.best_metric, names))
        # All ranks take the same branch, because the metrics are those of all ranks together. `save` is collective.
        if best.beaten_by(self._eval_metrics):
            self.save(best.staging)
            best.keep(update, self._eval_metrics, {}, writes=self._job.rank == 0)

    def save(self, folder: Path) -> None:
        """Save the model with its current weights. Collective; rank 0 writes."""
        job = self._job
        model = self.engine.module
        metrics = self._eval_metrics
        if job.objective.model_kind == "reward" and not metrics:
            metrics = self._measure(self.items)  # no evaluation examples: take the score moments of the training ones
        state = self.engine.state_dict(wanted=job.rank == 0)
        if job.rank > 0:
            return
        if job.lora is None:
            save_hf(model, state, load_tokenizer(job.model.path), folder)
        else:
            with TemporaryDirectory() as scratch:
                adapter = save_adapter(model, state, scratch)
                merge_adapter(job.model.path, adapter, folder, dtype=job.model.dtype)
            save_adapter(model, state, folder / ADAPTER_FOLDER)
        if job.objective.model_kind == "reward":
            store_moments(folder, *score_moments(metrics))

    def _measure(self, items: Sequence[Any]) -> dict[str, float]:
        metrics = evaluate(self.engine, self.objective, items, self._job.schedule)
        return {f"eval/{name.split('/', 1)[1]}": value for name, value in metrics.items()}

    def _add_reference(self) -> None:
        job = self._job
        if not (job.objective.needs_reference or job.objective.needs_teacher):
            return
        forward: Callable[..., Any]
        if job.reference is not None or (job.lora is None and not job.precompute_reference):
            spec = job.reference or job.model
            forward = load_reference(spec.path, **spec.load_options | {"packing": job.model.packing})
            forward.to(self.engine.device)
        else:
            forward = _own_base(self.engine, has_adapters=job.lora is not None)
        objective = replace(self.objective, reference=forward)
        if not job.precompute_reference:
            self.objective = objective
            return
        self.items = with_reference(self.engine, objective, self.items, job.schedule)
        if self._eval_items:
            self._eval_items = with_reference(self.engine, objective, self._eval_items, job.schedule)


def _own_base(engine: TrainEngine, *, has_adapters: bool) -> Callable[..., Any]:
    """Return a forward pass in eval mode that serves as the reference: the model without its adapters.

    Without adapters it runs the model itself, which equals the reference only before the first update.
    """

    def forward(*args: Any, **kwargs: Any) -> Any:
        module = engine.module
        was_training = module.training
        module.eval()
        try:
            with adapters_off(module) if has_adapters else nullcontext():
                return engine.forward(*args, **kwargs)
        finally:
            module.train(was_training)

    return forward


def _compile(model: Any, spec: ModelSpec, device: str) -> bool:
    """Compile the layers as `spec.torch_compile` says; return whether they are compiled.

    Raises ConfigError when it is "on" and the layers cannot be compiled.
    """
    if spec.torch_compile == "off":
        return False
    reason = compile_unavailable_reason(model, torch.device(device))
    if spec.zero_stage == 3:
        reason = "ZeRO stage 3 gathers weights inside the layers"
    if reason is None and spec.torch_compile == "auto" and not spec.packing:
        reason = "without packing, nearly every batch has another shape and would be compiled again"
    if reason is None:
        compile_layers(model)
        return True
    if spec.torch_compile == "on":
        raise ConfigError(f"the layers cannot be compiled: {reason}", hint="leave --torch_compile at auto")
    logger.info("the layers are not compiled: %s", reason)
    return False
