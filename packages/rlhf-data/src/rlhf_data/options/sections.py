"""Options of data, for the commands of every package: which rows are read, and how a row becomes tokens."""

import json
import re
from collections.abc import Collection
from typing import Annotated, Any

from pydantic import AfterValidator, field_validator, model_validator

from rlhf_data.errors import ConfigError, with_hint
from rlhf_data.options.checks import lacking, without_effect
from rlhf_data.options.declare import Section, flag, one_of
from rlhf_data.rows.presets import PRESETS

SOURCES = (
    ".jsonl, .json, .csv (also .gz), .parquet or .arrow files, saved data set folders, loading scripts and hub names,"
    " separated by commas; `name@subset` names a subset"
)
SPLIT = "the split to read if a data set has splits"
PresetName = one_of(PRESETS)


def _check_object(text: str) -> str:
    """Return text that is a JSON object. Raises ValueError for other text."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(with_hint(f"{text} is not JSON: {error}", _OBJECT_HINT)) from None
    if not isinstance(value, dict):
        raise ValueError(with_hint(f"{text} is no JSON object", _OBJECT_HINT))
    return text


_OBJECT_HINT = """write it in single quotes, as in '{"enable_thinking": false}'"""
JsonObject = Annotated[str, AfterValidator(_check_object)]
# What LaTeX's commands that begin with an n have after it.
_LATEX = (
    "abla|atural|cong|e|earrow|eg|eq|ewcommand|ewline|exists|geq|gtr|i|leq|less|mid|oalign|obreak|ocite|oindent|olimits"
    "|onumber|ormalsize|ot|otag|otin|parallel|prec|sim|subseteq|succ|supseteq|u|warrow|[LRlr](?:eft|ight)arrow"
)
_TYPED_NEWLINE = re.compile(rf"(?<!\\)\\n(?!(?:{_LATEX})(?![A-Za-z]))")
# Shells pass a typed \n on as a backslash and an n.
TemplateText = Annotated[str, AfterValidator(lambda text: _TYPED_NEWLINE.sub("\n", text))]


class TemplateSection(Section, title="data"):
    """How an input becomes a prompt without a chat template."""

    input_template: TemplateText | None = flag(
        None,
        r"text with one `{}` where the input goes, for models without a chat template; \n is a newline,"
        r" except in commands of LaTeX such as \nu",
    )


class SampleSection(TemplateSection):
    """How many rows are read, for every command that reads rows."""

    max_samples: int | None = flag(None, "rows to read per source, at most; None: all", ge=1)
    preset_data: PresetName | None = flag(
        None,
        "the known data set whose form the rows have: they get the keys input, output, label, chosen and rejected, and"
        " the options of keys and --apply_chat_template fit them; the last three are for prm; None: any rows, with the"
        " keys that the options name",
    )

    @model_validator(mode="before")
    @classmethod
    def _fit_preset(cls, values: Any) -> Any:
        """Set the options that suit the preset, where the user does not."""
        name = values.get("preset_data") if isinstance(values, dict) else None
        preset = PRESETS.get(name) if isinstance(name, str) else None
        options = {} if preset is None else preset.options
        return {name: value for name, value in options.items() if name in cls.model_fields} | values

    @field_validator("preset_data")
    @classmethod
    def _check_steps(cls, name: str | None) -> str | None:
        if name is not None and PRESETS[name].has_steps and "placeholder_token" not in cls.model_fields:
            message = f"rows of {name} have judged steps, which train process reward models"
            raise ValueError(with_hint(message, "use `rlhf prm`, or `rlhf-data inspect --kind process`"))
        return name


class RowSection(SampleSection):
    """Adds what happens to rows that cannot be used."""

    skip_bad_rows: bool = flag(
        False, "leave out every row that cannot be used; without this flag, more than 1 % of such rows are an error"
    )


class TemplateVariableSection(Section, title="data"):
    """Variables of the chat template."""

    chat_template_kwargs: JsonObject | None = flag(
        None,
        "values of variables that the chat template reads, wherever it renders, as a JSON object such as"
        ' {"enable_thinking": false}; None: the template\'s own defaults',
    )


class ChatSection(TemplateVariableSection):
    """Rows that the chat template may render."""

    apply_chat_template: bool = flag(False, "render rows with the tokenizer's chat template")
    tools_key: str | None = flag(
        None,
        "key of a row's tools, which the chat template writes: a list of JSON schemas (OpenAI's form) or its JSON text;"
        " null for none. None: rows have no tools",
    )

    def check_chat(self, given: Collection[str], *, has_agent: bool = False) -> list[str]:
        """Return a notice if variables of the chat template have no effect; an agent may ask for its rendering."""
        unused = not (self.apply_chat_template or has_agent)
        return without_effect(given, (unused, ["chat_template_kwargs"], "--apply_chat_template is off"))


class ChatTemplateSection(Section, title="data"):
    """A chat template that replaces the tokenizer's."""

    tokenizer_chat_template: str | None = flag(
        None,
        "chat template to use instead of the tokenizer's, and to save with a trained model: Jinja text, or its file",
    )


