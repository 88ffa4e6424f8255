"""What is read, and how a row becomes tokens."""

from typing import Annotated, ClassVar

from pydantic import Field

from rlhf_cli.config.base import Aliases, Section
from rlhf_data.errors import ConfigError

_SOURCES = (
    ".jsonl, .json, .csv (also .gz), .parquet or .arrow files, saved data set folders, loading scripts and hub names,"
    " with commas; `name@subset`"
)


class DataSection(Section):
    """How rows become text; what all commands have in common."""

    TITLE: ClassVar[str] = "data"

    input_template: str | None = Field(
        None, description="text with one `{}` where the input goes, for models without a chat template"
    )
    max_samples: int | None = Field(None, ge=1, description="read at most that many rows of each source; None: all")
    skip_bad_rows: bool = Field(
        False, description="leave out all rows that cannot be used; else more than 1 % of them end the run"
    )


class PromptSection(DataSection):
    """Prompts with labels, for training and for evaluation."""

    prompt_data: str | None = Field(None, description=f"training prompts: {_SOURCES}; `builtin` for those that ship")
    prompt_data_probs: str | None = Field(
        None, description="a probability for each source of --prompt_data, with commas; None: one after the other"
    )
    eval_data: Annotated[str | None, Aliases(("eval_dataset",))] = Field(
        None, description="held-out prompts, never trained on: data files, with commas, or `builtin`"
    )
    input_key: str = Field("input", description="key of the prompt in a row: text, or a list of messages")
    apply_chat_template: bool = Field(False, description="render prompts with the tokenizer's chat template")
    source_key: str | None = Field(
        None,
        description="key of the data source in a row of --eval_data, by which results are told apart; None: by file",
    )
    label_key: str | None = Field(
        None, description="key of the reference answer in a row, handed to the reward function; None: no labels"
    )
    prompt_max_len: int = Field(
        1024, ge=1, description="tokens of a prompt at most; longer ones are left out and counted, never cut"
    )


class ExampleSection(DataSection):
    """Fixed examples; what all offline commands have in common."""

    dataset: str | None = Field(None, description=f"training examples: {_SOURCES}")
    dataset_probs: str | None = Field(
        None, description="a probability for each source of --dataset, with commas; None: one after the other"
    )
    dataset_split: str = Field("train", description="split of --dataset, where a data set has splits")
    eval_dataset: str | None = Field(None, description="held-out examples: sources as --dataset takes them")
    eval_split: str = Field("test", description="split of --eval_dataset, where a data set has splits")
    max_len: int = Field(
        2048, ge=2, description="tokens of a sequence at most; longer examples are left out and counted, never cut"
    )
    streaming: bool = Field(
        False, description="read data sets of the `datasets` library without a copy of them in its cache"
    )
    data_num_workers: int = Field(0, ge=0, description="processes that tokenize; 0: the command's own")
    data_cache: str | None = Field(
        None, description="folder that keeps tokenized examples, found again for the same data, tokenizer and options"
    )


class ChatSection(ExampleSection):
    """Adds the chat template."""

    apply_chat_template: bool = Field(False, description="render examples with the tokenizer's chat template")
    tokenizer_chat_template: str | None = Field(
        None, description="chat template in the place of the tokenizer's, and saved with the model: Jinja, or its file"
    )


class DemonstrationSection(ChatSection):
    """Prompts with completions."""

    input_key: str = Field("input", description="key of the prompt in a row: text, or a list of messages")
    output_key: str | None = Field(
        "output",
        description="key of the completion in a row; None: the input is a conversation, or text to train on whole",
    )
    multiturn: bool = Field(False, description="train every answer of a conversation, not the last alone")
    pretrain_mode: bool = Field(False, description="train every token, not the completion's alone")


class PairSection(ChatSection):
    """Two answers to a prompt."""

    prompt_key: str | None = Field(
        None, description="key of the prompt: text or messages; None: both answers are whole dialogues that hold it"
    )
    chosen_key: str = Field("chosen", description="key of the preferred answer")
    rejected_key: str = Field("rejected", description="key of the other answer")


class MarginPairSection(PairSection):
    """Adds by how much one is better."""

    margin_key: str = Field("margin", description="key of how much the preferred answer is better; with --margin_loss")


class VerdictSection(ChatSection):
    """Answers that were judged one by one."""

    input_key: str = Field("input", description="key of the prompt in a row: text, or a list of messages")
    output_key: str = Field("output", description="key of the answer in a row")
    label_key: str = Field("label", description="key of the verdict in a row: true or false, 1 or 0")


class StepSection(ExampleSection):
    """Solutions whose steps were judged."""

    input_key: str = Field(
        "input", description="key of problem and solution, a text with a placeholder after each step"
    )
    label_key: str = Field(
        "label", description="key of the list of labels, one a step: numbers from 0 to 1, or --reward_tokens"
    )
    placeholder_token: str | None = Field(None, description="text after each step: one token, such as a special token")
    reward_tokens: tuple[str, str] = Field(
        ("+", "-"), description="texts of one token each that stand for a good and a bad step"
    )


def parse_probs(option: str, text: str | None) -> tuple[float, ...] | None:
    """Return the probabilities of a list with commas. Raises ConfigError for what is no number."""
    try:
        return None if text is None else tuple(float(part) for part in text.split(","))
    except ValueError:
        raise ConfigError(f"--{option} is {text}; it must be numbers with commas between them") from None
