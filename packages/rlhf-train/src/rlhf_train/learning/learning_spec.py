"""The settings of learning as frozen data, which the learner and every rank of it get. Torch-free."""

from collections.abc import Mapping
from dataclasses import dataclass

from rlhf_train.generation.run_spec import RunSpec
from rlhf_train.specs import ModelSpec


@dataclass(frozen=True, kw_only=True)
class LearningSpec(RunSpec):
    """What is learned, and how.

    Attributes:
        models: role ("actor", "critic", "reference", "teacher") to the settings of its model. The algorithm decides
            which of the last three there are.
        trainer_sleep: optimizer states and frozen models are in host memory while engines generate. Meanwhile, and
            while models run without gradients, no optimizer states are on the device; policy and critic have theirs
            there one after the other.
        sync_checksum: engines verify a checksum of each weight bucket.
        num_frozen_steps: steps at the start in which only the critic is updated.
        ema_beta: decay per update of a moving average of the actor's weights, saved with the actor; None for no
            average.
        early_forwards: models run on groups that are complete while others still generate; see
            `learning.forwards.BlockForwards`. A replay has the setting of the run that it replays, for it decides which
            rollouts share a pass.
        num_busy_engines: engines that generate while models run, in a replay those of the run that it replays. On
            CPUs the trainers leave cores to them, and sums depend on the number of cores.
    """

    models: Mapping[str, ModelSpec]
    trainer_sleep: bool = False
    sync_checksum: bool = False
    num_frozen_steps: int = 0
    ema_beta: float | None = None
    early_forwards: bool = False
    num_busy_engines: int = 0

    @property
    def pack_tokens(self) -> int:
        """Tokens of a full pack: the limit, or else those of a micro-batch of the longest rollouts."""
        batch = self.batch
        return batch.micro_batch_tokens or batch.micro_train_batch_size * self.engine.max_model_len

    @property
    def takes_turns(self) -> bool:
        """Whether engines and trainers take turns on the memory of GPUs."""
        return self.trainer_sleep or self.engine.enable_sleep
