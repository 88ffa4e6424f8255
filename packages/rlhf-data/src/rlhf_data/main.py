"""The command `rlhf-data`: shows what data files contain and which tokens a model would be trained on."""

import argparse
import os
import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import groupby, islice
from typing import Any

import numpy as np

from rlhf_data.chat import Tokenizer
from rlhf_data.errors import ConfigError, DataError, RlhfError, unknown
from rlhf_data.examples import load_examples
from rlhf_data.flags import Parser
from rlhf_data.preference import PreferenceEncoder, PreferenceExample, ProcessEncoder, ProcessExample, UnpairedEncoder
from rlhf_data.pretrained import load_tokenizer
from rlhf_data.rows import Row, RowErrors, kind_of
from rlhf_data.sft import SftEncoder
from rlhf_data.sources import Rows, open_sources

_PROMPT = ("input_key", "input_template")
_SFT = (*_PROMPT, "output_key", "apply_chat_template")
_OPTIONS = {
    "sft": (*_SFT, "multiturn", "pretrain_mode"),
    "preference": ("prompt_key", "chosen_key", "rejected_key", "margin_key", "input_template", "apply_chat_template"),
    "unpaired": (*_SFT, "label_key"),
    "process": (*_PROMPT, "label_key", "placeholder"),
}
_NAMES = ("tokenizer_chat_template", *dict.fromkeys(name for names in _OPTIONS.values() for name in names))
_SWITCHES = ("apply_chat_template", "multiturn", "pretrain_mode")
_PERCENTILES = (1, 50, 90, 99, 100)
_TRAINED = ("\033[1;32m", "\033[0m")
_TRAINED_PLAIN = ("[[", "]]")
_NO_LIMIT = 2**31 - 1


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status: 0, or 2 when it cannot run."""
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    try:
        parser, command = _parser()
        command.check_flags(arguments)
        _inspect(parser.parse_args(arguments))
    except RlhfError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def _parser() -> tuple[Parser, Parser]:
    """Return the parser of `rlhf-data`, and that of its command `inspect`."""
    parser = Parser(prog="rlhf-data", description=__doc__, allow_abbrev=False)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    command = commands.add_parser("inspect", help="count, measure and show the rows of data files", allow_abbrev=False)
    command.add_argument("data", nargs="+", metavar="FILE", help=".json, .jsonl, .csv (also .gz), .parquet, ...")
    command.add_argument("--tokenizer", metavar="NAME", help="folder or hub name; without it only the rows are counted")
    command.add_argument("--kind", default="sft", help=f"what the rows are for: {', '.join(_OPTIONS)} (default: sft)")
    command.add_argument("--row", type=int, default=1, metavar="N", help="show the Nth row (default: 1)")
    command.add_argument(
        "--max_len", type=int, default=2048, help="count examples with more tokens than this (default: 2048)"
    )
    command.add_argument("--max_samples", type=int, help="read at most this many rows of each file")
    command.add_argument(
        "--split", default="train", help="the split to read from data sets that have splits (default: train)"
    )
    command.add_argument(
        "--tokenizer_chat_template", default=argparse.SUPPRESS, metavar="TEXT", help="instead of the tokenizer's"
    )
    encoding = command.add_argument_group(
        "encoding", "options of the trainers; --output_key '' means that rows have no output"
    )
    for name in _NAMES[1:]:
        action: dict[str, Any] = {"action": "store_true"} if name in _SWITCHES else {"metavar": "TEXT"}
        encoding.add_argument(f"--{name}", default=argparse.SUPPRESS, **action)
    return parser, command


def _inspect(options: argparse.Namespace) -> None:
    if options.row < 1:
        raise ConfigError(f"--row must be at least 1, got {options.row}")
    if options.kind not in _OPTIONS:
        raise ConfigError(unknown("kind", options.kind, _OPTIONS))
    given = {name: getattr(options, name) for name in _NAMES if hasattr(options, name)}
    if given and options.tokenizer is None:
        raise ConfigError(f"--{next(iter(given))} has no effect without a tokenizer", hint="give --tokenizer")
    encoder = None if options.tokenizer is None else _encoder(options.kind, options.tokenizer, given)
    rows = open_sources(",".join(options.data), max_samples=options.max_samples, split=options.split)
    errors = RowErrors(skip_bad_rows=True)
    num_rows, shown = _print_rows(rows.read(errors), options.row)
    print(f"{num_rows} rows can be read, {errors.num_bad} cannot")
    _print_problems(errors.first)
    if encoder is not None:
        _print_examples(rows, encoder, options.max_len)
    if shown is None:
        raise DataError(f"--row {options.row}: there are {num_rows} rows that can be read")
    print(f"\nrow {options.row} ({shown.origin})")
    if encoder is None:
        for key, value in shown.values.items():
            print(f"  {key}: {value}")
        return
    try:
        _print_example(encoder(shown), encoder.tokenizer)
    except DataError as error:
        print(f"  cannot be used: {error}")


def _encoder(kind: str, tokenizer_name: str, given: dict[str, Any]) -> Any:
    template = given.pop("tokenizer_chat_template", None)
    for name in given:
        if name not in _OPTIONS[kind]:
            raise ConfigError(unknown(f"option of --kind {kind}", name, _OPTIONS[kind]))
    tokenizer = load_tokenizer(tokenizer_name)
    if template is not None:
        tokenizer.chat_template = template
    if "pretrain_mode" in given:
        given["pretrain"] = given.pop("pretrain_mode")
    if "output_key" in given:
        given["output_key"] = given["output_key"] or None
    if kind == "unpaired":
        label = {name: given.pop(name) for name in ("label_key",) if name in given}
        return UnpairedEncoder(sft=SftEncoder(tokenizer=tokenizer, **given), **label)
    if kind == "process" and "placeholder" not in given:
        raise ConfigError("--kind process needs the --placeholder that ends a step")
    kinds = {"sft": SftEncoder, "preference": PreferenceEncoder, "process": ProcessEncoder}
    return kinds[kind](tokenizer=tokenizer, **given)


def _print_rows(rows: Iterable[Row], number: int) -> tuple[int, Row | None]:
    """Print the keys of all rows. Return the number of rows, and the row with the given number, counted from 1."""
    count = 0
    shown = None
    keys = Counter()
    for count, row in enumerate(rows, start=1):
        keys.update((key, kind_of(value)) for key, value in row.values.items())
        shown = row if count == number else shown
    for (key, kind), times in sorted(keys.items()):
        print(f"  {key}: {kind} in {times} rows")
    return count, shown


def _print_problems(messages: Iterable[str]) -> None:
    for message in messages:
        print(f"  {message.splitlines()[0]}")


def _print_examples(rows: Rows, encoder: Any, max_len: int) -> None:
    data = load_examples(rows, encoder, max_len=_NO_LIMIT, skip_bad_rows=True)
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
            text = tokenizer.decode(list(islice(ids_left, len(list(run)))), skip_special_tokens=False)
            print(f"{begin}{text}{end}" if is_trained else text, end="")
        print()
    for name in ("margin", "is_desirable", "labels"):
        if getattr(example, name, None) is not None:
            print(f"  {name}: {getattr(example, name)}")


if __name__ == "__main__":
    sys.exit(main())
