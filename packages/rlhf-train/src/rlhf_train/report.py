"""The output of an online run: to the files of its folder, to the terminal, and as the final summary."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rlhf_data.errors import ConfigError
from rlhf_data.records import RolloutGroup
from rlhf_train.algorithms.own_code import OwnCode
from rlhf_train.algorithms.own_groups import Group, step_metrics
from rlhf_train.cluster.utilization import GpuWatch
from rlhf_train.generation.reuse import replaced_answers
from rlhf_train.generation.service import Drawn
from rlhf_train.generation.summaries import scored, summarize
from rlhf_train.generation.turns import TURN_PHASES
from rlhf_train.online_job import RunSummary
from rlhf_train.run.observer import Observer
from rlhf_train.run.recorder import ARTIFACTS, Recorder
from rlhf_train.run.timeline import STEP, Timeline
from rlhf_train.tracing.token_values import TokenValues

NUM_SHOWN = 3  # sample rollouts shown on the terminal before and after training
LARGE_GAP = 0.3  # nats per token; rounding in bfloat16 gives below 0.1


@dataclass(eq=False, repr=False)
class Report:
    """Collects the metrics of a step, and passes metrics, rollouts and samples to the recorder and the observer.

    Attributes:
        recorder: writes the run's folder.
        observer: shows the run on the terminal.
        timeline: splits the wall-clock time of each step into phases; made at the start of the run.
        num_steps: largest number of steps.
        record: write the rollouts that are trained on.
        record_token_values: write what was computed for each of their tokens.
        gpus: measures the GPUs of the run; None without any.
        own_metrics: the user's `step_metrics`; None for none.
    """

    recorder: Recorder
    observer: Observer
    timeline: Timeline
    num_steps: int
    record: bool = True
    record_token_values: bool = True
    gpus: GpuWatch | None = None
    own_metrics: OwnCode | None = None
    _metrics: dict[str, float] = field(default_factory=dict)
    _num_tokens: int = 0
    _unwritten: tuple[int, Drawn] | None = None  # rollouts of the current step
    _seconds: dict[str, float] = field(default_factory=dict)  # of the current step, up to the last `state`
    _final: dict[str, float] = field(default_factory=dict)
    _has_compared: bool = False  # the engine's log-probs with the trainer's
    _earlier_s: float = 0.0  # of processes whose run this one continues

    def __post_init__(self) -> None:
        self._parts = {"startup": 0.0, "first_evaluation": 0.0, "steps": 0.0, "final_save": 0.0}  # seconds

    def end_part(self, name: str) -> None:
        """End a part of the run that comes before the first step: "startup" or "first_evaluation"."""
        self._parts[name] += self.timeline.take()[STEP]
        self.timeline.end_part(name.replace("_", " "))

    def add(self, metrics: Mapping[str, float]) -> None:
        """Add to the metrics of the current step."""
        self._metrics |= metrics

    def rollouts(self, step: int, drawn: Drawn) -> None:
        """Add a summary of the step's rollouts to its metrics, and keep them for `write_rollouts`."""
        self._unwritten = step, drawn
        self._num_tokens += sum(rollout.num_response_tokens for group in drawn.groups for rollout in group.rollouts)
        self.add(summarize(drawn.groups, "rollout"))
        self.add(
            {
                "rollout/kept_groups": len(drawn.kept) / len(drawn.groups),
                "samples/retried_groups": drawn.num_retries,
            }
        )
        self.add({**drawn.overlap, **drawn.pool})
        if self.own_metrics is not None:
            self._add_own(self.own_metrics, drawn)
        if drawn.cached_share is not None:
            self.add({"throughput/cached_prompt_share": drawn.cached_share})
        num_drafts, num_drafted, num_accepted = drawn.drafts
        if num_drafts:
            lengths = {"throughput/accepted_length": num_accepted / num_drafts}
            self.add({"throughput/accepted_drafts": num_accepted / num_drafted, **lengths})

    def _add_own(self, code: OwnCode, drawn: Drawn) -> None:
        """Add the user's metrics of a step that trains. Nothing is learned from them, so a fault is a warning."""
        parts = [
            # By id: groups come in the order in which they were complete.
            [Group.of(group.prompt, rollouts) for group in sorted(groups, key=_id) if (rollouts := scored([group]))]
            for groups in (drawn.kept, (*drawn.stale, *drawn.dropped))
        ]
        try:
            self.add(step_metrics(code, *parts) if parts[0] else {})
        except ConfigError as error:
            self.observer.warning(f"this step has no metrics of your own: {error}")

    def write_rollouts(self) -> None:
        """Hand the rollouts of the step to their writer, unless that is done.

        Its thread then takes half of the time of this one, so this is called when this one is about to wait.
        """
        if self._unwritten is None:
            return
        step, drawn = self._unwritten
        self._unwritten = None
        with self.timeline.phase("write"):
            if self.record:
                left_out = [*drawn.stale, *drawn.dropped, *replaced_answers(drawn.kept, drawn.batch)]
                for kept, groups, num_later in ((True, drawn.batch, len(left_out)), (False, left_out, 0)):
                    self.recorder.rollouts(
                        "rollouts", step, groups, num_later=num_later, num_steps=self.num_steps, kept=kept
                    )

    def token_values(self, step: int, take: Callable[[], Sequence[TokenValues]]) -> None:
        """Take what the trainer computed for the step's tokens and hand it to its writer, if that is recorded."""
        if self.record_token_values:
            with self.timeline.phase("write"):
                self.recorder.token_values(step, take())

    def evaluation(self, step: int, groups: Sequence[RolloutGroup], metrics: Mapping[str, float]) -> None:
        """Write and show an evaluation."""
        with self.timeline.phase("write"):
            self.recorder.metrics(step, metrics)
            self.recorder.rollouts("held-out rollouts", step, groups)
        self.observer.evaluation(step, metrics)

    def samples(self, title: str, groups: Sequence[RolloutGroup]) -> None:
        """Show the first rollout of a few groups."""
        self.observer.samples(title, [(group.prompt, group.rollouts[0]) for group in groups[:NUM_SHOWN]])

    def step(self, step: int, flops: Mapping[str, float]) -> None:
        """End the step: write and show its metrics, and start the clock of the next step.

        `flops` are the operations of the models' passes, see `flops_utilization`. The first step that trains warns of
        an engine that computes another model than the trainer.
        """
        gap = self._metrics.get("mismatch/logprob_gap_mean")
        if gap is not None and not self._has_compared:
            self._has_compared = True
            if not gap <= LARGE_GAP:
                self.observer.warning(_of_another_model(gap))
        seconds = self._take_seconds()
        self.timeline.end_part(f"step {step}")
        self._seconds = {}
        self._parts["steps"] += seconds[STEP]
        # Throughput is that of training: an evaluation generates tokens that no step counts.
        total = seconds[STEP] - seconds.get("evaluate", 0.0) - seconds.get("save", 0.0)
        self.add({f"time/{name}": value for name, value in seconds.items()})
        if "async/generation_idle" in self._metrics and seconds[STEP]:
            waited = seconds.get("generate", 0.0) + seconds.get("reward", 0.0)
            self.add({"async/training_idle": waited / seconds[STEP]})
        self.add({"throughput/response_tokens": self._num_tokens / total if total else 0.0})
        if self.gpus is not None:
            self.add(self.gpus.step(flops, self._num_tokens, step_s=total, train_s=seconds.get("train", 0.0)))
        with self.timeline.phase("write"):
            self.recorder.step(step, self._metrics)
        self.observer.step(step, self.num_steps, self._metrics)
        self._metrics = {}
        self._num_tokens = 0

    def state(self) -> dict[str, Any]:
        """Return what the current step and the final summary need, for `restore`."""
        # Copies: another thread writes the state while this object goes on.
        step = {"metrics": dict(self._metrics), "num_tokens": self._num_tokens, "seconds": dict(self._take_seconds())}
        elapsed_s = self._earlier_s + self.timeline.elapsed_s
        return {"step": step, "final": dict(self._final), "parts": dict(self._parts), "elapsed_s": elapsed_s}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue the step and the summary of another process. Its seconds count as seconds of the run."""
        self._metrics = dict(state["step"]["metrics"])
        self._num_tokens = state["step"]["num_tokens"]
        self._seconds = dict(state["step"]["seconds"])
        self._final = dict(state["final"])
        self._parts |= state["parts"]
        self._earlier_s = state["elapsed_s"]

    def add_final(self, metrics: Mapping[str, float]) -> None:
        """Add to the metrics of the final summary."""
        self._final |= metrics

    def finish(self) -> RunSummary:
        """Write the final metrics; return them with the paths of all artifacts that exist.

        `time/total` is the wall clock of the run up to here. Its parts add up to it: `time/startup` (processes, engines
        and the first weight sync), `time/first_evaluation` (before the first step), `time/steps` (the sum of every
        `time/step`), `time/final_save`, and `time/remainder`, which lies in none of them.
        """
        seconds = self._take_seconds()
        self._parts["final_save"] = sum(seconds.get(name, 0.0) for name in ("checkpoint", "save", *TURN_PHASES))
        total = self._earlier_s + self.timeline.elapsed_s
        self._final |= {f"time/{name}": value for name, value in self._parts.items()}
        self._final |= {"time/remainder": total - sum(self._parts.values()), "time/total": total}
        self.recorder.metrics(self.num_steps, self._final)
        paths = {name: self.recorder.path(name) for name in ARTIFACTS}
        artifacts = {name: path.name for name, path in paths.items() if path.exists()}
        return RunSummary(save_path=str(self.recorder.folder), artifacts=artifacts, metrics=dict(self._final))

    def _take_seconds(self) -> dict[str, float]:
        """Return the seconds of each phase since the step began."""
        for name, value in self.timeline.take().items():
            self._seconds[name] = self._seconds.get(name, 0.0) + value
        return self._seconds


def _id(group: RolloutGroup) -> str:
    return group.group_id


def _of_another_model(gap: float) -> str:
    return (
        f"the engine's log-probs differ from the trainer's by {gap:.2g} nats per token, where rounding in bfloat16 "
        "gives below 0.1: they compute this model in different ways, and training on such samples is biased\n"
        "hint: docs/models.md says which families vLLM and transformers compute alike; try another version of vLLM"
    )
