"""The configuration of `ppo`."""

import math
from collections.abc import Collection
from dataclasses import replace

from rlhf_cli.config.algorithm import AlgorithmSection
from rlhf_cli.config.asynchrony import AsyncSection
from rlhf_cli.config.checkpoint import CheckpointSection, PpoEvaluationSection
from rlhf_cli.config.data import PromptSection
from rlhf_cli.config.model import PpoModelSection
from rlhf_cli.config.output import PpoOutputSection
from rlhf_cli.config.paths import EMA, run_folder_notices
from rlhf_cli.config.placement import EngineSection, PlacementSection
from rlhf_cli.config.reward import RewardSection
from rlhf_cli.config.rollout import FILTER_OPTIONS, RolloutSection
from rlhf_cli.config.training import PpoTrainingSection
from rlhf_data.errors import ConfigError
from rlhf_data.options.checks import missing, once, without_effect
from rlhf_data.options.declare import Config, matching
from rlhf_rollout.commands.sections import SHARE_ALONE, AgentSection
from rlhf_rollout.protocols import SamplingParams
from rlhf_train.algorithms.own_code import OwnCode
from rlhf_train.algorithms.table import AlgorithmSpec
from rlhf_train.batching import BatchSizes
from rlhf_train.generation.difficulty import DifficultySpec
from rlhf_train.generation.mixing import MixSpec
from rlhf_train.generation.reuse import ReuseSpec
from rlhf_train.generation.run_spec import DynamicSampling
from rlhf_train.specs import ModelSpec

