"""Which prompts are drawn next, by how often the policy solves them: a curriculum. Torch-free."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from rlhf_data.bounds import bounded, check_bounds
from rlhf_data.records import RolloutGroup, VerdictKind
from rlhf_data.sampler import EpochSampler

_NO_VERDICT = (VerdictKind.ABSTAINED, VerdictKind.UNSCORED)
_LEAST = 1e-12  # prompts of probability 0 come after all others, in a random order


@dataclass(frozen=True, slots=True, kw_only=True)
class DifficultySpec:
    """How prompts are drawn by their pass rates.

    Attributes:
        target_pass_rate: the pass rate of the prompts that are drawn the most.
        pool_uniform_share: share of the draws in which all prompts that are not retired are equally likely.
        pool_retire_visits: a prompt that all responses solve in so many visits in a row is retired.
    """

    target_pass_rate: float = bounded(0.5, ge=0, le=1)
    pool_uniform_share: float = bounded(0.2, ge=0, le=1)
    pool_retire_visits: int = bounded(2, ge=1)

    def __post_init__(self) -> None:
        check_bounds(self)


def draw_probabilities(pass_rates: np.ndarray, *, target: float, uniform_share: float) -> np.ndarray:
    """Return the probability of each prompt to be drawn next.

        w_i = 1 - |p_i - target| / max(target, 1 - target),  1 for an unseen prompt
        P_i = uniform_share / N + (1 - uniform_share) w_i / sum(w),  1 / N if all w are 0

    With `target` 0, w_i = 1 - p_i, as in the prioritized sampling of Kimi k1.5 (arXiv:2501.12599).

    Args:
        pass_rates: [N], p_i from 0 to 1; NaN for an unseen prompt.
        target: from 0 to 1.
        uniform_share: from 0 to 1.
    """
    weights = 1 - np.abs(pass_rates - target) / max(target, 1 - target)
    weights[np.isnan(weights)] = 1.0
    total = weights.sum()
    uniform = np.full(len(weights), 1 / len(weights))
    return uniform_share * uniform + (1 - uniform_share) * (weights / total if total else uniform)


def verdict_kinds(group: RolloutGroup) -> list[VerdictKind]:
    """Return the verdicts of a group's episodes."""
    return [episode.verdict.kind for episode in group.episodes if episode.verdict is not None]


def pass_rate(verdicts: Sequence[VerdictKind]) -> float | None:
    """Return the share of responses that are right, or None if no verdict is about the policy.

    Responses whose scorer failed or abstained, or that have no scorer, do not count.
    """
    is_right = [kind is VerdictKind.OK for kind in verdicts if not kind.failed and kind not in _NO_VERDICT]
    return sum(is_right) / len(is_right) if is_right else None


