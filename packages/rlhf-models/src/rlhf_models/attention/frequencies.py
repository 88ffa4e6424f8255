"""Rotary embeddings whose frequencies depend on lengths."""

from torch import nn

from rlhf_data.errors import ConfigError


def pin_frequencies(model: nn.Module, max_length: int | None) -> None:
    """Give rotary embeddings whose frequencies depend on the longest sequence of a batch those of the whole run.

    The log-probs of a sequence then do not depend on the others of its batch, and are the engine's. vLLM takes the long
    frequencies of LongRoPE if the longest possible sequence exceeds the original length.

    Args:
        model: a model of transformers.
        max_length: tokens of the longest sequence of the run, prompt and response together. None is the model's own
            context, which is what vLLM takes then.

    Raises:
        ConfigError: the embedding is dynamic, and sequences may exceed the length that it was trained for; or the model
            makes its frequencies anew in each batch.
    """
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    for module in model.modules():
        kind = getattr(module, "rope_type", None)
        if isinstance(kind, dict) and (found := {"dynamic", "longrope"}.intersection(kind.values())):
            message = f"layers of {model.config.model_type} have rotary embeddings of several types, one {found.pop()}:"
            hint = "use a model of another family, such as those in docs/models.md"
            raise ConfigError(f"{message} each batch would have other frequencies", hint=hint)
        if kind not in ("dynamic", "longrope"):
            continue
        context = module.config.max_position_embeddings
        longest = context if max_length is None else max_length
        if kind == "dynamic" and longest > context:
            message = (
                f"the rotary embedding of {model.config.model_type} is dynamic beyond {context} tokens: each batch"
            )
            hint = f"use sequences of at most {context} tokens, the run's may have {longest}"
            raise ConfigError(f"{message} has other frequencies, and the engine none of them", hint=hint)
        if kind == "longrope":
            original = module.config.rope_parameters["original_max_position_embeddings"]
            if longest > original and hasattr(module, "rope_init_fn"):  # PhiMoE, which asks it in each batch
                message = (
                    f"{model.config.model_type} in transformers scales positions by the longest sequence of a batch"
                )
                hint = f"use sequences of at most {original} tokens, the run's may have {longest}"
                raise ConfigError(f"{message}, and has no long frequencies", hint=hint)
            pinned, _ = ROPE_INIT_FUNCTIONS[kind](module.config, seq_len=original + (longest > original))
            for name in ("inv_freq", "original_inv_freq"):
                getattr(module, name).copy_(pinned)
            module.long_inv_freq = pinned  # what a batch with a long sequence would take
