"""The flags and routes of rollouts in columns; `records_test` checks the numbers of their tokens."""

import dataclasses
from types import SimpleNamespace

import numpy as np
import pytest

from rlhf_data.errors import DataError
from rlhf_data.records import FinishReason
from rlhf_train.learning.columns import RolloutColumns
from rlhf_train.learning.experience import Experience
from rlhf_train.learning.micro_batches import read_ahead
from trainer_testing import random_rollouts, with_routes


def test_only_rollouts_that_the_length_limit_ended_are_truncated():
    reasons = [FinishReason.LENGTH, FinishReason.STOP, FinishReason.STOP, FinishReason.LENGTH]
    drawn = random_rollouts(4, vocab_size=32)
    rollouts = [dataclasses.replace(one, finish_reason=reason) for one, reason in zip(drawn, reasons, strict=True)]
    columns = RolloutColumns.of(rollouts, [0.0] * 4)
    assert columns.truncated.tolist() == [True, False, False, True]
    assert columns.rollout_ids == tuple(one.rollout_id for one in drawn)


def test_images_of_a_pass_are_asked_for_while_the_one_before_is_computed():
    asked = []
    reader = SimpleNamespace(read_ahead=asked.extend)
    experience = SimpleNamespace(images=(("a",), ("b", "c"), (), ("d",)))
    seen = [(rows, list(asked)) for rows in read_ahead(reader, experience, [(1, 0), (2,), (3,)])]
    assert [rows for rows, _ in seen] == [(1, 0), (2,), (3,)]
    assert [names[-3:] for _, names in seen] == [["b", "c", "a"], ["c", "a", "d"], ["a", "d", "d"]]
    assert list(read_ahead(None, experience, [(0,)])) == [(0,)]


def test_routes_come_back_rollout_by_rollout():
    rollouts = with_routes(random_rollouts(7, vocab_size=32), layers=3)
    columns = RolloutColumns.of(rollouts, [0.0] * 7, with_routes=True)
    assert columns.num_routed.tolist() == [0, *(len(one.routes) for one in rollouts[1:])]
    assert columns.routes.dtype == np.uint8
    experience = Experience(columns)
    assert len(experience.routes) == 7 and experience.routes[0].shape == (0, 3, 2)
    for found, rollout in zip(experience.routes[1:], rollouts[1:], strict=True):
        assert found.tolist() == rollout.routes.tolist()


@pytest.mark.parametrize("asked", [False, True])
def test_no_routes_travel_unless_there_are_some_and_they_are_asked_for(asked):
    rollouts = random_rollouts(4, vocab_size=32)
    columns = RolloutColumns.of(rollouts if asked else with_routes(rollouts), [0.0] * 4, with_routes=asked)
    assert columns.routes is None and columns.num_routed.tolist() == [0] * 4
    assert Experience(columns).routes is None


def test_routes_of_different_models_are_refused():
    rollouts = with_routes(random_rollouts(3, vocab_size=32)) + with_routes(random_rollouts(3, vocab_size=32), layers=3)
    with pytest.raises(DataError, match=r"routes of different models, \[layers, top_k\] = \[\(2, 2\), \(3, 2\)\]"):
        RolloutColumns.of(rollouts, [0.0] * 6, with_routes=True)
