"""What the clients of a server use of an engine, session by session."""

import asyncio
import contextlib
import time
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

IDLE_S = 3600.0  # after the last request, after which a session that nobody has ended is forgotten
_MAX_SESSIONS = 1 << 16


@dataclass(slots=True)
class _Session:
    used_at: float = 0.0
    calls: set[asyncio.Future[Sequence[Any]]] = field(default_factory=set)
    # The requests of a session, and the tokens of those that were answered.
    counts: dict[str, int] = field(
        default_factory=lambda: {"requests": 0, "prompt_tokens": 0, "cached_prompt_tokens": 0, "generated_tokens": 0}
    )


class Sessions:
    """Counts what each session uses, and cancels its requests when it is ended."""

    def __init__(self) -> None:
        self._sessions: OrderedDict[str, _Session] = OrderedDict()  # the least recently used one first

    @contextlib.contextmanager
    def calling(self, name: str | None, call: asyncio.Future[Sequence[Any]], num_tokens: int) -> Iterator[None]:
        """Count a call of the engine with a prompt of `num_tokens`; without a name, do nothing."""
        if name is None:
            yield
            return
        session = self._sessions.setdefault(name, _Session())
        self._sessions.move_to_end(name)
        session.used_at = time.monotonic()
        session.counts["requests"] += 1
        session.calls.add(call)
        self._forget()
        try:
            yield
        finally:
            session.calls.discard(call)
            session.used_at = time.monotonic()
        completions = call.result()
        session.counts["prompt_tokens"] += num_tokens
        session.counts["cached_prompt_tokens"] += cached_tokens(completions)
        session.counts["generated_tokens"] += sum(len(completion.token_ids) for completion in completions)

    def counts(self, name: str) -> dict[str, int] | None:
        """Return what a session has used; None for one that is not known."""
        self._forget()
        session = self._sessions.get(name)
        return None if session is None else session.counts

    def end(self, name: str) -> None:
        """Forget a session and cancel its calls."""
        for call in self._sessions.pop(name).calls:
            call.cancel()

    def __len__(self) -> int:
        self._forget()
        return len(self._sessions)

    def _forget(self) -> None:
        """Forget sessions that have been idle for long, and the least recently used ones if there are too many."""
        while self._sessions:
            name, session = next(iter(self._sessions.items()))
            is_idle = not session.calls and time.monotonic() - session.used_at > IDLE_S
            if not is_idle and len(self._sessions) <= _MAX_SESSIONS:
                return
            del self._sessions[name]


def cached_tokens(completions: Sequence[Any]) -> int:
    """Return how many tokens of a request's prompt the engine had in its cache; 0 where it does not say so."""
    return max((completion.num_cached_tokens or 0 for completion in completions), default=0)
