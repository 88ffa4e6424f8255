"""How long scoring took: the seconds of a verdict run from the first call to the one that gave it."""

import asyncio

from rlhf_data.records import VerdictKind
from rlhf_rollout.rewards.outcomes import Failure, judge
from rlhf_rollout.rewards.user_function import Scored


def test_judge_one_call_gives_every_sample_its_seconds():
    async def ask(samples, failure):
        await asyncio.sleep(0.05)
        return Scored([1.0] * len(samples), [1.0] * len(samples), {}, [None] * len(samples))

    verdicts = asyncio.run(judge("ab", ask))
    assert [verdict.reward for verdict in verdicts] == [1.0, 1.0]
    assert verdicts[0].seconds == verdicts[1].seconds
    assert 0.05 <= verdicts[0].seconds < 5.0


def test_judge_samples_called_again_carry_the_failed_call_too():
    async def ask(samples, failure):
        await asyncio.sleep(0.2 if failure is None else 0.05 if samples[0] == "a" else 0.3)
        if failure is None or samples[0] == "b":
            return Failure(VerdictKind.CRASH, "boom")
        return Scored([1.0], [1.0], {}, [None])

    good, bad = asyncio.run(judge("ab", ask))
    assert (good.kind, bad.kind) == (VerdictKind.OK, VerdictKind.CRASH)
    assert 0.25 <= good.seconds < bad.seconds
    assert bad.seconds >= 0.5
