"""Builds the job that the trainer runs from a checked configuration, and describes its batches in words."""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from rlhf_cli.config.paths import EMA, model_path
from rlhf_cli.config.ppo import PpoConfig
from rlhf_cli.preflight.inputs import Inputs
from rlhf_cli.preflight.models import longest_sequence
from rlhf_cli.preflight.resume import to_store
from rlhf_data.errors import ConfigError
from rlhf_data.options.command_line import to_toml
from rlhf_data.options.declare import matching
from rlhf_rollout.commands.sections import SHARE_ALONE
from rlhf_rollout.engines import EngineSpec
from rlhf_rollout.protocols import SamplingParams
from rlhf_rollout.rewards.sources import model_paths
from rlhf_train.cluster.placement import PlacementRequest, plan_placement
from rlhf_train.cluster.places import PlacementPlan
from rlhf_train.generation.recorded import Recording
from rlhf_train.learning.learning_spec import teacher_role
from rlhf_train.online_job import OnlineJob
from rlhf_train.run_memory import reward_model_bytes
from rlhf_train.specs import ModelSpec

# Shares of a GPU's memory for the engines on a GPU that they share with training.
_SHARE_IN_TURN = 0.6  # they sleep while models train; the models' weights stay on the GPU, for the weight sync
_SHARE_TOGETHER = 0.4  # they never sleep
_LARGEST_WHOLE_BYTES = 20 << 30  # of a reward model that is not divided by itself: a quarter of a GPU of 80 GB
_OLD_LOGPROBS = {
    "recompute": "computed by the trainer before the first update of a step",
    "rollout": "those of the engine",
    "skip": "those of the update itself, the only one of its step",
}


def make_request(config: PpoConfig) -> PlacementRequest:
    """Return the layout that the flags ask for."""
    spec = config.algorithm.spec()
    placement = config.placement
    replays = config.rollout.replay is not None
    flags = {"actor": "actor"}  # the part of the flags' names, by role
    if spec.row.uses_critic:
        flags["critic"] = "critic"
    if spec.uses_reference:
        flags["reference"] = "ref"
    if spec.uses_teacher:
        flags["teacher"] = "teacher"
    ranks = {role: placement.num_ranks(name) for role, name in flags.items()}
    if EMA in config.algorithm.teachers.values():
        ranks["teacher"] = 0  # it runs the policy
    if config.model.lora_rank and spec.uses_reference:
        ranks["reference"] = 0  # it is the policy without its adapters
    if config.trains_draft:
        ranks["draft"] = 0  # its weights follow the policy's on their way to the engines
    return PlacementRequest(
        ranks=ranks,
        num_nodes={role: placement.count(name, "num_nodes") for role, name in (flags | {"reward": "reward"}).items()},
        reward_ranks=placement.num_ranks("reward") if config.reward.reward_pretrain and not replays else None,
        num_engines=0 if replays else config.engine.vllm_num_engines,
        tensor_parallel_size=config.engine.vllm_tensor_parallel_size,
        **matching(PlacementRequest, placement),
    )


def make_plan(config: PpoConfig, nodes: Sequence[int]) -> PlacementPlan:
    """Return the placement of all processes on nodes with these numbers of GPUs.

    Raises ConfigError if they are too few, or the engines on one GPU want more than its memory, or MPS has no use.
    """
    plan = plan_placement(make_request(config), nodes).joined("teacher", list(_teacher_roles(config).values())[1:])
    if config.engine.vllm_use_mps and plan.device == "cuda" and not plan.crowded_engines:
        message = "--vllm_use_mps is for engines that share a GPU, and none do"
        raise ConfigError(message, hint="use more --vllm_num_engines with --colocate_all_models, or drop it")
    for placed in plan.trainers:
        how = "--actor_num_gpus_per_node {}, and as many for models with GPUs of their own"
        config.planned_model.check_ranks(placed.num_ranks, how)
    share = config.engine.vllm_gpu_memory_utilization
    most = _engines_per_gpu(plan)
    if share is not None and most * share > 1:
        message = f"{most} engines share a GPU, and --vllm_gpu_memory_utilization {share:g} is the share of each:"
        hint = f"use --vllm_gpu_memory_utilization {_default_share(config, plan):.2g}, or fewer engines"
        raise ConfigError(f"{message} {most * share:g} of its memory", hint=hint)
    return plan


