"""What DeepSpeed keeps under names outside of its interface: master weights, sums of gradients, shards of weights.

Another version may rename them. Nothing else would then say that bfloat16 weights are saved as master weights, that
moments are lost, or that gradients are missing in the norm. So the names stand in `deepspeed_internals.toml`. An engine
looks for them when it starts (`check_optimizer`, `check_shards`) and tries what they lead to (`check_masters`,
`check_gradient_sums`). `import_deepspeed` looks for those of its modules. Only this file imports private names of
DeepSpeed.

`rlhf_models`, which does not depend on DeepSpeed, reads `ds_id` and `ds_shape` of weights, too.
"""

import os
import sys
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from rlhf_data.errors import EngineError
from rlhf_kernels import accumulate_
from rlhf_rollout.host import collection_paused
from rlhf_rollout.private_names import missing
from rlhf_train.engine.shards import WEIGHT, Shards, WeightSlice, first_element, save_moments

TESTED_VERSION = "0.19.8"

_TABLES = tomllib.loads((Path(__file__).parent / "deepspeed_internals.toml").read_text(encoding="utf-8"))
OPTIMIZER_NAMES: Mapping[str, Sequence[str]] = _TABLES["optimizers"]
MODULE_NAMES: Mapping[str, Sequence[str]] = _TABLES["modules"]
EXPERT_NAMES: Mapping[str, Sequence[str]] = _TABLES["expert_modules"]
SHARD_NAMES: Sequence[str] = _TABLES["weights"]["sharded"]


def import_deepspeed(device: str) -> Any:
    """Return the module, set up for "cuda" or "cpu". Raises EngineError for one that lacks `MODULE_NAMES`."""
    os.environ.setdefault("DS_ACCELERATOR", device)
    if device == "cpu":
        # The number of CPU devices for DeepSpeed. Set it anew for each rank set: a Ray worker inherits the number of a
        # training that ran earlier in the process that started it.
        os.environ["LOCAL_SIZE"] = os.environ.get("WORLD_SIZE", "1")
    if "deepspeed" not in sys.modules:
        with collection_paused():
            _first_import()
    import deepspeed

    if lost := missing(MODULE_NAMES):
        raise _unknown(f"there is no {', '.join(lost)}")
    # On CPUs DeepSpeed would compile this extension at first use, and leak a shared-memory segment per run. Gloo does
    # not need it.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.utils.logger.setLevel("ERROR")
    return deepspeed


def _first_import() -> None:
    """Import DeepSpeed without what nothing here uses and takes seconds in every process.

    Its autotuner imports MLflow where that is installed. Its Muon optimizer, which it compares every optimizer with, is
    compiled on import.
    """
    is_hidden = "mlflow" not in sys.modules
    if is_hidden:
        sys.modules["mlflow"] = None  # type: ignore[assignment]
    try:
        from deepspeed.runtime import compiler
    finally:
        if is_hidden:
            del sys.modules["mlflow"]
    compile_decorator = compiler.compile
    compiler.compile = lambda: lambda function: function
    try:
        import deepspeed.runtime.zero.muon.muon_optimizer  # noqa: F401
    finally:
        compiler.compile = compile_decorator


def _unknown(what: str) -> EngineError:
    import deepspeed

    message = f"DeepSpeed {deepspeed.__version__.strip()} keeps its states in a way that is not known: {what}"
    return EngineError(message, hint=f"install deepspeed=={TESTED_VERSION}, which is tested")


def _require(owner: Any, names: Iterable[str]) -> None:
    if missing := [name for name in names if not hasattr(owner, name)]:
        raise _unknown(f"{getattr(owner, '__name__', type(owner).__name__)} has no {', '.join(missing)}")


def check_shards(model: nn.Module) -> None:
    """Raise EngineError unless the weights of a model that DeepSpeed has sharded (stage 3) have the known names."""
    for weight in model.parameters():
        _require(weight, SHARD_NAMES)


def check_optimizer(wrapper: Any, optimizer: torch.optim.Optimizer) -> None:
    """Raise EngineError unless `wrapper`, DeepSpeed's around `optimizer` or `optimizer` itself, has the known names."""
    if wrapper is optimizer:
        return
    kind = type(wrapper).__name__
    if kind not in OPTIMIZER_NAMES:
        raise _unknown(f"its optimizer is {kind}")
    _require(wrapper, OPTIMIZER_NAMES[kind])
    if wrapper.optimizer is not optimizer:
        raise _unknown(f"{kind} updates weights by {type(wrapper.optimizer).__name__}")


