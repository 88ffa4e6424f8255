"""Reward models: learn to score the chosen answer of each pair above the rejected one."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch

from rlhf_data.errors import DataError
from rlhf_data.examples.preference import PreferenceExample
from rlhf_train.batching import Denominators
from rlhf_train.engine.protocol import TrainEngine
from rlhf_train.losses.aggregate import sequence_mean
from rlhf_train.losses.preference import reward_model_loss
from rlhf_train.offline.epochs import LossShare, Objective
from rlhf_train.offline.sequences import lay_out, mean_metrics, num_ordered


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardModelObjective(Objective[PreferenceExample]):
    """Bradley-Terry loss on the scores of pairs.

    Attributes:
        margin_loss: subtract each example's margin from the difference of the scores.
    """

    model_kind: ClassVar[str] = "reward"

    margin_loss: bool = False

    def items(self, examples: Sequence[PreferenceExample]) -> Sequence[PreferenceExample]:
        """See `Objective`. Raises DataError when `margin_loss` is set and an example has no margin."""
        missing = [example.example_id for example in examples if self.margin_loss and example.margin is None]
        if missing:
            message = f"{len(missing)} of {len(examples)} pairs have no margin, {missing[0]} among them"
            raise DataError(message, hint="give ``margin_key`` the key of the margins, or drop ``margin_loss``")
        return examples

    def lengths(self, item: PreferenceExample) -> Sequence[int]:
        return item.chosen.num_tokens, item.rejected.num_tokens

    def num_trained_tokens(self, item: PreferenceExample) -> int:
        """See `Objective`. The loss has one score at the end of each of the two sequences."""
        return 2

    def loss(self, engine: TrainEngine, items: Sequence[PreferenceExample], denominators: Denominators) -> LossShare:
        """See `Objective`.

        Metrics: `rm/loss`, `rm/accuracy` (a tie counts one half), `rm/margin` (chosen minus rejected score), and the
        means of all scores and of their squares, `rm/score` and `rm/squared_score`.
        """
        answers = [item.chosen for item in items] + [item.rejected for item in items]
        scores = engine.forward(lay_out(self, answers, engine.device))
        chosen, rejected = scores.chunk(2)
        margins = None
        if self.margin_loss:
            margins = torch.tensor([item.margin for item in items], dtype=scores.dtype, device=engine.device)
        losses = reward_model_loss(chosen, rejected, margins)
        order = {"accuracy": num_ordered(chosen, rejected), "margin": (chosen - rejected).sum()}
        metrics = mean_metrics("rm", len(items), loss=losses.sum(), **order)
        precise = scores.double()
        moments = mean_metrics("rm", len(scores), score=precise.sum(), squared_score=precise.square().sum())
        return sequence_mean(losses, denominators), metrics | moments
