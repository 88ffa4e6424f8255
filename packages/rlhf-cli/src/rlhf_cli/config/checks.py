"""What concerns several fields, in one place: what cannot work is an error, an option without effect a notice."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import TYPE_CHECKING

from rlhf_data.errors import ConfigError, with_hint
from rlhf_train.algorithms import ALGORITHMS, AlgorithmSpec

if TYPE_CHECKING:
    from rlhf_cli.config.ppo import PpoConfig
    from rlhf_cli.config.training import TrainingSection

_CRITIC_OPTIONS = (
    "critic_pretrain",
    "critic_learning_rate",
    "critic_num_nodes",
    "critic_num_gpus_per_node",
    "lambd",
    "value_clip",
)
_REFERENCE_OPTIONS = ("kl_estimator", "ref_num_nodes", "ref_num_gpus_per_node", "colocate_actor_ref")
_EVALUATION_OPTIONS = ("eval_steps", "eval_temperature", "eval_n_samples_per_prompt")
_GPU_OPTIONS = (
    "vllm_gpu_memory_utilization",
    "enforce_eager",
    "vllm_enable_sleep",
    "deepspeed_enable_sleep",
    "colocate_all_models",
    "colocate_actor_ref",
)
_RANK_OPTIONS = ("critic_num_nodes", "critic_num_gpus_per_node", "ref_num_nodes", "ref_num_gpus_per_node")


def missing(option: str, what: str, hint: str) -> ConfigError:
    """Return the error for an option that is needed and not there."""
    return ConfigError(with_hint(f"--{option} is missing: {what}", hint))


def without_effect(options: Iterable[str], given: Collection[str], why: str) -> list[str]:
    """Return a notice for each of `options` that was given."""
    return [f"--{option} has no effect: {why}" for option in options if option in given]


def check_ppo(config: PpoConfig, given: Collection[str]) -> list[str]:
    """Check a `ppo` configuration whose recipe, if any, has been applied.

    Args:
        config: all sections.
        given: the options that somebody set to something else than the default.

    Returns:
        A notice for each option that has no effect.

    Raises:
        ConfigError: options that cannot work together, or one that is missing.
    """
    _check_inputs(config)
    notices = _check_algorithm(config, given)
    _check_batches(config)
    check_betas(config.training)
    notices += check_schedule(config.training, given)
    notices += _check_evaluation(config, given)
    notices += _check_sampling(config, given)
    return notices + _check_placement(config, given)


def on_cpu(given: Collection[str]) -> list[str]:
    """Return notices for options that concern GPUs only."""
    return [
        *without_effect(_GPU_OPTIONS, given, "there is no GPU, everything shares the CPU"),
        *without_effect(_RANK_OPTIONS, given, "without GPUs every model runs in the policy's processes"),
    ]


def algorithm_spec(config: PpoConfig) -> AlgorithmSpec:
    """Return the algorithm with its numbers. Raises ConfigError for numbers out of range."""
    section = config.algorithm
    low, high = section.eps_clip_low_high or (section.eps_clip, section.eps_clip)
    return AlgorithmSpec(
        estimator=section.advantage_estimator,
        gamma=section.gamma,
        lambd=section.lambd,
        clip_low=low,
        clip_high=high,
        value_clip=section.value_clip,
        kl_coef=section.init_kl_coef,
        kl_estimator=section.kl_estimator,
        use_kl_loss=section.use_kl_loss,
        whiten_std=not section.no_advantage_std_norm,
    )


def check_betas(training: TrainingSection) -> None:
    """Raise ConfigError unless AdamW's betas are in [0, 1)."""
    if not all(0 <= beta < 1 for beta in training.adam_betas):
        raise ConfigError(f"--adam_betas is {training.adam_betas}; both must lie in [0, 1)")


def check_schedule(training: TrainingSection, given: Collection[str]) -> list[str]:
    """Return notices about the learning rate's schedule."""
    if training.lr_scheduler == "cosine_with_min_lr":
        return []
    return without_effect(["min_lr_ratio"], given, f"--lr_scheduler is {training.lr_scheduler}")


def _check_inputs(config: PpoConfig) -> None:
    model, data = config.model, config.data
    if model.pretrain is None:
        hint = "add --pretrain FOLDER_OR_NAME; --pretrain builtin is the tiny model that ships"
        raise missing("pretrain", "--prompt_data says what to ask, not whom", hint)
    if data.prompt_data is None:
        hint = (
            "add --prompt_data FILE.jsonl with --input_key and --label_key; without --pretrain the built-in task runs"
        )
        raise missing("prompt_data", f"--pretrain {model.pretrain} needs prompts to train on", hint)
    if config.reward.remote_rm_url is None:
        hint = "add --remote_rm_url FILE.py, which defines reward_func(queries, prompts, labels)"
        raise missing("remote_rm_url", "nothing says how responses are scored", hint)


