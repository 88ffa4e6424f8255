"""The order: every item once per epoch, full batches, the same from one seed, resumable anywhere."""

import json

import pytest

from rlhf_data.errors import CheckpointError, ConfigError
from rlhf_data.sampler import EpochSampler


def take(sampler, num_batches):
    return [sampler.next_batch().tolist() for _ in range(num_batches)]


def draw(sampler, num_batches):
    return [index for batch in take(sampler, num_batches) for index in batch]


def test_epoch_sampler_epoch_holds_every_item_once_and_orders_differ():
    sampler = EpochSampler(10, 5, seed=3)
    first, second = draw(sampler, 2), draw(sampler, 2)
    assert sorted(first) == sorted(second) == list(range(10))
    assert first != second
    assert first != list(range(10))


def test_epoch_sampler_partial_batch_wraps_into_the_next_epoch():
    # 5 items, batches of 3: [0 1 2] [3 4 | 0] [1 2 3] [4 | 0 1] ...
    sampler = EpochSampler(5, 3, shuffle=False)
    assert take(sampler, 4) == [[0, 1, 2], [3, 4, 0], [1, 2, 3], [4, 0, 1]]
    assert sampler.num_seen == 12


def test_epoch_sampler_shuffled_batches_across_epochs_use_every_item_equally():
    # 15 draws of 5 items are three whole epochs.
    drawn = draw(EpochSampler(5, 3, seed=1), 5)
    assert [drawn.count(item) for item in range(5)] == [3] * 5


def test_epoch_sampler_batch_larger_than_the_data_set_is_full():
    assert take(EpochSampler(2, 5, shuffle=False), 2) == [[0, 1, 0, 1, 0], [1, 0, 1, 0, 1]]


def test_epoch_sampler_same_seed_same_order_other_seed_other_order():
    assert take(EpochSampler(50, 7, seed=1), 9) == take(EpochSampler(50, 7, seed=1), 9)
    assert take(EpochSampler(50, 7, seed=1), 9) != take(EpochSampler(50, 7, seed=2), 9)


@pytest.mark.parametrize("num_batches", [0, 1, 3, 4, 7])
def test_epoch_sampler_resumes_to_the_exact_item(num_batches):
    whole = EpochSampler(10, 3, seed=5)
    take(whole, num_batches)
    resumed = EpochSampler(10, 3, seed=5)
    resumed.load_state_dict(json.loads(json.dumps(whole.state_dict())))
    assert take(resumed, 6) == take(whole, 6)


def test_epoch_sampler_resumes_with_another_batch_size_at_the_same_item():
    sampler = EpochSampler(5, 3, shuffle=False)
    take(sampler, 1)
    other = EpochSampler(5, 2, shuffle=False)
    other.load_state_dict(sampler.state_dict())
    assert take(other, 1) == [[3, 4]]


@pytest.mark.parametrize("other", [EpochSampler(9, 3), EpochSampler(10, 3, seed=1), EpochSampler(10, 3, shuffle=False)])
def test_epoch_sampler_state_of_another_order_is_refused(other):
    with pytest.raises(CheckpointError, match=r"the saved order has .*\n\nhint: resume with"):
        EpochSampler(10, 3).load_state_dict(other.state_dict())


def test_epoch_sampler_impossible_sizes_are_refused():
    for arguments in [(0, 1), (1, 0)]:
        with pytest.raises(ConfigError, match="must be at least 1"):
            EpochSampler(*arguments)
    with pytest.raises(ConfigError, match="must not be negative, got -1"):
        EpochSampler(1, 1, seed=-1)
