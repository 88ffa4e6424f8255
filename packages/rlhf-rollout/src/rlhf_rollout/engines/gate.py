"""A gate that holds requests back while weights are exchanged."""

import asyncio
from concurrent.futures import Future


class Gate:
    """Open at first. Coroutines of any event loop may wait at it; it may be moved from any thread."""

    def __init__(self) -> None:
        self._opening: Future[None] | None = None

    def shut(self) -> None:
        """Hold back whoever comes."""
        if self._opening is None:
            self._opening = Future()

    def open(self) -> None:
        """Let all through."""
        opening, self._opening = self._opening, None
        if opening is not None:
            opening.set_result(None)

    async def passed(self) -> None:
        """Return once the gate is open."""
        while (opening := self._opening) is not None:
            # Shielded: a waiter that is cancelled must not cancel the gate for the others.
            await asyncio.shield(asyncio.wrap_future(opening))
