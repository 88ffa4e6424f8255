"""Tiny random models for tests and smoke runs: a real Hugging Face folder, made in well under two seconds."""

import random
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch

from rlhf_data.errors import ConfigError, unknown
from rlhf_models.loading import quiet_transformers

PAD_TOKEN = "<|endoftext|>"
START_TOKEN = "<|im_start|>"
EOS_TOKEN = "<|im_end|>"
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
_SPECIAL_TOKENS = (PAD_TOKEN, START_TOKEN, EOS_TOKEN)
_NUM_BYTES = 256
_MAX_TOKENIZER_SIZE = 4096
_SYLLABLES = "anbecodierfugoheinlomunoorparestthun"


def tiny_model_dir(
    path: str | Path,
    *,
    vocab_size: int = 512,
    tied: bool = True,
    seed: int = 0,
    architecture: str = "qwen2",
    dtype: torch.dtype = torch.float32,
    **config_overrides: Any,
) -> Path:
    """Write a random causal language model with its tokenizer and chat template, and return the folder.

    The default has 2 layers, hidden size 64, 2 heads of 32 on 1 key-value head, and fewer than 0.2 M parameters.

    Args:
        path: the folder to make; files in it of the same names are replaced.
        vocab_size: embedding rows, at least 256 bytes and 3 special tokens; the tokenizer uses at most 4096 of them.
        tied: whether the LM head shares the embedding's weight.
        seed: of the weights.
        architecture: "qwen2" or "llama".
        dtype: of the saved weights.
        config_overrides: fields of the transformers config, such as `hidden_size` or `num_hidden_layers`.

    Raises:
        ConfigError: an unknown architecture, or a vocabulary that cannot hold the bytes.
    """
    from transformers import GenerationConfig, LlamaForCausalLM, Qwen2ForCausalLM

    classes = {"qwen2": Qwen2ForCausalLM, "llama": LlamaForCausalLM}
    fields = {"tie_word_embeddings": tied} | config_overrides
    model, tokenizer = _tiny(classes, architecture, vocab_size, seed, fields)
    model.generation_config = GenerationConfig(eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id)
    return _save(model.to(dtype), tokenizer, Path(path))


def tiny_reward_model_dir(
    path: str | Path,
    *,
    vocab_size: int = 512,
    seed: int = 1,
    architecture: str = "qwen2",
    dtype: torch.dtype = torch.float32,
    **config_overrides: Any,
) -> Path:
    """Write a random reward model, a ...ForSequenceClassification with one label, that reads `tiny_model_dir`'s tokens.

    Arguments, result and errors as in `tiny_model_dir`; `mean` and `std` among the overrides are its stored moments.
    """
    from transformers import LlamaForSequenceClassification, Qwen2ForSequenceClassification

    classes = {"qwen2": Qwen2ForSequenceClassification, "llama": LlamaForSequenceClassification}
    fields = {"num_labels": 1} | config_overrides
    model, tokenizer = _tiny(classes, architecture, vocab_size, seed, fields)
    return _save(model.to(dtype), tokenizer, Path(path))


def _tiny(
    classes: dict[str, Any], architecture: str, vocab_size: int, seed: int, fields: dict[str, Any]
) -> tuple[Any, Any]:
    """Return a random model and its tokenizer."""
    if architecture not in classes:
        raise ConfigError(unknown("architecture", architecture, classes))
    if vocab_size < _NUM_BYTES + len(_SPECIAL_TOKENS):
        raise ConfigError(f"vocab_size is {vocab_size}; at least {_NUM_BYTES + len(_SPECIAL_TOKENS)} are needed")
    tokenizer = tiny_tokenizer(min(vocab_size, _MAX_TOKENIZER_SIZE))
    defaults: dict[str, Any] = {
        "vocab_size": vocab_size,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "max_position_embeddings": 2048,
        "initializer_range": 0.1,
        "bos_token_id": None,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    model_class = classes[architecture]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return model_class(model_class.config_class(**(defaults | fields))), tokenizer


def _save(model: Any, tokenizer: Any, path: Path) -> Path:
    tokenizer.save_pretrained(path)
    with quiet_transformers():
        model.save_pretrained(path)
    return path


def tiny_tokenizer(vocab_size: int = 512, corpus: Iterable[str] | None = None) -> Any:
    """Return a byte-level BPE tokenizer with a ChatML template and at most `vocab_size` tokens, always the same.

    It is trained on `corpus`, and then keeps digits apart; None for words that mean nothing.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    backend = Tokenizer(models.BPE())
    words: Any = pre_tokenizers.ByteLevel(add_prefix_space=False)
    if corpus is not None:
        words = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), words])
    backend.pre_tokenizer = words
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(_SPECIAL_TOKENS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    backend.train_from_iterator(_corpus(num_words=8 * vocab_size) if corpus is None else corpus, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        eos_token=EOS_TOKEN,
        pad_token=PAD_TOKEN,
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
    )


def _corpus(num_words: int) -> Iterator[str]:
    rng = random.Random(0)
    for _ in range(num_words):
        yield " " + "".join(_syllable(rng) for _ in range(rng.randint(1, 3)))


def _syllable(rng: random.Random) -> str:
    start = 2 * rng.randrange(len(_SYLLABLES) // 2)
    return _SYLLABLES[start : start + 2]
