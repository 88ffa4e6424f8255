"""What a call of a scorer came to, and how its samples are judged when it failed: the culprit alone is charged."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
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
    """Return one verdict a sample: of a call for all of them, or when that failed of a call for each. The second
    argument of `ask`, which calls the scorer, is the failure of the call for all, None when it is that call."""
    if not samples:
        return []
    outcomes = [await ask(samples, None)]
    if isinstance(failure := outcomes[0], Failure):
        outcomes *= len(samples)
        if failure.of_sample and len(samples) > 1:
            outcomes = await asyncio.gather(*[ask([sample], failure) for sample in samples])
    verdicts = []
    for outcome in outcomes:
        if isinstance(outcome, Failure):
            verdicts.append(Verdict(outcome.kind, detail=" ".join(outcome.detail.split())))
        else:
            verdicts += [verdict_of(outcome, index) for index in range(len(outcome.rewards))]
    return verdicts
