"""What makes passes fast on a GPU, in online and offline runs: compiled layers, and CUDA graphs of packs."""

import logging
from typing import Any

import torch

from rlhf_data.errors import ConfigError
from rlhf_models.attention.sequence_parallel import SequenceGroup
from rlhf_models.backbone import divide_sequences, replay_full_packs
from rlhf_models.fast.compiled import compile_forwards, compile_layers, compile_unavailable_reason
from rlhf_models.host_states import RestingModel
from rlhf_models.loading import load_reference, resolve_dtype
from rlhf_train.engine.deepspeed import DeepSpeedEngine, place_frozen
from rlhf_train.engine.expert_parallel import ExpertGroup, divide_experts, join_expert_group
from rlhf_train.engine.process_group import join_sequence_group
from rlhf_train.engine.tensor_parallel import TensorGroup, divide_weights, join_tensor_group
from rlhf_train.engine.whole_layers import layers_taken_whole
from rlhf_train.specs import ModelSpec

logger = logging.getLogger(__name__)


def join_groups(spec: ModelSpec) -> dict[str, Any]:
    """Return the groups that this rank belongs to, as arguments of `start_engine` and `start_frozen`. Collective."""
    return {
        "sequence_group": join_sequence_group(spec.sequence_parallel_size),
        "tensor_group": join_tensor_group(spec.tensor_parallel_size),
        "expert_group": join_expert_group(spec.expert_parallel_size),
    }


def start_engine(
    model: Any,
    spec: ModelSpec,
    *,
    num_ranks: int,
    device: str,
    pack_tokens: int | None,
    takes_turns: bool = False,
    sequence_group: SequenceGroup | None = None,
    tensor_group: TensorGroup | None = None,
    expert_group: ExpertGroup | None = None,
) -> DeepSpeedEngine:
    """Return the engine that trains `model`, whose passes are as fast as `spec` allows. Collective.

    Args:
        model: of `rlhf_models`, on the CPU; its attribute `model` is a transformers model.
        spec: settings of the model and its optimizer.
        num_ranks: processes that share the model's states.
        device: "cuda" or "cpu".
        pack_tokens: tokens of a full pack; None if packs have no common length.
        takes_turns: whether the GPU's memory is given to other processes at times. The memory of CUDA graphs cannot
            leave the GPU.
        sequence_group: the ranks that divide the tokens of each pass; None if each has passes of its own.
        tensor_group: the ranks that divide the weights of the layers; None if each has all.
        expert_group: the ranks that divide the experts of the layers, likewise.

    Raises:
        ConfigError: `spec.torch_compile` is "on", and the layers cannot be compiled; or the model's sequences or
            weights cannot be divided; or `ModelSpec.check_ranks` fails.
        EngineError: DeepSpeed refuses the combination.
    """
    spec.check_ranks(num_ranks)
    is_compiled = compile_model(model, spec, device)
    if sequence_group is not None:
        divide_sequences(model, sequence_group)
    if tensor_group is not None:
        divide_weights(model, tensor_group)
    if expert_group is not None:
        divide_experts(model, expert_group)
    dtype = resolve_dtype(spec.dtype)
    zero_stage = spec.zero_stage
    if zero_stage == 2 and num_ranks == spec.tensor_parallel_size:
        # Stage 2 shards gradients over ranks with the same weights. One rank has nothing to shard, and stage 1 does
        # less work on the host.
        zero_stage = 1
    engine = DeepSpeedEngine(
        model,
        spec.optimizer,
        zero_stage=zero_stage,
        dtype=dtype,
        device=device,
        zpg=spec.zpg,
        overlap_comm=spec.overlap_comm,
        tensor_group=tensor_group,
        expert_group=expert_group,
    )
    if not is_compiled:
        return engine
    unmet = {
        "packed sequences have no common length without ``micro_batch_tokens``": pack_tokens is None,
        "engines and trainers take turns on the GPU's memory": takes_turns,
        "only bfloat16 with ZeRO stage 0 or 1 keeps separate gradient sums": not engine.gradient_sums,
        "gradient checkpointing is on": spec.gradient_checkpointing,
    }
    if reasons := [reason for reason, holds in unmet.items() if holds]:
        logger.info("forward and backward passes are not replayed as CUDA graphs: %s", "; ".join(reasons))
    else:
        replay_full_packs(model.model.base_model, pack_tokens, engine.gradient_sums)
    return engine


def start_frozen(
    spec: ModelSpec,
    device: torch.device,
    sequence_group: SequenceGroup | None = None,
    tensor_group: TensorGroup | None = None,
    expert_group: ExpertGroup | None = None,
) -> torch.nn.Module | RestingModel:
    """Return a frozen actor on the device, whose passes are as fast as `spec` allows. Collective.

    See `place_frozen` for `spec.offload`. Raises ConfigError as `start_engine`.
    """
    frozen = load_reference(spec.path, **spec.load_options)
    frozen.mask_ids(spec.masked_ids)
    compile_model(frozen, spec, device.type)
    if sequence_group is not None:
        divide_sequences(frozen, sequence_group)
    if tensor_group is not None:
        divide_weights(frozen, tensor_group)
    if expert_group is not None:
        divide_experts(frozen, expert_group)
    return place_frozen(frozen, spec, device)


def compile_model(model: Any, spec: ModelSpec, device: str) -> bool:
    """Compile the layers of a model of `rlhf_models` as `spec.torch_compile` says; return whether they are compiled.

    Raises ConfigError when it is "on" and the layers cannot be compiled.
    """
    if spec.torch_compile == "off":
        return False
    is_sharded = spec.zero_stage == 3
    whole = layers_taken_whole(model) if is_sharded else []
    reason = compile_unavailable_reason(model.model, torch.device(device), inside_hooks=is_sharded)
    if is_sharded and not whole:
        # Adapters, for example; see `layers_taken_whole`.
        reason = "ZeRO stage 3 gathers weights inside the layers of this model"
    if spec.sequence_parallel_size > 1:
        reason = "sequence parallelism exchanges heads inside the layers"
    if spec.tensor_parallel_size > 1:
        reason = "tensor parallelism adds up over processes inside the layers"
    if spec.expert_parallel_size > 1:
        reason = "expert parallelism exchanges tokens inside the layers"
    if spec.aux_loss_coef:
        # transformers records them by hooks, which see nothing of compiled layers.
        reason = "the load-balancing loss reads what routers compute inside the layers"
    if spec.routing_replay:
        reason = "routing replay gives routers inside the layers another choice with every pass"
    if spec.is_in_4bit:
        reason = "its weights are restored from 4 bits inside the layers"
    if spec.images:
        reason = "what reads images gives the layers more than tokens"
    if reason is None and spec.torch_compile == "auto" and not spec.packing:
        reason = "without packing, nearly every batch has another shape and would be compiled again"
    if reason is None:
        if is_sharded:
            compile_forwards(whole)
        else:
            compile_layers(model.model)
        return True
    if spec.torch_compile == "on":
        raise ConfigError(f"the layers cannot be compiled: {reason}", hint="leave ``torch_compile`` at auto")
    logger.info("the layers are not compiled: %s", reason)
    return False
