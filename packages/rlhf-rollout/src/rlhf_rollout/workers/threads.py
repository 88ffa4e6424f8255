"""Threads for users' plain functions, and how many of them hang. Runs in agent processes."""

import asyncio
import contextvars
import functools
import inspect
import math
import time
from collections.abc import Callable
from concurrent.futures import Executor, ThreadPoolExecutor
from typing import Any

_given_up: dict[object, float] = {}  # functions that run though nobody waits for them, from a time on


def num_hanging(after_s: float) -> int:
    """Return how many functions still run though their callers gave up `after_s` seconds ago or earlier."""
    latest = time.monotonic() - after_s
    return sum(since <= latest for since in list(_given_up.values()))


async def called(
    function: Callable[..., Any],
    *arguments: Any,
    executor: Executor | None = None,
    patience_s: float = math.inf,
    **named: Any,
) -> Any:
    """Return the result of a coroutine function, or of a plain one, which runs in a thread.

    A plain function that has begun runs on when this is cancelled, and is then counted by `num_hanging`.

    Args:
        function: the function, called with the arguments that have no other meaning here.
        arguments: of the function.
        executor: has the thread; None for the event loop's own.
        patience_s: seconds after which the caller does not wait for a function that has begun.
        named: arguments of the function.
    """
    if inspect.iscoroutinefunction(function):
        return await function(*arguments, **named)
    call = functools.partial(contextvars.copy_context().run, function, *arguments, **named)
    key = object()
    is_running = False

    def run() -> Any:
        nonlocal is_running
        is_running = True
        _given_up[key] = time.monotonic() + patience_s
        try:
            return call()
        finally:
            is_running = False
            _given_up.pop(key, None)

    try:
        result = await asyncio.get_running_loop().run_in_executor(executor, run)
    except asyncio.CancelledError:
        if is_running:
            _given_up[key] = time.monotonic()
        if not is_running:  # it may have ended in between
            _given_up.pop(key, None)
        raise
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
