"""Prompts drawn by their pass rates: probabilities, visits, retirement and draws, against values by hand."""

import math
from collections import Counter

import numpy as np
import pytest

from rlhf_data.errors import CheckpointError, ConfigError
from rlhf_data.records import VerdictKind
from rlhf_data.sampler import EpochSampler
from rlhf_train.generation.difficulty import DifficultyPool, DifficultySpec, draw_probabilities
from rlhf_train.run.saved.state import read_state, write_state

NAN = math.nan
KINDS = {kind.value[0]: kind for kind in VerdictKind if kind is not VerdictKind.UNSCORED}


@pytest.mark.parametrize(
    ("rates", "target", "uniform", "expected"),
    [
        ([0.0, 0.25, 0.5, 1.0], 0.5, 0.0, [0, 1 / 3, 2 / 3, 0]),  # weights 0, 1/2, 1, 0
        ([0.0, 0.25, 0.5, 1.0], 0.5, 0.6, [0.15, 0.15 + 0.4 / 3, 0.15 + 0.8 / 3, 0.15]),
        ([0.0, 0.25, 0.5, 1.0], 0.5, 1.0, [0.25] * 4),
        ([NAN, 0.5, 0.75], 0.5, 0.0, [0.4, 0.4, 0.2]),  # an unseen prompt is like one at the target
        ([NAN, NAN], 0.3, 0.2, [0.5, 0.5]),
        ([0.0, 0.5, 1.0], 0.0, 0.0, [2 / 3, 1 / 3, 0]),  # Kimi k1.5: 1 - p
        ([0.0, 0.5, 1.0], 1.0, 0.0, [0, 1 / 3, 2 / 3]),
        ([0.0, 0.25, 1.0], 0.25, 0.0, [0.4, 0.6, 0]),  # weights 2/3, 1, 0
        ([0.5, 0.5, 0.5, 0.5], 0.2, 0.1, [0.25] * 4),  # ties
        ([0.0, 1.0], 0.5, 0.3, [0.5, 0.5]),  # all weights are 0
        ([0.7], 0.5, 0.0, [1.0]),
    ],
)
def test_probabilities_by_hand(rates, target, uniform, expected):
    found = draw_probabilities(np.array(rates), target=target, uniform_share=uniform)
    assert found == pytest.approx(expected) and found.sum() == pytest.approx(1)


def pool(num_items, seed=1, **settings):
    return DifficultyPool(num_items, DifficultySpec(**settings), seed=seed)


def kinds(letters):
    """Return verdicts by their first letters: ok, wrong, unparsable, timeout, crash, abstained."""
    return [KINDS[letter] for letter in letters]


def visit(drawn_by, *visits):
    """Note visits as (item, verdicts), and settle them."""
    for number, (item, letters) in enumerate(visits):
        drawn_by.observe(number, item, kinds(letters))
    return drawn_by.settle()


@pytest.mark.parametrize(
    ("verdicts", "rate"),
    [("owwo", 0.5), ("ouww", 0.25), ("o", 1), ("tcaow", 0.5), ("ooc", 1), ("w", 0), ("tca", None), ("", None)],
)
def test_pass_rates_by_hand(verdicts, rate):
    metrics, notices = visit(pool(2), (1, verdicts))
    seen = {} if rate is None else {"pool/mean_pass_rate": rate}
    assert metrics == {"pool/solved": 0, "pool/unseen": 1 if rate is None else 0.5, **seen} and notices == []


def test_visits_move_the_pass_rate_half_of_the_way_in_the_order_of_the_draws():
    one = pool(2)
    for number, letters in ((9, "oo"), (7, "ww"), (8, "ow")):
        one.observe(number, 0, kinds(letters))
    assert one.settle()[0]["pool/mean_pass_rate"] == 0.625  # first 0, then half of the way to 0.5, and to 1
    assert visit(one, (0, "oo"), (1, "owww"))[0]["pool/mean_pass_rate"] == (0.8125 + 0.25) / 2


def test_prompt_is_retired_by_visits_solved_in_a_row_and_returns_with_the_next_episode():
    one = pool(4, pool_retire_visits=2, pool_uniform_share=1.0)
    one.take(2)
    assert visit(one, (0, "oo"), (1, "oo"))[0]["pool/solved"] == 0
    assert visit(one, (0, "oo"), (1, "ow"))[0]["pool/solved"] == 0.25
    assert 0 not in one.take(1)
    assert visit(one, (1, "oo"))[0]["pool/solved"] == 0.25  # the miss has broken its row
    assert sorted(one.take(1).tolist() + one.take(2).tolist()) == [1, 2, 3]  # the fourth draw ends the episode
    one.settle()
    assert sorted(one.take(4).tolist()) == [0, 1, 2, 3]
    one.settle()
    assert visit(one, (0, "ow"))[0]["pool/solved"] == 0
    assert visit(one, (0, "oo"), (2, "oo"), (2, "oo"))[0]["pool/solved"] == 0.25
    one.take(4)
    assert visit(one)[0]["pool/solved"] == 0.25
    assert visit(one, (2, "oo"))[0]["pool/solved"] == 0.25  # one more visit retires it again


