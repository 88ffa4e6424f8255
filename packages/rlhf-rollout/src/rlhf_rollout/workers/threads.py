"""Threads for users' plain functions, and how many of them hang. Runs in the processes of users' code."""

import asyncio
import contextvars
import functools
import inspect
from collections.abc import Callable
from concurrent.futures import Executor, ThreadPoolExecutor
from typing import Any

# The task of the call that is under way, for what the call starts.
CALL: contextvars.ContextVar[asyncio.Task[Any] | None] = contextvars.ContextVar("call", default=None)
_running: dict[object, asyncio.Task[Any] | None] = {}  # the calls of the functions that run


def num_hanging() -> int:
    """Return how many functions still run though their calls have ended."""
    return sum(call is not None and call.done() for call in list(_running.values()))


async def called(function: Callable[..., Any], *arguments: Any, executor: Executor | None = None, **named: Any) -> Any:
    """Return the result of a coroutine function, or of a plain one, which runs in a thread.

    A plain function that has begun runs on when this is cancelled, and is counted by `num_hanging` once its call ends.

    Args:
        function: what is called.
        arguments: the function's positional arguments.
        executor: has the thread; None for the event loop's own.
        named: the function's keyword arguments.
    """
    if inspect.iscoroutinefunction(function):
        return await function(*arguments, **named)
    call = functools.partial(contextvars.copy_context().run, function, *arguments, **named)
    key = object()
    owner = CALL.get()

    def run() -> Any:
        _running[key] = owner
        try:
            return call()
        finally:
            del _running[key]

    result = await asyncio.get_running_loop().run_in_executor(executor, run)
    return await result if inspect.isawaitable(result) else result


class CodeThread:
    """One thread for the plain functions of one object.

    Some libraries want all their calls from one thread, and a function that hangs must not hold up other episodes.
    """

    def __init__(self) -> None:
        self._executor = ThreadPoolExecutor(1)

    async def run(self, function: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
        """Return what `called` returns: a plain function runs in the thread after those before it."""
        return await called(function, *arguments, executor=self._executor, **named)

    def close(self) -> None:
        """Let the thread end after its last function."""
        self._executor.shutdown(wait=False)
