"""The configuration of `ppo`."""

import math
from collections.abc import Collection
from typing import TYPE_CHECKING

from rlhf_cli.config.algorithm import AlgorithmSection
from rlhf_cli.config.asynchrony import AsyncSection
from rlhf_cli.config.checkpoint import CheckpointSection
from rlhf_cli.config.data import PromptSection
from rlhf_cli.config.evaluation import PpoEvaluationSection
from rlhf_cli.config.model import PpoModelSection
from rlhf_cli.config.output import PpoOutputSection
from rlhf_cli.config.placement import EngineSection, PlacementSection
from rlhf_cli.config.reward import RewardSection
from rlhf_cli.config.rollout import RolloutSection
from rlhf_cli.config.training import PpoTrainingSection
from rlhf_cli.paths import run_folder_notices
from rlhf_data.errors import ConfigError
from rlhf_data.options.checks import check_has_metric, check_range, missing, once, without_effect
from rlhf_data.options.declare import Config, matching
from rlhf_rollout.commands.sections import AgentSection

if TYPE_CHECKING:
    from rlhf_train.algorithms.table import AlgorithmSpec
    from rlhf_train.online_job import BatchSizes

_FILTER_OPTIONS = ("dynamic_filtering_reward_range", "dynamic_filtering_max_batches")
_EVALUATION_OPTIONS = ("eval_steps", "eval_temperature", "eval_n_samples_per_prompt", "source_key")
_SLEEP = ("vllm_enable_sleep", "deepspeed_enable_sleep")
_REFERENCE_PLACES = ("ref_num_nodes", "ref_num_gpus_per_node", "colocate_actor_ref")
_BETTER_WHEN_LOW = ("truncated", "response_tokens", "failed")


class PpoConfig(Config):
    """All options of `ppo`."""

    model: PpoModelSection = PpoModelSection()
    data: PromptSection = PromptSection()
    reward: RewardSection = RewardSection()
    rollout: RolloutSection = RolloutSection()
    agent: AgentSection = AgentSection()
    algorithm: AlgorithmSection = AlgorithmSection()
    training: PpoTrainingSection = PpoTrainingSection()
    asynchrony: AsyncSection = AsyncSection()
    evaluation: PpoEvaluationSection = PpoEvaluationSection()
    placement: PlacementSection = PlacementSection()
    engine: EngineSection = EngineSection()
    checkpoint: CheckpointSection = CheckpointSection()
    output: PpoOutputSection = PpoOutputSection()

    @property
    def objective(self) -> "AlgorithmSpec":
        """The algorithm of this run. Raises ConfigError for values that cannot work."""
        # An agent's episode may become several rollouts, and a step then have more updates than were planned.
        is_certain = self.agent.agent_func_path is None and self.training.freezing_actor_steps <= 0
        single_update = is_certain and self.batch.num_updates == 1
        return self.algorithm.spec(
            stale=self.asynchrony.runs_ahead, quantized=self.quantizes, single_update=single_update
        )

    @property
    def quantizes(self) -> bool:
        """Whether engines sample from quantized weights, or did in the run that is replayed."""
        return self.engine.vllm_quantization is not None

    @property
    def batch(self) -> "BatchSizes":
        """The batch sizes. Raises ConfigError unless the samples of a step divide into whole updates."""
        from rlhf_train.online_job import BatchSizes  # imported here, so that --help does not wait for it

        num_samples = self.rollout.n_samples_per_prompt
        return BatchSizes(num_samples_per_prompt=num_samples, **matching(BatchSizes, self.rollout, self.training))

    def steps_of_episodes(self, num_prompts: int) -> int:
        """Return the number of steps that --num_episodes passes over `num_prompts` prompts need."""
        return math.ceil(self.training.num_episodes * num_prompts / self.rollout.rollout_batch_size)

    def check(self, given: Collection[str]) -> list[str]:
        """See `Config`. Notices come in a run's order: model, rewards, objective, training, evaluation, placement."""
        given = with_places(self, given)
        num_samples = self.rollout.n_samples_per_prompt
        max_tokens = self.rollout.generate_max_len
        notices = run_folder_notices(self) + self.model.check(given)
        notices += self.reward.check_training(self.agent.beside(given), max_tokens, num_samples)
        notices += self.agent.check(given, "reward_by_turn", "turn_gamma", "group_by")
        notices += self.data.check_chat(given, has_agent=self.agent.agent_func_path is not None)
        notices += self.algorithm.check(given, self.objective, self.batch.num_updates)
        notices += self.training.check(given)
        notices += _check_passes(self, given)
        notices += self.asynchrony.check(given)
        notices += _check_training(self, given)
        notices += _check_staleness(self, given)
        notices += _check_teacher_alone(self, given)
        notices += _check_filtering(self, given)
        notices += _check_evaluation(self, given)
        notices += _check_sampling(self, given)
        notices += _check_replay(self, given)
        notices += self.checkpoint.check(given, self.output.save_path)
        notices += self.output.check(given)
        return once([*notices, *_check_placement(self, given)])

    def missing(self) -> list[ConfigError]:
        """See `Config`."""
        model = self.model.pretrain
        row = self.algorithm.row
        found = self.model.missing()
        if self.data.prompt_data is None:
            hint = "add --prompt_data FILE.jsonl with --input_key and --label_key"
            what = f"--pretrain {model} needs prompts to train on" if model else "there must be prompts to train on"
            found.append(missing("prompt_data", what, f"{hint}; without --pretrain the built-in task runs"))
        if self.algorithm.teacher_model is None and self.agent.agent_func_path is None:
            found += self.reward.missing("nothing says how responses are scored, and there is no --teacher_model")
        if row.uses_group and self.rollout.n_samples_per_prompt == 1:
            message = f"--n_samples_per_prompt is 1, and {self.algorithm.title} compares the samples of one prompt"
            found.append(ConfigError(message, hint="use --n_samples_per_prompt 4 or more"))
        return found


