"""Checks of models before a run: config, tokenizer, weight files, attention, context. No weights are loaded."""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from rlhf_cli.config.model import ModelSection
from rlhf_cli.config.paths import model_path
from rlhf_cli.config.ppo import PpoConfig
from rlhf_data.errors import ConfigError, unknown
from rlhf_data.pretrained import ids_without_token, masked_ids_notice


@contextmanager
def naming(flag: str) -> Iterator[None]:
    """Have the ConfigErrors of a `with` block begin with the flag of the model that they are about."""
    try:
        yield
    except ConfigError as error:
        raise ConfigError(f"--{flag}: {error}") from None


def load_model_files(path: str, *, images: bool = False, packing: bool = False) -> tuple[Any, Any]:
    """Return config and tokenizer of a language model's folder or hub name.

    Raises ConfigError if it is another kind of model, if it reads no `images`, or none with `packing`, or if config and
    tokenizer do not fit together.
    """
    from rlhf_models.loading import check_generates, check_tokenizer_fits, check_weights, load_config, load_tokenizer

    config = load_config(path)
    check_generates(path, config, images=images, packing=packing)
    tokenizer = load_tokenizer(path)
    check_tokenizer_fits(config, tokenizer)
    check_weights(path)
    return config, tokenizer


def check_trained(section: ModelSection, model_config: Any, path: str, *, has_values: bool = False) -> None:
    """Raise ConfigError if the model of --pretrain cannot be trained as the options say, or could not be saved then.

    With `has_values` it is trained as a reward model.
    """
    check_attention(section, model_config)
    check_experts(section, model_config)
    check_files("pretrain", section, path, has_values=has_values)


def masked_ids(
    paths: Sequence[str], tokenizer: Any, reader: Any = None
) -> tuple[dict[str, tuple[range, ...]], list[str]]:
    """Return the ids of each model's vocabulary that the policy's tokenizer has no token for, by the model's folder or
    hub name, and a notice if the first model, the policy, has any.

    With a `reader` of images the token of an image is among them.
    """
    from rlhf_models.loading import load_config

    sizes = {path: load_config(path).get_text_config().vocab_size for path in paths}
    masked = {path: ids_without_token(tokenizer, size) for path, size in sizes.items()}
    policy = next(iter(sizes))
    notice = masked_ids_notice(masked[policy], sizes[policy])
    if reader is not None:
        masked = {path: reader.masked_ids(ids) for path, ids in masked.items()}
    return masked, [notice] if notice else []


def check_attention(section: ModelSection, model_config: Any) -> None:
    """Raise ConfigError unless the model works with --attn_implementation, --packing_samples, --share_prompts,
    --sequence_parallel_size, --ds_tensor_parallel_size and --expert_parallel_size."""
    from rlhf_models.attention.packed import check_shares_prompts, choose_attention, register_packed_attention

    name = section.attn_implementation
    if name not in ("auto", "eager") and "/" not in name:  # a name with a slash is a kernel on the hub
        from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

        register_packed_attention()
        known = {"auto", "eager", *ALL_ATTENTION_FUNCTIONS.valid_keys()}
        if name not in known:
            raise ConfigError(f"--attn_implementation: {unknown('value', name, known)}")
    chosen = choose_attention(model_config, name, packing=section.packing_samples)
    if getattr(section, "share_prompts", False):
        check_shares_prompts(model_config, chosen)
    if section.ds_tensor_parallel_size > 1:
        from rlhf_train.engine.tensor_parallel import check_divides

        check_divides(model_config, section.ds_tensor_parallel_size)
    if section.expert_parallel_size > 1:
        from rlhf_train.engine.expert_parallel import check_divides_experts

        check_divides_experts(model_config, section.expert_parallel_size)
    if section.sequence_parallel_size > 1:
        from rlhf_models.attention.packed import PACKED_ATTENTION, PACKED_ATTENTIONS
        from rlhf_models.attention.sequence_parallel import check_heads

        check_heads(model_config, section.sequence_parallel_size)
        if chosen not in PACKED_ATTENTIONS:
            message = f"--sequence_parallel_size works with the attention {PACKED_ATTENTION}, not with {chosen}"
            hint = "leave --attn_implementation at auto; no model with a soft cap or sinks in its attention has it"
            raise ConfigError(message, hint=hint)


