"""Options of training: batch sizes, epochs and optimizers."""

import math
from collections.abc import Collection
from typing import Any

from rlhf_cli.config.paths import user_path
from rlhf_data.options.checks import without_effect
from rlhf_data.options.declare import Section, flag, flag_of, one_of, with_defaults
from rlhf_train.specs import ModelSpec, OptimizerSpec

Optimizer = one_of(("adam", "muon"))
_PASS_SIZES = ("micro_train_batch_size", "micro_rollout_batch_size")  # samples per pass
Scheduler = one_of(("cosine_with_min_lr", "linear", "constant"))


class TrainingSection(Section, title="training"):
    """Options of all training commands."""

    train_batch_size: int = flag(128, "samples per update, over all processes", ge=1)
    micro_train_batch_size: int = flag(8, "samples per forward-backward pass, on one training process", ge=1)
    micro_batch_tokens: int | None = flag(
        None, "with --packing_samples: tokens per pass on one training process, instead of micro-batch sizes", ge=2
    )
    max_epochs: int = flag(1, "passes over the samples of a step (ppo), or over the data set", ge=1)
    optim: Optimizer = flag(
        "adam",
        "adam: AdamW; muon: Muon for the matrices of the layers, whose updates are scaled to the size of AdamW's at the"
        " same learning rate, and AdamW for embeddings, heads, norms and biases",
    )
    muon_momentum: float = flag_of(OptimizerSpec.muon_momentum, "Muon's Nesterov momentum", default=0.95)
    adam_betas: tuple[float, float] = flag((0.9, 0.95), "AdamW's two betas")
    l2: float = flag_of(OptimizerSpec.weight_decay, "weight decay; norms and biases have none")
    max_norm: float = flag_of(OptimizerSpec.max_norm, "gradients are scaled down to this global norm; 0: no limit")
    lr_scheduler: Scheduler = flag("cosine_with_min_lr", "how the learning rate changes after warm-up")
    lr_warmup_ratio: float = flag(0.03, "share of the updates with linear warm-up", ge=0, le=1)
    min_lr_ratio: float = flag_of(
        OptimizerSpec.min_lr_ratio, "learning rate at the end of cosine_with_min_lr, as a share of its peak"
    )
    zero_stage: int = flag_of(
        ModelSpec.zero_stage,
        "DeepSpeed ZeRO stage; a single process, which has nothing to shard, runs stage 2 as stage 1",
    )
    zpg: int = flag_of(
        ModelSpec.zpg,
        "with --zero_stage 3: number of neighbouring training processes, such as those of a node, that divide a second"
        " copy of all weights (hpZ of ZeRO++); passes gather weights from this copy, not from all nodes. 1: no copy",
    )
    overlap_comm: bool = flag(
        False,
        "with --zero_stage 3: gather the weights of trained models, and reduce gradients, while layers compute, by a"
        " stream of its own; DeepSpeed's option of this name",
    )
    adam_offload: bool = flag(
        False,
        "with --bf16, and not at ZeRO stage 2 on several processes: keep AdamW's states (12 bytes per weight) in CPU"
        " memory, and bring them to the GPU part by part for each update, with the same result",
    )
    adam_offload_path: str | None = flag(
        None,
        "with --adam_offload: folder on a disk (NVMe) of each node for these states; the operating system keeps in"
        " memory what fits. None: all in CPU memory",
    )
    bf16_moments: bool = flag(
        False,
        "keep AdamW's two moments in bfloat16 (4 bytes per trained weight instead of 8), rounded stochastically so that"
        " their means stay exact",
    )
    seed: int = flag(42, "seed of all random numbers", ge=0, le=2**31 - 1)

    def check(self, given: Collection[str]) -> list[str]:
        """Return notices about the optimizer."""
        has_no_end = self.lr_scheduler != "cosine_with_min_lr"
        return without_effect(
            given,
            (self.optim == "adam", ["muon_momentum"], "--optim is adam"),
            (not self.adam_offload, ["adam_offload_path"], "--adam_offload is off"),
            (self.zero_stage < 3, ["overlap_comm"], f"--zero_stage is {self.zero_stage}"),
            (has_no_end, ["min_lr_ratio"], f"--lr_scheduler is {self.lr_scheduler}"),
            (self.micro_batch_tokens is not None, _PASS_SIZES, "--micro_batch_tokens takes its place"),
        )

    @property
    def sharding(self) -> dict[str, Any]:
        """How the weights of every model are divided over its processes, as fields of `ModelSpec`."""
        return {"zero_stage": self.zero_stage, "zpg": self.zpg, "overlap_comm": self.overlap_comm}

    def optimizer(self, learning_rate: float, num_updates: int) -> OptimizerSpec:
        """Return the optimizer of a model that is updated `num_updates` times."""
        offload_path = self.adam_offload_path
        return OptimizerSpec(
            learning_rate=learning_rate,
            betas=self.adam_betas,
            weight_decay=self.l2,
            muon_momentum=self.muon_momentum if self.optim == "muon" else None,
            max_norm=self.max_norm,
            scheduler=self.lr_scheduler,
            warmup_steps=math.ceil(self.lr_warmup_ratio * num_updates),
            total_steps=num_updates,
            min_lr_ratio=self.min_lr_ratio,
            offload=self.adam_offload,
            offload_path=None if offload_path is None else str(user_path(offload_path)),
            bf16_moments=self.bf16_moments,
        )


class PpoTrainingSection(TrainingSection):
    """Steps of `ppo`: each generates responses, scores them and trains on them."""

    num_episodes: int = flag(1, "passes over the prompts", ge=1)
    train_steps: int | None = flag(None, "largest number of steps; None: as many as --num_episodes needs", ge=1)
    freezing_actor_steps: int = flag(-1, "steps at the start in which only the critic is trained; -1: none", ge=-1)
    enable_ema: bool = flag(False, "also save an exponential moving average of the policy's weights")
    ema_beta: float = flag(0.992, "decay of that average per update", ge=0, lt=1)
    actor_learning_rate: float = flag_of(OptimizerSpec.learning_rate, "peak learning rate of the policy", default=1e-6)
    critic_learning_rate: float = flag_of(OptimizerSpec.learning_rate, "peak learning rate of the critic", default=9e-6)
    draft_learning_rate: float | None = flag(
        None,
        "peak learning rate of --vllm_draft_model, which learns the policy's responses of each step; engines get its"
        " weights with the policy's, and the run saves it in draft/. None: it stays as it is",
        gt=0,
    )


class OfflineTrainingSection(TrainingSection):
    """Training on fixed examples."""

    learning_rate: float = flag_of(OptimizerSpec.learning_rate, "peak learning rate", default=5e-6)


class RewardTrainingSection(with_defaults(OfflineTrainingSection, learning_rate=9e-6)):
    """Defaults for reward models."""


class CautiousTrainingSection(with_defaults(OfflineTrainingSection, learning_rate=1e-6)):
    """Defaults for objectives that need a low learning rate."""
