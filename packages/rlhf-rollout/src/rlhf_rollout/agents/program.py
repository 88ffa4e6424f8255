"""An agent that is a program of its own, in any language: a process per episode. Runs in agent processes.

The program finds the policy as the libraries of OpenAI and Anthropic do, in the environment: OPENAI_BASE_URL,
OPENAI_API_KEY, ANTHROPIC_BASE_URL, ANTHROPIC_API_KEY. Its standard input is one JSON object with `prompt`, `messages`
(the prompt as messages) and `label`. The last line of its standard output is its reward: a number, or a JSON object as
a function returns it. Any other last line leaves the episode to another reward. A program that exits with another
status than 0 has failed.
"""

import asyncio
import contextlib
import json
import os
import signal
import tempfile
from collections.abc import Sequence
from typing import IO, Any

from rlhf_rollout.agents.interface import Session

_TAIL_BYTES = 2**16  # size of the end of the output, which must hold the whole last line
_DRAIN_S = 1.0  # after the end of the program, for what it has printed


class ProgramError(RuntimeError):
    """A program has failed."""


async def run_program(words: Sequence[str], session: Session) -> Any:
    """Run one episode of a program and its arguments; return its reward, None without one. Raises ProgramError."""
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
        reading = asyncio.create_task(_read(output, tail))
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
    return _reward(tail.decode(errors="replace"))


async def _read(output: IO[bytes], tail: bytearray) -> None:
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


def _reward(output: str) -> Any:
    """Return the number or object in the last line that is not empty."""
    lines = output.strip().splitlines()
    try:
        value = json.loads(lines[-1]) if lines else None
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, int | float | dict) else None
