"""The command `rlhf-data`: counts and measures the rows of data files, and shows one as a model is trained on it."""

import os
import sys
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import groupby, islice
from types import MappingProxyType
from typing import Any

import numpy as np

from rlhf_data.chat.tokens import Tokenizer
from rlhf_data.errors import ConfigError, DataError, check_name
from rlhf_data.examples.load import ExampleSet, load_examples, make_encoder
from rlhf_data.examples.preference import PreferenceExample, ProcessExample
from rlhf_data.keys import check_section_keys, unread_tools
from rlhf_data.options.checks import missing
from rlhf_data.options.command_line import CommandLine, show_parsed
from rlhf_data.options.declare import Config, flag, one_of
from rlhf_data.options.exits import SUCCESS, run_command, with_flags
from rlhf_data.options.progress import Progress
from rlhf_data.options.sections import (
    ChatTemplateSection,
    ChosenKeySection,
    CompletionSection,
    PlaceholderSection,
    SampleSection,
    SourceSection,
    TrustSection,
)
from rlhf_data.pretrained import check_code, load_tokenizer, set_chat_template
from rlhf_data.rows.row import Row, RowErrors, kind_of
from rlhf_data.rows.sources import open_sources
from rlhf_data.safety import visible

_PROMPT = ("tokenizer_chat_template", "input_template", "apply_chat_template", "tools_key", "chat_template_kwargs")
_COMPLETION = (*_PROMPT, "input_key", "output_key")
# The kinds of examples, with the options that each one has.
_KINDS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "sft": (*_COMPLETION, "multiturn", "pretrain_mode"),
        "preference": (*_PROMPT, "prompt_key", "chosen_key", "rejected_key", "margin_key"),
        "unpaired": (*_COMPLETION, "label_key"),
        "process": ("input_template", "input_key", "label_key", "placeholder_token"),
    }
)

_PERCENTILES = (1, 50, 90, 99, 100)
_TRAINED = ("\033[1;32m", "\033[0m")
_TRAINED_PLAIN = ("[[", "]]")
_NO_LIMIT = 2**31 - 1

Kind = one_of(_KINDS)


class InspectRows(
    PlaceholderSection, ChosenKeySection, CompletionSection, ChatTemplateSection, SourceSection, SampleSection
):
    """The rows, and how each kind of example is made of them."""

    margin_key: str | None = flag(None, "key of the margin, how much better the preferred answer is; None: no margins")
    label_key: str = flag("label", "key of the verdict of an answer, or of the list of labels of a solution's steps")


class InspectionSection(TrustSection, title="inspection"):
    """What is shown."""

    kind: Kind = flag("sft", "the kind of example that a row becomes, named after what is trained on it")
    tokenizer: str | None = flag(
        None, "folder or hub name of the tokenizer; None: rows are only counted", names_model=True
    )
    row: int = flag(1, "number of the row to show, counted from 1", ge=1)


class InspectConfig(Config):
    """All options of `inspect`."""

    inspection: InspectionSection = InspectionSection()
    data: InspectRows = InspectRows()

    def missing(self) -> list[ConfigError]:
        """See `Config`."""
        found = self.data.missing("there must be rows to look at")
        asked = self.inspection
        if asked.kind == "process" and asked.tokenizer is not None and self.data.placeholder_token is None:
            hint = "add --placeholder_token TEXT"
            found.append(missing("placeholder_token", "it ends each step of a row of --kind process", hint))
        return found

    def check(self, given: Collection[str]) -> list[str]:
        """See `Config`."""
        kind = self.inspection.kind
        encoding = dict.fromkeys(name for names in _KINDS.values() for name in names if name in given)
        for name in encoding:
            if self.inspection.tokenizer is None:
                raise ConfigError(f"--{name} has no effect without a tokenizer", hint="give --tokenizer")
            check_name(f"option of --kind {kind}", name, _KINDS[kind])
        return self.data.check_chat(given)


def _load_encoder(config: InspectConfig) -> Any:
    """Return the encoder of the kind of example with its tokenizer; None without one. Raises ConfigError for a
    tokenizer that cannot be loaded, and for options that exclude each other."""
    asked, data = config.inspection, config.data
    if asked.tokenizer is None:
        return None
    tokenizer = load_tokenizer(asked.tokenizer)
    set_chat_template(tokenizer, data.tokenizer_chat_template, variables=data.chat_template_kwargs)
    return make_encoder(asked.kind, data, tokenizer)


