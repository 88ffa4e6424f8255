"""Load configs and models from a folder or hub name, with errors that say what to do."""

import re
from collections.abc import Collection
from pathlib import Path
from typing import Any, Required, TypedDict, Unpack

import torch

from rlhf_data.errors import ConfigError, check_name
from rlhf_data.images.reader import IMAGE_FAMILIES, check_reads_images, open_image_reader
from rlhf_data.own_code import admit_code, entrust, is_trusted
from rlhf_data.pretrained import check_eos, clear_errors, located_model
from rlhf_data.pretrained import check_same_tokenizer as check_same_tokenizer
from rlhf_data.pretrained import load_tokenizer as load_tokenizer
from rlhf_models.actor import Actor
from rlhf_models.attention.frequencies import pin_frequencies
from rlhf_models.attention.packed import PACKED_ATTENTIONS, UNPACKED, choose_attention, packed_attention_here
from rlhf_models.attention.states_apart import stateful_layers
from rlhf_models.backbone import check_packs
from rlhf_models.checkpoint.beyond_text import freeze_beyond_text, note_left_out
from rlhf_models.checkpoint.empty import load_empty, stored_tensors
from rlhf_models.checkpoint.files import check_weights, quiet_transformers, tensor_files
from rlhf_models.checkpoint.heads import check_no_head, load_head, require_head
from rlhf_models.critic import Critic
from rlhf_models.images import language_model_class
from rlhf_models.reward import RewardModel
from rlhf_models.weights import check_saves

# By method of quantization, the configuration with which transformers restores whole weights on any machine.
DEQUANTIZABLE = {"fp8": "FineGrainedFP8Config", "mxfp4": "Mxfp4Config"}
# What the names of published quantized models have behind the name of the original.
_QUANTIZED_NAME = re.compile(
    r"(-(fp8|mxfp4|nvfp4|awq|gptq|int[48]|[48]bit|w\da\d+|bnb|unsloth|dynamic|block|quantized))+$", re.IGNORECASE
)
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class LoadOptions(TypedDict, total=False):
    """Options for loading a model. Only `dtype` is required.

    Attributes:
        dtype: "float32" or "bfloat16".
        attn_implementation: "auto" (default) or a name that transformers knows.
        gradient_checkpointing: recompute each layer in the backward pass, to save the memory of its activations.
        packing: whether batches will be packed; see `attention.choose_attention`.
        max_length: tokens of the longest sequence of the run, which decides the frequencies of LongRoPE; see
            `pin_frequencies`. None is the model's own context.
        images: "" (default) for a model that is given text alone; "frozen" for one that is given images, and keeps
            the weights that read them; "trained" for one that also trains those.
    """

    dtype: Required[str | torch.dtype]
    attn_implementation: str
    gradient_checkpointing: bool
    packing: bool
    max_length: int | None
    images: str


def load_config(path: str | Path) -> Any:
    """Return the transformers config of a folder or hub name.

    Raises ConfigError if there is none, or if the model is quantized or needs code of its own.
    """
    name, is_local = located_model(path, with_weights=False)
    from transformers import AutoConfig

    with clear_errors("model", path):
        may_run = admit_code(name, is_local=is_local)
        config = AutoConfig.from_pretrained(name, local_files_only=is_local, trust_remote_code=may_run)
    if not may_run and hasattr(config, "auto_map"):
        del config.auto_map  # transformers has a class for the model, as which it is saved
    entrust(config, name)
    if (method := quantization_of(config)) is not None:
        message = f"the model {path} is quantized ({method}), and training and scoring need whole weights"
        raise ConfigError(message, hint=_whole_copy(str(path), method))
    return config


def quantization_of(config: Any) -> str | None:
    """Return the method by which a model with this config, or its text part, is quantized; None if it is not."""
    for part in (config, config.get_text_config()):
        if (quantization := getattr(part, "quantization_config", None)) is not None:
            options = quantization if isinstance(quantization, dict) else vars(quantization)
            return str(options.get("quant_method", "a method without a name"))
    return None


