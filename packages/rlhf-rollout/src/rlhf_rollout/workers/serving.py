"""Calls of a user's code in a process: the process's side of the connection, which `rpc` describes.

Standard output belongs to the user's code. A child that the code forks ends when it comes back to this module.
"""

import asyncio
import collections
import contextlib
import functools
import inspect
import itertools
import json
import os
import selectors
import socket
import sys
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from rlhf_data.errors import RewardError
from rlhf_rollout.workers.rpc import MAX_LINE_BYTES
from rlhf_rollout.workers.threads import CALL, num_hanging
from rlhf_rollout.workers.user_code import Target, explain

_MAX_THREADS = 4096  # for plain functions of the code, at the same time
_HANGING_CHECK_S = 1.0
_HANGING_CHECKS = 5  # a function whose call has only just ended may end by itself

Message = Mapping[str, Any]
Ask = Callable[[Message], Awaitable[Message]]


def serve_one_at_a_time(
    connection: socket.socket, target: Target, load: Callable[[], tuple[Callable[[Message], Any], Message]]
) -> None:
    """Import the user's code, then answer one call after the other, on the main thread, until the connection closes.

    `load` imports the code; it returns the function that answers a call, and what the other side is told of the code.
    Coroutines that it returns run in one event loop, so that their clients stay connected between calls.
    """
    send = _sender(connection.sendall)
    with connection.makefile("rb") as lines, asyncio.Runner() as runner:
        try:
            answer, ready = load()
            send({"call": 0, "result": ready})
        except BaseException as error:  # also SystemExit: the other side must be told the reason
            send({"call": 0, **_told(error, target)})
            return
        while line := lines.readline():
            call = json.loads(line)
            try:
                result = answer(call)
                result = {"result": runner.run(result) if inspect.iscoroutine(result) else result}
            except BaseException as error:
                result = _told(error, target)
            send({"call": call["call"], **result})


def serve_side_by_side(
    connection: socket.socket,
    target: Target,
    load: Callable[[], Callable[[Any], Awaitable[Any]]],
    session_of: Callable[[Message, Ask], Any],
) -> None:
    """Import the user's code, then run all calls in one event loop until the connection closes.

    `load` imports the code; it returns the function that answers a call. If the function has a `start` and a `close`,
    they are awaited before the first call and after the last. It receives what `session_of` makes of the message and of
    a function that asks the other side.
    """
    send = _sender(connection.sendall)
    try:
        run = load()
        make_loop = functools.partial(asyncio.SelectorEventLoop, _OwnSelector())
        with contextlib.suppress(ConnectionError), asyncio.Runner(loop_factory=make_loop) as runner:
            runner.run(_Server(target, run, session_of).serve(connection, send))
    except BaseException as error:
        send({"call": 0, **_told(error, target)})


def _sender(write: Callable[[bytes], Any]) -> Callable[[Message], None]:
    """Return a function that sends a message; a child that the user's code has forked ends there."""
    owner = os.getpid()

    def send(message: Message) -> None:
        with contextlib.suppress(Exception):  # the code may have closed stdout
            sys.stdout.flush()
        if os.getpid() != owner:
            os._exit(0)
        write(json.dumps(message).encode() + b"\n")

    return send


def _told(error: BaseException, target: Target) -> Message:
    """Return the part of an answer that says why there is no result."""
    if isinstance(error, RewardError):
        return {"error": str(error), "invalid": True}
    return {"error": explain(error, target)}


class _OwnSelector(selectors.DefaultSelector):
    """The selector of an event loop that ends the process when it is a child that the user's code has forked.

    Such a child would go on with all calls, and take messages that are meant for its parent.
    """

    def __init__(self) -> None:
        super().__init__()
        self._owner = os.getpid()

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        """See `selectors.BaseSelector.select`."""
        if os.getpid() != self._owner:
            os._exit(0)
        return super().select(timeout)


class _Server:
    """Runs calls side by side in one event loop."""

    def __init__(
        self, target: Target, run: Callable[[Any], Awaitable[Any]], session_of: Callable[[Message, Ask], Any]
    ) -> None:
        self._target = target
        self._run_call = run
        self._session_of = session_of
        self._numbers = itertools.count(1)
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._answers: dict[int, asyncio.Future[Message]] = {}

    async def serve(self, connection: socket.socket, tell: Callable[[Message], None]) -> None:
        """Start the code, `tell` the other side, and serve. Raises whatever the code's start raises."""
        # The default is four threads more than cores: a few functions that hang would hold up all other calls.
        asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(_MAX_THREADS))
        if start := getattr(self._run_call, "start", None):
            await start()
        tell({"call": 0, "result": {}})
        try:
            await self._serve(connection.dup())
        finally:
            for task in self._tasks.values():
                task.cancel()
            await asyncio.gather(*self._tasks.values(), return_exceptions=True)
            if close := getattr(self._run_call, "close", None):
                await close()
        os._exit(0)  # threads of the code that hang do not delay the end

    async def _serve(self, connection: socket.socket) -> None:
        # A child that the code forks must not read on: see `_OwnSelector`.
        nothing = os.open(os.devnull, os.O_RDWR)
        os.register_at_fork(after_in_child=functools.partial(os.dup2, nothing, connection.fileno()))
        reader, writer = await asyncio.open_connection(sock=connection, limit=MAX_LINE_BYTES)
        self._send = _sender(writer.write)
        self._watching = asyncio.create_task(self._watch())
        while line := await reader.readline():
            message = json.loads(line)
            if "ping" in message:
                self._send(message)
            elif "answer" in message:
                waiting = self._answers.get(message["answer"])
                if waiting is not None and not waiting.done():
                    waiting.set_result(message)
            elif "cancel" in message:
                if task := self._tasks.get(message["cancel"]):
                    task.cancel()
            else:
                self._tasks[message["call"]] = asyncio.create_task(self._run(message))

    async def _watch(self) -> None:
        """Tell the other side how many functions of the code hang. Only the end of the process ends their threads."""
        counts = collections.deque([0], _HANGING_CHECKS)
        told = 0
        while True:
            await asyncio.sleep(_HANGING_CHECK_S)
            counts.append(num_hanging())
            if min(counts) != told:
                told = min(counts)
                self._send({"hanging": told})

    async def _run(self, message: Message) -> None:
        number = message["call"]
        CALL.set(asyncio.current_task())
        home = asyncio.get_running_loop()

        async def ask(request: Message) -> Message:
            asking = self._ask(number, request)
            if asyncio.get_running_loop() is home:
                return await asking
            # The code has a thread with an event loop of its own, such as that of a server.
            return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(asking, home))

        try:
            result = await self._run_call(self._session_of(message, ask))
            self._send({"call": number, "result": result})
        except BaseException as error:
            if not asyncio.current_task().cancelling():  # by the other side, which then wants no answer
                self._send({"call": number, "error": explain(error, self._target)})
        finally:
            del self._tasks[number]

    async def _ask(self, number: int, request: Message) -> Message:
        """Return the other side's answer to a request of a call."""
        key = next(self._numbers)
        self._answers[key] = asyncio.get_running_loop().create_future()
        self._send({"call": number, "ask": key, "request": request})
        try:
            return await self._answers[key]
        finally:
            self._answers.pop(key, None)