def check_adapters(section: ModelSection, model_config: Any) -> list[str]:
    """Return a notice that says how much of the model --lora_rank trains. Raises ConfigError if it cannot."""
    if section.lora is None:
        return []
    from rlhf_models.lora import check_lora

    return [f"--lora_rank {section.lora_rank} trains {check_lora(model_config, section.lora):.2%} of the weights"]


def check_experts(section: ModelSection, model_config: Any) -> None:
    """Raise ConfigError for options of mixtures of experts and a model that they do not work with."""
    if section.aux_loss_coef:
        from rlhf_models.experts.routing import check_balances

        check_balances(model_config)
    if getattr(section, "routing_replay", False):
        from rlhf_models.experts.routing_replay import check_replays

        check_replays(model_config)


def check_engine(model_config: Any, *, images: bool = False) -> None:
    """Raise ConfigError if vLLM does not compute a model of this config, with `images`, as the trainer does."""
    from rlhf_rollout.engines.vllm.own_classes import check_images, model_classes

    model_classes(model_config.to_dict())
    if images:
        check_images(model_config.to_dict())


def check_draft_model(config: PpoConfig, model_config: Any, tokenizer: Any) -> list[str]:
    """Return the path of --vllm_draft_model if it is trained, else nothing.

    Raises ConfigError for --vllm_speculative mtp if the policy has no layers for it, and for a draft model that is not
    there, has another vocabulary than the policy, or is to be trained and cannot be.
    """
    from rlhf_rollout.engines.model_files import resolve_model_dir
    from rlhf_rollout.engines.vllm.speculation import check_own_layers, draft_model_dir

    if config.engine.vllm_speculative == "mtp":
        check_own_layers(resolve_model_dir(model_path(config.model.pretrain)))
    if config.engine.vllm_draft_model is None:
        return []
    path = model_path(config.engine.vllm_draft_model)
    with naming("vllm_draft_model"):
        draft_model_dir(path, model_config.get_text_config().to_dict(), tokenizer)
    if not config.trains_draft:
        return []
    num_tokens, flags = longest_sequence(config)
    draft_config = check_companion("vllm_draft_model", config.model, path, tokenizer)
    check_context(draft_config, num_tokens, f"--vllm_draft_model: {flags}")
    check_files("vllm_draft_model", config.model, path, has_values=False)
    return [path]


def check_engine_on_device(config: PpoConfig, num_gpus: int) -> None:
    """Raise ConfigError if vLLM does not compute the policy on GPUs, or without any on a CPU."""
    from rlhf_rollout.engines.vllm.own_classes import check_on_cpu, check_on_gpu

    if config.rollout.replay is None and config.model.pretrain is not None:
        model_config, _ = load_model_files(model_path(config.model.pretrain), images=bool(config.images))
        text = model_config.get_text_config().to_dict()
        text |= {"architectures": model_config.architectures}
        if num_gpus:
            check_on_gpu(text)
        else:
            check_on_cpu(text, config.model.dtype)


def check_context(model_config: Any, num_tokens: int, flags: str) -> None:
    """Raise ConfigError if `num_tokens`, which `flags` ask for, exceed the context of the model."""
    context = getattr(model_config.get_text_config(), "max_position_embeddings", None)
    if context is not None and num_tokens > context:
        message = f"{flags} is {num_tokens} tokens, and the model has a context of {context}"
        hint = f"ask for at most {context} tokens in total, or scale the model's context: docs/models.md says how"
        raise ConfigError(message, hint=hint)


def longest_sequence(config: PpoConfig) -> tuple[int, str]:
    """Return the largest number of tokens of a prompt with its response, and the flags that set it."""
    return config.agent.max_len(config.data.prompt_max_len, config.rollout.generate_max_len)


