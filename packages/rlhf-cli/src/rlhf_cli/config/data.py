"""What is read, and how a row becomes tokens."""

from typing import Annotated, ClassVar

from pydantic import Field

from rlhf_cli.config.base import Aliases, Section


class DataSection(Section):
    """How rows become prompts; what all commands have in common."""

    TITLE: ClassVar[str] = "data"

    input_key: str = Field("input", description="key of the prompt in a row: text, or a list of messages")
    apply_chat_template: bool = Field(False, description="render prompts with the tokenizer's chat template")
    input_template: str | None = Field(
        None, description="text with one `{}` where the input goes, for models without a chat template"
    )
    max_samples: int | None = Field(None, ge=1, description="read at most that many rows of each file; None: all")


class PromptSection(DataSection):
    """Prompts with labels, for training and for evaluation."""

    prompt_data: str | None = Field(
        None, description="training prompts: a .jsonl or .json file, or `builtin` for those that ship"
    )
    eval_data: Annotated[str | None, Aliases(("eval_dataset",))] = Field(
        None, description="held-out prompts, never trained on: files like --prompt_data, with commas, or `builtin`"
    )
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


class DemonstrationSection(DataSection):
    """Prompts with completions."""

    dataset: str | None = Field(None, description="training examples: a .jsonl or .json file")
    eval_dataset: str | None = Field(None, description="held-out examples: a file like --dataset")
    output_key: str = Field("output", description="key of the completion in a row")
    max_len: int = Field(
        2048, ge=2, description="tokens of prompt and completion at most; longer examples are left out and counted"
    )
