"""What a call of a scorer came to, and how its samples are judged when it failed: the culprit alone is charged."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from rlhf_data.records import Verdict, VerdictKind
from rlhf_rollout.rewards.user_function import Scored, verdict_of

Sample = TypeVar("Sample")


@dataclass(frozen=True, slots=True)
class Failure:
    """A call without rewards.

    Attributes:
        kind: `timeout` or `crash`.
        detail: for people.
        of_sample: whether one sample of several may be to blame.
        is_invalid: whether there was a result, and it was none that could be used.
    """

    kind: VerdictKind
    detail: str
    of_sample: bool = True
    is_invalid: bool = False


async def judge(
    samples: Sequence[Sample], ask: Callable[[Sequence[Sample], Failure | None], Awaitable[Scored | Failure]]
) -> list[Verdict]:
    """Return one verdict per sample: from a call for all of them or, when that failed, from a call for each.

    `ask` calls the scorer. Its second argument is the failure of the call for all, or None when it is that call. A
    verdict's `seconds` run from here to the end of the call that gave it, so they hold the failed call, too.
    """
    if not samples:
        return []
    started = time.monotonic()

    async def timed(part: Sequence[Sample], failure: Failure | None) -> tuple[Scored | Failure, float]:
        outcome = await ask(part, failure)
        return outcome, time.monotonic() - started

    outcomes = [await timed(samples, None)]
    if isinstance(failure := outcomes[0][0], Failure):
        outcomes *= len(samples)
        if failure.of_sample and len(samples) > 1:
            outcomes = await asyncio.gather(*[timed([sample], failure) for sample in samples])
    verdicts = []
    for outcome, seconds in outcomes:
        if isinstance(outcome, Failure):
            verdicts.append(Verdict(outcome.kind, detail=" ".join(outcome.detail.split()), seconds=seconds))
        else:
            verdicts += [replace(verdict_of(outcome, index), seconds=seconds) for index in range(len(outcome.rewards))]
    return verdicts