def _check_algorithm(config: PpoConfig, given: Collection[str]) -> list[str]:
    section = config.algorithm
    if {"eps_clip", "eps_clip_low_high"} <= set(given) and section.eps_clip_low_high is not None:
        raise ConfigError(
            with_hint("--eps_clip and --eps_clip_low_high both set the clip range", "give one of the two")
        )
    spec = algorithm_spec(config)
    notices = []
    if not spec.uses_reference:
        if section.use_kl_loss:
            raise ConfigError(
                with_hint(
                    "--use_kl_loss with --init_kl_coef 0: there is no KL", "set --init_kl_coef above 0, or drop it"
                )
            )
        notices += without_effect(_REFERENCE_OPTIONS, given, "--init_kl_coef is 0, so there is no reference model")
    if spec.use_kl_loss and spec.kl_estimator == "k1":
        notices.append(
            "--use_kl_loss with --kl_estimator k1: the gradient of k1 averages to 0, so that the term holds nothing"
            " back; k2 and k3 do"
        )
    row = spec.row
    if not row.uses_critic:
        notices += without_effect(_CRITIC_OPTIONS, given, f"{row.title} ({row.name}) has no critic")
    if not row.divides_by_std:
        why = f"{row.title} ({row.name}) divides by no standard deviation"
        notices += without_effect(("no_advantage_std_norm",), given, why)
    num_samples = config.rollout.n_samples_per_prompt
    if row.uses_group and num_samples < 2:
        alone = " or ".join(other.name for other in ALGORITHMS.values() if not other.uses_group)
        message = (
            f"--n_samples_per_prompt is {num_samples}: {row.title} ({row.name}) compares the samples of one prompt"
        )
        hint = f"use --n_samples_per_prompt 4 or more, or --advantage_estimator {alone}"
        raise ConfigError(with_hint(message, hint))
    return notices


def _check_batches(config: PpoConfig) -> None:
    num_rollouts = config.rollout.rollout_batch_size * config.rollout.n_samples_per_prompt
    size = config.training.train_batch_size
    if num_rollouts % size:
        divisor = max(number for number in range(1, min(size, num_rollouts) + 1) if num_rollouts % number == 0)
        message = (
            f"--train_batch_size is {size}, which does not divide the {num_rollouts} samples of a step"
            f" (--rollout_batch_size {config.rollout.rollout_batch_size} x --n_samples_per_prompt"
            f" {config.rollout.n_samples_per_prompt})"
        )
        raise ConfigError(with_hint(message, f"use --train_batch_size {divisor}"))


def _check_evaluation(config: PpoConfig, given: Collection[str]) -> list[str]:
    section = config.evaluation
    if config.data.eval_data is None:
        return without_effect(_EVALUATION_OPTIONS, given, "there is no --eval_data")
    if section.eval_temperature == 0 and section.eval_n_samples_per_prompt > 1:
        message = f"--eval_n_samples_per_prompt is {section.eval_n_samples_per_prompt} at --eval_temperature 0"
        raise ConfigError(with_hint(f"{message}: greedy responses are all the same", "use 1 sample, or a temperature"))
    return []


def _check_sampling(config: PpoConfig, given: Collection[str]) -> list[str]:
    rollout = config.rollout
    if rollout.top_k == 0:
        raise ConfigError(with_hint("--top_k is 0, which leaves no token to sample", "use -1 for all tokens"))
    cut = [name for name, default in (("top_p", 1.0), ("top_k", -1)) if getattr(rollout, name) != default]
    return [
        f"--{name} {getattr(rollout, name)} samples from a part of the distribution, while the trainer's log-probs are"
        " of the whole: mismatch/* will not be near 0"
        for name in cut
        if name in given
    ]


def _check_placement(config: PpoConfig, given: Collection[str]) -> list[str]:
    placement, engine = config.placement, config.engine
    for name, wanted in (
        ("vllm_enable_sleep", engine.vllm_enable_sleep),
        ("deepspeed_enable_sleep", placement.deepspeed_enable_sleep),
    ):
        if wanted and not placement.colocate_all_models:
            message = f"--{name} is for models and engines that share GPUs, and --colocate_all_models is off"
            raise ConfigError(with_hint(message, f"add --colocate_all_models, or drop --{name}"))
    if placement.deepspeed_enable_sleep and config.training.zero_stage not in (1, 2):
        message = f"--deepspeed_enable_sleep needs --zero_stage 1 or 2, got {config.training.zero_stage}"
        raise ConfigError(with_hint(message, "use --zero_stage 2, or drop --deepspeed_enable_sleep"))
    if placement.colocate_all_models:
        return without_effect(["colocate_actor_ref"], given, "--colocate_all_models includes it")
    return []
