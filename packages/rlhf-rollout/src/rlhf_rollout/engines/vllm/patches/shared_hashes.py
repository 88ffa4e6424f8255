"""Hashes the prompt of several samples once."""

from typing import Any

NEEDS = ("request_block_hasher",)


def patch(core: Any) -> None:
    """Let an engine core hash the blocks of a prompt once for samples that share the list of its tokens.

    vLLM finds cached blocks by hashes, which it computes anew for each sample of a prompt: half of the time that a
    sample's start takes on the host. A prompt with images has hashes of its own.

    Args:
        core: vLLM's `EngineCore`. Nothing may change the lists of tokens that it gets.
    """
    hash_blocks = core.request_block_hasher
    if hash_blocks is None:  # nothing is cached
        return
    last: tuple[Any, list[Any]] = None, []  # a prompt, and the hashes of its blocks

    def hash_new_blocks(request: Any) -> list[Any]:
        nonlocal last
        prompt = request.prompt_token_ids
        if request.mm_features or request.num_tokens != len(prompt) or getattr(request, "block_hashes", None):
            return hash_blocks(request)
        if prompt is not last[0]:
            last = prompt, hash_blocks(request)
        return list(last[1])

    core.request_block_hasher = hash_new_blocks