def weight_slices(module: nn.Module, wrapper: Any) -> list[WeightSlice]:
    """Return the parts of all trained weights that this rank keeps, for what `check_optimizer` has checked.

    The weights come in the same order on all ranks. Without ZeRO all ranks keep all weights.
    """
    named = [(name, weight) for name, weight in module.named_parameters() if weight.requires_grad]
    kind = type(wrapper).__name__
    if kind == "DeepSpeedZeroOptimizer_Stage3":
        return list(_stage_3_slices(named, wrapper))
    if kind == "BF16_Optimizer":
        # `check_masters` says what a list that is too short lacks.
        groups = zip(wrapper.bf16_groups, wrapper.fp32_groups_flat_partition, strict=False)
    elif kind == "DeepSpeedZeroOptimizer":
        groups = zip(wrapper.bit16_groups, wrapper.single_partition_of_fp32_groups, strict=False)
    else:
        return [WeightSlice(name, first_element(weight), weight.numel(), weight, 0) for name, weight in named]
    names = {id(weight): name for name, weight in named}
    found = []
    for weights, flat in groups:
        for weight in weights:
            _require(weight, ["_hp_mapping"])
            mapping = weight._hp_mapping
            if mapping is None:
                found.append(WeightSlice(names[id(weight)], 0, 0, flat, 0))
                continue
            address = mapping.hp_fragment_address
            start = first_element(weight) + mapping.lp_fragment_address.start
            found.append(WeightSlice(names[id(weight)], start, address.numel, flat, address.start))
    return found


def _stage_3_slices(named: list[tuple[str, Any]], wrapper: Any) -> Iterator[WeightSlice]:
    rank = torch.distributed.get_rank()
    for name, weight in named:
        group, offset, size = wrapper.grad_position[wrapper.get_param_id(weight)]
        start = min(rank * size, weight.ds_numel)
        # ZeRO-3 pads the last part of a weight.
        rest = min(size, weight.ds_numel - start)
        yield WeightSlice(name, start, rest, wrapper.fp32_partitioned_groups_flat[group], offset)


@torch.no_grad()
def check_masters(module: nn.Module, everywhere: Sequence[WeightSlice], optimizer: torch.optim.Optimizer) -> None:
    """Raise EngineError unless `everywhere`, of `weight_slices`, leads to the master weights of a new engine.

    The optimizer must update these tensors and no others. Both ends of each part must round to the weight in the
    model. What is written to one element must be there in what a checkpoint saves and where DeepSpeed looks for it.
    """
    flats = {owned.flat for owned in everywhere}
    if any(weight not in flats for group in optimizer.param_groups for weight in group["params"]):
        raise _unknown("its optimizer updates other tensors than the master weights found")
    weights = dict(module.named_parameters())
    if lost := sorted({name for name, w in weights.items() if w.requires_grad} - {owned.name for owned in everywhere}):
        raise _unknown(f"there is no master weight of {', '.join(lost[:3])}")
    kept = [owned for owned in everywhere if owned.size]
    for owned in kept:
        weight = weights[owned.name]
        shard = weight.ds_tensor if hasattr(weight, "ds_id") else weight
        first = 0 if hasattr(weight, "ds_id") else owned.start - first_element(weight)
        part = shard.detach().reshape(-1)[first : first + owned.size]
        if not same_ends(owned.cut(owned.flat), part):
            raise _unknown(f"the master weight found for {owned.name} has other values than the weight")
    if kept:
        smallest = min(kept, key=lambda owned: owned.size)
        _check_round_trip(smallest, weights[smallest.name])


def same_ends(master: Tensor, weight: Tensor) -> bool:
    """Return whether the first and the last elements of two tensors [n] are equal in the type of `weight`."""
    if master.shape != weight.shape:
        return False
    step = max(len(weight) - 1, 1)
    return torch.allclose(master[::step].to(weight.dtype), weight[::step], rtol=0, atol=0, equal_nan=True)


def _check_round_trip(owned: WeightSlice, weight: Any) -> None:
    element = owned.cut(owned.flat)[:1]
    before = element.clone()
    written = 0.25 if float(before) == 0.5 else 0.5
    element.fill_(written)
    shards = Shards()
    save_moments(shards, [owned], {})
    read = [float(part.view(-1)[0]) for part in (shards.tensors[f"{WEIGHT}/{owned.name}"], _master_of(weight))]
    element.copy_(before)
    if read != [written, written]:
        raise _unknown(f"{written} is written to the master weight of {owned.name}, and read as {read}")


def _master_of(weight: Any) -> Tensor:
    """Return where DeepSpeed's own functions find this rank's part of the master weight of `weight`."""
    if hasattr(weight, "ds_id"):
        from deepspeed.utils import safe_get_local_fp32_param

        return safe_get_local_fp32_param(weight)
    return weight._hp_mapping.get_hp_fragment() if hasattr(weight, "_hp_mapping") else weight


def float32_sums(wrapper: Any) -> dict[nn.Parameter, Tensor]:
    """Return DeepSpeed's float32 sum of the gradients of each bfloat16 weight, at stage 1."""
    groups = zip(wrapper.bf16_groups, wrapper.fp32_groups_gradients, strict=False)
    return {weight: total for weights, totals in groups for weight, total in zip(weights, totals, strict=False)}


