"""The output of an online run: to the files of its folder, to the terminal, and as the final summary."""

import time
from collections.abc import Mapping, Sequence

from rlhf_data.records import RolloutGroup
from rlhf_train.online.job import RunSummary
from rlhf_train.online.rollouts import Drawn
from rlhf_train.online.summaries import summarize
from rlhf_train.run.observer import Observer
from rlhf_train.run.recorder import ARTIFACTS, Recorder
from rlhf_train.run.timeline import Timeline

NUM_SHOWN = 3  # sample rollouts shown on the terminal before and after training


class Report:
    """Collects the metrics of a step, and passes metrics, rollouts and samples to the recorder and the observer.

    Args:
        recorder: writes the run's folder.
        observer: shows the run on the terminal.
        timeline: splits the wall-clock time of each step into phases.
        started: `time.perf_counter()` at the start of the run.
    """

    def __init__(self, recorder: Recorder, observer: Observer, timeline: Timeline, started: float) -> None:
        self._recorder = recorder
        self._observer = observer
        self._timeline = timeline
        self._started = started
        self._metrics: dict[str, float] = {}
        self._num_tokens = 0
        self._final = {"time/startup": time.perf_counter() - started}

    def begin(self) -> None:
        """Start the clock of the first step; the seconds before count for no step."""
        self._timeline.take()

    def add(self, metrics: Mapping[str, float]) -> None:
        """Add to the metrics of the current step."""
        self._metrics |= metrics

    def rollouts(self, step: int, drawn: Drawn) -> None:
        """Write the step's rollouts, and add their summary to the step's metrics."""
        with self._timeline.phase("write"):
            self._recorder.rollouts("rollouts", step, drawn.kept, kept=True)
            self._recorder.rollouts("rollouts", step, drawn.dropped, kept=False)
        self._num_tokens += drawn.counts.num_response_tokens
        self.add(summarize(drawn.groups, "rollout"))
        self.add(
            {
                "rollout/kept_groups": len(drawn.kept) / len(drawn.groups),
                "samples/retried_groups": drawn.counts.num_retries,
            }
        )

    def evaluation(self, step: int, groups: Sequence[RolloutGroup], metrics: Mapping[str, float]) -> None:
        """Write and show an evaluation."""
        with self._timeline.phase("write"):
            self._recorder.metrics(step, metrics)
            self._recorder.rollouts("held-out rollouts", step, groups)
        self._observer.evaluation(step, metrics)

    def samples(self, title: str, groups: Sequence[RolloutGroup]) -> None:
        """Show the first rollout of a few groups."""
        self._observer.samples(title, [(group.prompt, group.rollouts[0]) for group in groups[:NUM_SHOWN]])

    def warning(self, text: str) -> None:
        """Show a warning; the run goes on."""
        self._observer.warning(text)

    def step(self, step: int, num_steps: int) -> None:
        """End the step: write and show its metrics, and start the clock of the next step."""
        seconds = self._timeline.take()
        # Throughput is that of training: an evaluation generates tokens that no step counts.
        total = seconds["step"] - seconds.get("evaluate", 0.0)
        self.add({f"time/{name}": value for name, value in seconds.items()})
        self.add({"throughput/response_tokens": self._num_tokens / total if total else 0.0})
        with self._timeline.phase("write"):
            self._recorder.step(step, self._metrics)
        self._observer.step(step, num_steps, self._metrics)
        self._metrics = {}
        self._num_tokens = 0

    def add_final(self, metrics: Mapping[str, float]) -> None:
        """Add to the metrics of the final summary."""
        self._final |= metrics

    def finish(self, num_steps: int) -> RunSummary:
        """Write the final metrics; return them with the paths of all artifacts that exist."""
        self._final["time/total"] = time.perf_counter() - self._started
        self._recorder.metrics(num_steps, self._final)
        artifacts = {name: path for name, path in ARTIFACTS.items() if self._recorder.path(name).exists()}
        return RunSummary(save_path=str(self._recorder.folder), artifacts=artifacts, metrics=dict(self._final))
