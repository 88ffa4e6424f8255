"""Several decode steps of the model per step of vLLM's scheduler, so that the GPU does not wait for the host.

Between two steps that only decode, the model needs nothing of the host: the tokens of one are the input of the next.
With hundreds of sequences and a small model, the host takes longer to schedule a step, and to take in its tokens, than
the GPU takes to compute it.
"""

import time
from collections.abc import Iterator, Sequence
from dataclasses import fields, replace
from itertools import islice
from operator import attrgetter
from typing import Any

import numpy as np

from rlhf_rollout.engines.vllm.names import (
    AsyncModelRunnerOutput,
    AsyncScheduler,
    CachedRequestData,
    LogprobsLists,
    SchedulerOutput,
)
from rlhf_rollout.engines.vllm.patches.bulk_decoding import NEEDS as NEEDED_IN_BULK
from rlhf_rollout.engines.vllm.patches.bulk_decoding import is_plain

MOST_STEPS = 16
# Sequences have written so many tokens, on average, for each that they are given at a time. One that ends computes the
# rest of these, and those in flight, for nothing: about 1.5 times as many as it is given. The bound keeps that small
# beside the response, and short answers from waiting for the GPU.
TOKENS_PER_STEP = 1
# The share of the time of some steps of the scheduler in which the host waits for the GPU. With less than the first
# share, it asks for twice as many steps at a time, and with more than the second, for half as many. It decides after as
# many rounds as it asks for steps, at least 2 and at most `ROUNDS`: an engine that starts with single steps soon has
# the number that suits it.
WAITS = (0.12, 0.4)
ROUNDS = 8
NEEDS = (
    *NEEDED_IN_BULK,  # of which `is_plain` reads a part
    "kv_cache_manager.block_pool.get_new_blocks",
    "kv_cache_manager.block_pool.get_num_free_blocks",
    "parallel_config.data_parallel_size",
)
# What only the first of several steps tells the model runner.
_OF_FIRST = {
    "finished_req_ids": set(),
    "free_encoder_mm_hashes": [],
    "preempted_req_ids": None,
    "new_block_ids_to_zero": None,
    "kv_cache_block_copies": None,
}
if _lost := _OF_FIRST.keys() - {field.name for field in fields(SchedulerOutput)}:
    raise ImportError(f"its steps have no {', '.join(sorted(_lost))}")


def patch(scheduler: Any) -> None:
    """Let the scheduler ask for several tokens per sequence at a time, if all sequences of a step decode.

    `SchedulerOutput.num_steps` then says for how many, and `Worker` computes them one after the other. Tokens behind
    the end of a sequence are dropped, as vLLM drops rejected drafts. There are no more steps at a time than it takes
    for the host to keep up with the GPU, and at most `MOST_STEPS`. This function leaves a scheduler as it is for the
    same engines as `bulk_decoding`, and where tokens reach the host between two steps in any case.
    """
    if is_plain(scheduler) and _runs_ahead(scheduler):
        _MultiStep(scheduler)


def _runs_ahead(scheduler: Any) -> bool:
    """Return whether workers take a step before the host knows the last one's tokens, and wait for no other engine."""
    runs_ahead = isinstance(scheduler, AsyncScheduler) and scheduler.use_v2_model_runner
    return runs_ahead and scheduler.parallel_config.data_parallel_size == 1


