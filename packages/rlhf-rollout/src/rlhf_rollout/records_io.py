"""Rollouts in files, as JSON lines or in chunks of columns. What was written is read back exactly.

A JSONL file has one record per rollout. A file of columns, whose name ends with `COLUMNS`, has one chunk per batch; see
`record_columns`.
"""

import base64
import json
import operator
import signal
import sys
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby, takewhile
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from rlhf_data.errors import ConfigError, DataError, missing_file
from rlhf_data.records import (
    Episode,
    FinishReason,
    Prompt,
    Rollout,
    RolloutGroup,
    Span,
    SpanSource,
    Verdict,
    VerdictKind,
)
from rlhf_rollout.record_columns import COLUMNS, HEADER, Line, chunk, column_lines, has_columns

NUM_LEFT = "num_left"  # of a record: how many records of its batch follow; it comes after the batch's own fields
_ENCODER = json.JSONEncoder(ensure_ascii=False, allow_nan=False)
_POWERS_OF_TEN = np.array([float(f"1e{power}") for power in range(13)])
_DIGITS = np.arange(6, 10)  # nine always give a float32 again
_UNREADABLE = (ValueError, TypeError, KeyError, IndexError, AttributeError, OverflowError, RecursionError)


def rollout_record(
    group: RolloutGroup, episode: Episode, rollout: Rollout, *, has_tokens: bool = True
) -> dict[str, Any]:
    """Return a rollout with its prompt as plain JSON values.

    `token_ids` and `logprobs` hold the whole sequence, prompt included. Log-probs are the engine's: 0.0 for tokens that
    the policy did not write, null for NaN, and the texts inf and -inf. `spans` gives source, length and policy version
    of each run of tokens. `routes` are null, or their shape [R, layers, top_k], the name of their numpy type and their
    bytes in Base64. `prompt_token_ids` is null where they are the tokens of the first span. `turn_rewards` and
    `earned_elsewhere` add up to `reward`. `token_rewards` holds pairs of a place in `token_ids` and a reward. `reward`,
    `score`, `verdict` and `score_seconds` are null for a rollout that was not scored. `prompt_extra` is there if the
    prompt has extra cells, `images` with the paths of the rollout's images if it has any, and `prompt_images` if the
    prompt has others. Without `has_tokens`, `token_ids` and `logprobs` are null.
    """
    prompt = group.prompt
    is_first_span = np.array_equal(prompt.token_ids, rollout.spans[0].token_ids)
    verdict = rollout.verdict
    return {
        "rollout_id": rollout.rollout_id,
        "episode_id": episode.episode_id,
        "group_id": rollout.group_id,
        "prompt_id": prompt.prompt_id,
        "source": prompt.source,
        "prompt": prompt.text,
        "prompt_token_ids": None if is_first_span else prompt.token_ids.tolist(),
        "messages": None if prompt.messages is None else [dict(message) for message in prompt.messages],
        "label": prompt.label,
        **({"prompt_extra": dict(prompt.extra)} if prompt.extra else {}),
        **({"images": list(rollout.images)} if rollout.images else {}),
        **({"prompt_images": list(prompt.images)} if prompt.images != rollout.images else {}),
        "text": rollout.text,
        "token_ids": rollout.token_ids.tolist() if has_tokens else None,
        "logprobs": _logprobs(rollout) if has_tokens else None,
        "spans": [
            {"source": str(span.source), "num_tokens": len(span.token_ids), "policy_version": span.policy_version}
            for span in rollout.spans
        ],
        "routes": pack_array(rollout.routes),
        "finish_reason": str(rollout.finish_reason),
        "policy_version": rollout.policy_version,
        "reward": verdict.reward if verdict else None,
        "score": verdict.score if verdict else None,
        "verdict": str(verdict.kind) if verdict else None,
        "detail": verdict.detail if verdict else "",
        "extra": dict(verdict.extra) if verdict else {},
        "turn_rewards": list(verdict.turn_rewards) if verdict else [],
        "earned_elsewhere": list(verdict.earned_elsewhere) if verdict else [0.0, 0.0],
        "token_rewards": [list(pair) for pair in verdict.token_rewards] if verdict else [],
        "source_rewards": list(verdict.source_rewards) if verdict else [],
        "score_seconds": round(verdict.seconds, 6) if verdict else None,
    }