def with_places(config: PpoConfig, given: Collection[str]) -> set[str]:
    """Return `given` without the placement options that are 0.

    0 means that a model has no processes of its own, so there is no need for a notice that it gets none.
    """
    return {name for name in given if getattr(config.placement, name, None) != 0}


def _check_training(config: PpoConfig, given: Collection[str]) -> list[str]:
    """Check training options against the algorithm."""
    training = config.training
    algorithm = config.algorithm
    reward = config.reward
    if training.freezing_actor_steps > 0 and not algorithm.row.uses_critic:
        message = f"--freezing_actor_steps {training.freezing_actor_steps} trains the critic only, and"
        raise ConfigError(f"{message} {algorithm.title} has none", hint="drop it, or use --advantage_estimator gae")
    # GRPO subtracts the mean of a group's rewards and divides by their deviation. A running norm before that cancels
    # out, unless clipping or a length penalty acts between the two.
    shapes = (reward.reward_clip_range, reward.overlong_buffer_len or None, reward.stop_properly_penalty_coef)
    is_together = reward.reward_normalize == "together"
    rescales = is_together and algorithm.row.baseline == "group_mean_std" and not algorithm.no_advantage_std_norm
    anyway = f"{algorithm.title} shifts and scales the rewards of each group, which undoes it"
    if reward.reward_normalize == "each" and algorithm.no_advantage_std_norm:
        message = "--reward_normalize each divides rewards by their deviation, and --no_advantage_std_norm forbids it"
        raise ConfigError(message, hint="drop one of them")
    if algorithm.group_by == "turn" and not is_together:
        message = f"--group_by turn compares rewards turn by turn, and --reward_normalize {reward.reward_normalize}"
        what = "compares none" if reward.reward_normalize == "none" else "compares those of whole responses"
        raise ConfigError(f"{message} {what}", hint="drop one of them")
    no_baseline = reward.reward_normalize == "none" and not algorithm.row.uses_group
    return without_effect(
        given,
        (no_baseline, ["reward_normalize"], f"{algorithm.title} compares no rewards within a group"),
        (rescales and shapes == (None,) * 3, ["running_reward_norm"], anyway),
        (not training.enable_ema, ["ema_beta"], "--enable_ema is off"),
    )