_POOL_OPTIONS = ("target_pass_rate", "pool_uniform_share", "pool_retire_visits")
_MIX_OPTIONS = ("mix_temperature", "mix_window")
_REUSE_OPTIONS = ("reuse_max_age", "reuse_pass_rate")
_SLEEP = ("vllm_enable_sleep", "deepspeed_enable_sleep")
_TEACHER_PLACES = ("teacher_num_nodes", "teacher_num_gpus_per_node")
_REFERENCE_PLACES = ("ref_num_nodes", "ref_num_gpus_per_node", "colocate_actor_ref")
_MANY_PASSES = 8  # per update, for which fuller ones pay
_USUAL_PASS_TOKENS = 16384


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
    def objective(self) -> AlgorithmSpec:
        """The algorithm of this run. Raises ConfigError for values that cannot work."""
        # An agent's episode may become several rollouts, and a step then have more updates than were planned.
        is_certain = self.agent.agent_func_path is None and self.training.freezing_actor_steps <= 0
        single_update = is_certain and self.batch.num_updates == 1
        is_stale = self.asynchrony.runs_ahead or self.reuse is not None
        return self.algorithm.spec(stale=is_stale, quantized=self.quantizes, single_update=single_update)

    @property
    def quantizes(self) -> bool:
        """Whether engines sample from quantized weights, or did in the run that is replayed."""
        return self.engine.vllm_quantization is not None

    @property
    def adapter_rank(self) -> int:
        """Rank of the adapters that engines get in place of weights; 0 if they get weights."""
        return self.model.lora_rank if self.engine.lora_sync == "adapter" else 0

    @property
    def planned_model(self) -> ModelSpec:
        """How the trained model is computed, without its path. Raises ConfigError for options that contradict."""
        training = self.training
        spec = self.model.spec("", training.sharding, training.optimizer(training.actor_learning_rate, num_updates=0))
        return replace(spec, images=self.images)

    @property
    def images(self) -> str:
        """How all models read images; see `ModelSpec`."""
        return self.model.reads_images(self.data.image_key)

    @property
    def batch(self) -> BatchSizes:
        """The batch sizes. Raises ConfigError unless the samples of a step divide into whole updates."""
        return BatchSizes(**matching(BatchSizes, self.rollout, self.training))

    def sampling(self, seed: int | None = None) -> SamplingParams:
        """Return how responses are sampled for training."""
        return self.rollout.params(self.rollout.n_samples_per_prompt, seed)

    @property
    def filtering(self) -> DynamicSampling | None:
        """Which prompts are trained on; None for all."""
        return self.rollout.filtering(by_source=self.reward.reward_normalize == "each")

    @property
    def own_code(self) -> list[OwnCode]:
        """The user's functions."""
        return [code for part in (self.algorithm, self.rollout, self.output) for code in part.own_code.values()]

    @property
    def difficulty(self) -> DifficultySpec | MixSpec | None:
        """How prompts, or their sources, are drawn by pass rates; None for each prompt once per episode."""
        if self.rollout.adaptive_mix:
            return MixSpec(**matching(MixSpec, self.rollout))
        return DifficultySpec(**matching(DifficultySpec, self.rollout)) if self.rollout.difficulty_pool else None

    @property
    def reuse(self) -> ReuseSpec | None:
        """Which right answers are trained on again; None for none."""
        return ReuseSpec(**matching(ReuseSpec, self.rollout)) if self.rollout.reuse_solved is not None else None

    @property
    def oldest(self) -> int:
        """Steps by which the weights that drew a token may be older than those that are trained."""
        ahead = self.asynchrony.max_staleness if self.asynchrony.async_train else 0
        return self.reuse.reuse_max_age if self.reuse is not None else ahead

    @property
    def trains_draft(self) -> bool:
        """Whether the draft model of the engines is trained along."""
        return self.training.draft_learning_rate is not None and self.rollout.replay is None

    def steps_of_episodes(self, num_prompts: int) -> int:
        """Return the number of steps that --num_episodes passes over `num_prompts` prompts need."""
        return math.ceil(self.training.num_episodes * num_prompts / self.rollout.rollout_batch_size)

    def check(self, given: Collection[str]) -> list[str]:
        """See `Config`. Notices come in a run's order: model, rewards, objective, training, evaluation, placement."""
        given = with_places(self, given)
        self.planned_model.check_passes(self.training.micro_batch_tokens)
        options = {"adapter_rank": self.adapter_rank, "return_routes": self.model.routing_replay}
        options |= {"dtype": self.model.dtype, "images": self.data.image_key is not None}
        self.engine.spec("", 1, SHARE_ALONE, **options).check_kind("vllm")
        notices = run_folder_notices(self) + self.model.check(given)
        notices += self.reward.check_training(self.agent.beside(given), self.rollout)
        notices += _check_images(self, given)
        notices += self.agent.check(given, "reward_by_turn", "turn_gamma", "group_by", "state_coef")
        notices += _check_turns(self, given)
        notices += self.data.check_chat(given, has_agent=self.agent.agent_func_path is not None)
        self.objective.check_steps(
            num_rollouts=self.batch.num_rollouts,
            num_updates=self.batch.num_updates,
            num_frozen_steps=self.training.freezing_actor_steps,
            max_staleness=self.oldest,
        )
        self.objective.check_rewards(self.reward.reward_normalize, self.reward.spec(self.rollout).changes)
        notices += self.algorithm.check(given, self.objective, self.batch.num_updates)
        notices += self.training.check(given)
        notices += _check_passes(self, given)
        notices += self.asynchrony.check(given)
        _check_adapters(self)
        notices += _check_training(self, given)
        if self.trains_draft and self.engine.vllm_draft_model is None:
            message = "--draft_learning_rate trains the model of --vllm_draft_model, and there is none"
            raise ConfigError(message, hint="add --vllm_draft_model, or drop --draft_learning_rate")
        notices += _check_staleness(self, given)
        notices += _check_teacher_alone(self, given)
        notices += self.rollout.check_filtering(given, has_model=self.reward.reward_pretrain is not None)
        notices += _check_pool(self, given)
        _check_reuse(self)
        notices += self.evaluation.check(given, self.data.eval_data)
        notices += self.engine.check_drafts(given, self.rollout) + _check_sampling(self, given)
        notices += _check_replay(self, given)
        notices += self.checkpoint.check(given, self.output.save_path)
        notices += self.output.check(given)
        return once([*notices, *_check_placement(self, given)])

    def missing(self) -> list[ConfigError]:
        """See `Config`."""
        model = self.model.pretrain
        found = self.model.missing()
        if self.data.prompt_data is None:
            hint = "add --prompt_data FILE.jsonl with --input_key and --label_key"
            what = f"--pretrain {model} needs prompts to train on" if model else "there must be prompts to train on"
            found.append(missing("prompt_data", what, f"{hint}; without --pretrain the built-in task runs"))
        if self.algorithm.teacher_model is None and self.agent.agent_func_path is None:
            found += self.reward.missing("nothing says how responses are scored, and there is no --teacher_model")
        if self.data.prompt_data is not None:
            found += self.reward.missing_label(self.data)
        try:
            self.algorithm.row.check_group(self.rollout.n_samples_per_prompt)
        except ConfigError as error:
            found.append(error)
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
    # GRPO subtracts the mean of a group's rewards and divides by their deviation. A running norm before that cancels
    # out, unless clipping or a length penalty acts between the two.
    shapes = (reward.reward_clip_range, reward.overlong_buffer_len or None, reward.stop_properly_penalty_coef)
    is_together = reward.reward_normalize == "together"
    rescales = is_together and algorithm.row.baseline == "group_mean_std" and not algorithm.no_advantage_std_norm
    anyway = f"{algorithm.row.full_name} shifts and scales the rewards of each group, which undoes it"
    no_baseline = reward.reward_normalize == "none" and not algorithm.row.uses_group
    return without_effect(
        given,
        (no_baseline, ["reward_normalize"], f"{algorithm.row.full_name} compares no rewards within a group"),
        (rescales and shapes == (None,) * 3, ["running_reward_norm"], anyway),
        (not training.enable_ema, ["ema_beta"], "--enable_ema is off"),
    )


