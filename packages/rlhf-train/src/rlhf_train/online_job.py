"""The settings of an online run as frozen data, filled in by the command line, and what it returns."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from rlhf_data.bounds import check_none
from rlhf_data.errors import ConfigError
from rlhf_train.algorithms.own_code import OwnCode
from rlhf_train.generation.run_spec import GenerationSpec
from rlhf_train.learning.learning_spec import LearningSpec
from rlhf_train.run.checkpoint import CheckpointSpec
from rlhf_train.run.recorder import RecordFormat
from rlhf_train.run.trackers.spec import TrackerSpec


@dataclass(frozen=True, kw_only=True)
class OnlineJob(LearningSpec, GenerationSpec):
    """One online run: what is generated, what is learned from it, and what is kept of it.

    Attributes:
        num_steps: number of steps, each a round of rollouts and training.
        eval_steps: steps between evaluations; 0 evaluates only at the start and the end.
        save_path: folder for all results; new or empty.
        config: the resolved configuration as TOML, saved with the results.
        engine_mps: engines that share a GPU run there at the same time, by NVIDIA's Multi-Process Service.
        trackers: where metrics go besides `metrics.jsonl`, and how often; None for TensorBoard at every step.
        ray_address: address of a running Ray cluster; None starts one for the run.
        save_critic: save the critic with the actor.
        best_metric: evaluation metric; the weights with its highest value are saved. None saves the last weights only.
        checkpoints: when and where the state of the run is saved.
        replay: record of the rollouts of another run, on which this one trains, so that it needs no engine and no
            reward; "" for a run that generates.
        record: write the rollouts that are trained on; without them no step can be replayed.
        record_token_values: with the rollouts, write what was computed for each of their tokens.
        record_format: see `Recorder`.
        timeline: write the timeline, a file for Perfetto.
        saves_models: save the final models.
        own_metrics: the user's `step_metrics`; None for none.

    Raises:
        ConfigError: settings that contradict each other.
    """

    num_steps: int
    eval_steps: int = 0
    save_path: str
    config: str = ""
    engine_mps: bool = False
    trackers: TrackerSpec | None = None
    ray_address: str | None = None
    save_critic: bool = False
    best_metric: str | None = None
    checkpoints: CheckpointSpec = field(default_factory=CheckpointSpec)
    replay: str = ""
    record: bool = True
    record_token_values: bool = True
    record_format: RecordFormat = "jsonl"
    timeline: bool = False
    saves_models: bool = True
    own_metrics: OwnCode | None = None

    def __post_init__(self) -> None:
        row = self.algorithm.row
        if row.uses_critic != ("critic" in self.models):
            raise ConfigError(f"{row.title} {'needs a' if row.uses_critic else 'has no'} critic")
        if self.algorithm.uses_reference != ("reference" in self.models):
            raise ConfigError("a reference model is needed if and only if ``kl_coef`` is above 0")
        if self.algorithm.uses_teacher != ("teacher" in self.models):
            raise ConfigError("a teacher is needed if and only if teacher_coef is above 0")
        if unknown := {*self.teachers.values()} - {*self.teacher_roles}:
            raise ConfigError(
                f"the teachers of sources are {', '.join(sorted(unknown))}, and the models are {[*self.models]}"
            )
        self._check_averages()
        has_source = self.reward.sources or self.algorithm.uses_teacher or self.agent is not None or self.replay
        if not has_source:
            raise ConfigError("a run learns from rewards, an agent or a teacher, and has none of them")
        if "draft" in self.models and not self.engine.draft_model:
            raise ConfigError("a draft model is trained, and engines have none", hint="set ``draft_model``")
        placed = [role for processes in self.plan.trainers for role in processes.roles]
        if sorted(placed) != sorted(self.models):
            raise ConfigError(f"the plan has places for {', '.join(placed)}, the models are {', '.join(self.models)}")
        row.check_group(self.batch.n_samples_per_prompt)
        self.algorithm.check_steps(
            num_rollouts=self.batch.num_rollouts,
            num_updates=self.batch.num_updates,
            num_frozen_steps=self.num_frozen_steps,
            max_staleness=self.max_staleness,
        )
        self.algorithm.check_rewards(self.reward.reward_normalize, self.reward.changes)
        if not self.replay:
            self.reward.check_samples(self.batch.n_samples_per_prompt)
        if self.dynamic_sampling is not None:
            self.dynamic_sampling.check_samples(self.batch.n_samples_per_prompt)
        self._check_options()
        if self.asynchronous is not None and self.max_staleness:
            self.asynchronous.check_sleep(engines=self.engine.enable_sleep, trainers=self.trainer_sleep)
        self._check_early_forwards()
        if self.replay and self.eval_prompts:
            raise ConfigError("held-out prompts need an engine, and a replay has none", hint="give no eval_prompts")
        self.algorithm.check_sampling(self.sampling, is_replay=bool(self.replay))

    @property
    def own_code(self) -> list[OwnCode]:
        """The user's functions."""
        own_filter = self.dynamic_sampling.own_filter if self.dynamic_sampling else None
        return [*self.algorithm.own_code, *(code for code in (own_filter, self.own_metrics) if code is not None)]

    def _check_averages(self) -> None:
        """Check that teachers which are the average of the actor's weights can be computed."""
        for role, spec in self.models.items():
            elsewhere = self.plan.trainers_of(role) != self.plan.trainers_of("actor")
            check_none(
                spec.is_average,
                f"the {role} is the average of the actor's weights, and",
                (self.ema_beta is None, "there is none", "set ``ema_beta``"),
                (elsewhere, "it has processes of its own", "join them"),
                (spec.zpg > 1, "``zpg`` copies weights before they are averaged", "drop ``zpg``"),
                (self.early_forwards, "``early_forwards`` would move it for each prompt", "drop ``early_forwards``"),
            )

    def _check_early_forwards(self) -> None:
        """Check that nothing moves models or needs several processes while groups generate."""
        if not self.early_forwards:
            return
        specs = self.models.values()
        for is_wrong, reason in (
            (self.max_staleness > 0, "``asynchronous`` changes the policy meanwhile"),
            (self.takes_turns, "``enable_sleep`` and ``trainer_sleep`` let either side sleep"),
            (any(spec.offload for spec in specs), "``ModelSpec.offload`` would copy weights for each prompt"),
            (any(spec.zero_stage == 3 for spec in specs), "``zero_stage=3`` needs all processes in each pass"),
            (any(spec.sequence_parallel_size > 1 for spec in specs), "``sequence_parallel_size`` divides each pass"),
            (any(spec.tensor_parallel_size > 1 for spec in specs), "``tensor_parallel_size`` divides each model"),
            (any(spec.expert_parallel_size > 1 for spec in specs), "``expert_parallel_size`` divides experts"),
        ):
            if is_wrong:
                message = "``early_forwards`` runs models on complete prompts while others generate, and"
                raise ConfigError(f"{message} {reason}", hint="drop one of them")

    def _check_options(self) -> None:
        lora = self.models["actor"].lora
        if (rank := self.engine.adapter_rank) and (lora is None or lora.rank != rank):
            message = f"engines expect adapters of rank {rank}, and the actor trains {'none' if lora is None else lora}"
            raise ConfigError(message, hint="use ``adapter_rank=0``, or the rank of the actor's adapters")
        names = ("sequence_parallel_size", "tensor_parallel_size", "expert_parallel_size")
        sizes = {role: tuple(getattr(spec, name) for name in names) for role, spec in self.models.items()}
        for role, spec in self.models.items():
            spec.check_ranks(self.plan.trainers_of(role).num_ranks)
        if len(set(sizes.values())) > 1:
            raise ConfigError(f"all models must divide sequences and weights over as many processes, and not {sizes}")
        if self.save_critic and "critic" not in self.models:
            raise ConfigError(f"``save_critic`` needs a critic, and {self.algorithm.row.title} has none")
        if self.num_frozen_steps and self.num_frozen_steps >= self.num_steps and not self.replay:
            message = f"the actor is frozen for {self.num_frozen_steps} of {self.num_steps} steps: it would never learn"
            raise ConfigError(message, hint="lower ``num_frozen_steps``")


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSummary:
    """The results of a run.

    Attributes:
        save_path: the folder of the run.
        artifacts: name to path within that folder, for each artifact that exists.
        metrics: final metrics, such as `eval/accuracy_after`.
    """

    save_path: str
    artifacts: Mapping[str, str]
    metrics: Mapping[str, float]
