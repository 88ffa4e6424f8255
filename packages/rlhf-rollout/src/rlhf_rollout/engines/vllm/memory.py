"""The size of an engine's KV cache: vLLM would fill all of the memory that it may take. And that of its CUDA graphs."""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rlhf_data.errors import ConfigError
from rlhf_rollout.engines.adapter_files import check_adapters
from rlhf_rollout.engines.model_files import checkpoint_shapes, cpu_kv_cache_bytes, read_config
from rlhf_rollout.engines.spec import EngineSpec

ITEM_BYTES = {"float32": 4, "bfloat16": 2}
FIXED_BYTES = 2 << 30  # CUDA's context, libraries and CUDA graphs
_LOGIT_COPIES = 7  # in float32: the sampler keeps logits, log-probs, and their order for top-k and top-p
# Numbers of tokens for which there are pieces. A step takes the next larger one: above 512, at most 1.5 times its own.
_PIECES = (256, 512, 768, 1024, 1536, 2048, 3072, 4096)
# Products of two numbers in a layer, per step. With more of them, an H200 computes for longer than the host launches
# kernels: larger steps gain nothing by graphs, and lose by padding.
_MOST_PRODUCTS = 4e10


def kv_cache_bytes(spec: EngineSpec, model_dir: Path, config: Mapping[str, Any], *, on_gpu: bool) -> int | None:
    """Return the bytes of KV cache per GPU; None if vLLM measures.

    Raises ConfigError when the engine's share of the GPU is too small for the model.
    """
    if spec.kv_cache_memory_bytes is not None or (on_gpu and spec.measures_memory):
        return spec.kv_cache_memory_bytes
    if on_gpu:
        import torch

        return gpu_kv_cache_bytes(spec, model_dir, config, torch.cuda.get_device_properties(0).total_memory)
    sizes = {"max_num_seqs": spec.max_num_seqs, "max_model_len": spec.max_model_len}
    configs = [config, *([read_config(Path(spec.draft_model))] if spec.draft_model else [])]
    return sum(cpu_kv_cache_bytes(each, item_bytes=ITEM_BYTES[spec.dtype], **sizes) for each in configs)


def gpu_kv_cache_bytes(spec: EngineSpec, model_dir: Path, config: Mapping[str, Any], gpu_bytes: int) -> int:
    """Return the bytes that an engine's share of each GPU has left for the KV cache.

        share     = gpu_memory_utilization * gpu_bytes
        weights   = those of the checkpoint / tensor_parallel_size; in FP8 one byte for each of a layer's matrices; and
                    those of a draft model and of the slots for adapters
        at work   = `gpu_work_bytes`
        KV cache  = share - weights - at work

    Raises ConfigError when nothing is left.
    """
    item_bytes = ITEM_BYTES[spec.dtype]
    weight_bytes = _weight_bytes(model_dir, item_bytes, spec.quantization) // spec.tensor_parallel_size
    if spec.draft_model:
        weight_bytes += _weight_bytes(Path(spec.draft_model), item_bytes, None)
    weight_bytes += item_bytes * _adapter_weights(spec, model_dir)
    work_bytes = gpu_work_bytes(spec, config)
    left = int(spec.gpu_memory_utilization * gpu_bytes) - weight_bytes - work_bytes
    if left <= 0:
        share, weights, work = (part / 2**30 for part in (left + weight_bytes + work_bytes, weight_bytes, work_bytes))
        message = (
            f"an engine's share of the GPU is {share:.1f} GiB, and its weights take {weights:.1f} GiB and its work"
        )
        least = math.ceil(100 * (weight_bytes + work_bytes) / gpu_bytes) / 100
        hint = f"raise gpu_memory_utilization above {least:.2f}, or lower max_num_seqs"
        raise ConfigError(f"{message} up to {work:.1f} GiB", hint=hint if least < 1 else "use a larger GPU, or several")
    return left


def _weight_bytes(model_dir: Path, item_bytes: int, quantization: str | None) -> int:
    shapes = checkpoint_shapes(model_dir)
    if shapes is None:
        return sum(file.stat().st_size for file in model_dir.glob("*.bin"))
    weight_bytes = item_bytes * sum(map(math.prod, shapes.values()))
    if quantization == "fp8":
        weight_bytes -= (item_bytes - 1) * sum(map(math.prod, _layer_matrices(shapes)))
    return weight_bytes


