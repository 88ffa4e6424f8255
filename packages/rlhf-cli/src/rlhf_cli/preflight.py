"""What is looked at before anything starts: files, keys, tokenizer, lengths, reward. No weights are loaded."""

import os
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlhf_cli.config.model import ModelSection
from rlhf_cli.config.ppo import PpoConfig
from rlhf_cli.paths import check_output_folder, data_path, model_path, reward_path
from rlhf_data.errors import ConfigError, RewardError, unknown, with_hint
from rlhf_data.prompts import PromptSet
from rlhf_data.sources import read_rows
from rlhf_rollout.rewards import RewardSource
from rlhf_train.placement import Resources, local_resources


@dataclass(frozen=True, slots=True)
class Inputs:
    """What a `ppo` run reads, checked.

    Attributes:
        model, critic: folders or hub names; the critic's is the model's unless told otherwise.
        reward_sources: who scores; files with their full paths.
        prompts, eval_prompts: tokenized; the latter may be empty.
        notices: what a person should know about them, a sentence each.
    """

    model: str
    critic: str
    reward_sources: tuple[RewardSource, ...]
    prompts: PromptSet
    eval_prompts: PromptSet | None
    notices: tuple[str, ...]


def check_inputs(config: PpoConfig, folder: Path) -> Inputs:
    """Check everything a `ppo` run reads, what is quick to check first.

    Raises:
        ConfigError: a model, tokenizer, length, folder or reward function that does not work.
        DataError: a data file that does not work.
    """
    from rlhf_rollout.rewards import check_reward_function, parse_reward

    assert config.model.pretrain and config.data.prompt_data and config.reward.remote_rm_url
    check_output_folder(folder)
    _check_first_rows(config)
    reward = reward_path(config.reward.remote_rm_url)
    parse_reward(reward)
    model = model_path(config.model.pretrain)
    model_config, tokenizer = load_model_files(model)
    check_attention(config.model, model_config)
    critic = model_path(config.model.critic_pretrain) if config.model.critic_pretrain else model
    if critic != model:
        check_critic(config.model, critic, tokenizer)
    lengths = f"--prompt_max_len {config.data.prompt_max_len} + --generate_max_len {config.rollout.generate_max_len}"
    check_context(model_config, config.data.prompt_max_len + config.rollout.generate_max_len, lengths)
    prompts = _load_prompts(config, config.data.prompt_data, tokenizer, held_out=False)
    held_out = None
    if config.data.eval_data is not None:
        held_out = _load_prompts(config, config.data.eval_data, tokenizer, held_out=True)
    notices = [*_length_notices(prompts, held_out), *_overlap_notices(prompts, held_out)]
    notices += _count_notices(config, prompts)
    try:
        check = check_reward_function(reward, prompts.prompts[:4], timeout_s=config.reward.reward_timeout_s)
    except RewardError as error:
        raise ConfigError(str(error)) from error
    if check.problem:
        notices.append(f"the reward function failed on the first prompts, and the run goes on: {check.problem}")
    sources = (RewardSource(kind="function", targets=(reward,)),)
    return Inputs(model, critic, sources, prompts, held_out, tuple(notices))


def load_model_files(path: str) -> tuple[Any, Any]:
    """Return the config and the tokenizer of a model folder or hub name. Raises ConfigError when they do not fit."""
    from rlhf_models.loading import check_tokenizer_fits, check_weights, load_config, load_tokenizer

    config, tokenizer = load_config(path), load_tokenizer(path)
    check_tokenizer_fits(config, tokenizer)
    check_weights(path)
    return config, tokenizer


def check_attention(section: ModelSection, model_config: Any) -> None:
    """Raise ConfigError unless the model can be run with the attention and the packing asked for."""
    from rlhf_models.attention import choose_attention

    name = section.attn_implementation
    if name not in ("auto", "eager") and "/" not in name:  # a name with a slash is a kernel on the hub
        from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

        known = {"auto", "eager", *ALL_ATTENTION_FUNCTIONS.valid_keys()}
        if name not in known:
            raise ConfigError(f"--attn_implementation: {unknown('value', name, known)}")
    choose_attention(model_config, name, packing=section.packing_samples)


