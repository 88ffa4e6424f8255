"""Every flag reaches the field of the job that it is about, or has a test of its own elsewhere."""

from operator import attrgetter
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from rlhf_cli.commands.ppo import lowest_layer
from rlhf_cli.commands.ppo_job import make_job, make_plan
from rlhf_cli.config.ppo import PpoConfig
from rlhf_cli.preflight.inputs import Inputs
from rlhf_data.options.command_line import CommandLine
from rlhf_data.options.declare import options
from rlhf_data.prompts import PromptSet
from rlhf_data.records import Prompt
from rlhf_data.rows.row import Counts
from rlhf_train.algorithms.token_specs import CorrectionSpec
from rlhf_train.generation.difficulty import DifficultySpec
from rlhf_train.generation.mixing import MixSpec
from rlhf_train.generation.reuse import ReuseSpec
from rlhf_train.generation.run_spec import AsyncSpec, DynamicSampling

CPU, MANY_GPUS = 0, 8
AGENT = "--agent_func_path agents "
COLOCATED = "--colocate_all_models "
MASK = "--is_correction_level token --is_correction_mode mask "

# Flag, the words that follow it, further flags, the field of the job, and what it must be there.
REACHES = [
    ("bf16", "", "", "engine.dtype", "bfloat16"),
    ("attn_implementation", "sdpa", "", "models.actor.attn_implementation", "sdpa"),
    ("gradient_checkpointing", "", "", "models.critic.gradient_checkpointing", True),
    ("packing_samples", "", "", "models.reference.packing", True),
    (
        "sequence_parallel_size",
        "2",
        "--packing_samples --colocate_all_models --actor_num_gpus_per_node 4",
        "models.reference.sequence_parallel_size",
        2,
    ),
    (
        "ds_tensor_parallel_size",
        "2",
        "--colocate_all_models --actor_num_gpus_per_node 4",
        "models.reference.tensor_parallel_size",
        2,
    ),
    (
        "expert_parallel_size",
        "2",
        "--colocate_all_models --actor_num_gpus_per_node 4",
        "models.reference.expert_parallel_size",
        2,
    ),
    ("image_key", "i", "--apply_chat_template", "models.reference.images", "trained"),
    ("image_key", "i", "--apply_chat_template", "engine.images", True),
    ("freeze_visual_encoder", "", "--apply_chat_template --image_key i", "models.critic.images", "frozen"),
    ("share_prompts", "", "--packing_samples", "models.reference.share_prompts", True),
    ("aux_loss_coef", "0.01", "", "models.actor.aux_loss_coef", 0.01),
    ("aux_loss_coef", "0.01", "", "models.critic.aux_loss_coef", 0.0),
    ("aux_loss_coef", "0.01", "", "models.reference.aux_loss_coef", 0.0),
    ("aux_loss_coef", "0.01", "", "models.reference.torch_compile", "off"),
    ("aux_loss_coef", "0", "", "models.reference.torch_compile", "auto"),
    ("routing_replay", "", "", "models.actor.routing_replay", True),
    ("routing_replay", "", "", "models.critic.routing_replay", False),
    ("routing_replay", "", "", "models.reference.routing_replay", False),
    ("routing_replay", "", "", "models.reference.torch_compile", "off"),
    ("routing_replay", "", "--teacher_model t", "models.teacher.routing_replay", False),
    ("routing_replay", "", "", "engine.return_routes", True),
    ("lora_rank", "2", "", "models.critic.lora.rank", 2),
    ("lora_rank", "2", "", "models.reference.lora", None),
    ("lora_sync", "adapter", "--lora_rank 2", "engine.adapter_rank", 2),
    ("critic_lora_rank", "3", "", "models.critic.lora.rank", 3),
    ("critic_lora_rank", "0", "--lora_rank 2", "models.critic.lora", None),
    ("lora_rank", "2", "--ref_num_gpus_per_node 3", "plan.trainers.0.roles", ("actor", "reference")),
    ("lora_alpha", "4", "--lora_rank 2", "models.actor.lora.alpha", 4.0),
    ("target_modules", "q_proj,v_proj", "--lora_rank 2", "models.actor.lora.target_modules", ("q_proj", "v_proj")),
    ("load_in_4bit", "", "--lora_rank 2", "models.actor.lora.load_in_4bit", True),
    ("load_in_4bit", "", "--critic_lora_rank 2", "models.critic.lora.load_in_4bit", True),
    ("torch_compile", "off", "", "models.critic.torch_compile", "off"),
    ("ref_reward_offload", "", "", "models.reference.offload", True),
    ("ref_reward_offload", "", "--reward_pretrain r", "reward.offload_models", True),
    ("prompt_max_len", "50", "", "engine.max_model_len", 82),  # 50 + 32
    ("reward_timeout_s", "3", "", "reward.calls.timeout_s", 3.0),
    ("reward_num_workers", "3", "", "reward.calls.num_workers", 3),
    ("reward_start_timeout_s", "3", "", "reward.calls.worker.start_timeout_s", 3.0),
    ("reward_memory_gb", "0.5", "", "reward.calls.worker.memory_gb", 0.5),
    ("reward_env", "A_KEY,B", "", "reward.calls.worker.env", ("A_KEY", "B")),
    ("code_sandbox", "http://box:8080", "", "reward.calls.code_sandbox", "http://box:8080"),
    ("code_partial_reward", "", "", "reward.calls.code_partial", True),
    ("failed_reward", "-1", "", "reward.calls.failed_reward", -1.0),
    ("success_threshold", "0.5", "", "reward.calls.success_threshold", 0.5),
    ("reward_batch_size", "3", "", "reward.calls.batch_size", 3),
    ("reward_by_turn", "", "--reward_pretrain r --agent_func_path a.py", "reward.reward_by_turn", True),
    ("reward_sharding", "on", "--reward_pretrain r --reward_num_gpus_per_node 2", "reward.divided_models", ("r",)),
    ("step_separator", r"\n\n", "--reward_pretrain r", "reward.step_separator", "\n\n"),
    ("normalize_reward", "", "--reward_pretrain r", "reward.normalize_reward", True),
    ("running_reward_norm", "", "", "reward.running_reward_norm", True),
    ("reward_clip_range", "-1 2", "", "reward.reward_clip_range", (-1.0, 2.0)),
    (
        "reward_normalize",
        "each",
        "--dynamic_filtering --remote_rm_url a.py,b.py --n_samples_per_prompt 2",
        "dynamic_sampling.by_source",
        True,
    ),
    ("reward_normalize", "none", "", "reward.reward_normalize", "none"),
    ("judge_url", "http://127.0.0.1/v1", "", "reward.calls.judge.url", "http://127.0.0.1/v1"),
    ("judge_model", "m", "", "reward.calls.judge.model", "m"),
    ("judge_num_calls", "3", "", "reward.calls.judge.num_calls", 3),
    ("overlong_buffer_len", "0.2", "", "reward.overlong_buffer", 6),  # of 32: 6.4
    ("overlong_penalty_factor", "0.5", "--overlong_buffer_len 8", "reward.overlong_penalty_factor", 0.5),
    ("stop_properly_penalty_coef", "-1", "", "reward.stop_properly_penalty_coef", -1.0),
    ("rollout_batch_size", "64", "", "batch.rollout_batch_size", 64),
    ("n_samples_per_prompt", "8", "", "sampling.num_samples", 8),
    ("generate_max_len", "16", "", "eval_sampling.max_tokens", 16),
    ("generate_max_len", "16", "--prompt_max_len 50", "models.actor.max_length", 66),
    ("temperature", "0.5", "", "sampling.temperature", 0.5),
    ("top_p", "0.5", "", "sampling.top_p", 0.5),
    ("top_k", "5", "", "sampling.top_k", 5),
    ("extra_keys", "a,b", "", "reward.calls.worker.extra_keys", ("a", "b")),
    ("min_p", "0.1", "", "sampling.min_p", 0.1),
    ("repetition_penalty", "1.2", "", "sampling.repetition_penalty", 1.2),
    ("stop", r"END \n\n", "", "sampling.stop", ("END", "\n\n")),
    ("micro_rollout_batch_size", "4", "", "batch.micro_rollout_batch_size", 4),
    ("dynamic_filtering", "", "", "dynamic_sampling", DynamicSampling()),
    ("dynamic_filtering_reward_range", "0 1", "--dynamic_filtering", "dynamic_sampling.reward_range", (0.0, 1.0)),
    ("dynamic_filtering_max_batches", "3", "--dynamic_filtering", "dynamic_sampling.max_batches", 3),
    ("difficulty_pool", "", "", "difficulty", DifficultySpec()),
    ("target_pass_rate", "0.3", "--difficulty_pool", "difficulty.target_pass_rate", 0.3),
    ("pool_uniform_share", "0", "--difficulty_pool", "difficulty.pool_uniform_share", 0.0),
    ("pool_retire_visits", "3", "--difficulty_pool", "difficulty.pool_retire_visits", 3),
    ("adaptive_mix", "", "", "difficulty", MixSpec()),
    ("mix_temperature", "0.3", "--adaptive_mix", "difficulty.mix_temperature", 0.3),
    ("mix_window", "9", "--adaptive_mix", "difficulty.mix_window", 9),
    ("reuse_solved", "7", "", "reuse", ReuseSpec(reuse_solved=7)),
    ("reuse_max_age", "9", "--reuse_solved 7", "reuse.reuse_max_age", 9),
    ("reuse_pass_rate", "0.3", "--reuse_solved 7", "reuse.reuse_pass_rate", 0.3),
    ("advantage_estimator", "rloo", "", "algorithm.estimator", "rloo"),
    ("agent_func_path", "agents:Two", "", "agent.path", "agents:Two"),
    ("max_steps", "3", AGENT, "agent.limits.max_turns", 3),
    ("agent_max_len", "99", AGENT, "agent.limits.max_length", 99),
    ("agent_max_seconds", "1.5", AGENT, "agent.limits.max_seconds", 1.5),
    ("agent_num_workers", "3", AGENT, "agent.num_processes", 3),
    ("agent_timeout_s", "3", AGENT, "agent.timeout_s", 3.0),
    ("chat_template_kwargs", '{"a":1}', AGENT, "agent.chat_template_kwargs", '{"a":1}'),
    ("agent_history", "split", AGENT, "agent.history", "split"),
    ("agent_tool_parser", "mistral", AGENT, "agent.tool_parser", "mistral"),
    ("reward_memory_gb", "0.5", AGENT, "agent.worker.memory_gb", 0.5),
    ("failed_reward", "-1", AGENT, "agent.failed_reward", -1.0),
    ("success_threshold", "0.5", AGENT, "agent.success_threshold", 0.5),
    ("gamma", "0.9", "", "algorithm.gamma", 0.9),
    ("turn_gamma", "0.5", AGENT, "algorithm.turn_gamma", 0.5),
    ("group_by", "turn", f"{AGENT} --advantage_estimator rloo", "algorithm.group_by", "turn"),
    ("group_by", "state", f"{AGENT} --advantage_estimator rloo", "algorithm.group_by", "state"),
    ("state_coef", "0.5", f"{AGENT} --advantage_estimator rloo --group_by state", "algorithm.state_coef", 0.5),
    ("lambd", "0.9", "", "algorithm.lambd", 0.9),
    ("bootstrap_truncated", "", "", "algorithm.bootstrap_truncated", True),
    ("no_advantage_std_norm", "", "", "algorithm.whiten_std", False),
    ("policy_loss_type", "cispo", "", "algorithm.objective.policy_loss", "cispo"),
    ("loss_agg_mode", "seq_mean_token_sum", "", "algorithm.objective.reduction", "seq_mean_token_sum"),
    ("eps_clip", "0.1", "", "algorithm.objective.clip_low", 0.1),
    ("eps_clip_low_high", "0.1 0.3", "", "algorithm.objective.clip_high", 0.3),
    ("clip_eps_low", "0.1", "", "algorithm.objective.clip_low", 0.1),
    ("clip_eps_high", "0.3", "", "algorithm.objective.clip_high", 0.3),
    ("dual_clip", "3", "", "algorithm.objective.dual_clip", 3.0),
    ("mask_truncated", "", "", "algorithm.mask_truncated", True),
    ("kl_cov", "0.1 0.5", "", "algorithm.covariance.kl_cov", (0.1, 0.5)),
    ("clip_cov", "0.1 1 5", "", "algorithm.covariance.clip_cov", (0.1, 1.0, 5.0)),
    ("mask_off_policy", "0.5", "", "algorithm.objective.mask_off_policy", 0.5),
    ("sapo_tau", "2 3", "--policy_loss_type sapo", "algorithm.objective.sapo_tau", (2.0, 3.0)),
    ("log_ratio_coef", "0.1", "--policy_loss_type kimi", "algorithm.objective.log_ratio_coef", 0.1),
    ("entropy_loss_coef", "0.01", "", "algorithm.objective.entropy_coef", 0.01),
    ("value_clip", "0.1", "", "algorithm.value_clip", 0.1),
    ("init_kl_coef", "0.5", "", "algorithm.kl_coef", 0.5),
    ("teacher_model", "t", "", "models.teacher.path", "t"),
    (
        "teacher_model",
        "a.jsonl=t,b=t,c=u,t",
        "",
        "teachers",
        {"a.jsonl": "teacher", "b": "teacher", "c": "teacher 2", "": "teacher"},
    ),
    ("teacher_model", "a.jsonl=t,u", "", "models.teacher 2.path", "u"),
    ("teacher_model", "a.jsonl=t,u", "--ref_reward_offload", "models.teacher 2.offload", True),
    ("teacher_model", "a.jsonl=ema,u", "--enable_ema --ref_reward_offload", "models.teacher ema.offload", False),
    ("teacher_model", "ema", "--enable_ema", "models.teacher.is_average", True),
    ("teacher_model", "ema", "--enable_ema --colocate_actor_ref", "plan.trainers.0", ("actor", "reference", "teacher")),
    ("teacher_coef", "0.5", "--teacher_model t", "algorithm.teacher_coef", 0.5),
    ("top_entropy_quantile", "0.3", "", "algorithm.entropy.top_quantile", 0.3),
    ("entropy_target", "0.3", "", "algorithm.entropy.target", 0.3),
    ("entropy_coef_step", "0.1", "--entropy_target 1", "algorithm.entropy.coef_step", 0.1),
    ("teacher_top_k", "5", "--teacher_model t", "algorithm.distribution.top_k", 5),
    ("kd_divergence", "jsd", "--teacher_model t --teacher_top_k 5", "algorithm.distribution.divergence", "jsd"),
    ("jsd_beta", "0.1", "--teacher_model t --teacher_top_k 5", "algorithm.distribution.jsd_beta", 0.1),
    ("kl_target", "0.1", "", "algorithm.kl_target", 0.1),
    ("kl_horizon", "500", "--kl_target 0.1", "algorithm.kl_horizon", 500),
    ("kl_estimator", "k2", "", "algorithm.objective.kl_estimator", "k2"),
    ("use_kl_loss", "", "", "algorithm.use_kl_loss", True),
    ("kl_unbiased_gradient", "", "--use_kl_loss", "algorithm.objective.kl_unbiased_gradient", True),
    ("old_logprobs", "rollout", "", "algorithm.old_logprobs", "rollout"),
    (
        "is_correction_level",
        "geometric",
        "",
        "algorithm.correction",
        CorrectionSpec(level="geometric", mode="truncate", low=0.0, high=2.0),
    ),
    (
        "is_correction_mode",
        "mask",
        MASK,
        "algorithm.correction",
        CorrectionSpec(level="token", mode="mask", low=0.5, high=5),
    ),
    ("is_correction_threshold", "0.1 9", MASK, "algorithm.correction.high", 9.0),
    ("is_reject", "mean_k3", "--is_reject_threshold 0 0.1", "algorithm.correction.reject", "mean_k3"),
    ("is_reject_threshold", "0.1 0.2", "--is_reject mean_k3", "algorithm.correction.reject_low", 0.1),
    ("is_reject_threshold", "0.1 0.2", "--is_reject mean_k3", "algorithm.correction.reject_high", 0.2),
    ("is_correction_drop_masked", "", MASK, "algorithm.correction.drops_masked", True),
    ("mask_stale", "2", "", "algorithm.mask_stale", 2),
    ("train_batch_size", "32", "", "batch.train_batch_size", 32),
    ("micro_train_batch_size", "4", "", "batch.micro_train_batch_size", 4),
    ("optim", "muon", "", "models.critic.optimizer.muon_momentum", 0.95),
    ("muon_momentum", "0.8", "--optim muon", "models.actor.optimizer.muon_momentum", 0.8),
    ("micro_batch_tokens", "900", "--packing_samples", "batch.micro_batch_tokens", 900),
    ("adam_betas", "0.8 0.9", "", "models.actor.optimizer.betas", (0.8, 0.9)),
    ("l2", "0.1", "", "models.actor.optimizer.weight_decay", 0.1),
    ("max_norm", "0.5", "", "models.critic.optimizer.max_norm", 0.5),
    ("lr_scheduler", "constant", "", "models.actor.optimizer.scheduler", "constant"),
    ("lr_warmup_ratio", "0.5", "", "models.actor.optimizer.warmup_steps", 4),  # of 4 steps x 2
    ("min_lr_ratio", "0.5", "", "models.actor.optimizer.min_lr_ratio", 0.5),
    ("zero_stage", "3", "", "models.actor.zero_stage", 3),
    ("zpg", "2", "--zero_stage 3 --colocate_all_models --actor_num_gpus_per_node 2", "models.reference.zpg", 2),
    ("overlap_comm", "", "--zero_stage 3", "models.critic.overlap_comm", True),
    ("adam_offload", "", "--bf16 --zero_stage 1", "models.actor.optimizer.offload", True),
    ("adam_offload_path", "/disk", "--adam_offload --bf16", "models.critic.optimizer.offload_path", "/disk"),
    ("bf16_moments", "", "", "models.critic.optimizer.bf16_moments", True),
    ("seed", "3", "", "seed", 3),
    ("max_epochs", "2", "", "batch.max_epochs", 2),
    ("num_episodes", "2", "", "num_steps", 7),  # 200 prompts / 32 = 6.25
    ("train_steps", "2", "", "num_steps", 2),
    ("async_train", "", "", "asynchronous", AsyncSpec()),
    ("max_staleness", "3", "--async_train", "asynchronous.max_staleness", 3),
    ("keep_kv", "", "--async_train", "engine.keep_kv", True),
    ("at_update", "restart", "--async_train", "asynchronous.at_update", "restart"),
    ("early_forwards", "", "", "early_forwards", True),
    ("freezing_actor_steps", "1", "", "num_frozen_steps", 1),
    ("enable_ema", "", "", "ema_beta", 0.992),
    ("ema_beta", "0.9", "--enable_ema", "ema_beta", 0.9),
    ("actor_learning_rate", "1e-5", "", "models.actor.optimizer.learning_rate", 1e-5),
    ("critic_learning_rate", "1e-5", "", "models.critic.optimizer.learning_rate", 1e-5),
    ("draft_learning_rate", "1e-5", "--vllm_draft_model d", "models.draft.optimizer.learning_rate", 1e-5),
    ("draft_learning_rate", "1e-5", "--vllm_draft_model d --lora_rank 2", "models.draft.lora", None),
    ("draft_learning_rate", "1e-5", "--vllm_draft_model d", "plan.trainers.0", ("actor", "draft")),
    ("eval_steps", "3", "", "eval_steps", 3),
    ("eval_temperature", "0.5", "", "eval_sampling.temperature", 0.5),
    ("eval_n_samples_per_prompt", "3", "", "eval_sampling.num_samples", 3),
    ("best_metric_key", "eval/pass@1", "", "best_metric", "eval/pass@1"),
    ("vllm_num_engines", "3", "", "plan.engines.num_ranks", 3),
    ("vllm_tensor_parallel_size", "2", "", "engine.tensor_parallel_size", 2),
    ("vllm_gpu_memory_utilization", "0.3", "", "engine.gpu_memory_utilization", 0.3),
    ("vllm_max_num_seqs", "3", "", "engine.max_num_seqs", 3),
    ("vllm_quantization", "fp8", "--bf16", "engine.quantization", "fp8"),
    ("vllm_quantization", "fp8", "--bf16", "algorithm.correction.level", "token"),
    ("vllm_speculative", "ngram", "", "engine.speculative", "ngram"),
    ("vllm_draft_model", "small", "", "engine.draft_model", "small"),
    ("vllm_speculative_tokens", "7", "--vllm_draft_model small", "engine.speculative_tokens", 7),
    ("vllm_skip_patches", "idle_slots,bulk_decoding", "", "engine.skip_patches", ("idle_slots", "bulk_decoding")),
    ("engine_timeout_s", "60", "", "engine.request_timeout_s", 60.0),
    ("enforce_eager", "", "", "engine.enforce_eager", True),
    ("enable_prefix_caching", "false", "", "engine.enable_prefix_caching", False),
    ("vllm_enable_sleep", "", COLOCATED, "engine.enable_sleep", True),
    ("vllm_use_mps", "", f"{COLOCATED} --vllm_num_engines 2", "engine_mps", True),
    ("vllm_sync_backend", "nccl", "", "engine.weight_transfer", "nccl"),
    ("vllm_sync_backend", "nccl", "--colocate_all_models", "engine.weight_transfer", "ipc"),
    ("vllm_sync_backend", "host", "", "engine.weight_transfer", "shared_memory"),
    ("vllm_tensor_parallel_size", "2", "--colocate_all_models", "engine.weight_transfer", "shared_memory"),
    (
        "vllm_tensor_parallel_size",
        "2",
        "--colocate_all_models --actor_num_gpus_per_node 2",
        "engine.weight_transfer",
        "ipc",
    ),
    ("weight_sync_checksum", "", "", "sync_checksum", True),
    ("actor_num_nodes", "2", "", "plan.actor", 2),
    ("actor_num_gpus_per_node", "2", "", "plan.actor", 2),
    ("critic_num_nodes", "2", "", "plan.critic", 2),
    ("critic_num_gpus_per_node", "2", "", "plan.critic", 2),
    ("ref_num_nodes", "2", "", "plan.reference", 2),
    ("ref_num_gpus_per_node", "2", "", "plan.reference", 2),
    ("teacher_num_nodes", "2", "--teacher_model t", "plan.teacher", 2),
    ("teacher_num_gpus_per_node", "2", "--teacher_model t", "plan.teacher", 2),
    ("reward_num_nodes", "2", "--reward_pretrain m", "plan.scorers.num_ranks", 2),
    ("reward_num_gpus_per_node", "2", "--reward_pretrain m", "plan.scorers.num_ranks", 2),
    ("reward_num_nodes", "0", "", "plan.scorers", None),
    ("colocate_all_models", "", "", "plan.colocated", True),
    ("colocate_actor_ref", "", "", "plan.trainers.0.roles", ("actor", "reference")),
    ("colocate_critic_reward", "", "--reward_pretrain m", "plan.scorers.cards", [(0, 1)]),  # the critic's
    ("deepspeed_enable_sleep", "", COLOCATED, "trainer_sleep", True),
    ("save_value_network", "", "", "save_critic", True),
    ("record", "false", "", "record", False),
    ("record_token_values", "false", "", "record_token_values", False),
    ("record_format", "columns", "", "record_format", "columns"),
    ("timeline", "true", "", "timeline", True),
    ("save_steps", "7", "", "checkpoints.every", 7),
    ("ckpt_path", "/c", "", "checkpoints.folder", "/c"),
    ("max_ckpt_num", "2", "--save_steps 7", "checkpoints.max_num", 2),
    ("max_ckpt_mem", "2", "--save_steps 7", "checkpoints.max_bytes", 2 * 1024**3),
    ("save_hf_ckpt", "", "--save_steps 7", "checkpoints.hf_model", True),
    ("disable_ds_ckpt", "", "--save_steps 7 --save_hf_ckpt", "checkpoints.full", False),
    ("load_checkpoint", "", "--save_path /r", "checkpoints.resume", True),
    ("logging_steps", "5", "", "trackers.logging_steps", 5),
    ("use_tensorboard", "/events", "", "trackers.use_tensorboard", "/events"),
    ("use_wandb", "", "", "trackers.use_wandb", True),
    ("wandb_org", "x", "--use_wandb", "trackers.wandb_org", "x"),
    ("wandb_group", "x", "--use_wandb", "trackers.wandb_group", "x"),
    ("wandb_project", "x", "--use_wandb", "trackers.wandb_project", "x"),
    ("wandb_run_name", "x", "", "trackers.run_name", "x"),
    ("use_mlflow", "http://host:5000", "", "trackers.use_mlflow", "http://host:5000"),
]

