"""A user's agent: how it is named and found, and how each form of it runs an episode. Runs in agent processes.

A file, or a module, may define one of these; the first that it has is used:

    class AgentExecutor          of OpenRLHF, with `execute`
    class AgentInstance          of OpenRLHF, with `reset` and `step`
    async def run_episode(session) -> reward, or {"rewards": [...], ...}      see `interface.Session`
    class Environment            with `reset`, `step` and `close`, or a function that makes one; see `environments`
    TOOLS = [function, ...]      that the policy may call, until an answer calls none; see `tools`
    MCP = ["program", ...]       a server whose tools join them, or stand alone
    def load_environment()       returns an environment of the library `verifiers`, as its modules do

A file with tools may also define `reward(messages, label)`, SYSTEM, the text of a system message, TOOL_PARSER, the form
of the calls (see `tool_calls`), and TOOL_LIMITS, a dictionary with fields of `tools.ToolLimits`. A file with an
environment may also define `render(observation)`, `parse(text)` and POOL_SIZE.

A command line is an agent, too: see `run_program`.
"""

import asyncio
import contextlib
import inspect
import json
import os
import shlex
import shutil
import signal
import socket
import tempfile
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import IO, Any

from rlhf_data.errors import ConfigError, RewardError, installs
from rlhf_data.own_code import is_trusted, trusted
from rlhf_rollout.agents import interface
from rlhf_rollout.agents.interface import PolicyEngine, Session, constructed, number, run_turns, sampling_params
from rlhf_rollout.rewards.math import provide_utils
from rlhf_rollout.workers.serving import serve_side_by_side
from rlhf_rollout.workers.threads import called
from rlhf_rollout.workers.user_code import Target, bound_names, import_target, parse_target, provide

PROGRAM = "<program>"
_TAIL_BYTES = 2**16  # size of the end of a program's output, which must hold the whole last line
_DRAIN_S = 1.0  # after the end of a program, for what it has printed
NAMES = ("AgentExecutor", "AgentInstance", "run_episode", "Environment", "TOOLS", "MCP", "load_environment")
_HINT = "define AgentExecutor, AgentInstance, `async def run_episode(session)`, Environment or TOOLS"

RunEpisode = Callable[[Session], Awaitable[dict[str, Any]]]


def parse_agent(agent: str) -> Target:
    """Return the target of `FILE.py`, `FILE.py:NAME`, `module`, `module:NAME` or a command line. Nothing is imported.

    The target's name is "" when none is given, and PROGRAM for a command line. Raises ConfigError for any other form,
    for a file that does not exist, and for one that defines no agent.
    """
    if is_program(agent):
        return Target(agent, PROGRAM)
    hint = "give path/to/file.py, or a command line such as 'python path/to/program.py'"
    target = parse_target(agent, "agent", other=", nor a program that can be run", hint=hint)
    if target.is_file:
        wanted = (target.name,) if target.name else NAMES
        if not bound_names(Path(target.module), "agent file").intersection({*wanted, "*"}):
            raise ConfigError(f"{target.module} defines no {' or '.join(wanted)}", hint=_HINT)
    return target


def is_program(agent: str) -> bool:
    """Return whether this is the command line of a program that exists: words, or the path of one without `.py`."""
    try:
        words = shlex.split(agent)
    except ValueError:
        return False
    path = Path(agent).expanduser()
    is_python = path.suffix == ".py" and path.is_file()
    is_named = len(words) > 1 or os.sep in agent
    return is_named and not is_python and shutil.which(words[0]) is not None


def serve(connection: socket.socket, first: Mapping[str, Any]) -> None:
    """Import the agent that the message `first` names, then run its episodes: the program of an agent's process."""
    target = Target(**first["target"])

    def load() -> RunEpisode:
        tokenizer = first["tokenizer"]
        return load_agent(target, tokenizer and trusted(tokenizer, first["trust_remote_code"]))

    serve_side_by_side(connection, target, load, Session)


