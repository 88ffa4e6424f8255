"""Saves scheduler work of vLLM that changes nothing: its time on the host bounds large batches of decodes."""

from typing import Any

from vllm.v1.core.single_type_kv_cache_manager import FullAttentionManager

MOST_HELD_STEPS = 16  # for which a free slot stays empty


def is_plain_attention(scheduler: Any) -> bool:
    """Return whether all layers have full attention, and the engine neither drafts tokens nor sends its KV cache."""
    groups = scheduler.kv_cache_manager.coordinator.single_type_managers
    has_one_kind = [type(group) for group in groups] == [FullAttentionManager]
    return has_one_kind and not scheduler.num_lookahead_tokens and scheduler.connector is None


def skip_idle_slots(scheduler: Any) -> None:
    """Let the scheduler ask for KV-cache slots, and for the caching of blocks, only when that changes something.

    vLLM asks for each sequence in each step, which takes a third of its time on the host with hundreds of sequences. A
    sequence that decodes inside a block needs no new one, and has filled none. Without effect on models that have
    anything but full attention, on speculative decoding, and on KV connectors.
    """
    if not is_plain_attention(scheduler):
        return
    manager = scheduler.kv_cache_manager
    [group] = manager.coordinator.single_type_managers
    block_size = group.block_size
    num_cached = group.num_cached_block
    allocate = manager.allocate_slots
    cache = manager.cache_blocks

    def allocate_slots(request: Any, num_new_tokens: int, **options: Any) -> Any:
        # The first token of a block needs the block, and its last one lets vLLM cache it.
        is_inside = 0 < request.num_computed_tokens % block_size < block_size - 1
        # Requests that enter the batch come with more options.
        if is_inside and num_new_tokens == 1 and options.keys() == {"num_lookahead_tokens"}:
            return manager.empty_kv_cache_blocks
        return allocate(request, num_new_tokens, **options)

    def cache_blocks(request: Any, num_computed_tokens: int) -> None:
        if num_computed_tokens // block_size > num_cached.get(request.request_id, 0):
            cache(request, num_computed_tokens)

    manager.allocate_slots = allocate_slots
    manager.cache_blocks = cache_blocks


def start_together(scheduler: Any) -> None:
    """Let sequences that wait for a slot start several at a time: once a sixteenth of all slots is free.

    A step is replayed as a CUDA graph only if all its sequences decode (see `core`), and with hundreds of sequences
    nearly every step frees a slot for another to start. Sequences start at once when as many slots are free as
    sequences wait, and after `MOST_HELD_STEPS` in any case.
    """
    schedule = scheduler.schedule
    num_slots = scheduler.max_num_running_reqs
    enough = max(1, num_slots // 16)
    num_held = 0  # steps since a slot became free for a sequence that waits

    def schedule_together(*args: Any, **options: Any) -> Any:
        nonlocal num_held
        num_running = len(scheduler.running)
        num_waiting = len(scheduler.waiting) + len(scheduler.skipped_waiting)
        is_early = num_slots - num_running < min(num_waiting, enough) and num_held < MOST_HELD_STEPS
        num_held = num_held + 1 if is_early and num_running < num_slots else 0
        scheduler.max_num_running_reqs = num_running if is_early else num_slots
        return schedule(*args, **options)

    scheduler.schedule = schedule_together


def list_logprobs(scheduler: Any) -> None:
    """Let the scheduler give each sequence the log-probs of its new tokens as a list of floats.

    vLLM slices arrays of ids, log-probs and ranks for each sequence in each step, though only log-probs are used.
    """
    update = scheduler.update_from_output

    def update_from_output(scheduler_output: Any, model_runner_output: Any) -> Any:
        if model_runner_output.logprobs is not None:
            model_runner_output.logprobs = _StepLogprobs(model_runner_output.logprobs)
        return update(scheduler_output, model_runner_output)

    scheduler.update_from_output = update_from_output


class _StepLogprobs:
    """Stands in for vLLM's `LogprobsLists` of one step, of which the scheduler only calls `slice_request`."""

    def __init__(self, rows: Any) -> None:
        self._values = rows.logprobs[:, 0].tolist()
        self._starts = rows.cu_num_generated_tokens

    def slice_request(self, index: int, num_positions: int) -> list[float]:
        start = index if self._starts is None else self._starts[index]
        return self._values[start : start + num_positions]
