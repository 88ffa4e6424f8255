"""Options of data: which rows are read, and how they become tokens."""

from rlhf_data.options import flag
from rlhf_rollout.commands import sections
from rlhf_rollout.commands.sections import SOURCES, AnswerKeySection, ChatSection, InputSection, PairKeySection


class PromptSection(sections.PromptSection):
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


class TemplateSection(ExampleSection):
    """Adds a chat template that replaces the tokenizer's."""

    tokenizer_chat_template: str | None = flag(
        None, "chat template to use instead of the tokenizer's, saved with the model: Jinja text, or its file"
    )


class DemonstrationSection(InputSection, TemplateSection):
    """Prompts with completions."""

    output_key: str | None = flag(
        "output", "key of the completion in a row; None: the input is a whole conversation, or plain text to train on"
    )
    multiturn: bool = flag(False, "train on every answer of a conversation, not only on the last one")
    pretrain_mode: bool = flag(False, "train on every token, not only on those of the completion")


class PairSection(PairKeySection, ChatSection, TemplateSection):
    """Two answers to a prompt."""

    chosen_key: str = flag("chosen", "key of the preferred answer of a pair")


class MarginPairSection(PairSection):
    """Adds the margin of a pair."""

    margin_key: str = flag("margin", "with --margin_loss: key of the margin, how much better the preferred answer is")


class VerdictSection(AnswerKeySection, InputSection, TemplateSection):
    """Answers that were judged one by one."""

    label_key: str = flag("label", "key of the verdict in a row: true or false, 1 or 0")


class StepSection(ExampleSection):
    """Solutions whose steps were judged."""

    input_key: str = flag("input", "key of the text with problem and solution, and a placeholder after each step")
    label_key: str = flag("label", "key of the list of labels, one per step: numbers from 0 to 1, or --reward_tokens")
    placeholder_token: str | None = flag(None, "the placeholder after each step: one token, such as a special token")
    reward_tokens: tuple[str, str] = flag(("+", "-"), "texts of one token each that stand for a good and a bad step")
