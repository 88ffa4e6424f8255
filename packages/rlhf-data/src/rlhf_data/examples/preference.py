"""Preference data: pairs of answers, single answers with a verdict, and solutions with a verdict per step."""

from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from rlhf_data.chat.conversation import encode_answer
from rlhf_data.chat.input_template import InputTemplate
from rlhf_data.chat.messages import answer_messages, joined_messages, row_messages, row_tools
from rlhf_data.chat.tokens import Tokenizer, encode_continuation, encode_prompts
from rlhf_data.errors import ConfigError, DataError
from rlhf_data.examples.sft import SftEncoder, SftExample, completed
from rlhf_data.images.files import ImageRef
from rlhf_data.records import freeze_arrays
from rlhf_data.rows.row import Row, kind_of

# Starts an answer in Anthropic's HH dialogues, which hold prompt and answer in one text.
_ANSWER_MARK = "\n\nAssistant:"
_TEXT_LABEL_HINT = (
    "for rows in the form of Math-Shepherd, whose labels are text, use ``open_sources.preset=math_shepherd``"
)
_VERDICTS = {"true": True, "1": True, "1.0": True, "false": False, "0": False, "0.0": False}


@dataclass(frozen=True, slots=True)
class PreferenceExample:
    """Two answers to one prompt, one of them preferred.

    Attributes:
        example_id: the row's id.
        chosen: the prompt with the preferred answer and one EOS. Its mask is True for the answer.
        rejected: the same prompt with the other answer.
        margin: how much better the chosen answer is; None if the data does not say.
    """

    example_id: str
    chosen: SftExample
    rejected: SftExample
    margin: float | None = None

    def __post_init__(self) -> None:
        if self.margin is not None and not np.isfinite(self.margin):
            raise DataError(f"{self.example_id}: the margin must be finite, got {self.margin}")

    @property
    def num_tokens(self) -> int:
        """Tokens of both sequences."""
        return self.chosen.num_tokens + self.rejected.num_tokens

    @property
    def images(self) -> tuple[ImageRef, ...]:
        """The images of the prompt."""
        return self.chosen.images


@dataclass(frozen=True, slots=True)
class UnpairedExample(SftExample):
    """One answer with a verdict, `is_desirable`. The answer and its EOS are trained."""

    is_desirable: bool


@dataclass(frozen=True, slots=True)
class ProcessExample:
    """A solution with a label per step.

    Attributes:
        example_id: the row's id.
        token_ids: [L] int32, the problem and the solution, with a placeholder token after each step.
        positions: [n] int32, ascending indices of the placeholders. The model's output there is its verdict.
        labels: [n] float32, the probability that the step is good; 0.0 or 1.0 for hard labels.
    """

    example_id: str
    token_ids: np.ndarray
    positions: np.ndarray
    labels: np.ndarray

    def __post_init__(self) -> None:
        freeze_arrays(self, token_ids=np.int32, positions=np.int32, labels=np.float32)
        if self.positions.shape != self.labels.shape or not len(self.positions):
            found = f"{self.positions.size} steps with {self.labels.size} labels"
            raise DataError(f"{self.example_id}: {found}; there must be one label per step, and at least one step")
        if self.positions[0] < 0 or self.positions[-1] >= len(self.token_ids) or (np.diff(self.positions) < 1).any():
            raise DataError(f"{self.example_id}: the steps' positions must ascend within {len(self.token_ids)} tokens")
        if not ((self.labels >= 0) & (self.labels <= 1)).all():
            raise DataError(f"{self.example_id}: the labels of steps must be from 0 to 1, got {self.labels.tolist()}")

    @property
    def num_tokens(self) -> int:
        """Number of tokens, L."""
        return len(self.token_ids)


