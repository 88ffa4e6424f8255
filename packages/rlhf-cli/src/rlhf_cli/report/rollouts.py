"""Recorded rollouts to list, filter and sort, without holding their tokens. Files are read by parts."""

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np

from rlhf_cli.report.runs import finite
from rlhf_data.errors import DataError
from rlhf_data.records import SpanSource
from rlhf_rollout.record_columns import Line
from rlhf_rollout.records_io import json_lines, read_lines
from rlhf_train.tracing.token_values import read_values

# Tokens are most of a line of JSON. In texts, quotes have backslashes, so that this matches none of them.
_TOKENS = re.compile(rb'"token_ids": \[[^\[\]]*\], "logprobs": \[[^\[\]]*\], "spans": ')
_NO_TOKENS = b'"token_ids": null, "logprobs": null, "spans": '


@dataclass(frozen=True, slots=True)
class Row:
    """What a list of rollouts shows of one of them.

    Attributes:
        step: at which it was generated; 0 is before the first step.
        group_id, rollout_id, prompt_id, source: as in its record.
        reward, score: None if it was not scored.
        verdict: such as ok, wrong and timeout; None if it was not scored.
        num_tokens: that the policy sampled.
        num_turns: runs of such tokens, with others between them.
        finish_reason: such as stop and length.
        versions: the oldest and the newest policy version of its tokens.
        kept: whether it was trained; None where that is not recorded, as in an evaluation.
        start: byte at which its line, or the chunk that holds it, begins in the file.
        place: its number in that chunk, from 0; 0 in a file of lines.
        gap: mean size of the gap between the log-probs of trainer and engine, in nats; None without `with_gaps`.
    """

    step: int
    group_id: str
    rollout_id: str
    prompt_id: str
    source: str
    reward: float | None
    score: float | None
    verdict: str | None
    num_tokens: int
    num_turns: int
    finish_reason: str
    versions: tuple[int, int]
    kept: bool | None
    start: int
    place: int
    gap: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Filter:
    """Which rollouts are wanted. Each field that is not None, or not empty, excludes others.

    Attributes:
        first_step, last_step: bounds, both included.
        min_reward, max_reward: bounds, both included; without a reward, a rollout is outside.
        min_tokens, max_tokens: bounds of `Row.num_tokens`, both included.
        verdicts, finish_reasons: those that are wanted; the verdict `unscored` stands for none.
        prompt_id: of the prompt.
        text: must be in the prompt, the response or the label, in capital letters or small ones.
    """

    first_step: int | None = None
    last_step: int | None = None
    min_reward: float | None = None
    max_reward: float | None = None
    min_tokens: int | None = None
    max_tokens: int | None = None
    verdicts: frozenset[str] = frozenset()
    finish_reasons: frozenset[str] = frozenset()
    prompt_id: str | None = None
    text: str | None = None

    def accepts(self, row: Row, record: Mapping[str, Any]) -> bool:
        """Return whether a rollout is wanted; `record` needs no tokens."""
        return (
            _within(row.step, self.first_step, self.last_step)
            and _within(row.reward, self.min_reward, self.max_reward)
            and _within(row.num_tokens, self.min_tokens, self.max_tokens)
            and (not self.verdicts or (row.verdict or "unscored") in self.verdicts)
            and (not self.finish_reasons or row.finish_reason in self.finish_reasons)
            and self.prompt_id in (None, row.prompt_id)
            and (self.text is None or _has_text(record, self.text.lower()))
        )


def _within(value: float | None, low: float | None, high: float | None) -> bool:
    if value is None:
        return low is None and high is None
    return (low is None or value >= low) and (high is None or value <= high)


def _has_text(record: Mapping[str, Any], text: str) -> bool:
    return any(text in str(record.get(name) or "").lower() for name in ("prompt", "text", "label"))


# How rows can be sorted: for each name, the value that is compared. None comes last.
SORTS: Mapping[str, Callable[[Row], Any]] = {
    "step": lambda row: row.step,
    "reward": lambda row: row.reward,
    "score": lambda row: row.score,
    "length": lambda row: row.num_tokens,
    "turns": lambda row: row.num_turns,
    "gap": lambda row: row.gap,
    "verdict": lambda row: row.verdict,
}


def sort_rows(rows: Iterable[Row], by: str, *, descending: bool = False) -> list[Row]:
    """Return rows in the order of `SORTS[by]`, those without a value last and equal ones in their order."""
    key = SORTS[by]
    listed = list(rows)
    known = sorted((row for row in listed if key(row) is not None), key=key, reverse=descending)
    return [*known, *(row for row in listed if key(row) is None)]