def _layer_matrices(shapes: Mapping[str, tuple[int, ...]]) -> list[tuple[int, ...]]:
    """Return the shapes of the matrices of layers, of experts one or several in one."""
    layers = (shape for name, shape in shapes.items() if any(map(str.isdecimal, name.split("."))))
    return [shape for shape in layers if len(shape) > 1]


def _adapter_weights(spec: EngineSpec, model_dir: Path) -> int:
    """Return how many numbers the slots for adapters hold: rank (inputs + outputs) per matrix of a layer and slot."""
    rank = max([spec.adapter_rank, *(stored.rank for stored in check_adapters(spec.lora_modules, None))])
    if not rank:
        return 0
    from rlhf_rollout.engines.vllm.internals import adapter_options

    slots = adapter_options(rank, max(1, len(spec.lora_modules)))
    matrices = _layer_matrices(checkpoint_shapes(model_dir) or {})
    sizes = sum(math.prod(shape[:-2]) * sum(shape[-2:]) for shape in matrices)
    return slots["max_lora_rank"] * slots["max_loras"] * sizes


def gpu_work_bytes(spec: EngineSpec, config: Mapping[str, Any]) -> int:
    """Return an upper bound of what an engine takes on each GPU beside weights and KV cache, in bytes.

        2 GiB + (tokens per step + most tokens of `piece_sizes`) * (4 hidden size + 3 MLP width) * item size
        + 7 * rows * vocabulary * 4

    A sequence has a row of logits, and one for each token that is drafted.
    It is a bound because activations and logits have their peaks at different times.
    """
    rows = spec.max_num_seqs * spec.step_tokens
    activation_bytes = spec.batched_tokens * _layer_numbers(config) * ITEM_BYTES[spec.dtype] + piece_bytes(spec, config)
    return FIXED_BYTES + activation_bytes + _LOGIT_COPIES * rows * config["vocab_size"] * 4


def piece_sizes(spec: EngineSpec, config: Mapping[str, Any]) -> tuple[int, ...]:
    """Return the numbers of tokens for which an engine on a GPU has pieces of CUDA graphs, see `patches.graph_pieces`.

    A model has them for as many tokens as its layers are narrow, so that a large one has none:

        tokens * hidden size * (4 hidden size + 3 MLP width) <= 4e10

    There are none with several GPUs, experts, adapters, images or drafts, for which they were not measured. For a
    capture, vLLM divides the tokens among all slots, and gives the last one the remainder too, which must not be longer
    than `max_model_len`.
    """
    adapters = spec.adapter_rank or spec.lora_modules
    others = spec.has_drafts or adapters or spec.images or spec.return_routes or spec.tensor_parallel_size > 1
    if "graph_pieces" in spec.skip_patches or spec.enforce_eager or others or has_experts(config):
        return ()
    products = config.get("hidden_size", 0) * _layer_numbers(config)
    sizes = (size for size in _PIECES if size <= spec.batched_tokens and 0 < size * products <= _MOST_PRODUCTS)
    return tuple(size for size in sizes if _longest(size, min(size, spec.max_num_seqs)) <= spec.max_model_len)


def piece_bytes(spec: EngineSpec, config: Mapping[str, Any]) -> int:
    """Return the bytes that the pieces of CUDA graphs keep for activations: all sizes share those of the largest."""
    return max(piece_sizes(spec, config), default=0) * _layer_numbers(config) * ITEM_BYTES[spec.dtype]


def _longest(num_tokens: int, num_sequences: int) -> int:
    return num_tokens // num_sequences + num_tokens % num_sequences


def has_experts(config: Mapping[str, Any]) -> bool:
    """Return whether a model is a mixture of experts."""
    return "expert" in str(config)


def _layer_numbers(config: Mapping[str, Any]) -> int:
    """Return how many numbers a layer has at once for each token, at most: 4 hidden size + 3 MLP width."""
    hidden = config.get("hidden_size", 0)
    # A token goes through several experts of a mixture.
    experts = (config.get("num_experts_per_tok") or 1) * (config.get("moe_intermediate_size") or 0)
    widths = config.get("intermediate_size") or 4 * hidden
    width = max(*(widths if isinstance(widths, list) else [widths]), experts)  # some configs have one per layer
    return 4 * hidden + 3 * width
