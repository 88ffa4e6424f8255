"""Which data source the next prompt comes from, by how much the policy can learn from each source. Torch-free."""

import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from rlhf_data.bounds import bounded, check_bounds
from rlhf_data.sampler import EpochSampler
from rlhf_train.generation.difficulty import PassRateSampler
from rlhf_train.generation.summaries import metric_part


@dataclass(frozen=True, slots=True, kw_only=True)
class MixSpec:
    """How the shares of data sources follow what the policy gets right.

    Attributes:
        mix_temperature: of the softmax over sources; a high one gives all of them the same share.
        mix_window: the newest visits of a source that its learnability is the mean of.
    """

    mix_temperature: float = bounded(0.1, gt=0)
    mix_window: int = bounded(300, ge=1)

    def __post_init__(self) -> None:
        check_bounds(self)


def source_shares(learnability: np.ndarray, num_visits: np.ndarray, *, temperature: float) -> np.ndarray:
    """Return the share of each source in the next prompts.

        U_j = L_j + sqrt(2 ln(sum(n) + 1) / (n_j + 1)),  P = softmax(U / temperature)

    The second term explores: sources that were rarely drawn get a larger share.

    Args:
        learnability: [J], L_j, the mean of |A| over a source's responses, A being normalized by group.
        num_visits: [J], n_j, prompts of the source that were answered.
        temperature: above 0.

    Source: Wang et al. 2025, arXiv:2504.09710 (DUMP), whose code counts responses where this counts prompts.
    """
    bounds = learnability + np.sqrt(2 * math.log(num_visits.sum() + 1) / (num_visits + 1))
    weights = np.exp((bounds - bounds.max()) / temperature)
    return weights / weights.sum()


class SourceMix(PassRateSampler):
    """An endless stream of indices of prompts, whose sources have shares by `source_shares`.

    The shares change in `settle` alone. In between, the next prompt is of the source that lacks the most prompts for
    its share, and the next one in the order of that source: each has all prompts of it once per epoch of its own.

    A visit with the pass rate p counts as |A| = 2 sqrt(p (1 - p)), which is the mean over a group whose rewards are 1
    for right responses and 0 for others, divided by their standard deviation.

    Args:
        sources: the source of each prompt, by name.
        spec: how shares follow the pass rates.
        seed: determines the orders.
    """

    def __init__(self, sources: Sequence[str], spec: MixSpec, *, seed: int) -> None:
        names, self._source_of = np.unique(np.array(sources), return_inverse=True)
        self._names = [metric_part(name) for name in names]
        self._items = [np.flatnonzero(self._source_of == index) for index in range(len(self._names))]
        self._orders = [EpochSampler(len(items), 1, seed=seed) for items in self._items]
        sizes = ", ".join(f"{name} {len(items)}" for name, items in zip(self._names, self._items, strict=True))
        super().__init__(len(sources), f"by source: {sizes}", seed=seed)
        self._spec = spec
        self._rates = [deque[float](maxlen=spec.mix_window) for _ in names]  # of the newest visits
        self._num_visits = np.zeros(len(names), np.int64)
        self._lack = np.zeros(len(names))  # prompts that each source is owed; below 0 after more than its share
        self._shares = self._next_shares()

    def take(self, count: int) -> np.ndarray:
        """Return the next [count] int64 indices."""
        batch = []
        for _ in range(count):
            self._lack += self._shares
            index = int(self._lack.argmax())
            self._lack[index] -= 1
            batch.append(self._items[index][self._orders[index].take(1)[0]])
        self.num_seen += count
        return np.array(batch, np.int64)

    def settle(self) -> tuple[dict[str, float], list[str]]:
        """Let the visits since the last call decide the shares. Return metrics, and no notices."""
        shares = dict(zip(self._names, self._shares.tolist(), strict=True))
        for _, item, rate in self._settled():
            self._rates[self._source_of[item]].append(rate)
            self._num_visits[self._source_of[item]] += 1
        means = {name: sum(rates) / len(rates) for name, rates in zip(self._names, self._rates, strict=True) if rates}
        self._shares = self._next_shares()
        numbers = {"share": shares, "pass_rate": means}
        return {f"mix/{what}_{name}": value for what, of in numbers.items() for name, value in of.items()}, []

    def state_dict(self) -> dict[str, Any]:
        """See `EpochSampler`."""
        arrays = {"num_visits": self._num_visits.copy(), "lack": self._lack.copy(), "shares": self._shares.copy()}
        orders = {"orders": [order.num_seen for order in self._orders], "rates": [list(rates) for rates in self._rates]}
        return super().state_dict() | arrays | orders

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """See `EpochSampler`."""
        super().load_state_dict(state)
        self._num_visits = np.array(state["num_visits"])
        self._lack = np.array(state["lack"])
        self._shares = np.array(state["shares"])
        self._rates = [deque(rates, self._spec.mix_window) for rates in state["rates"]]
        for order, num_seen in zip(self._orders, state["orders"], strict=True):
            order.num_seen = num_seen

    def _next_shares(self) -> np.ndarray:
        sizes = [[2 * math.sqrt(rate * (1 - rate)) for rate in rates] for rates in self._rates]
        learnability = np.array([sum(each) / len(each) if each else 0.0 for each in sizes])
        return source_shares(learnability, self._num_visits, temperature=self._spec.mix_temperature)
