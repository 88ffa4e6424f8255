"""From a checked configuration to the job that the trainer runs, and its arithmetic in words."""

import math
from dataclasses import replace
from pathlib import Path

from rlhf_cli.config.ppo import PpoConfig
from rlhf_cli.paths import with_full_paths
from rlhf_cli.preflight.inputs import Inputs
from rlhf_data.command_line import to_toml
from rlhf_data.errors import FeatureError
from rlhf_data.options import matching
from rlhf_rollout.engines import EngineSpec
from rlhf_rollout.protocols import SamplingParams
from rlhf_train.online.job import DynamicSampling, OnlineJob, RewardSpec
from rlhf_train.online.placement import PlacementPlan, PlacementRequest, plan_placement
from rlhf_train.specs import ModelSpec

# Of a GPU's memory, for an engine that has it to itself; that takes turns with the trainers, whose weights stay for the
# sync when their optimizer states leave; that never sleeps beside them.
_SHARE_ALONE, _SHARE_IN_TURN, _SHARE_TOGETHER = 0.9, 0.6, 0.4


_SLEEP_STAGE = 2  # at which optimizer states can leave the GPU and come back
_OTHER_LAYOUT = "use models apart, or --colocate_all_models with one engine per training process, on one node"


def make_request(config: PpoConfig, gpus_per_node: int | None = None) -> PlacementRequest:
    """Return the layout that was asked for; `gpus_per_node` None is for one node."""
    spec, placement = config.algorithm.spec(), config.placement
    ranks = {"actor": placement.num_ranks("actor")}
    if spec.row.uses_critic:
        ranks["critic"] = placement.num_ranks("critic")
    if spec.uses_reference:
        ranks["reference"] = placement.num_ranks("ref")
    return PlacementRequest(
        ranks=ranks,
        reward_ranks=placement.num_ranks("reward") if config.reward.reward_pretrain is not None else None,
        num_engines=config.engine.vllm_num_engines,
        tensor_parallel_size=config.engine.vllm_tensor_parallel_size,
        num_nodes=placement.most_nodes,
        gpus_per_node=gpus_per_node,
        **matching(PlacementRequest, placement),
    )


def make_plan(config: PpoConfig, num_gpus: int, gpus_per_node: int | None = None) -> PlacementPlan:
    """Return where everything runs; `gpus_per_node` None is for one node. Raises ConfigError when it does not fit."""
    return plan_placement(make_request(config, gpus_per_node), num_gpus)


def unavailable_in(config: PpoConfig, plan: PlacementPlan) -> list[FeatureError]:
    """Return an error for each thing that the plan asks for and a run cannot do."""
    found = [FeatureError(f"not available: {feature}", hint=_OTHER_LAYOUT) for feature in plan.unavailable]
    stage = config.training.zero_stage
    if plan.device == "cuda" and config.placement.deepspeed_enable_sleep and stage != _SLEEP_STAGE:
        message = f"not available: --deepspeed_enable_sleep at --zero_stage {stage}"
        hint = f"use --zero_stage {_SLEEP_STAGE}, or drop --deepspeed_enable_sleep"
        found.append(FeatureError(message, hint=hint))
    return found


def make_job(
    config: PpoConfig, inputs: Inputs, plan: PlacementPlan, folder: Path, ray_address: str | None = None
) -> OnlineJob:
    """Return the job. Raises ConfigError for combinations that only show here."""
    rollout, training, spec, on_gpu = config.rollout, config.training, config.algorithm.spec(), plan.device == "cuda"
    batch, num_samples = config.batch, rollout.n_samples_per_prompt
    num_steps = count_steps(config, len(inputs.prompts))
    num_frozen = max(training.freezing_actor_steps, 0)
    places = config.engine.vllm_max_num_seqs * plan.engines.num_ranks
    filtering = DynamicSampling(
        reward_range=rollout.dynamic_filtering_reward_range, max_batches=rollout.dynamic_filtering_max_batches
    )
    sampling = SamplingParams(
        num_samples=num_samples,
        max_tokens=rollout.generate_max_len,
        # Requests reach an engine in no fixed order, so that on a CPU each draws from a seed of its own. On a GPU, sums
        # depend on what else is in the batch: it would not make runs alike, and slow the sampler down.
        seed=None if on_gpu else training.seed,
        **matching(SamplingParams, rollout),
    )
    evaluation = config.evaluation
    full = with_full_paths(config)
    return OnlineJob(
        models=_make_models(config, inputs, num_steps * batch.num_updates, num_frozen * batch.num_updates),
        algorithm=spec,
        engine=_make_engine(config, inputs.model, plan),
        sampling=sampling,
        eval_sampling=replace(
            sampling, num_samples=evaluation.eval_n_samples_per_prompt, temperature=evaluation.eval_temperature
        ),
        prompts=inputs.prompts.prompts,
        eval_prompts=inputs.eval_prompts.prompts if inputs.eval_prompts else (),
        reward=_make_reward(config, inputs),
        plan=plan,
        batch=batch,
        num_steps=num_steps,
        eval_steps=max(evaluation.eval_steps, 0),
        save_path=str(folder),
        config=to_toml(full),
        seed=training.seed,
        trainer_sleep=config.placement.deepspeed_enable_sleep and on_gpu,
        sync_checksum=config.engine.weight_sync_checksum,
        # Twice what the engines write at once: they never wait for the next prompt.
        max_in_flight=max(math.ceil(2 * places / num_samples), 1),
        ray_address=ray_address,
        dynamic_sampling=filtering if rollout.dynamic_filtering else None,
        num_frozen_steps=num_frozen,
        ema_beta=training.ema_beta if training.enable_ema else None,
        save_critic=config.output.save_value_network and spec.row.uses_critic,
        best_metric=evaluation.best_metric_key,
        trackers=full.output.trackers("ppo", folder.name),
    )


