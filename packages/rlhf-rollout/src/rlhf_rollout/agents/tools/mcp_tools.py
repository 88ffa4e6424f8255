"""The tools of an MCP server, a program that is spoken to over its standard input and output. Runs in agent processes.

Source: the Model Context Protocol, https://modelcontextprotocol.io, through the `mcp` library.
"""

import asyncio
import os
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from typing import Any

from rlhf_data.errors import RewardError, installs

Run = Callable[[Mapping[str, Any]], Awaitable[str]]


class McpServer:
    """Starts a server and calls its tools. Use it from one event loop.

    Args:
        command: the program and its arguments; it inherits this process's environment.
    """

    def __init__(self, command: Sequence[str]) -> None:
        self._command = [str(word) for word in command]
        self._end = asyncio.Event()
        self._client: Any = None

    async def start(self) -> list[tuple[dict[str, Any], Run]]:
        """Start the server; return its tools, each as its JSON schema in OpenAI's form and a function for its calls.

        Raises RewardError when the server does not start.
        """
        ready: asyncio.Future[list[Any]] = asyncio.get_running_loop().create_future()
        # The library wants the connection opened and closed in one task.
        self._task = asyncio.create_task(self._serve(ready))
        tools = []
        for tool in await ready:
            described = {"name": tool.name, "description": tool.description or "", "parameters": tool.input_schema}
            tools.append(({"type": "function", "function": described}, partial(self._call, tool.name)))
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