# What becomes of these is looked at where files are read: preflight_*test, ppo_command_test, replay_command_test,
# dry_run_test.
READ_BEFORE = {
    "policy_loss_path",
    "advantage_path",
    "group_filter_path",
    "metrics_path",
    "resume",
    "replay",
    "plan_gpus",
    "plan_gpu_memory",
    "pretrain",
    "critic_pretrain",
    "trust_remote_code",
    "prompt_data",
    "prompt_data_probs",
    "prompt_split",
    "skip_bad_rows",
    "eval_data",
    "source_key",
    "label_key",
    "input_key",
    "apply_chat_template",
    "tools_key",
    "input_template",
    "max_samples",
    "preset_data",
    "remote_rm_url",
    "reward_pretrain",
    "reward_weights",
    "save_path",
}


def config_of(*argv: str):
    return CommandLine(config=PpoConfig, prog="", recipe=lowest_layer).parse(argv).config


def plan_of(*argv: str):
    """Something with a plan only, on more than one node."""
    return SimpleNamespace(plan=make_plan(config_of(*argv), [MANY_GPUS, MANY_GPUS]))


def job_of(*argv: str, num_gpus: int = MANY_GPUS):
    config = config_of(*argv)
    prompts = tuple(Prompt(f"p{i}", np.array([1, 2]), f"prompt {i}") for i in range(100))
    prompts = PromptSet(prompts, Counts(100, longest_tokens=2))
    agent = config.agent.agent_func_path
    inputs = Inputs("policy", "critic", config.reward.sources(), prompts, None, (), agent=agent)
    return make_job(config, inputs, make_plan(config, [num_gpus]), Path("/out"))


