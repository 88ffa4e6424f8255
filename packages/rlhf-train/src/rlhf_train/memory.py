"""The memory that models and engines need on a GPU, from numbers of their configs. Torch-free.

By it, people decide whether engines and trainers fit on one GPU together or need to take turns. What CUDA and libraries
take beside PyTorch in a training process (about 0.5 GiB), fragments, and CUDA graphs of passes, which are captured only
where memory is left for them, are not counted: leave `SPARE` of the sum free.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rlhf_rollout.engines import EngineSpec
from rlhf_rollout.engines.vllm.memory import FIXED_BYTES, ITEM_BYTES, gpu_work_bytes
from rlhf_train.costs import (
    Mlp,
    Parameters,
    attention_linears,
    cached_size,
    count_adapters,
    count_linear_weights,
    count_parameters,
    linears_of,
    mlps_of,
    sizes_of,
)
from rlhf_train.specs import ModelSpec

SPARE = 0.1
# Values of modules that import torch: those of rlhf_models.actor, of the kernel linear_policy_loss, of
# rlhf_rollout.weights.source and engine.host_adamw (3 buffers of states).
MAX_LOGITS_BYTES = 4 << 30
LOGITS_CHUNK_BYTES = 506 << 20
SYNC_BUCKET_BYTES = 256 << 20
UPDATE_BUFFERS = 3
UPDATE_CHUNK_SIZE = 1 << 23
# DeepSpeed's defaults: gradients that are reduced at once, and weights that ZeRO 3 gathers, and updates, at once.
REDUCE_BUCKET_SIZE = 500_000_000
MAX_LIVE_PARAMETERS = 1_000_000_000
SUB_GROUP_SIZE = 1_000_000_000
# Of a weight in 4 bits: half a byte; a byte for each 64 weights, and a float32 number for each 64 * 256.
PACKED_BYTES = 1 / 2 + 1 / 64 + 4 / (64 * 256)
_ATTENDING = {"full_attention", "sliding_attention"}  # kinds of layers that are compiled
_TRANSFORMED = ("final_logit_softcapping", "logit_scale", "logits_scaling", "lm_head_multiplier")


@dataclass(frozen=True, slots=True)
class Need:
    """What a process needs on its GPU, in bytes.

    Attributes:
        items: bytes by name, at the moment of the peak.
        asleep: bytes that stay while it sleeps.
        forward: bytes at the peak of passes without gradients, while its optimizer states sleep.
        host: bytes of host memory that it takes, at most: what sleeps there, and what is never on the GPU.
        moved: the part of `host` that it copies there when it goes to sleep, and back.
    """

    items: Mapping[str, int]
    asleep: int = 0
    forward: int = 0
    host: int = 0
    moved: int = 0

    @property
    def total(self) -> int:
        """The peak."""
        return sum(self.items.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class Passes:
    """The largest passes of one rank.

    Attributes:
        train, forward: tokens and, of them, trained tokens of a pass with gradients, and of one without.
        most_targets: trained tokens of the largest pass of the step, by which models decide how to compute logits.
    """

    train: tuple[int, int]
    forward: tuple[int, int]
    most_targets: int


@dataclass(frozen=True, slots=True)
class Model:
    """A model of a training process: its transformers config and settings.

    Attributes:
        has_head: whether it predicts tokens; otherwise it has one output.
        is_adapted: it is the base or the average of the trained model of the same process, whose memory it uses.
        runs_forward: whether it also runs without gradients.
        num_logits: tensors of the size of all logits in a pass with gradients; 0 if logits may be computed in chunks.
        column_bytes: of what passes without gradients gather of all rollouts, if it is more than a number per token.
    """

    config: Any
    spec: ModelSpec
    has_head: bool = True
    is_adapted: bool = False
    runs_forward: bool = True
    num_logits: int = 0
    column_bytes: int = 0


@dataclass(frozen=True, slots=True)
class _Parts:
    """What one model needs, as bytes by name.

    Attributes:
        weights: what is there while its optimizer sleeps.
        states: of its optimizer, with gradients.
        moments: beside both, of which one is the worst.
        forward: beside the weights, in passes without gradients; empty if it has none.
        kept: bytes that are in host memory while they sleep; gradients are dropped.
        stays: whether `kept` is always there, because of an option.
    """

    weights: dict[str, int]
    states: dict[str, int]
    moments: list[dict[str, int]]
    forward: dict[str, int]
    kept: int
    stays: bool


def trainer_memory(
    models: Sequence[Model], passes: Passes, num_ranks: int, bucket_copies: int = 0, *, in_turn: bool = False
) -> Need:
    """Return what a training process needs.

        peak     = what its models need always + the worst moment of one of them + the bucket of the weight sync
        asleep   = weights of trained models + the bucket
        forward  = weights of all models + the worst pass without gradients + the bucket

    With `in_turn`, optimizer states and frozen models sleep unless they are needed, and the peak is the larger of
    `forward` and, for each trained model,

        weights of trained models + its states + the worst of its moments + the bucket

    A trained model needs, in bytes per weight, on each of R ranks (`engine/deepspeed.py` and DeepSpeed's source), with
    t trained weights of n:

    | dtype, ZeRO                             | weights | gradients  | master weights | moments |
    | bfloat16 0 and 1, or 2 on one rank      | 2 n     | 4 t        | 4 t / R        | 8 t / R |  bf16_optimizer.py
    | bfloat16 2                              | 2 n     | 4 t / R    | 4 t / R        | 8 t / R |  stage_1_and_2.py
    | bfloat16 3                              | 2 n / R | 4 t / R    | 4 t / R        | 8 t / R |  stage3.py
    | float32 0                               | 4 n     | 4 t        | 0              | 8 t     |
    | float32 1 (or 2 on one rank), 2         | 4 n     | 4 t, 4 t/R | 4 t / R        | 8 t / R |  stage_1_and_2.py
    | float32 3                               | 4 n / R | 4 t / R    | 4 t / R        | 8 t / R |  stage3.py

    With `LoraSpec.load_in_4bit` the linear modules of the layers take `PACKED_BYTES` per weight, and a pass restores
    one of them at a time.

    With `ModelSpec.tensor_parallel_size` of P, n has 1 / P of the matrices of layers, and R is the number of ranks that
    have the same part. With `ModelSpec.expert_parallel_size` of P, weights and gradients have 1 / P of the experts, and
    what is divided by R is as without. Muon has 4 instead of 8 for matrices of layers, and `OptimizerSpec.bf16_moments`
    for all weights. With `OptimizerSpec.offload`, master weights and moments are 0. At ZeRO 3 there is a bucket of 5e8
    gradients, too, in the type in which ranks add up, and with `ModelSpec.zpg` of Z a second copy of the weights,
    divided by Z. A frozen model has weights only, divided by R at ZeRO 3 (and the second copy), and with
    `ModelSpec.offload` only while it runs.

    Moments are passes (`pass_memory`), updates, in which gradients are copied: a bucket of them, or a flat copy; and,
    with `OptimizerSpec.offload`, the start, when master weights are still on the GPU.

    Args:
        models: of the process.
        passes: the largest ones.
        num_ranks: processes that share the states.
        bucket_copies: buckets of the weight sync on the GPU, of 256 MiB or the largest weight. Larger ones take only
            memory that is free or cached.
        in_turn: whether the process sleeps while engines generate, and its trained models have their states on the GPU
            one after the other.
    """
    bucket: dict[str, int] = {}
    if bucket_copies:
        policy = models[0]
        largest = count_parameters(policy.config).largest * ITEM_BYTES[policy.spec.dtype]
        bucket["sync bucket"] = bucket_copies * max(SYNC_BUCKET_BYTES, largest)
    trained = [_trained(model, passes, num_ranks) for model in models if model.spec.optimizer is not None]
    frozen = [_frozen(model, passes, num_ranks) for model in models if model.spec.optimizer is None]
    stays = _sum(bucket, *(model.weights for model in trained))
    at_rest = _sum(*(model.weights for model in frozen))
    forward = _sum(stays, at_rest, _largest([model.forward for model in (*trained, *frozen)]))
    if in_turn:
        peak = _largest([forward, *(_sum(stays, model.states, _largest(model.moments)) for model in trained)])
    else:
        states = [model.states for model in trained]
        moments = [moment for model in (*trained, *frozen) for moment in (*model.moments, model.forward)]
        peak = _sum(stays, at_rest, *states, _largest(moments))
    items = {name: size for name, size in peak.items() if size}
    always = sum(model.kept for model in (*trained, *frozen) if model.stays)
    moved = sum(model.kept for model in (*trained, *frozen) if in_turn and not model.stays)
    return Need(items, sum(stays.values()), sum(forward.values()), always + moved, moved)


def _trained(model: Model, passes: Passes, num_ranks: int) -> _Parts:
    spec = model.spec
    optimizer = spec.optimizer
    counts = count_parameters(model.config, has_head=model.has_head)
    trained = _own_weights(counts, spec)
    num_ranks //= spec.tensor_parallel_size
    num_weights = trained
    if spec.lora is not None:
        adapters = count_adapters(model.config, spec.lora.rank, spec.lora.target_modules)
        num_weights += adapters
        trained = adapters + (0 if model.has_head else sizes_of(model.config).hidden)
    item = ITEM_BYTES[spec.dtype]
    saved = 0
    if spec.is_in_4bit:
        saved = round((item - PACKED_BYTES) * count_linear_weights(model.config))
    is_float32 = spec.dtype == "float32"
    divides_experts = spec.expert_parallel_size > 1
    moments_item = 4 if optimizer.bf16_moments else 8  # bytes of both
    stage = 1 if spec.zero_stage == 2 and num_ranks == 1 else spec.zero_stage
    stage = max(stage, divides_experts)
    num_owners = num_ranks if stage or not is_float32 else 1
    # Fewer ranks share out the states of fewer experts.
    own = _share(counts.total if divides_experts else trained, num_owners)
    # An adapter consists of matrices in layers.
    by_muon = (counts.matrices if spec.lora is None else trained) if optimizer.muon_momentum is not None else 0
    weights = item * (_share(num_weights, num_ranks) if stage == 3 else num_weights) - saved
    masters = 4 * own * (stage > 0 or not is_float32)
    both_moments = moments_item * own - 4 * _share(by_muon, num_owners)
    reduced = 2 if num_ranks == 1 and not is_float32 else 4  # bytes per gradient that is sent
    states = {
        "gradients": 4 * (own if stage >= 2 else trained),
        "master weights": masters * (not optimizer.offload),
        "moments": both_moments * (not optimizer.offload),
        "reduction": reduced * REDUCE_BUCKET_SIZE * (stage == 3),
        "second copy": _second_copy(spec, num_weights),
    }
    moment = pass_memory(model, passes, with_gradients=True, num_weights=num_weights)
    moments = [moment]
    if stage == 2 or (stage == 1 and is_float32):
        moment["reduction"] = item * REDUCE_BUCKET_SIZE  # in the dtype of the weights, from the start of a pass
    if stage == 2 and not is_float32:
        # Ranks add up in float32: a full bucket is copied, when the layers whose gradients it has are done.
        done = min(1.0, REDUCE_BUCKET_SIZE / max(trained, 1))
        copy = {"reduction": moment["reduction"] + 4 * min(trained, REDUCE_BUCKET_SIZE)}
        moments.append(copy | {"activations": round((1 - done) * moment["activations"])})
    copied = own if is_float32 and stage else 0
    if stage == 3:
        copied = min(own, SUB_GROUP_SIZE)
    if stage < 2 and num_ranks > 1:
        copied = max(copied, min(trained, REDUCE_BUCKET_SIZE))
    chunk = UPDATE_BUFFERS * (4 + moments_item) * min(own, UPDATE_CHUNK_SIZE) * optimizer.offload
    moments.append({"update": 4 * copied + chunk})
    if optimizer.offload:
        moments.append({"load": 4 * own})  # DeepSpeed makes master weights on the GPU first
    if divides_experts:  # a weight sync, and saving, gather them layer by layer, and then put their parts together
        config = model.config.get_text_config()
        largest = max(mlp.num_experts * mlp.width for mlp in mlps_of(config))
        moments.append({"gathered experts": 2 * item * 2 * sizes_of(config).hidden * largest})
    forward = pass_memory(model, passes, with_gradients=False, num_weights=num_weights) if model.runs_forward else {}
    kept = 0 if optimizer.offload_path else masters + both_moments
    return _Parts({"weights": weights}, states, moments, forward, kept, optimizer.offload)


def _frozen(model: Model, passes: Passes, num_ranks: int) -> _Parts:
    spec = model.spec
    num_weights = _own_weights(count_parameters(model.config, has_head=model.has_head), spec)
    is_divided = spec.zero_stage == 3 and num_ranks > 1
    kept = ITEM_BYTES[spec.dtype] * (_share(num_weights, num_ranks) if is_divided else num_weights)
    weights = {"frozen weights": 0 if model.is_adapted else kept}
    if is_divided and not model.is_adapted:
        weights["second copy"] = _second_copy(spec, num_weights)
    gathered = num_weights if is_divided else 0
    forward = pass_memory(model, passes, with_gradients=False, num_weights=gathered)
    kept = weights["frozen weights"]
    if spec.offload:
        return _Parts({}, {}, [], forward | weights, kept, stays=True)
    return _Parts(weights, {}, [], forward, kept, stays=False)


def _own_weights(counts: Parameters, spec: ModelSpec) -> int:
    """Return the weights that a rank has: all, or its part of the matrices or experts that a group divides."""
    elsewhere = counts.experts - _share(counts.experts, spec.expert_parallel_size)
    return _share(counts.matrices, spec.tensor_parallel_size) + counts.others - elsewhere


def _second_copy(spec: ModelSpec, num_weights: int) -> int:
    """Return the bytes of a rank's part of the weights that `zpg` neighbours hold together, besides all ranks."""
    return ITEM_BYTES[spec.dtype] * _share(num_weights, spec.zpg) if spec.zpg > 1 else 0


def pass_memory(model: Model, passes: Passes, *, with_gradients: bool, num_weights: int) -> dict[str, int]:
    """Return what the largest pass of a model needs beside its states.

        layer        = T item size (4 H + 2 h D + 2 k D + 3 A), with A the width of the MLPs that a token goes through
        activations  = layers * layer, or T item size H * layers + layer with gradient checkpointing
        working      = the larger of one layer and the head's logits
        gathered     = at ZeRO 3, at most 1e9 weights; a copy of a layer's; and the gradients of a layer

    A layer keeps for its backward pass what enters its norms, its products and its attention, and the two factors in
    the MLP. Where it is not compiled, norms keep a float32 copy and their result, and the MLP another factor:
    2 H (4 + item size) + A item size more. A mixture has 2 H for each expert of a token. Without gradients one layer is
    there at a time.

    Logits of S trained tokens are S V in the dtype of the model, with a gradient of the head of V H. Above
    `MAX_LOGITS_BYTES` they are computed in chunks, with a float32 gradient, unless ZeRO 3 divides the head.

    A sequence group divides T and S, a tensor group h, k and A.
    """
    spec = model.spec
    config = model.config.get_text_config()
    item = ITEM_BYTES[spec.dtype]
    num_tokens, num_targets = passes.train if with_gradients else passes.forward
    num_tokens = _share(num_tokens, spec.sequence_parallel_size)
    sizes = sizes_of(config)
    layers: Counter[int] = Counter()  # by their bytes
    for mlp, count in mlps_of(config).items():
        layers[num_tokens * layer_bytes(config, spec, mlp)] += count
    kept = sum(size * count for size, count in layers.items())
    if spec.gradient_checkpointing:
        kept = num_tokens * item * sizes.hidden * sizes.num_layers + max(layers)
    head = 0
    if model.has_head:
        table = sizes.vocab * sizes.hidden
        is_plain = spec.zero_stage < 3 and all(getattr(config, name, None) is None for name in _TRANSFORMED)
        num_targets *= max(model.num_logits, 1) if with_gradients else 1
        whole = item * sizes.vocab * _share(num_targets, spec.sequence_parallel_size) + item * table
        in_blocks = is_plain and not model.num_logits and item * sizes.vocab * passes.most_targets > MAX_LOGITS_BYTES
        head = LOGITS_CHUNK_BYTES + 4 * table if in_blocks else whole
        if not with_gradients or spec.lora is not None:
            head -= (4 if in_blocks else item) * table
    working = max(max(layers), head)
    gathered = min(num_weights, MAX_LIVE_PARAMETERS)
    gathered += (1 + with_gradients) * _whole_layer(config, spec) * (num_weights > 0)
    restored = max(a * b for mlp in mlps_of(config) for a, b in linears_of(config, mlp).values())
    return {
        "activations": kept if with_gradients else 0,
        "restored": item * restored * spec.is_in_4bit,
        "logits" if working == head else "working": working,
        "gathered": item * gathered * (spec.zero_stage == 3),
        "columns": 0 if with_gradients else model.column_bytes,
    }


def layer_bytes(config: Any, spec: ModelSpec, mlp: Mlp) -> int:
    """Return the bytes per token that a layer keeps for its backward pass."""
    hidden = sizes_of(config).hidden
    item = ITEM_BYTES[spec.dtype]
    width = mlp.per_token * mlp.width + mlp.shared
    size = item * 4 * hidden
    linears = attention_linears(config)
    attention = sum(columns for name, (_, columns) in linears.items() if name != "o_proj") + linears["o_proj"][0]
    size += _share(item * (attention + 3 * width), spec.tensor_parallel_size)
    size += item * 2 * hidden * mlp.per_token * (mlp.num_experts > 0)
    is_inside = spec.zero_stage == 3 and not _whole_layer(config, spec)
    cannot = (
        is_inside
        or spec.ranks_per_batch > 1
        or spec.expert_parallel_size > 1
        or spec.aux_loss_coef
        or spec.routing_replay
        or spec.images
        or spec.is_in_4bit
    )
    cannot = cannot or not _ATTENDING.issuperset(getattr(config.get_text_config(), "layer_types", None) or ())
    is_compiled = not cannot and (spec.torch_compile == "on" or (spec.torch_compile == "auto" and spec.packing))
    rest = 2 * hidden * (4 + item) + _share(item * width, spec.tensor_parallel_size)
    return size if is_compiled else size + rest


def _whole_layer(config: Any, spec: ModelSpec) -> int:
    """The weights of a layer that ZeRO stage 3 gathers as one, as far as the config says; see `engine.whole_layers`."""
    layer = count_parameters(config).matrices // sizes_of(config).num_layers
    return layer if spec.lora is None and layer <= MAX_LIVE_PARAMETERS else 0


def engine_memory(config: Any, spec: EngineSpec, gpu_bytes: int | None = None, draft: Any = None) -> Need:
    """Return what an engine needs on each of its GPUs. `draft` is the config of its draft model, if it has one.

        weights   = item size * (weights / tensor_parallel_size + adapters of all linear layers, if there are any);
                    in FP8 one byte for each of a layer's matrices
        KV cache  = layers * item size * max_num_seqs * max_model_len * numbers per token, which are
                    2 (keys, values) * head size * key-value heads / tensor_parallel_size, at least 1,
                    or the latent vector and the rotary key, whole, of models that have them
        and both of a draft model, which is neither split nor rounded
        work      = `rlhf_rollout.engines.vllm.memory.gpu_work_bytes`, of which 2 GiB stay while it sleeps

    vLLM takes up to four times this KV cache. With less of it, fewer responses are generated at once: on a GPU of
    `gpu_bytes` bytes it is what weights and work leave of the engine's share, but at least one sequence.
    """
    item = ITEM_BYTES[spec.dtype]
    per_token = _cache_per_token(config, item, spec.tensor_parallel_size)
    counted = count_parameters(config)
    saved = (item - 1) * counted.matrices if spec.quantization == "fp8" else 0
    weights = _share(item * counted.total - saved, spec.tensor_parallel_size)
    weights += item * count_adapters(config, spec.adapter_rank, "all-linear")
    if draft is not None:
        per_token += _cache_per_token(draft, item, 1)
        weights += item * count_parameters(draft).total
    work = gpu_work_bytes(spec, config.get_text_config().to_dict())
    cache = per_token * spec.max_num_seqs * spec.max_model_len
    if gpu_bytes is not None:
        room = int(spec.gpu_memory_utilization * gpu_bytes) - weights - work
        cache = min(cache, max(room, per_token * spec.max_model_len))
    items = {"weights": weights, "KV cache": spec.kv_cache_memory_bytes or cache, "work": work}
    return Need(items, FIXED_BYTES)


def _cache_per_token(config: Any, item_bytes: int, num_parts: int) -> int:
    return sizes_of(config).num_layers * cached_size(config, num_parts) * item_bytes


def _sum(*parts: Mapping[str, int]) -> dict[str, int]:
    names = dict.fromkeys(name for part in parts for name in part)
    return {name: sum(part.get(name, 0) for part in parts) for name in names}


def _largest(parts: Sequence[Mapping[str, int]]) -> Mapping[str, int]:
    return max(parts, key=lambda part: sum(part.values()), default={})


def _share(count: int, parts: int) -> int:
    return -(-count // parts)
