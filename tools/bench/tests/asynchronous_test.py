"""The report of the asynchronous benchmark: ratios, standard errors, and which goals are missed."""

import math
from dataclasses import replace

import pytest

from sim.costs import MeasuredRun
from sim.model import Costs, Group
from workloads.asynchronous import asynchronous
from workloads.asynchronous.two_sides import engine_spans, learner_spans


def figures(samples_per_s, after, **more):
    return {"samples_per_s": samples_per_s, "accuracy_before": 0.2, "accuracy_after": after, **more}


def test_standard_error_is_the_larger_estimate():
    # All agree: sqrt(0.5 x 0.5 / 400) of 2 x 200 answers. Far apart: a deviation of 0.1 x sqrt(2), over sqrt(2) seeds.
    assert asynchronous.standard_error([0.5, 0.5], 200) == pytest.approx(0.025)
    assert asynchronous.standard_error([0.4, 0.6], 200) == pytest.approx(0.1)
    assert asynchronous.standard_error([0.5], 100) == pytest.approx(0.05)


def test_summary_compares_seed_by_seed():
    modes = asynchronous.summary(
        {
            "synchronous": [figures(10.0, 0.5), figures(20.0, 0.5)],
            "staleness_1": [figures(20.0, 0.6, predicted=21.0), figures(24.0, 0.6, predicted=24.0)],
        },
        num_answers=200,
    )
    assert modes["synchronous"]["ratio"] == 1.0
    one = modes["staleness_1"]
    assert one["ratios"] == [2.0, 1.2] and one["ratio"] == pytest.approx(1.6)
    assert one["accuracy_difference"] == pytest.approx(0.1)
    assert one["difference_standard_error"] == pytest.approx(math.sqrt(0.25 / 400 + 0.24 / 400))
    assert one["prediction_error"] == pytest.approx(45 / 44 - 1)


@pytest.mark.parametrize(
    ("ratio", "after", "predicted", "words"),
    [
        (1.31, 0.53, 1.4, []),
        (1.29, 0.53, 1.3, ["1.29 times"]),
        (1.31, 0.35, 1.4, ["accuracy differs by -0.150"]),
        (1.31, 0.65, 1.4, ["accuracy differs by +0.150"]),
        (1.31, 0.5, 1.45, ["prediction is off"]),
        (1.29, 0.65, 1.0, ["1.29 times", "accuracy differs", "prediction is off"]),
    ],
)
def test_missed_goals_are_named(ratio, after, predicted, words):
    runs = {"synchronous": [figures(1.0, 0.5)], "staleness_1": [figures(ratio, after, predicted=predicted)]}
    found = asynchronous.missed(asynchronous.summary(runs, num_answers=200))
    assert len(found) == len(words)
    assert all(word in text for word, text in zip(words, found, strict=True))


def test_slowdown_is_fitted_to_a_run():
    costs = Costs(decode_step_s=0.002, decode_token_s=1.25e-4, train_token_s=1e-4, train_batch_s=0.05, sync_s=0.03)
    # Lengths with a long tail, in an order without a pattern.
    groups = [Group(16, tuple(2 ** ((7 * index + 3 * sample) % 9) for sample in range(4))) for index in range(320)]
    steps = tuple(tuple(groups[start : start + 16]) for start in range(0, 320, 16))
    run = MeasuredRun(costs, steps, num_engines=1, slots=64, batch_size=16)
    slower = {
        staleness: asynchronous.predict(replace(costs, slowdown=1.4), run, staleness, "keep") for staleness in (1, 4)
    }
    assert slower[4] < asynchronous.predict(costs, run, 4, "keep")
    assert asynchronous.fit_slowdown(costs, run, "keep", slower).slowdown == pytest.approx(1.4, abs=0.021)


def test_learner_spans_join_phases_and_leave_out_waiting():
    phases = [(0.0, "generate"), (2.0, "load"), (2.5, "train"), (4.0, "sync"), (4.5, "generate"), (6.0, "write")]
    assert learner_spans(phases, end=6.5) == [(2.0, 4.0, "training"), (4.0, 4.5, "weights"), (6.0, 6.5, "other")]


def test_engine_spans_are_where_a_core_is_used():
    # A sample says what was used since the one before it.
    load = [(0.0, 0.0), (0.1, 0.9), (0.2, 0.8), (0.3, 0.1), (0.4, 1.0)]
    assert engine_spans(load) == [(0.0, pytest.approx(0.2), "generating"), (0.3, 0.4, "generating")]
