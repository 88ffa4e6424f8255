"""Token ids of prompts and of what continues them: special tokens exactly once.

A tokenizer is a loaded Hugging Face tokenizer, or an object with the same methods
(`rlhf_data.testing.ByteTokenizer`).
"""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from rlhf_data.errors import ConfigError

# Contexts of a text whose own is unknown, or has a token in common with it. Few tokens begin with them and go on.
_CONTEXTS = ("\n", "a")
_CONTEXT_LENGTH = 64  # characters of a context that count: tokens depend on what is near


class Tokenizer(Protocol):
    """The part of a Hugging Face tokenizer that this package uses."""

    bos_token_id: int | None
    eos_token: str | None
    eos_token_id: int | None
    chat_template: Any

    def __len__(self) -> int:
        """Return the number of tokens in the vocabulary."""

    def __call__(self, text: Any, *, add_special_tokens: bool = True) -> Mapping[str, Any]:
        """Return a mapping whose "input_ids" are the token ids of one text, or of each text of a list."""

    def decode(self, token_ids: Any, *, skip_special_tokens: bool = False) -> str:
        """Return the text of token ids."""

    def get_chat_template(self, *, tools: Any = None) -> str:
        """Return the chat template, or that of several which is for tools."""

    def apply_chat_template(
        self, conversation: Any, *, tokenize: bool, add_generation_prompt: bool, **options: Any
    ) -> Any:
        """Return the rendered conversation."""


def encode_prompts(texts: Sequence[str], tokenizer: Tokenizer, *, has_special_tokens: bool) -> list[list[int]]:
    """Return the token ids of rendered prompts, with the tokenizer's start tokens exactly once and without end tokens.

    Set `has_special_tokens` for the output of a chat template, which already contains them.
    """
    texts = list(texts)
    if has_special_tokens:
        return _encode(texts, tokenizer, add_special_tokens=False)
    bos = tokenizer.bos_token_id
    eos = tokenizer.eos_token_id
    bare_ids = _encode(texts, tokenizer, add_special_tokens=False)
    prompts = []
    for ids, bare in zip(_encode(texts, tokenizer, add_special_tokens=True), bare_ids, strict=True):
        # Some tokenizers append an EOS. A prompt is to be continued, so it must not end with one.
        if ids and ids[-1] == eos and (not bare or bare[-1] != eos):
            ids = ids[:-1]
        # The text or the input template may already begin with the BOS that the tokenizer adds.
        if bos is not None and ids[:2] == [bos, bos] and bare[:1] == [bos]:
            ids = ids[1:]
        prompts.append(ids)
    return prompts


def encode_continuation(text: str, tokenizer: Tokenizer, before: str | None = None) -> list[int]:
    """Return the token ids of a text within a sequence, without special tokens that the tokenizer adds.

    They are a part of the tokens of the whole sequence. SentencePiece's tokenizers (Metaspace, or a Prepend normalizer)
    would write a space before a text that they get alone. If one token of the whole holds the end of `before` and the
    beginning of `text`, the text is tokenized by itself, without that space, because a policy that has read the tokens
    of `before` writes the text in tokens of its own.

    Args:
        text: the text.
        tokenizer: the model's tokenizer, loaded.
        before: the text up to there, or its end; "" begins the sequence; None if it is not known.
    """
    if before != "":
        for context in (*([before[-_CONTEXT_LENGTH:]] if before else []), *_CONTEXTS):
            start, whole = _encode([context, context + text], tokenizer, add_special_tokens=False)
            if whole[: len(start)] == start:
                return whole[len(start) :]
    return _encode([text], tokenizer, add_special_tokens=False)[0]


def encode_completion(text: str, tokenizer: Tokenizer, *, before: str = "", is_truncated: bool = False) -> list[int]:
    """Return the token ids of a completion that follows a prompt: without start tokens, with one EOS at the end.

    White space after an EOS in the text, which many chat templates write, is dropped. A truncated text gets no EOS. See
    `encode_continuation` for `before`, the text of the prompt.

    Raises:
        ConfigError: the tokenizer has no EOS token.
    """
    eos = eos_of(tokenizer)
    ids = encode_continuation(text, tokenizer, before)
    if is_truncated:
        return ids
    if eos in ids:
        last = len(ids) - 1 - ids[::-1].index(eos)
        if not tokenizer.decode(ids[last + 1 :], skip_special_tokens=False).strip():
            return ids[: last + 1]
    return [*ids, eos]


def eos_of(tokenizer: Tokenizer) -> int:
    """Return the id of the EOS token. Raises ConfigError without one."""
    if tokenizer.eos_token_id is None:
        raise ConfigError("the tokenizer has no EOS token, so no completion can end")
    return tokenizer.eos_token_id


def _encode(texts: list[str], tokenizer: Tokenizer, *, add_special_tokens: bool) -> list[list[int]]:
    return [list(ids) for ids in tokenizer(texts, add_special_tokens=add_special_tokens)["input_ids"]] if texts else []
