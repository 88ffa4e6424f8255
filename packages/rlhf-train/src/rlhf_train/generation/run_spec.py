"""The settings of generation and rewards as frozen data. Torch-free."""

from dataclasses import dataclass
from typing import Literal

from rlhf_data.bounds import bounded, check_bounds
from rlhf_data.errors import ConfigError
from rlhf_data.records import Prompt
from rlhf_rollout.agents import AgentSpec
from rlhf_rollout.engines import EngineSpec
from rlhf_rollout.protocols import PauseMode, SamplingParams, check_pause_mode
from rlhf_rollout.rewards.model import MODEL_TIMEOUT_S
from rlhf_rollout.rewards.sources import DEFAULT_CALLS, CallOptions, RewardSource, model_paths
from rlhf_train.algorithms.own_code import OwnCode
from rlhf_train.algorithms.table import AlgorithmSpec
from rlhf_train.batching import BatchSizes
from rlhf_train.cluster.places import PlacementPlan
from rlhf_train.generation.difficulty import DifficultySpec
from rlhf_train.generation.mixing import MixSpec
from rlhf_train.generation.reuse import ReuseSpec


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
        for name in self.changes if self.reward_normalize == "each" else ():
            message = f"{name} changes the sum of the rewards, and ``reward_normalize=each`` compares them before"
            hint = "drop one of them; length:max=TOKENS is a reward for short responses"
            raise ConfigError(f"{message} they are added", hint=hint)

    @property
    def changes(self) -> list[str]:
        """What changes the sum of the rewards."""
        changes = {
            "``running_reward_norm``": self.running_reward_norm,
            "``reward_clip_range``": self.reward_clip_range is not None,
            "``overlong_buffer``": self.overlong_buffer > 0,
            "``stop_properly_penalty_coef``": self.stop_properly_penalty_coef is not None,
            "``reward_by_turn``": self.reward_by_turn,
        }
        return [name for name, is_on in changes.items() if is_on]

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
    """Train only groups that pass a filter, and draw more prompts until the batch is full of such groups.

    Attributes:
        scores_differ: keep only groups whose scores differ.
        reward_range: bounds that a group's mean score must lie strictly within; None for no bounds.
        max_batches: limit on the prompts drawn per step, as a multiple of the rollout batch size.
        by_source: compare the rewards of each source instead of the scores: a group can have equal sums of rewards that
            differ.
        own_filter: the user's `keep_group`, which a group must pass, too.
    """

    scores_differ: bool = True
    reward_range: tuple[float, float] | None = None
    max_batches: int = bounded(10, ge=1)
    by_source: bool = False
    own_filter: OwnCode | None = None

    def __post_init__(self) -> None:
        check_bounds(self)
        _check_range("DynamicSampling.reward_range", self.reward_range)

    def check_samples(self, num_samples: int) -> None:
        """Raise ConfigError unless the samples of a prompt (`num_samples`) can differ."""
        if self.scores_differ and num_samples < 2:
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


@dataclass(frozen=True, kw_only=True)
class RunSpec:
    """What generation and learning both need to know of a run.

    Attributes:
        algorithm: what is optimized.
        engine: settings of the generation engines. With `enable_sleep` they release device memory while the trainers
            work.
        sampling: sampling parameters of training rollouts.
        reward: where rewards come from.
        plan: where every process runs.
        batch: batch sizes.
        seed: of the order of prompts and batches and of the models' initialization.
        asynchronous: how generation overlaps with training; None if they alternate.
    """

    algorithm: AlgorithmSpec
    engine: EngineSpec
    sampling: SamplingParams
    reward: RewardSpec
    plan: PlacementPlan
    batch: BatchSizes
    seed: int = 42
    asynchronous: AsyncSpec | None = None

    @property
    def max_staleness(self) -> int:
        """Steps that may be trained between the admission of a prompt and the step that trains on it."""
        return self.asynchronous.max_staleness if self.asynchronous is not None else 0


@dataclass(frozen=True, kw_only=True)
class GenerationSpec(RunSpec):
    """What is generated.

    Attributes:
        eval_sampling: sampling parameters of held-out rollouts.
        prompts, eval_prompts: training and held-out prompts; the latter may be empty.
        prompts_digest: changes with every row that the training prompts were made from, see
            `rlhf_data.rows.row.Counts`; a run continues with the same one only. "" leaves that unchecked.
        agent: turns a prompt into episodes of several turns; None for single turns. If it gives an episode no reward,
            the sources of `reward` score it.
        max_in_flight: largest number of rollout groups that generate at once; an evaluation has as many episodes.
        dynamic_sampling: which groups are trained; None for all.
        difficulty: how prompts, or their sources, are drawn by pass rates; None draws each prompt once per episode.
        reuse: which right answers are kept and trained on again; None for none.
    """

    eval_sampling: SamplingParams
    prompts: tuple[Prompt, ...]
    eval_prompts: tuple[Prompt, ...] = ()
    prompts_digest: str = ""
    agent: AgentSpec | None = None
    max_in_flight: int = 256
    dynamic_sampling: DynamicSampling | None = None
    difficulty: DifficultySpec | MixSpec | None = None
    reuse: ReuseSpec | None = None