def _check_passes(config: PpoConfig, given: Collection[str]) -> list[str]:
    """Check the size of passes over packed samples."""
    notices = config.training.check_passes(given, packs=config.model.packing_samples)
    longest, flags = config.agent.max_len(config.data.prompt_max_len, config.rollout.generate_max_len)
    limit = config.training.micro_batch_tokens
    if limit is not None and limit < longest:
        message = f"--micro_batch_tokens is {limit}, and a sample may have {longest} tokens ({flags})"
        raise ConfigError(message, hint=f"use --micro_batch_tokens {longest} or more")
    return notices


def _check_staleness(config: PpoConfig, given: Collection[str]) -> list[str]:
    """Check what becomes of tokens of older weights."""
    algorithm = config.algorithm
    bound = config.asynchrony.max_staleness if config.asynchrony.async_train else 0
    # A replay has the staleness of the run that it replays.
    is_bound = config.rollout.replay is None and (algorithm.mask_stale is None or algorithm.mask_stale >= bound)
    reason = f"no token is more than {bound} steps old (--async_train, --max_staleness)"
    notices = without_effect(given, (is_bound, ["mask_stale"], reason))
    spec = config.objective
    runs_none = not (spec.runs_actor or spec.uses_reference or spec.uses_teacher or spec.row.uses_critic)
    notices += without_effect(given, (runs_none, ["early_forwards"], "no model runs before the update"))
    causes = ["--async_train trains on tokens of older weights"] if bound else []
    if config.quantizes:
        if not config.model.bf16:
            message = f"--vllm_quantization {config.engine.vllm_quantization} rounds bfloat16 weights"
            raise ConfigError(message, hint="add --bf16, or drop --vllm_quantization")
        causes.append(f"--vllm_quantization {config.engine.vllm_quantization} samples tokens from rounded weights")
    if spec.weighs and spec.correction.level == "off":
        ways = ["--is_correction_level token", *(["--old_logprobs rollout"] if spec.loss.uses_ratio else [])]
        text = "and nothing corrects for their probabilities"
        notices += [f"{cause}, {text}: {' or '.join(ways)} does" for cause in causes]
    elif config.quantizes and spec.correction.level != "off" and config.algorithm.is_correction_level is None:
        notices.append(f"{causes[-1]}: --is_correction_level is {spec.correction.level}, which corrects for it")
    return notices


def _check_teacher_alone(config: PpoConfig, given: Collection[str]) -> list[str]:
    """Check options that need a reward, in a run that has a teacher and no reward."""
    algorithm = config.algorithm
    if algorithm.teacher_model is None or config.reward.sources() or config.agent.agent_func_path is not None:
        return []
    for name in ("dynamic_filtering", "best_metric_key"):
        if name in given:
            hint = "add --remote_rm_url, with --reward_weights 0 if the policy shall not learn from it"
            raise ConfigError(f"--{name} compares scores, and nothing scores: there is only --teacher_model", hint=hint)
    unused = ["running_reward_norm", "reward_clip_range", "failed_reward"]
    notices = without_effect(given, (True, unused, "there is no reward, only --teacher_model"))
    if algorithm.row.uses_critic:
        text = f"{algorithm.title} trains a critic, and without a reward it has nothing to predict but penalties:"
        notices.append(f"{text} --advantage_estimator reinforce has none")
    return notices


def _check_filtering(config: PpoConfig, given: Collection[str]) -> list[str]:
    """Check the options of dynamic filtering."""
    rollout = config.rollout
    if not rollout.dynamic_filtering:
        return without_effect(given, (True, _FILTER_OPTIONS, "--dynamic_filtering is off"))
    check_range("dynamic_filtering_reward_range", rollout.dynamic_filtering_reward_range)
    if config.reward.reward_pretrain is None or rollout.dynamic_filtering_reward_range is not None:
        return []
    return [
        "--dynamic_filtering leaves out prompts whose responses all have the same score, and scores of a reward model"
        " are hardly ever equal: --dynamic_filtering_reward_range LOW HIGH filters by the mean score"
    ]


def _check_replay(config: PpoConfig, given: Collection[str]) -> list[str]:
    """Return a notice for each option of what a run on recorded rollouts does not start."""
    if config.rollout.replay is None:
        return []
    unused = [
        name
        for part in (config.data, config.agent, config.evaluation, config.engine, config.asynchrony)
        for name in type(part).model_fields
        # Where the recorded log-probs come from, and which rollouts share a forward pass.
        if name not in ("vllm_quantization", "early_forwards")
    ]
    return without_effect(
        given, (True, unused, "--replay trains on recorded rollouts: nothing is generated or evaluated")
    )


