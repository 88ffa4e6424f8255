"""Tiny random models for tests and smoke runs, written as Hugging Face folders in less than two seconds."""

import random
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch

from rlhf_data.errors import ConfigError, check_name
from rlhf_models.checkpoint.files import quiet_transformers, without_wrappers

PAD_TOKEN = "<|endoftext|>"
START_TOKEN = "<|im_start|>"
EOS_TOKEN = "<|im_end|>"
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
# Name of the transformers classes, and fields of the config that the others do not have.
_ARCHITECTURES: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen2": ("Qwen2", {}),
    "llama": ("Llama", {}),
    "apertus": ("Apertus", {"hidden_act": "xielu"}),  # its layers have persistent buffers
    "qwen3_moe": ("Qwen3Moe", {"head_dim": 32, "norm_topk_prob": True} | _EXPERTS),
    "qwen2_moe": ("Qwen2Moe", {"shared_expert_intermediate_size": 64} | _EXPERTS),
    "mixtral": ("Mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 32}),
}
_SPECIAL_TOKENS = (PAD_TOKEN, START_TOKEN, EOS_TOKEN)
_NUM_BYTES = 256
_MAX_TOKENIZER_SIZE = 4096
_SYLLABLES = "anbecodierfugoheinlomunoorparestthun"


def tiny_model_dir(path: str | Path, *, tied: bool = True, **options: Any) -> Path:
    """Write a random causal language model with tokenizer and chat template, and return the folder.

    By default it has 2 layers, hidden size 64, 2 attention heads of size 32, 1 key-value head and fewer than 0.2 M
    parameters. Mixtures have 4 experts per layer, of which a token goes through 2.

    Args:
        path: the folder to write. Files of the same names are replaced.
        tied: whether the LM head shares the embedding's weight.
        options: `vocab_size` (512), the number of embedding rows, at least 259 for the 256 bytes and 3 special tokens,
            of which the tokenizer uses at most 4096; `seed` (0) of the weights; `architecture` ("qwen2", "llama",
            "apertus", or a mixture of experts: "qwen3_moe", "qwen2_moe" or "mixtral"); `dtype` (float32) of the saved
            weights; further fields of the transformers config, such as `hidden_size`.

    Raises:
        ConfigError: an unknown architecture, or a vocabulary too small for the bytes.
    """
    return _write(Path(path), "CausalLM", **({"tie_word_embeddings": tied} | options))


def tiny_reward_model_dir(path: str | Path, **options: Any) -> Path:
    """Write a random reward model, a ...ForSequenceClassification with one label and the tokenizer of `tiny_model_dir`.

    Options, result and errors are those of `tiny_model_dir`, with a default seed of 1. The options `mean` and `std` are
    stored as the moments of its scores.
    """
    return _write(Path(path), "SequenceClassification", **({"num_labels": 1, "seed": 1} | options))


def _write(
    path: Path,
    task: str,
    *,
    vocab_size: int = 512,
    seed: int = 0,
    architecture: str = "qwen2",
    dtype: torch.dtype = torch.float32,
    **fields: Any,
) -> Path:
    import transformers

    check_name("architecture", architecture, _ARCHITECTURES)
    if vocab_size < _NUM_BYTES + len(_SPECIAL_TOKENS):
        raise ConfigError(f"vocab_size is {vocab_size}; at least {_NUM_BYTES + len(_SPECIAL_TOKENS)} are needed")
    tokenizer = tiny_tokenizer(min(vocab_size, _MAX_TOKENIZER_SIZE))
    ends = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
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
    }
    prefix, own = _ARCHITECTURES[architecture]
    model_class = getattr(transformers, f"{prefix}For{task}")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = model_class(model_class.config_class(**(defaults | ends | own | fields)))
    if task == "CausalLM":
        model.generation_config = transformers.GenerationConfig(**ends)
    tokenizer.save_pretrained(path)
    with quiet_transformers(), without_wrappers():
        model.to(dtype).save_pretrained(path)
    return path


def tiny_tokenizer(vocab_size: int = 512, corpus: Iterable[str] | None = None) -> Any:
    """Return a byte-level BPE tokenizer with a ChatML template and at most `vocab_size` tokens. It is deterministic.

    It is trained on `corpus` with each digit as its own token, or, if that is None, on words of random syllables.
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
    syllables = ["".join(pair) for pair in zip(_SYLLABLES[::2], _SYLLABLES[1::2], strict=True)]
    rng = random.Random(0)
    for _ in range(num_words):
        yield " " + "".join(rng.choice(syllables) for _ in range(rng.randint(1, 3)))
