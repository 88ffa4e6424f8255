"""Checks of everything that a `ppo` run reads, quick ones first."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path

from rlhf_cli.config.paths import model_path, user_path
from rlhf_cli.config.ppo import PpoConfig
from rlhf_cli.preflight.data import check_best_metric, check_taught, data_notices, load_all, open_prompts
from rlhf_cli.preflight.models import (
    check_adapters,
    check_context,
    check_draft_model,
    check_engine,
    check_entropy_target,
    check_teachers,
    check_trained,
    choose_critic,
    load_model_files,
    longest_sequence,
    masked_ids,
)
from rlhf_cli.preflight.resume import keep_clock
from rlhf_cli.preflight.rewards import (
    check_reward_models,
    judges_steps,
    named_agent,
    named_sources,
    try_agent,
    try_rewards,
)
from rlhf_data.errors import ConfigError
from rlhf_data.images.reader import PartsTokenizer, load_image_reader
from rlhf_data.keys import unread_tools
from rlhf_data.pretrained import set_chat_template
from rlhf_data.prompts import PromptSet
from rlhf_data.rows.row import Counts
from rlhf_rollout.host import collection_paused
from rlhf_rollout.rewards.sources import RewardSource, model_paths
from rlhf_train.algorithms.own_code import OwnCode
from rlhf_train.generation.recorded import Recording, find_recording


def check_own_losses(own_code: Iterable[OwnCode], folder: Path) -> None:
    """Raise ConfigError for functions of the user's own that `rlhf check` finds faults in, or that are not those of the
    run that continues in `folder`."""
    for code in own_code:
        from rlhf_train.losses.own_check import check_own_code  # imports torch

        if findings := check_own_code(code):
            more = f" (and {len(findings) - 1} more, which `rlhf check {code.path}` shows)" if findings[1:] else ""
            message, _, hint = str(findings[0]).partition("\n\nhint: ")
            raise ConfigError(message + more, hint=hint)
        code.check_recorded(folder)


@dataclass(frozen=True, slots=True)
class Inputs:
    """The checked inputs of a `ppo` run.

    Attributes:
        model, critic: folders or hub names.
        reward_sources: the sources of rewards, with absolute paths.
        prompts, eval_prompts: tokenized prompts; `eval_prompts` may be None.
        notices: what the user should know about the inputs, one sentence each.
        process_models: those of the reward models that judge steps.
        agent: the agent, with an absolute path; None for single turns.
        recording: the rollouts to train on; None for a run that generates its own. With it there are no prompts.
        masked_ids: ids without a token, by the folder or hub name of the policy and of the teachers.
        template_clock: the time that the chat template writes; None for a template that writes none.
    """

    model: str
    critic: str
    reward_sources: tuple[RewardSource, ...]
    prompts: PromptSet
    eval_prompts: PromptSet | None
    notices: tuple[str, ...]
    process_models: tuple[str, ...] = ()
    agent: str | None = None
    recording: Recording | None = None
    masked_ids: Mapping[str, tuple[range, ...]] = field(default_factory=dict)
    template_clock: datetime | None = None


@collection_paused()
def check_inputs(config: PpoConfig, folder: Path) -> Inputs:
    """Check everything that a `ppo` run reads. See `check_run_folders` for what it writes to `folder`.

    Raises:
        ConfigError: a model, tokenizer, length or reward that does not work.
        DataError: data that cannot be used.
    """
    check_own_losses(config.own_code, folder)
    if config.rollout.replay is not None:
        return _check_replay(config)
    from rlhf_models.loading import check_tokenizer_fits  # imports torch

    assert config.model.pretrain and config.data.prompt_data
    # From quick to slow: paths and keys, model files, tokenizing all prompts, and calls of rewards, which may take as
    # long as --reward_timeout_s.
    rows, held_out_rows = open_prompts(config)
    sources = named_sources(config)
    agent = named_agent(config)
    model = model_path(config.model.pretrain)
    model_config, tokenizer = load_model_files(model, images=bool(config.images))
    set_chat_template(tokenizer, variables=config.data.chat_template_kwargs)
    clock = keep_clock(tokenizer, config.checkpoint, folder)
    check_trained(config.model, model_config, model)
    check_engine(model_config, images=bool(config.images))
    drafts = check_draft_model(config, model_config, tokenizer)
    check_context(model_config, *longest_sequence(config))
    adapter_notices = check_adapters(config.model, model_config)
    process_models = tuple(filter(judges_steps, model_paths(sources)))
    reader = load_image_reader(model, model_config, tokenizer) if config.images else None
    reward_notices = check_reward_models(config, sources, process_models, tokenizer, reader)
    critic, notices = choose_critic(config, model, model_paths(sources), tokenizer, reader)
    check_entropy_target(config.algorithm.entropy_target, tokenizer)
    teachers = check_teachers(config, tokenizer, reader)
    masked, mask_notices = masked_ids((model, *teachers, *drafts), tokenizer, reader)
    num_ids = check_tokenizer_fits(model_config, tokenizer)
    prompts, held_out = load_all(config, rows, held_out_rows, tokenizer, num_ids, reader)
    check_taught(config, {prompt.source for prompt in prompts})
    check_best_metric(config, held_out or (), logs_numbers=any(source.kind != "model" for source in sources))
    notices = [*adapter_notices, *notices, *reward_notices, *mask_notices]
    notices += unread_tools((rows, *held_out_rows.values()), config.data)
    notices += data_notices(config, prompts, held_out)
    notices += try_rewards(config, sources, prompts.prompts)
    if agent is not None:
        notices += try_agent(config, agent, PartsTokenizer(tokenizer, reader) if reader else tokenizer)
    return Inputs(
        model=model,
        critic=critic,
        reward_sources=sources,
        prompts=prompts,
        eval_prompts=held_out,
        notices=tuple(notices),
        process_models=process_models,
        agent=agent,
        masked_ids=masked,
        template_clock=clock,
    )


def _check_replay(config: PpoConfig) -> Inputs:
    """Check what a run on recorded rollouts reads: the models, and the record. Raises like `check_inputs`."""
    assert config.model.pretrain and config.rollout.replay
    recording = find_recording(user_path(config.rollout.replay))
    notices = [f"training on {recording.num_steps} recorded steps: {recording.path}"]
    notices += [recording.notice] if recording.notice else []
    sources = config.reward.sources()
    model = model_path(config.model.pretrain)
    model_config, tokenizer = load_model_files(model, images=bool(config.images))
    check_trained(config.model, model_config, model)
    notices += check_adapters(config.model, model_config)
    reader = load_image_reader(model, model_config, tokenizer) if config.images else None
    scorers = [model_path(path) for path in model_paths(sources)]
    critic, more = choose_critic(config, model, scorers, tokenizer, reader)
    check_entropy_target(config.algorithm.entropy_target, tokenizer)
    teachers = check_teachers(config, tokenizer, reader)
    masked, mask_notices = masked_ids((model, *teachers), tokenizer, reader)
    check_taught(config, recording.sources)
    notices += [*more, *mask_notices]
    return Inputs(
        model=model,
        critic=critic,
        reward_sources=sources,
        prompts=PromptSet((), Counts()),
        eval_prompts=None,
        notices=tuple(notices),
        recording=recording,
        masked_ids=masked,
    )