def batch_records(
    groups: Sequence[RolloutGroup], fields: Mapping[str, Any], *, has_tokens: bool
) -> Iterator[tuple[dict[str, Any], Rollout]]:
    """Yield the records of a batch of groups as plain JSON values, each with its rollout; each begins with `fields`.

    Without `has_tokens`, they lack what columns hold.
    """
    num_left = sum(len(group.rollouts) for group in groups)
    for group in groups:
        for episode in group.episodes:
            for rollout in episode.rollouts:
                num_left -= 1
                record = rollout_record(group, episode, rollout, has_tokens=has_tokens)
                yield {**fields, NUM_LEFT: num_left, **record}, rollout


def parse_group(records: Sequence[Mapping[str, Any]], where: str) -> RolloutGroup:
    """Return the group of `batch_records`, which came from `where`. Raises DataError like `parse_batches`."""
    try:
        lines = [_Parsed(where, dict(record), _rollout(record)) for record in records]
        [group] = _batch(lines).groups
    except _UNREADABLE as error:
        raise _unreadable(where, error) from None
    return group


class RolloutWriter:
    """Appends groups to a file and creates its folder. The file is flushed after every batch.

    Args:
        path: of a file of columns if its name ends with `COLUMNS`, else of a JSONL file.
        level: of zlib for the parts of columns that it compresses; 0 for speed.
    """

    def __init__(self, path: str | Path, level: int = 1) -> None:
        self.path = Path(path)
        self._level = level
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._file = self.path.open("ab")
        self._has_columns = self.path.suffix == COLUMNS
        if self._has_columns and self._file.tell() == 0:
            self._file.write(HEADER)

    def write(self, *groups: RolloutGroup, **fields: Any) -> None:
        """Append a batch of groups; each of its records begins with `fields`, such as the step."""
        records = batch_records(groups, fields, has_tokens=not self._has_columns)
        if self._has_columns and groups:
            pairs = list(records)
            text = b"".join(_line(record) for record, _ in pairs)
            self._file.writelines(chunk(text, [rollout for _, rollout in pairs], self._level))
        elif groups:
            self._file.writelines(_line(record) for record, _ in records)
        self._file.flush()

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def _line(record: Mapping[str, Any]) -> bytes:
    text = _ENCODER.encode(record) + "\n"
    # Half of a surrogate pair is written as JSON's escape of it: the text of an environment or a tool may hold one.
    return text.encode("utf-8", "backslashreplace")


def read_lines(path: str | Path, *, has_tokens: bool = True, start: int = 0) -> Generator[Line, None, None]:
    """Yield the records of a file of either kind, unparsed; a damaged chunk is the last. The file is open meanwhile.

    Args:
        path: the file.
        has_tokens: whether `tokens` are read; without, they are empty.
        start: the `Line.end` after which reading begins, or 0 for the beginning. Lines are numbered from there.

    Raises:
        DataError: the file does not exist, or a newer version has written it.
    """
    path = Path(path)
    if not path.is_file():
        raise DataError(missing_file("the record of rollouts", path))
    with path.open("rb") as stream:
        if path.suffix == COLUMNS or has_columns(stream):
            yield from column_lines(path, stream, has_tokens=has_tokens, start=start)
            return
        end = stream.seek(start)
        for number, text in enumerate(stream, start=1):
            end += len(text)
            yield Line(number, text, end)


def json_lines(lines: Iterable[Line]) -> Iterator[bytes]:
    """Yield the lines that a JSONL file with the records of `lines` has. Raises DataError for a damaged one."""
    for line in lines:
        parsed = _parsed(f"record {line.number}", line)
        if line.tokens is None:
            yield line.text
        else:
            rollout = parsed.rollout
            tokens = {"token_ids": rollout.token_ids.tolist(), "logprobs": _logprobs(rollout)}
            yield _line(parsed.record | tokens)


@dataclass(frozen=True, slots=True)
class RecordedBatch:
    """The groups of one call of `RolloutWriter.write`, and the fields that it got."""

    groups: tuple[RolloutGroup, ...]
    fields: Mapping[str, Any]


