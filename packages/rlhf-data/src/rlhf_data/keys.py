"""Checks that rows have the keys that options name, and that options name their tools. They say which flag to type."""

from collections.abc import Collection, Iterable, Mapping
from itertools import islice

from rlhf_data.errors import DataError, nearest
from rlhf_data.options.sections import ChatSection, RowSection
from rlhf_data.rows.presets import PRESETS
from rlhf_data.rows.row import Row, RowErrors
from rlhf_data.rows.sources import Rows

_PROMPTS = ("problem", "query", "instruction", "messages", "conversations", "text")
# Names that public data sets use for the same content, the most common first.
_OTHER_NAMES: Mapping[str, tuple[str, ...]] = {
    "input_key": ("input", "question", "prompt", *_PROMPTS),
    "prompt_key": ("prompt", "question", "input", *_PROMPTS),
    "output_key": ("output", "answer", "response", "completion", "solution", "messages"),
    "label_key": ("label", "answer", "solution", "ground_truth", "target", "final_answer"),
    "chosen_key": ("chosen", "response_0", "preferred"),
    "rejected_key": ("rejected", "response_1", "dispreferred"),
    "tools_key": ("tools", "functions"),
}
_NUM_LOOKED_AT = 100  # rows per source that are looked at for tools


def check_keys(rows: Rows, keys: Mapping[str, str | None], optional: Collection[str] = ()) -> None:
    """Raise DataError unless the first readable row of every source has the keys that options name.

    The error shows the keys that the row has and, as its hint, the flag to type.

    Args:
        rows: one or more sources.
        keys: by option, such as "input_key", the key that it names, or None.
        optional: the options that may be None.
    """
    for source in rows.sources:
        row = next(Rows((source,), preset=rows.preset).read(RowErrors()))
        for option, key in keys.items():
            if key is not None and key not in row.values:
                message = f"--{option}: {row.origin}: unknown key `{key}`; known: {', '.join(sorted(row.values))}"
                taken = {other for name, other in keys.items() if name != option}
                advice = _advice(option, key, row, taken, option in optional)
                forms = [] if rows.preset else [name for name, form in PRESETS.items() if form.gives(key, row)]
                preset = f"--preset_data {forms[0]} reads rows of this form; or " if forms else ""
                raise DataError(message, hint=preset + advice)


def check_section_keys(section: RowSection, rows: Rows, names: Iterable[str]) -> None:
    """Raise DataError, as `check_keys` does, for the keys that the options `names` of a section hold."""
    names = list(names)
    fields = type(section).model_fields
    optional = [name for name in names if fields[name].annotation == str | None]
    check_keys(rows, {name: getattr(section, name) for name in names}, optional)


def check_extra_keys(rows: Rows, keys: Iterable[str]) -> None:
    """Raise DataError unless the first readable row of every source has the keys of --extra_keys."""
    for key in keys:
        check_keys(rows, {"extra_keys": key})


def unread_tools(sources: Iterable[Rows], data: ChatSection) -> list[str]:
    """Return a notice if rows hold tools that no option gives to the chat template, else nothing."""
    if data.apply_chat_template and data.tools_key is None:
        for rows in sources:
            for row in islice(rows.read(RowErrors()), _NUM_LOOKED_AT):
                if row.values.get("tools"):
                    what = f"{row.origin} has `tools`, which the chat template does not get"
                    return [f"{what}: --tools_key tools gives it the tools of each row"]
    return []


def _advice(option: str, key: str, row: Row, taken: Collection[str | None], is_optional: bool) -> str:
    """Return the hint: what to type. It does not propose a key that another option names already."""
    free = [name for name in row.values if name not in taken]
    guess = nearest(key, free) or next((name for name in _OTHER_NAMES.get(option, ()) if name in free), None)
    none = f", or --{option} None if rows have none" if is_optional else ""
    return f"did you mean --{option} {guess}{none}?" if guess else f"name one of these keys with --{option} KEY{none}"
