"""DeepSpeed behind `TrainEngine`: ZeRO 0 to 3 on CUDA with NCCL or on CPUs with gloo. The only file that imports it."""

import os
from collections.abc import Iterator, Mapping
from contextlib import redirect_stdout
from io import StringIO
from typing import Any

import torch
from torch import Tensor

from rlhf_data.errors import EngineError
from rlhf_kernels import accumulate_
from rlhf_models.weights import hf_named_weights
from rlhf_train.engine.protocol import StepStats, learning_rate_at
from rlhf_train.specs import OptimizerSpec


def init_process_group(*, rank: int, world_size: int, master: tuple[str, int], device: str) -> None:
    """Join the data-parallel ranks of this process's group at `master`: NCCL on "cuda", gloo on "cpu"."""
    os.environ.update(
        RANK=str(rank),
        WORLD_SIZE=str(world_size),
        LOCAL_RANK="0",
        MASTER_ADDR=master[0],
        MASTER_PORT=str(master[1]),
    )
    deepspeed = _import_deepspeed(device)
    if not torch.distributed.is_initialized():
        deepspeed.init_distributed(
            dist_backend="nccl" if device == "cuda" else "gloo", auto_mpi_discovery=False, verbose=False
        )


def _import_deepspeed(device: str) -> Any:
    os.environ.setdefault("DS_ACCELERATOR", device)
    if device == "cpu":
        os.environ.setdefault("LOCAL_SIZE", os.environ.get("WORLD_SIZE", "1"))
    import deepspeed

    # On a CPU this extension would be compiled at first use and leak a shared-memory segment a run; gloo needs none.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.utils.logger.setLevel("ERROR")
    return deepspeed