def read_batches(path: str | Path) -> Iterator[RecordedBatch]:
    """Yield the batches of a file that `RolloutWriter` wrote, in order, one at a time; see `parse_batches`."""
    yield from parse_batches(Path(path), read_lines(path))


def parse_batches(path: Path, lines: Iterable[Line]) -> Iterator[RecordedBatch]:
    """Yield the batches in lines of the file `path`.

    Records are equal to those that were written, except that seconds are rounded.

    Raises:
        DataError: a line, which the message names, is damaged, lacks or has gained something, or its batch is not
            complete.
    """
    batch: list[_Parsed] = []
    num_left = 0  # records of the batch after the last one
    for unread in lines:
        where = f"{path}:{unread.number}"
        line = _parsed(where, unread)
        now_left = line.num_left
        if batch and now_left != num_left - 1:
            raise _unreadable(where, f"{num_left} records of another batch should follow the line before it")
        batch.append(line)
        num_left = now_left
        if num_left == 0:
            yield _batch(batch)
            batch = []
    if batch:
        raise _unreadable(batch[-1].where, f"{num_left} records of its batch should follow, and none does")


class _Parsed(NamedTuple):
    where: str
    record: dict[str, Any]
    rollout: Rollout
    has_tokens: bool = True  # the record, besides the rollout
    num_left: int = 0


def _parsed(where: str, line: Line) -> _Parsed:
    if not line.text:
        raise _unreadable(where, "the file is cut off or damaged here")
    try:
        record = json.loads(line.text)
        rollout = _rollout(record, line.tokens)
        return _Parsed(where, record, rollout, line.tokens is None, operator.index(record[NUM_LEFT]))
    except _UNREADABLE as error:
        raise _unreadable(where, error) from None


def _unreadable(where: str, reason: object) -> DataError:
    reason = f"it lacks {reason}" if isinstance(reason, KeyError) else reason
    hint = "use the file as a run of this version wrote it; the batches before this line can be used"
    return DataError(f"{where} is not a rollout as it was written: {reason}", hint=hint)


def _batch(lines: Sequence[_Parsed]) -> RecordedBatch:
    first = lines[0].record
    fields = {name: first[name] for name in takewhile(lambda name: name != NUM_LEFT, first)}
    groups = []
    for _, members in groupby(lines, key=lambda line: line.rollout.group_id):
        groups.append(_group(list(members), fields))
    return RecordedBatch(tuple(groups), fields)


def _group(lines: Sequence[_Parsed], fields: Mapping[str, Any]) -> RolloutGroup:
    where, first, rollout, *_ = lines[0]
    episodes = []
    try:
        for episode_id, members in groupby(lines, key=lambda line: line.record["episode_id"]):
            episodes.append(Episode(episode_id, rollout.group_id, tuple(line.rollout for line in members)))
        messages = None if first["messages"] is None else tuple(first["messages"])
        token_ids = first["prompt_token_ids"] or rollout.spans[0].token_ids
        known = (first["prompt"], first["label"], first["source"], messages, first.get("prompt_extra", {}))
        images = tuple(first.get("prompt_images", rollout.images))
        prompt = Prompt(first["prompt_id"], token_ids, *known, images)
    except _UNREADABLE as error:
        raise _unreadable(where, error) from None
    group = RolloutGroup(rollout.group_id, prompt, tuple(episodes))
    # Writing it again finds all that was changed: values of another type, and fields that contradict each other.
    pairs = ((episode, rollout) for episode in episodes for rollout in episode.rollouts)
    for line, pair in zip(lines, pairs, strict=True):
        record = line.record
        again = {**fields, NUM_LEFT: record[NUM_LEFT], **rollout_record(group, *pair, has_tokens=line.has_tokens)}
        changed = [name for name in again | record if name not in again or again[name] != record.get(name, again)]
        if changed:
            raise _unreadable(line.where, f"`{changed[0]}` does not fit the rest")
    return group