def run(config: InspectConfig) -> int:
    """Print what there is to see; return 0.

    Raises:
        ConfigError: files that do not exist, a tokenizer that cannot be loaded, or options that exclude each other.
        DataError: there is no row of that number, or rows lack a key.
    """
    number = config.inspection.row
    data = config.data
    progress = Progress()
    with progress.doing("reading the rows"):
        encoder = _load_encoder(config)
        options = {"max_samples": data.max_samples, "split": data.dataset_split, "preset": data.preset_data}
        rows = open_sources(data.dataset, **options)
        errors = RowErrors()
        keys, num_rows, shown = _count_keys(rows.read(errors), number)
        notices = unread_tools([rows], data) if config.inspection.kind != "process" else []
    for (key, kind), times in sorted(keys.items()):
        print(visible(f"  {key}: {kind} in {times} rows"))
    print(f"{num_rows} rows can be read, {errors.num_bad} cannot")
    _print_problems(errors.first)
    for notice in notices:
        print(f"notice: {notice}", file=sys.stderr)
    if encoder is not None:
        check_section_keys(data, rows, [name for name in _KINDS[config.inspection.kind] if name.endswith("_key")])
        with progress.doing("tokenizing the rows"):
            examples = load_examples(rows, encoder, max_len=_NO_LIMIT, skip_bad_rows=True)
        _print_examples(examples, data.max_len)
    if shown is None:
        message = f"--row {number}: there are {num_rows} rows that can be read"
        raise DataError(message, hint=f"give a number from 1 to {num_rows}")
    print(visible(f"\nrow {number} ({shown.origin})"))
    if encoder is None:
        for key, value in shown.values.items():
            print(visible(f"  {key}: {value}"))
        return 0
    try:
        _print_example(encoder(shown), encoder.tokenizer)
    except DataError as error:
        print(with_flags(visible(f"  cannot be used: {error}")))
    return 0


def _count_keys(rows: Iterable[Row], number: int) -> tuple[Counter[tuple[str, str]], int, Row | None]:
    """Return how many rows have each key with each kind of value, the number of rows, and the row with the given
    number, counted from 1."""
    count = 0
    shown = None
    keys: Counter[tuple[str, str]] = Counter()
    for count, row in enumerate(rows, start=1):
        keys.update((key, kind_of(value)) for key, value in row.values.items())
        shown = row if count == number else shown
    return keys, count, shown


def _print_problems(messages: Iterable[str]) -> None:
    for message in messages:
        print(visible(f"  {message.splitlines()[0]}"))


def _print_examples(data: ExampleSet, max_len: int) -> None:
    print(f"{len(data.examples)} examples, {data.counts.num_bad} rows cannot be used")
    _print_problems(data.counts.bad)
    sequences = [part for example in data.examples for part in _sequences(example)]
    lengths = {"tokens": [len(ids) for _, ids, _ in sequences], "trained": [int(mask.sum()) for *_, mask in sequences]}
    print(" " * 9 + "".join(f"{f'{percent} %':>9}" for percent in _PERCENTILES))
    for name, values in lengths.items():
        print(f"{name:9}" + "".join(f"{value:9.0f}" for value in np.percentile(values, _PERCENTILES)))
    too_long = sum(max(len(ids) for _, ids, _ in _sequences(example)) > max_len for example in data.examples)
    print(f"{too_long} examples are longer than --max_len {max_len}")


def _sequences(example: Any) -> list[tuple[str, np.ndarray, np.ndarray]]:
    if isinstance(example, PreferenceExample):
        parts = {"chosen": example.chosen, "rejected": example.rejected}
        return [(name, part.token_ids, part.loss_mask) for name, part in parts.items()]
    if isinstance(example, ProcessExample):
        return [("", example.token_ids, np.isin(np.arange(example.num_tokens), example.positions))]
    return [("", example.token_ids, example.loss_mask)]


def _print_example(example: Any, tokenizer: Tokenizer) -> None:
    is_colored = sys.stdout.isatty() and "NO_COLOR" not in os.environ
    begin, end = _TRAINED if is_colored else _TRAINED_PLAIN
    for name, ids, mask in _sequences(example):
        trained = "in color" if is_colored else f"in {begin} {end}"
        print(f"  {name or 'sequence'}: {len(ids)} tokens, {mask.sum()} trained ({trained})")
        ids_left = iter(ids.tolist())
        for is_trained, run in groupby(mask.tolist()):
            text = visible(tokenizer.decode(list(islice(ids_left, len(list(run)))), skip_special_tokens=False))
            print(f"{begin}{text}{end}" if is_trained else text, end="")
        print()
    for name in ("margin", "is_desirable", "labels"):
        if getattr(example, name, None) is not None:
            print(visible(f"  {name}: {getattr(example, name)}"))


COMMANDS = {"inspect": "count, measure and show the rows of data files"}
COMMAND_LINE = CommandLine(
    config=InspectConfig,
    prog="rlhf-data inspect",
    description="Count the rows of data files, measure them in tokens, and show one as a model is trained on it.",
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status: 0, or 2 when it cannot run."""
    return run_command("rlhf-data", COMMANDS, argv, lambda name, words: _inspect(words))


def _inspect(words: Sequence[str]) -> int:
    parsed = COMMAND_LINE.parse(words)
    show_parsed(parsed)
    if not parsed.dry_run:
        return run(parsed.config)
    check_code(parsed.config.inspection.tokenizer or "")
    return SUCCESS


if __name__ == "__main__":
    sys.exit(main())