def _whole_copy(path: str, method: str) -> str:
    """Return a hint that says where there is a copy of a quantized model with whole weights, or how to make one."""
    owner, _, name = path.rpartition("/")
    original = _QUANTIZED_NAME.sub("", name)
    if method == "mxfp4" and name in ("gpt-oss-20b", "gpt-oss-120b"):
        hint = f"use a copy in bfloat16, such as unsloth/{name}-BF16"
    elif original != name and not Path(path).expanduser().is_dir():
        hint = f"use the model that it was made from, by its name {owner}/{original}"
    else:
        hint = "use the model that it was made from, or a copy with its weights in bfloat16"
    if method in DEQUANTIZABLE:
        hint += f"; `python -m rlhf_models.dequantize {path} FOLDER` writes a copy in bfloat16"
    return hint


def check_generates(path: str | Path, config: Any, *, images: bool = False, packing: bool = False) -> None:
    """Raise ConfigError unless a model with this config can be trained as a language model, on images if so asked.

    For `packing` see `check_reads_images`.
    """
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

    if images:
        check_reads_images(path, config, packing=packing)
        return

    if type(config) in MODEL_FOR_CAUSAL_LM_MAPPING or "AutoModelForCausalLM" in getattr(config, "auto_map", {}):
        return
    text = config.get_text_config()
    kind = type(config).__name__.removesuffix("Config")
    message = f"the model {path} is a {config.model_type} ({kind}), of which transformers has no language model"
    if text is config:
        raise ConfigError(message, hint="use a model of a family that generates text, such as those in docs/models.md")
    hint = "use a text model of the same family, or a family with images from docs/models.md, such as gemma3 or qwen3_5"
    if config.model_type in IMAGE_FAMILIES:
        hint = f"`rlhf sft` and `rlhf ppo` train it on rows with images, ``image_key``; for text, {hint}"
    raise ConfigError(f"{message}: it also reads images, videos or sounds, and has no class for text alone", hint=hint)


def _check_backbone(path: str | Path, config: Any) -> None:
    """Raise ConfigError if a model's own code has no class of its layers without the LM head, for a critic."""
    from transformers import MODEL_MAPPING

    own = getattr(config, "auto_map", None)
    if own and "AutoModel" not in own and type(config) not in MODEL_MAPPING:
        message = f"the code of the model {path} has no `AutoModel`, on which critics and reward models are built"
        hint = 'add "AutoModel": "FILE.CLASS" to auto_map in its config.json, a class of the layers without the LM head'
        raise ConfigError(message, hint=hint)


_MAX_STRAYS = 64  # published models have a few, such as tokens for images; another model's tokenizer has thousands


def check_tokenizer_fits(config: Any, tokenizer: Any) -> int | None:
    """Check that the tokens of a tokenizer have rows in a model's embedding.

    A few special tokens may have none, such as those for images in the text models of a family. The data must not use
    them then.

    Returns:
        The number of embedding rows if tokens lie beyond them, else None.

    Raises:
        ConfigError: tokens of text or many have no row, or there is no end token.
    """
    check_eos(tokenizer, getattr(tokenizer, "name_or_path", "") or "the tokenizer")
    num_rows = config.get_text_config().vocab_size
    ids = tokenizer.get_vocab().values()
    strays = {index for index in ids if index >= num_rows}
    if not strays:
        return None
    special = {index for index, token in tokenizer.added_tokens_decoder.items() if token.special}
    if len(strays) > _MAX_STRAYS or not strays <= special or tokenizer.eos_token_id in strays:
        message = f"the tokenizer has token ids up to {max(ids)}, but the model's embedding ends at {num_rows - 1}"
        raise ConfigError(message, hint="take the tokenizer from the model's own folder")
    return num_rows


def check_reward_model(path: str | Path) -> None:
    """Check, before loading, that a model folder has a scalar head. Reads nothing for hub names.

    Raises:
        ConfigError: as in `load_reward_model`.
    """
    if Path(located_model(path)[0]).is_dir():
        check_weights(path)
        config = load_config(path)
        _check_backbone(path, config)
        require_head(path, config)


