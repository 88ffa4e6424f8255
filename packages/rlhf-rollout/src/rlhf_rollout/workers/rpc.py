"""Calls of a user's code in a process: this side of the connection.

The connection carries one JSON value per line. This side sends `{"call": N, ...}`, where call 0 has the code imported,
then the answers to what the code asks, `{"cancel": N}` and `{"ping": N}`. The process sends `{"call": N, "ask": M,
"request": {...}}`, at the end of a call `{"call": N, "result": {...}}` or `{"call": N, "error": "..."}`, `{"ping": N}`,
and `{"hanging": N}` when the number of functions that hang in it has changed.
"""

import asyncio
import contextlib
import itertools
import json
import logging
import math
import time
from collections.abc import Hashable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rlhf_data.errors import EngineError, RewardError, with_hint
from rlhf_rollout.workers.guarded import GuardedProcess, WorkerOptions, import_path
from rlhf_rollout.workers.user_code import Target

_LOGGER = logging.getLogger(__name__)
MAX_LINE_BYTES = 2**27
_NOTICE_S = 10.0  # after this time of importing, the user is told what is waited for
_PING_TIMEOUT_S = 5.0
_CLOSE_TIMEOUT_S = 10.0
_DRAIN_CHECK_S = 0.1
_MAX_HANGING = 16  # threads of a process whose functions hang, each with its memory
_LATE_HINT = "do slow work when it is called, not when it is imported, or raise ``start_timeout_s``"
_IMPORT_HINT = (
    "it must import in a fresh interpreter; its own folder is on the import path, and of environment variables such as"
    " HF_TOKEN it receives those that ``WorkerOptions.env`` names"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class UserCode:
    """What a process runs.

    Attributes:
        target: where the user's code is.
        program: a module of this package, whose `serve` runs in the process.
        name: the code in messages, such as "the agent".
        process: its process in messages.
        is_shared: whether a process runs several calls side by side. Otherwise a late call is at fault by itself, and
            the process has nothing to close at its end.
        settings: further values for `serve`.
        import_hint: what to do if the target cannot be imported; "" for what is always right.
    """

    target: Target
    program: str
    name: str
    process: str
    is_shared: bool
    settings: Mapping[str, Any] = field(default_factory=dict)
    import_hint: str = ""


@dataclass(eq=False)
class CallError(Exception):
    """A call failed in the user's code or in its process.

    Attributes:
        message: one line for people.
        is_late: there was no answer in time.
        is_invalid: the code answered, with a result of which no use can be made; the message may have several lines.
        is_fatal: the process has ended.
        again: None if the call itself is at fault. Otherwise its process ended, perhaps because of another call, and it
            may run again together with the calls of the same value, which are half of those in the process.
    """

    message: str
    is_late: bool = False
    is_invalid: bool = False
    is_fatal: bool = False
    again: Hashable | None = None

    def __str__(self) -> str:
        return self.message


class Activity:
    """Tells the time of a user's code from the time in which it waits for this side, such as for the policy."""

    def __init__(self) -> None:
        self.moved = asyncio.Event()  # the code has asked for something or got it
        self.num_waiting = 0
        self.since = time.monotonic()  # the time of the user's code counts from here

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """Return a context in which the code waits for an answer."""
        self.num_waiting += 1
        self.moved.set()
        is_refused = False
        try:
            yield
        except Exception as error:
            is_refused = not isinstance(error, EngineError)
            raise
        finally:
            self.num_waiting -= 1
            self.moved.set()
            if not is_refused:  # code that repeats what is refused must end, too
                self.since = time.monotonic()


class Call:
    """A call as a process runs it: what the code is told, and what it gets when it asks.

    Attributes:
        activity: what the code waits for.
    """

    def __init__(self, message: Mapping[str, Any] | None = None) -> None:
        self.activity = Activity()
        self._message = message or {}

    def begin(self, ready: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return what the code is told. Called again when the call starts anew after its process has died.

        `ready` is what the process has said of the code after its import.
        """
        return self._message

    async def answer(self, request: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the answer to a request of the code. Raises EngineError."""
        return {"error": "nothing can be asked for in this call"}


@dataclass(slots=True)
class _Running:
    """A call under way in a process."""

    call: Call
    timeout_s: float
    done: asyncio.Future[Any]
    asks: set[asyncio.Task[None]] = field(default_factory=set)

    @property
    def left_s(self) -> float:
        """Seconds until the call is late."""
        return self.call.activity.since + self.timeout_s - time.monotonic()

    @property
    def is_late(self) -> bool:
        """Whether the code should have answered or asked by now."""
        return not self.done.done() and not self.call.activity.num_waiting and self.left_s <= 0


class WorkerProcess(GuardedProcess):
    """A process that runs calls of a user's code. Use it from one event loop, after `start`.

    Args:
        code: what it runs.
        options: how it runs.
        log_path: file for what the code prints; None for this process's standard error.

    Attributes:
        num_hanging: plain functions of the code that run on after their calls have ended.
    """

    def __init__(self, code: UserCode, options: WorkerOptions, *, log_path: Path | None = None) -> None:
        super().__init__(options, log_path=log_path)
        self._code = code
        self._start_timeout_s = options.start_timeout_s
        self._numbers = itertools.count()
        self._running: dict[int, _Running] = {}
        self._pings: dict[int, asyncio.Future[None]] = {}
        self._failure = ""
        self._ready: Mapping[str, Any] | None = None
        self._reading: asyncio.Task[None] | None = None
        self._shutting_down: asyncio.Task[None] | None = None
        self.num_hanging = 0

    @property
    def is_worn(self) -> bool:
        """Whether so many functions hang in it that another process must have the next calls."""
        return self.num_hanging >= _MAX_HANGING

    @property
    def alive(self) -> bool:
        """Whether the process runs and takes calls: one that is being killed takes none."""
        return super().alive and not self._failure

    @property
    def has_failed(self) -> bool:
        """Whether it takes no more calls. Calls under way fail when the process ends, which `alive` finds."""
        return bool(self._failure)

    async def start(self) -> None:
        """Have the process import the code.

        Raises RewardError when that fails or takes too long. It then must still be shut down.
        """
        module, limit = self._code.target.module, self._start_timeout_s
        reader, self._writer = await asyncio.open_connection(sock=self._connection, limit=MAX_LINE_BYTES)
        self._reading = asyncio.create_task(self._read(reader))
        told = {"path": import_path(), "program": self._code.program, "target": asdict(self._code.target)}
        notice = f"importing {module} takes longer than {_NOTICE_S:g} s; the limit is {limit:g} s"
        timer = asyncio.get_running_loop().call_later(_NOTICE_S, _LOGGER.warning, notice)
        try:
            self._ready = await self.call(Call(told | dict(self._code.settings)), limit)
        except CallError as failure:
            raise RewardError(self._start_problem(failure)) from None
        finally:
            timer.cancel()

    async def call(self, call: Call, timeout_s: float) -> Any:
        """Run one call and return its result. Raises CallError.

        `timeout_s` are the seconds that the code may take until it answers or asks, and between two answers to it.
        """
        number = next(self._numbers)
        running = _Running(call, timeout_s, asyncio.get_running_loop().create_future())
        self._running[number] = running
        try:
            call.activity.since = time.monotonic()
            self._send({"call": number, "timeout_s": timeout_s, **call.begin(self._ready or {})})
            if timeout_s == math.inf:
                await asyncio.wait([running.done])
            while not running.done.done():
                await self._wait_for_sign(running)
            return running.done.result()
        finally:
            del self._running[number]
            for task in running.asks:
                task.cancel()
            if not running.done.done() and not self._failure:
                self._send({"cancel": number})
            running.done.cancel()

    async def drain(self) -> None:
        """Shut it down once its calls have ended."""
        while self._running:
            await asyncio.sleep(_DRAIN_CHECK_S)
        await self.shut_down()

    async def shut_down(self) -> None:
        """End the process and what it runs; a shared one first has some seconds to close what it has open."""
        # Once only: after its end, its number may be that of another process.
        self._shutting_down = self._shutting_down or asyncio.create_task(self._shut_down())
        await asyncio.shield(self._shutting_down)

    async def _shut_down(self) -> None:
        may_close = self.alive and self._ready is not None and self._code.is_shared
        self._fail(f"{self._code.process} has been shut down")
        if self._reading is not None:
            self._reading.cancel()
        if may_close:
            with contextlib.suppress(OSError):
                self._writer.write_eof()
            await asyncio.to_thread(self.wait, _CLOSE_TIMEOUT_S)
        await asyncio.to_thread(self.kill)
        if self._reading is not None:
            self._writer.transport.abort()  # before the socket is closed: its number may be given to another one
        self._connection.close()

    async def _wait_for_sign(self, running: _Running) -> None:
        """Wait until the call ends or its code asks. Raises CallError when the code takes too long."""
        activity = running.call.activity
        activity.moved.clear()
        moved = asyncio.create_task(activity.moved.wait())
        limit = None if activity.num_waiting else max(running.left_s, 0.0)
        try:
            await asyncio.wait([moved, running.done], timeout=limit, return_when=asyncio.FIRST_COMPLETED)
        finally:
            moved.cancel()
        if not running.is_late:
            return
        may_go_on = self._code.is_shared and self._ready is not None
        late = f"{self._code.name} took longer than {running.timeout_s:g} s"
        if may_go_on and await self._answers():  # what the call has sent before comes first
            if running.is_late:
                raise CallError(late, is_late=True)
            return  # this process was busy, not the user's code
        # If there are several calls, one of them blocks the process, and nobody can tell which one.
        self._fail(late, is_late=True)
        await asyncio.to_thread(self.kill)

    async def _answers(self) -> bool:
        """Return whether the process answers at all, or one call blocks all others."""
        number = next(self._numbers)
        ping = self._pings[number] = asyncio.get_running_loop().create_future()
        self._send({"ping": number})
        try:
            done, _ = await asyncio.wait([ping], timeout=_PING_TIMEOUT_S)
        finally:
            del self._pings[number]
        return bool(done) and not self._failure

    async def _read(self, reader: asyncio.StreamReader) -> None:
        """Hand out what the process sends, until it ends."""
        reason = f"something other than an answer came from {self._code.process}"
        try:
            while line := await reader.readline():
                self._take(json.loads(line))
            reason = ""
        except (ValueError, KeyError, TypeError, AttributeError):  # the user's code has written to the connection
            await asyncio.to_thread(self.kill)
        except OSError:
            reason = ""
        self._fail(reason or f"{self._code.process} {await asyncio.to_thread(self.ending)}")

    def _take(self, message: Mapping[str, Any]) -> None:
        if "ping" in message:
            if (ping := self._pings.get(message["ping"])) and not ping.done():
                ping.set_result(None)
            return
        if "hanging" in message:
            self.num_hanging = int(message["hanging"])
            return
        running = self._running.get(message["call"])
        if running is None or running.done.done():
            return  # it was given up, or this is a second answer
        if "ask" in message:
            task = asyncio.create_task(self._answer(running, message))
            running.asks.add(task)
            task.add_done_callback(running.asks.discard)
        elif "error" in message:
            running.done.set_exception(CallError(str(message["error"]), is_invalid=bool(message.get("invalid"))))
        else:
            running.done.set_result(dict(message["result"]))

    async def _answer(self, running: _Running, message: Mapping[str, Any]) -> None:
        try:
            answer = await running.call.answer(message["request"])
        except EngineError as error:
            answer = {"error": str(error)}
        if not self._failure:
            self._send({"answer": message["ask"], **answer})

    def _send(self, message: Mapping[str, Any]) -> None:
        self._writer.write(json.dumps(message).encode() + b"\n")

    def _fail(self, reason: str, *, is_late: bool = False) -> None:
        """End all calls for this reason. If there are several, each may be tried again: one of them is at fault."""
        self._failure = self._failure or reason
        ended = [running for running in self._running.values() if not running.done.done()]
        for index, running in enumerate(ended):
            again = (self, index % 2) if len(ended) > 1 else None
            failure = CallError(self._failure, is_late=is_late, is_fatal=True, again=again)
            running.done.set_exception(failure)
        for ping in self._pings.values():
            ping.cancel()

    def _start_problem(self, failure: CallError) -> str:
        if failure.is_invalid:
            return str(failure)
        source = f"{self._code.name} from {self._code.target.module}"
        if failure.is_late:
            return with_hint(f"importing {source} took longer than {self._start_timeout_s:g} s", _LATE_HINT)
        return with_hint(f"cannot import {source}: {failure}", self._code.import_hint or _IMPORT_HINT)
