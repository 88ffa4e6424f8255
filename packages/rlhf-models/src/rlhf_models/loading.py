"""From a model folder or hub name to a config and models, with errors that say what to do."""

from pathlib import Path
from typing import Any, Required, TypedDict, Unpack

import torch

from rlhf_data.errors import ConfigError, unknown
from rlhf_data.pretrained import check_eos, clear_errors, load_tokenizer, located_model
from rlhf_models.actor import Actor
from rlhf_models.attention import PACKED_ATTENTION, choose_attention
from rlhf_models.critic import Critic
from rlhf_models.files import check_weights, quiet_transformers
from rlhf_models.heads import load_head, require_head
from rlhf_models.reward import RewardModel

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class LoadOptions(TypedDict, total=False):
    """How a model is loaded.

    Attributes:
        dtype: "float32" or "bfloat16"; the only one that must be given.
        attn_implementation: "auto", which is the default, or a name that transformers knows.
        gradient_checkpointing: recompute each layer in the backward pass instead of keeping its activations.
        packing: whether packed batches will come; see `attention.choose_attention`.
    """

    dtype: Required[str | torch.dtype]
    attn_implementation: str
    gradient_checkpointing: bool
    packing: bool


def load_config(path: str | Path) -> Any:
    """Return the transformers config of a folder or hub name. Raises ConfigError when there is none."""
    name, is_local = located_model(path)
    from transformers import AutoConfig

    with clear_errors("model", path):
        return AutoConfig.from_pretrained(name, local_files_only=is_local)


def check_tokenizer_fits(config: Any, tokenizer: Any) -> None:
    """Check that each of the tokenizer's ids has an embedding row and that a sequence can end. Raises ConfigError."""
    check_eos(tokenizer, getattr(tokenizer, "name_or_path", "") or "the tokenizer")
    num_rows = config.get_text_config().vocab_size
    largest = max(tokenizer.get_vocab().values())
    if largest >= num_rows:
        message = f"the tokenizer has token ids up to {largest}, but the model's embedding ends at {num_rows - 1}"
        raise ConfigError(message, hint="take the tokenizer from the model's own folder")


def check_reward_model(path: str | Path) -> None:
    """Check that a model folder has a head that gives a score, before it is loaded; of hub names nothing is read.
    Raises ConfigError as `load_reward_model` does."""
    if Path(located_model(path)[0]).is_dir():
        check_weights(path)
        require_head(path, load_config(path))


def check_same_tokenizer(path: str | Path, tokenizer: Any) -> None:
    """Check that a model that scores the policy's tokens, a reward model or a critic, reads them as the policy does.

    Further tokens of its own do no harm. Raises ConfigError for a token of the policy's `tokenizer` that has no id or
    another one in the model's vocabulary, and for a model without tokenizer.
    """
    own = load_tokenizer(path).get_vocab()
    vocabulary = tokenizer.get_vocab()
    differing = [(token, index) for token, index in vocabulary.items() if own.get(token) != index]
    if differing:
        token, index = min(differing, key=lambda pair: pair[1])
        message = f"the model {path} has another vocabulary than the policy: {len(differing)} of the policy's"
        message += f" {len(vocabulary)} tokens differ, such as {token!r}, {index} to the policy, {own.get(token)} to it"
        hint = "it reads the policy's token ids: use a model of the same family, or serve a reward model behind"
        raise ConfigError(message, hint=f"{hint} --remote_rm_url http://..., which gets text")


def resolve_dtype(dtype: str | torch.dtype) -> torch.dtype:
    """Return the torch dtype of "float32" or "bfloat16". Raises ConfigError for others."""
    name = str(dtype).removeprefix("torch.")
    if name not in DTYPES:
        raise ConfigError(unknown("dtype", name, DTYPES))
    return DTYPES[name]


def load_actor(path: str | Path, **options: Unpack[LoadOptions]) -> Actor:
    """Load the causal language model of a folder in the Hugging Face layout, or hub name, on the CPU, to be trained.
    Raises ConfigError for no such folder, no config, no weights, or a model that cannot be packed."""
    from transformers import AutoModelForCausalLM

    return Actor(_load_model(AutoModelForCausalLM, path, **options))


def load_critic(path: str | Path, **options: Unpack[LoadOptions]) -> Critic:
    """Load the backbone of a folder or hub name under a scalar head.

    The head is the model's own when it has one, a critic's or a reward model's: values then begin at the scores that
    the reward model would give, without its stored mean and deviation. A causal language model gets one of zeros.
    Raises ConfigError as `load_actor` does, and for a head that is not one of a single score.
    """
    from transformers import AutoModel

    head = load_head(path, load_config(path))
    critic = Critic(_load_model(AutoModel, path, **options))
    if head is not None:
        critic.value_head.weight.data.copy_(head)
    return critic


def load_reward_model(path: str | Path, *, normalize: bool = False, **options: Unpack[LoadOptions]) -> RewardModel:
    """Load a reward model that is never trained: in eval mode, without gradients.

    A Hugging Face folder of a ...ForSequenceClassification with one label, the folder of a critic that `save_hf` wrote,
    or a backbone with a head under one of `heads.HEAD_NAMES`.

    Args:
        path: a folder or hub name.
        normalize: shift and scale scores by the mean and deviation in the model's config, where it has them.
        options: see `LoadOptions`.

    Raises:
        ConfigError: as in `load_actor`, or no head of a single score, such as in a causal language model.
    """
    from transformers import AutoModel

    head = require_head(path, load_config(path))
    model = RewardModel(_load_model(AutoModel, path, **options), normalize=normalize)
    model.value_head.weight.data.copy_(head)
    return model.eval().requires_grad_(False)


def _load_model(
    auto_class: Any,
    path: str | Path,
    *,
    dtype: str | torch.dtype,
    attn_implementation: str = "auto",
    gradient_checkpointing: bool = False,
    packing: bool = False,
) -> Any:
    name, is_local = located_model(path)
    config = load_config(path)
    attention = choose_attention(config, attn_implementation, packing=packing)
    with clear_errors("model", path), quiet_transformers():
        try:
            model, report = auto_class.from_pretrained(
                name,
                config=config,
                dtype=resolve_dtype(dtype),
                attn_implementation=attention,
                output_loading_info=True,
                local_files_only=is_local,
            )
        except KeyError as error:  # of models that know kinds of attention of their own only
            if attention in error.args:
                raise _unexchangeable(config) from error
            raise
    if attention == PACKED_ATTENTION and not model._supports_attention_backend:
        raise _unexchangeable(config)
    if missing := sorted(report["missing_keys"]):
        message = f"the model {path} lacks {len(missing)} weights of a {type(model).__name__}, {missing[0]} among them"
        raise ConfigError(message, hint="it may be the folder of another kind of model, such as a critic")
    if gradient_checkpointing:
        # Renamed, its argument too, between the versions of transformers that are supported.
        enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
        enable({"use_reentrant": False})
    return model.train()


def _unexchangeable(config: Any) -> ConfigError:
    message = f"a {config.model_type} model cannot be packed: its attention cannot be exchanged"
    return ConfigError(message, hint="turn packing off")
