"""The program of an agent's process: imports the user's file, then runs the episodes that arrive on its connection.

The connection carries one JSON value per line. The other side sends `{"call": N, ...}` for an episode, and the answers
to requests; this side sends `{"call": N, "ask": M, "request": {...}}` to have the policy answer, at the end of an
episode `{"call": N, "result": {...}}` or `{"call": N, "error": "..."}`, and `{"hanging": N}` when the number of plain
functions that hang has changed. Standard output belongs to the user's code.
"""

import asyncio
import contextlib
import functools
import itertools
import json
import os
import selectors
import socket
import sys
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import IO, Any

from rlhf_data.errors import RewardError
from rlhf_data.own_code import trusted
from rlhf_rollout.agents.interface import PolicyError, Session
from rlhf_rollout.agents.thread import num_hanging
from rlhf_rollout.agents.user_agent import load_agent
from rlhf_rollout.rewards.user_function import RewardTarget, explain

_MAX_LINE_BYTES = 2**27
_MAX_THREADS = 4096  # for plain functions of agents, at the same time
_HANGING_CHECK_S = 1.0
_HANGING_AFTER_S = 5.0  # a function that has only just been given up may end by itself


def serve(stream: IO[bytes], first: Mapping[str, Any]) -> None:
    """Import the agent that the message `first` names, then run episodes until the connection closes."""
    target = RewardTarget(**first["target"])

    def tell(answer: Mapping[str, Any]) -> None:
        stream.write(json.dumps(answer).encode() + b"\n")
        stream.flush()

    try:
        tokenizer = first.get("tokenizer")
        if tokenizer is not None:
            tokenizer = trusted(tokenizer, first["trust_remote_code"])
        run_episode = load_agent(target, tokenizer)
        make_loop = functools.partial(asyncio.SelectorEventLoop, _OwnSelector())
        with contextlib.suppress(ConnectionError), asyncio.Runner(loop_factory=make_loop) as runner:
            runner.run(_Server(target, run_episode).serve(first["descriptor"], tell))
    except RewardError as error:
        tell({"error": str(error), "invalid": True})
    except BaseException as error:  # also SystemExit: the parent must be told the reason
        tell({"error": explain(error, target)})


class _OwnSelector(selectors.DefaultSelector):
    """The selector of an event loop that ends the process when it is a child that the agent has forked.

    Such a child would go on with all episodes, and take messages that are meant for its parent.
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
    """Runs episodes side by side in one event loop."""

    def __init__(self, target: RewardTarget, run_episode: Any) -> None:
        self._target = target
        self._run_episode = run_episode
        self._numbers = itertools.count(1)
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._answers: dict[int, asyncio.Future[Mapping[str, Any]]] = {}
        self._owner = os.getpid()

    async def serve(self, descriptor: int, tell: Callable[[Mapping[str, Any]], None]) -> None:
        """Start the agent, `tell` the other side, and serve. Raises whatever the agent's start raises."""
        # The default is four threads more than cores: a few functions that hang would hold up all other episodes.
        asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(_MAX_THREADS))
        if start := getattr(self._run_episode, "start", None):
            await start()
        tell({"ready": True})
        try:
            await self._serve(descriptor)
        finally:
            for task in self._tasks.values():
                task.cancel()
            await asyncio.gather(*self._tasks.values(), return_exceptions=True)
            if close := getattr(self._run_episode, "close", None):
                await close()
        os._exit(0)  # threads of the agent that hang do not delay the end

    async def _serve(self, descriptor: int) -> None:
        connection = socket.socket(fileno=os.dup(descriptor))
        # A child that the agent forks must not read on: see `_OwnSelector`.
        nothing = os.open(os.devnull, os.O_RDWR)
        os.register_at_fork(after_in_child=functools.partial(os.dup2, nothing, connection.fileno()))
        reader, self._writer = await asyncio.open_connection(sock=connection, limit=_MAX_LINE_BYTES)
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
        """Tell the other side how many functions of the agent hang. Only the end of the process ends their threads."""
        told = 0
        while True:
            await asyncio.sleep(_HANGING_CHECK_S)
            count = num_hanging(_HANGING_AFTER_S)
            if count != told:
                self._send({"hanging": count})
                told = count

    async def _run(self, message: Mapping[str, Any]) -> None:
        number = message["call"]
        home = asyncio.get_running_loop()

        async def ask(request: Mapping[str, Any]) -> Mapping[str, Any]:
            asking = self._ask(number, request)
            if asyncio.get_running_loop() is home:
                return await asking
            # The agent has a thread with an event loop of its own, such as that of a server.
            return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(asking, home))

        try:
            result = await self._run_episode(Session(message, ask))
            self._send({"call": number, "result": result})
        except BaseException as error:
            if not asyncio.current_task().cancelling():  # by the other side, which then wants no answer
                self._send({"call": number, "error": explain(error, self._target)})
        finally:
            del self._tasks[number]

    async def _ask(self, number: int, request: Mapping[str, Any]) -> Mapping[str, Any]:
        """Have the policy answer a request of an episode. Raises PolicyError."""
        key = next(self._numbers)
        self._answers[key] = asyncio.get_running_loop().create_future()
        self._send({"call": number, "ask": key, "request": request})
        try:
            answer = await self._answers[key]
        finally:
            self._answers.pop(key, None)
        if "error" in answer:
            raise PolicyError(answer["error"])
        return answer

    def _send(self, message: Mapping[str, Any]) -> None:
        if os.getpid() != self._owner:  # the agent has forked, and this is the child: only its parent answers
            os._exit(0)
        with contextlib.suppress(Exception):  # the agent may have closed stdout
            sys.stdout.flush()
        self._writer.write(json.dumps(message).encode() + b"\n")