class DeepSpeedEngine:
    """One model trained by DeepSpeed. The process group must have been joined."""

    def __init__(
        self, model: torch.nn.Module, spec: OptimizerSpec, *, zero_stage: int, dtype: torch.dtype, device: str
    ) -> None:
        """Shard `model` and give it an AdamW optimizer. Raises EngineError when DeepSpeed refuses the combination."""
        deepspeed = _import_deepspeed(device)
        if zero_stage == 0 and dtype == torch.bfloat16:
            zero_stage = 1  # stage 0 adds gradients up in bfloat16: what small micro-batches contribute would be lost
        self._deepspeed = deepspeed
        self._spec = spec
        self._zero_stage = zero_stage
        self._is_plain = zero_stage == 0 and dtype == torch.float32
        self._num_steps = 0
        self._world_size = torch.distributed.get_world_size()
        self.device = torch.device("cuda", torch.cuda.current_device()) if device == "cuda" else torch.device("cpu")
        optimizer = torch.optim.AdamW(
            _parameter_groups(model, spec.weight_decay),
            lr=spec.learning_rate,
            betas=spec.betas,
            eps=spec.eps,
            fused=device == "cuda",
        )
        try:
            with redirect_stdout(StringIO()):  # where its bfloat16 optimizer tells of memory
                self._engine, *_ = deepspeed.initialize(
                    model=model.to(self.device),
                    optimizer=optimizer,
                    config=_deepspeed_config(spec, zero_stage, dtype),
                    dist_init_required=False,
                )
        except (AssertionError, NotImplementedError, ValueError) as error:
            raise EngineError(f"DeepSpeed: {error}", hint="try another --zero_stage") from error
        self.module = self._engine.module
        # In bfloat16 at stage 1: the float32 sums of gradients, which may be added to from outside.
        self.gradient_sums: dict[torch.nn.Parameter, Tensor] = {}
        if self._engine.bfloat16_enabled() and zero_stage == 1:
            self.gradient_sums = _gradient_sums(self._engine.optimizer)
            _add_gradients_at_once(self.gradient_sums)
            _clip_whole_groups(self._engine.optimizer)
            # DeepSpeed would copy the sums there and back for it.
            self._engine.enable_backward_allreduce = self._world_size > 1

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """See `TrainEngine`."""
        return self._engine(*args, **kwargs)

    def backward(self, loss: Tensor, *, is_last: bool) -> None:
        """See `TrainEngine`. DeepSpeed averages over ranks, hence the factor."""
        self._engine.set_gradient_accumulation_boundary(is_last)
        self._engine.backward(loss * self._world_size)

    def step(self) -> StepStats:
        """See `TrainEngine`."""
        learning_rate = learning_rate_at(self._spec, self._num_steps)
        for group in self._engine.optimizer.param_groups:
            group["lr"] = learning_rate
        # Without a ZeRO or mixed-precision optimizer, DeepSpeed clips but does not say what the norm was.
        gradients = [p.grad for p in self.module.parameters() if p.grad is not None] if self._is_plain else []
        norm = torch.nn.utils.get_total_norm(gradients) if gradients else None
        self._engine.step()
        self._num_steps += 1
        return StepStats(float(self._engine.get_global_grad_norm() if norm is None else norm), learning_rate)

    def named_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yield every weight whole, under its Hugging Face name; valid until the next is asked for. Collective."""
        for name, parameter in hf_named_weights(self.module):
            with self._gathered([parameter]):
                yield name, parameter.detach()

    def state_dict(self, *, wanted: bool = True) -> dict[str, Tensor]:
        """Return all weights on the CPU, under the module's own names; nothing where not `wanted`. Collective."""
        state = {}
        for name, parameter in self.module.named_parameters():
            with self._gathered([parameter]):
                if wanted:
                    state[name] = parameter.detach().to("cpu", copy=True)
        if wanted:
            state |= {name: buffer.detach().cpu() for name, buffer in self.module.named_buffers()}
        return state

    def local_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the part of the weights that this rank is to look after, in place: each weight's shard where they are
        sharded, else everything on rank 0 and nothing on others."""
        if self._zero_stage < 3 and torch.distributed.get_rank() > 0:
            return
        for name, parameter in self.module.named_parameters():
            with self._gathered([parameter]):  # small ones stay whole after a step; this splits them again
                pass
            yield name, parameter.ds_tensor if self._zero_stage == 3 else parameter.data

    def offload(self) -> None:
        """Move optimizer states, master weights and gradients to host memory. The weights stay, for the next sync."""
        from deepspeed.runtime.zero.offload_config import OffloadStateTypeEnum as States

        self._engine.offload_states(include=[States.optim_states, States.hp_params, States.lp_grads])

    def reload(self) -> None:
        """Undo `offload`."""
        self._engine.reload_states()

    def _gathered(self, parameters: list[torch.nn.Parameter]) -> Any:
        return self._deepspeed.zero.GatheredParameters(parameters, enabled=self._zero_stage == 3)


def _parameter_groups(model: torch.nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    # Decaying norms and biases pulls a scale towards 0 that is meant to be near 1.
    matrices = [p for p in model.parameters() if p.requires_grad and p.ndim >= 2]
    vectors = [p for p in model.parameters() if p.requires_grad and p.ndim < 2]
    groups = [{"params": matrices, "weight_decay": weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    return [group for group in groups if group["params"]]


def _gradient_sums(optimizer: Any) -> dict[torch.nn.Parameter, Tensor]:
    groups = zip(optimizer.bf16_groups, optimizer.fp32_groups_gradients, strict=True)
    return {weight: total for weights, totals in groups for weight, total in zip(weights, totals, strict=True)}


def _add_gradients_at_once(sums: Mapping[torch.nn.Parameter, Tensor]) -> None:
    """Add each bfloat16 gradient to DeepSpeed's float32 sums as soon as it is there, and free it.

    DeepSpeed would make a float32 copy of each and add that, which moves twice as much memory.
    """

    def add(weight: torch.nn.Parameter) -> None:
        accumulate_(sums[weight], weight.grad)
        weight.grad = None

    for weight in sums:
        weight.register_post_accumulate_grad_hook(add)


def _clip_whole_groups(optimizer: Any) -> None:
    """Have DeepSpeed take the norm of a group's sums at once, and clip them at once, in the place of hundreds of
    launches; also of those that were added to without its knowledge."""

    def gradients(for_clipping: bool = False) -> Any:
        flat = optimizer.fp32_groups_gradients_flat
        if for_clipping:
            return flat
        # A CPU adds a norm's squares up one after the other, which many are too many for.
        return [part for whole in flat for part in whole.split(len(whole) if whole.is_cuda else 1 << 20)], {}

    optimizer.get_grads_for_norm = gradients


def _deepspeed_config(spec: OptimizerSpec, zero_stage: int, dtype: torch.dtype) -> dict[str, Any]:
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": spec.max_norm,
        "zero_optimization": {"stage": zero_stage, "overlap_comm": False, "contiguous_gradients": True},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "bf16": {"enabled": dtype == torch.bfloat16},
        "steps_per_print": None,
        "timers": {"throughput": {"enabled": False}},  # it waits for the device at every pass
    }
    if dtype == torch.bfloat16:
        config["data_types"] = {"grad_accum_dtype": "fp32"}
        if zero_stage == 1:
            config["communication_data_type"] = "fp32"  # else float32 sums would be rounded for their way
    return config
