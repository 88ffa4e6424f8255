"""What every engine does with a request: checks, a deadline, and a seed for each sample."""

import asyncio
from collections.abc import AsyncIterator, Collection, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace

import numpy as np

from rlhf_data.errors import EngineError, unknown
from rlhf_rollout.engines.spec import EngineSpec
from rlhf_rollout.protocols import SamplingParams

DROPPED = "they were dropped when it fell asleep"  # why weights are incomplete after `sleep(keep_weights=False)`
_NUM_LOOKS = 8  # at an engine's progress in the time for which it may do nothing


def check_request(
    token_ids: np.ndarray,
    sampling: SamplingParams,
    *,
    max_model_len: int,
    vocab_size: int | None = None,
    adapters: Collection[str] | None = (),
) -> None:
    """Raise EngineError for a request that cannot be generated in full.

    Args:
        token_ids: [P], the prompt.
        sampling: its `max_tokens` must fit into the context after the prompt.
        max_model_len: the model's context, in tokens.
        vocab_size: ids must lie below it; None leaves them unchecked.
        adapters: names of the engine's; None leaves the request's unchecked.
    """
    if sampling.adapter is not None and adapters is not None and sampling.adapter not in adapters:
        raise EngineError(unknown("adapter", sampling.adapter, adapters))
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


def check_images(images: Sequence[str], spec: EngineSpec) -> None:
    """Raise EngineError for images in a request to an engine that reads none."""
    if images and not spec.images:
        message = f"the request has {len(images)} images, and the engine reads none"
        raise EngineError(message, hint="build it with EngineSpec(images=True)")


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


class StalledError(EngineError):
    """An engine that has requests writes nothing."""


class Progress:
    """Tells whether an engine gets further, for time limits on doing nothing. Any thread may change and read it.

    Attributes:
        num_signs: how often something was written, or a pause ended.
        is_paused: the engine was told to do nothing.
    """

    def __init__(self) -> None:
        self.num_signs = 0
        self.is_paused = False

    def advance(self) -> None:
        """Something was written."""
        self.num_signs += 1

    def pause(self) -> None:
        """The engine is paused from now on."""
        self.is_paused = True

    def resume(self) -> None:
        """The engine goes on."""
        self.is_paused = False
        self.num_signs += 1


@asynccontextmanager
async def time_limit(limit_s: float | None, progress: Progress | None = None) -> AsyncIterator[asyncio.Timeout]:
    """Do as `asyncio.timeout` does; None is no limit.

    With `progress`, the limit is for doing nothing: it passes when the engine was not paused and gave no sign for as
    long, or for up to an eighth longer.
    """
    loop = asyncio.get_running_loop()
    num_looks = 1 if progress is None else _NUM_LOOKS
    progress = progress or Progress()
    num_seen = progress.num_signs
    num_idle = 0
    waiting: asyncio.TimerHandle | None = None

    def look() -> None:
        nonlocal num_seen, num_idle, waiting
        is_idle = progress.num_signs == num_seen and not progress.is_paused
        num_seen = progress.num_signs
        num_idle = num_idle + 1 if is_idle else 0
        if num_idle == num_looks:
            timer.reschedule(loop.time())
        else:
            waiting = loop.call_later(limit_s / num_looks, look)

    async with asyncio.timeout(None) as timer:
        if limit_s is not None:
            waiting = loop.call_later(limit_s / num_looks, look)
        try:
            yield timer
        finally:
            if waiting is not None:
                waiting.cancel()


@asynccontextmanager
async def deadline(
    timeout_s: float | None, what: str, *, grace_s: float = 0.0, progress: Progress | None = None
) -> AsyncIterator[None]:
    """End the context with EngineError when it lasts longer than `timeout_s`; None is no deadline.

    `grace_s` comes on top, for a server that keeps the deadline itself and then has to say so. With `progress`, the
    context ends with StalledError when the engine writes nothing for as long; see `time_limit`.
    """
    try:
        async with time_limit(None if timeout_s is None else timeout_s + grace_s, progress) as timer:
            yield
    except TimeoutError as error:
        if not timer.expired():  # a TimeoutError from within the context
            raise
        message = f"{what} took longer than {timeout_s:g} s"
        hint = "the engine hangs or is overloaded; if it is only slow, raise the deadline"
        if progress is None:
            raise EngineError(message, hint=hint) from error
        raise StalledError(f"{message} without a new token", hint=hint) from error