def add_gradients_at_once(sums: Mapping[nn.Parameter, Tensor]) -> None:
    """Add each bfloat16 gradient to DeepSpeed's float32 sum as soon as backward has computed it, and free it.

    DeepSpeed itself makes a float32 copy of the gradient and adds the copy, which moves twice as much memory.
    """

    def add(weight: nn.Parameter) -> None:
        accumulate_(sums[weight], weight.grad)
        weight.grad = None

    for weight in sums:
        weight.register_post_accumulate_grad_hook(add)


def flat_sums(wrapper: Any) -> list[Tensor]:
    """Return the memory in which gradients add up, where DeepSpeed keeps it between updates: all zeros, or not read.

    At stage 1, for bfloat16 weights, these are the flat tensors that `float32_sums` are views of.
    """
    kind = type(wrapper).__name__
    if kind == "BF16_Optimizer":
        return wrapper.fp32_groups_gradients_flat
    return [wrapper.grad_partitions_flat_buffer] if kind == "DeepSpeedZeroOptimizer_Stage3" else []


def reduce_buckets(wrapper: Any) -> list[Tensor]:
    """Return the buffers in which stage 3 collects gradients until it reduces them; empty between updates."""
    is_sharded = type(wrapper).__name__ == "DeepSpeedZeroOptimizer_Stage3"
    return [bucket.buffer for bucket in wrapper.ipg_buckets.values()] if is_sharded else []


def check_gradient_sums(wrapper: Any, trained: Iterable[nn.Parameter]) -> None:
    """Raise EngineError unless each trained weight has a sum of gradients that goes into the norm and the update."""
    sums = float32_sums(wrapper)
    if lost := [weight for weight in trained if weight not in sums]:
        raise _unknown(f"{len(lost)} weights have no sum of gradients")
    flats = {flat.untyped_storage().data_ptr() for flat in wrapper.fp32_groups_gradients_flat}
    apart = [*sums.values(), *wrapper.fp32_groups_gradient_flat_partition]
    if any(part.untyped_storage().data_ptr() not in flats for part in apart):
        raise _unknown("sums of gradients do not lie in the flat ones")
    if other := [weight for weight, total in sums.items() if total.numel() != weight.numel()]:
        raise _unknown(f"the sums of the gradients of {len(other)} weights have other sizes")


def clip_whole_groups(wrapper: Any, counts: Callable[[nn.Parameter], bool] | None = None) -> None:
    """Make DeepSpeed compute the gradient norm, and clip, on the flat float32 sums of each parameter group.

    DeepSpeed itself does both weight by weight, in hundreds of kernel launches, and skips weights whose gradient it did
    not see, such as those that CUDA graphs added to. `counts` says which weights this rank adds to the norm; None for
    all.
    """
    sums = float32_sums(wrapper)

    def gradients(for_clipping: bool = False) -> Any:
        flat = wrapper.fp32_groups_gradients_flat
        if for_clipping:
            return flat
        experts: dict[str, list[Tensor]] = {}
        if counts is not None:
            flat = [total.view(-1) for weight, total in sums.items() if counts(weight)]
        else:
            groups = wrapper.optimizer.param_groups
            for group, total in zip(groups, flat, strict=True):
                if group.get("moe"):
                    experts.setdefault(group["name"], []).extend(chunks([total]))
            flat = [total for group, total in zip(groups, flat, strict=True) if not group.get("moe")]
        return chunks(flat), experts

    def chunks(flat: list[Tensor]) -> list[Tensor]:
        # CPU norms sum sequentially and lose precision over many elements; split into chunks of 2^20.
        return [part for whole in flat for part in whole.split(len(whole) if whole.is_cuda else 1 << 20)]

    wrapper.get_grads_for_norm = gradients


def leave_stage_1(wrapper: Any, rank: int) -> dict[Tensor, tuple[Tensor, Tensor, Tensor | None]]:
    """Let DeepSpeed's bfloat16 optimizer of stage 1 forget its master weights.

    Returns, by what it has in its groups: this rank's master weights, weights and sums of gradients, [n] each.
    """
    masters = wrapper.fp32_groups_flat_partition
    gradients = wrapper.fp32_groups_gradient_flat_partition
    weights = [parts[rank] for parts in wrapper.bf16_partitioned_groups]
    _check_weights(masters, weights)
    # Without them, DeepSpeed neither gives them gradients, which are on another device, nor rounds them to weights.
    wrapper.fp32_groups_flat_partition = []
    wrapper._hp_optimizer_states_linked = True
    return {parts[0]: parts for parts in zip(masters, weights, gradients, strict=True)}