def _teacher_roles(config: PpoConfig) -> dict[str, str]:
    """Return the role of each teacher by its folder or hub name; the policy's average comes last."""
    roles = {path: teacher_role(number) for number, path in enumerate(config.algorithm.teacher_paths, 1)}
    if EMA in config.algorithm.teachers.values():
        roles[EMA] = f"teacher {EMA}" if roles else teacher_role(1)
    return roles


def _roles_by_source(config: PpoConfig) -> dict[str, str]:
    """Return the role of each data source's teacher; empty if one teacher is for all."""
    teachers = config.algorithm.teachers
    roles = _teacher_roles(config)
    return {source: roles[path] for source, path in teachers.items()} if teachers.keys() - {""} else {}


def _engines_per_gpu(plan: PlacementPlan) -> int:
    """Return the largest number of engines on one GPU."""
    return max(Counter(plan.engines.cards).values(), default=1)


def _default_share(config: PpoConfig, plan: PlacementPlan) -> float:
    """Return the share of a GPU's memory for one engine, if no flag sets it."""
    if not plan.shares_gpus:
        return SHARE_ALONE
    return (_SHARE_IN_TURN if config.engine.vllm_enable_sleep else _SHARE_TOGETHER) / _engines_per_gpu(plan)


def make_job(
    config: PpoConfig, inputs: Inputs, plan: PlacementPlan, folder: Path, ray_address: str | None = None
) -> OnlineJob:
    """Return the job.

    Raises:
        ConfigError: values that cannot work together.
    """
    rollout = config.rollout
    training = config.training
    spec = config.objective
    on_gpu = plan.device == "cuda"
    batch = config.batch
    num_samples = rollout.n_samples_per_prompt
    num_steps = num_planned = count_steps(config, len(inputs.prompts), inputs.recording)
    if inputs.recording is not None:
        num_steps = min(num_planned, inputs.recording.num_steps)
    num_frozen = max(training.freezing_actor_steps, 0)
    num_slots = config.engine.vllm_max_num_seqs * plan.engines.num_ranks
    # Requests reach an engine in no fixed order, so each needs a seed of its own for two runs to agree. On a GPU they
    # would not agree anyway, because sums depend on what else is in the batch, and seeds slow the sampler down.
    sampling = config.sampling(seed=None if on_gpu else training.seed)
    evaluation = config.evaluation
    full = to_store(config)
    return OnlineJob(
        models=_make_models(config, inputs, num_planned * batch.num_updates, num_frozen * batch.num_updates),
        teachers=_roles_by_source(config),
        algorithm=spec,
        engine=_make_engine(config, inputs, plan, sampling),
        sampling=sampling,
        eval_sampling=replace(
            sampling, num_samples=evaluation.eval_n_samples_per_prompt, temperature=evaluation.eval_temperature
        ),
        prompts=inputs.prompts.prompts,
        prompts_digest=inputs.prompts.counts.digest,
        eval_prompts=inputs.eval_prompts.prompts if inputs.eval_prompts else (),
        reward=replace(
            config.reward.spec(rollout),
            sources=inputs.reward_sources,
            offload_models=config.model.ref_reward_offload,
            process_models=inputs.process_models,
            divided_models=_divided_reward_models(config, inputs, plan),
        ),
        agent=inputs.agent
        and config.agent.spec(inputs.agent, longest_sequence(config)[0], config.reward.calls(), config.data),
        plan=plan,
        batch=batch,
        num_steps=num_steps,
        eval_steps=max(evaluation.eval_steps, 0),
        save_path=str(folder),
        config=to_toml(full),
        seed=training.seed,
        engine_mps=config.engine.vllm_use_mps and plan.device == "cuda",
        trainer_sleep=config.placement.deepspeed_enable_sleep and plan.shares_gpus,
        sync_checksum=config.engine.weight_sync_checksum,
        # Twice as many groups as the engines generate at the same time, so that they never wait for a prompt.
        max_in_flight=max(math.ceil(2 * num_slots / num_samples), 1),
        ray_address=ray_address,
        dynamic_sampling=config.filtering,
        difficulty=config.difficulty,
        reuse=config.reuse,
        num_frozen_steps=num_frozen,
        ema_beta=training.ema_beta if training.enable_ema else None,
        save_critic=config.output.save_value_network and spec.row.uses_critic,
        best_metric=None if inputs.recording else evaluation.best_metric_key,
        checkpoints=replace(
            full.checkpoint.spec(), resume=config.checkpoint.continues, template_clock=inputs.template_clock
        ),
        trackers=full.output.trackers("ppo", folder.name),
        asynchronous=config.asynchrony.spec(),
        early_forwards=config.asynchrony.early_forwards,
        num_busy_engines=config.engine.vllm_num_engines if config.asynchrony.overlaps else 0,
        replay=str(inputs.recording.path) if inputs.recording else "",
        record=config.output.record,
        record_token_values=config.output.record_token_values,
        record_format=config.output.record_format,
        timeline=config.output.timeline,
        own_metrics=config.output.own_code.get("metrics_path"),
    )