def test_all_prompts_return_when_all_are_solved_with_a_notice():
    one = pool(3, pool_retire_visits=1)
    metrics, notices = visit(one, *[(item, "oo") for item in range(3)])
    assert metrics == {"pool/solved": 1, "pool/unseen": 0, "pool/mean_pass_rate": 1}
    assert notices == ["all 3 prompts are solved: they are drawn again"]
    assert sorted(one.take(3).tolist()) == [0, 1, 2]
    assert visit(one, (1, "o"))[1] == []


def test_draws_follow_the_probabilities():
    """First and second draws without replacement; 4,000 orders, whose shares deviate by 0.008."""
    # 0.2 / 4 each, and 0.8 in proportion to the weights 0, 1/2, 1 and 0.
    expected = np.array([0.05, 0.05 + 0.8 / 3, 0.05 + 1.6 / 3, 0.05])
    one = pool(4, pool_uniform_share=0.2, pool_retire_visits=9)
    visit(one, (0, "w"), (1, "owww"), (2, "ow"), (3, "o"))
    first, second = Counter(), Counter()
    for _ in range(4000):
        drawn = one.take(2).tolist()
        first[drawn[0]] += 1
        second[drawn[1]] += 1
        one.settle()
    assert [first[item] / 4000 for item in range(4)] == pytest.approx(expected, abs=0.03)
    after = [sum(expected[i] * expected[j] / (1 - expected[i]) for i in range(4) if i != j) for j in range(4)]
    assert [second[item] / 4000 for item in range(4)] == pytest.approx(after, abs=0.03)


def test_no_prompt_is_drawn_twice_while_others_are_left_and_impossible_ones_come_last():
    one = pool(6, pool_uniform_share=0.0)
    assert visit(one, (4, "w"), (5, "o"))[1] == []
    orders = [one.take(6).tolist() for _ in range(20)]
    assert all(sorted(order) == [0, 1, 2, 3, 4, 5] for order in orders)
    assert {tuple(order[4:]) for order in orders} == {(4, 5), (5, 4)}
    assert pool(6, seed=2).take(6).tolist() != pool(6, seed=3).take(6).tolist()


def test_saved_pool_goes_on_with_the_same_draws(tmp_path):
    """From the middle of a step, with visits that are not settled, and over several episodes."""
    draws = []
    for is_saved in (False, True):
        one = pool(50)
        for step in range(30):
            for number in range(7):
                item = int(one.take(1)[0])
                one.observe(number, item, kinds("wo" if item % 3 else "oo"))
                if is_saved and number == step % 7:
                    (folder := tmp_path / str(step)).mkdir()
                    state = one.state_dict()
                    visit(one, *[(other, "w") for other in range(50)])  # which the state does not have
                    write_state(folder, state)
                    one = pool(50)
                    one.load_state_dict(read_state(folder))
            one.settle()
        draws.append(one.take(20).tolist())
    assert draws[0] == draws[1]


@pytest.mark.parametrize("other", [pool(9), pool(10, seed=2), EpochSampler(10, 1, seed=1)])
def test_pool_of_another_run_is_refused(other):
    with pytest.raises(CheckpointError, match="the saved order has"):
        pool(10).load_state_dict(other.state_dict())
    with pytest.raises(CheckpointError, match="the saved order has"):
        EpochSampler(9, 1, seed=1).load_state_dict(pool(9).state_dict())


@pytest.mark.parametrize("settings", [{"target_pass_rate": 1.5}, {"pool_uniform_share": -1}, {"pool_retire_visits": 0}])
def test_settings_out_of_bounds_are_refused(settings):
    with pytest.raises(ConfigError, match="hint: use ``"):
        DifficultySpec(**settings)


def test_response_without_a_scorer_is_no_visit():
    one = pool(2)
    one.observe(0, 0, [VerdictKind.UNSCORED])
    assert one.settle()[0] == {"pool/solved": 0, "pool/unseen": 1}


@pytest.mark.parametrize("num_solved", [3, 4])
def test_run_that_continues_with_fewer_visits_retires_at_once_and_draws_all_if_none_is_left(num_solved):
    saved = pool(4, pool_retire_visits=3)
    for _ in range(2):
        visit(saved, *[(item, "o") for item in range(num_solved)])
    saved.take(2)  # in the middle of a step, as in an asynchronous run
    one = pool(4, pool_retire_visits=2)
    one.load_state_dict(saved.state_dict())
    one.take(2)  # what may be left of that order
    assert sorted(one.take(4).tolist()) == ([3] * 4 if num_solved == 3 else [0, 1, 2, 3])
