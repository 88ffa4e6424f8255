"""A thread for a user's plain functions. Runs in agent processes."""

import asyncio
import functools
import inspect
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any


class CodeThread:
    """One thread for the plain functions of one object.

    Some libraries want all their calls from one thread, and a function that hangs must not hold up other episodes.
    """

    def __init__(self) -> None:
        self._executor = ThreadPoolExecutor(1)

    async def run(self, function: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
        """Return the result of a coroutine function, or of a plain one run in the thread after those before it.

        A plain function that has begun runs on when this is cancelled.
        """
        if inspect.iscoroutinefunction(function):
            return await function(*arguments, **named)
        call = functools.partial(function, *arguments, **named)
        result = await asyncio.get_running_loop().run_in_executor(self._executor, call)
        return await result if inspect.isawaitable(result) else result

    def close(self) -> None:
        """Let the thread end after its last function."""
        self._executor.shutdown(wait=False)
