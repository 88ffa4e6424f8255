"""Estimator, losses, KL and corrections."""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING

from rlhf_cli.config.algorithm import CLIP_OPTIONS, AlgorithmSection
from rlhf_cli.config.checks.messages import check_range, without_effect
from rlhf_data.errors import ConfigError, with_hint
from rlhf_train.algorithms import ALGORITHMS, AlgorithmSpec

if TYPE_CHECKING:
    from rlhf_cli.config.ppo import PpoConfig

_CRITIC_OPTIONS = (
    "critic_pretrain",
    "critic_learning_rate",
    "critic_num_nodes",
    "critic_num_gpus_per_node",
    "lambd",
    "value_clip",
    "bootstrap_truncated",
    "save_value_network",
)
_REFERENCE_OPTIONS = ("kl_estimator", "ref_num_nodes", "ref_num_gpus_per_node", "colocate_actor_ref")


def check_algorithm(config: PpoConfig, given: Collection[str]) -> list[str]:
    """Check the algorithm, and that a step has the samples and the optimizer steps that it needs; return notices."""
    section = config.algorithm
    if len(section.clip_spellings) > 1:
        names = " and ".join(f"--{name}" for name in section.clip_spellings)
        raise ConfigError(with_hint(f"{names} set the same clip range", "give one of them"))
    check_range("is_correction_threshold", section.is_correction_threshold)
    spec = section.spec()
    _check_samples(config, spec)
    return [
        *_check_loss(config, spec, given),
        *_check_kl(section, spec, given),
        *_check_estimator(spec, given),
        *_check_correction(spec, given),
    ]


def _check_samples(config: PpoConfig, spec: AlgorithmSpec) -> None:
    row, num_samples = spec.row, config.rollout.n_samples_per_prompt
    if row.uses_group and num_samples < 2:
        alone = " or ".join(other.name for other in ALGORITHMS.values() if not other.uses_group)
        message = (
            f"--n_samples_per_prompt is {num_samples}: {row.title} ({row.name}) compares the samples of one prompt"
        )
        hint = f"use --n_samples_per_prompt 4 or more, or --advantage_estimator {alone}"
        raise ConfigError(with_hint(message, hint))


def _check_loss(config: PpoConfig, spec: AlgorithmSpec, given: Collection[str]) -> list[str]:
    num_rollouts = config.rollout.rollout_batch_size * config.rollout.n_samples_per_prompt
    size, epochs = config.training.train_batch_size, config.training.max_epochs
    num_updates = num_rollouts / size * epochs
    steps = (
        f"a step has {num_updates:g} optimizer steps ({num_rollouts} samples / --train_batch_size {size} x --max_epochs"
        f" {epochs})"
    )
    if spec.old_logprobs == "skip":
        if num_updates != 1:
            hint = f"use --train_batch_size {num_rollouts} --max_epochs 1, or --old_logprobs recompute"
            raise ConfigError(with_hint(f"--old_logprobs skip is for one optimizer step a step, and {steps}", hint))
        return without_effect((*CLIP_OPTIONS, "dual_clip"), given, "with --old_logprobs skip the policy ratio is 1")
    if spec.loss.uses_ratio:
        if spec.policy_loss != "gspo" or config.algorithm.clip_spellings:
            return []
        return [
            f"--policy_loss_type gspo clips the ratio to 1 - {spec.clip_low:g} and 1 + {spec.clip_high:g}, as its paper"
        ]
    notices = without_effect(CLIP_OPTIONS, given, f"--policy_loss_type {spec.policy_loss} has no ratio to clip")
    if num_updates > 1:
        notices.append(
            f"--policy_loss_type {spec.policy_loss} has no ratio to the policy that wrote the samples, and {steps}:"
            " those after the first are off-policy"
        )
    return notices


def _check_kl(section: AlgorithmSection, spec: AlgorithmSpec, given: Collection[str]) -> list[str]:
    notices = []
    if section.kl_unbiased_gradient and not section.use_kl_loss:
        message = "--kl_unbiased_gradient is about the gradient of the KL loss, and --use_kl_loss is off"
        raise ConfigError(with_hint(message, "add --use_kl_loss, or drop --kl_unbiased_gradient"))
    if not spec.uses_reference:
        for name, wanted in (("use_kl_loss", section.use_kl_loss), ("kl_target", section.kl_target is not None)):
            if wanted:
                message = f"--{name} with --init_kl_coef 0: there is no KL"
                raise ConfigError(with_hint(message, "set --init_kl_coef above 0, or drop it"))
        notices += without_effect(_REFERENCE_OPTIONS, given, "--init_kl_coef is 0, so there is no reference model")
    if spec.kl_target is None:
        notices += without_effect(["kl_horizon"], given, "there is no --kl_target")
    if spec.use_kl_loss and spec.kl_estimator == "k1" and not spec.kl_unbiased_gradient:
        notices.append(
            "--use_kl_loss with --kl_estimator k1: the gradient of k1 averages to 0, so that the term holds nothing"
            " back; k2 and k3 do"
        )
    return notices


def _check_estimator(spec: AlgorithmSpec, given: Collection[str]) -> list[str]:
    row, notices = spec.row, []
    if not row.uses_critic:
        notices += without_effect(_CRITIC_OPTIONS, given, f"{row.title} ({row.name}) has no critic")
    if not row.divides_by_std:
        why = f"{row.title} ({row.name}) divides by no standard deviation"
        notices += without_effect(("no_advantage_std_norm",), given, why)
    return notices


def _check_correction(spec: AlgorithmSpec, given: Collection[str]) -> list[str]:
    if spec.correction.level != "off":
        return []
    options = ("is_correction_mode", "is_correction_threshold")
    return without_effect(options, given, "--is_correction_level is off")
