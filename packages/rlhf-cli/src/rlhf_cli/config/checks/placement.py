"""Who shares devices, and what a machine without GPUs makes of it."""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING

from rlhf_cli.config.checks.messages import without_effect
from rlhf_data.errors import ConfigError, with_hint
from rlhf_train.algorithms import ALGORITHMS

if TYPE_CHECKING:
    from rlhf_cli.config.ppo import PpoConfig

_GPU_OPTIONS = (
    "vllm_gpu_memory_utilization",
    "enforce_eager",
    "vllm_enable_sleep",
    "deepspeed_enable_sleep",
    "colocate_all_models",
    "colocate_actor_ref",
    "colocate_critic_reward",
)
_RANK_OPTIONS = ("critic_num_nodes", "critic_num_gpus_per_node", "ref_num_nodes", "ref_num_gpus_per_node")


def check_placement(config: PpoConfig, given: Collection[str]) -> list[str]:
    """Check who shares devices with whom, and that every model there is has a place; return notices."""
    placement, engine = config.placement, config.engine
    _check_places(config)
    for name, wanted in (
        ("vllm_enable_sleep", engine.vllm_enable_sleep),
        ("deepspeed_enable_sleep", placement.deepspeed_enable_sleep),
    ):
        if wanted and not placement.colocate_all_models:
            message = f"--{name} is for models and engines that share GPUs, and --colocate_all_models is off"
            raise ConfigError(with_hint(message, f"add --colocate_all_models, or drop --{name}"))
    if placement.colocate_all_models:
        why = "--colocate_all_models includes it"
        return without_effect(("colocate_actor_ref", "colocate_critic_reward"), given, why)
    if config.reward.reward_pretrain is None:
        return []  # said where reward models are checked
    row = ALGORITHMS[config.algorithm.advantage_estimator]
    why = f"{row.title} ({row.name}) has no critic"
    return [] if row.uses_critic else without_effect(["colocate_critic_reward"], given, why)


def on_cpu(given: Collection[str]) -> list[str]:
    """Return notices for options that concern GPUs only."""
    return [
        *without_effect(_GPU_OPTIONS, given, "there is no GPU, everything shares the CPU"),
        *without_effect(_RANK_OPTIONS, given, "without GPUs every model runs in the policy's processes"),
    ]


def with_places(config: PpoConfig, given: Collection[str]) -> set[str]:
    """Return `given` without the places of which there are 0: they say that a model is not there."""
    return {name for name in given if getattr(config.placement, name, None) != 0}


def _check_places(config: PpoConfig) -> None:
    """Raise ConfigError for a model without processes; 0 is for one that is not there."""
    algorithm, placement = config.algorithm, config.placement
    row = ALGORITHMS[algorithm.advantage_estimator]
    for role, needed, why in (
        ("critic", row.uses_critic, f"{row.title} ({row.name}) has a critic"),
        ("ref", algorithm.init_kl_coef > 0, f"--init_kl_coef {algorithm.init_kl_coef:g} needs the reference model"),
        ("reward", config.reward.reward_pretrain is not None, "--reward_pretrain names reward models"),
    ):
        for name in (f"{role}_num_nodes", f"{role}_num_gpus_per_node"):
            if needed and getattr(placement, name) == 0:
                raise ConfigError(with_hint(f"--{name} is 0, and {why}", f"use --{name} 1 or more"))
