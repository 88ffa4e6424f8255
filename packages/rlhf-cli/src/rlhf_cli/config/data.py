"""What is read, and how a row becomes tokens."""

from rlhf_data.options import flag
from rlhf_rollout.commands import sections
from rlhf_rollout.commands.sections import SOURCES, ChatSection, InputSection


class PromptSection(sections.PromptSection):
    """Prompts with labels, for training and for evaluation."""

    eval_data: str | None = flag(
        None,
        "held-out prompts, which are never trained on: data files, with commas, or `builtin`",
        aliases=["eval_dataset"],
    )
    source_key: str | None = flag(
        None, "key of the data source in a row of --eval_data, by which results are told apart; None: by file"
    )


class ExampleSection(sections.ExampleSection):
    """Fixed examples; what all offline commands have in common."""

    dataset_probs: str | None = flag(
        None, "a probability for each source of --dataset, with commas; None: one source after the other"
    )
    eval_dataset: str | None = flag(None, f"held-out examples: {SOURCES}")
    eval_split: str = flag("test", "--eval_dataset: the split to read where a data set has splits")
    streaming: bool = flag(False, "read data sets of the `datasets` library without a copy of them in its cache")
    data_num_workers: int = flag(0, "processes that tokenize; 0: the command's own process", ge=0)
    data_cache: str | None = flag(
        None, "folder that keeps tokenized examples, reused for the same data, tokenizer and options"
    )


class TemplateSection(ExampleSection):
    """Adds a chat template that replaces the tokenizer's."""

    tokenizer_chat_template: str | None = flag(
        None, "chat template instead of the tokenizer's, saved with the model: Jinja, or the path of its file"
    )


class DemonstrationSection(InputSection, TemplateSection):
    """Prompts with completions."""

    output_key: str | None = flag(
        "output", "key of the completion in a row; None: the input is a conversation, or text to train on whole"
    )
    multiturn: bool = flag(False, "train every answer of a conversation, not only the last one")
    pretrain_mode: bool = flag(False, "train every token, not only those of the completion")


class PairSection(ChatSection, TemplateSection):
    """Two answers to a prompt."""

    prompt_key: str | None = flag(
        None, "key of the prompt: text or messages; None: both answers are whole dialogues that hold it"
    )
    chosen_key: str = flag("chosen", "key of the preferred answer")
    rejected_key: str = flag("rejected", "key of the other answer")


class MarginPairSection(PairSection):
    """Adds by how much one is better."""

    margin_key: str = flag("margin", "key of how much better the preferred answer is; with --margin_loss")


class VerdictSection(InputSection, TemplateSection):
    """Answers that were judged one by one."""

    output_key: str = flag("output", "key of the answer in a row")
    label_key: str = flag("label", "key of the verdict in a row: true or false, 1 or 0")


class StepSection(ExampleSection):
    """Solutions whose steps were judged."""

    input_key: str = flag("input", "key of problem and solution, a text with a placeholder after each step")
    label_key: str = flag("label", "key of the list of labels, one per step: numbers from 0 to 1, or --reward_tokens")
    placeholder_token: str | None = flag(None, "text after each step: one token, such as a special token")
    reward_tokens: tuple[str, str] = flag(("+", "-"), "texts of one token each that stand for a good and a bad step")
