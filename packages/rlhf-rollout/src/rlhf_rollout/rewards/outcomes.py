"""The outcome of a scorer's call, and the verdicts it leads to: after a failure each sample is judged by itself."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from rlhf_data.records import Verdict, VerdictKind
from rlhf_rollout.rewards.user_function import SUCCESS_THRESHOLD, Scored, one_line, verdict_of

Sample = TypeVar("Sample")


@dataclass(frozen=True, slots=True)
class Failure:
    """A call that gave no rewards.

    Attributes:
        kind: `timeout` or `crash`.
        detail: the reason, for people.
        of_sample: whether a single sample of the call may be at fault.
        is_invalid: whether the scorer returned a result that cannot be used.
    """

    kind: VerdictKind
    detail: str
    of_sample: bool = True
    is_invalid: bool = False


async def judge(
    samples: Sequence[Sample],
    ask: Callable[[Sequence[Sample], Failure | None], Awaitable[Scored | Failure]],
    success_threshold: float = SUCCESS_THRESHOLD,
) -> list[Verdict]:
    """Return one verdict per sample, from one call for all of them or, if that fails, from one call per sample.

    For `success_threshold` see `verdict_of`. `ask` calls the scorer. Its second argument is None in the call for all
    samples, and the failure of that call in the calls for single samples. A verdict's `seconds` run from the start of
    this function to the end of the call that gave the verdict, so they include a failed call for all.
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
            verdicts.append(Verdict(outcome.kind, detail=one_line(outcome.detail), seconds=seconds))
        else:
            for index in range(len(outcome.rewards)):
                verdicts.append(replace(verdict_of(outcome, index, success_threshold), seconds=seconds))
    return verdicts
