"""Hashes the prompt of several samples once, and the blocks behind it with less time on the host."""

from typing import Any

from rlhf_rollout.engines.vllm.names import get_hash_fn_by_name, hash_block_tokens

NEEDS = (
    "request_block_hasher",
    "scheduler.hash_block_size",
    "scheduler.lora_config",
    "vllm_config.cache_config.prefix_caching_hash_algo",
)


def patch(core: Any) -> None:
    """Let an engine core hash the blocks of a prompt once for samples that share the list of its tokens.

    vLLM finds cached blocks by hashes, which it computes anew for each sample of a prompt: half of the time that a
    sample's start takes on the host. A prompt with images has hashes of its own. For each block that a sequence has
    written, vLLM looks for images, adapters and salts, of which `internals.core_request` names images alone. A core
    that takes adapters stays as it is.

    Args:
        core: vLLM's `EngineCore`. Nothing may change the lists of tokens that it gets.
    """
    hash_blocks = core.request_block_hasher
    if hash_blocks is None or core.scheduler.lora_config is not None:  # nothing is cached, or hashes name adapters, too
        return
    digest = get_hash_fn_by_name(core.vllm_config.cache_config.prefix_caching_hash_algo)
    size = core.scheduler.hash_block_size
    last: tuple[Any, list[Any]] = None, []  # a prompt, and the hashes of its blocks

    def hash_new_blocks(request: Any) -> list[Any]:
        nonlocal last
        prompt = request.prompt_token_ids
        if not request.mm_features and (known := getattr(request, "block_hashes", None)):
            return _chain(digest, known, request._all_token_ids, size)
        if request.mm_features or request.num_tokens != len(prompt):
            return hash_blocks(request)
        if prompt is not last[0]:
            last = prompt, hash_blocks(request)
        return list(last[1])

    core.request_block_hasher = hash_new_blocks


def _chain(digest: Any, known: list[Any], token_ids: list[int], size: int) -> list[Any]:
    """Return the hashes of the full blocks behind those whose hashes are known."""
    found = []
    parent = known[-1]
    for end in range((len(known) + 1) * size, len(token_ids) + 1, size):
        parent = hash_block_tokens(digest, parent, token_ids[end - size : end])
        found.append(parent)
    return found
