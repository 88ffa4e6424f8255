"""The `TrainEngine` on DeepSpeed: ZeRO stages 0 to 3, on CUDA with NCCL or on CPUs with gloo.

No other file imports DeepSpeed, except `engine.deepspeed_internals`, `engine.process_group`, `engine.tensor_parallel`
and `engine.expert_parallel`.
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from io import StringIO
from typing import Any

import torch
from torch import Tensor

from rlhf_data.errors import CheckpointError, EngineError
from rlhf_models.four_bit import packed_layers
from rlhf_models.host_states import HostStates, RestingModel
from rlhf_models.loading import resolve_dtype
from rlhf_models.lora import adapters_by_weight
from rlhf_models.weights import hf_named_weights
from rlhf_rollout.host import quick_collection
from rlhf_train.engine.deepspeed_internals import (
    add_gradients_at_once,
    check_gradient_sums,
    check_masters,
    check_optimizer,
    check_shards,
    clip_whole_groups,
    drop_copies,
    flat_sums,
    float32_sums,
    frozen_parts,
    group_of_copies,
    import_deepspeed,
    local_part,
    num_elements,
    reduce_buckets,
    weight_slices,
)
from rlhf_train.engine.expert_parallel import ExpertGroup
from rlhf_train.engine.optimizer import Muon, make_optimizer
from rlhf_train.engine.protocol import StepStats, learning_rate_at
from rlhf_train.engine.shards import (
    COLUMN_PARTS,
    WEIGHT,
    ShardReader,
    Shards,
    column_parts,
    first_element,
    load_moments,
    load_weights,
    part_of,
    save_moments,
)
from rlhf_train.engine.tensor_parallel import TensorGroup
from rlhf_train.engine.whole_layers import call_layers_equally, layers_taken_whole, num_gathered_ahead
from rlhf_train.specs import ModelSpec, OptimizerSpec


class DeepSpeedEngine:
    """One model trained by DeepSpeed. Call `process_group.init_process_group` first."""

    def __init__(
        self,
        model: torch.nn.Module,
        spec: OptimizerSpec,
        *,
        zero_stage: int,
        dtype: torch.dtype,
        device: str,
        zpg: int = 1,
        overlap_comm: bool = False,
        tensor_group: TensorGroup | None = None,
        expert_group: ExpertGroup | None = None,
    ) -> None:
        """Shard `model` over the ranks and give it an optimizer. Collective.

        Args:
            model: moved to the device, trained in place.
            spec: the optimizer and its schedule.
            zero_stage: 0 to 3. Stage 0 in bfloat16, or with divided experts, runs as stage 1.
            dtype: of the weights.
            device: "cuda" or "cpu".
            zpg, overlap_comm: see `ModelSpec`. The first is the same for all models of the process.
            tensor_group: the ranks that divide the weights of `model` (`divide_weights`), likewise; None if each has
                all. Below ZeRO stage 3.
            expert_group: the ranks that divide the experts of `model` (`divide_experts`), or None; likewise.

        Raises:
            ConfigError: nothing in the model is for Muon.
            EngineError: DeepSpeed refuses the combination, or keeps its states in another way than the tested version.
        """
        self._deepspeed = import_deepspeed(device)
        if zero_stage == 0 and (dtype == torch.bfloat16 or expert_group is not None):
            # Stage 0 accumulates gradients in bfloat16, where the small gradient of one more micro-batch is rounded
            # away. Stage 1 accumulates in float32.
            zero_stage = 1
        self._spec = spec
        self._moment_dtype = torch.bfloat16 if spec.bf16_moments else torch.float32
        self._zero_stage = zero_stage
        self._is_plain = zero_stage == 0 and dtype == torch.float32
        self._num_steps = 0
        self._tensor_group = tensor_group
        self._expert_group = expert_group
        # Ranks that have the same weights, and passes of their own.
        group = torch.distributed.group.WORLD if tensor_group is None else tensor_group.get_data_parallel_group()
        self._num_ranks = torch.distributed.get_world_size(group)
        self._rank = torch.distributed.get_rank(group)
        self.yields_everywhere = False  # see `local_weights`
        self.device = torch.device("cuda", torch.cuda.current_device()) if device == "cuda" else torch.device("cpu")
        optimizer = make_optimizer(model, spec, fused=device == "cuda")
        config = _deepspeed_config(spec.max_norm, zero_stage, dtype, self._num_ranks, zpg)
        # DeepSpeed then gathers weights on a stream that does not wait for what has changed them. `step` reads the
        # norm, and `local_weights` waits at its end; nothing waits for frozen models that come from host memory.
        self._overlaps = config["zero_optimization"]["overlap_comm"] = overlap_comm and zero_stage == 3
        try:
            self._engine = _wrapped(model, config, dtype, self.device, optimizer=optimizer, mpu=tensor_group)
        except (AssertionError, NotImplementedError, ValueError) as error:
            raise EngineError(f"DeepSpeed: {error}", hint="try another ``zero_stage``") from error
        self.module = self._engine.module
        self._packed = packed_layers(self.module)
        wrapper = self._engine.optimizer
        check_optimizer(wrapper, optimizer)
        self._inner_optimizer = optimizer  # PyTorch's, around which DeepSpeed puts its own
        self._trained = [(name, weight) for name, weight in self.module.named_parameters() if weight.requires_grad]
        # Where this rank keeps master weights. Found here, because DeepSpeed forgets it while the states are offloaded.
        everywhere = weight_slices(self.module, wrapper)
        check_masters(self.module, everywhere, optimizer)
        self._slices = [part for part in everywhere if part.size]
        self._flats = {part.flat for part in everywhere}
        if isinstance(optimizer, Muon):
            optimizer.find(everywhere, num_ranks=self._num_ranks if zero_stage else 1)
        # The float32 sums of gradients by weight, in bfloat16 at stage 1; empty otherwise. CUDA graphs of a backward
        # pass add to them directly (`rlhf_models.backbone.replay_full_packs`).
        self.gradient_sums: dict[torch.nn.Parameter, Tensor] = {}
        self._host_states = HostStates()
        self._sums = flat_sums(wrapper)
        if self._engine.bfloat16_enabled() and zero_stage == 1:
            check_gradient_sums(wrapper, [weight for _, weight in self._trained])
            self.gradient_sums = float32_sums(wrapper)
            add_gradients_at_once(self.gradient_sums)
            clip_whole_groups(wrapper, None if tensor_group is None else tensor_group.counts)
            # A single rank has nothing to reduce, yet DeepSpeed would copy the sums to a buffer and back.
            self._engine.enable_backward_allreduce = self._num_ranks > 1
        if spec.offload:
            optimizer.take_over(
                wrapper,
                is_sharded=zero_stage == 3,
                rank=self._rank,
                dtype=self._moment_dtype,
                folder=spec.offload_path,
            )

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """See `TrainEngine`."""
        return self._engine(*args, **kwargs)

    def backward(self, loss: Tensor, *, is_last: bool) -> None:
        """See `TrainEngine`. DeepSpeed averages gradients over ranks; the factor turns the mean into a sum."""
        self._engine.set_gradient_accumulation_boundary(is_last)
        self._engine.backward(loss * self._num_ranks)

    def step(self) -> StepStats:
        """See `TrainEngine`."""
        learning_rate = learning_rate_at(self._spec, self._num_steps)
        for group in self._engine.optimizer.param_groups:
            group["lr"] = learning_rate
        if self._is_plain:
            # Without a ZeRO or mixed-precision optimizer, DeepSpeed clips the gradients but neither reports nor tests
            # their norm. The gradients are summed over the ranks, so all ranks find the same norm.
            weights = [weight for weight in self.module.parameters() if weight.grad is not None]
            if self._tensor_group is None:
                norm = float(torch.nn.utils.get_total_norm([weight.grad for weight in weights]))
            else:
                norm = self._tensor_group.norm(weights)
            if not math.isfinite(norm):
                self._engine.optimizer.zero_grad()
                return StepStats(norm, learning_rate)
            self._engine.step()
        else:
            # These optimizers test the norm before they step, skip the step if it is not finite, and report infinity.
            self._engine.step()
            norm = float(self._engine.get_global_grad_norm())
        self._num_steps += math.isfinite(norm)
        return StepStats(norm, learning_rate)

    def named_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the Hugging Face name and the full tensor of every weight, with its adapter merged. Collective.

        ZeRO-3 and a tensor group gather one weight at a time: a tensor is valid until the next one is requested.
        """
        adapters = adapters_by_weight(self.module)

        @contextmanager
        def whole(weight: torch.nn.Parameter) -> Iterator[Tensor]:
            adapter = adapters.get(weight)
            with self._gathered([weight, *(adapter or ())[:2]]):
                base = self._packed[weight].whole() if weight in self._packed else self._whole(weight)
                yield adapter.merged(base) if adapter else base

        yield from hf_named_weights(self.module, whole)

    def named_adapters(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the two matrices of each adapter, B with its scale, named as peft names them in the model. Collective.

        A tensor is valid until the next one is requested.
        """
        names = {weight: name for name, weight in self.module.model.named_parameters()}
        for weight, adapter in adapters_by_weight(self.module).items():
            name = names[weight].removesuffix(".base_layer.weight")
            with self._gathered([adapter.a, adapter.b]), torch.no_grad():
                yield f"{name}.lora_A.weight", adapter.a
                yield f"{name}.lora_B.weight", adapter.b * adapter.scale

    def state_dict(self, *, wanted: bool = True) -> dict[str, Tensor]:
        """Return all full weights and buffers on the CPU, under the module's own names. Collective.

        Those of layers in 4 bits are as the layers store them. A rank with `wanted` False takes part in the gathering
        and returns an empty dict.
        """
        state = {}
        for name, parameter in self.module.named_parameters():
            with self._gathered([parameter]):
                whole = self._whole(parameter)
                if wanted:
                    state[name] = whole.to("cpu", copy=True)
        if wanted:
            state |= {name: buffer.detach().cpu() for name, buffer in self.module.named_buffers()}
        return state

    def save_shards(self, shards: Shards) -> None:
        """Copy this rank's part of the trained weights and of the optimizer's state to host memory.

        Raises CheckpointError when the optimizer has states of other tensors than the master weights.
        """
        if unknown := [tensor for tensor in self._inner_optimizer.state if tensor not in self._flats]:
            message = f"the optimizer has states of {len(unknown)} tensors that are no master weights"
            raise CheckpointError(message, hint="report it: the checkpoint would lack them")
        shards.numbers["num_updates"] = self._num_steps
        # Without ZeRO every rank has everything, and one copy is enough.
        if self._zero_stage > 0 or self._rank == 0:
            shards.copies = not self._spec.offload
            group = self._tensor_group
            counted = {name for name, weight in self._trained if group is None or group.counts(weight)}
            kept = [part for part in self._slices if part.name in counted]
            save_moments(shards, kept, self._inner_optimizer.state)
            shards.numbers[COLUMN_PARTS] = column_parts(self.module)

    @torch.no_grad()
    def load_shards(self, reader: ShardReader) -> None:
        """Set the trained weights, the optimizer's state and the number of updates to the saved ones. Collective.

        Raises CheckpointError when the files belong to another model.
        """
        reader.check({name: num_elements(weight) * part_of(weight).count for name, weight in self._trained})
        reader.column_parts = column_parts(self.module)
        optimizer = self._inner_optimizer
        is_fused = optimizer.defaults["fused"]
        load_moments(reader, self._slices, optimizer.state, dtype=self._moment_dtype, step_on_device=is_fused)
        self._num_steps = int(reader.numbers["num_updates"])
        if self._is_plain:
            return  # the optimizer works on the weights themselves
        if self._zero_stage < 3:
            load_weights(self.module, reader)
            return
        ranges = self.local_ranges()
        for name, part in self.local_weights():
            start, size = ranges[name]
            part.view(-1)[:size].copy_(reader.read(f"{WEIGHT}/{name}", start, size))

    @property
    def keeps_weights(self) -> bool:
        """Whether this rank keeps weights for the rank set: its shards with ZeRO-3, otherwise all of them on rank 0,
        and experts on the first ranks that divide them."""
        first_ranks = 1 if self._expert_group is None else self._expert_group.size
        return self._zero_stage == 3 or self._rank < first_ranks

    def local_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the name and tensor of the trained weights that this rank keeps for the rank set; writing to them
        changes the model. With ZeRO-3 this is the rank's shard of each. Otherwise rank 0 yields all, others none; in a
        tensor group, this holds for the ranks that have the same parts, and in an expert group its ranks yield their
        experts, too. With `yields_everywhere`, all ranks yield what they have."""
        if not (self.keeps_weights or self.yields_everywhere):
            return
        has_all = self._zero_stage == 3 or self._rank == 0 or self.yields_everywhere
        for name, parameter in self._trained:
            if not has_all and part_of(parameter).count == 1:
                continue
            # ZeRO-3 leaves small weights gathered after an update. Entering and leaving the context partitions them
            # again, which brings the newest values into the shard.
            with self._gathered([parameter]):
                pass
            yield name, local_part(parameter).data
        if self._overlaps and self.device.type == "cuda":
            torch.cuda.synchronize()

    def local_ranges(self) -> dict[str, tuple[int, int]]:
        """Return, for each tensor of `local_weights`, its first element's number in the whole flattened weight, and how
        many of its elements belong to the weight. ZeRO-3 pads the last shard."""
        if self._zero_stage < 3:
            return {name: (first_element(weight), weight.numel()) for name, weight in self._trained}
        ranges = {}
        for name, parameter in self._trained:
            size = local_part(parameter).numel()
            start = self._rank * size
            ranges[name] = start, max(min(size, num_elements(parameter) - start), 0)
        return ranges

    def offload(self) -> None:
        """Move optimizer states and master weights to host memory, and free the memory of gradients.

        The model's weights stay on the device, because the next weight sync reads them there. Their second copy goes.
        Call it between updates.
        """
        drop_copies(self.module.parameters())
        states = [part for state in self._inner_optimizer.state.values() for part in state.values()]
        moments = [part for part in states if torch.is_tensor(part) and part.numel() > 1]
        # Some optimizers in float32 work on the weights themselves.
        weights = {local_part(weight).untyped_storage().data_ptr() for _, weight in self._trained}
        flats = {part.flat: part.flat.untyped_storage().data_ptr() for part in self._slices}
        masters = [flat for flat, address in flats.items() if address not in weights]
        kept = [] if self._spec.offload else [*masters, *moments]
        self._host_states.offload(kept, [*self._sums, *reduce_buckets(self._engine.optimizer)])

    def reload(self) -> None:
        """Move back to the device what `offload` moved to the host."""
        self._host_states.reload()
        for total in self._sums:
            total.zero_()

    def _whole(self, weight: torch.nn.Parameter) -> Tensor:
        group = self._tensor_group or self._expert_group
        return weight.detach() if group is None else group.whole(weight)

    @contextmanager
    def _gathered(self, parameters: list[torch.nn.Parameter]) -> Iterator[None]:
        with self._deepspeed.zero.GatheredParameters(parameters, enabled=self._zero_stage == 3):
            yield
        # DeepSpeed has copied the weights, while a caller may write to their shards (`local_weights`).
        drop_copies(parameters)


def place_frozen(model: torch.nn.Module, spec: ModelSpec, device: torch.device) -> torch.nn.Module | RestingModel:
    """Return a module that runs a frozen `model` on the device.

    With ZeRO stage 3, each rank keeps a part of each weight. Passes gather the weights layer by layer, so that both
    this call and passes are collective. With `spec.offload` the weights are on a GPU only while the model is awake. On
    a CPU that changes nothing, because they lie in their files, mapped into memory.
    """
    num_ranks = torch.distributed.get_world_size()
    placed = model
    if spec.zero_stage < 3 or num_ranks == 1:
        model.to(device)
    else:
        dtype = resolve_dtype(spec.dtype)
        config = _deepspeed_config(0.0, spec.zero_stage, dtype, num_ranks, spec.zpg)
        placed = _wrapped(model, config, dtype, device)
    return RestingModel(placed, frozen_parts(placed)) if spec.offload and device.type == "cuda" else placed


class _Unsharded(torch.nn.Module):
    """The weights of a model, copied to the device one at a time, when DeepSpeed asks for the next one to shard.

    On a CPU, too: a loaded weight lies in its file, mapped into memory, and writing to it would keep a copy of it.
    """

    def __init__(self, model: torch.nn.Module, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self._weights = [*model.parameters()]
        self._form = {"dtype": dtype, "device": device, "copy": True}

    def parameters(self, recurse: bool = True) -> Iterator[torch.nn.Parameter]:
        for weight in self._weights:
            weight.data = weight.data.to(**self._form)
            yield weight


def _wrapped(
    model: torch.nn.Module, config: dict[str, Any], dtype: torch.dtype, device: torch.device, **options: Any
) -> Any:
    """Move a model to the device, weight by weight if they are sharded, and return DeepSpeed's engine of it."""
    deepspeed = import_deepspeed(device.type)
    # DeepSpeed's bfloat16 optimizer prints memory figures, and collects garbage dozens of times.
    with redirect_stdout(StringIO()), quick_collection():
        if config["zero_optimization"]["stage"] == 3:
            # By itself, DeepSpeed would move the whole model to the device before it shards it.
            # By itself, it would form the groups of ranks with copies for each model, and refuse to do so twice.
            has_copies = config["zero_optimization"]["zero_hpz_partition_size"] > 1
            copies = {"zero_param_parallel_group": group_of_copies()} if has_copies else {}
            layers = layers_taken_whole(model)
            for layer in layers:
                deepspeed.utils.set_z3_leaf_module(layer, True)
            call_layers_equally(model, layers)
            config["zero_optimization"]["stage3_prefetch_bucket_size"] = num_gathered_ahead(layers)
            unsharded = _Unsharded(model, dtype, device)
            deepspeed.zero.Init(module=unsharded, config_dict_or_path=config, dtype=dtype, **copies)
        engine, *_ = deepspeed.initialize(model=model.to(device), config=config, dist_init_required=False, **options)
    if config["zero_optimization"]["stage"] == 3:
        check_shards(engine.module)
    return engine


def _deepspeed_config(max_norm: float, zero_stage: int, dtype: torch.dtype, num_ranks: int, zpg: int) -> dict[str, Any]:
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": max_norm,
        "zero_optimization": {
            "stage": zero_stage,
            "overlap_comm": False,
            "contiguous_gradients": True,
            "zero_hpz_partition_size": zpg,
        },
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "bf16": {"enabled": dtype == torch.bfloat16},
        "steps_per_print": None,
        "timers": {"throughput": {"enabled": False}},  # its timers synchronize the device at every pass
    }
    if dtype == torch.bfloat16:
        config["data_types"] = {"grad_accum_dtype": "fp32"}
        if num_ranks > 1:
            # Else ranks add up in bfloat16, where the share of a rank with few tokens is rounded away. This doubles the
            # bytes that ranks send, and copies a bucket of gradients to float32. One rank has nothing to add up.
            config["communication_data_type"] = "fp32"
    return config
