"""The settings of an offline run as frozen data, and the function that runs it."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from rlhf_data.errors import CheckpointError, ConfigError, EngineError, RlhfError, unknown
from rlhf_models.loading import load_config
from rlhf_models.reward import moments_fields
from rlhf_train.costs import pass_costs
from rlhf_train.engine.accelerate import join_groups, start_engine, start_frozen
from rlhf_train.engine.process_group import init_process_group
from rlhf_train.offline.collectives import SharedCheckpoints, check_shared, of_all_ranks
from rlhf_train.offline.epochs import Objective, OfflineSchedule, evaluate, score_moments, train_offline
from rlhf_train.offline.sequences import with_reference
from rlhf_train.run.best_model import BestModel
from rlhf_train.run.checkpoint import Checkpoint, CheckpointSpec, check_rows, read_checkpoint
from rlhf_train.run.checkpointing import Checkpointer
from rlhf_train.run.interrupts import Interrupted, Interrupts
from rlhf_train.run.load_balance import load_balance
from rlhf_train.run.models import load_model, own_base, write_model
from rlhf_train.run.observer import Observer
from rlhf_train.run.rank_state import StateWriter
from rlhf_train.run.recorder import Recorder
from rlhf_train.run.timeline import Timeline
from rlhf_train.specs import ModelSpec
from rlhf_train.tracing.trace import Trace


@dataclass(frozen=True, slots=True, kw_only=True)
class OfflineJob:
    """One training run over fixed examples.

    Attributes:
        objective: the loss; it decides the kind of model and of examples.
        model: settings of the model to train, with an optimizer.
        reference: the reference policy of the loss, or the teacher for distillation. None for the model at the start of
            the run; with adapters that is the model without its adapters.
        precompute_reference: run the reference once over all examples before the first update, instead of in each
            update.
        examples, eval_examples: in the form that the objective takes; the latter may be empty.
        examples_digest: changes with every row that the examples were made from, see `rlhf_data.rows.row.Counts`; a run
            continues with the same one only. "" leaves that unchecked.
        eval_steps: updates between evaluations; None evaluates only at the start and the end.
        best_metric: evaluation metric, without "eval/", that decides which weights are saved in `best_path`; the
            objective says whether lower or higher values are better. None saves the last weights only.
        schedule: batch sizes, epochs and seed.
        model_path, best_path: folders for the final and the best model, in the Hugging Face layout. With LoRA the
            adapter is merged into the model, and also saved in the subfolder `adapter`.
        checkpoints: when and where the state of the run is saved. Its folder defaults to `checkpoints` beside
            `model_path`.
        rank, num_ranks, master: rank of this process, number of data-parallel processes, and host and port where they
            meet. Every process runs the same job.
        device: "cuda" or "cpu".
        timeline: write the timeline of rank 0, a file for Perfetto.

    Raises:
        ConfigError: settings that contradict each other.
    """

    objective: Objective[Any]
    model: ModelSpec
    reference: ModelSpec | None = None
    precompute_reference: bool = False
    examples: Sequence[Any]
    eval_examples: Sequence[Any] = field(default=())
    examples_digest: str = ""
    eval_steps: int | None = None
    best_metric: str | None = None
    schedule: OfflineSchedule
    model_path: Path
    best_path: Path | None = None
    checkpoints: CheckpointSpec = field(default_factory=CheckpointSpec)
    rank: int = 0
    num_ranks: int = 1
    master: tuple[str, int] = ("127.0.0.1", 29500)
    device: str = "cpu"
    timeline: bool = False

    def __post_init__(self) -> None:
        compares = self.objective.needs_reference
        teacher = self.objective.needs_teacher
        self.model.check_ranks(self.num_ranks)
        self.model.check_passes(self.schedule.micro_batch_tokens)
        needs_evaluation = self.eval_steps is not None or self.best_metric is not None
        limits_tokens = self.schedule.micro_batch_tokens is not None
        for is_wrong, message in (
            (self.model.optimizer is None, "the model to train needs an optimizer"),
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
                message = f"``micro_batch_tokens`` is {self.schedule.micro_batch_tokens}, and the longest example has"
                hint = f"use ``micro_batch_tokens={longest}``, or a lower ``max_len``"
                raise ConfigError(f"{message} {longest} tokens", hint=hint)

    @property
    def num_updates(self) -> int:
        """Updates of the whole run."""
        return self.schedule.num_updates(len(self.examples))

    def order(self) -> dict[str, Any]:
        """Return what decides which examples an update has, besides its number."""
        schedule = self.schedule
        return {
            "examples": self.examples_digest,
            "num_examples": len(self.examples),
            "train_batch_size": schedule.train_batch_size,
            "seed": schedule.seed,
        }

    def has_order_of(self, path: Path) -> bool:
        """Return whether the checkpoint in `path` can be read, and its run has the same examples in each update."""
        try:
            self.check_order(read_checkpoint(path).state()["run"]["order"])
        except (CheckpointError, KeyError, TypeError):
            return False
        return True

    def check_order(self, saved: Mapping[str, Any]) -> None:
        """Raise CheckpointError unless `saved`, what `order` returned in another run, has the same examples in each
        update."""
        own = self.order()
        for name in ("num_examples", "train_batch_size", "seed"):
            if saved[name] != own[name]:
                message = f"the checkpoint's run had {name} {saved[name]}, and this one has {own[name]}"
                raise CheckpointError(message, hint="continue with the examples and the batch size that it had")
        check_rows(saved.get("examples", ""), self.examples_digest)


def join_ranks(job: OfflineJob) -> None:
    """Join the rank set of the job, unless this process is in it. Collective; `run_offline` does the same.

    Raises ConfigError on all ranks if one of them has no access to the folder of the checkpoints.
    """
    init_process_group(rank=job.rank, world_size=job.num_ranks, master=job.master, device=job.device)
    if job.checkpoints.full:
        check_shared(job.checkpoints.home(job.model_path.parent))


def run_offline(
    job: OfflineJob, observer: Observer, recorder: Recorder | None = None, checkpoint: Checkpoint | None = None
) -> dict[str, float]:
    """Train, evaluate, and save the model. Collective over `job.num_ranks` processes.

    Args:
        job: the run; equal on all ranks except for `rank`.
        observer: receives the events of the run, on rank 0 only.
        recorder: receives the metrics, on rank 0 only; None to record nothing.
        checkpoint: to continue from, on rank 0 only; None for a run from the start.

    Returns:
        Metrics of the first and of the last evaluation, as `eval/<name>_before` and `eval/<name>_after`.

    Raises:
        ConfigError: an unknown `best_metric`, a model that cannot be loaded, or no shared disk for the checkpoints.
        DataError: examples that the objective cannot learn from.
        CheckpointError: the checkpoint belongs to another run.
        Interrupted: SIGINT or SIGTERM reached a rank. The state of the run is saved before.
        RlhfError: an update failed, or a file cannot be written. The model is saved before if all ranks live.
    """
    with Interrupts() as interrupts:
        if job.rank == 0:
            observer.starting("the model")
        run = _Run(job, observer, recorder, interrupts)
        try:
            done = run.resume(checkpoint)
            if not done or (done >= job.num_updates and run.evaluated_update != done):
                run.evaluate(done)
            # From here on, ranks end together, because they would wait for one that is missing.
            interrupts.hold()
            if job.rank == 0:
                if done > job.num_updates:
                    observer.notice(
                        f"{done} updates are done, more than the {job.num_updates} of this run: it saves its model"
                    )
                observer.progress(done, job.num_updates)
            run.end_part("startup")
            with run.timeline.phase("train"):
                train_offline(
                    run.engine,
                    run.objective,
                    run.items,
                    job.schedule,
                    done=done,
                    balance=run.balance,
                    on_update=run.on_update,
                )
            if job.rank == 0:
                observer.starting("to save the model")
            run.finish()
        except (RlhfError, KeyboardInterrupt) as error:
            run.save_what_is_left(models=isinstance(error, RlhfError))
            raise
        finally:
            run.timeline.trace.close()
    return run.final


class _Run:
    """The engine, objective and examples of a running job."""

    def __init__(self, job: OfflineJob, observer: Observer, recorder: Recorder | None, interrupts: Interrupts) -> None:
        self.final: dict[str, float] = {}
        self.evaluated_update: int | None = None  # of the last evaluation
        self._job = job
        self._observer = observer
        self._recorder = recorder
        self._interrupts = interrupts
        self._failure: RlhfError | None = None  # of this rank, until all ranks know of it
        self._has_news = False  # whether the weights have changed and no final model is saved
        self._are_ranks_together = job.num_ranks == 1  # at the end of the run, so that they can save it
        trace = Trace(is_on=job.timeline and job.rank == 0, notice=lambda text: observer.waiting(f"notice: {text}"))
        self.timeline = Timeline(trace=trace)
        if recorder is not None:
            trace.open(recorder.path("timeline"))
        self._eval_metrics: dict[str, float] = {}
        self._best: BestModel | None = None
        lowest = job.best_metric in job.objective.lower_is_better
        if job.best_metric is not None and job.best_path is not None:
            self._best = BestModel(f"eval/{job.best_metric}", job.best_path, lowest=lowest)
        torch.manual_seed(job.schedule.seed)
        join_ranks(job)
        spec = job.model
        kind = job.objective.model_kind
        model = load_model(kind, spec)
        self._groups = join_groups(spec)
        self.balance = load_balance(model, spec, self._groups["sequence_group"])
        self.engine = start_engine(
            model,
            spec,
            num_ranks=job.num_ranks,
            device=job.device,
            pack_tokens=job.schedule.micro_batch_tokens,
            **self._groups,
        )
        self.objective = replace(
            job.objective,
            packing=spec.packing,
            ranks_per_batch=spec.ranks_per_batch,
            costs=pass_costs(load_config(spec.path), has_head=kind == "actor"),
        )
        self.items = self.objective.items(job.examples)
        self._eval_items = self.objective.items(job.eval_examples) if job.eval_examples else ()
        self._add_reference()
        saving = job.checkpoints
        home = saving.home(job.model_path.parent)
        checkpoints = SharedCheckpoints(home, max_num=saving.max_num, max_bytes=saving.max_bytes, lowest=lowest)
        self._trained = {kind: self.engine}
        self._writer = StateWriter(job.rank, job.num_ranks)
        self._checkpointer = Checkpointer(
            saving, checkpoints, {"run": self}, self, recorder, self.timeline, observer, role=kind
        )

    def resume(self, checkpoint: Checkpoint | None) -> int:
        """Continue from the checkpoint that rank 0 found; return the updates that are done. Collective."""
        path = of_all_ranks(checkpoint and checkpoint.path)[0]
        return 0 if path is None else self._checkpointer.restore(read_checkpoint(path))

    def on_update(self, update: int, num_updates: int, metrics: Mapping[str, float]) -> None:
        """Report an update, evaluate after every `eval_steps` updates and after the last, and save the state.

        Collective. Raises Interrupted if a signal has reached a rank, after the state is saved, and EngineError if the
        gradient is not finite: the engine has then left the weights as they were.
        """
        self._has_news = True
        with self._until_all_know():
            if self._job.rank == 0:
                self._observer.update(update, num_updates, dict(metrics))
                if self._recorder is not None:
                    self._recorder.step(update, metrics)
            if not math.isfinite(norm := metrics["train/grad_norm"]):
                hint = "lower ``learning_rate``, or look for the examples that do it"
                raise EngineError(f"the gradient of update {update} is not finite ({norm})", hint=hint)
        is_evaluated = update == num_updates or bool(self._job.eval_steps and update % self._job.eval_steps == 0)
        if is_evaluated:
            self.evaluate(update)
        received = self._tell_all()
        decides = self._best is not None and is_evaluated
        self._checkpointer.after_step(update, self._eval_metrics[self._best.metric] if decides else None)
        self.end_part(f"update {update}")
        if received is not None:
            self._are_ranks_together = True
            self._checkpointer.save()
            raise Interrupted(received)

    def end_part(self, name: str) -> None:
        """Show the time since the last call in the timeline."""
        self.timeline.take()
        self.timeline.end_part(name)

    def finish(self) -> None:
        """Save the final model, and wait until everything is written. Collective."""
        self._has_news = False
        with self._until_all_know():
            self._save(self._job.model_path)
        self._tell_all()
        self._checkpointer.close()

    def save_what_is_left(self, *, models: bool) -> None:
        """Save as much as the end of a failed or interrupted run allows. What cannot be saved is a warning."""
        if models and self._are_ranks_together and self._has_news:
            try:
                self._save(self._job.model_path)
            except (RlhfError, OSError) as error:
                self._observer.warning(f"not everything was saved: {error}")
        self._checkpointer.close(ranks_live=self._are_ranks_together)
        if self._are_ranks_together:
            of_all_ranks(None)  # launchers kill all processes when the first one has ended

    @contextmanager
    def _until_all_know(self) -> Iterator[None]:
        """Keep an error of this rank until `_tell_all`: the other ranks would wait for this one for ever."""
        try:
            yield
        except RlhfError as error:
            self._failure = self._failure or error
        except OSError as error:
            failure = CheckpointError(f"a file cannot be written: {error}", hint="free space there")
            self._failure = self._failure or failure

    def _tell_all(self) -> int | None:
        """Return the signal that any rank has received, or None. Collective. Raises the error that any rank has."""
        received, has_failed = zip(*of_all_ranks((self._interrupts.received, self._failure is not None)), strict=True)
        if any(has_failed):
            self._are_ranks_together = True
            raise self._failure or EngineError(f"rank {has_failed.index(True)} failed, which says why")
        return max((number for number in received if number), default=None)

    def state(self) -> dict[str, Any]:
        """Return the state besides the model, for `restore`."""
        return {
            "order": self._job.order(),
            "final": self.final,
            "evaluated": self._eval_metrics,
            "evaluated_update": self.evaluated_update,
            "best": self._best and self._best.state(),
            # What `rlhf checkpoints --export` saves with the weights.
            "saved_fields": self._job.objective.saved_fields,
            "chat_template": self._job.model.chat_template,
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue where another process was. Raises CheckpointError for other examples or another order."""
        self._job.check_order(state["order"])
        self.final = dict(state["final"])
        self._eval_metrics = dict(state["evaluated"])
        self.evaluated_update = state.get("evaluated_update")
        if self._best is not None:
            self._best.restore(state["best"])

    def save_state(self, folder: str) -> list[str]:
        """See `run.checkpointing.Models`. Collective."""
        names = of_all_ranks(self._writer.save(self._trained, Path(folder)))
        return [name for of_rank in names for name in of_rank]

    def finish_state(self) -> None:
        """See `run.checkpointing.Models`. Collective."""
        self._writer.finish()
        of_all_ranks(None)

    def load_state(self, folder: str) -> None:
        """See `run.checkpointing.Models`. Collective."""
        self._writer.load(self._trained, Path(folder))

    def save(self, role: str, path: str) -> None:
        """See `run.checkpointing.Models`. Collective."""
        self._save(Path(path))

    def evaluate(self, update: int) -> None:
        """Evaluate, and save the weights if they are the best so far. Collective."""
        if not self._eval_items:
            return
        with self.timeline.phase("evaluate"):
            self._eval_metrics = self._measure(self._eval_items)
        self.evaluated_update = update
        with self._until_all_know():
            if self._job.rank == 0:
                self._observer.evaluation(update, dict(self._eval_metrics))
                if self._recorder is not None:
                    self._recorder.metrics(update, self._eval_metrics)
        moment = "after" if update else "before"
        self.final = self.final | {f"{name}_{moment}": value for name, value in self._eval_metrics.items()}
        best = self._best
        if best is None:
            return
        if best.metric not in self._eval_metrics:
            names = [name.removeprefix("eval/") for name in self._eval_metrics]
            raise ConfigError(unknown("best_metric", self._job.best_metric, names))
        # All ranks take the same branch, because the metrics are those of all ranks together. `_save` is collective.
        if best.beaten_by(self._eval_metrics):
            with self._until_all_know():
                self._save(best.staging)
                best.keep(update, self._eval_metrics, {}, writes=self._job.rank == 0)

    def _save(self, folder: Path) -> None:
        """Save the model with its current weights. Collective; rank 0 writes."""
        job = self._job
        fields = job.objective.saved_fields
        if job.objective.model_kind == "reward":
            # Without evaluation examples, take the moments of the scores of the training ones.
            fields |= moments_fields(*score_moments(self._eval_metrics or self._measure(self.items)))
        with self.timeline.phase("save"):
            state = self.engine.state_dict(wanted=job.rank == 0)
            if job.rank == 0:
                write_model(self.engine.module, state, job.model, folder, fields)

    def _measure(self, items: Sequence[Any]) -> dict[str, float]:
        metrics = evaluate(self.engine, self.objective, items, self._job.schedule)
        return {f"eval/{name.split('/', 1)[1]}": value for name, value in metrics.items()}

    def _add_reference(self) -> None:
        job = self._job
        if not (job.objective.needs_reference or job.objective.needs_teacher):
            return
        forward: Callable[..., Any]
        if job.reference is not None or (job.model.lora is None and not job.precompute_reference):
            spec = job.reference or job.model
            # Before the first update, the model to train needs no memory but that of its weights and gradients.
            rests = spec.offload and not job.precompute_reference
            spec = replace(spec, packing=job.model.packing, torch_compile="off", offload=rests)
            forward = start_frozen(spec, self.engine.device, **self._groups)
        else:
            forward = own_base(self.engine, has_adapters=job.model.lora is not None)
        objective = replace(self.objective, reference=forward)
        if not job.precompute_reference:
            self.objective = objective
            return
        self.items = with_reference(self.engine, objective, self.items, job.schedule)
        if self._eval_items:
            self._eval_items = with_reference(self.engine, objective, self._eval_items, job.schedule)