def _check_turns(config: PpoConfig, given: Collection[str]) -> list[str]:
    """Return notices for options that compare or discount the turns of agents whose episodes have one."""
    if config.agent.agent_func_path is None or config.agent.max_steps > 1:
        return []
    if config.algorithm.group_by != "state":
        return without_effect(given, (True, ["group_by", "turn_gamma"], "--max_steps is 1"))
    text = "--group_by state compares single turns as it compares their episodes, which only multiplies advantages by"
    notices = [f"{text} 1 + --state_coef: --max_steps is 1"]
    return notices + without_effect(given, (True, ["turn_gamma"], "--max_steps is 1"))


def _check_adapters(config: PpoConfig) -> None:
    """Raise ConfigError for options that engines do not support with adapters alone, or with a base in 4 bits."""
    if config.model.load_in_4bit and config.engine.vllm_quantization is not None:
        message = f"--load_in_4bit is not tested with --vllm_quantization {config.engine.vllm_quantization}"
        raise ConfigError(message, hint="drop one of them")
    if config.engine.lora_sync != "adapter":
        return
    hint = "use --lora_sync merge"
    if not config.model.lora_rank:
        raise ConfigError(
            "--lora_sync adapter sends adapters, and --lora_rank is 0", hint=f"{hint}, or set --lora_rank"
        )
    if config.engine.vllm_quantization is not None:
        message = f"--lora_sync adapter is not tested with --vllm_quantization {config.engine.vllm_quantization}"
        raise ConfigError(message, hint=hint)
    if config.model.load_in_4bit:
        message = (
            "engines of --lora_sync adapter read the base from its folder, and not what --load_in_4bit makes of it"
        )
        raise ConfigError(message, hint=hint)
    if config.images:
        raise ConfigError("--lora_sync adapter is not tested with --image_key", hint=hint)


def _check_images(config: PpoConfig, given: Collection[str]) -> list[str]:
    """Check what is used beside images."""
    by_state = "another comparison: images of one size have the same tokens, which --group_by state takes for a state"
    config.data.check_images(
        (config.algorithm.group_by == "state", by_state, "use --group_by turn"),
        *config.agent.without_images(),
    )
    unused = (config.data.image_key is None, ["freeze_visual_encoder"], "there is no --image_key")
    return without_effect(given, unused)


def _check_passes(config: PpoConfig, given: Collection[str]) -> list[str]:
    """Return a notice if an update has many packed passes of the default size.

    Short samples then leave most of a GPU idle. Raises ConfigError if the longest sample does not fit into a pass.
    """
    longest, flags = config.agent.max_len(config.data.prompt_max_len, config.rollout.generate_max_len)
    limit = config.training.micro_batch_tokens
    if limit is not None and limit < longest:
        message = f"--micro_batch_tokens is {limit}, and a sample may have {longest} tokens ({flags})"
        raise ConfigError(message, hint=f"use --micro_batch_tokens {longest} or more")
    training = config.training
    together = max(config.model.sequence_parallel_size, config.model.ds_tensor_parallel_size)
    num_processes = config.placement.actor_num_nodes * config.placement.actor_num_gpus_per_node // together
    num_passes = math.ceil(training.train_batch_size / max(num_processes, 1) / training.micro_train_batch_size)
    is_chosen = limit is not None or "micro_train_batch_size" in given
    if not config.model.packing_samples or is_chosen or num_passes < _MANY_PASSES:
        return []
    tokens = max(_USUAL_PASS_TOKENS, longest)
    return [
        f"each process makes {num_passes} passes per update, of {training.micro_train_batch_size} packed samples"
        f" however short they are: --micro_batch_tokens {tokens}, or as many as fit into memory, makes fewer and fuller"
        " ones"
    ]


