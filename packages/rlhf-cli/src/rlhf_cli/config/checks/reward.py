"""Who scores, and which groups are trained."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

from rlhf_cli.config.checks.messages import check_range, missing, without_effect
from rlhf_data.errors import ConfigError, with_hint
from rlhf_train.algorithms import ALGORITHMS

if TYPE_CHECKING:
    from rlhf_cli.config.ppo import PpoConfig
    from rlhf_cli.config.reward import RewardSection
    from rlhf_cli.config.rollout import RolloutSection
    from rlhf_rollout.rewards.sources import RewardSource

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
        notices += without_effect(_MODEL_OPTIONS, given, "there is no --reward_pretrain")
    notices += _check_meaning(config, sources, given)
    return notices + _check_length(section, config.rollout, given)


def _check_meaning(config: PpoConfig, sources: Sequence[RewardSource], given: Collection[str]) -> list[str]:
    """Return notices about what rewards stand for."""
    section, row, notices = config.reward, ALGORITHMS[config.algorithm.advantage_estimator], []
    if len(sources) > 1 or sources[0].kind == "model":
        which = f"the first of {len(sources)} rewards" if len(sources) > 1 else "the reward model"
        notices.append(f"accuracy and pass@k follow {which}, {sources[0].name}: a score above 0 counts as right")
    shapes = (section.reward_clip_range, section.overlong_buffer_len or None, section.stop_properly_penalty_coef)
    if row.baseline == "group_mean_std" and not config.algorithm.no_advantage_std_norm and shapes == (None,) * 3:
        why = f"{row.title} ({row.name}) shifts and scales the rewards of a group anyway, and nothing comes between"
        notices += without_effect(["normalize_reward"], given, why)
    return notices


def check_filtering(config: PpoConfig, given: Collection[str]) -> list[str]:
    """Check which groups of responses are trained; return notices."""
    rollout = config.rollout
    if not rollout.dynamic_filtering:
        return without_effect(_FILTER_OPTIONS, given, "--dynamic_filtering is off")
    check_range("dynamic_filtering_reward_range", rollout.dynamic_filtering_reward_range)
    if config.reward.reward_pretrain is None or rollout.dynamic_filtering_reward_range is not None:
        return []
    return [
        "--dynamic_filtering leaves out prompts whose responses score alike, which with a reward model they hardly ever"
        " do: --dynamic_filtering_reward_range LOW HIGH would leave out some"
    ]


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
