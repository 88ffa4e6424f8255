"""Estimator, losses, KL and corrections."""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING

from rlhf_cli.config.algorithm import CLIP_OPTIONS, AlgorithmSection
from rlhf_cli.config.checks.messages import without_effect
from rlhf_data.errors import ConfigError, with_hint
from rlhf_train.algorithms import AlgorithmSpec

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
_WIDE_FOR_GSPO = 0.1
_UNSET = (None, None, None)
_REFERENCE_OPTIONS = ("kl_estimator", "ref_num_nodes", "ref_num_gpus_per_node", "colocate_actor_ref")


def check_algorithm(config: PpoConfig, given: Collection[str]) -> list[str]:
    """Check the algorithm; return notices."""
    section = config.algorithm
    if len(section.clip_spellings) > 1:
        names = " and ".join(f"--{name}" for name in section.clip_spellings)
        raise ConfigError(with_hint(f"{names} set the same clip range", "give one of them"))
    spec = section.spec()
    return [
        *_check_loss(config, spec, given),
        *_check_kl(section, spec, given),
        *_check_estimator(spec, given),
        *_check_correction(spec, given),
    ]


def _check_loss(config: PpoConfig, spec: AlgorithmSpec, given: Collection[str]) -> list[str]:
    if spec.old_logprobs == "skip":
        return without_effect((*CLIP_OPTIONS, "dual_clip"), given, "with --old_logprobs skip the policy ratio is 1")
    if spec.loss.uses_ratio:
        return _check_clip(config.algorithm, spec)
    notices = without_effect(CLIP_OPTIONS, given, f"--policy_loss_type {spec.policy_loss} has no ratio to clip")
    num_samples = config.rollout.rollout_batch_size * config.rollout.n_samples_per_prompt
    num_updates = num_samples // config.training.train_batch_size * config.training.max_epochs
    if num_updates > 1:
        notices.append(
            f"--policy_loss_type {spec.policy_loss} has no ratio to the policy that wrote the samples: of the"
            f" {num_updates} optimizer steps a step, those after the first are off-policy"
        )
    return notices


def _check_clip(section: AlgorithmSection, spec: AlgorithmSpec) -> list[str]:
    loss, bounds = f"--policy_loss_type {spec.policy_loss}", f"1 - {spec.clip_low:g} and 1 + {spec.clip_high:g}"
    if spec.policy_loss == "gspo" and not section.clip_spellings:
        return [f"{loss} clips the ratio to {bounds}, as its paper"]
    if spec.policy_loss == "gspo" and max(spec.clip_low, spec.clip_high) > _WIDE_FOR_GSPO:
        return [f"{loss}: the mean ratio of a response hardly reaches {bounds}; its paper has 3e-4 and 4e-4"]
    if spec.policy_loss == "cispo" and (section.eps_clip, section.eps_clip_low_high, section.clip_eps_high) == _UNSET:
        return [f"{loss}: --clip_eps_high is {spec.clip_high:g}; its paper tunes it and gives no number"]
    return []


def _check_kl(section: AlgorithmSection, spec: AlgorithmSpec, given: Collection[str]) -> list[str]:
    notices = []
    if section.kl_unbiased_gradient and not section.use_kl_loss:
        message = "--kl_unbiased_gradient is about the gradient of the KL loss, and --use_kl_loss is off"
        raise ConfigError(with_hint(message, "add --use_kl_loss, or drop --kl_unbiased_gradient"))
    if not spec.uses_reference:
        if section.kl_target is not None:
            message = "--kl_target with --init_kl_coef 0: there is no KL"
            raise ConfigError(with_hint(message, "set --init_kl_coef above 0, or drop --kl_target"))
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