def check_critic(path: str | Path) -> None:
    """Check, before loading, that the scalar head of a model folder, if it has one, fits. Reads nothing for hub names.

    Raises:
        ConfigError: as in `load_critic`, for example for a classifier of two labels.
    """
    name, is_local = located_model(path)
    if not Path(name).is_dir():
        return
    config = load_config(path)
    _check_backbone(path, config)
    if load_head(path, config):
        return
    from transformers import AutoModel

    with clear_errors("model", path), quiet_transformers():
        options = {"device_map": "meta", "output_loading_info": True, "local_files_only": is_local}  # reads names only
        _, report = AutoModel.from_pretrained(name, config=config, trust_remote_code=is_trusted(name), **options)
    check_no_head(path, config, report["unexpected_keys"])


def check_trained_copy(path: str | Path, dtype: str | torch.dtype, *, has_values: bool) -> Actor | Critic | None:
    """Check, before loading, that a model has all its weights, and that what training makes of it can be saved.

    Reads the headers of files only, and nothing for hub names. Returns the model without memory for its weights; None
    for a hub name, or a model that transformers cannot make in this way.

    Args:
        path: a folder or hub name.
        dtype: data type of the weights in training.
        has_values: whether it is trained as a critic or reward model, and not as a language model.

    Raises:
        ConfigError: a weight is missing or has another shape; and as `weights.check_saves`.
    """
    from transformers import AutoModel

    folder = Path(located_model(path)[0])
    if not folder.is_dir():
        return None
    config = load_config(path)
    with clear_errors("model", path):
        tensors = stored_tensors(folder)
    found = load_empty(AutoModel if has_values else language_model_class(config), config, tensors, resolve_dtype(dtype))
    if found is None:
        return None
    model, report = found
    _check_complete(model, report["missing_keys"], path)
    if others := report["mismatched_keys"]:
        message = f"the model {path} has {len(others)} weights of other shapes than its config, such as {others[0]}"
        raise ConfigError(message, hint="its config.json belongs to another model, or its weights are packed")
    trained = Critic(_layers(model)) if has_values else Actor(model)
    check_saves(trained)
    return trained


def resolve_dtype(dtype: str | torch.dtype) -> torch.dtype:
    """Return the torch dtype of "float32" or "bfloat16". Raises ConfigError for others."""
    name = str(dtype).removeprefix("torch.")
    check_name("dtype", name, DTYPES)
    return DTYPES[name]


def load_actor(path: str | Path, **options: Unpack[LoadOptions]) -> Actor:
    """Load a causal language model for training, on the CPU, from a Hugging Face folder or hub name.

    Raises:
        ConfigError: no such folder, no config, no weights, or packing for a model that cannot be packed.
    """
    config = load_config(path)
    check_generates(path, config, images=bool(options.get("images")))
    return Actor(_load_model(language_model_class(config), path, **options))


def load_reference(path: str | Path, **options: Unpack[LoadOptions]) -> Actor:
    """Load a frozen actor, which KL terms are measured against: in eval mode. Raises ConfigError as `load_actor`."""
    return load_actor(path, **options).eval().requires_grad_(False)


def load_critic(path: str | Path, **options: Unpack[LoadOptions]) -> Critic:
    """Load the backbone of a folder or hub name with a scalar head, for training.

    If the folder has a scalar head (a critic or reward model), the critic starts with it: its values are then the
    reward model's raw scores, without the stored mean and deviation. A causal language model gets a head of zeros.

    Raises:
        ConfigError: as in `load_actor`, or a head with more than one output or under an unknown name.
    """
    from transformers import AutoModel

    head = load_head(path, load_config(path))
    critic = Critic(_layers(_load_model(AutoModel, path, needs_head=not head, **options)))
    if head:
        critic.value_head.take(head)
    return critic


def load_reward_model(path: str | Path, *, normalize: bool = False, **options: Unpack[LoadOptions]) -> RewardModel:
    """Load a reward model for scoring: in eval mode, without gradients.

    Accepts a ...ForSequenceClassification with one label, a critic written by `save_hf`, and a backbone with a head
    under one of `heads.HEAD_NAMES`.

    Args:
        path: a folder or hub name.
        normalize: return (score - mean) / std with the moments in the model's config, if it has them.
        options: see `LoadOptions`.

    Raises:
        ConfigError: as in `load_actor`, or no head with one output (a causal language model, for example).
    """
    from transformers import AutoModel

    head = require_head(path, load_config(path))
    model = RewardModel(_layers(_load_model(AutoModel, path, **options)), normalize=normalize)
    model.value_head.take(head)
    return model.eval().requires_grad_(False)


