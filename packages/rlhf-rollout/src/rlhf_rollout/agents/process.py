"""Processes that run users' agents: many episodes in each, over one connection."""

import asyncio
import contextlib
import itertools
import json
import time
from collections.abc import Hashable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Protocol

from rlhf_data.errors import EngineError, RewardError, with_hint
from rlhf_data.own_code import is_trusted
from rlhf_rollout.agents.interface import BudgetSpentError
from rlhf_rollout.rewards.process import GuardedProcess, import_path
from rlhf_rollout.rewards.sources import WorkerOptions
from rlhf_rollout.rewards.user_function import RewardTarget

PROGRAM = "rlhf_rollout.agents.worker"
_MAX_LINE_BYTES = 2**27
_PING_TIMEOUT_S = 5.0
_CLOSE_TIMEOUT_S = 10.0
_DRAIN_CHECK_S = 0.1
_MAX_HANGING = 16  # threads of a process whose functions hang, each with its memory


class AgentError(Exception):
    """An episode failed in its agent: the message is one line for people.

    Attributes:
        is_late: the agent did not answer in time.
        again: None if the episode itself failed. Otherwise its process ended, perhaps because of another episode, and
            it may run again together with the episodes of the same value, which are half of those in the process.
    """

    def __init__(self, message: str, *, is_late: bool = False, again: Hashable | None = None) -> None:
        super().__init__(message)
        self.is_late = is_late
        self.again = again


class Activity:
    """Tells the time of an agent's code from the time in which it waits for the policy."""

    def __init__(self) -> None:
        self.moved = asyncio.Event()  # the agent has asked for something or got it
        self.num_waiting = 0
        self.since = time.monotonic()  # the time of the agent's code counts from here

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """Return a context in which the agent waits for the policy."""
        self.num_waiting += 1
        self.moved.set()
        is_refused = False
        try:
            yield
        except (BudgetSpentError, ValueError):
            is_refused = True
            raise
        finally:
            self.num_waiting -= 1
            self.moved.set()
            if not is_refused:  # an agent that repeats what is refused must end, too
                self.since = time.monotonic()


