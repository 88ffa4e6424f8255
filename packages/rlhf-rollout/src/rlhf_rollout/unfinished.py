"""What is written of groups that are not complete, so that a run that continues need not draw it again."""

import hashlib
from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from rlhf_data.records import FinishReason
from rlhf_rollout.protocols import Draft, SamplingParams
from rlhf_rollout.records_io import unpack_array


@dataclass(frozen=True, slots=True, eq=False)
class Written:
    """The first numbers of an array to which others are added meanwhile.

    Attributes:
        values: all numbers so far.
        size: how many of them are meant.
    """

    values: "array[Any]"
    size: int

    def copy(self) -> np.ndarray:
        """Return them, [size]."""
        return np.array(self.values[: self.size])


class UnfinishedGroups:
    """Keeps the samples of the requests of each group until the group is complete.

    A group that is drawn anew because its run was interrupted would have shorter answers than the policy writes: short
    ones are complete before the interruption, and long ones get a second chance to be short. So another process goes
    on behind what was written. Its requests find their samples by what they ask: the conversation, its tokens and
    images, and the sampling. An agent's episode begins again, and has its earlier answers at once as long as its
    environment says the same.
    """

    def __init__(self) -> None:
        self._asked: dict[str, list[tuple[str, list[Draft]]]] = {}  # digests and samples of a group's requests
        self._found: dict[str, list[tuple[str, list[Draft]]]] = {}  # those of another process, until they are taken

    def drafts(
        self,
        group_id: str | None,
        conversation: str | None,
        token_ids: np.ndarray,
        sampling: SamplingParams,
        images: Sequence[str] = (),
    ) -> list[Draft]:
        """Return the samples of a request of a group: those of an equal one in another process, or empty ones.

        They are not kept without a group.
        """
        if group_id is None:
            return [Draft() for _ in range(sampling.num_samples)]
        asked = (conversation, sampling, *images)
        state = hashlib.blake2b(repr(asked).encode(), digest_size=16)
        state.update(np.ascontiguousarray(token_ids, np.int32))
        digest = state.hexdigest()
        found = self._found.get(group_id, [])
        at = next((at for at, (other, _) in enumerate(found) if other == digest), None)
        drafts = [Draft() for _ in range(sampling.num_samples)] if at is None else found.pop(at)[1]
        for draft in drafts:
            draft.reopen(len(token_ids))
        self._asked.setdefault(group_id, []).append((digest, drafts))
        return drafts

    def forget(self, group_id: str) -> None:
        """Drop what is written of a group: it is complete, or has failed."""
        self._asked.pop(group_id, None)
        self._found.pop(group_id, None)

    def state(self, group_ids: Iterable[str]) -> dict[str, list[Any]]:
        """Return what is written of these groups, for `restore`: JSON values, `Written` numbers and arrays of routes.

        It is all that this event loop knows. No token is held back, as one would be drawn again that is known not to
        be the last, and then might be. Numbers are not copied, so that a state costs nothing until it is saved.
        """
        state = {}
        for group_id in group_ids:
            requests = [*self._asked.get(group_id, ()), *self._found.get(group_id, ())]
            state[group_id] = [[digest, [_packed(draft) for draft in drafts]] for digest, drafts in requests]
        return state

    def restore(self, state: Mapping[str, list[Any]]) -> None:
        """Let the requests of these groups go on behind what another process has written.

        Numbers are arrays, or the texts into which older versions have packed them.
        """
        self._found = {
            group_id: [(digest, [_unpacked(draft) for draft in drafts]) for digest, drafts in requests]
            for group_id, requests in state.items()
        }


def _packed(draft: Draft) -> dict[str, Any]:
    size = min(len(draft.token_ids), len(draft.logprobs))  # the log-prob of a token may come after it
    routes = tuple(draft.routes)
    return {
        "token_ids": Written(draft.token_ids, size),
        "logprobs": Written(draft.logprobs, size),
        "versions": [(start, version) for start, version in draft.versions if start <= size],
        "routes": np.concatenate(routes) if routes else None,
        "num_cached_tokens": draft.num_cached_tokens,
        "finish_reason": draft.finish_reason,
    }


def _unpacked(packed: Mapping[str, Any]) -> Draft:
    reason = packed["finish_reason"]
    routes = _numbers(packed["routes"])
    return Draft(
        token_ids=_numbers(packed["token_ids"]),
        logprobs=_numbers(packed["logprobs"]),
        versions=[(start, version) for start, version in packed["versions"]],
        routes=[] if routes is None else [routes],
        num_cached_tokens=packed["num_cached_tokens"],
        finish_reason=FinishReason(reason) if reason else None,
    )


def _numbers(saved: Any) -> np.ndarray | None:
    if isinstance(saved, Written):
        return saved.copy()
    return saved if isinstance(saved, np.ndarray) else unpack_array(saved)
