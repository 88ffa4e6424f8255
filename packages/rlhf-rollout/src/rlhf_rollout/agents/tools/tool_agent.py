"""Tools: Python functions and an MCP server's, called for the policy with limits. Runs in agent processes.

An MCP server is a program that is spoken to over its standard input and output. Source: the Model Context Protocol,
https://modelcontextprotocol.io, through the `mcp` library.
"""

import asyncio
import dataclasses
import inspect
import json
import os
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from pydantic import TypeAdapter, ValidationError
from pydantic_core import ArgsKwargs

from rlhf_data.errors import RewardError, installs
from rlhf_rollout.agents.interface import BudgetSpentError, Session
from rlhf_rollout.agents.tools.tool_calls import ToolCall, make_parser
from rlhf_rollout.workers.threads import CodeThread, called

# Names of counts, which every episode reports: the calls, and those that failed, by reason.
COUNTS = ("tool_calls", "tool_unreadable", "tool_unknown", "tool_arguments", "tool_failed", "tool_late", "tool_refused")
# Share of the seconds between two answers that tools may take; the rest is for what else the agent does.
_SHARE_OF_TIME = 0.9


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolLimits:
    """Limits of the tools.

    Attributes:
        max_calls: calls per episode.
        timeout_s: seconds per call.
        total_s: seconds of all calls of an episode. The calls of one answer have at most nine tenths of the seconds
            that an agent's code may take between two answers.
        max_chars: characters of what a call returns.
    """

    max_calls: int = 16
    timeout_s: float = 10.0
    total_s: float = 120.0
    max_chars: int = 4000

    def __post_init__(self) -> None:
        for name, value in dataclasses.asdict(self).items():
            if value <= 0:
                raise RewardError(f"{name} of the tools must be positive, got {value!r}")


class ToolError(Exception):
    """A call has failed. The message is for the policy; `count` is one of `COUNTS`."""

    def __init__(self, message: str, count: str = "tool_failed") -> None:
        super().__init__(message)
        self.count = count


@dataclass(frozen=True, slots=True)
class Tool:
    """A tool: its JSON schema in OpenAI's form, and what runs a call."""

    schema: dict[str, Any]
    run: Callable[[Mapping[str, Any]], Awaitable[Any]]

    @property
    def name(self) -> str:
        """Its name, as the policy writes it."""
        return self.schema["function"]["name"]


def function_tool(function: Callable[..., Any]) -> Tool:
    """Return the tool of a function with type hints. Its docstring describes it to the policy.

    Raises RewardError when there is no JSON schema for its parameters.
    """
    name = getattr(function, "__name__", repr(function))
    try:
        adapter = TypeAdapter(function)
        parameters = adapter.json_schema()
    except Exception as error:  # the class of the error depends on the type hints
        hint = "give every parameter a type hint that has a JSON form, and no *args"
        raise RewardError(f"the tool {name} has no JSON schema: {error}", hint=hint) from None
    if parameters.get("type") != "object":
        raise RewardError(f"the tool {name} has parameters without names", hint="name its parameters")
    for described in parameters.get("properties", {}).values():
        described.pop("title", None)  # repeats the name
    described = {"name": name, "description": inspect.getdoc(function) or "", "parameters": parameters}

    async def run(arguments: Mapping[str, Any]) -> Any:
        thread = CodeThread()
        call = ArgsKwargs((), dict(arguments))
        try:
            return await thread.run(adapter.validate_python, call)
        except ValidationError as error:
            problems = [f"{'.'.join(map(str, one['loc']))}: {one['msg']}" for one in error.errors()]
            raise ToolError("; ".join(problems), "tool_arguments") from None
        finally:
            thread.close()

    return Tool({"type": "function", "function": described}, run)


class McpServer:
    """Starts a server and calls its tools. Use it from one event loop.

    Args:
        command: the program and its arguments; it inherits this process's environment.
    """

    def __init__(self, command: Sequence[str]) -> None:
        self._command = [str(word) for word in command]
        self._end = asyncio.Event()
        self._client: Any = None

    async def start(self) -> list[Tool]:
        """Start the server; return its tools.

        Raises RewardError when the server does not start.
        """
        ready: asyncio.Future[list[Any]] = asyncio.get_running_loop().create_future()
        # The library wants the connection opened and closed in one task.
        self._task = asyncio.create_task(self._serve(ready))
        tools = []
        for tool in await ready:
            described = {"name": tool.name, "description": tool.description or "", "parameters": tool.input_schema}
            tools.append(Tool({"type": "function", "function": described}, partial(self._call, tool.name)))
        return tools

    async def close(self) -> None:
        """End the server."""
        self._end.set()
        await asyncio.wait([self._task])

    async def _serve(self, ready: asyncio.Future[list[Any]]) -> None:
        try:
            from mcp import Client, StdioServerParameters

            program, *arguments = self._command
            server = StdioServerParameters(command=program, args=arguments, env=dict(os.environ))
            async with Client(server) as self._client:
                ready.set_result((await self._client.list_tools()).tools)
                await self._end.wait()
        except ImportError:
            ready.set_exception(RewardError("MCP servers need the `mcp` library", hint=installs("rlhf-rollout[mcp]")))
        except Exception as error:
            if not ready.done():
                ready.set_exception(RewardError(f"the MCP server `{' '.join(self._command)}` does not start: {error}"))

    async def _call(self, name: str, arguments: Mapping[str, Any]) -> str:
        """Return the text of a tool's result. Raises RuntimeError with that text when the tool says that it failed."""
        result = await self._client.call_tool(name, dict(arguments))
        text = "\n".join(getattr(part, "text", f"[{part.type}]") for part in result.content)
        if result.is_error:
            raise RuntimeError(text)
        return text


