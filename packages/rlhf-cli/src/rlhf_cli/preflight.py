"""What is looked at before anything starts: model files, tokenizer, data, lengths, reward. No weights are loaded."""

from typing import Any

from rlhf_data.errors import ConfigError, with_hint


def load_model_files(path: str) -> tuple[Any, Any]:
    """Return the config and the tokenizer of a model folder or hub name. Raises ConfigError when they do not fit."""
    from rlhf_models.loading import check_tokenizer_fits, load_config, load_tokenizer

    config, tokenizer = load_config(path), load_tokenizer(path)
    check_tokenizer_fits(config, tokenizer)
    return config, tokenizer


def check_context(model_config: Any, num_tokens: int, flags: str) -> None:
    """Raise ConfigError unless the model can look back over `num_tokens`, which `flags` ask for."""
    context = getattr(model_config.get_text_config(), "max_position_embeddings", None)
    if context is not None and num_tokens > context:
        message = f"{flags} ask for {num_tokens} tokens, and the model has a context of {context}"
        raise ConfigError(with_hint(message, f"lower them to {context} tokens together"))
