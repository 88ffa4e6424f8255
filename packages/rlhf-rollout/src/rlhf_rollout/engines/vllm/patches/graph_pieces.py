"""Replays steps that hold tokens of prompts as pieces of CUDA graphs, with attention computed between the pieces.

An engine replays a step in which all sequences decode as one graph, see `core.graph_options`. It launches others kernel
by kernel, which takes longer than a small model's work on the GPU. Only attention depends on how the tokens of a step
belong to sequences. vLLM can break a graph there (`VLLM_USE_BREAKABLE_CUDAGRAPH`), and would capture pieces for every
size of a decode step, too. Here it does so for a few numbers of tokens, and a step takes the next larger one. A token
that pads it belongs to no sequence: no other token attends to it, and it is not written to the KV cache.
"""

import logging
from collections.abc import Sequence
from typing import Any

from rlhf_rollout.engines.vllm.patches import leave_out
from rlhf_rollout.engines.vllm.patches.replayed_steps import NEEDED_TO_TELL, computes_plainly
from rlhf_rollout.engines.vllm.patches.runner_names import (
    BatchExecutionDescriptor,
    CUDAGraphMode,
    FullAttentionSpec,
    envs,
)
from rlhf_rollout.host import quick_collection

# Of a model runner with a KV cache.
NEEDS = (
    *NEEDED_TO_TELL,
    "cudagraph_manager._candidates",
    "cudagraph_manager._capture_descs",
    "cudagraph_manager.breakable_cg_runner",
    "cudagraph_manager.capture",
    "cudagraph_manager.cudagraph_mode",
    "cudagraph_manager.run_pw_graph",
    "cudagraph_manager.use_breakable_cg",
)

_logger = logging.getLogger(__name__)


def patch(runner: Any, sizes: Sequence[int]) -> None:
    """Have a model runner capture pieces of graphs beside its whole ones, and replay them in steps that have no other.

    It leaves a runner as it is whose model has more than full attention, and says so in the log at level INFO. If
    attention turns out to be in a piece, there are none, and a warning says so.

    Args:
        runner: vLLM's second one, with a KV cache, which has not captured its graphs.
        sizes: numbers of tokens of a step for which there are pieces, ascending.

    Raises:
        ImportError: vLLM does not break graphs, because its variable for it is not set.
    """
    manager = runner.cudagraph_manager
    if manager.cudagraph_mode != CUDAGraphMode.FULL_DECODE_ONLY or not attends_to_all(runner):
        _logger.info("vLLM launches steps with prompts kernel by kernel: the model has more than full attention")
        return
    if not envs.VLLM_USE_BREAKABLE_CUDAGRAPH:
        raise ImportError("VLLM_USE_BREAKABLE_CUDAGRAPH is not 1")
    capture = manager.capture

    def capture_with_pieces(*args: Any, **options: Any) -> None:
        _add_pieces(manager, sizes)
        # vLLM has Python collect garbage for each size, which takes longer than to capture it.
        with quick_collection():
            capture(*args, **options)
        num_layers = sum(len(group.layer_names) for groups in runner.attn_groups for group in groups)
        captured = manager.breakable_cg_runner.entries.values()
        if len(captured) != len(sizes) or any(each.capture.num_eager_breaks < num_layers for each in captured):
            _drop_pieces(manager)
            leave_out("graph_pieces", "attention is in a piece of a graph")

    manager.capture = capture_with_pieces


def attends_to_all(runner: Any) -> bool:
    """Return whether all layers with a KV cache attend to all tokens before, by FlashAttention."""
    specs = [group.kv_cache_spec for groups in runner.attn_groups for group in groups]
    return all(map(keeps_all, specs)) and computes_plainly(runner)


def keeps_all(spec: Any) -> bool:
    """Return whether a layer attends to all tokens before, by vLLM's description of its KV cache."""
    return type(spec) is FullAttentionSpec and not (spec.sliding_window or spec.attention_chunk_size)


def _add_pieces(manager: Any, sizes: Sequence[int]) -> None:
    """Let vLLM's manager of graphs capture pieces of these sizes, and give them the steps that have no whole graph."""
    # Attention takes the sequences of a step as they are, so that their number is not padded.
    pieces = [
        BatchExecutionDescriptor(cg_mode=CUDAGraphMode.PIECEWISE, num_tokens=size, num_reqs=None) for size in sizes
    ]
    manager.use_breakable_cg = True
    manager._capture_descs[CUDAGraphMode.PIECEWISE] = pieces[::-1]  # the largest first, whose memory others share
    for smaller, piece in zip((0, *sizes), pieces, strict=False):
        for num_tokens in range(smaller + 1, piece.num_tokens + 1):
            key = num_tokens, 0  # no adapters
            manager._candidates[key] = [*manager._candidates.get(key, ()), piece]


def _drop_pieces(manager: Any) -> None:
    manager.use_breakable_cg = False
    manager.breakable_cg_runner = None
    for key, found in manager._candidates.items():
        manager._candidates[key] = [each for each in found if each.cg_mode != CUDAGraphMode.PIECEWISE]