def load_agent(target: Target, tokenizer: str | None) -> RunEpisode:
    """Import the target; return the function that runs an episode of its agent.

    Raises RewardError when it defines no agent, and whatever the import raises.
    """
    if target.name == PROGRAM:
        return _Function(partial(run_program, shlex.split(target.module)))
    # Also where OpenRLHF is installed: its classes would ask its own engines.
    classes = ("AgentExecutorBase", "AgentInstanceBase", "MultiTurnAgentExecutor")
    provide("openrlhf.utils.agent", **{name: getattr(interface, name) for name in classes})
    if target.is_file:
        provide_utils()
    module = import_target(target)
    for name in [target.name] if target.name else NAMES:
        agent = getattr(module, name, None)
        if agent is None:
            continue
        if name in ("TOOLS", "MCP"):
            return _tool_agent(module, tokenizer)
        if name == "Environment" or _is_environment(agent, name):
            from rlhf_rollout.agents.environments import EnvironmentAgent

            given = {"render": "render", "parse": "parse", "pool_size": "POOL_SIZE"}
            options = {option: getattr(module, name) for option, name in given.items() if hasattr(module, name)}
            return _Function(EnvironmentAgent(agent, **options))
        if name == "load_environment":
            return _Function(VerifiersAgent(agent))
        if inspect.isclass(agent) and hasattr(agent, "execute"):
            return _Executor(agent, tokenizer)
        if inspect.isclass(agent) and hasattr(agent, "step"):
            return lambda session, make=agent: run_turns(make, session)
        if callable(agent) and not inspect.isclass(agent):
            return _Function(agent)
        raise RewardError(f"{target.module}: {name} has neither `execute` nor `step`", hint=_HINT)
    raise RewardError(f"{target.module} defines no {target.name or ' or '.join(NAMES)}", hint=_HINT)


def read_result(result: Any) -> dict[str, Any]:
    """Return what an agent gave as {"rewards", "extra", "truncated"} and perhaps "score", with plain numbers.

    An agent gives one number, or a dictionary with `rewards` or `reward` (one number, or one per turn), `scores` or
    `score`, `extra_logs` or `extra`, `truncated`, and `verdict`, the name of a `VerdictKind`: "unparsable" and "wrong"
    say that the policy is at fault. None, or no reward in the dictionary, leaves the episode to another
    reward. Raises TypeError for anything else.
    """
    given = result if isinstance(result, Mapping) else {"rewards": result}
    rewards = given.get("rewards", given.get("reward"))
    if hasattr(rewards, "tolist"):
        rewards = rewards.tolist()
    if rewards is None:
        rewards = []
    elif isinstance(rewards, str) or not isinstance(rewards, Sequence):
        rewards = [rewards]
    score = given.get("scores", given.get("score"))
    extra = given.get("extra_logs", given.get("extra")) or {}
    read: dict[str, Any] = {
        "rewards": [number(reward) for reward in rewards],
        "extra": {str(name): number(value) for name, value in extra.items()},
        "truncated": bool(given.get("truncated")),
    }
    if given.get("verdict") is not None:
        read["verdict"] = str(given["verdict"])
    return read if score is None else {**read, "score": number(score)}


class _Function:
    """Runs `run_episode(session)`, or an agent with the same call that may `start` and `close`."""

    def __init__(self, function: Callable[[Session], Any]) -> None:
        self.start = getattr(function, "start", None)
        self.close = getattr(function, "close", None)
        self._function = function if inspect.isroutine(function) or isinstance(function, partial) else function.__call__

    async def __call__(self, session: Session) -> dict[str, Any]:
        try:
            return read_result(await called(self._function, session))
        except interface.BudgetSpentError:
            return {"rewards": [], "extra": {}, "truncated": True}


