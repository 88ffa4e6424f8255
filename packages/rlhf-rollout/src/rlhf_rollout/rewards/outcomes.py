"""The outcome of a scorer's call, and the verdicts it leads to: after a failure each sample is judged by itself."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from typing import TypeVar

from rlhf_data.records import Verdict
from rlhf_rollout.http.breaker import Failure
from rlhf_rollout.rewards.user_function import SUCCESS_THRESHOLD, Scored, verdict_of
from rlhf_rollout.workers.user_code import one_line

Sample = TypeVar("Sample")


async def judge(
    samples: Sequence[Sample],
    ask: Callable[[Sequence[Sample], Failure | None], Awaitable[Scored | Failure]],
    success_threshold: float = SUCCESS_THRESHOLD,
    *,
    together: bool = False,
) -> list[Verdict]:
    """Return one verdict per sample, from one call for all of them or, if that fails, from one call per sample.

    For `success_threshold` see `verdict_of`. `ask` calls the scorer. Its second argument is None in the call for all
    samples, and the failure of that call in later ones. With `together`, the samples that succeed by themselves are
    scored once more in one call, since the scorer may compare them; what they got alone counts only if that fails, and
    the verdicts' details say so. A verdict's `seconds` run from the start of this function to the end of the call that
    gave the verdict, so they include a failed call for all.
    """
    if not samples:
        return []
    started = time.monotonic()

    async def verdicts_of(part: Sequence[Sample], failure: Failure | None) -> tuple[Scored | Failure, list[Verdict]]:
        outcome = await ask(part, failure)
        seconds = time.monotonic() - started
        if isinstance(outcome, Failure):
            verdict = Verdict(outcome.kind, detail=one_line(outcome.detail), seconds=seconds)
            return outcome, [verdict] * len(part)
        indices = range(len(outcome.rewards))
        return outcome, [replace(verdict_of(outcome, index, success_threshold), seconds=seconds) for index in indices]

    failure, verdicts = await verdicts_of(samples, None)
    if not isinstance(failure, Failure) or not failure.of_sample or len(samples) == 1:
        return verdicts
    alone = await asyncio.gather(*[verdicts_of([sample], failure) for sample in samples])
    verdicts = [verdict for _, [verdict] in alone]
    passed = [index for index, (outcome, _) in enumerate(alone) if isinstance(outcome, Scored)]
    if together and len(passed) > 1:
        outcome, compared = await verdicts_of([samples[index] for index in passed], failure)
        for index, verdict in zip(passed, compared, strict=True):
            if isinstance(outcome, Scored):
                verdicts[index] = verdict
            else:
                verdicts[index] = replace(verdicts[index], detail=f"scored alone; in one call: {verdict.detail}")
    return verdicts
