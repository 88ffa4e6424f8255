"""The settings of an online run as frozen data, filled in by the command line and sent to Ray actors."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from rlhf_data.bounds import bounded, check_bounds
from rlhf_data.errors import ConfigError
from rlhf_data.records import Prompt
from rlhf_rollout.agents import AgentSpec
from rlhf_rollout.engines import EngineSpec
from rlhf_rollout.protocols import PauseMode, SamplingParams, check_pause_mode
from rlhf_rollout.rewards.model import MODEL_TIMEOUT_S
from rlhf_rollout.rewards.sources import DEFAULT_CALLS, CallOptions, RewardSource, model_paths
from rlhf_train.algorithms.table import AlgorithmSpec
from rlhf_train.cluster.places import PlacementPlan
from rlhf_train.run.checkpoint import CheckpointSpec
from rlhf_train.run.trackers.spec import TrackerSpec
from rlhf_train.specs import ModelSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchSizes:
    """Batch sizes. They count over all ranks, except the micro batch sizes, which are per rank.

    Attributes:
        rollout_batch_size: prompts per step.
        n_samples_per_prompt: rollouts per prompt.
        train_batch_size: rollouts per update.
        micro_train_batch_size: rollouts per forward-backward pass on one rank.
        micro_rollout_batch_size: rollouts per forward pass without gradient on one rank.
        micro_batch_tokens: largest number of tokens per pass on one rank. If set, it replaces the two before. None for
            no limit.
        max_epochs: passes over the rollouts of a step.
    """

    rollout_batch_size: int = bounded(ge=1)
    n_samples_per_prompt: int = bounded(ge=1)
    train_batch_size: int = bounded(ge=1)
    micro_train_batch_size: int = bounded(ge=1)
    micro_rollout_batch_size: int = bounded(ge=1)
    micro_batch_tokens: int | None = bounded(None, ge=1)
    max_epochs: int = bounded(1, ge=1)

    def __post_init__(self) -> None:
        check_bounds(self)
        if self.num_rollouts % self.train_batch_size:
            size = self.train_batch_size
            count = self.num_rollouts
            divisor = max(number for number in range(1, min(size, count) + 1) if count % number == 0)
            message = f"``train_batch_size`` is {size}, which does not divide the {count} samples of a step"
            product = f"``rollout_batch_size={self.rollout_batch_size}`` x"
            raise ConfigError(
                f"{message} ({product} ``n_samples_per_prompt={self.n_samples_per_prompt}``)",
                hint=f"use ``train_batch_size={divisor}``",
            )

    @property
    def num_rollouts(self) -> int:
        """Rollouts per step."""
        return self.rollout_batch_size * self.n_samples_per_prompt

    def most_pass_tokens(self, max_response_tokens: int) -> int:
        """Return the trained tokens of the largest pass that a step of responses of this length could make."""
        if self.micro_batch_tokens is not None:
            return min(max_response_tokens * self.num_rollouts, self.micro_batch_tokens)
        largest = max(self.micro_train_batch_size, self.micro_rollout_batch_size)
        return max_response_tokens * min(largest, self.num_rollouts)

    @property
    def num_updates(self) -> int:
        """Updates per step, if no rollout is left out."""
        return self.num_mini_batches(self.num_rollouts) * self.max_epochs

    def num_mini_batches(self, num_trained: float) -> int:
        """Return the updates per epoch over `num_trained` rollouts, which may be fewer than `num_rollouts`."""
        return math.ceil(num_trained / self.train_batch_size)


def _check_range(name: str, bounds: tuple[float, float] | None) -> None:
    """Raise ConfigError unless the lower bound is below the upper bound."""
    if bounds is not None and not bounds[0] < bounds[1]:
        raise ConfigError(f"``{name}`` is {bounds[0]:g} {bounds[1]:g}", hint="give LOW before HIGH, two numbers")


RewardNormalization = Literal["together", "each", "none"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardSpec:
    """Where rewards come from, and how they are changed before training, in the order of the attributes.

    Attributes:
        sources: reward sources; the reward is the weighted sum of theirs. Empty for a run that learns from a teacher
            alone: every reward is then 0.
        calls: how they are called.
        model_timeout_s: time limit for one call of a reward model, which may wait for other calls of the same replica.
        process_models: those of the reward models that judge the steps of a response; see `ProcessReward`.
        divided_models: those of the reward models whose weights are divided over their processes; see `DividedScorer`.
        step_separator: the text that ends a step.
        reward_by_turn: the other reward models score after each turn; see `ModelReward`.
        normalize_reward: shift and scale scores of reward models by the mean and deviation stored with the model.
        offload_models: keep the weights of reward models in host memory between calls.
        running_reward_norm: shift and scale rewards by the mean and deviation of all raw rewards of the run so far.
        reward_clip_range: smallest and largest reward after normalization; None for no bounds.
        overlong_buffer: tokens before the length limit over which a penalty grows linearly; 0 for no penalty.
        overlong_penalty_factor: size of the penalty at the length limit.
        stop_properly_penalty_coef: changes the reward of rollouts that the length limit ended; see
            `rlhf_rollout.rewards.shaping.stop_properly`.
        reward_normalize: what is compared within a group. "together": the sum of the rewards, as the estimator says.
            "each": every source's reward by itself, before they are weighed; see `group.decoupled_rewards`, which
            replaces the four changes above and the estimator's baseline. "none": nothing, the estimator gets the sum.
    """

    sources: tuple[RewardSource, ...]
    calls: CallOptions = DEFAULT_CALLS
    model_timeout_s: float = MODEL_TIMEOUT_S
    process_models: tuple[str, ...] = ()
    divided_models: tuple[str, ...] = ()
    step_separator: str = "\n"
    reward_by_turn: bool = False
    normalize_reward: bool = False
    offload_models: bool = False
    running_reward_norm: bool = False
    reward_clip_range: tuple[float, float] | None = None
    overlong_buffer: int = 0
    overlong_penalty_factor: float = 1.0
    stop_properly_penalty_coef: float | None = None
    reward_normalize: RewardNormalization = "together"

    def __post_init__(self) -> None:
        _check_range("reward_clip_range", self.reward_clip_range)
        if self.reward_by_turn and self.running_reward_norm:
            message = "``running_reward_norm`` normalizes rewards of whole responses, and ``reward_by_turn`` gives"
            raise ConfigError(f"{message} several", hint="drop one of them")
        changes = {
            "``running_reward_norm``": self.running_reward_norm,
            "``reward_clip_range``": self.reward_clip_range is not None,
            "``overlong_buffer``": self.overlong_buffer > 0,
            "``stop_properly_penalty_coef``": self.stop_properly_penalty_coef is not None,
            "``reward_by_turn``": self.reward_by_turn,
        }
        for name in (name for name, is_on in changes.items() if is_on and self.reward_normalize == "each"):
            message = f"{name} changes the sum of the rewards, and ``reward_normalize=each`` compares them before"
            hint = "drop one of them; length:max=TOKENS is a reward for short responses"
            raise ConfigError(f"{message} they are added", hint=hint)

    def check_samples(self, num_samples: int) -> None:
        """Raise ConfigError if rewards are compared each by itself, and there is nothing to compare them with."""
        if self.reward_normalize == "each" and (len(self.sources) < 2 or num_samples < 2):
            message = "``reward_normalize=each`` compares several rewards within a group; there are"
            counts = f"{len(self.sources)} rewards and {num_samples} responses per prompt"
            raise ConfigError(
                f"{message} {counts}", hint="give several rewards, and ``n_samples_per_prompt=4`` or more"
            )

    @property
    def models(self) -> tuple[str, ...]:
        """The folders or hub names of the reward models, in the order of the sources."""
        return model_paths(self.sources)


@dataclass(frozen=True, slots=True, kw_only=True)
class DynamicSampling:
    """Train only groups whose scores differ, and draw more prompts until the batch is full of such groups.

    Attributes:
        reward_range: bounds that a group's mean score must lie strictly within; None for no bounds.
        max_batches: limit on the prompts drawn per step, as a multiple of the rollout batch size.
        by_source: compare the rewards of each source instead of the scores: a group can have equal sums of rewards that
            differ.
    """

    reward_range: tuple[float, float] | None = None
    max_batches: int = bounded(10, ge=1)
    by_source: bool = False

    def __post_init__(self) -> None:
        check_bounds(self)
        _check_range("DynamicSampling.reward_range", self.reward_range)

    def check_samples(self, num_samples: int) -> None:
        """Raise ConfigError unless the samples of a prompt (`num_samples`) can differ."""
        if num_samples < 2:
            message = "dynamic sampling keeps groups whose samples differ, and a group has one sample"
            raise ConfigError(message, hint="use ``n_samples_per_prompt=4`` or more")


@dataclass(frozen=True, slots=True, kw_only=True)
class AsyncSpec:
    """How generation overlaps with training.

    Attributes:
        max_staleness: steps that may be trained between the admission of a prompt and the step that trains on it.
        at_update: what happens to requests in flight when engines get new weights; see `RolloutEngine.pause`.
    """

    max_staleness: int = bounded(1, ge=0)
    at_update: PauseMode = "keep"

    def __post_init__(self) -> None:
        check_bounds(self)
        check_pause_mode(self.at_update)

    def check_sleep(self, *, engines: bool, trainers: bool) -> None:
        """Raise ConfigError if engines (`EngineSpec.enable_sleep`) or trainers (`trainer_sleep`) sleep in turn."""
        for name, is_on in (("``enable_sleep``", engines), ("``trainer_sleep``", trainers)):
            if is_on:
                message = "``asynchronous`` has engines and trainers work at the same time, and"
                raise ConfigError(f"{message} {name} lets them sleep in turn", hint="drop one of them")


@dataclass(frozen=True, slots=True, kw_only=True)
class OnlineJob:
    """One online run.

    Attributes:
        models: role ("actor", "critic", "reference", "teacher") to the settings of its model. The algorithm decides
            which of the last three there are.
        algorithm: what is optimized.
        engine: settings of the generation engines. With `enable_sleep` they release device memory while the trainers
            work.
        sampling, eval_sampling: sampling parameters of training and held-out rollouts.
        prompts, eval_prompts: training and held-out prompts; the latter may be empty.
        prompts_digest: changes with every row that the training prompts were made from, see
            `rlhf_data.rows.row.Counts`; a run continues with the same one only. "" leaves that unchecked.
        reward: where rewards come from.
        agent: turns a prompt into episodes of several turns; None for single turns. If it gives an episode no reward,
            the sources of `reward` score it.
        plan: where every process runs.
        batch: batch sizes.
        num_steps: number of steps, each a round of rollouts and training.
        eval_steps: steps between evaluations; 0 evaluates only at the start and the end.
        save_path: folder for all results; new or empty.
        config: the resolved configuration as TOML, saved with the results.
        seed: of the order of prompts and batches and of the models' initialization.
        engine_mps: engines that share a GPU run there at the same time, by NVIDIA's Multi-Process Service.
        trainer_sleep: optimizer states and frozen models are in host memory while engines generate. Meanwhile, and
            while models run without gradients, no optimizer states are on the device; policy and critic have theirs
            there one after the other.
        sync_checksum: engines verify a checksum of each weight bucket.
        max_in_flight: largest number of rollout groups that generate at once.
        dynamic_sampling: which groups are trained; None for all.
        num_frozen_steps: steps at the start in which only the critic is updated.
        ema_beta: decay per update of a moving average of the actor's weights, saved with the actor; None for no
            average.
        save_critic: save the critic with the actor.
        best_metric: evaluation metric; the weights with its highest value are saved. None saves the last weights only.
        checkpoints: when and where the state of the run is saved.
        replay: record of the rollouts of another run, on which this one trains, so that it needs no engine and no
            reward; "" for a run that generates.
        record: write the rollouts that are trained on; without them no step can be replayed.
        saves_models: save the final models.
        trackers: where metrics go besides `metrics.jsonl`, and how often; None for TensorBoard at every step.
        ray_address: address of a running Ray cluster; None starts one for the run.
        asynchronous: how generation overlaps with training; None if they alternate.
        early_forwards: models run on groups that are complete while others still generate; see
            `online.forwards.BlockForwards`. A replay has the setting of the run that it replays, for it decides which
            rollouts share a pass.
        num_busy_engines: engines that generate while models run, in a replay those of the run that it replays. On
            CPUs the trainers leave cores to them, and sums depend on the number of cores.

    Raises:
        ConfigError: settings that contradict each other.
    """

    models: Mapping[str, ModelSpec]
    algorithm: AlgorithmSpec
    engine: EngineSpec
    sampling: SamplingParams
    eval_sampling: SamplingParams
    prompts: tuple[Prompt, ...]
    eval_prompts: tuple[Prompt, ...] = ()
    prompts_digest: str = ""
    reward: RewardSpec
    agent: AgentSpec | None = None
    plan: PlacementPlan
    batch: BatchSizes
    num_steps: int
    eval_steps: int = 0
    save_path: str
    config: str = ""
    seed: int = 42
    engine_mps: bool = False
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
    checkpoints: CheckpointSpec = field(default_factory=CheckpointSpec)
    asynchronous: AsyncSpec | None = None
    early_forwards: bool = False
    num_busy_engines: int = 0
    replay: str = ""
    record: bool = True
    saves_models: bool = True

    @property
    def max_staleness(self) -> int:
        """Steps that may be trained between the admission of a prompt and the step that trains on it."""
        return self.asynchronous.max_staleness if self.asynchronous is not None else 0

    @property
    def pack_tokens(self) -> int:
        """Tokens of a full pack: the limit, or else those of a micro-batch of the longest rollouts."""
        batch = self.batch
        return batch.micro_batch_tokens or batch.micro_train_batch_size * self.engine.max_model_len

    @property
    def takes_turns(self) -> bool:
        """Whether engines and trainers take turns on the memory of GPUs."""
        return self.trainer_sleep or self.engine.enable_sleep

    def __post_init__(self) -> None:
        row = self.algorithm.row
        if row.uses_critic != ("critic" in self.models):
            raise ConfigError(f"{row.title} {'needs a' if row.uses_critic else 'has no'} critic")
        if self.algorithm.uses_reference != ("reference" in self.models):
            raise ConfigError("a reference model is needed if and only if ``kl_coef`` is above 0")
        if self.algorithm.uses_teacher != ("teacher" in self.models):
            raise ConfigError("a teacher is needed if and only if teacher_coef is above 0")
        has_source = self.reward.sources or self.algorithm.uses_teacher or self.agent is not None or self.replay
        if not has_source:
            raise ConfigError("a run learns from rewards, an agent or a teacher, and has none of them")
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
        self.algorithm.check_rewards(self.reward.reward_normalize)
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
        ):
            if is_wrong:
                message = "``early_forwards`` runs models on complete prompts while others generate, and"
                raise ConfigError(f"{message} {reason}", hint="drop one of them")

    def _check_options(self) -> None:
        sizes = {role: (spec.sequence_parallel_size, spec.tensor_parallel_size) for role, spec in self.models.items()}
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