class InputSection(ChatSection):
    """Adds the prompt of a row."""

    input_key: str = flag("input", "key of the prompt in a row: text, or a list of messages")


class ImageSection(ChatSection):
    """Adds the images of prompts."""

    image_key: str | None = flag(
        None,
        "key of the images of a row, for a model that reads images: a path, a file or data URL, bytes, or a list of"
        " them, at `<image>` in the text, at parts of type `image`, or else before the text; an agent may give images"
        " beside those of rows; None: text alone",
    )

    def check_images(self, *others: tuple[Any, str, str]) -> None:
        """Raise ConfigError for images without a chat template, or with what gets none.

        Each of `others` says whether it is used, what images need instead, and what to do.
        """
        template = "a chat template, which writes the tokens around an image"
        for is_wrong, reason, hint in (
            (not self.apply_chat_template, template, "add --apply_chat_template"),
            *others,
        ):
            if self.image_key is not None and is_wrong:
                raise ConfigError(f"--image_key needs {reason}", hint=hint)


class CompletionSection(InputSection):
    """Rows with a prompt and its completion, with a conversation, or with plain text."""

    output_key: str | None = flag(
        "output", "key of the completion in a row; None: the input is a whole conversation, or plain text to train on"
    )
    multiturn: bool = flag(False, "train on every answer of a conversation, not only on the last one")
    pretrain_mode: bool = flag(False, "train on every token, not only on those of the completion")


class AnswerKeySection(Section, title="data"):
    """Rows with one answer."""

    output_key: str = flag("output", "key of the answer in a row")


class PairKeySection(Section, title="data"):
    """Rows with two answers to a prompt. Each command says which key holds the preferred one."""

    prompt_key: str | None = flag(
        None, "key of the prompt of a pair, text or messages; None: both answers are whole dialogues that hold it"
    )
    rejected_key: str = flag("rejected", "key of the other answer of a pair")


class ChosenKeySection(PairKeySection):
    """Adds the preferred answer."""

    chosen_key: str = flag("chosen", "key of the preferred answer of a pair")


class PlaceholderSection(Section, title="data"):
    """Solutions with a placeholder after each step."""

    placeholder_token: str | None = flag(None, "the placeholder after each step: one token, such as a special token")


class TrustSection(Section, title="model"):
    """Whether code runs that comes with the files of models."""

    trust_remote_code: bool = flag(
        False,
        "run the Python code that comes with the files of models and tokenizers (`auto_map` in config.json), for those"
        " that transformers has no class for, in every process that loads them: read it before. Without this flag such"
        " models are refused",
    )


class SourceSection(Section, title="data"):
    """Where rows come from, and how long they may be."""

    dataset: str | None = flag(None, f"rows to read: {SOURCES}")
    dataset_split: str = flag("train", f"--dataset: {SPLIT}")
    max_len: int = flag(2048, "tokens per sequence at most; longer sequences are left out and counted, never cut", ge=2)

    def missing(self, why: str) -> list[ConfigError]:
        """Return an error if no source of rows is named. `why` says why one is needed."""
        return lacking(self, "dataset", why, "add --dataset FILE.jsonl and the keys of its rows")


class ExampleSection(SourceSection, RowSection):
    """Existing texts, to train on or to score."""
