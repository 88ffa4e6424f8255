"""What the report of an online run says of a step."""

import math
from contextlib import nullcontext
from types import SimpleNamespace

import pytest

from rlhf_train.report import Report
from rlhf_train.run.timeline import STEP


class Seen:
    """A recorder and an observer that keep what they are told."""

    def __init__(self):
        self.warnings, self.steps = [], []

    def warning(self, text):
        self.warnings.append(text)

    def step(self, step, *rest):
        self.steps.append((step, dict(rest[-1])))


def reported(gaps):
    """The warnings of a run whose steps have these differences between engine and trainer."""
    seen = Seen()
    passing = {"phase": lambda name: nullcontext(), "end_part": lambda name: None}
    timeline = SimpleNamespace(take=lambda: {STEP: 1.0}, **passing)
    report = Report(seen, seen, timeline, len(gaps))
    for step, gap in enumerate(gaps, start=1):
        report.add({} if gap is None else {"mismatch/logprob_gap_mean": gap})
        report.step(step, {})
    assert [step for step, _ in seen.steps] == [step for step in range(1, len(gaps) + 1) for _ in range(2)]
    return seen.warnings


@pytest.mark.parametrize("gaps", [[0.045, 0.9], [None, 0.3, 2.0], [None]])
def test_engine_that_rounds_otherwise_is_no_warning(gaps):
    assert reported(gaps) == []


@pytest.mark.parametrize("gap", [2.03, math.nan])
def test_engine_that_computes_another_model_is_a_warning_once(gap):
    (warning,) = reported([None, gap, gap])
    assert f"differ from the trainer's by {gap:.2g} nats" in warning
    assert "hint: " in warning
