"""The settings of learning as frozen data, which the learner and every rank of it get. Torch-free."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from rlhf_data.errors import ConfigError
from rlhf_data.records import Rollout
from rlhf_train.generation.run_spec import RunSpec
from rlhf_train.specs import ModelSpec


def teacher_role(number: int) -> str:
    """Return the role of a teacher, by its number from 1."""
    return "teacher" if number == 1 else f"teacher {number}"


def is_teacher(role: str) -> bool:
    """Return whether `role` is that of a teacher."""
    return role.startswith("teacher")


@dataclass(frozen=True, kw_only=True)
class LearningSpec(RunSpec):
    """What is learned, and how.

    Attributes:
        models: role ("actor", "critic", "reference", "teacher", "draft") to the settings of its model. The algorithm
            decides which of critic, reference and teacher there are. Further teachers have the roles of `teacher_role`.
            A "draft" is the draft model of the engines, trained along in the actor's processes.
        teachers: data source to the role of its teacher, "" for all other sources; empty for one teacher of all.
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
    teachers: Mapping[str, str] = field(default_factory=dict)
    trainer_sleep: bool = False
    sync_checksum: bool = False
    num_frozen_steps: int = 0
    ema_beta: float | None = None
    early_forwards: bool = False
    num_busy_engines: int = 0

    def teacher_of(self, source: str) -> str:
        """Return the role of the teacher of a data source, of several. Raises ConfigError if it has none."""
        role = self.teachers.get(source) or self.teachers.get("")
        if role is None:
            named = ", ".join(sorted(self.teachers))
            hint = f"name one: ``teachers={source}=MODEL``, or MODEL alone for all sources without one"
            raise ConfigError(f"the data source {source} has no teacher, and {named} have one", hint=hint)
        return role

    @property
    def teacher_roles(self) -> list[str]:
        """The roles of the teachers."""
        return [role for role in self.models if is_teacher(role)]

    def parts_of_teachers(self, rollouts: Sequence[Rollout], sources: Mapping[str, str] | None) -> dict[str, list[int]]:
        """Return the rollouts of each teacher, by its role, if there are several; `sources` are given by group id."""
        if not self.teachers:
            return {}
        assert sources is not None
        owners = [self.teacher_of(sources[rollout.group_id]) for rollout in rollouts]
        return {role: [row for row, own in enumerate(owners) if own == role] for role in self.teacher_roles}

    @property
    def column_roles(self) -> list[str]:
        """The models that compute something of the rollouts before the update."""
        runs = [role for role in self.models if role != "draft"]
        return runs if self.algorithm.runs_actor else [role for role in runs if role != "actor"]

    @property
    def pack_tokens(self) -> int:
        """Tokens of a full pack: the limit, or else those of a micro-batch of the longest rollouts."""
        batch = self.batch
        return batch.micro_batch_tokens or batch.micro_train_batch_size * self.engine.max_model_len

    @property
    def takes_turns(self) -> bool:
        """Whether engines and trainers take turns on the memory of GPUs."""
        return self.trainer_sleep or self.engine.enable_sleep