def count_steps(config: PpoConfig, num_prompts: int, recording: Recording | None = None) -> int:
    """Return the number of steps, at most `train_steps`: as many as `num_episodes` passes over the prompts need, or as
    the run was to have whose recording is replayed."""
    steps = config.steps_of_episodes(num_prompts) if recording is None else recording.num_planned
    return steps if config.training.train_steps is None else min(steps, config.training.train_steps)


def describe_batches(
    config: PpoConfig, plan: PlacementPlan, num_prompts: int | None, num_held_out: int | None = 0
) -> str:
    """Return the arithmetic of a run for people, with one line each for samples, updates, prompts and tokens.

    Args:
        config: the configuration.
        plan: the placement, for the number of training processes.
        num_prompts: number of training prompts; None if it is not known.
        num_held_out: number of held-out prompts; None if it is not known.
    """
    batch = config.batch
    rollout = config.rollout
    ranks = plan.trainers_of("actor").num_ranks
    size = batch.rollout_batch_size
    limit = rollout.generate_max_len
    prompt_limit = config.data.prompt_max_len
    divides_tokens = config.model.sequence_parallel_size > 1
    together = max(config.model.sequence_parallel_size, config.model.ds_tensor_parallel_size)
    per_rank = math.ceil(batch.train_batch_size / (ranks // together))
    longest, _ = config.agent.max_len(prompt_limit, limit)
    tokens = f"prompt {prompt_limit} + response {limit} = at most {prompt_limit + limit}"
    if longest != prompt_limit + limit:  # by --agent_max_len
        tokens = f"prompt {prompt_limit}, each answer {limit}, a conversation at most {longest}"
    processes = f"{ranks} process(es)"
    if together > 1:
        divided = "every sequence" if divides_tokens else "the weights"
        processes = f"{ranks // together} group(s) of {together} processes that divide {divided}"
    passes = f"{math.ceil(per_rank / batch.micro_train_batch_size)} pass(es) of at most {batch.micro_train_batch_size}"
    if batch.micro_batch_tokens is not None:
        passes = f"passes of at most {batch.micro_batch_tokens} tokens"
    rows = {
        "step": f"{size} prompts x {batch.n_samples_per_prompt} samples = {batch.num_rollouts}",
        "": f"{batch.num_rollouts} / {batch.train_batch_size} x {batch.max_epochs} epoch(s) = {batch.num_updates}"
        " update(s)",
        "update": f"{batch.train_batch_size} samples / {processes} = {per_rank} each, in {passes}",
        "old log-probs": _OLD_LOGPROBS[config.objective.old_logprobs],
        "run": _describe_run(config, num_prompts),
        "tokens": tokens,
    }
    if config.asynchrony.async_train and (steps := config.asynchrony.max_staleness):
        most = (steps + 1) * size
        rows["ahead"] = f"at most {most} prompts run or wait; what is trained is at most {steps} step(s) old"
    if rollout.filters and rollout.replay is None:
        most = size * rollout.dynamic_filtering_max_batches
        rows["dynamic sampling"] = f"each step draws prompts until {size} pass the filter, at most {most}"
    num_frozen = config.training.freezing_actor_steps
    if num_frozen > 0 and num_prompts is not None:
        learning = (count_steps(config, num_prompts) - num_frozen) * batch.num_updates
        rows["critic first"] = f"{num_frozen} steps train the critic only; the policy gets {learning} updates"
    if buffer := config.reward.overlong_buffer(limit):
        factor = config.reward.overlong_penalty_factor
        rows["length penalty"] = f"none up to {limit - buffer} tokens, then growing to {factor:g} over {buffer} tokens"
    if num_held_out:
        rows["held-out"] = f"{num_held_out} prompts x {config.evaluation.eval_n_samples_per_prompt} sample(s)"
    return "\n".join(f"  {name.ljust(18)} {text}" for name, text in rows.items())


def _describe_run(config: PpoConfig, num_prompts: int | None) -> str:
    """Return the numbers of steps, updates and prompts of the whole run, in words."""
    updates = config.batch.num_updates
    if config.rollout.replay is not None:
        return f"the recorded steps of {config.rollout.replay}"
    if num_prompts is None:
        return f"prompts / {config.rollout.rollout_batch_size} x {config.training.num_episodes} episode(s) = steps"
    steps = count_steps(config, num_prompts)
    asked = steps * config.rollout.rollout_batch_size
    return (
        f"{steps} steps x {updates} = {steps * updates} updates; {asked} prompts drawn from {num_prompts},"
        f" {asked / num_prompts:.2f} passes"
    )


def _divided_reward_models(config: PpoConfig, inputs: Inputs, plan: PlacementPlan) -> tuple[str, ...]:
    """Return the reward models whose processes divide the weights."""
    sharding = config.reward.reward_sharding
    if plan.scorers is None or plan.scorers.num_ranks == 1 or sharding == "off" or config.images:
        return ()
    if sharding == "auto" and config.training.zero_stage < 3:
        return ()
    paths = [path for path in model_paths(inputs.reward_sources) if path not in inputs.process_models]
    dtype = config.model.dtype
    return tuple(path for path in paths if sharding == "on" or reward_model_bytes(path, dtype) > _LARGEST_WHOLE_BYTES)


def _make_engine(config: PpoConfig, inputs: Inputs, plan: PlacementPlan, sampling: SamplingParams) -> EngineSpec:
    engine = config.engine
    transfer = plan.weight_transfer
    if engine.vllm_sync_backend == "nccl" and not config.placement.colocate_all_models:
        transfer = "nccl"
    if engine.vllm_sync_backend == "host" and transfer == "nccl":
        transfer = "tcp"
    spec = engine.spec(
        inputs.model,
        longest_sequence(config)[0],
        _default_share(config, plan),
        tokenizer=inputs.model,
        expected_sampling=sampling,
        masked_ids=inputs.masked_ids.get(inputs.model, ()),
        adapter_rank=config.adapter_rank,
        images=bool(config.images),
        dtype=config.model.dtype,
        enable_sleep=engine.vllm_enable_sleep and plan.shares_gpus,
        seed=config.training.seed,
        weight_transfer=transfer,
        keep_kv=config.asynchrony.keep_kv,
        return_routes=config.model.routing_replay,
    )
    return replace(spec, draft_model=model_path(spec.draft_model)) if spec.draft_model else spec


def _make_models(config: PpoConfig, inputs: Inputs, num_updates: int, num_frozen_updates: int) -> dict[str, ModelSpec]:
    spec = config.algorithm.spec()
    model = config.model
    training = config.training
    sharding = training.sharding
    learning = training.optimizer(training.actor_learning_rate, num_updates - num_frozen_updates)
    models = {"actor": model.spec(inputs.model, sharding, learning)}
    if spec.row.uses_critic:
        learning = training.optimizer(training.critic_learning_rate, num_updates)
        critic = model.spec(inputs.critic, sharding, learning)
        models["critic"] = replace(critic, lora=model.critic_lora, aux_loss_coef=0.0, routing_replay=False)
    if config.trains_draft:
        learning = training.optimizer(training.draft_learning_rate, num_updates - num_frozen_updates)
        draft = model.spec(model_path(config.engine.vllm_draft_model), sharding, learning)
        models["draft"] = replace(draft, lora=None, aux_loss_coef=0.0, routing_replay=False)
    if spec.uses_reference:
        models["reference"] = model.spec(inputs.model, sharding)
    for path, role in _teacher_roles(config).items():
        models[role] = model.spec(inputs.model if path == EMA else path, sharding)
        if path == EMA:
            models[role] = replace(models[role], is_average=True, offload=False)
    # These give log-probs, which are compared with the engine's.
    for role in models.keys() - {"critic"}:
        models[role] = replace(models[role], masked_ids=inputs.masked_ids.get(models[role].path, ()))
    longest = longest_sequence(config)[0]
    return {role: replace(spec, max_length=longest, images=config.images) for role, spec in models.items()}