def _rollout(record: Mapping[str, Any], tokens: tuple[np.ndarray, np.ndarray] | None = None) -> Rollout:
    if tokens is None:
        token_ids = record["token_ids"]
        logprobs = [np.nan if value is None else float(value) for value in record["logprobs"]]
    else:
        token_ids, own = tokens
        is_own = [span["source"] == SpanSource.POLICY for span in record["spans"]]
        logprobs = np.zeros(len(token_ids), np.float32)
        logprobs[np.repeat(is_own, [span["num_tokens"] for span in record["spans"]])] = own
    spans = []
    start = 0
    for span in record["spans"]:
        end = start + span["num_tokens"]
        source = SpanSource(span["source"])
        own = logprobs[start:end] if source is SpanSource.POLICY else None
        spans.append(Span(source, token_ids[start:end], own, span["policy_version"]))
        start = end
    verdict = None
    if record["verdict"] is not None:
        verdict = Verdict(
            VerdictKind(record["verdict"]),
            record["reward"],
            record["score"],
            record["detail"],
            record["extra"],
            seconds=record["score_seconds"],
            turn_rewards=tuple(record["turn_rewards"]),
            token_rewards=tuple((at, value) for at, value in record["token_rewards"]),
            source_rewards=tuple(record["source_rewards"]),
            earned_elsewhere=tuple(record["earned_elsewhere"]),
        )
    reason = FinishReason(record["finish_reason"])
    routes = unpack_array(record["routes"])
    images = tuple(record.get("images", ()))
    names = (record["rollout_id"], record["group_id"])
    return Rollout(*names, tuple(spans), reason, record["text"], verdict, routes, images)


def pack_array(array: np.ndarray | None) -> dict[str, Any] | None:
    """Return an array as JSON. As lists of numbers, routes of a model with many layers would be most of a record."""
    if array is None:
        return None
    data = base64.b64encode(array.astype(array.dtype.newbyteorder("<")).tobytes()).decode()
    return {"shape": list(array.shape), "dtype": array.dtype.name, "data": data}


def unpack_array(packed: Mapping[str, Any] | None) -> np.ndarray | None:
    """Return what `pack_array` has packed."""
    if packed is None:
        return None
    dtype = np.dtype(packed["dtype"]).newbyteorder("<")
    return np.frombuffer(base64.b64decode(packed["data"], validate=True), dtype).reshape(packed["shape"])


def _logprobs(rollout: Rollout) -> list[float | str | None]:
    numbers: list[float | str | None] = []
    for span in rollout.spans:
        numbers += [0.0] * len(span.token_ids) if span.logprobs is None else _numbers(span.logprobs)
    return numbers


def _numbers(values: np.ndarray) -> list[float | str | None]:
    """Return `_number` of each of the float32 `values` [n], at a fraction of its time for usual sizes."""
    exact = values.astype(np.float64)
    size = np.abs(exact)
    # Within these bounds, scaling by a power of ten below is exact, so that rounding finds the nearest decimal.
    is_usual = (size >= 1e-4) & (size < 1e5)
    exponent = np.floor(np.log10(size, where=is_usual, out=np.zeros_like(size))).astype(np.int64)
    scale = _POWERS_OF_TEN[_DIGITS[:, None] - 1 - exponent]
    rounded = np.round(exact * scale) / scale
    fits = rounded.astype(np.float32) == values  # of the fits, that with the fewest digits comes first
    shortest = rounded[fits.argmax(axis=0), np.arange(len(values))]
    found = np.where(is_usual & fits.any(axis=0), shortest, np.where(size == 0.0, exact, np.nan))
    numbers = found.tolist()
    for at in np.flatnonzero(np.isnan(found)):
        numbers[at] = _number(values[at])
    return numbers


def _number(value: np.float32) -> float | str | None:
    if np.isnan(value):
        return None
    # The shortest decimal that gives this float32 again; by way of float64, 0.1 would become 0.10000000149011612.
    return float(str(value)) if np.isfinite(value) else str(value)


def _print_json() -> int:
    """Print the rollouts of the file that the command line names."""
    if len(sys.argv) != 2:
        raise ConfigError(
            "one file of rollouts must be named", hint=f"python -m rlhf_rollout.records_io run/rollouts{COLUMNS}"
        )
    for line in json_lines(read_lines(sys.argv[1])):
        sys.stdout.buffer.write(line)
    sys.stdout.flush()
    return 0


if __name__ == "__main__":
    from rlhf_data.options.exits import BAD_INPUT, exit_status

    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # ends without an error if its reader has seen enough
    sys.exit(exit_status(_print_json, failure=BAD_INPUT))
