"""Asks for KV-cache slots only where that changes something, as each request for one takes time on the host."""

from typing import Any

from rlhf_rollout.engines.vllm.internals import has_full_attention

PLAIN = ("connector", "kv_cache_manager.coordinator.single_type_managers", "num_lookahead_tokens", "num_spec_tokens")
NEEDS = (
    *PLAIN,
    "kv_cache_manager.allocate_slots",
    "kv_cache_manager.cache_blocks",
    "kv_cache_manager.empty_kv_cache_blocks",
)


def is_plain_attention(scheduler: Any) -> bool:
    """Return whether all layers have full attention, and the engine neither drafts tokens nor sends its KV cache."""
    groups = scheduler.kv_cache_manager.coordinator.single_type_managers
    has_one_kind = len(groups) == 1 and has_full_attention(groups[0])
    # Drafts that are looked up in the text need no slots beyond their own.
    is_drafted = scheduler.num_lookahead_tokens or scheduler.num_spec_tokens
    return has_one_kind and not is_drafted and scheduler.connector is None


def patch(scheduler: Any) -> None:
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
