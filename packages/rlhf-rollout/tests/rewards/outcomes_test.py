"""How long scoring took: the seconds of a verdict run from the first call to the one that gave it."""

import asyncio
from types import SimpleNamespace

import pytest

from rlhf_data.records import VerdictKind
from rlhf_rollout.rewards.outcomes import Failure, judge
from rlhf_rollout.rewards.user_function import Scored
from simulated import now, simulate


@pytest.fixture
def judged(monkeypatch):
    """Return a function that judges two samples by a simulated clock."""
    monkeypatch.setattr("rlhf_rollout.rewards.outcomes.time", SimpleNamespace(monotonic=now))
    return lambda ask: simulate(judge("ab", ask))


def test_judge_one_call_gives_every_sample_its_seconds(judged):
    async def ask(samples, failure):
        await asyncio.sleep(0.05)
        return Scored([1.0] * len(samples), [1.0] * len(samples), {}, [None] * len(samples))

    verdicts = judged(ask)
    assert [verdict.reward for verdict in verdicts] == [1.0, 1.0]
    assert verdicts[0].seconds == verdicts[1].seconds
    assert verdicts[0].seconds == pytest.approx(0.05)


def test_judge_samples_called_again_carry_the_failed_call_too(judged):
    async def ask(samples, failure):
        await asyncio.sleep(0.2 if failure is None else 0.05 if samples[0] == "a" else 0.3)
        if failure is None or samples[0] == "b":
            return Failure(VerdictKind.CRASH, "boom")
        return Scored([1.0], [1.0], {}, [None])

    good, bad = judged(ask)
    assert (good.kind, bad.kind) == (VerdictKind.OK, VerdictKind.CRASH)
    assert (good.seconds, bad.seconds) == (pytest.approx(0.25), pytest.approx(0.5))