def check_critic(section: ModelSection, critic: str, tokenizer: Any) -> None:
    """Raise ConfigError unless the critic's model can be run and can read the policy's tokens."""
    from rlhf_models.loading import check_tokenizer_fits, check_weights, load_config

    try:
        model_config = load_config(critic)
        check_tokenizer_fits(model_config, tokenizer)
        check_weights(critic)
        check_attention(section, model_config)
    except ConfigError as error:
        raise ConfigError(f"--critic_pretrain: {error}") from None


def check_context(model_config: Any, num_tokens: int, flags: str) -> None:
    """Raise ConfigError unless the model can look back over `num_tokens`, which `flags` ask for."""
    context = getattr(model_config.get_text_config(), "max_position_embeddings", None)
    if context is not None and num_tokens > context:
        message = f"{flags} is {num_tokens} tokens, and the model has a context of {context}"
        raise ConfigError(with_hint(message, f"lower them to {context} tokens in all"))


def find_resources() -> tuple[Resources, str | None]:
    """Return what there is to run on, and the address of the Ray cluster that RAY_ADDRESS names, if it does."""
    address = os.environ.get("RAY_ADDRESS") or None
    if address is None:
        return local_resources(), None
    import ray

    if not ray.is_initialized():
        try:
            ray.init(address=address, logging_level="ERROR", log_to_driver=False)
        except (ConnectionError, ValueError, RuntimeError) as error:
            hint = "start one with `ray start --head`, set up its token here if it has one, or unset RAY_ADDRESS"
            raise ConfigError(with_hint(f"no Ray cluster answers at RAY_ADDRESS {address}: {error}", hint)) from None
    total = ray.cluster_resources()
    return Resources(num_cpus=int(total.get("CPU", 0)), num_gpus=int(total.get("GPU", 0))), address


def check_device(config: PpoConfig, given: Collection[str], num_gpus: int) -> list[str]:
    """Return notices for options that a machine without GPUs does not heed. Raises ConfigError for one it cannot."""
    from rlhf_cli.config.checks import on_cpu

    if num_gpus:
        return []
    if config.engine.vllm_tensor_parallel_size > 1:
        message = f"--vllm_tensor_parallel_size is {config.engine.vllm_tensor_parallel_size} and there is no GPU"
        raise ConfigError(with_hint(message, "use --vllm_num_engines for more engines"))
    return on_cpu(given)


def _check_first_rows(config: PpoConfig) -> None:
    data = config.data
    for text, held_out in ((data.prompt_data, False), (data.eval_data, True)):
        if text is None:
            continue
        row = read_rows(data_path(text, held_out=held_out), max_rows=1)[0]
        row.cell(data.input_key)
        if data.label_key is not None:
            row.cell(data.label_key)


def _load_prompts(config: PpoConfig, text: str, tokenizer: Any, *, held_out: bool) -> PromptSet:
    from rlhf_data.prompts import load_prompts

    data = config.data
    return load_prompts(
        data_path(text, held_out=held_out),
        tokenizer,
        input_key=data.input_key,
        label_key=data.label_key,
        apply_chat_template=data.apply_chat_template,
        input_template=data.input_template,
        prompt_max_len=data.prompt_max_len,
        max_samples=data.max_samples,
        source="held_out" if held_out else "train",
    )


def _length_notices(*sets: PromptSet | None) -> list[str]:
    return [
        f"{prompts.num_too_long} of {prompts.num_rows} prompts are longer than --prompt_max_len and left out; the"
        f" longest has {prompts.longest_tokens} tokens"
        for prompts in sets
        if prompts is not None and prompts.num_too_long
    ]


def _count_notices(config: PpoConfig, prompts: PromptSet) -> list[str]:
    size = config.rollout.rollout_batch_size
    if size <= len(prompts):
        return []
    times = size / len(prompts)
    return [
        f"--rollout_batch_size {size} is more than the {len(prompts)} prompts: each is asked {times:.1f} times a step"
    ]


def _overlap_notices(prompts: PromptSet, held_out: Sequence[Any] | None) -> list[str]:
    trained = {prompt.text for prompt in prompts}
    shared = sum(prompt.text in trained for prompt in held_out or ())
    if not shared:
        return []
    return [f"{shared} of {len(held_out or ())} held-out prompts are training prompts, too"]
