"""The checks of `ppo`, in the order in which a person would want to hear of them."""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING

from rlhf_cli.config.checks.algorithm import check_algorithm
from rlhf_cli.config.checks.evaluation import check_evaluation
from rlhf_cli.config.checks.messages import missing, once
from rlhf_cli.config.checks.placement import check_placement, with_places
from rlhf_cli.config.checks.reward import check_filtering, check_reward
from rlhf_cli.config.checks.training import check_batches, check_betas, check_schedule, check_training
from rlhf_data.errors import ConfigError, with_hint

if TYPE_CHECKING:
    from rlhf_cli.config.ppo import PpoConfig


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
    given = with_places(config, given)
    notices = check_reward(config, given)
    notices += check_algorithm(config, given)
    check_batches(config)
    check_betas(config.training)
    notices += check_schedule(config.training, given)
    notices += check_training(config, given)
    notices += check_filtering(config, given)
    notices += check_evaluation(config, given)
    notices += _check_sampling(config, given)
    return once([*notices, *check_placement(config, given)])


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
