"""Checks of rewards and agents before a run: each is called or imported once, and reward models' files are read."""

from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any

from rlhf_cli.config.paths import agent_path, model_path, reward_path, user_path
from rlhf_cli.config.ppo import PpoConfig
from rlhf_cli.preflight.models import check_attention, check_context, longest_sequence, naming
from rlhf_data.errors import ConfigError, DataError, RewardError
from rlhf_data.records import Prompt
from rlhf_rollout.agents import check_agent
from rlhf_rollout.agents.conversation import rewritten_parts
from rlhf_rollout.agents.tools.tool_calls import make_parser
from rlhf_rollout.agents.user_agent import parse_agent
from rlhf_rollout.rewards.mix import check_reward
from rlhf_rollout.rewards.rubric import load_rubric
from rlhf_rollout.rewards.sources import JUDGE_KINDS, RewardSource, model_paths
from rlhf_rollout.rewards.user_function import parse_reward


def named_sources(config: PpoConfig) -> tuple[RewardSource, ...]:
    """Return the sources of rewards with absolute paths. Raises ConfigError for a file, function or URL that is not
    valid."""
    sources = []
    for source in config.reward.sources():
        if source.kind == "function":
            target = reward_path(source.targets[0])
            parse_reward(target)
            source = replace(source, targets=(target,))
        elif source.kind == "server":
            from rlhf_rollout.http.tokens import check_url

            for url in source.targets:
                check_url(url)
        elif source.kind in JUDGE_KINDS:
            source = replace(source, targets=(str(user_path(source.targets[0])),))
            load_rubric(source.targets[0])
        elif source.kind == "model":
            source = replace(source, targets=(model_path(source.targets[0]),))
        sources.append(source)
    return tuple(sources)


def named_agent(config: PpoConfig) -> str | None:
    """Return the agent with an absolute path; None without one. Raises ConfigError for one that is not valid."""
    if config.agent.agent_func_path is None:
        return None
    agent = agent_path(config.agent.agent_func_path)
    parse_agent(agent)
    return agent


def try_agent(config: PpoConfig, agent: str, tokenizer: Any) -> list[str]:
    """Import the agent once; return a notice if the chat template rewrites conversations.

    Raises ConfigError when the import fails, or if nobody knows --agent_tool_parser.
    """
    try:
        make_parser(config.agent.agent_tool_parser, tokenizer)
        check_agent(config.agent.spec(agent, longest_sequence(config)[0], config.reward.calls(), config.data))
    except RewardError as error:
        raise ConfigError(str(error)) from error
    try:
        parts = " and ".join(rewritten_parts(tokenizer))
    except DataError:  # the template takes a single question only, and some agents ask no more
        return []
    follows = {
        "append": "agents keep what the policy wrote; --agent_history split would begin another rollout there",
        "split": "with --agent_history split, conversations over HTTP begin another rollout there",
    }
    return [f"the chat template rewrites earlier {parts}: {follows[config.agent.agent_history]}"] if parts else []


def judges_steps(path: str) -> bool:
    """Return whether a reward model judges steps. Raises ConfigError if it cannot be read."""
    from rlhf_models.loading import load_config
    from rlhf_models.process_reward import stored_step_format

    with naming("reward_pretrain"):
        return stored_step_format(load_config(path)) is not None


def check_reward_models(
    config: PpoConfig,
    sources: Sequence[RewardSource],
    process_models: Collection[str],
    tokenizer: Any,
    reader: Any = None,
) -> list[str]:
    """Return notices about reward models, of which the `process_models` judge steps.

    Raises ConfigError for one that neither has a score head nor judges steps, without the policy's tokenizer, or that
    does not read images as `reader` does, if there is one.
    """
    from rlhf_models.loading import (
        check_reward_model,
        check_same_tokenizer,
        check_tokenizer_fits,
        check_weights,
        load_config,
    )
    from rlhf_models.reward import stored_moments

    rival = "--running_reward_norm" if config.reward.running_reward_norm else "--reward_normalize each"
    if process_models and (config.reward.running_reward_norm or config.reward.reward_normalize == "each"):
        message = f"{rival} normalizes rewards of whole responses, and {min(process_models)} judges steps"
        raise ConfigError(message, hint="drop it; --advantage_estimator group_norm compares the steps of a group")
    if process_models and reader is not None:
        message = f"--image_key needs rewards of whole responses, and {min(process_models)} judges steps"
        raise ConfigError(message, hint="use a model that `rlhf rm` trained with --image_key")
    notices = []
    if config.reward.step_end != "\n" and not process_models:
        notices.append("--step_separator has no effect: no model of --reward_pretrain judges steps")
    if config.reward.reward_sharding == "on":
        if config.placement.num_ranks("reward") == 1:
            notices.append("--reward_sharding has no effect: reward models have one process each")
        elif reader is not None:
            notices.append("--reward_sharding has no effect: reward models that read images are not divided")
        notices += [f"--reward_sharding has no effect on {path}: it judges steps" for path in process_models]
    for path in model_paths(sources):
        with naming("reward_pretrain"):
            (check_weights if path in process_models else check_reward_model)(path)
            model_config = load_config(path)
            check_same_tokenizer(path, tokenizer)
            check_tokenizer_fits(model_config, tokenizer)
            if reader is not None:
                reader.check_same(path, model_config)
            # A reward model scores whole padded batches in one process: what is packed or divided does not concern it,
            # and its attention is always "auto".
            alone = {"packing_samples": False, "share_prompts": False, "attn_implementation": "auto"}
            alone |= {"sequence_parallel_size": 1, "ds_tensor_parallel_size": 1, "expert_parallel_size": 1}
            check_attention(config.model.model_copy(update=alone), model_config)
            check_context(model_config, *longest_sequence(config))
            if config.reward.normalize_reward and stored_moments(model_config) is None:
                notices.append(
                    f"--normalize_reward has no effect on {path}: no mean and standard deviation are stored with it;"
                    " --running_reward_norm uses those of the run"
                )
    return notices


def try_rewards(config: PpoConfig, sources: Sequence[RewardSource], prompts: Sequence[Prompt]) -> list[str]:
    """Call every reward function and server once.

    Returns:
        A notice for each one that failed, which may still work for other prompts.

    Raises:
        ConfigError: a function or server that cannot work at all.
    """
    notices = []
    rollout = config.rollout
    calls = config.reward.calls(rollout.rollout_batch_size, rollout.n_samples_per_prompt)
    for source in sources:
        try:
            problem = check_reward(source, prompts, calls)
        except RewardError as error:
            raise ConfigError(str(error)) from error
        if problem:
            name = f" {source.name}" if len(sources) > 1 else ""
            notices.append(
                f"the reward {source.kind}{name} failed on the first prompts, and the run goes on: {problem}"
            )
    return notices
