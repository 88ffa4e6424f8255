"""Adds the load-balancing loss of a mixture-of-experts model to an update, however the update is split."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rlhf_models.attention.sequence_parallel import SequenceGroup
from rlhf_models.experts.routing import RouterSums, RouterWatch, watch_routers
from rlhf_train.losses.balance import balance_loss
from rlhf_train.run.metrics import Sum
from rlhf_train.specs import ModelSpec


@dataclass(slots=True, eq=False, repr=False)
class LoadBalance:
    """The load-balancing loss of the updates of one model.

    The loss weighs the probability of each expert by the share of the tokens that it gets. The shares are those of the
    whole update, over all passes and ranks: with shares of each pass, another micro-batch size would be another loss.
    An update of several passes therefore runs all of them once without gradient first, to count.

    Attributes:
        watch: of the model's backbone.
        coef: weight of the loss.
        sequence_group: the ranks that divide the tokens of each pass; None if each has passes of its own.
    """

    watch: RouterWatch
    coef: float
    sequence_group: SequenceGroup | None = None
    _totals: tuple[Tensor, Tensor] | None = None

    def count(self, passes: Sequence[tuple[Callable[[], Any], bool]]) -> None:
        """Count which experts the tokens of an update go to, before its first pass. Collective.

        Args:
            passes: runs the model in training mode, and whether its tokens count: those of a rank that only keeps in
                step do not. All ranks have the same number of passes.
        """
        self._totals = None
        if len(passes) == 1:
            return  # the only pass counts itself
        counted = []
        with torch.no_grad():
            for run, has_rows in passes:
                run()
                counted.append(_counted(self._taken(), has_rows))
        self._totals = _over_ranks(torch.stack(counted).sum(0))

    def add_to(self, loss: Tensor, *, has_rows: bool) -> tuple[Tensor, Sum]:
        """Return the loss of the pass that has just run with its share of the load-balancing loss, and that share.

        The share in the metric has no coefficient, and is that of all ranks of a sequence group, whose losses are equal
        but for these shares. Collective in an update of one pass, and in a sequence group.
        """
        sums = self._taken()
        if self._totals is None:
            self._totals = _over_ranks(_counted(sums, has_rows))
        share = balance_loss(sums.probs, *self._totals) * has_rows
        reported = share.detach()
        if self.sequence_group is not None:
            reported = self.sequence_group.sum(reported)
        return loss + self.coef * share.to(loss.dtype), Sum(reported)

    def _taken(self) -> RouterSums:
        """Return the sums of the last pass, and let go of its graph."""
        sums = self.watch.sums
        self.watch.sums = None
        assert sums is not None, "the pass did not run the model in training mode"
        return sums


def _counted(sums: RouterSums, has_rows: bool) -> Tensor:
    return torch.cat([sums.counts, sums.num_rows[None]]) * has_rows


def _over_ranks(counts: Tensor) -> tuple[Tensor, Tensor]:
    if torch.distributed.get_world_size() > 1:
        torch.distributed.all_reduce(counts)
    return counts[:-1], counts[-1]


def load_balance(model: Any, spec: ModelSpec, sequence_group: SequenceGroup | None = None) -> LoadBalance | None:
    """Return what adds the load-balancing loss to the updates of a model of `rlhf_models`; None without a coefficient.

    Raises ConfigError for a model that has no such loss.
    """
    if not spec.aux_loss_coef:
        return None
    return LoadBalance(watch_routers(model.model.base_model), spec.aux_loss_coef, sequence_group)
