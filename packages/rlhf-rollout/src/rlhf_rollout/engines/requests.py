"""What every engine does with a request: checks, a deadline, and a seed for each sample."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace

import numpy as np

from rlhf_data.errors import EngineError
from rlhf_rollout.protocols import SamplingParams

DROPPED = "they were dropped when it fell asleep"  # why weights are incomplete after `sleep(keep_weights=False)`
_MIN_EXTENSION_S = 0.1  # a request that was due at the start of a pause is not looked at more often while it lasts


def check_request(
    token_ids: np.ndarray, sampling: SamplingParams, *, max_model_len: int, vocab_size: int | None = None
) -> None:
    """Raise EngineError for a request that cannot be generated in full.

    Args:
        token_ids: [P], the prompt.
        sampling: its `max_tokens` must fit into the context after the prompt.
        max_model_len: the model's context, in tokens.
        vocab_size: ids must lie below it; None leaves them unchecked.
    """
    num_tokens = len(token_ids)
    if not num_tokens:
        raise EngineError("the prompt has no tokens")
    if num_tokens + sampling.max_tokens > max_model_len:
        raise EngineError(
            f"a prompt of {num_tokens} tokens and max_tokens {sampling.max_tokens} exceed the engine's context of "
            f"{max_model_len} tokens",
            hint=f"raise max_model_len to {num_tokens + sampling.max_tokens}, or lower max_tokens",
        )
    if sampling.min_tokens > sampling.max_tokens:
        raise EngineError(f"min_tokens {sampling.min_tokens} is above max_tokens {sampling.max_tokens}")
    if vocab_size is None:
        return
    low, high = int(np.min(token_ids)), int(np.max(token_ids))
    if low < 0 or high >= vocab_size:
        message = f"token id {low if low < 0 else high} is outside the model's vocabulary of {vocab_size}"
        raise EngineError(message, hint="the prompts were tokenized for another model")


def sample_seeds(seed: int, num_samples: int) -> list[int]:
    """Return one 63-bit seed per sample. Requests with neighbouring seeds get independent samples, too."""
    state = np.random.SeedSequence(seed & (2**64 - 1)).generate_state(num_samples, np.uint64)
    return [int(value) >> 1 for value in state]


def rest_of(sampling: SamplingParams, num_written: int, seed: int | None) -> SamplingParams:
    """Return how the rest of one sample is drawn, of which `num_written` tokens are there; `seed` is the sample's.

    The rest has a seed of its own: that of the sample would draw its first tokens with the same random numbers again.
    """
    if seed is not None and num_written:
        [seed] = sample_seeds(seed + num_written, 1)
    return replace(
        sampling,
        num_samples=1,
        max_tokens=sampling.max_tokens - num_written,
        min_tokens=max(sampling.min_tokens - num_written, 0),
        seed=seed,
    )


class Hold:
    """Measures for how long an engine has been paused, by the clock of the event loop. Any thread may read it."""

    def __init__(self) -> None:
        # One attribute, so that a reader in another thread never sees half of a change.
        self._ended_s_and_start: tuple[float, float | None] = (0.0, None)

    def start(self) -> None:
        """The engine is paused from now on."""
        self._ended_s_and_start = self.seconds(), asyncio.get_running_loop().time()

    def stop(self) -> None:
        """The engine goes on."""
        self._ended_s_and_start = self.seconds(), None

    def seconds(self) -> float:
        """Return the seconds of all pauses, with those of the present one."""
        ended_s, start = self._ended_s_and_start
        return ended_s if start is None else ended_s + asyncio.get_running_loop().time() - start


@asynccontextmanager
async def time_limit(limit_s: float | None, hold: Hold | None = None) -> AsyncIterator[asyncio.Timeout]:
    """Do as `asyncio.timeout` does, but leave out the time for which the engine is paused; None is no limit."""
    loop = asyncio.get_running_loop()
    hold = hold or Hold()
    held_s = hold.seconds()
    waiting: asyncio.TimerHandle | None = None

    def expire() -> None:
        nonlocal held_s, waiting
        more_s = hold.seconds() - held_s
        if more_s > 0:
            held_s += more_s
            waiting = loop.call_later(max(more_s, _MIN_EXTENSION_S), expire)
        else:
            timer.reschedule(loop.time())

    async with asyncio.timeout(None) as timer:
        if limit_s is not None:
            waiting = loop.call_later(limit_s, expire)
        try:
            yield timer
        finally:
            if waiting is not None:
                waiting.cancel()


@asynccontextmanager
async def deadline(
    timeout_s: float | None, what: str, *, grace_s: float = 0.0, hold: Hold | None = None
) -> AsyncIterator[None]:
    """End the context with EngineError when it lasts longer than `timeout_s`; None is no deadline.

    `grace_s` comes on top, for a server that keeps the deadline itself and then has to say so. The time for which
    `hold` finds the engine paused does not count.
    """
    try:
        async with time_limit(None if timeout_s is None else timeout_s + grace_s, hold) as timer:
            yield
    except TimeoutError as error:
        if not timer.expired():  # a TimeoutError from within the context
            raise
        message = f"{what} took longer than {timeout_s:g} s"
        raise EngineError(
            message, hint="the engine hangs or is overloaded; if it is only slow, raise the deadline"
        ) from error
