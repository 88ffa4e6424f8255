"""Who scores, and which groups are trained."""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING

from rlhf_cli.config.checks.messages import check_range, missing, without_effect
from rlhf_data.errors import ConfigError, with_hint

if TYPE_CHECKING:
    from rlhf_cli.config.ppo import PpoConfig
    from rlhf_cli.config.reward import RewardSection
    from rlhf_cli.config.rollout import RolloutSection

_MODEL_OPTIONS = ("reward_num_nodes", "reward_num_gpus_per_node", "colocate_critic_reward")
_FILTER_OPTIONS = ("dynamic_filtering_reward_range", "dynamic_filtering_max_batches")


def check_reward(config: PpoConfig, given: Collection[str]) -> list[str]:
    """Check the sources of rewards and what is made of their rewards; return notices."""
    section = config.reward
    sources = section.sources()
    if not sources:
        hint = (
            "add --remote_rm_url FILE.py, which defines reward_func(queries, prompts, labels), or a reward server's"
            " http:// address, or --reward_pretrain MODEL"
        )
        raise missing("remote_rm_url", "nothing says how responses are scored", hint)
    check_range("reward_clip_range", section.reward_clip_range)
    kinds = {source.kind for source in sources}
    notices = []
    for kind_options, needed, why in (
        (("reward_timeout_s",), {"function", "server"}, "no reward function or server scores"),
        (("reward_num_workers",), {"function"}, "no reward function scores"),
        (("reward_batch_size",), {"server", "model"}, "no reward server or model scores"),
    ):
        if not kinds & needed:
            notices += without_effect(kind_options, given, why)
    if "model" not in kinds:
        there = [name for name in _MODEL_OPTIONS if getattr(config.placement, name)]  # 0 says that there is none
        notices += without_effect(there, given, "there is no --reward_pretrain")
    return notices + _check_length(section, config.rollout, given)


def check_filtering(rollout: RolloutSection, given: Collection[str]) -> list[str]:
    """Check which groups of responses are trained; return notices."""
    if not rollout.dynamic_filtering:
        return without_effect(_FILTER_OPTIONS, given, "--dynamic_filtering is off")
    check_range("dynamic_filtering_reward_range", rollout.dynamic_filtering_reward_range)
    if rollout.n_samples_per_prompt < 2:
        message = (
            f"--dynamic_filtering keeps prompts whose responses differ in score, and --n_samples_per_prompt is"
            f" {rollout.n_samples_per_prompt}"
        )
        raise ConfigError(with_hint(message, "use --n_samples_per_prompt 4 or more, or drop --dynamic_filtering"))
    return []


def _check_length(section: RewardSection, rollout: RolloutSection, given: Collection[str]) -> list[str]:
    notices, limit = [], rollout.generate_max_len
    if section.overlong_buffer_len == 0:
        notices += without_effect(["overlong_penalty_factor"], given, "there is no --overlong_buffer_len")
    elif not 1 <= section.overlong_buffer(limit) <= limit:
        message = (
            f"--overlong_buffer_len {section.overlong_buffer_len:g} is {section.overlong_buffer(limit)} of the {limit}"
            " tokens of --generate_max_len"
        )
        raise ConfigError(with_hint(message, f"give 1 to {limit} tokens, or a share below 1 that is a token at least"))
    if section.stop_properly_penalty_coef == 1:
        notices += without_effect(["stop_properly_penalty_coef"], given, "at 1 a response keeps all of its reward")
    return notices