def _load_model(
    auto_class: Any,
    path: str | Path,
    *,
    dtype: str | torch.dtype,
    attn_implementation: str = "auto",
    gradient_checkpointing: bool = False,
    packing: bool = False,
    max_length: int | None = None,
    needs_head: bool = False,
    images: str = "",
) -> Any:
    name, is_local = located_model(path)
    config = load_config(path)
    if getattr(auto_class, "__name__", None) == "AutoModel":
        _check_backbone(path, config)
    if images:  # other attentions, such as flash_attention_2, take packs as they are, and no mask
        check_reads_images(path, config, packing=packing or attn_implementation not in ("auto", "sdpa", "eager"))
    attention = choose_attention(config, attn_implementation, packing=packing)
    if attention in PACKED_ATTENTIONS:
        attention = packed_attention_here(config, attn_implementation, resolve_dtype(dtype))
    with clear_errors("model", path), quiet_transformers():
        try:
            model, report = auto_class.from_pretrained(
                name,
                config=config,
                dtype=resolve_dtype(dtype),
                attn_implementation=_attention_of_parts(config, attention, "sdpa" if images else "eager"),
                output_loading_info=True,
                local_files_only=is_local,
                trust_remote_code=is_trusted(name),
            )
        except KeyError as error:  # raised by models that accept only their own attention implementations
            if attention in error.args:
                raise _unexchangeable(config) from error
            raise
    # Of families with layers that carry a state, the flag says whether these allow it, too; `check_packs` finds out.
    is_exchangeable = model._supports_attention_backend or stateful_layers(config)
    if packing and attention not in ("sdpa", "eager") and not is_exchangeable:
        raise _unexchangeable(config)
    entrust(model.config, name)
    _check_complete(model, report["missing_keys"], path)
    if needs_head:
        check_no_head(path, config, report["unexpected_keys"])
    note_left_out(model, path, config, report["unexpected_keys"])
    if images:
        model.base_model.blank_image = open_image_reader(path).blank()
    if images != "trained":
        freeze_beyond_text(model)
    if model.base_model is model and hasattr(model, "model"):
        _leave_larger_model(model, path)
    pin_frequencies(model, max_length)
    if packing:
        check_packs(model)
    if gradient_checkpointing:
        # The method and its argument have different names in the versions of transformers that are supported.
        enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
        enable({"use_reentrant": False})
    return model.train()


def _layers(model: Any) -> Any:
    """Return the layers for text of a model that transformers has no class without an LM head for, such as Llama 4."""
    if model.get_output_embeddings() is None:
        return model
    layers = model.get_decoder().model
    entrust(layers.config, model.config.name_or_path)
    return layers


def _leave_larger_model(model: Any, path: str | Path) -> None:
    """Give a Llama 4 for text, whose prefix is its name within a model for images, the prefix of its own layers.

    Transformers takes the name within the larger model off when it loads, and does not put it on when it saves.
    """
    outer = model.base_model_prefix
    model.base_model_prefix = "model"
    if any(name.startswith(f"{outer}.") for name in tensor_files(path)):
        from transformers.core_model_loading import PrefixChange

        model._weight_conversions = [*(model._weight_conversions or ()), PrefixChange(prefix_to_remove=outer)]


def _attention_of_parts(config: Any, attention: str, others: str) -> str | dict[str, str]:
    """Return the attention of each part of a model: that for images or sounds, which text does not reach, has its own.

    `others` is "eager" unless the family is known to have another one for such parts.
    """
    text = config.get_text_config()
    if text is config:
        return attention
    parts = {name: getattr(config, name, None) for name in config.sub_configs}
    return {"": attention} | {name: attention if part is text else others for name, part in parts.items()}


def _check_complete(model: Any, missing: Collection[str], path: str | Path) -> None:
    if missing:
        message = f"the model {path} lacks {len(missing)} weights of a {type(model).__name__}, such as {min(missing)}"
        raise ConfigError(message, hint="it may be the folder of another kind of model, such as a critic")


def _unexchangeable(config: Any) -> ConfigError:
    message = f"a {config.model_type} model cannot be packed: its attention cannot be replaced"
    return ConfigError(message, hint=UNPACKED)