def _check_staleness(config: PpoConfig, given: Collection[str]) -> list[str]:
    """Check what becomes of tokens of older weights."""
    algorithm = config.algorithm
    bound = config.oldest
    # A replay has the staleness of the run that it replays.
    is_bound = config.rollout.replay is None and (algorithm.mask_stale is None or algorithm.mask_stale >= bound)
    reason = f"no token is more than {bound} steps old (--max_staleness, --reuse_max_age)"
    notices = without_effect(given, (is_bound, ["mask_stale"], reason))
    spec = config.objective
    runs_none = not (spec.runs_actor or spec.uses_reference or spec.uses_teacher or spec.row.uses_critic)
    notices += without_effect(given, (runs_none, ["early_forwards"], "no model runs before the update"))
    causes = ["--async_train trains on tokens of older weights"] if config.asynchrony.runs_ahead else []
    if config.reuse is not None:
        causes.append("--reuse_solved trains on answers of older weights")
    if config.quantizes:
        causes.append(f"--vllm_quantization {config.engine.vllm_quantization} samples tokens from rounded weights")
    if spec.weighs and spec.correction.level == "off":
        ways = ["--is_correction_level token", *(["--old_logprobs rollout"] if spec.loss.uses_ratio else [])]
        text = "and nothing corrects for their probabilities"
        notices += [f"{cause}, {text}: {' or '.join(ways)} does" for cause in causes]
    elif config.quantizes and spec.correction.level != "off" and config.algorithm.is_correction_level is None:
        notices.append(f"{causes[-1]}: --is_correction_level is {spec.correction.level}, which corrects for it")
    return notices


def _check_teacher_alone(config: PpoConfig, given: Collection[str]) -> list[str]:
    """Check that there is something to learn from, and options that need a reward where there is only a teacher."""
    algorithm = config.algorithm
    sources = config.reward.sources()
    has_agent = config.agent.agent_func_path is not None
    is_scored = bool(sources) or has_agent
    learns = has_agent or any(source.weight for source in sources)
    algorithm.check_average(has_average=config.training.enable_ema, is_scored=learns)
    if is_scored and not (learns or algorithm.teachers):
        message = "--reward_weights are 0, and without --teacher_model there is nothing else to learn from"
        raise ConfigError(message, hint="give a reward another weight, or add --teacher_model")
    if not algorithm.teachers or is_scored:
        return []
    for name in ("dynamic_filtering", "difficulty_pool", "adaptive_mix", "reuse_solved", "best_metric_key"):
        if name in given:
            hint = "add --remote_rm_url, with --reward_weights 0 if the policy shall not learn from it"
            raise ConfigError(f"--{name} compares scores, and nothing scores: there is only --teacher_model", hint=hint)
    unused = ["running_reward_norm", "reward_clip_range", "failed_reward"]
    notices = without_effect(given, (True, unused, "there is no reward, only --teacher_model"))
    if algorithm.row.uses_critic:
        text = (
            f"{algorithm.row.full_name} trains a critic, and without a reward it has nothing to predict but penalties:"
        )
        notices.append(f"{text} --advantage_estimator reinforce has none")
    return notices


def _check_pool(config: PpoConfig, given: Collection[str]) -> list[str]:
    """Check the options of prompts, or sources, that are drawn by pass rates."""
    rollout = config.rollout
    notices = without_effect(
        given,
        (not rollout.difficulty_pool, _POOL_OPTIONS, "--difficulty_pool is off"),
        (not rollout.adaptive_mix, _MIX_OPTIONS, "--adaptive_mix is off"),
        (config.reuse is None, _REUSE_OPTIONS, "there is no --reuse_solved"),
    )
    if rollout.difficulty_pool and rollout.adaptive_mix:
        raise ConfigError("--difficulty_pool and --adaptive_mix both decide the next prompt", hint="drop one of them")
    if rollout.adaptive_mix and config.data.prompt_data_probs is not None:
        raise ConfigError("--adaptive_mix changes the shares that --prompt_data_probs fixes", hint="drop one of them")
    first = [source.kind for source in config.reward.sources()[:1]]
    for name in ("difficulty_pool", "adaptive_mix", "reuse_solved"):
        if getattr(rollout, name) and first == ["model"] and "success_threshold" not in given:
            message = f"--{name} counts responses that are right, and scores of --reward_pretrain have no bounds"
            raise ConfigError(message, hint="add --success_threshold SCORE, from which on a response is right")
    return notices


