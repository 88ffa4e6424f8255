"""Evaluation on held-out prompts: when it happens, and its metrics, overall and by data source."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rlhf_data.records import RolloutGroup, VerdictKind
from rlhf_train.generation.rollouts import Rollouts
from rlhf_train.generation.summaries import is_unscored, lengths, summarize
from rlhf_train.generation.turns import Turns
from rlhf_train.learning.learner import Learner
from rlhf_train.report import Report
from rlhf_train.run.best_model import BestModel
from rlhf_train.run.timeline import Timeline


@dataclass(slots=True, eq=False, repr=False)
class Evaluator:
    """Has the held-out prompts answered, reports the metrics, and saves the weights with the best evaluation.

    Attributes:
        every: steps between evaluations; 0 for those at the start and the end alone, None for none.
        rollouts: answers and scores the prompts.
        learner: holds the weights that are saved.
        turns: gives the device to the engines.
        report: receives the metrics and rollouts of each evaluation.
        timeline: counts the seconds of evaluating, and of saving the best weights.
        best: folder of the best weights; None to save none.
        cut_off: the step whose evaluation was going on when another process was interrupted; None without one.
    """

    every: int | None
    rollouts: Rollouts
    learner: Learner
    turns: Turns
    report: Report
    timeline: Timeline
    best: BestModel | None
    cut_off: int | None = None
    _running: tuple[int, bool] | None = None  # step, and whether it is the last one
    _newest: tuple[int, Mapping[str, float]] = (-1, {})

    def state(self) -> dict[str, Any]:
        """Return the best evaluation so far, and the step whose evaluation goes on, for `restore`."""
        best = self.best.state() if self.best is not None else None
        return {"best": best, "running": self._running[0] if self._running is not None else None}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue with the best evaluation of another process."""
        self.cut_off = state["running"]
        if self.best is not None:
            self.best.restore(state["best"])

    def deciding_metric(self, step: int) -> float | None:
        """Return the metric that decides the best weights, as evaluated after `step`; None if it was not."""
        evaluated, metrics = self._newest
        return metrics.get(self.best.metric) if self.best is not None and evaluated == step else None

    def is_due(self, step: int, *, is_last: bool) -> bool:
        """Return whether to evaluate after `step`: at the start (step 0), at the end, and every `every` steps."""
        if self.every is None:
            return False
        is_between = self.every > 0 and step % self.every == 0
        return step == 0 or is_last or is_between

    def start(self, step: int, *, is_last: bool) -> None:
        """Begin to evaluate the weights that the engines have. They must keep them until `finish`.

        An evaluation that goes on, of weights that have not changed since, is waited for.
        """
        self.finish()
        with self.timeline.phase("evaluate"):
            self.turns.give_to_engines()
            self.rollouts.start_evaluation(step)
        self._running = step, is_last

    def finish(self) -> None:
        """End the evaluation that was started, if there is one: report it, and keep the weights if they are the best.

        The actor must still have the weights that were evaluated if the best ones are saved.
        """
        if self._running is None:
            return
        (step, is_last), self._running = self._running, None
        with self.timeline.phase("evaluate"):
            groups = self.rollouts.finish_evaluation()
            metrics = summarize_evaluation(groups)
            self.report.evaluation(step, groups, metrics)
        self._newest = step, metrics
        self._keep_best(step, metrics)
        if step > 0 and not is_last:
            return
        moment = "after" if is_last else "before"
        self.report.add_final(
            {f"{name}_{moment}": value for name, value in metrics.items() if name.startswith("eval/")}
        )
        self.report.samples(f"Held-out samples {moment} training", groups)

    def _keep_best(self, step: int, metrics: Mapping[str, float]) -> None:
        if self.best is None:
            return
        if self.best.metric not in metrics:
            self.report.observer.warning(f"this evaluation has no {self.best.metric}, which decides the best model")
        elif self.best.beaten_by(metrics):
            with self.timeline.phase("save"):
                self.learner.save("actor", str(self.best.staging))
                state = {"policy_version": self.learner.policy_version, "kl_coef": self.learner.kl_coef}
                self.best.keep(step, metrics, state)


def pass_at_k(num_samples: int, num_right: int, k: int) -> float:
    """Return the unbiased estimate of the chance that at least one of `k` samples is right.

        pass@k = 1 - C(n - c, k) / C(n, k)

    Args:
        num_samples: n, the samples of one prompt.
        num_right: c, how many of them are right.
        k: in [1, n].

    Raises:
        ValueError: k is not in [1, n].

    Source: Chen et al. 2021, arXiv:2107.03374, eq. 1.
    """
    if not 1 <= k <= num_samples:
        raise ValueError(f"pass@{k} of {num_samples} samples")
    return 1.0 - math.comb(num_samples - num_right, k) / math.comb(num_samples, k)


def summarize_evaluation(groups: Sequence[RolloutGroup]) -> dict[str, float]:
    """Return the metrics of held-out groups under `eval/`; with several data sources also under `eval/<source>/`.

    `pass@k` is computed for k = 1, 2, 4, ... and for the number of samples per prompt. An episode passes when its
    verdict is ok; one without a reward does not. Without a scorer there is no pass@k. `failed` is the share of
    episodes whose reward failed.
    """
    metrics = summarize(groups, "eval") | _passes(groups, "eval")
    verdicts = [episode.verdict for group in groups for episode in group.episodes]
    metrics["eval/failed"] = sum(verdict is None or verdict.kind.failed for verdict in verdicts) / len(verdicts)
    by_source: dict[str, list[RolloutGroup]] = {}
    for group in groups:
        by_source.setdefault(group.prompt.source, []).append(group)
    if len(by_source) > 1:
        for source, members in sorted(by_source.items()):
            metrics |= _passes(members, f"eval/{source}")
            metrics |= lengths([rollout for group in members for rollout in group.rollouts], f"eval/{source}")
    return metrics


def _passes(groups: Sequence[RolloutGroup], prefix: str) -> dict[str, float]:
    if is_unscored(groups):
        return {}
    num_samples = min(len(group.episodes) for group in groups)
    ks = {2**power for power in range(num_samples.bit_length())} | {num_samples}
    verdicts = [[episode.verdict for episode in group.episodes] for group in groups]
    num_right = [sum(v is not None and v.kind is VerdictKind.OK for v in of_group) for of_group in verdicts]
    metrics = {}
    for k in sorted(ks):
        chances = [pass_at_k(len(group.episodes), count, k) for group, count in zip(groups, num_right, strict=True)]
        metrics[f"{prefix}/pass@{k}"] = sum(chances) / len(chances)
    return metrics
