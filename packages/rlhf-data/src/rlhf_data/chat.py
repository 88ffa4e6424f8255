"""From a row's input to the text and tokens of a prompt: chat template, input template, special tokens exactly once.

A tokenizer is a loaded Hugging Face tokenizer, or an object that behaves like one (`rlhf_data.testing.ByteTokenizer`).
"""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from rlhf_data.errors import ConfigError, DataError, with_hint
from rlhf_data.sources import Row

Messages = list[dict[str, Any]]

_PLACEHOLDER = "{}"


class Tokenizer(Protocol):
    """The part of a Hugging Face tokenizer that this package uses."""

    bos_token_id: int | None
    eos_token_id: int | None
    chat_template: Any

    def __call__(self, text: Any, *, add_special_tokens: bool = True) -> Mapping[str, Any]:
        """Return a mapping whose "input_ids" are the token ids of one text, or of each text of a list."""
        ...

    def decode(self, token_ids: Any, *, skip_special_tokens: bool = False) -> str:
        """Return the text of token ids."""
        ...

    def apply_chat_template(
        self, conversation: Any, *, tokenize: bool, add_generation_prompt: bool, **options: Any
    ) -> Any:
        """Return the rendered conversation."""
        ...


def check_template(tokenizer: Tokenizer, *, apply_chat_template: bool, input_template: str | None) -> None:
    """Raise ConfigError unless the two ways to render an input fit each other and the tokenizer."""
    if apply_chat_template and input_template is not None:
        raise ConfigError(
            with_hint(
                "input_template has no effect when the chat template is applied",
                "give either --apply_chat_template or --input_template",
            )
        )
    if apply_chat_template and not getattr(tokenizer, "chat_template", None):
        raise ConfigError(
            with_hint(
                "the tokenizer has no chat template",
                "use an instruction-tuned model, or --input_template 'User: {}' without --apply_chat_template",
            )
        )
    if input_template is not None and input_template.count(_PLACEHOLDER) != 1:
        raise ConfigError(
            with_hint(
                f"input_template must contain `{{}}` exactly once, got {input_template!r}",
                "`{}` is where the input goes, as in 'Question: {} Answer: '",
            )
        )


def render_prompt(
    row: Row, tokenizer: Tokenizer, *, input_key: str, apply_chat_template: bool, input_template: str | None
) -> str:
    """Return the text of the prompt that asks for a response to a row.

    With the chat template: the row's input as one user message, or as it is when it already is a list of messages,
    followed by the generation prompt. Else the input put into `input_template`, in which all but `{}` is literal.

    Raises:
        DataError: a missing key, an input that is empty or of the wrong type, messages the template refuses.
    """
    if apply_chat_template:
        return render_chat(row_messages(row, input_key), tokenizer, origin=row.origin, add_generation_prompt=True)
    if isinstance(row.cell(input_key), list):
        raise DataError(
            with_hint(f"{row.origin}: `{input_key}` is a list of messages", "messages need --apply_chat_template")
        )
    text = _filled(row, input_key)
    return text if input_template is None else input_template.replace(_PLACEHOLDER, text)


def render_prompts(
    rows: Sequence[Row], tokenizer: Tokenizer, *, input_key: str, apply_chat_template: bool, input_template: str | None
) -> tuple[list[str], list[list[int]]]:
    """Return the prompt of each row as text and as token ids; see `render_prompt` and `encode_prompts`."""
    texts = [
        render_prompt(
            row, tokenizer, input_key=input_key, apply_chat_template=apply_chat_template, input_template=input_template
        )
        for row in rows
    ]
    return texts, encode_prompts(texts, tokenizer, has_special_tokens=apply_chat_template)


def row_messages(row: Row, key: str) -> Messages:
    """Return a row's input as messages: a list of messages as it is, text as one user message.

    Raises:
        DataError: an empty list, or a message without a text `role` and a text `content`.
    """
    value = row.cell(key)
    if not isinstance(value, list):
        return [{"role": "user", "content": _filled(row, key)}]
    if not value:
        raise DataError(f"{row.origin}: `{key}` is an empty list of messages")
    for index, message in enumerate(value):
        if not isinstance(message, dict) or not all(isinstance(message.get(part), str) for part in ("role", "content")):
            raise DataError(
                with_hint(
                    f"{row.origin}: message {index} of `{key}` needs a text `role` and a text `content`",
                    'a message looks like {"role": "user", "content": "..."}',
                )
            )
    return value


def render_chat(messages: Messages, tokenizer: Tokenizer, *, origin: str, add_generation_prompt: bool) -> str:
    """Return a conversation as the tokenizer's chat template writes it, special tokens included.

    Raises:
        DataError: the template refuses the messages; the text names `origin`.
    """
    try:
        # return_dict: from transformers 5 on the default is a dictionary.
        return tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=add_generation_prompt, return_dict=False
        )
    except Exception as error:  # a template is a program: it may raise anything
        raise DataError(f"{origin}: the chat template refuses the messages: {error}") from error


def encode_prompts(texts: Sequence[str], tokenizer: Tokenizer, *, has_special_tokens: bool) -> list[list[int]]:
    """Return the token ids of prompts, with the tokens that begin a text exactly once and none that end one.

    Args:
        texts: rendered prompts.
        tokenizer: a loaded tokenizer.
        has_special_tokens: True for the output of a chat template, which has written them itself.
    """
    texts = list(texts)
    if has_special_tokens:
        return _encode(texts, tokenizer, add_special_tokens=False)
    bos, eos = tokenizer.bos_token_id, tokenizer.eos_token_id
    bare_ids = _encode(texts, tokenizer, add_special_tokens=False)
    prompts = []
    for ids, bare in zip(_encode(texts, tokenizer, add_special_tokens=True), bare_ids, strict=True):
        # Some tokenizers also end a text: a prompt that is to be continued must not be ended.
        if ids and ids[-1] == eos and (not bare or bare[-1] != eos):
            ids = ids[:-1]
        # The text, or an input template, may begin with the token that the tokenizer adds.
        if bos is not None and ids[:2] == [bos, bos] and bare[:1] == [bos]:
            ids = ids[1:]
        prompts.append(ids)
    return prompts


def encode_completion(text: str, tokenizer: Tokenizer) -> list[int]:
    """Return the token ids of a completion that follows a prompt: no token begins it, one EOS ends it.

    White space after an EOS in the text, as chat templates write it, is left out.

    Raises:
        ConfigError: the tokenizer has no EOS token.
    """
    eos = tokenizer.eos_token_id
    if eos is None:
        raise ConfigError("the tokenizer has no EOS token, so no completion can end")
    ids = _encode([text], tokenizer, add_special_tokens=False)[0]
    if eos in ids:
        last = len(ids) - 1 - ids[::-1].index(eos)
        if not tokenizer.decode(ids[last + 1 :], skip_special_tokens=False).strip():
            return ids[: last + 1]
    return [*ids, eos]


def _encode(texts: list[str], tokenizer: Tokenizer, *, add_special_tokens: bool) -> list[list[int]]:
    return [list(ids) for ids in tokenizer(texts, add_special_tokens=add_special_tokens)["input_ids"]] if texts else []


def _filled(row: Row, key: str) -> str:
    text = row.text(key)
    if not text.strip():
        raise DataError(f"{row.origin}: `{key}` is empty")
    return text
