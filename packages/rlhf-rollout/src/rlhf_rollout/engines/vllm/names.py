"""The names of vLLM that files import from here, once `core.prepare_environment` has run.

`internals` lists those that an engine needs, and checks them before it starts. A speed-up of `patches` does without
names that a version lacks: they are missing here, so that its own import fails, and no other one's.
"""
# ruff: noqa: F401

from contextlib import suppress

from vllm.config import set_current_vllm_config
from vllm.config.weight_transfer import WeightTransferConfig
from vllm.distributed.weight_transfer.base import WeightTransferEngine, WeightTransferInitInfo, WeightTransferUpdateInfo
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info, make_online_process_loader
from vllm.model_executor.model_loader.reload.meta import CopyCounter
from vllm.model_executor.models import ModelRegistry
from vllm.platforms import current_platform
from vllm.v1.engine.core_client import EngineCoreClient
from vllm.v1.executor import Executor

with suppress(ImportError):  # of engines on a CPU
    from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm
with suppress(ImportError):  # of drafts on a CPU
    from vllm.v1.sample import rejection_sampler
with suppress(ImportError):  # of `bulk_decoding` and `multi_step`
    from vllm.v1.core.sched.async_scheduler import AsyncScheduler
    from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs
    from vllm.v1.request import Request, RequestStatus
with suppress(ImportError):  # of `multi_step`
    from vllm.v1.core.sched.output import CachedRequestData, SchedulerOutput
    from vllm.v1.outputs import AsyncModelRunnerOutput, LogprobsLists
with suppress(ImportError):  # of `shared_hashes`
    from vllm.utils.hashing import get_hash_fn_by_name
    from vllm.v1.core.kv_cache_utils import hash_block_tokens
with suppress(ImportError):  # of `recorded_copies`
    from vllm.model_executor.layers.linear import UnquantizedLinearMethod
    from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase
    from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod
    from vllm.model_executor.model_loader.reload.layerwise import _layerwise_process
    from vllm.model_executor.model_loader.reload.meta import materialize_layer