class ToolAgent:
    """Runs episodes of a policy with tools: it answers, its calls are run, until an answer calls none.

    Args:
        functions: Python functions with type hints.
        server: command of an MCP server, whose tools join them; empty for none.
        limits: the limits of tools in each episode.
        parser: see `make_parser`.
        system: text of a system message that begins every conversation; "" for none.
        reward: `reward(messages, label)` returns what an agent does; without it another reward scores the episode.
        tokenizer: the policy's.

    Raises:
        RewardError: a function without a schema, two tools of one name, or a parser that is none.
    """

    def __init__(
        self,
        functions: Sequence[Callable[..., Any]] = (),
        *,
        server: Sequence[str] = (),
        limits: ToolLimits | None = None,
        parser: str = "hermes",
        system: str = "",
        reward: Callable[[list[dict[str, Any]], str], Any] | None = None,
        tokenizer: Any = None,
    ) -> None:
        self._tools: dict[str, Tool] = {}
        self._add(function_tool(function) for function in functions)
        self._server = McpServer(server) if server else None
        self._limits = limits or ToolLimits()
        self._parse = make_parser(parser, tokenizer)
        self._system = system
        self._reward = reward

    async def start(self) -> None:
        """Start the MCP server. Raises RewardError when it does not start."""
        if self._server is not None:
            self._add(await self._server.start())

    async def close(self) -> None:
        """End the MCP server."""
        if self._server is not None:
            await self._server.close()

    async def __call__(self, session: Session) -> dict[str, Any]:
        """Run one episode; return what an agent returns."""
        system = [{"role": "system", "content": self._system}] if self._system else []
        messages = [*system, *session.messages]
        added = messages
        counts = dict.fromkeys(COUNTS, 0)
        schemas = [tool.schema for tool in self._tools.values()]
        left_s = self._limits.total_s
        try:
            while added:
                reply = await session.chat(added, tools=schemas)
                calls = self._parse(reply.raw_text)
                messages.append({"role": "assistant", "content": reply.text})
                started = time.monotonic()
                # Slow calls must not make the agent late, which would leave the answers that asked for them untrained.
                until = started + min(left_s, _SHARE_OF_TIME * session.timeout_s)
                added = [await self._answer(call, counts, until) for call in calls]
                left_s -= time.monotonic() - started
                messages += added
            is_cut = reply.finish_reason == "length"
        except BudgetSpentError:
            is_cut = True
        result: dict[str, Any] = {"truncated": is_cut, "extra": counts}
        if self._reward is None:
            return result
        if messages[-1]["role"] != "assistant":  # there is no final answer
            return {**result, "rewards": 0.0}
        given = await called(self._reward, messages, session.label)
        given = dict(given) if isinstance(given, Mapping) else {"rewards": given}
        logs = given.pop("extra_logs", None) or given.pop("extra", None) or {}
        return {**result, **given, "extra": {**logs, **counts}}

    async def _answer(self, call: ToolCall, counts: dict[str, int], until: float) -> dict[str, Any]:
        """Run a call, not longer than `until`; return its tool message, which says what went wrong if anything did."""
        counts["tool_calls"] += 1
        try:
            content = await self._run(call, counts["tool_calls"], until - time.monotonic())
        except ToolError as error:
            counts[error.count] += 1
            content = f"Error: {error}"
        extra = len(content) - self._limits.max_chars
        if extra > 0:
            content = f"{content[: self._limits.max_chars]}\n[{extra} more characters are left out]"
        # Mistral's template wants nine characters.
        return {"role": "tool", "name": call.name, "tool_call_id": f"call{counts['tool_calls']:05}", "content": content}

    async def _run(self, call: ToolCall, number: int, left_s: float) -> str:
        limits = self._limits
        if number > limits.max_calls:
            raise ToolError(f"no more than {limits.max_calls} calls are allowed", "tool_refused")
        if call.error:
            raise ToolError(call.error, "tool_unreadable")
        tool = self._tools.get(call.name)
        if tool is None:
            raise ToolError(f"there is no tool {call.name!r}; the tools are {', '.join(self._tools)}", "tool_unknown")
        if left_s <= 0:
            raise ToolError("the calls have used up the time that tools have", "tool_refused")
        timeout_s = min(limits.timeout_s, left_s)
        try:
            async with asyncio.timeout(timeout_s) as timer:
                result = await tool.run(call.arguments)
            return result if isinstance(result, str) else json.dumps(result, default=str, ensure_ascii=False)
        except ToolError:
            raise
        except (Exception, SystemExit) as error:
            if timer.expired():
                raise ToolError(f"{call.name} took longer than {timeout_s:.3g} s", "tool_late") from None
            raise ToolError(f"{type(error).__name__}: {error}") from None

    def _add(self, tools: Any) -> None:
        for tool in tools:
            if tool.name in self._tools:
                raise RewardError(f"two tools have the name {tool.name}")
            self._tools[tool.name] = tool