@dataclass(frozen=True, slots=True, kw_only=True)
class PreferenceEncoder(InputTemplate):
    """Turns a row into a pair. Picklable, for worker processes.

    With `prompt_key`, the prompt is text (or messages, with the chat template) and the answers are texts (or lists of
    messages that continue the prompt). Without it, both answers contain the prompt: either as lists of messages that
    differ only in the last one, or as texts, in which everything up to the last paragraph that begins with "Assistant:"
    is the prompt. A text without such a paragraph is an answer to an empty prompt.

    Attributes, in addition to those of `InputTemplate`:
        prompt_key: the key of the prompt, or None.
        chosen_key: the key of the preferred answer.
        rejected_key: the key of the other answer.
        margin_key: the key of a number that says how much better the preferred answer is; None for no margins.

    Raises:
        ConfigError: options that exclude each other or do not suit the tokenizer.
        DataError: when called with a row that cannot be used, such as one with two equal answers.
    """

    prompt_key: str | None = None
    chosen_key: str = "chosen"
    rejected_key: str = "rejected"
    margin_key: str | None = None

    def __post_init__(self) -> None:
        InputTemplate.__post_init__(self)
        if self.input_template is not None and self.prompt_key is None:
            raise ConfigError("``input_template`` has no effect without ``prompt_key``", hint="give ``prompt_key``")

    def __call__(self, row: Row) -> PreferenceExample:
        """Return the pair of a row."""
        make = self._conversations if self.apply_chat_template else self._texts
        (chosen, rejected) = make(row)
        if np.array_equal(chosen[0], rejected[0]):
            raise DataError(f"{row.origin}: `{self.chosen_key}` and `{self.rejected_key}` are the same")
        margin = None if self.margin_key is None else _number(row, self.margin_key, row.cell(self.margin_key))
        pair = (SftExample(row.row_id, ids, mask) for ids, mask in (chosen, rejected))
        return PreferenceExample(row.row_id, *pair, margin)

    def _conversations(self, row: Row) -> list[tuple[np.ndarray, np.ndarray]]:
        prompt = [] if self.prompt_key is None else row_messages(row, self.prompt_key)
        keys = (self.chosen_key, self.rejected_key)
        for key in keys:
            if not prompt and not isinstance(row.cell(key), list):
                message = f"{row.origin}: `{key}` is text, which has no messages for the chat template"
                raise DataError(message, hint="give ``prompt_key``, or leave out ``apply_chat_template``")
        answers = [answer_messages(row, key) for key in keys]
        chosen, rejected = (joined_messages(prompt, answer) for answer in answers)
        if chosen[:-1] != rejected[:-1]:
            raise DataError(f"{row.origin}: the two conversations differ before their last message")
        tools = row_tools(row, self.tools_key)
        return [encode_answer(row, prompt, answer, self.tokenizer, tools=tools) for answer in answers]

    def _texts(self, row: Row) -> list[tuple[np.ndarray, np.ndarray]]:
        texts = [self.plain_text(row, key) for key in (self.chosen_key, self.rejected_key)]
        if self.prompt_key is not None:
            prompt = self.render(row, self.prompt_key)
            return [completed(row, prompt, text, self.tokenizer) for text in texts]
        prompts, marks, answers = zip(*(text.rpartition(_ANSWER_MARK) for text in texts), strict=True)
        if prompts[0] != prompts[1] or marks[0] != marks[1]:
            raise DataError(f"{row.origin}: the two dialogues differ before their last answer")
        if not all(answer.strip() for answer in answers):
            raise DataError(f"{row.origin}: an answer is empty")
        return [completed(row, prompts[0] + marks[0], answer, self.tokenizer) for answer in answers]