def leave_stage_3(wrapper: Any) -> dict[Tensor, tuple[Tensor, Tensor, Tensor | None]]:
    """Give DeepSpeed's optimizer of stage 3 stand-ins for its master weights; return the same as `leave_stage_1`.

    A stand-in has the size of the master weights and memory for one element. On the device, it takes the gradient,
    which DeepSpeed makes for each update.
    """
    parts: dict[Tensor, tuple[Tensor, Tensor, Tensor | None]] = {}
    masters, weights = wrapper.fp32_partitioned_groups_flat, wrapper.fp16_partitioned_groups_flat
    _check_weights(masters, weights)
    for master, weight in zip(masters, weights, strict=True):
        stand_in = master.detach().new_zeros(1).expand(len(master)).requires_grad_()
        stand_in.ds_id = master.ds_id
        parts[stand_in] = (master, weight, None)
    wrapper.fp32_partitioned_groups_flat = [*parts]
    # After a group's update, DeepSpeed would round the stand-in to weights. The update has done so with the masters.
    wrapper._reassign_or_swap_out_partitioned_parameters = wrapper._unflatten_partitioned_parameters
    return parts


def _check_weights(masters: Sequence[Tensor], weights: Sequence[Tensor]) -> None:
    if not all(same_ends(master.detach(), weight) for master, weight in zip(masters, weights, strict=True)):
        raise _unknown("the weights that an update rounds to are not those of the master weights")


def divided_linear(linear: nn.Linear, dim: int, group: torch.distributed.ProcessGroup, name: str) -> nn.Module:
    """Return AutoTP's layer with this rank's part of a linear layer's weight, which is divided along `dim`.

    It adds the gradient of its input up over the ranks where rows of the weight are divided, and its output where
    columns are.
    """
    from deepspeed.module_inject import LinearAllreduce, LinearLayer, set_autotp_mode

    set_autotp_mode(training=True)  # for frozen models, too: the other mode overwrites its inputs
    return (LinearLayer if dim == 0 else LinearAllreduce)(linear, group, name=name)


def form_expert_group(size: int) -> tuple[str, torch.distributed.ProcessGroup]:
    """Form DeepSpeed's groups of `size` neighbouring ranks that divide experts, and of the ranks with the same ones.

    Returns its name for them, and the former group of this rank. Collective. Raises EngineError without `EXPERT_NAMES`.
    """
    if lost := missing(EXPERT_NAMES):
        raise _unknown(f"there is no {', '.join(lost)}")
    from deepspeed.utils import groups

    name = f"ep_size_{size}"
    groups._create_expert_and_data_parallel(size)
    return name, groups._get_expert_parallel_group(name)


def exchanged(rows: Tensor, sent: list[int], received: list[int], group: torch.distributed.ProcessGroup) -> Tensor:
    """Return the rows [M, H] that ranks of `group` send to this one, in order of ranks. Collective, as its gradient.

    Args:
        rows: [N, H], those for rank 0 of the group first.
        sent, received: how many go to each rank, and come from it.
    """
    return expert_exchange()._AllToAllV.apply(group, rows, sent, received)


def expert_exchange() -> Any:
    """Return DeepSpeed's module of how ranks that divide experts exchange tokens."""
    from deepspeed.module_inject import auto_ep_layer

    return auto_ep_layer


def expert_module() -> Any:
    """Return the class by which DeepSpeed finds that a model has experts that ranks divide."""
    from deepspeed.moe.layer import MoE

    return MoE


def group_of_copies() -> Any:
    """Return the ranks that have a second copy of weights among them (`ModelSpec.zpg`), None before they are formed."""
    from deepspeed.utils import groups

    _require(groups, ["_get_zero_param_intra_parallel_group"])
    return groups._get_zero_param_intra_parallel_group()


def local_part(weight: nn.Parameter) -> Tensor:
    """Return what this rank keeps of a weight: its shard with ZeRO stage 3, otherwise the whole."""
    return weight.ds_tensor if hasattr(weight, "ds_id") else weight


def num_elements(weight: nn.Parameter) -> int:
    """Return the number of elements of a weight, of which this rank may keep a shard."""
    return weight.ds_numel if hasattr(weight, "ds_id") else weight.numel()


def drop_copies(weights: Iterable[nn.Parameter]) -> None:
    """Forget the second copy of weights (`ModelSpec.zpg`). The next pass gathers their shards, and copies them anew."""
    for weight in weights:
        if hasattr(weight, "ds_id"):
            weight.ds_secondary_tensor = None


def frozen_parts(model: nn.Module) -> Iterator[Tensor]:
    """Yield all that this rank keeps of the weights of a frozen model, with its part of their second copy."""
    for weight in model.parameters():
        yield local_part(weight)
        if hasattr(weight, "ds_id") and weight.ds_secondary_tensor is not None:
            yield weight.ds_secondary_tensor