def count_steps(config: PpoConfig, num_prompts: int) -> int:
    """Return the number of steps: enough for `num_episodes` passes over the prompts, `train_steps` at most."""
    steps = math.ceil(config.training.num_episodes * num_prompts / config.rollout.rollout_batch_size)
    return steps if config.training.train_steps is None else min(steps, config.training.train_steps)


def describe_batches(
    config: PpoConfig, plan: PlacementPlan, num_prompts: int | None, num_held_out: int | None = 0
) -> str:
    """Return the arithmetic of a run for people: a line each for samples, updates, prompts and tokens. Numbers of
    prompts that are not known are None."""
    batch, rollout, ranks = config.batch, config.rollout, plan.trainers_of("actor").num_ranks
    size, limit, prompt_limit = batch.rollout_batch_size, rollout.generate_max_len, config.data.prompt_max_len
    a_rank = math.ceil(batch.train_batch_size / ranks)
    passes = math.ceil(a_rank / batch.micro_train_batch_size)
    rows = {
        "a step": f"{size} prompts x {batch.num_samples_per_prompt} samples = {batch.num_rollouts}",
        "": f"{batch.num_rollouts} / {batch.train_batch_size} x {batch.max_epochs} epoch(s) = {batch.num_updates}"
        " optimizer step(s)",
        "an optimizer step": f"{batch.train_batch_size} samples / {ranks} process(es) = {a_rank} each, in {passes}"
        f" pass(es) of at most {batch.micro_train_batch_size}",
        "the run": _describe_run(config, num_prompts),
        "tokens": f"prompt {prompt_limit} + response {limit} = {prompt_limit + limit} at most",
    }
    if rollout.dynamic_filtering:
        most = size * rollout.dynamic_filtering_max_batches
        rows["dynamic sampling"] = f"a step draws prompts until {size} are worth training, {most} at most"
    num_frozen = config.training.freezing_actor_steps
    if num_frozen > 0 and num_prompts is not None:
        learning = (count_steps(config, num_prompts) - num_frozen) * batch.num_updates
        rows["critic first"] = f"{num_frozen} steps without the policy, which takes {learning} optimizer steps"
    if buffer := config.reward.overlong_buffer(limit):
        factor = config.reward.overlong_penalty_factor
        rows["length"] = f"no penalty up to {limit - buffer} tokens, then up to {factor:g} over {buffer}"
    if num_held_out:
        rows["held-out"] = f"{num_held_out} prompts x {config.evaluation.eval_n_samples_per_prompt} sample(s)"
    return "\n".join(f"  {name.ljust(18)} {text}" for name, text in rows.items())


def _describe_run(config: PpoConfig, num_prompts: int | None) -> str:
    updates = config.batch.num_updates
    if num_prompts is None:
        return f"prompts / {config.rollout.rollout_batch_size} x {config.training.num_episodes} episode(s) = steps"
    steps = count_steps(config, num_prompts)
    asked = steps * config.rollout.rollout_batch_size
    return (
        f"{steps} steps x {updates} = {steps * updates} optimizer steps; {asked} prompts asked of {num_prompts},"
        f" {asked / num_prompts:.2f} passes"
    )


def _make_reward(config: PpoConfig, inputs: Inputs) -> RewardSpec:
    section = config.reward
    return RewardSpec(
        sources=inputs.reward_sources,
        timeout_s=section.reward_timeout_s,
        num_workers=section.reward_num_workers,
        batch_size=section.reward_batch_size,
        running_norm=section.running_reward_norm,
        normalize_models=section.normalize_reward,
        clip_range=section.reward_clip_range,
        overlong_buffer=section.overlong_buffer(config.rollout.generate_max_len),
        overlong_penalty_factor=section.overlong_penalty_factor,
        stop_properly_coef=section.stop_properly_penalty_coef,
    )


def _make_engine(config: PpoConfig, model: str, plan: PlacementPlan) -> EngineSpec:
    engine = config.engine
    share = _SHARE_ALONE
    if plan.shares_gpus:
        share = _SHARE_IN_TURN if engine.vllm_enable_sleep else _SHARE_TOGETHER
    return EngineSpec(
        model=model,
        tokenizer=model,
        dtype=config.model.dtype,
        max_model_len=config.data.prompt_max_len + config.rollout.generate_max_len,
        max_num_seqs=engine.vllm_max_num_seqs,
        gpu_memory_utilization=engine.vllm_gpu_memory_utilization or share,
        enforce_eager=engine.enforce_eager,
        enable_sleep=engine.vllm_enable_sleep and plan.device == "cuda",
        enable_prefix_caching=engine.enable_prefix_caching,
        tensor_parallel_size=engine.vllm_tensor_parallel_size,
        seed=config.training.seed,
        weight_transfer="ipc" if plan.shares_gpus else "shared_memory",
    )


def _make_models(config: PpoConfig, inputs: Inputs, num_updates: int, num_frozen_updates: int) -> dict[str, ModelSpec]:
    spec, model, training, stage = config.algorithm.spec(), config.model, config.training, config.training.zero_stage
    learning = training.optimizer(training.actor_learning_rate, num_updates - num_frozen_updates)
    models = {"actor": model.spec(inputs.model, stage, learning)}
    if spec.row.uses_critic:
        learning = training.optimizer(training.critic_learning_rate, num_updates)
        models["critic"] = model.spec(inputs.critic, stage, learning)
    if spec.uses_reference:
        models["reference"] = model.spec(inputs.model, stage)
    return models
