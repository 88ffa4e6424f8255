"""Options of data: which rows are read, and how they become tokens."""

from rlhf_data.options import sections
from rlhf_data.options.declare import flag
from rlhf_data.options.sections import (
    SOURCES,
    AnswerKeySection,
    ChatTemplateSection,
    ChosenKeySection,
    CompletionSection,
    ImageSection,
    InputSection,
    PlaceholderSection,
)
from rlhf_rollout.commands.sections import PromptSection as RolloutPromptSection


class PromptSection(ImageSection, RolloutPromptSection):
    """Prompts with reference answers, for training and for evaluation."""

    eval_data: str | None = flag(
        None,
        "held-out prompts for evaluation, never trained on: data files, comma-separated, or `builtin`",
        aliases=["eval_dataset"],
    )
    source_key: str | None = flag(
        None, "key of the data source in rows of --eval_data: results are reported per source; None: per file"
    )


class ExampleSection(sections.ExampleSection):
    """Examples to train on, for every command that trains on fixed examples."""

    dataset_probs: str | None = flag(
        None, "one probability per source of --dataset, comma-separated; None: read one source after the other"
    )
    eval_dataset: str | None = flag(None, f"held-out examples: {SOURCES}")
    eval_split: str = flag("test", "split of --eval_dataset, for data sets that have splits")
    streaming: bool = flag(
        False, "read data sets of the `datasets` library row by row, without copying them into its cache"
    )
    data_num_workers: int = flag(0, "processes that tokenize; 0: the command's own process", ge=0)
    data_cache: str | None = flag(
        None, "folder in which tokenized examples are stored, and reused for the same data, tokenizer and options"
    )


class DemonstrationSection(ImageSection, CompletionSection, ChatTemplateSection, ExampleSection):
    """Prompts with completions."""


class PairSection(ImageSection, ChosenKeySection, ChatTemplateSection, ExampleSection):
    """Two answers to a prompt."""


class MarginPairSection(PairSection):
    """Adds the margin of a pair."""

    margin_key: str = flag("margin", "with --margin_loss: key of the margin, how much better the preferred answer is")


class VerdictSection(ImageSection, AnswerKeySection, InputSection, ChatTemplateSection, ExampleSection):
    """Answers that were judged one by one."""

    label_key: str = flag("label", "key of the verdict in a row: true or false, 1 or 0")


class StepSection(PlaceholderSection, ExampleSection):
    """Solutions whose steps were judged."""

    input_key: str = flag(
        "input",
        "key of the text with problem and solution, and a placeholder after each step; or of a list of texts that each"
        " end with a step",
    )
    label_key: str = flag("label", "key of the list of labels, one per step: numbers from 0 to 1, or --reward_tokens")
    reward_tokens: tuple[str, str] = flag(("+", "-"), "texts of one token each that stand for a good and a bad step")
