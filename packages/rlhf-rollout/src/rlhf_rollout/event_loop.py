"""An asyncio event loop on a thread of its own, for a main thread that blocks in its calls."""

import asyncio
import queue
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from contextlib import suppress
from typing import Any, TypeVar

T = TypeVar("T")
_CLEANUP_TIMEOUT_S = 60.0  # for what is cancelled at the end


class EventLoopThread:
    """Runs coroutines on one event loop, which goes on between the calls of the main thread.

    Functions given to `report` run on the thread that calls `run`: at once during a call, otherwise at the next one.
    So what they use, such as the terminal, need not be safe for several threads.

    Args:
        name: the thread's name, for debuggers and profilers.
    """

    def __init__(self, name: str) -> None:
        self._reports: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        """Run the loop until `close` stops it: an interrupt of a task, which has it as its result, ends only a turn."""
        while True:
            with suppress(KeyboardInterrupt, SystemExit):
                self._loop.run_forever()
                return

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Return the result of a coroutine. When this call is interrupted, the coroutine is cancelled."""
        return self.wait(self.start(coroutine))

    def wait(self, future: "Future[T]") -> T:
        """Return the result of a coroutine that was started. When this call is interrupted, it is cancelled."""
        future.add_done_callback(lambda _: self._reports.put(None))
        try:
            while not future.done():
                if (report := self._reports.get()) is not None:
                    report()
            self.flush()
            return future.result()
        finally:
            future.cancel()

    def start(self, coroutine: Coroutine[Any, Any, T]) -> "Future[T]":
        """Start a coroutine and return its future."""
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    def call(self, function: Callable[[], T]) -> T:
        """Return the result of a function that runs on the loop's thread, between two steps of its tasks."""

        async def run() -> T:
            return function()

        return self.run(run())

    def report(self, function: Callable[[], object]) -> None:
        """Have the main thread call `function`. May be called on any thread."""
        self._reports.put(function)

    def flush(self) -> None:
        """Call the functions that wait to be called."""
        while not self._reports.empty():
            if (report := self._reports.get()) is not None:
                report()

    def close(self) -> None:
        """Cancel all tasks, wait for their end, and end the thread."""
        with suppress(TimeoutError):
            self.start(_cancel_others()).result(_CLEANUP_TIMEOUT_S)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(_CLEANUP_TIMEOUT_S)
        if not self._thread.is_alive():
            self._loop.close()
        self.flush()


async def _cancel_others() -> None:
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    loop = asyncio.get_running_loop()
    await loop.shutdown_asyncgens()
    await loop.shutdown_default_executor()
