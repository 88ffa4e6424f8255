"""Examples for supervised training: a sequence of tokens, and which of them are trained."""

from dataclasses import dataclass

import numpy as np

from rlhf_data.chat import (
    InputTemplate,
    Tokenizer,
    encode_completion,
    encode_conversation,
    encode_prompts,
    row_messages,
)
from rlhf_data.errors import ConfigError, DataError
from rlhf_data.records import freeze_arrays
from rlhf_data.rows import Row


@dataclass(frozen=True, slots=True)
class SftExample:
    """One sequence to learn from.

    Attributes:
        example_id: of its row: `<file name>:<line>`.
        token_ids: [L] int32: prompt, completion, one EOS; or a conversation that ends with one.
        loss_mask: [L] bool: True for what is trained, which includes the EOS.
    """

    example_id: str
    token_ids: np.ndarray
    loss_mask: np.ndarray

    def __post_init__(self) -> None:
        freeze_arrays(self, token_ids=np.int32, loss_mask=np.bool_)
        if self.token_ids.shape != self.loss_mask.shape:
            raise DataError(f"{self.example_id}: {self.token_ids.shape} tokens with a mask of {self.loss_mask.shape}")
        if not self.loss_mask.any():
            raise DataError(f"{self.example_id}: no token is trained")

    @property
    def num_tokens(self) -> int:
        """L."""
        return len(self.token_ids)


@dataclass(frozen=True, slots=True, kw_only=True)
class SftEncoder(InputTemplate):
    """Makes an example of a row. Picklable, so that worker processes can do it.

    The prompt gets exactly the tokens it has in generation (`rlhf_data.prompts.load_prompts`); the completion is
    tokenized apart from it and ends with one EOS, unless the row says that it was cut (`Row.is_truncated`). With the
    chat template the trained tokens are those of `rlhf_data.chat.encode_conversation`.

    Attributes, beside those of `InputTemplate`:
        input_key: the key of the prompt: text, or a list of messages with `apply_chat_template`.
        output_key: the key of the completion, a text. None: the input is all there is, a conversation that ends with
            the assistant's answer, or a text to train on whole.
        multiturn: train every answer of a conversation, not the last alone.
        pretrain: train every token but the first, which nothing predicts.

    Raises:
        ConfigError: options that do not fit each other or the tokenizer.
        DataError: called with a row that cannot be used.
    """

    input_key: str = "input"
    output_key: str | None = "output"
    multiturn: bool = False
    pretrain: bool = False

    def __post_init__(self) -> None:
        InputTemplate.__post_init__(self)
        if self.multiturn and (self.pretrain or not self.apply_chat_template):
            message = (
                "multiturn trains every answer of a conversation: it needs the chat template and excludes pretrain"
            )
            raise ConfigError(message, hint="add --apply_chat_template, or leave --multiturn out")
        if self.output_key is None and not (self.pretrain or self.apply_chat_template):
            hint = "give --output_key, --apply_chat_template for conversations, or --pretrain_mode for plain text"
            raise ConfigError("without an output_key nothing tells the prompt from what is to be learned", hint=hint)

    def __call__(self, row: Row) -> SftExample:
        """Return the example of a row."""
        if self.apply_chat_template:
            messages = row_messages(row, self.input_key)
            if self.output_key is not None:
                messages = [*messages, {"role": "assistant", "content": row.filled(self.output_key)}]
            ids, mask = encode_conversation(row, messages, self.tokenizer, all_turns=self.multiturn)
        elif self.output_key is not None:
            answer = row.filled(self.output_key)
            ids, mask = completed(row, self.render(row, self.input_key), answer, self.tokenizer)
        else:
            [ids] = encode_prompts([self.render(row, self.input_key)], self.tokenizer, has_special_tokens=False)
            eos = self.tokenizer.eos_token_id
            if eos is not None and ids[-1:] != [eos] and not row.is_truncated:
                ids.append(eos)
            mask = np.ones(len(ids), bool)
        if self.pretrain:
            mask = np.arange(len(ids)) > 0
        return SftExample(row.row_id, ids, mask)


def completed(row: Row, prompt: str, answer: str, tokenizer: Tokenizer) -> tuple[np.ndarray, np.ndarray]:
    """Return tokens and mask of a prompt, which may be empty, and the answer to it."""
    [prompt_ids] = encode_prompts([prompt], tokenizer, has_special_tokens=False)
    answer_ids = encode_completion(answer, tokenizer, is_truncated=row.is_truncated)
    ids = np.array([*prompt_ids, *answer_ids], np.int32)
    # Nothing predicts the first token, even where no prompt precedes it.
    return ids, np.arange(len(ids)) >= max(len(prompt_ids), 1)
