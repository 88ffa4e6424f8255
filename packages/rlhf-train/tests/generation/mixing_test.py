"""Sources whose shares follow pass rates: shares, draws and checkpoints, against values by hand."""

from collections import Counter

import numpy as np
import pytest

from rlhf_data.errors import CheckpointError, ConfigError
from rlhf_data.records import VerdictKind
from rlhf_train.generation.difficulty import DifficultyPool, DifficultySpec
from rlhf_train.generation.mixing import MixSpec, SourceMix, source_shares
from rlhf_train.run.saved.state import read_state, write_state

SOURCES = ["easy", "hard/a"] * 8
KINDS = {"o": VerdictKind.OK, "w": VerdictKind.WRONG, "t": VerdictKind.TIMEOUT}


@pytest.mark.parametrize(
    ("learnability", "visits", "temperature", "expected"),
    [
        ([0, 0], [0, 0], 0.1, [0.5, 0.5]),
        ([0.8, 0.6], [9, 9], 0.1, [0.8808, 0.1192]),  # equal visits: 1 / (1 + e^-2)
        ([0.8, 0.6], [9, 9], 1e9, [0.5, 0.5]),
        # sqrt(2 ln 21 / 20) = 0.5518 and sqrt(2 ln 21 / 2) = 1.7449: 1 / (1 + e^-((1.7449 - 1.5518) / 0.5))
        ([1, 0], [19, 1], 0.5, [0.4047, 0.5953]),
        ([0.9, 0.9, 0], [10**9] * 3, 1e-3, [0.5, 0.5, 0]),  # a cold softmax has no overflow
    ],
)
def test_shares_by_hand(learnability, visits, temperature, expected):
    found = source_shares(np.array(learnability, float), np.array(visits), temperature=temperature)
    assert found == pytest.approx(expected, abs=1e-4)


def mix(seed=1, sources=SOURCES, **settings):
    return SourceMix(sources, MixSpec(**settings), seed=seed)


def visit(drawn_by, *visits):
    """Note visits as (item, verdicts), and settle them."""
    for number, (item, letters) in enumerate(visits):
        drawn_by.observe(number, item, [KINDS[letter] for letter in letters])
    return drawn_by.settle()


def test_draws_have_the_shares_and_each_source_goes_through_all_its_prompts():
    one = mix()
    first = one.take(16).tolist()
    assert sorted(first) == list(range(16)) and [item % 2 for item in first] == [0, 1] * 8
    assert first[::2] != sorted(first[::2]) and one.num_seen == 16
    # Pass rates 1/2 and 1: L is 1 and 0, 4 visits each. The shares are 1 / (1 + e^-1) at the temperature 1.
    one = mix(mix_temperature=1.0)
    metrics, notices = visit(one, *[(0, "ow"), (1, "oo")] * 4)
    assert metrics == {
        "mix/share_easy": 0.5,
        "mix/share_hard_a": 0.5,
        "mix/pass_rate_easy": 0.5,
        "mix/pass_rate_hard_a": 1,
    }
    assert notices == []
    drawn = Counter(SOURCES[item] for count in (1, 2, 7, 100, 890) for item in one.take(count))
    assert drawn["easy"] == pytest.approx(1000 * 0.731059, abs=1)
    assert one.settle()[0]["mix/share_easy"] == pytest.approx(0.731059, abs=1e-6)


def test_newest_visits_in_the_order_of_the_draws_count_and_failures_do_not():
    one = mix(mix_window=2)
    for number, letters in ((9, "oo"), (8, "ow"), (7, "ww"), (6, "oo"), (5, "tt")):
        one.observe(number, 0, [KINDS[letter] for letter in letters])
    metrics, _ = one.settle()
    assert metrics["mix/pass_rate_easy"] == 0.75 and "mix/pass_rate_hard_a" not in metrics
    # Four visits: 1/2 + sqrt(2 ln 5 / 5) = 1.3024, and sqrt(2 ln 5) = 1.7941 for the source without any.
    assert one.settle()[0]["mix/share_easy"] == pytest.approx(1 / (1 + np.exp(4.917)), abs=1e-5)


def test_saved_mix_goes_on_with_the_same_draws(tmp_path):
    """From the middle of a step, with visits that are not settled, and over several epochs of a source."""
    draws = []
    for is_saved in (False, True):
        one = mix(mix_window=20)
        taken = []
        for step in range(20):
            for number in range(7):
                taken += [item := int(one.take(1)[0])]
                one.observe(number, item, [KINDS[letter] for letter in ("ow" if item % 3 else "oo")])
                if is_saved and number == step % 7:
                    (folder := tmp_path / str(step)).mkdir()
                    state = one.state_dict()
                    visit(one, *[(other, "w") for other in range(16)])  # which the state does not have
                    one.take(3)
                    write_state(folder, state)
                    one = mix(mix_window=20)
                    one.load_state_dict(read_state(folder))
            one.settle()
        draws.append(taken)
    assert draws[0] == draws[1]


@pytest.mark.parametrize(
    "other", [mix(seed=2), mix(sources=["easy"] * 9 + ["hard/a"] * 7), DifficultyPool(16, DifficultySpec(), seed=1)]
)
def test_mix_of_another_run_is_refused(other):
    with pytest.raises(CheckpointError, match="the saved order has"):
        mix().load_state_dict(other.state_dict())


@pytest.mark.parametrize("settings", [{"mix_temperature": 0}, {"mix_window": 0}])
def test_settings_out_of_bounds_are_refused(settings):
    with pytest.raises(ConfigError, match="hint: use ``"):
        MixSpec(**settings)