class _MultiStep:
    """Lengthens the steps of a scheduler.

    Attributes:
        number: steps at a time with which the host keeps up, as far as is known.
    """

    def __init__(self, scheduler: Any) -> None:
        self.number = 1
        self._scheduler = scheduler
        self._last_step: Any = None  # that was scheduled
        self._updated_at = 0.0
        # Per round: for how long the host has waited, and how long the round was.
        self._seconds: list[tuple[float, float]] = []
        self._schedule = scheduler.schedule
        self._update = scheduler.update_from_output
        scheduler.schedule = self.schedule
        scheduler.update_from_output = self.update

    def schedule(self, *args: Any, **options: Any) -> Any:
        """See vLLM."""
        step = self._schedule(*args, **options)
        cached = step.scheduled_cached_reqs
        step.num_steps = 1
        if _is_plain_decode(step):
            requests = [self._scheduler.requests[name] for name in cached.req_ids]
            lengths = np.array(cached.num_computed_tokens) + 1
            prompts = _numbers(requests, "num_prompt_tokens")
            if (lengths > prompts).all():
                most_left = (prompts + _numbers(requests, "max_tokens") - lengths).max()
                step.num_steps = self._num_steps(lengths, (lengths - prompts).sum(), most_left)
        if step.num_steps > 1:
            self._lengthen(step, requests, lengths)
        self._last_step = step
        return step

    def _num_steps(self, lengths: np.ndarray, num_written: int, most_left: int) -> int:
        """Return for how many steps sequences decode before the scheduler looks at them again.

        Args:
            lengths: tokens of each with the first of the steps.
            num_written: those of all that are not of prompts.
            most_left: what any may still write.
        """
        scheduler = self._scheduler
        room = scheduler.max_model_len - lengths.max()
        number = max(1, min(self.number, num_written // (TOKENS_PER_STEP * len(lengths)), most_left, room))
        num_blocks = _new_blocks(lengths, number, scheduler.block_size).sum()
        return int(number) if num_blocks <= scheduler.kv_cache_manager.block_pool.get_num_free_blocks() else 1

    def _lengthen(self, step: Any, requests: Sequence[Any], lengths: np.ndarray) -> None:
        """Give each sequence of a step, which has one token, those of the other steps, and the blocks for them."""
        scheduler = self._scheduler
        more = step.num_steps - 1
        is_async = isinstance(scheduler, AsyncScheduler)
        for request in requests:
            request.num_computed_tokens += more
            request.num_in_flight_tokens += more
            if is_async:
                request.num_output_placeholders += more
        cached = step.scheduled_cached_reqs
        manager = scheduler.kv_cache_manager
        [group] = manager.coordinator.single_type_managers
        counts = _new_blocks(lengths, step.num_steps, scheduler.block_size)
        # There are enough, and none to cache: `allocate_slots` would look at both for each sequence.
        blocks = iter(manager.block_pool.get_new_blocks(int(counts.sum())))
        for place in np.flatnonzero(counts).tolist():
            own = list(islice(blocks, int(counts[place])))
            group.req_to_blocks[cached.req_ids[place]] += own
            [known] = cached.new_block_ids[place] or [[]]
            cached.new_block_ids[place] = (known + [block.block_id for block in own],)
        step.num_scheduled_tokens = dict.fromkeys(step.num_scheduled_tokens, step.num_steps)
        step.total_num_scheduled_tokens *= step.num_steps

    def update(self, step: Any, output: Any) -> Any:
        """See vLLM."""
        now = time.perf_counter()
        launched_at = getattr(self._last_step, "launched_at", None)  # None with workers in other processes
        if launched_at is not None and self._last_step.num_steps == step.num_steps == self.number:
            self._seconds.append((now - launched_at, now - self._updated_at))
        if len(self._seconds) >= min(max(self.number, 2), ROUNDS):
            waited, total = map(sum, zip(*self._seconds, strict=True))
            self._seconds.clear()
            if waited < WAITS[0] * total:
                self.number = min(2 * self.number, MOST_STEPS)
            elif waited > WAITS[1] * total:
                self.number = max(self.number // 2, 1)
        self._updated_at = now
        return self._update(step, output)


def _is_plain_decode(step: Any) -> bool:
    """Return whether a step gives one token to each of its sequences, and needs nothing of the host for the next."""
    cached = step.scheduled_cached_reqs
    return (
        0 < step.total_num_scheduled_tokens == len(step.num_scheduled_tokens) == len(cached.req_ids)
        and not cached.resumed_req_ids
        and not step.scheduled_spec_decode_tokens
        and not step.has_structured_output_requests
    )


def _numbers(requests: Sequence[Any], name: str) -> np.ndarray:
    return np.fromiter(map(attrgetter(name), requests), np.int64, len(requests))


def _new_blocks(lengths: np.ndarray, num_steps: int, block_size: int) -> np.ndarray:
    """Return how many blocks sequences need for the steps after the first, with which they have `lengths` tokens."""
    return -(-(lengths + num_steps - 1) // block_size) - -(-lengths // block_size)


def single_steps(step: Any) -> Iterator[Any]:
    """Yield a step of `num_steps` tokens per sequence as steps of one token, as vLLM's model runners take them."""
    counts = dict.fromkeys(step.num_scheduled_tokens, 1)
    cached = step.scheduled_cached_reqs
    first = replace(step, num_scheduled_tokens=counts, total_num_scheduled_tokens=len(counts))
    yield first
    for later in range(1, step.num_steps):
        going_on = CachedRequestData(
            req_ids=cached.req_ids,
            resumed_req_ids=set(),
            new_token_ids=[],
            all_token_ids={},
            new_block_ids=[None] * len(cached.req_ids),
            num_computed_tokens=[number + later for number in cached.num_computed_tokens],
            num_output_tokens=[number + later for number in cached.num_output_tokens],
        )
        yield replace(first, scheduled_cached_reqs=going_on, **_OF_FIRST)


def joined(outputs: Sequence[Any]) -> Any:
    """Return what a model runner gave for single steps as the output of the whole step, once all have been computed."""
    if isinstance(outputs[0], AsyncModelRunnerOutput):
        return _LaterOutput(outputs)
    first, *others = outputs
    assert all(output.req_ids == first.req_ids for output in others)
    columns = [np.stack([output.sampled_token_ids for output in others], axis=1)]
    if first.logprobs is not None:
        by_step = zip(*(output.logprobs[:3] for output in others), strict=True)
        columns += [np.stack(column, axis=1) for column in by_step]
    return with_later(first, columns)


def with_later(output: Any, columns: Sequence[np.ndarray]) -> Any:
    """Return the output of a step of N sequences, and that of S later steps behind it, as that of one step.

    Args:
        output: of the first step.
        columns: of the later steps: the tokens, [N, S, 1]. If there are log-probs, also ids [N, S, L], log-probs
            [N, S, L] and ranks [N, S].
    """
    tokens, *others = columns
    first = np.array(output.sampled_token_ids, dtype=tokens.dtype)
    together = np.concatenate([first, tokens[..., 0]], axis=1)
    logprobs = None
    if output.logprobs is not None:
        pairs = zip(output.logprobs[:3], others, strict=True)
        rows = [np.concatenate([own[:, None], later], axis=1).reshape(-1, *own.shape[1:]) for own, later in pairs]
        logprobs = LogprobsLists(*rows, list(range(0, together.size + 1, together.shape[1])))
    return replace(output, sampled_token_ids=together.tolist(), logprobs=logprobs)


class _LaterOutput(AsyncModelRunnerOutput):
    """The outputs of several steps, which the GPU may still compute."""

    def __init__(self, outputs: Sequence[Any]) -> None:
        self._outputs = outputs

    def get_output(self) -> Any:
        """Wait for the GPU, and return them as one."""
        return joined([output.get_output() for output in self._outputs])