def with_gaps(rows: Iterable[Row], folder: Path, low: float | None = None, high: float | None = None) -> Iterator[Row]:
    """Yield rows with their gaps, from the folder of token values of their run: those within bounds, both included."""
    for step, members in groupby(rows, key=lambda row: row.step):
        values = read_values(folder, step)
        for row in members:
            gap = mean_gap(values.get(row.rollout_id, {}), row.num_tokens)
            if _within(gap, low, high):
                yield replace(row, gap=gap)


def mean_gap(values: Mapping[str, np.ndarray], num_tokens: int) -> float | None:
    """Return the mean size of the gaps among the values of a rollout, where they are known; None if they are not."""
    gap = np.abs(values.get("gap", np.zeros(0)).astype(np.float64))
    known = gap[~np.isnan(gap)]
    return float(known.mean()) if len(known) and len(gap) == num_tokens else None


class RolloutFile:
    """A file of rollouts that a run has written, or is writing: JSON lines, or columns.

    Attributes:
        path: the file.
        end: bytes that `rows` has read; the next call goes on there.
        num_damaged: lines so far that are no rollouts. Rows do not include them.
        is_cut: whether the file ends, so far, within a record: it is being written, was cut off or is damaged there.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.end = 0
        self.num_damaged = 0
        self.is_cut = False

    def rows(self, wanted: Filter | None = None) -> Iterator[tuple[Row, dict[str, Any]]]:
        """Yield the rollouts that are wanted in the order of the file, each with its record without tokens.

        Raises DataError when the file does not exist, or a newer version has written it.
        """
        self.is_cut = False
        for start, place, line in _placed(read_lines(self.path, has_tokens=False, start=self.end), self.end):
            if not line.text.endswith(b"\n"):
                self.is_cut = True
                return
            self.end = line.end
            try:
                text = _TOKENS.sub(_NO_TOKENS, line.text)
                record = json.loads(text, parse_float=finite, parse_constant=finite)
                row = _row(record, start, place)
            except (ValueError, TypeError, LookupError, AttributeError, ArithmeticError, RecursionError):
                self.num_damaged += 1
            else:
                if wanted is None or wanted.accepts(row, record):
                    yield row, record

    def records(self, rows: Iterable[Row]) -> Iterator[dict[str, Any]]:
        """Yield the whole records of rows, with `token_ids` and `logprobs`; see `records_io.rollout_record`.

        Rows that follow each other in the file are read at once. Raises DataError for a damaged record.
        """
        placed: Iterator[tuple[int, int, Line]] = iter(())
        here = (-1, 0)
        end = -1
        for row in rows:
            wanted = (row.start, row.place)
            if wanted <= here or row.start not in (here[0], end):
                placed = _placed(read_lines(self.path, start=row.start), row.start)
            found = (line for start, place, line in placed if (start, place) == wanted)
            line = next(found, None)
            if line is None:
                message = f"{self.path} has no rollout any more at byte {row.start}"
                raise DataError(message, hint="make the report again: the file has changed since it was read")
            here, end = wanted, line.end
            yield json.loads(next(json_lines([line])))


def _placed(lines: Iterable[Line], start: int) -> Iterator[tuple[int, int, Line]]:
    """Yield lines with `Row.start` and `Row.place`; the first one begins at the byte `start`."""
    end = start
    place = -1
    for line in lines:
        place += 1
        if line.end != end:  # the first line of a chunk
            start, end, place = end, line.end, 0
        yield start, place, line


def _row(record: Mapping[str, Any], start: int, place: int) -> Row:
    spans = record["spans"]
    own = [span["source"] == SpanSource.POLICY for span in spans]
    versions = [span["policy_version"] for span, is_own in zip(spans, own, strict=True) if is_own]
    starts = [is_own and not before for before, is_own in zip([False, *own], own, strict=False)]
    return Row(
        step=int(record.get("step", 0)),
        group_id=str(record["group_id"]),
        rollout_id=str(record["rollout_id"]),
        prompt_id=str(record["prompt_id"]),
        source=str(record["source"] or ""),
        reward=_number(record["reward"]),
        score=_number(record["score"]),
        verdict=None if record["verdict"] is None else str(record["verdict"]),
        num_tokens=sum(int(span["num_tokens"]) for span, is_own in zip(spans, own, strict=True) if is_own),
        num_turns=sum(starts),
        finish_reason=str(record["finish_reason"]),
        versions=(min(versions, default=0), max(versions, default=0)),
        kept=record.get("kept"),
        start=start,
        place=place,
    )


def _number(value: Any) -> float | None:
    return None if value is None else float(value)
