"""Everything an online run is told, as plain frozen data: what the command line fills in and what Ray carries."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

from rlhf_data.errors import ConfigError
from rlhf_data.records import Prompt
from rlhf_rollout.engines import EngineSpec
from rlhf_rollout.protocols import SamplingParams
from rlhf_rollout.rewards.sources import RewardSource, model_paths
from rlhf_train.algorithms import AlgorithmSpec
from rlhf_train.online.placement import PlacementPlan
from rlhf_train.run.trackers.spec import TrackerSpec
from rlhf_train.specs import ModelSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchSizes:
    """Sizes of batches. All count over the whole cluster, except those whose names say micro.

    Attributes:
        rollout_batch_size: prompts per step.
        num_samples_per_prompt: rollouts per prompt.
        train_batch_size: rollouts per update.
        micro_train_batch_size: rollouts per forward-backward pass on one rank.
        micro_rollout_batch_size: rollouts per forward pass without gradient on one rank.
        max_epochs: passes over the rollouts of a step.
    """

    rollout_batch_size: int
    num_samples_per_prompt: int
    train_batch_size: int
    micro_train_batch_size: int
    micro_rollout_batch_size: int
    max_epochs: int = 1

    def __post_init__(self) -> None:
        for name in self.__dataclass_fields__:
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} is {getattr(self, name)}; it must be at least 1")
        if self.num_rollouts % self.train_batch_size:
            size, count = self.train_batch_size, self.num_rollouts
            divisor = max(number for number in range(1, min(size, count) + 1) if count % number == 0)
            message = f"--train_batch_size is {size}, which does not divide the {count} samples of a step"
            product = f"--rollout_batch_size {self.rollout_batch_size} x --n_samples_per_prompt"
            raise ConfigError(
                f"{message} ({product} {self.num_samples_per_prompt})", hint=f"use --train_batch_size {divisor}"
            )

    @property
    def num_rollouts(self) -> int:
        """Rollouts a step."""
        return self.rollout_batch_size * self.num_samples_per_prompt

    @property
    def num_updates(self) -> int:
        """Optimizer steps a step that trains all its rollouts."""
        return self.num_mini_batches(self.num_rollouts) * self.max_epochs

    def num_mini_batches(self, num_trained: float) -> int:
        """Optimizer steps of an epoch over `num_trained` rollouts: fewer when a step has fewer to train."""
        return math.ceil(num_trained / self.train_batch_size)


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardSpec:
    """Who scores, and what becomes of the scores before any algorithm sees them: in this order.

    Attributes:
        sources: whose rewards are added up, by weight.
        timeout_s: for one call of a function or a server.
        num_workers: processes that score side by side, of each function.
        batch_size: responses of one call of a server or of a reward model.
        normalize_models: scores of reward models are shifted and scaled by the moments stored with them.
        running_norm: rewards are shifted and scaled by the moments of all raw rewards of the run so far.
        clip_range: smallest and largest reward after that, before any shaping; None for no bounds.
        overlong_buffer: tokens before the length limit over which a penalty grows; 0 for none.
        overlong_penalty_factor: the penalty at the limit.
        stop_properly_coef: what a rollout keeps of its reward when the length limit ended it; see `shaping`.
    """

    sources: tuple[RewardSource, ...]
    timeout_s: float = 30.0
    num_workers: int = 1
    batch_size: int = 64
    normalize_models: bool = False
    running_norm: bool = False
    clip_range: tuple[float, float] | None = None
    overlong_buffer: int = 0
    overlong_penalty_factor: float = 1.0
    stop_properly_coef: float | None = None

    @property
    def models(self) -> tuple[str, ...]:
        """The folders or hub names of the reward models, in order."""
        return model_paths(self.sources)


@dataclass(frozen=True, slots=True, kw_only=True)
class DynamicSampling:
    """Which rollout groups are trained: those with something to say, refilled until the batch is full.

    Attributes:
        reward_range: a group's mean score must lie strictly between; None for no bounds. Its scores must differ in any
            case.
        max_batches: prompts drawn a step at most, as a multiple of the rollout batch.
    """

    reward_range: tuple[float, float] | None = None
    max_batches: int = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class OnlineJob:
    """One online run.

    Attributes:
        models: role ("actor", "critic", "reference") to its model; the critic and the reference may be absent.
        algorithm: what is optimised.
        engine: how the engines are built; with `enable_sleep` they give their memory back while the trainer works.
        sampling, eval_sampling: how training and held-out rollouts are drawn.
        prompts, eval_prompts: what is asked; the held-out ones may be empty.
        reward: who scores.
        plan: where everything runs.
        batch: sizes.
        num_steps: rollout-and-train rounds.
        eval_steps: rounds between evaluations; 0 evaluates only at the start and the end.
        save_path: the folder for all that a run leaves; it must not exist or be empty.
        config: the resolved configuration as TOML, saved beside the results.
        seed: of everything.
        trainer_sleep: optimizer states leave the device while engines generate.
        sync_checksum: every weight bucket carries a checksum that the engine verifies.
        max_in_flight: rollout groups under way at once.
        dynamic_sampling: None trains every group.
        num_frozen_steps: steps at the start in which only the critic learns.
        ema_beta: decay a step of the average of the actor's weights that is saved beside it; None for none.
        save_critic: save the critic beside the actor.
        best_metric: the evaluation's metric whose highest value marks weights to keep; None keeps the last only.
        trackers: who is told the metrics beside `metrics.jsonl`, and how often; None for TensorBoard at every step.
        ray_address: of a running cluster; None starts one in this process.
    """

    models: Mapping[str, ModelSpec]
    algorithm: AlgorithmSpec
    engine: EngineSpec
    sampling: SamplingParams
    eval_sampling: SamplingParams
    prompts: tuple[Prompt, ...]
    eval_prompts: tuple[Prompt, ...] = ()
    reward: RewardSpec
    plan: PlacementPlan
    batch: BatchSizes
    num_steps: int
    eval_steps: int = 0
    save_path: str
    config: str = ""
    seed: int = 42
    trainer_sleep: bool = False
    sync_checksum: bool = False
    max_in_flight: int = 256
    trackers: TrackerSpec | None = None
    ray_address: str | None = None
    dynamic_sampling: DynamicSampling | None = None
    num_frozen_steps: int = 0
    ema_beta: float | None = None
    save_critic: bool = False
    best_metric: str | None = None

    def __post_init__(self) -> None:
        row = self.algorithm.row
        if row.uses_critic != ("critic" in self.models):
            raise ConfigError(f"{row.title} {'needs a' if row.uses_critic else 'has no'} critic")
        if self.algorithm.uses_reference != ("reference" in self.models):
            raise ConfigError("a reference model is there exactly when init_kl_coef is above 0")
        placed = [role for group in self.plan.groups for role in group.roles]
        if sorted(placed) != sorted(self.models):
            raise ConfigError(f"the plan has places for {', '.join(placed)}, the models are {', '.join(self.models)}")
        has_pairs, hint = self.batch.num_samples_per_prompt > 1, "use --n_samples_per_prompt 4 or more"
        if row.uses_group and not has_pairs:
            message = f"{row.title} ({row.name}) compares the samples of one prompt and n_samples_per_prompt is 1"
            raise ConfigError(message, hint=hint)
        if self.dynamic_sampling is not None and not has_pairs:
            message = "dynamic sampling keeps groups whose samples differ, and a group has one sample"
            raise ConfigError(message, hint=hint)
        self._check_options()
        if self.sampling.temperature <= 0:
            raise ConfigError("temperature is 0: greedy rollouts teach nothing", hint="use --temperature 1.0")
        stages = {model.zero_stage for model in self.models.values() if model.optimizer}
        if self.trainer_sleep and not stages <= {2}:
            hint = "add --zero_stage 2 or drop the flag"
            raise ConfigError("deepspeed_enable_sleep needs ZeRO stage 2", hint=hint)

    def _check_options(self) -> None:
        for name, wanted in (("freezing_actor_steps", self.num_frozen_steps), ("save_value_network", self.save_critic)):
            if wanted and "critic" not in self.models:
                raise ConfigError(f"{name} is for a critic, and {self.algorithm.row.title} has none")
        if self.num_frozen_steps and self.num_frozen_steps >= self.num_steps:
            message = f"the actor is frozen for {self.num_frozen_steps} of {self.num_steps} steps: it would never learn"
            raise ConfigError(message, hint="lower --freezing_actor_steps")
        if self.algorithm.old_logprobs == "skip" and self.batch.num_updates > 1:
            message = (
                f"old log-probs are skipped, which needs one update per step, and there are {self.batch.num_updates}"
            )
            hint = f"use --train_batch_size {self.batch.num_rollouts} --max_epochs 1, or --old_logprobs recompute"
            raise ConfigError(message, hint=hint)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSummary:
    """What a run leaves: its folder, the paths of artifacts in it by name, and final numbers such as
    `eval/accuracy_after`."""

    save_path: str
    artifacts: Mapping[str, str]
    metrics: Mapping[str, float]