def _check_evaluation(config: PpoConfig, given: Collection[str]) -> list[str]:
    """Check the options of evaluation on held-out prompts."""
    section = config.evaluation
    notices = check_has_metric("eval_data", config.data.eval_data, section.best_metric_key, section.eval_steps)
    if config.data.eval_data is None:
        return without_effect(given, (True, _EVALUATION_OPTIONS, "there is no --eval_data"))
    if section.eval_temperature == 0 and section.eval_n_samples_per_prompt > 1:
        message = f"--eval_n_samples_per_prompt is {section.eval_n_samples_per_prompt} at --eval_temperature 0"
        raise ConfigError(f"{message}: greedy responses are all the same", hint="use 1 sample, or a temperature")
    best = section.best_metric_key
    if best is not None and best.rpartition("/")[2] in _BETTER_WHEN_LOW:
        notices.append(f"--best_metric_key {best} keeps the highest value, though lower is usually better")
    return notices


def _check_sampling(config: PpoConfig, given: Collection[str]) -> list[str]:
    """Check sampling; return a notice for each option that makes engine and trainer log-probs differ.

    The engine's log-probs are those of the part that it samples from, or those after the repetition penalty. As the old
    policy, or in a correction, they would be compared with log-probs of the whole distribution, as if the policy had
    changed.
    """
    rollout = config.rollout
    rollout.check(has_agent=config.agent.agent_func_path is not None)
    neutral = rollout.changed()
    parts = [f"--{name} {getattr(rollout, name):g}" for name in neutral]
    changes = "samples from a part of the distribution"
    if rollout.repetition_penalty != 1:
        changes = "samples from a changed distribution"
    spec = config.objective
    uses = {
        "--old_logprobs rollout": spec.old_logprobs == "rollout",
        f"--is_correction_level {spec.correction.level}": spec.correction.level != "off",
    }
    for use in [flag for flag, is_on in uses.items() if is_on and parts and rollout.replay is None]:
        message = f"{' and '.join(parts)} {changes}, and {use} compares its log-probs"
        values = " ".join(f"--{name} {value}" for name, value in neutral.items())
        hint = f"use {values}; or --old_logprobs recompute --is_correction_level off"
        raise ConfigError(f"{message} with those of the whole distribution", hint=hint)
    return [
        f"{part} {changes}, and the trainer's log-probs are those of the whole distribution:"
        " the mismatch/* metrics will not be near 0"
        for part in parts
    ]


def _check_placement(config: PpoConfig, given: Collection[str]) -> list[str]:
    """Check which models and engines share devices."""
    algorithm = config.algorithm
    placement = config.placement
    all_share = placement.colocate_all_models
    spec = algorithm.spec()
    shares_base = config.model.lora_rank > 0 and spec.uses_reference
    has_frozen = spec.uses_reference != shares_base or spec.uses_teacher or config.reward.reward_pretrain is not None
    for name, section in zip(_SLEEP, (config.engine, placement), strict=True):
        if all_share and getattr(section, name) and config.asynchrony.spec() is not None:
            message = (
                f"--async_train has engines and trainers work at the same time, and --{name} lets them sleep in turn"
            )
            raise ConfigError(message, hint="drop one of them")
    if all_share and config.engine.vllm_use_mps and config.engine.vllm_enable_sleep:
        message = "--vllm_enable_sleep gives GPU memory back, which is not tested with --vllm_use_mps"
        raise ConfigError(message, hint="drop one of them")
    return without_effect(
        given,
        (not all_share, _SLEEP, "--colocate_all_models is off, so engines and models have GPUs of their own"),
        (all_share, ["vllm_sync_backend"], "with --colocate_all_models engines and training share GPUs"),
        (all_share, ["colocate_actor_ref", "colocate_critic_reward"], "--colocate_all_models includes it"),
        (not algorithm.row.uses_critic, ["colocate_critic_reward"], f"{algorithm.title} has no critic"),
        (not has_frozen, ["ref_reward_offload"], "all models of this run are trained"),
        (shares_base, _REFERENCE_PLACES, "with --lora_rank the reference is the policy without its adapters"),
    )