def _check_reuse(config: PpoConfig) -> None:
    """Raise ConfigError for what cannot be used beside right answers of earlier steps."""
    if config.reuse is None:
        return
    stale, age = config.algorithm.mask_stale, config.oldest
    for is_wrong, reason in (
        (config.asynchrony.runs_ahead, "--async_train bounds their age by --max_staleness"),
        (config.agent.agent_func_path is not None, "--agent_func_path makes episodes of several turns"),
        (config.rollout.n_samples_per_prompt < 2, "--n_samples_per_prompt 1 leaves no answer to compare it with"),
        (config.algorithm.row.baseline == "greedy", "--advantage_estimator remax compares with a response of its step"),
        ("pairwise" in {one.kind for one in config.reward.sources()}, "a pairwise judge compares answers of one step"),
        (config.model.routing_replay, "--routing_replay knows experts of the newest weights alone"),
        (config.data.image_key is not None, "--image_key is not tested with it"),
        (stale is not None and stale < age, f"--mask_stale {stale} leaves out tokens that --reuse_max_age {age} keeps"),
    ):
        if is_wrong:
            message = f"--reuse_solved trains on answers of earlier steps, and {reason}"
            raise ConfigError(message, hint="drop one of them")


def _check_replay(config: PpoConfig, given: Collection[str]) -> list[str]:
    """Return a notice for each option of what a run on recorded rollouts does not start."""
    if config.rollout.replay is None:
        return []
    unused = [*FILTER_OPTIONS, "difficulty_pool", "adaptive_mix", "reuse_solved", "draft_learning_rate"]
    unused += [*_POOL_OPTIONS, *_MIX_OPTIONS, *_REUSE_OPTIONS]
    unused += [
        name
        for part in (config.data, config.agent, config.evaluation, config.engine, config.asynchrony)
        for name in type(part).model_fields
        # Where the recorded log-probs come from, which rollouts share a forward pass, and which model it is.
        if name not in ("vllm_quantization", "early_forwards", "image_key")
    ]
    return without_effect(
        given, (True, unused, "--replay trains on recorded rollouts: nothing is generated or evaluated")
    )


def _check_sampling(config: PpoConfig, given: Collection[str]) -> list[str]:
    """Check sampling; return a notice for each option that makes engine and trainer log-probs differ."""
    rollout = config.rollout
    rollout.check(has_agent=config.agent.agent_func_path is not None)
    params = config.sampling()
    config.objective.check_sampling(params, is_replay=rollout.replay is not None)
    return [
        f"--{name} {getattr(params, name):g} {params.what_changes}, and the trainer's log-probs are those of the whole"
        " distribution: the mismatch/* metrics will not be near 0"
        for name in params.changes
    ]


def _check_placement(config: PpoConfig, given: Collection[str]) -> list[str]:
    """Check which models and engines share devices."""
    algorithm = config.algorithm
    placement = config.placement
    all_share = placement.colocate_all_models
    spec = algorithm.spec()
    shares_base = config.model.lora_rank > 0 and spec.uses_reference
    has_frozen = (
        spec.uses_reference != shares_base or algorithm.teacher_paths or config.reward.reward_pretrain is not None
    )
    if all_share and (overlap := config.asynchrony.spec()) is not None:
        overlap.check_sleep(engines=config.engine.vllm_enable_sleep, trainers=placement.deepspeed_enable_sleep)
    if all_share and config.engine.vllm_use_mps and config.engine.vllm_enable_sleep:
        message = "--vllm_enable_sleep gives GPU memory back, which is not tested with --vllm_use_mps"
        raise ConfigError(message, hint="drop one of them")
    return without_effect(
        given,
        (not all_share, _SLEEP, "--colocate_all_models is off, so engines and models have GPUs of their own"),
        (all_share, ["vllm_sync_backend"], "with --colocate_all_models engines and training share GPUs"),
        (all_share, ["colocate_actor_ref", "colocate_critic_reward"], "--colocate_all_models includes it"),
        (not algorithm.row.uses_critic, ["colocate_critic_reward"], f"{algorithm.row.full_name} has no critic"),
        (not has_frozen, ["ref_reward_offload"], "all models of this run are trained"),
        (EMA in algorithm.teachers.values(), _TEACHER_PLACES, "--teacher_model ema runs the policy, in its processes"),
        (shares_base, _REFERENCE_PLACES, "with --lora_rank the reference is the policy without its adapters"),
    )