@dataclass(frozen=True, slots=True, kw_only=True)
class UnpairedEncoder(SftEncoder):
    """Turns a row into an answer with a verdict.

    Attributes, in addition to those of `SftEncoder`:
        label_key: the key of the verdict: true or false, 1 or 0.

    Raises:
        ConfigError: options that train more than the answer; and as `SftEncoder`.
        DataError: when called with a row that cannot be used.
    """

    label_key: str = "label"

    def __post_init__(self) -> None:
        SftEncoder.__post_init__(self)
        if self.multiturn or self.pretrain:
            raise ConfigError("a verdict is about one answer: multiturn and pretrain do not go with it")

    def __call__(self, row: Row) -> UnpairedExample:
        """Return the answer of a row with its verdict."""
        value = row.cell(self.label_key)
        verdict = _VERDICTS.get(str(value).strip().lower()) if isinstance(value, str | bool | int | float) else None
        if verdict is None:
            raise DataError(f"{row.origin}: `{self.label_key}` must be true or false, 1 or 0, got {value!r}")
        example = SftEncoder.__call__(self, row)
        return UnpairedExample(example.example_id, example.token_ids, example.loss_mask, verdict)


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessEncoder:
    """Turns a row into steps with labels.

    The row has a text with a placeholder after each step, or a list of texts that each end with a step, and a list of
    labels.

    Attributes:
        tokenizer: the model's tokenizer, loaded.
        placeholder: a text that is one token, such as a special token or "ки".
        input_key: the key of the text with the problem and its solution, or of its parts.
        label_key: the key of the labels: numbers from 0 to 1, booleans, or the two `reward_tokens`.
        reward_tokens: the labels of a good and of a bad step.
        input_template: text with one `{}` for the input; everything else in it is literal.

    Raises:
        ConfigError: a placeholder that is not one token.
        DataError: when called with a row that cannot be used, such as one with more labels than placeholders.
    """

    tokenizer: Tokenizer = field(repr=False)
    placeholder: str
    input_key: str = "input"
    label_key: str = "label"
    reward_tokens: tuple[str, str] = ("+", "-")
    input_template: str | None = None

    def __post_init__(self) -> None:
        self._template()
        ids = self._bare(self.placeholder)
        if len(ids) != 1:
            hint = "use a special token of the tokenizer, or a character that is one token"
            raise ConfigError(f"the placeholder {self.placeholder!r} is {len(ids)} tokens, not one", hint=hint)

    def __call__(self, row: Row) -> ProcessExample:
        """Return the steps of a row with their labels."""
        text = self._template().render(self._joined(row), self.input_key)
        head, *steps = text.split(self.placeholder)
        labels = row.cell(self.label_key)
        if not isinstance(labels, list):
            message = f"{row.origin}: `{self.label_key}` must be a list of labels, got {kind_of(labels)}"
            raise DataError(message, hint=_TEXT_LABEL_HINT if isinstance(labels, str) else None)
        if len(labels) != len(steps) or not steps:
            raise DataError(f"{row.origin}: {len(steps)} placeholders {self.placeholder!r} and {len(labels)} labels")
        [ids, whole] = encode_prompts([head, text], self.tokenizer, has_special_tokens=False)
        [placeholder] = self._bare(self.placeholder)
        positions = np.flatnonzero(np.array(whole) == placeholder).tolist()
        if len(positions) == len(steps):
            ids = whole
        else:  # the placeholder merges with a neighbour: tokenize the pieces between placeholders
            positions = []
            for step in steps:
                positions.append(len(ids))
                ids += [placeholder, *encode_continuation(step, self.tokenizer, self.placeholder)]
        values = [self._label(row, label) for label in labels]
        return ProcessExample(row.row_id, np.array(ids), np.array(positions), np.array(values))

    def _template(self) -> InputTemplate:
        return InputTemplate(tokenizer=self.tokenizer, input_template=self.input_template)

    def _joined(self, row: Row) -> Row:
        """Return the row with a placeholder after each of several texts."""
        parts = row.cell(self.input_key)
        if not isinstance(parts, list):
            return row
        if not all(isinstance(part, str) for part in parts):
            raise DataError(f"{row.origin}: `{self.input_key}` must be text, or a list of texts that end with a step")
        text = "".join(part + self.placeholder for part in parts)
        return replace(row, values={**row.values, self.input_key: text})

    def _bare(self, text: str) -> list[int]:
        return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])

    def _label(self, row: Row, label: Any) -> float:
        if isinstance(label, str):
            good, bad = self.reward_tokens
            if label not in (good, bad):
                raise DataError(f"{row.origin}: a label must be {good!r} or {bad!r}, or a number, got {label!r}")
            return float(label == good)
        return float(label) if isinstance(label, bool) else _number(row, self.label_key, label)


def _number(row: Row, key: str, value: Any) -> float:
    try:
        if isinstance(value, bool) or not isinstance(value, str | int | float):
            raise ValueError
        return float(value)
    except ValueError:
        raise DataError(f"{row.origin}: `{key}` must be a number, got {value!r}") from None
