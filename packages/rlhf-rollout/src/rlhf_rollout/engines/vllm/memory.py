"""The size of an engine's KV cache: vLLM would fill all of the memory that it may take."""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rlhf_data.errors import ConfigError
from rlhf_rollout.engines.model_files import checkpoint_shapes, cpu_kv_cache_bytes, read_config
from rlhf_rollout.engines.spec import EngineSpec

ITEM_BYTES = {"float32": 4, "bfloat16": 2}
FIXED_BYTES = 2 << 30  # CUDA's context, libraries and CUDA graphs
_LOGIT_COPIES = 7  # in float32: the sampler keeps logits, log-probs, and their order for top-k and top-p


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
                    those of a draft model
        at work   = `gpu_work_bytes`
        KV cache  = share - weights - at work

    Raises ConfigError when nothing is left.
    """
    item_bytes = ITEM_BYTES[spec.dtype]
    weight_bytes = _weight_bytes(model_dir, item_bytes, spec.quantization) // spec.tensor_parallel_size
    if spec.draft_model:
        weight_bytes += _weight_bytes(Path(spec.draft_model), item_bytes, None)
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
        layers = (shape for name, shape in shapes.items() if any(map(str.isdecimal, name.split("."))))
        weight_bytes -= (item_bytes - 1) * sum(math.prod(shape) for shape in layers if len(shape) > 1)
    return weight_bytes


def gpu_work_bytes(spec: EngineSpec, config: Mapping[str, Any]) -> int:
    """Return an upper bound of what an engine takes on each GPU beside weights and KV cache, in bytes.

        2 GiB + tokens per step * (4 hidden size + 3 MLP width) * item size + 7 * rows * vocabulary * 4

    A sequence has a row of logits, and one for each token that is drafted.
    It is a bound because activations and logits have their peaks at different times.
    """
    hidden = config.get("hidden_size", 0)
    # A token goes through several experts of a mixture.
    experts = (config.get("num_experts_per_tok") or 1) * (config.get("moe_intermediate_size") or 0)
    widths = config.get("intermediate_size") or 4 * hidden
    width = max(*(widths if isinstance(widths, list) else [widths]), experts)  # some configs have one per layer
    rows = spec.max_num_seqs * spec.step_tokens
    activation_bytes = spec.batched_tokens * (4 * hidden + 3 * width) * ITEM_BYTES[spec.dtype]
    return FIXED_BYTES + activation_bytes + _LOGIT_COPIES * rows * config["vocab_size"] * 4