class PassRateSampler(EpochSampler):
    """A sampler of `num_items` prompts, whose draws follow the pass rates of the visits up to the last `settle`.

    `order` says how, for checkpoints: another one cannot continue them.
    """

    def __init__(self, num_items: int, order: str, *, seed: int) -> None:
        super().__init__(num_items, 1, seed=seed)
        self._identity["shuffle"] = order
        self._observed: list[tuple[int, int, float]] = []  # number, item and pass rate, since the last `settle`

    def observe(self, number: int, item: int, verdicts: Sequence[VerdictKind]) -> None:
        """Note a visit, unless it has no pass rate; see `pass_rate`.

        Args:
            number: of the draw. Visits count in the order of their numbers.
            item: index of the prompt.
            verdicts: of the responses.
        """
        if (rate := pass_rate(verdicts)) is not None:
            self._observed.append((number, item, rate))

    def state_dict(self) -> dict[str, Any]:
        """See `EpochSampler`."""
        return super().state_dict() | {"observed": list(self._observed)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """See `EpochSampler`."""
        super().load_state_dict(state)
        self._observed = [(number, item, rate) for number, item, rate in state["observed"]]

    def _settled(self) -> list[tuple[int, int, float]]:
        """Return the visits since the last call, in the order of their draws."""
        settled = sorted(self._observed)
        self._observed = []
        return settled


class DifficultyPool(PassRateSampler):
    """An endless stream of indices of prompts, which are drawn by their pass rates.

    Between two calls of `settle`, prompts come in a random order without repetition. The next prompt is drawn from
    those that are left, in proportion to their probabilities. Draws therefore do not depend on the order in which
    groups become complete. When no prompt is left, a new order begins.

    The pass rate of a prompt is that of its first visit. Each further visit moves it half of the way to the visit's own
    rate. Retired prompts return when as many prompts were drawn as there are (an episode), and when all are retired.
    One more solved visit retires such a prompt again.

    Args:
        num_items: number of prompts, N.
        spec: how they are drawn.
        seed: determines each order, together with its number.
    """

    def __init__(self, num_items: int, spec: DifficultySpec, *, seed: int) -> None:
        super().__init__(num_items, "by pass rate", seed=seed)
        self._spec = spec
        self._pass_rates = np.full(num_items, np.nan)
        self._num_solved = np.zeros(num_items, np.int32)  # visits in a row
        self._episode = 0
        self._round = 0  # number of the order
        self._position = 0  # in the order
        self._drawn_from: np.ndarray | None = None  # the order, made when it is needed

    def take(self, count: int) -> np.ndarray:
        """Return the next [count] int64 indices."""
        batch = []
        for _ in range(count):
            if self._drawn_from is None:
                self._drawn_from = self._order(self._round)
            if self._position >= len(self._drawn_from):
                self._begin_round()
                self._drawn_from = self._order(self._round)
            batch.append(self._drawn_from[self._position])
            self._position += 1
        self.num_seen += count
        return np.array(batch, np.int64)

    def settle(self) -> tuple[dict[str, float], list[str]]:
        """Let the visits since the last call decide further draws. Return metrics, and notices for people."""
        for _, item, rate in self._settled():
            known = self._pass_rates[item]
            self._pass_rates[item] = rate if np.isnan(known) else (known + rate) / 2
            self._num_solved[item] = self._num_solved[item] + 1 if rate == 1 else 0
        is_seen = ~np.isnan(self._pass_rates)
        is_retired = self._num_solved >= self._spec.pool_retire_visits
        metrics = {"pool/solved": float(is_retired.mean()), "pool/unseen": float(1 - is_seen.mean())}
        if is_seen.any():
            metrics["pool/mean_pass_rate"] = float(self._pass_rates[is_seen].mean())
        all_solved = bool(is_retired.all())
        episode = self.num_seen // self.num_items
        if all_solved or episode > self._episode:
            self._num_solved[is_retired] = self._spec.pool_retire_visits - 1
        self._episode = episode
        self._begin_round()
        return metrics, [f"all {self.num_items} prompts are solved: they are drawn again"] if all_solved else []

    def state_dict(self) -> dict[str, Any]:
        """See `EpochSampler`; the pass rates and visits are arrays [N]."""
        arrays = {"pass_rates": self._pass_rates.copy(), "num_solved": self._num_solved.copy()}
        numbers = {"episode": self._episode, "round": self._round, "position": self._position}
        return super().state_dict() | arrays | numbers

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """See `EpochSampler`."""
        super().load_state_dict(state)
        self._pass_rates = np.array(state["pass_rates"])
        self._num_solved = np.array(state["num_solved"])
        self._episode = state["episode"]
        self._round = state["round"]
        self._position = state["position"]
        self._drawn_from = None

    def _begin_round(self) -> None:
        self._round += 1
        self._position = 0
        self._drawn_from = None

    def _order(self, epoch: int) -> np.ndarray:
        """Return the prompts that are not retired in the order of E_i / P_i, where E_i are exponential variates.

        Source: Efraimidis and Spirakis 2006, "Weighted random sampling with a reservoir".
        """
        spec = self._spec
        items = np.flatnonzero(self._num_solved < spec.pool_retire_visits)
        if not len(items):  # a run that continues with fewer visits than before
            items = np.arange(self.num_items)
        chances = draw_probabilities(
            self._pass_rates[items], target=spec.target_pass_rate, uniform_share=spec.pool_uniform_share
        )
        variates = np.random.default_rng((self.seed, epoch)).standard_exponential(len(items))
        return items[np.argsort(variates / np.maximum(chances, _LEAST))]
