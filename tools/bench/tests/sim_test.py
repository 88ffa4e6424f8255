"""The simulator agrees with times worked out by hand, and loses no group."""

import itertools
import random
from collections import deque
from dataclasses import replace

import pytest

from sim.model import Costs, Group, Layout, simulate

TEN = [Group(1, (10,))]
STEP = Costs(decode_step_s=1.0, train_batch_s=4.0, sync_s=1.0)


def tailed_groups(number, samples, seed):
    """Return groups with responses of 20 tokens in the median and up to 400, of log-normal lengths."""
    rng = random.Random(seed)
    lengths = iter(lambda: min(max(round(rng.lognormvariate(3.0, 0.9)), 1), 400), None)
    return [Group(8, tuple(itertools.islice(lengths, samples))) for _ in range(number)]


def seconds(groups, num_steps=1, costs=STEP, **layout):
    return simulate(costs, Layout(**layout), groups, num_steps).seconds


def test_synchronous_step_is_the_sum_of_its_phases():
    # 10 tokens of 1 s, 4 s of training, 1 s of weights.
    assert seconds(TEN, 1) == pytest.approx(15)
    assert seconds(TEN, 4) == pytest.approx(60)


@pytest.mark.parametrize(
    ("at_update", "ends"),
    [
        # Two groups start at 0 and end at 10. The first is trained from 10 to 14; the third starts with the new weights
        # at 15, beside the training of the second until 19. Halted until 20, the third ends at 26 and the fourth, begun
        # at 20, at 30; batches three and four are trained until 30 and 35, each with 1 s for the weights.
        ("keep", [15, 20, 31, 36]),
        # Before the weights of the second batch come, the third group has to end, at 25; likewise the fourth at 36.
        ("drain", [15, 26, 37, 42]),
        # What is written is kept, too.
        ("restart", [15, 20, 31, 36]),
    ],
)
def test_staleness_of_one_by_hand(at_update, ends):
    whole = simulate(STEP, Layout(max_staleness=1, at_update=at_update), TEN, 4)
    assert whole.seconds == pytest.approx(ends[-1])
    assert whole.ends == pytest.approx(ends)
    assert whole.batches == ((0,), (1,), (2,), (3,))
    assert whole.staleness_mean == 0.75 and whole.staleness_max == 1  # all but the first wait for one batch
    assert whole.training_idle == pytest.approx(1 - 16 / ends[-1])


def test_slow_group_lets_others_go_first_until_its_last_batch():
    # Batches of one, staleness 2: groups 0 to 2 start with 30, 2 and 2 tokens, so that 1 and 2 are trained first, from
    # 2 to 6 and from 7 to 11. Group 0 has run for 28 s at 30, 2 s of 30 halted: it ends at 32 and is trained until 36.
    groups = [Group(1, (30,)), Group(1, (2,)), Group(1, (2,))]
    found = simulate(STEP, Layout(max_staleness=2, at_update="keep"), groups, 3)
    assert found.batches == ((1,), (2,), (0,))
    assert found.seconds == pytest.approx(37)


def test_groups_that_would_leave_too_few_places_wait():
    # Staleness 1, batches of one: group 0 of 30 tokens has to be in one of the first two batches, and so has group 1.
    # Group 2, admitted after the first batch, is complete first, but has to let group 0 go ahead.
    groups = [Group(1, (30,)), Group(1, (2,)), Group(1, (2,)), Group(1, (2,))]
    found = simulate(STEP, Layout(max_staleness=1, at_update="keep"), groups, 4)
    assert found.batches == ((1,), (0,), (2,), (3,))


def test_decode_step_depends_on_what_runs():
    # Two tokens of both at 2 s, then two more of one at 1 s; then training and weights.
    costs = Costs(decode_token_s=1.0, train_batch_s=4.0, sync_s=1.0)
    assert seconds([Group(1, (2, 4))], costs=costs) == pytest.approx(6 + 5)