def field(job, path: str):
    head, _, rest = path.partition(".")
    if head == "models":
        role, _, rest = rest.partition(".")
        return attrgetter(rest)(job.models[role])
    if path in ("plan.actor", "plan.critic", "plan.reference", "plan.teacher"):
        return job.plan.trainers_of(rest).num_ranks
    if path.startswith("plan.trainers."):
        return job.plan.trainers[0].roles
    return attrgetter(path)(job)


@pytest.mark.parametrize(("flag", "words", "others", "path", "expected"), REACHES, ids=lambda part: str(part)[:30])
def test_flag_reaches_its_field_of_the_job(flag, words, others, path, expected):
    argv = ["--train_steps", "4"] if flag != "train_steps" else []
    if flag == "num_episodes":
        argv = ["--train_steps", "None"]
    made = (plan_of if path.startswith("plan.") else job_of)(*argv, *others.split(), f"--{flag}", *words.split())
    assert field(made, path) == expected


def test_every_flag_is_tested():
    assert {row[0] for row in REACHES} | READ_BEFORE == {option.name for option in options(PpoConfig)}


def test_make_job_learning_rates_are_spread_over_the_steps_that_each_model_takes():
    # 4 steps x 2 updates; the policy sits out the first 3.
    job = job_of("--train_steps", "4", "--freezing_actor_steps", "3", "--lr_warmup_ratio", "0.5")
    actor, critic = job.models["actor"].optimizer, job.models["critic"].optimizer
    assert (actor.total_steps, actor.warmup_steps) == (2, 1)
    assert (critic.total_steps, critic.warmup_steps) == (8, 4)


