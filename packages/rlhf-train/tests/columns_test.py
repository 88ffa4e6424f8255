"""The flags of rollouts in columns; `records_test` checks the numbers of their tokens."""

import dataclasses

from rlhf_data.records import FinishReason
from rlhf_train.columns import RolloutColumns
from trainer_testing import random_rollouts


def test_only_rollouts_that_the_length_limit_ended_are_truncated():
    reasons = [FinishReason.LENGTH, FinishReason.STOP, FinishReason.STOP, FinishReason.LENGTH]
    drawn = random_rollouts(4, vocab_size=32)
    rollouts = [dataclasses.replace(one, finish_reason=reason) for one, reason in zip(drawn, reasons, strict=True)]
    columns = RolloutColumns.of(rollouts, [0.0] * 4)
    assert columns.truncated.tolist() == [True, False, False, True]
    assert columns.rollout_ids == tuple(one.rollout_id for one in drawn)