def choose_critic(
    config: PpoConfig, model: str, reward_models: Sequence[str], tokenizer: Any, reader: Any = None
) -> tuple[str, list[str]]:
    """Return the model from which the critic starts, and notices on it.

    It is --critic_pretrain, else the first of the `reward_models`, which were checked before, else the policy's
    `model`.

    Raises:
        ConfigError: a critic that cannot be run or cannot have its adapters, whose tokenizer differs from the
            policy's `tokenizer`, or that does not read images as `reader` does, if there is one.
    """
    if not config.algorithm.spec().row.uses_critic:
        return model, []
    named = config.model.critic_pretrain
    notices = []
    critic = model
    if named is not None:
        critic = model_path(named)
    elif reward_models:
        # A reward model already knows what is good, so it is the better start for predicting rewards.
        critic = reward_models[0]
        notices.append(f"the critic starts from the reward model {critic}; use --critic_pretrain for another model")
    if critic != model:
        check_companion("critic_pretrain", config.model, critic, tokenizer, reader)
    unnamed = "reward_pretrain" if reward_models else "pretrain"
    flag = unnamed if named is None else "critic_pretrain"
    check_files(flag, config.model, critic, has_values=True)
    if config.model.critic_lora is not None:
        from rlhf_models.loading import load_config
        from rlhf_models.lora import check_lora

        share = check_lora(load_config(critic), config.model.critic_lora)
        if rank := config.model.critic_lora_rank:
            notices.append(f"--critic_lora_rank {rank} trains {share:.2%} of the critic's weights")
    return critic, notices


def check_teachers(config: PpoConfig, tokenizer: Any, reader: Any = None) -> list[str]:
    """Return the folders or hub names of --teacher_model, each once.

    Raises:
        ConfigError: a teacher that cannot be run, or is too short of context for the longest rollouts, or whose
            tokenizer differs from the policy's `tokenizer`, or that does not read images as `reader` does; or more
            --teacher_top_k than there are tokens.
    """
    teachers = config.algorithm.teacher_paths
    num_tokens, flags = longest_sequence(config)
    for teacher in teachers:
        which = "teacher_model" if len(teachers) == 1 else f"teacher_model {teacher}"
        model_config = check_companion(which, config.model, teacher, tokenizer, reader)
        check_context(model_config, num_tokens, f"--{which}: {flags}")
    top_k = config.algorithm.teacher_top_k
    if teachers and top_k is not None and top_k > len(tokenizer):
        message = f"--teacher_top_k is {top_k}, and the tokenizer has {len(tokenizer)} tokens"
        raise ConfigError(message, hint=f"--teacher_top_k {len(tokenizer)} compares them all")
    return teachers


def check_entropy_target(target: float | None, tokenizer: Any) -> None:
    """Raise ConfigError for an --entropy_target above the entropy of the policy that draws all tokens equally often."""
    highest = math.log(len(tokenizer))
    if target is not None and target > highest:
        most = f"{len(tokenizer)} equally likely tokens have {highest:.2f}"
        message = f"--entropy_target is {target:g} nats per token, which no policy has: {most}"
        raise ConfigError(message, hint="Skywork-OR1's scripts have --entropy_target 0.2")


def check_files(flag: str, section: ModelSection, path: str, *, has_values: bool) -> None:
    """Raise ConfigError if what training makes of the model of a flag could not be saved for plain transformers.

    With `has_values` it is trained as a critic or reward model, and must not have a head of another kind.
    """
    from rlhf_models.loading import check_critic, check_trained_copy

    with naming(flag):
        if has_values:
            check_critic(path)
        check_trained_copy(path, section.dtype, has_values=has_values)


def check_companion(flag: str, section: ModelSection, path: str, tokenizer: Any, reader: Any = None) -> Any:
    """Return the config of a model that runs beside the trained one.

    Raises ConfigError unless it can run and has the same tokenizer, and reads images as `reader`, if there is one.
    """
    from rlhf_models.loading import check_same_tokenizer, check_tokenizer_fits, check_weights, load_config

    with naming(flag):
        model_config = load_config(path)
        check_tokenizer_fits(model_config, tokenizer)
        check_same_tokenizer(path, tokenizer)
        check_weights(path)
        check_attention(section, model_config)
        if reader is not None:
            reader.check_same(path, model_config)
    return model_config