class Attempt(Protocol):
    """An episode as a process runs it.

    Attributes:
        activity: what the agent waits for.
    """

    activity: Activity

    def begin(self) -> Mapping[str, Any]:
        """Return what the agent is told. Called again when the episode starts anew after its process has died."""

    async def answer(self, request: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the policy's answer to a request of the agent. Raises EngineError."""


@dataclass(slots=True)
class _Running:
    """An episode under way in a process."""

    attempt: Attempt
    done: asyncio.Future[dict[str, Any]]
    asks: set[asyncio.Task[None]] = field(default_factory=set)


class AgentProcess(GuardedProcess):
    """A process that runs episodes of the agent of `target`. Use it from one event loop, after `start`.

    Args:
        target: the agent's file or module, and a name in it.
        options: how the process runs.
        timeout_s: seconds that the agent's code may take between two answers of the policy.
        log_path: file for what the agent prints; None for this process's standard error.

    Attributes:
        num_hanging: plain functions of the agent that run on after their episodes have ended.
    """

    def __init__(
        self, target: RewardTarget, options: WorkerOptions, *, timeout_s: float, log_path: Path | None = None
    ) -> None:
        super().__init__(options, log_path=log_path)
        self._target = target
        self._start_timeout_s = options.start_timeout_s
        self._timeout_s = timeout_s
        self._numbers = itertools.count(1)
        self._running: dict[int, _Running] = {}
        self._pings: dict[int, asyncio.Future[None]] = {}
        self._failure = ""
        self._shutting_down: asyncio.Task[None] | None = None
        self.num_hanging = 0

    @property
    def is_worn(self) -> bool:
        """Whether so many functions hang in it that another process must have the next episodes."""
        return self.num_hanging >= _MAX_HANGING

    @property
    def alive(self) -> bool:
        """Whether the process runs and takes episodes: one that is being killed takes none."""
        return super().alive and not self._failure

    async def start(self, tokenizer: str | None) -> None:
        """Have the process import the agent. `tokenizer` is the folder or hub name that agents load on demand.

        Raises RewardError when that fails or takes too long. It then must still be shut down.
        """
        self._reader, self._writer = await asyncio.open_connection(sock=self._connection, limit=_MAX_LINE_BYTES)
        first = {
            "path": import_path(),
            "program": PROGRAM,
            "target": asdict(self._target),
            "tokenizer": tokenizer,
            "trust_remote_code": is_trusted(tokenizer),
        }
        self._send(first)
        try:
            async with asyncio.timeout(self._start_timeout_s):
                answer = json.loads(await self._reader.readline() or b'{"error": ""}')
        except (TimeoutError, ValueError) as error:
            late = f"took longer than {self._start_timeout_s:g} s" if isinstance(error, TimeoutError) else "failed"
            raise RewardError(f"importing the agent from {self._target.module} {late}") from None
        if "error" in answer:
            reason = answer["error"] or f"its process {await asyncio.to_thread(self.ending)}"
            message = f"cannot import the agent from {self._target.module}: {reason}"
            hint = "it must import in a fresh interpreter; its own folder is on the import path"
            raise RewardError(answer["error"] if answer.get("invalid") else with_hint(message, hint))
        self._reading = asyncio.create_task(self._read())

    async def execute(self, attempt: Attempt) -> dict[str, Any]:
        """Run one episode and return what the agent says of it. Raises AgentError."""
        number = next(self._numbers)
        running = self._running[number] = _Running(attempt, asyncio.get_running_loop().create_future())
        try:
            self._send({"call": number, "timeout_s": self._timeout_s, **attempt.begin()})
            attempt.activity.since = time.monotonic()
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
        """Shut it down once its episodes have ended."""
        while self._running:
            await asyncio.sleep(_DRAIN_CHECK_S)
        await self.shut_down()

    async def shut_down(self) -> None:
        """End the process and what it runs, after it has had some seconds to close its environments and servers."""
        # Once only: after its end, its number may be that of another process.
        self._shutting_down = self._shutting_down or asyncio.create_task(self._shut_down())
        await asyncio.shield(self._shutting_down)

    async def _shut_down(self) -> None:
        may_close = self.alive
        self._fail("the agent's process has been shut down")
        if hasattr(self, "_reading"):  # the agent has been imported
            self._reading.cancel()
            if may_close:
                with contextlib.suppress(OSError):
                    self._writer.write_eof()
                await asyncio.to_thread(self.wait, _CLOSE_TIMEOUT_S)
        await asyncio.to_thread(self.kill)
        if hasattr(self, "_writer"):
            self._writer.transport.abort()  # before the socket is closed: its number may be given to another one
        self._connection.close()

    async def _wait_for_sign(self, running: _Running) -> None:
        """Wait until the episode ends or asks the policy. Raises AgentError when its code takes too long."""
        activity = running.attempt.activity
        activity.moved.clear()
        moved = asyncio.create_task(activity.moved.wait())
        limit = None if activity.num_waiting else max(activity.since + self._timeout_s - time.monotonic(), 0.0)
        try:
            await asyncio.wait([moved, running.done], timeout=limit, return_when=asyncio.FIRST_COMPLETED)
        finally:
            moved.cancel()
        if not self._is_late(running):
            return
        if await self._answers():  # what the episode has sent before comes first
            if not self._is_late(running):  # this process was busy, not the agent
                return
            raise AgentError(f"the agent took longer than {self._timeout_s:g} s", is_late=True)
        # One of its episodes blocks the process, and nobody can tell which one.
        self._fail(f"the agent took longer than {self._timeout_s:g} s", is_late=True)
        await asyncio.to_thread(self.kill)

    def _is_late(self, running: _Running) -> bool:
        activity = running.attempt.activity
        is_quiet = not running.done.done() and not activity.num_waiting
        return is_quiet and time.monotonic() >= activity.since + self._timeout_s

    async def _answers(self) -> bool:
        """Return whether the process answers at all, or one episode blocks all others."""
        number = next(self._numbers)
        ping = self._pings[number] = asyncio.get_running_loop().create_future()
        self._send({"ping": number})
        try:
            async with asyncio.timeout(_PING_TIMEOUT_S):
                await ping
        except (TimeoutError, AgentError):
            return False
        finally:
            del self._pings[number]
        return True

    async def _read(self) -> None:
        """Hand out what the process sends, until it ends."""
        reason = "the agent's process sent something that is no answer"
        try:
            while line := await self._reader.readline():
                self._take(json.loads(line))
            reason = ""
        except (ValueError, KeyError, TypeError, AttributeError):  # the agent's code has written to the connection
            await asyncio.to_thread(self.kill)
        except OSError:
            reason = ""
        self._fail(reason or f"the agent's process {await asyncio.to_thread(self.ending)}")

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
            return  # it was given up
        if "ask" in message:
            task = asyncio.create_task(self._answer(running, message))
            running.asks.add(task)
            task.add_done_callback(running.asks.discard)
        elif "error" in message:
            running.done.set_exception(AgentError(str(message["error"])))
        else:
            running.done.set_result(dict(message["result"]))

    async def _answer(self, running: _Running, message: Mapping[str, Any]) -> None:
        try:
            answer = await running.attempt.answer(message["request"])
        except EngineError as error:
            answer = {"error": str(error)}
        if not self._failure:
            self._send({"answer": message["ask"], **answer})

    def _send(self, message: Mapping[str, Any]) -> None:
        self._writer.write(json.dumps(message).encode() + b"\n")

    def _fail(self, reason: str, *, is_late: bool = False) -> None:
        """End all episodes for this reason. If there are several, each may be tried again: one of them is at fault."""
        self._failure = self._failure or reason
        ended = [running for running in self._running.values() if not running.done.done()]
        for index, running in enumerate(ended):
            again = (self, index % 2) if len(ended) > 1 else None
            running.done.set_exception(AgentError(self._failure, is_late=is_late, again=again))
        for ping in self._pings.values():
            if not ping.done():
                ping.set_exception(AgentError(self._failure))