def test_prefill_halts_once_per_prompt():
    costs = Costs(decode_step_s=1.0, train_token_s=0.1, prefill_token_s=0.5)
    # 5 s for 10 prompt tokens, 4 decode steps; training: two samples of 10 + 4 tokens.
    assert seconds([Group(10, (4, 4))], costs=costs) == pytest.approx(5 + 4 + 2.8)
    # Two trainers share the tokens.
    assert seconds([Group(10, (4, 4))], costs=costs, num_trainers=2) == pytest.approx(5 + 4 + 1.4)


def test_engines_are_slower_while_the_learner_trains():
    # Two groups run from 0 to 10; the third starts at 15, has 2 of its 10 tokens at 19, when the training of the second
    # ends, is halted until 20, and ends at 28; the fourth starts at 20 and has 8 tokens at 28. Until 32 it gets the two
    # others; it is trained after the weights, from 33 to 37.
    costs = replace(STEP, slowdown=2.0)
    assert seconds(TEN, 4, costs, max_staleness=1, at_update="keep") == pytest.approx(38)
    assert seconds(TEN, 4, costs) == pytest.approx(60)  # nothing runs beside training


def test_training_that_begins_beside_generation_is_slower():
    # Training of 4 s takes 6 s beside generation. The third group starts at 15, beside the training of the second until
    # 21, is halted until 22, and ends at 26. It is trained until 32 beside the fourth, which runs from 22 to 32 and is
    # trained alone, from 33 to 37.
    costs = replace(STEP, train_slowdown=1.5)
    found = simulate(costs, Layout(max_staleness=1, at_update="keep"), TEN, 4)
    assert found.ends == pytest.approx([15, 22, 33, 38])
    assert seconds(TEN, 4, costs) == pytest.approx(60)  # nothing runs beside training


def test_engine_equals_one_that_counts_token_by_token():
    rng = random.Random(1)
    for _ in range(20):
        slots = rng.randint(1, 6)
        lengths = [rng.randint(1, 12) for _ in range(rng.randint(1, 20))]
        waiting, running, expected = deque(lengths), [], 0.0
        while waiting or running:
            while waiting and len(running) < slots:
                running.append(waiting.popleft())
            expected += 0.5 + 0.25 * len(running)
            running = [left - 1 for left in running if left > 1]
        costs = Costs(decode_step_s=0.5, decode_token_s=0.25)
        groups = [Group(1, (length,)) for length in lengths]
        assert seconds(groups, costs=costs, slots=slots, batch_size=len(groups)) == pytest.approx(expected)


COSTS = Costs(
    decode_step_s=0.01, decode_token_s=3e-4, train_token_s=1e-3, train_batch_s=0.2, prefill_token_s=1e-4, sync_s=0.1
)


@pytest.mark.parametrize("at_update", ["drain", "keep", "restart"])
@pytest.mark.parametrize("max_staleness", [0, 1, 2, 5])
def test_every_group_is_trained_once_and_in_time(at_update, max_staleness):
    for seed in range(6):
        rng = random.Random(seed)
        groups = tailed_groups(200, rng.randint(1, 4), seed)
        layout = Layout(
            num_engines=rng.randint(1, 3),
            slots=rng.choice([2, 8, 64]),
            batch_size=rng.randint(1, 6),
            max_staleness=max_staleness,
            at_update=at_update,
        )
        found = simulate(COSTS, layout, groups, 15)
        assert sorted(index for batch in found.batches for index in batch) == list(range(15 * layout.batch_size))
        assert {len(batch) for batch in found.batches} == {layout.batch_size}
        assert found.staleness_max <= max_staleness
        assert found.samples_per_s == pytest.approx(15 * layout.batch_size * len(groups[0].lengths) / found.seconds)
        assert 0 <= found.generation_idle < 1 and 0 <= found.training_idle < 1


def test_more_staleness_is_never_slower_where_nothing_is_thrown_away():
    for seed in range(5):
        groups = tailed_groups(400, 4, seed)
        times = [
            seconds(groups, 30, COSTS, slots=32, batch_size=8, max_staleness=bound, at_update="keep")
            for bound in (0, 1, 2, 4, 8)
        ]
        assert times == sorted(times, reverse=True)
        assert times[-1] < 0.8 * times[0]
