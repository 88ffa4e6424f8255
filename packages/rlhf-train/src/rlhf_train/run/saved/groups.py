"""Rollout groups in a binary file: each one's arrays and texts, then the rest of it as JSON."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np

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
from rlhf_train.run.saved.arrays import ArrayReader, ArrayWriter, damaged

_RECORDS = (RolloutGroup, Prompt, Episode, Rollout, Span, Verdict)
_FIELDS = {kind: tuple(field.name for field in fields(kind)) for kind in _RECORDS}
_UNREADABLE = (ValueError, TypeError, LookupError, AttributeError, OverflowError, RecursionError)


class GroupWriter:
    """Writes groups into a new file, without copies of them all in memory.

    Args:
        path: of the file.
    """

    def __init__(self, path: Path) -> None:
        self._arrays = ArrayWriter(path)
        self._encoder = json.JSONEncoder(default=self._plain)

    def write(self, group: RolloutGroup) -> list[Any]:
        """Append a group and return where it is, as JSON values for `GroupReader.read`."""
        return self._arrays.write_bytes(self._encoder.encode(group).encode())

    def close(self, seal: bytes = b"") -> None:
        """See `ArrayWriter.close`."""
        self._arrays.close(seal)

    def _plain(self, value: Any) -> Any:
        """Return a part of a group as JSON values. Arrays, and texts of prompts and answers, are their places."""
        names = _FIELDS.get(type(value))
        if names is None and isinstance(value, np.ndarray):
            return self._arrays.write(value)
        if names is None and isinstance(value, Mapping):
            return dict(value)
        if names is None:
            raise TypeError(f"{type(value).__name__} in a rollout group is no JSON value")
        plain = {name: getattr(value, name) for name in names}
        if "text" in plain:
            plain["text"] = self._arrays.write_bytes(value.text.encode("utf-8", "surrogatepass"))
        return plain


class GroupReader:
    """Reads what `GroupWriter` wrote.

    Args:
        path: of the file.
        seal: see `ArrayReader`.

    Raises:
        CheckpointError: see `ArrayReader`.
    """

    def __init__(self, path: Path, seal: bytes) -> None:
        self._path = path
        self._arrays = ArrayReader(path, seal)

    def read(self, place: Sequence[Any]) -> RolloutGroup:
        """Return a group, equal to the one that was written. Raises CheckpointError when there is none at `place`."""
        try:
            saved = json.loads(self._arrays.read(place).tobytes())
            prompt = saved["prompt"]
            messages = prompt["messages"]
            with_arrays = {"token_ids": self._arrays.read(prompt["token_ids"]), "text": self._text(prompt["text"])}
            known = {
                "messages": None if messages is None else tuple(messages),
                "images": tuple(prompt.get("images", ())),  # older checkpoints have none, nor have their rollouts
            }
            episodes = tuple(self._episode(episode) for episode in saved["episodes"])
            return RolloutGroup(saved["group_id"], Prompt(**prompt | with_arrays | known), episodes)
        except _UNREADABLE as error:
            raise damaged(self._path, f"has no group at {place}: {error!r}") from error

    def _episode(self, saved: Mapping[str, Any]) -> Episode:
        rollouts = tuple(self._rollout(rollout) for rollout in saved["rollouts"])
        return Episode(saved["episode_id"], saved["group_id"], rollouts)

    def _rollout(self, saved: Mapping[str, Any]) -> Rollout:
        verdict = saved["verdict"]
        return Rollout(
            saved["rollout_id"],
            saved["group_id"],
            tuple(self._span(span) for span in saved["spans"]),
            FinishReason(saved["finish_reason"]),
            self._text(saved["text"]),
            None if verdict is None else _verdict(verdict),
            self._array(saved["routes"]),
            tuple(saved.get("images", ())),
        )

    def _span(self, saved: Mapping[str, Any]) -> Span:
        token_ids = self._arrays.read(saved["token_ids"])
        return Span(SpanSource(saved["source"]), token_ids, self._array(saved["logprobs"]), saved["policy_version"])

    def _array(self, place: Sequence[Any] | None) -> np.ndarray | None:
        return None if place is None else self._arrays.read(place)

    def _text(self, place: Sequence[Any]) -> str:
        return self._arrays.read(place).tobytes().decode("utf-8", "surrogatepass")


def _verdict(saved: Mapping[str, Any]) -> Verdict:
    lists = {name: tuple(saved[name]) for name in ("turn_rewards", "source_rewards", "earned_elsewhere")}
    pairs = tuple((at, value) for at, value in saved["token_rewards"])
    return Verdict(**saved | lists | {"kind": VerdictKind(saved["kind"]), "token_rewards": pairs})
