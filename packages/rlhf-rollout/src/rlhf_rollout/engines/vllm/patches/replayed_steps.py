"""Computes the later of several decode steps without the host's work on each, by replays of the model's CUDA graph.

`multi_step` has a worker compute several steps one after the other. vLLM's model runner prepares each of them on the
host, which takes longer than a small model's work on the GPU. In the later steps, the sequences, their blocks and their
samplings are those of the first. Only tokens, lengths and places in the KV cache go on, and the GPU has all of them.
"""

from collections.abc import Sequence
from operator import attrgetter
from typing import Any, NamedTuple

import torch

from rlhf_rollout.engines.vllm.names import AsyncModelRunnerOutput
from rlhf_rollout.engines.vllm.patches.multi_step import with_later
from rlhf_rollout.engines.vllm.patches.runner_names import (
    CUDAGraphMode,
    DefaultModelState,
    FlashAttentionMetadataBuilder,
    combine_sampled_and_draft_tokens,
    prepare_pos_seq_lens,
)

# With any of these, a model runner does more between two steps.
_OBSTACLES = (
    "is_encoder_decoder",
    "lora_config",
    "model_state.rope_state",
    "parallel_config.enable_eplb",
    "pcp_manager",
    "pp_handler",
    "sampler.compute_nans",
    "speculator",
    "supports_mm_inputs",
    "use_dcp",
    "vllm_config.kv_transfer_config",
)
# Of a model runner with a KV cache.
NEEDED_TO_TELL = (*_OBSTACLES, "attn_groups", "model_state")  # for `computes_plainly`
NEEDS = (
    *NEEDED_TO_TELL,
    "block_tables.compute_slot_mappings",
    "cudagraph_manager.dispatch",
    "cudagraph_manager.run_fullgraph",
    "execute_model_state",
    "input_buffers.input_ids",
    "input_buffers.positions",
    "input_buffers.seq_lens",
    "main_stream",
    "output_copy_stream",
    "postprocess_sampled",
    "req_states.draft_tokens",
    "req_states.last_sampled_tokens",
    "req_states.num_computed_tokens.gpu",
    "req_states.prefill_len.gpu",
    "sample",
)


def replays_of(runner: Any) -> "ReplayedSteps | None":
    """Return what computes later steps of a model runner; None if its model or attention needs the host in each step.

    Args:
        runner: vLLM's second one, with its KV cache and CUDA graphs.
    """
    return ReplayedSteps(runner) if computes_plainly(runner) else None


def computes_plainly(runner: Any) -> bool:
    """Return whether a model runner with a KV cache gives its model tokens alone, and all layers use FlashAttention."""
    if any(attrgetter(name)(runner) for name in _OBSTACLES) or type(runner.model_state) is not DefaultModelState:
        return False
    builders = [group.get_metadata_builder(0) for groups in runner.attn_groups for group in groups]
    return all(type(builder) is FlashAttentionMetadataBuilder for builder in builders)


class Begun(NamedTuple):
    """A step in which each sequence decodes one token. The GPU may still compute it.

    Attributes:
        batch: vLLM's inputs of it.
        graph: vLLM's description of the CUDA graph that is replayed for it.
    """

    batch: Any
    graph: Any


class ReplayedSteps:
    """Computes the steps behind the first of several. All of them decode the same sequences."""

    def __init__(self, runner: Any) -> None:
        self._runner = runner

    def begun(self) -> Begun | None:
        """Return the step that the runner has launched and not yet sampled; None unless one CUDA graph computes it."""
        state = self._runner.execute_model_state
        if state is None:  # it failed
            return None
        batch = state.input_batch
        graph = self._runner.cudagraph_manager.dispatch(batch.num_reqs, batch.num_tokens, 1, num_active_loras=0)
        is_whole = graph.cg_mode == CUDAGraphMode.FULL
        return Begun(batch, graph) if is_whole and batch.num_tokens == batch.num_reqs else None

    @torch.inference_mode()
    def compute(self, begun: Begun, first: Any, number: int) -> AsyncModelRunnerOutput:
        """Return the output of a step and of `number` later ones, which the GPU may still compute.

        The plan that FlashAttention made for the lengths of the first step is good enough for lengths of a few tokens
        more: it says in how many parts to read the keys, and which sequences to begin with.

        Args:
            begun: the first step, as it was before it was sampled.
            first: its output.
            number: how many steps to compute after it.
        """
        runner, batch = self._runner, begun.batch
        states, buffers = runner.req_states, runner.input_buffers
        samples = []
        for _ in range(number):
            rows, starts = batch.idx_mapping, batch.query_start_loc
            lengths = states.num_computed_tokens.gpu
            prepare_pos_seq_lens(rows, starts, lengths, buffers.positions, buffers.seq_lens)
            combine_sampled_and_draft_tokens(
                buffers.input_ids,
                rows,
                states.last_sampled_tokens,
                starts,
                batch.seq_lens,
                states.prefill_len.gpu,
                states.draft_tokens,
                batch.cu_num_logits,
                batch.num_reqs,
            )
            runner.block_tables.compute_slot_mappings(
                rows, starts, batch.positions, num_tokens_padded=batch.num_tokens_after_padding
            )
            hidden = runner.cudagraph_manager.run_fullgraph(begun.graph)
            sample, num_sampled, num_rejected = runner.sample(hidden, batch, None)
            runner.postprocess_sampled(rows, sample.sampled_token_ids, num_sampled, num_rejected, starts)
            samples.append(sample)
        return _LaterOutput(first, samples, runner)


class _LaterOutput(AsyncModelRunnerOutput):
    """The output of a step, and the samples of later ones, which are copied to the host together."""

    def __init__(self, first: AsyncModelRunnerOutput, samples: Sequence[Any], runner: Any) -> None:
        self._first = first
        self._samples = samples  # their memory is that of the main stream, and must stay until the copies are done
        self._copied = torch.cuda.Event(blocking=True)
        copies = runner.output_copy_stream
        copies.wait_stream(runner.main_stream)
        with torch.cuda.stream(copies):
            by_step = zip(*map(_columns, samples), strict=True)
            self._columns = [torch.stack(column, 1).to("cpu", non_blocking=True) for column in by_step]
            self._copied.record(copies)

    def get_output(self) -> Any:
        """Wait for the GPU, and return all steps as one."""
        output = self._first.get_output()
        self._copied.synchronize()
        return with_later(output, [column.numpy() for column in self._columns])


def _columns(sample: Any) -> tuple[torch.Tensor, ...]:
    logprobs = sample.logprobs_tensors
    return (sample.sampled_token_ids, *(() if logprobs is None else logprobs[:3]))