class _Executor:
    """Runs the `execute` of an executor class: an executor has one episode at a time, and others after it."""

    def __init__(self, make: type, tokenizer: str | None) -> None:
        self._make = make
        self._tokenizer = LazyTokenizer(tokenizer)
        self._idle: list[tuple[Any, dict[str, Any]]] = []  # executors, and what they were given

    async def __call__(self, session: Session) -> dict[str, Any]:
        executor, given = self._idle.pop() if self._idle else await self._construct(session)
        engine: PolicyEngine = given["llm_engine"]
        engine.session = session
        engine.is_spent = False
        arguments = {"prompt": session.prompt, "label": session.label, "sampling_params": sampling_params(session)}
        parameters = inspect.signature(executor.execute).parameters
        takes_all = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
        more = {name: given[name] for name in ("max_length", "hf_tokenizer", "llm_engine")}
        arguments |= {name: value for name, value in more.items() if takes_all or name in parameters}
        try:
            result = await executor.execute(**arguments)
        except Exception:
            if not engine.is_spent:  # whatever the agent makes of it
                raise
            return read_result({"truncated": True})
        finally:
            engine.session = None
        queue: asyncio.Queue[Any] = given["result_queue"]
        result = queue.get_nowait() if result is None and not queue.empty() else result
        if queue.empty():  # what an episode has left behind must not reach another one
            self._idle.append((executor, given))
        return read_result(result)

    async def _construct(self, session: Session) -> tuple[Any, dict[str, Any]]:
        """Return an executor and what it may use."""
        given = {
            "max_steps": session.max_turns,
            "max_length": session.max_length,
            "llm_engine": PolicyEngine(),
            "hf_tokenizer": self._tokenizer,
            "result_queue": asyncio.Queue(),
        }
        # The older form takes these in its constructor, the newer one takes nothing.
        wanted = [name for name in inspect.signature(self._make).parameters if name in given]
        executor = await constructed(self._make, **{name: given[name] for name in wanted})
        for name, value in given.items():
            if getattr(executor, name, None) is None:
                setattr(executor, name, value)
        return executor, given


class LazyTokenizer:
    """Stands for the run's tokenizer and loads it when it is first used, because that imports transformers."""

    def __init__(self, name: str | None) -> None:
        self._name = name
        self._loaded: Any = None

    def _load(self) -> Any:
        if self._loaded is None:
            if self._name is None:
                raise RuntimeError("this run has no tokenizer that agents can load")
            from transformers import AutoTokenizer

            self._loaded = AutoTokenizer.from_pretrained(self._name, trust_remote_code=is_trusted(self._name))
        return self._loaded

    def __getattr__(self, name: str) -> Any:
        return getattr(self._load(), name)

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        return self._load()(*arguments, **options)

    def __len__(self) -> int:
        return len(self._load())


def _is_environment(agent: Any, name: str) -> bool:
    has_methods = inspect.isclass(agent) and hasattr(agent, "step") and hasattr(agent, "reset")
    return has_methods and name != "AgentInstance" and not issubclass(agent, interface.AgentInstanceBase)


def _tool_agent(module: Any, tokenizer: str | None) -> RunEpisode:
    """Return the agent of a file with tools. Raises RewardError when one of its settings is none."""
    from rlhf_rollout.agents.tools.tool_agent import ToolAgent, ToolLimits

    try:
        limits = ToolLimits(**getattr(module, "TOOL_LIMITS", {}))
    except TypeError as error:
        raise RewardError(f"{module.__name__}: TOOL_LIMITS: {error}") from None
    agent = ToolAgent(
        getattr(module, "TOOLS", ()),
        server=getattr(module, "MCP", ()),
        limits=limits,
        parser=getattr(module, "TOOL_PARSER", "hermes"),
        system=getattr(module, "SYSTEM", ""),
        reward=getattr(module, "reward", None),
        tokenizer=LazyTokenizer(tokenizer),
    )
    return _Function(agent)


class ProgramError(RuntimeError):
    """A program has failed."""


async def run_program(words: Sequence[str], session: Session) -> Any:
    """Run one episode of a program, in any language, and its arguments, in a process of its own; return its reward.

    The program finds the policy as the libraries of OpenAI and Anthropic do, in the environment: OPENAI_BASE_URL,
    OPENAI_API_KEY, ANTHROPIC_BASE_URL, ANTHROPIC_API_KEY. Its standard input is one JSON object with `prompt`,
    `messages` (the prompt as messages) and `label`. The last line of its standard output is its reward: a number, or a
    JSON object as a function returns it. Any other last line leaves the episode to another reward, with the result
    None. Raises ProgramError for a program that exits with another status than 0.
    """
    url = session.base_url
    urls = {"OPENAI_BASE_URL": url, "ANTHROPIC_BASE_URL": url.removesuffix("/v1")}
    keys = dict.fromkeys(("OPENAI_API_KEY", "ANTHROPIC_API_KEY"), "none")
    options = {"env": {**os.environ, **urls, **keys}, "start_new_session": True}
    # asyncio's own pipes would make `wait` wait for the program's children, too.
    read_end, write_end = os.pipe()
    with tempfile.TemporaryFile() as told, os.fdopen(read_end, "rb", 0) as output:
        task = {"prompt": session.prompt, "messages": session.messages, "label": session.label}
        task |= {"extra": session.extra} if session.extra else {}
        told.write(json.dumps(task).encode())
        told.seek(0)
        try:
            process = await asyncio.create_subprocess_exec(*words, stdin=told, stdout=write_end, **options)
        finally:
            os.close(write_end)
        tail = bytearray()
        reading = asyncio.create_task(_read_tail(output, tail))
        try:
            status = await process.wait()
        finally:
            with contextlib.suppress(ProcessLookupError):  # also what the program has left behind
                os.killpg(process.pid, signal.SIGKILL)
            # A process that has left the program's session may hold the pipe.
            await asyncio.wait([reading], timeout=_DRAIN_S)
            reading.cancel()
    if status:
        raise ProgramError(f"{words[0]} exited with status {status}")
    return _last_value(tail.decode(errors="replace"))


