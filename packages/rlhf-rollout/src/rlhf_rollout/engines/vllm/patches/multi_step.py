"""Several decode steps of the model per step of vLLM's scheduler, so that the GPU does not wait for the host.

Between two steps that only decode, the model needs nothing of the host: the tokens of one are the input of the next.
With hundreds of sequences and a small model, the host takes longer to schedule a step, and to take in its tokens, than
the GPU takes to compute it.
"""

from collections.abc import Iterator, Sequence
from dataclasses import fields, replace
from itertools import chain
from typing import Any

import numpy as np
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.output import CachedRequestData, SchedulerOutput
from vllm.v1.outputs import AsyncModelRunnerOutput, LogprobsLists

from rlhf_rollout.engines.vllm.patches.bulk_decoding import is_plain

# A sequence that ends computes the rest of its steps, and those in flight, for nothing: about 1.5 times as many.
MOST_STEPS = 4
FEWEST_SEQUENCES = 32  # with fewer, the host keeps up
NEEDS = (
    "block_size",
    "kv_cache_manager.allocate_slots",
    "kv_cache_manager.block_pool.get_num_free_blocks",
    "max_model_len",
    "parallel_config.data_parallel_size",
    "requests",
    "schedule",
    "use_v2_model_runner",
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
    """Let the scheduler ask for up to `MOST_STEPS` tokens per sequence at a time, if all sequences of a step decode.

    `SchedulerOutput.num_steps` then says for how many, and `Worker` computes them one after the other. Tokens behind
    the end of a sequence are dropped, as vLLM drops rejected drafts. This function leaves a scheduler as it is for the
    same engines as `bulk_decoding`, and for vLLM's older model runner if it schedules ahead.
    """
    can_repeat = scheduler.use_v2_model_runner or not isinstance(scheduler, AsyncScheduler)
    if not is_plain(scheduler) or not can_repeat or scheduler.parallel_config.data_parallel_size > 1:
        return
    schedule = scheduler.schedule

    def schedule_several(*args: Any, **options: Any) -> Any:
        step = schedule(*args, **options)
        requests = [scheduler.requests[name] for name in step.num_scheduled_tokens]
        step.num_steps = _num_steps(scheduler, step, requests)
        if step.num_steps > 1:
            _lengthen(scheduler, step, requests)
        return step

    scheduler.schedule = schedule_several


def _num_steps(scheduler: Any, step: Any, requests: Sequence[Any]) -> int:
    """Return for how many steps the sequences of a step can decode before the scheduler must look at them."""
    cached = step.scheduled_cached_reqs
    only_decodes = (
        len(requests) >= FEWEST_SEQUENCES
        and step.total_num_scheduled_tokens == len(requests) == len(cached.req_ids)
        and not cached.resumed_req_ids
        and not step.scheduled_spec_decode_tokens
        and not step.has_structured_output_requests
        and all(request.num_computed_tokens > request.num_prompt_tokens for request in requests)
    )
    if not only_decodes:
        return 1
    lengths = [request.num_computed_tokens for request in requests]
    most_left = max(
        request.num_prompt_tokens + request.max_tokens - length
        for request, length in zip(requests, lengths, strict=True)
    )
    number = max(1, min(MOST_STEPS, most_left, scheduler.max_model_len - max(lengths)))
    num_blocks = sum(_new_blocks(length, number, scheduler.block_size) for length in lengths)
    return number if num_blocks <= scheduler.kv_cache_manager.block_pool.get_num_free_blocks() else 1


def _lengthen(scheduler: Any, step: Any, requests: Sequence[Any]) -> None:
    """Give each sequence of a step, which has one token, those of the other steps, and the blocks for them."""
    number = step.num_steps
    cached = step.scheduled_cached_reqs
    is_async = isinstance(scheduler, AsyncScheduler)
    places = {name: place for place, name in enumerate(cached.req_ids)}
    for request in requests:
        if _new_blocks(request.num_computed_tokens, number, scheduler.block_size):
            new = scheduler.kv_cache_manager.allocate_slots(request, number - 1).get_block_ids()
            place = places[request.request_id]
            known = cached.new_block_ids[place]
            cached.new_block_ids[place] = new if known is None else tuple(map(list.__add__, known, new))
        request.num_computed_tokens += number - 1
        request.num_in_flight_tokens += number - 1
        if is_async:
            request.num_output_placeholders += number - 1
    step.num_scheduled_tokens = dict.fromkeys(step.num_scheduled_tokens, number)
    step.total_num_scheduled_tokens *= number


def _new_blocks(length: int, num_steps: int, block_size: int) -> int:
    """Return how many blocks a sequence needs for the steps after the first, with which it has `length` tokens."""
    return -(-(length + num_steps - 1) // block_size) - -(-length // block_size)


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
    first = outputs[0]
    assert all(output.req_ids == first.req_ids for output in outputs)
    by_step = zip(*(output.sampled_token_ids for output in outputs), strict=True)
    tokens = [list(chain.from_iterable(of_sequence)) for of_sequence in by_step]
    logprobs = None if first.logprobs is None else _joined_logprobs([output.logprobs for output in outputs])
    return replace(first, sampled_token_ids=tokens, logprobs=logprobs)


def _joined_logprobs(of_steps: Sequence[LogprobsLists]) -> LogprobsLists:
    """Return the rows of steps, each [sequences, ...], sequence by sequence: [sequences x steps, ...]."""
    columns = zip(*(rows[:3] for rows in of_steps), strict=True)
    joined_columns = [np.stack(column, axis=1).reshape(-1, *column[0].shape[1:]) for column in columns]
    num_rows = len(joined_columns[0])
    return LogprobsLists(*joined_columns, list(range(0, num_rows + 1, len(of_steps))))


class _LaterOutput(AsyncModelRunnerOutput):
    """The outputs of several steps, which the GPU may still compute."""

    def __init__(self, outputs: Sequence[Any]) -> None:
        self._outputs = outputs

    def get_output(self) -> Any:
        """Wait for the GPU, and return them as one."""
        return joined([output.get_output() for output in self._outputs])
