"""Examples for supervised fine-tuning: a token sequence with the mask of trained tokens."""

from dataclasses import dataclass, field

import numpy as np

from rlhf_data.chat.conversation import encode_answer, encode_conversation
from rlhf_data.chat.input_template import InputTemplate
from rlhf_data.chat.messages import answer_messages, row_messages, row_tools
from rlhf_data.chat.tokens import Tokenizer, encode_completion, encode_prompts
from rlhf_data.errors import ConfigError, DataError
from rlhf_data.images.files import ImageRef
from rlhf_data.records import freeze_arrays
from rlhf_data.rows.row import Row


@dataclass(frozen=True, slots=True)
class SftExample:
    """A token sequence with its loss mask.

    Attributes:
        example_id: the row's id, `<file name>:<line>`.
        token_ids: [L] int32, prompt and completion, or a conversation, with one EOS at the end.
        loss_mask: [L] bool, True for trained tokens, including the EOS.
        images: where the images are whose tokens the sequence has, in order. Their pixels are read when they are used.
    """

    example_id: str
    token_ids: np.ndarray
    loss_mask: np.ndarray
    images: tuple[ImageRef, ...] = field(default=(), kw_only=True)

    def __post_init__(self) -> None:
        freeze_arrays(self, token_ids=np.int32, loss_mask=np.bool_)
        if self.token_ids.shape != self.loss_mask.shape:
            raise DataError(f"{self.example_id}: {self.token_ids.shape} tokens with a mask of {self.loss_mask.shape}")
        if not self.loss_mask.any():
            raise DataError(f"{self.example_id}: no token is trained")

    @property
    def num_tokens(self) -> int:
        """Number of tokens, L."""
        return len(self.token_ids)


@dataclass(frozen=True, slots=True, kw_only=True)
class SftEncoder(InputTemplate):
    """Turns a row into an example. Picklable, for worker processes.

    The prompt gets the same tokens as in generation (`rlhf_data.prompts.load_prompts`). The completion continues it
    (`rlhf_data.chat.tokens.encode_continuation`) and ends with one EOS, unless the row says that it was truncated
    (`Row.is_truncated`). With the chat template, `rlhf_data.chat.conversation.encode_conversation` decides which tokens
    are trained.

    Attributes, in addition to those of `InputTemplate`:
        input_key: the key of the prompt: text, or a list of messages with `apply_chat_template`.
        output_key: the key of the completion: text, or messages with `apply_chat_template`. None if the input holds
            everything: a conversation that ends with the assistant's answer, or a text for pretraining.
        multiturn: train every answer of a conversation; otherwise only the last.
        pretrain: train every token except the first, which has no prediction.

    Raises:
        ConfigError: options that exclude each other or do not suit the tokenizer.
        DataError: when called with a row that cannot be used.
    """

    input_key: str = "input"
    output_key: str | None = "output"
    multiturn: bool = False
    pretrain: bool = False

    def __post_init__(self) -> None:
        InputTemplate.__post_init__(self)
        if self.multiturn and (self.pretrain or not self.apply_chat_template):
            message = (
                "``multiturn`` trains every answer of a conversation: it needs the chat template and excludes pretrain"
            )
            raise ConfigError(message, hint="add ``apply_chat_template``, or leave ``multiturn`` out")
        if self.output_key is None and not (self.pretrain or self.apply_chat_template):
            message = "without ``output_key`` nothing tells the prompt from what is to be learned"
            hint = "give ``output_key``, ``apply_chat_template`` for conversations,"
            raise ConfigError(message, hint=f"{hint} or ``SftEncoder.pretrain`` for plain text")

    def __call__(self, row: Row) -> SftExample:
        """Return the example of a row."""
        if self.apply_chat_template:
            messages = row_messages(row, self.input_key)
            options = {"all_turns": self.multiturn, "tools": row_tools(row, self.tools_key)}
            if self.output_key is None:
                ids, mask = encode_conversation(row, messages, self.tokenizer, **options)
            else:
                answer = answer_messages(row, self.output_key)
                ids, mask = encode_answer(row, messages, answer, self.tokenizer, **options)
        elif self.output_key is not None:
            answer = self.plain_text(row, self.output_key)
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
    """Return token ids [L] int32 and loss mask [L] bool of a prompt, which may be empty, and its answer."""
    [prompt_ids] = encode_prompts([prompt], tokenizer, has_special_tokens=False)
    answer_ids = encode_completion(answer, tokenizer, before=prompt, is_truncated=row.is_truncated)
    ids = np.array([*prompt_ids, *answer_ids], np.int32)
    # The first token has no prediction, so it cannot be trained even if the prompt is empty.
    return ids, np.arange(len(ids)) >= max(len(prompt_ids), 1)
