"""What is read, and how a row becomes tokens."""

from rlhf_data.options import Section, flag

_SOURCES = (
    ".jsonl, .json, .csv (also .gz), .parquet or .arrow files, saved data set folders, loading scripts and hub names,"
    " with commas; `name@subset`"
)


class DataSection(Section, title="data"):
    """How rows become text; what all commands have in common."""

    input_template: str | None = flag(
        None, "text with one `{}` where the input goes, for models without a chat template"
    )
    max_samples: int | None = flag(None, "read at most that many rows of each source; None: all", ge=1)
    skip_bad_rows: bool = flag(False, "leave out all rows that cannot be used; else more than 1 % of them end the run")


class PromptSection(DataSection):
    """Prompts with labels, for training and for evaluation."""

    prompt_data: str | None = flag(None, f"training prompts: {_SOURCES}; `builtin` for those that ship")
    prompt_data_probs: str | None = flag(
        None, "a probability for each source of --prompt_data, with commas; None: one after the other"
    )
    eval_data: str | None = flag(
        None, "held-out prompts, never trained on: data files, with commas, or `builtin`", aliases=["eval_dataset"]
    )
    input_key: str = flag("input", "key of the prompt in a row: text, or a list of messages")
    apply_chat_template: bool = flag(False, "render prompts with the tokenizer's chat template")
    source_key: str | None = flag(
        None, "key of the data source in a row of --eval_data, by which results are told apart; None: by file"
    )
    label_key: str | None = flag(
        None, "key of the reference answer in a row, handed to the reward function; None: no labels"
    )
    prompt_max_len: int = flag(
        1024, "tokens of a prompt at most; longer ones are left out and counted, never cut", ge=1
    )


class ExampleSection(DataSection):
    """Fixed examples; what all offline commands have in common."""

    dataset: str | None = flag(None, f"training examples: {_SOURCES}")
    dataset_probs: str | None = flag(
        None, "a probability for each source of --dataset, with commas; None: one after the other"
    )
    dataset_split: str = flag("train", "split of --dataset, where a data set has splits")
    eval_dataset: str | None = flag(None, "held-out examples: sources as --dataset takes them")
    eval_split: str = flag("test", "split of --eval_dataset, where a data set has splits")
    max_len: int = flag(2048, "tokens of a sequence at most; longer examples are left out and counted, never cut", ge=2)
    streaming: bool = flag(False, "read data sets of the `datasets` library without a copy of them in its cache")
    data_num_workers: int = flag(0, "processes that tokenize; 0: the command's own", ge=0)
    data_cache: str | None = flag(
        None, "folder that keeps tokenized examples, found again for the same data, tokenizer and options"
    )


class ChatSection(ExampleSection):
    """Adds the chat template."""

    apply_chat_template: bool = flag(False, "render examples with the tokenizer's chat template")
    tokenizer_chat_template: str | None = flag(
        None, "chat template in the place of the tokenizer's, and saved with the model: Jinja, or its file"
    )


class DemonstrationSection(ChatSection):
    """Prompts with completions."""

    input_key: str = flag("input", "key of the prompt in a row: text, or a list of messages")
    output_key: str | None = flag(
        "output", "key of the completion in a row; None: the input is a conversation, or text to train on whole"
    )
    multiturn: bool = flag(False, "train every answer of a conversation, not the last alone")
    pretrain_mode: bool = flag(False, "train every token, not the completion's alone")


class PairSection(ChatSection):
    """Two answers to a prompt."""

    prompt_key: str | None = flag(
        None, "key of the prompt: text or messages; None: both answers are whole dialogues that hold it"
    )
    chosen_key: str = flag("chosen", "key of the preferred answer")
    rejected_key: str = flag("rejected", "key of the other answer")


class MarginPairSection(PairSection):
    """Adds by how much one is better."""

    margin_key: str = flag("margin", "key of how much the preferred answer is better; with --margin_loss")


class VerdictSection(ChatSection):
    """Answers that were judged one by one."""

    input_key: str = flag("input", "key of the prompt in a row: text, or a list of messages")
    output_key: str = flag("output", "key of the answer in a row")
    label_key: str = flag("label", "key of the verdict in a row: true or false, 1 or 0")


class StepSection(ExampleSection):
    """Solutions whose steps were judged."""

    input_key: str = flag("input", "key of problem and solution, a text with a placeholder after each step")
    label_key: str = flag("label", "key of the list of labels, one a step: numbers from 0 to 1, or --reward_tokens")
    placeholder_token: str | None = flag(None, "text after each step: one token, such as a special token")
    reward_tokens: tuple[str, str] = flag(("+", "-"), "texts of one token each that stand for a good and a bad step")
