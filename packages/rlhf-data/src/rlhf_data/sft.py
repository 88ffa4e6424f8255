"""Examples for supervised training: prompt and completion as one token sequence, of which the completion is trained."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from rlhf_data.chat import (
    Tokenizer,
    check_template,
    encode_completion,
    render_chat,
    render_prompts,
    row_messages,
)
from rlhf_data.errors import ConfigError, DataError, with_hint
from rlhf_data.sources import Row, read_rows


@dataclass(frozen=True, slots=True)
class SftExample:
    """One prompt with the completion to learn.

    Attributes:
        example_id: `<file name>:<line>`.
        token_ids: [L] int32: prompt, completion, one EOS.
        loss_mask: [L] bool: True for the completion and its EOS.
    """

    example_id: str
    token_ids: np.ndarray
    loss_mask: np.ndarray

    def __post_init__(self) -> None:
        for name, dtype in (("token_ids", np.int32), ("loss_mask", np.bool_)):
            array = np.array(getattr(self, name), dtype=dtype)
            array.flags.writeable = False
            object.__setattr__(self, name, array)
        if self.token_ids.ndim != 1 or self.token_ids.shape != self.loss_mask.shape:
            raise DataError(f"{self.example_id}: {self.token_ids.shape} tokens with a mask of {self.loss_mask.shape}")
        if not self.loss_mask.any():
            raise DataError(f"{self.example_id}: no token is trained")

    @property
    def num_tokens(self) -> int:
        """L."""
        return len(self.token_ids)


@dataclass(frozen=True, slots=True)
class SftSet:
    """The usable examples of a data file, and what became of the rest.

    Attributes:
        examples: in the order of the file.
        num_rows: rows read; always `len(examples) + num_too_long`.
        num_too_long: rows left out because they have more tokens than the limit.
        longest_tokens: tokens of the longest example that was read, kept or not.
    """

    examples: tuple[SftExample, ...]
    num_rows: int
    num_too_long: int
    longest_tokens: int


def load_sft_examples(
    path: str | Path,
    tokenizer: Tokenizer,
    *,
    input_key: str = "input",
    output_key: str = "output",
    apply_chat_template: bool = False,
    input_template: str | None = None,
    max_len: int = 2048,
    max_samples: int | None = None,
) -> SftSet:
    """Load prompt and completion rows.

    The prompt gets exactly the tokens it has in generation (`rlhf_data.prompts.load_prompts`); the completion is
    tokenized apart from it and ends with one EOS. With the chat template the completion is what the template writes
    after the prompt for an assistant's message.

    Args:
        path: see `rlhf_data.sources.read_rows`.
        tokenizer: the model's, loaded.
        input_key: the key of the prompt: text, or a list of messages with `apply_chat_template`.
        output_key: the key of the completion, a text.
        apply_chat_template: render prompt and completion with the tokenizer's chat template.
        input_template: text with one `{}` for the input; everything else in it is literal.
        max_len: tokens of prompt, completion and EOS. A longer example is left out and counted, never cut.
        max_samples: read only that many rows.

    Raises:
        DataError: see `read_rows`; a missing key or a broken cell (file and line); a chat template that does not
            repeat the prompt before the answer; every example too long.
        ConfigError: options that do not fit each other or the tokenizer.
    """
    if max_len < 2:
        raise ConfigError(f"max_len must be at least 2 (a prompt and an EOS), got {max_len}")
    check_template(tokenizer, apply_chat_template=apply_chat_template, input_template=input_template)
    rows = read_rows(path, max_rows=max_samples)
    texts, prompt_ids = render_prompts(
        rows, tokenizer, input_key=input_key, apply_chat_template=apply_chat_template, input_template=input_template
    )
    examples, longest = [], 0
    for row, text, prompt in zip(rows, texts, prompt_ids, strict=True):
        answer = row.text(output_key)
        if not answer.strip():
            raise DataError(f"{row.origin}: `{output_key}` is empty")
        if apply_chat_template:
            answer = _assistant_text(row, input_key, answer, text, tokenizer)
        completion = encode_completion(answer, tokenizer)
        longest = max(longest, len(prompt) + len(completion))
        if len(prompt) + len(completion) <= max_len:
            mask = np.arange(len(prompt) + len(completion)) >= len(prompt)
            examples.append(SftExample(f"{row.path.name}:{row.line}", np.array(prompt + completion), mask))
    if not examples:
        raise DataError(
            with_hint(
                f"all {len(rows)} examples of {path} are longer than max_len {max_len}",
                f"the longest has {longest} tokens: raise --max_len",
            )
        )
    return SftSet(tuple(examples), len(rows), len(rows) - len(examples), longest)


def _assistant_text(row: Row, input_key: str, answer: str, prompt_text: str, tokenizer: Tokenizer) -> str:
    messages = [*row_messages(row, input_key), {"role": "assistant", "content": answer}]
    full = render_chat(messages, tokenizer, origin=row.origin, add_generation_prompt=False)
    if not full.startswith(prompt_text):
        raise DataError(
            with_hint(
                f"{row.origin}: the chat template does not write the prompt the same way before an answer",
                "train without --apply_chat_template, or use a tokenizer whose template only appends",
            )
        )
    return full[len(prompt_text) :]