@pytest.mark.parametrize(
    ("argv", "low", "high"),
    [
        ([], 0.2, 0.2),
        (["--policy_loss_type", "gspo"], 3e-4, 4e-4),
        (["--policy_loss_type", "gspo", "--eps_clip", "0.1"], 0.1, 0.1),
        (["--policy_loss_type", "gmpo"], 0.33, 0.492),
        (["--policy_loss_type", "dppo_kl", "--clip_eps_low", "0.1"], 0.1, 0.05),
        (["--policy_loss_type", "gspo", "--clip_eps_high", "0.1"], 3e-4, 0.1),
        (["--clip_eps_low", "0.1", "--clip_eps_high", "0.3"], 0.1, 0.3),
    ],
)
def test_make_job_clip_range_is_what_was_said_or_the_losss_own(argv, low, high):
    algorithm = job_of(*argv).algorithm
    assert (algorithm.objective.clip_low, algorithm.objective.clip_high) == (low, high)


@pytest.mark.parametrize(("mode", "bounds"), [("truncate", (0.0, 2.0)), ("mask", (0.5, 5.0)), ("filter", (0.5, 2.0))])
def test_make_job_correction_without_threshold_takes_that_of_its_mode(mode, bounds):
    correction = job_of("--is_correction_level", "token", "--is_correction_mode", mode).algorithm.correction
    assert (correction.low, correction.high) == bounds
