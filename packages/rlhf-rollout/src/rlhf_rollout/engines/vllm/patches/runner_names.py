"""The names of vLLM that speed-ups of its model runner on a GPU need. One that a version lacks is missing here."""
# ruff: noqa: F401

from contextlib import suppress

with suppress(ImportError):  # of several
    from vllm import envs
    from vllm.config import CUDAGraphMode
with suppress(ImportError):  # of `graph_pieces`
    from vllm.v1.kv_cache_interface import FullAttentionSpec
    from vllm.v1.worker.gpu.cudagraph_utils import BatchExecutionDescriptor
with suppress(ImportError):  # of `shared_prefixes`
    from vllm.v1.attention.backends import flash_attn
    from vllm.v1.worker.gpu.buffer_utils import async_copy_to_gpu
with suppress(ImportError):  # of `replayed_steps`
    from vllm.v1.attention.backends.flash_attn import FlashAttentionMetadataBuilder
    from vllm.v1.worker.gpu.input_batch import combine_sampled_and_draft_tokens, prepare_pos_seq_lens
    from vllm.v1.worker.gpu.model_states.default import DefaultModelState
with suppress(ImportError):  # of `sampling_head`
    from vllm.model_executor.layers.logits_processor import LogitsProcessor
    from vllm.v1.outputs import LogprobsTensors
    from vllm.v1.worker.gpu.input_batch import get_num_sampled_and_rejected
    from vllm.v1.worker.gpu.sample.output import SamplerOutput
    from vllm.v1.worker.gpu.sample.sampler import Sampler