async def _read_tail(output: IO[bytes], tail: bytearray) -> None:
    """Put the end of what comes through a pipe into `tail`, until the pipe is closed."""
    reader = asyncio.StreamReader()
    protocol = asyncio.StreamReaderProtocol(reader)
    transport, _ = await asyncio.get_running_loop().connect_read_pipe(lambda: protocol, output)
    try:
        while chunk := await reader.read(_TAIL_BYTES):
            tail += chunk
            del tail[:-_TAIL_BYTES]
    finally:
        transport.close()


def _last_value(output: str) -> Any:
    """Return the number or object in the last line that is not empty."""
    lines = output.strip().splitlines()
    try:
        value = json.loads(lines[-1]) if lines else None
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, int | float | dict) else None


class VerifiersAgent:
    """Runs episodes in an environment of the `verifiers` library, 0.1.3 to 0.1.9. The reward is its rubric's.

    The environment asks the policy through the gateway, as it asks any model: the library's rollouts, tools and rubrics
    are used as they are. Source: https://github.com/PrimeIntellect-ai/verifiers.

    A prompt is the `prompt` of a row of the environment's data set. Its label is the row's `answer`, or a JSON object
    with any of `answer`, `info` and `task`.

    Args:
        load: returns the environment.
    """

    def __init__(self, load: Callable[[], Any]) -> None:
        self._load = load

    async def start(self) -> None:
        """Load the environment. Raises RewardError for anything else, and whatever the loading raises."""
        self._environment = self._load()  # in the main thread, because the library sets handlers of signals
        if not hasattr(self._environment, "generate") or not hasattr(self._environment, "rubric"):
            hint = f"environments of verifiers 0.1.3 to 0.1.9 can be used: {installs('rlhf-rollout[verifiers]')}"
            raise RewardError(f"`load_environment` returned {self._environment!r:.80}", hint=hint)

    async def __call__(self, session: Session) -> dict[str, Any]:
        """Run one episode; return what an agent returns."""
        from openai import AsyncOpenAI
        from verifiers import types

        environment = self._environment
        is_chat = getattr(environment, "message_type", "chat") == "chat"
        prompt = [dict(message) for message in session.messages] if is_chat else session.prompt
        row = {"prompt": prompt, "answer": "", "info": {}, "task": "default", "example_id": 0}
        row |= read_label(session.label)
        async with AsyncOpenAI(base_url=session.base_url, api_key="none", max_retries=0) as client:
            # Up to 0.1.6 `generate` is not a coroutine function, and up to 0.1.7 it takes columns.
            generate = getattr(environment, "a_generate", None) or partial(environment.generate, use_tqdm=False)
            takes_rows = hasattr(types, "RolloutInput")
            inputs = [row] if takes_rows else {name: [value] for name, value in row.items()}
            result = await generate(inputs, client, "policy")
        result = result if isinstance(result, Mapping) else vars(result)
        metrics = {name: values[0] for name, values in result["metrics"].items()}
        return {"rewards": result["reward"][0], "extra": metrics}


def read_label(label: str) -> dict[str, Any]:
    """Return the columns of a row that a label holds: `answer`, or those in a JSON object."""
    try:
        value = json.loads(label)
    except ValueError:
        return {"answer": label}
    if not isinstance(value, Mapping):
        return {"answer": label}
    return {name: value[name] for name in ("answer", "info", "task") if value.get(name) is not None}
