"""One reward worker as its parent sees it: a clean interpreter, called with a deadline, killed with its children."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rlhf_data.errors import RewardError, with_hint
from rlhf_data.records import VerdictKind
from rlhf_rollout.rewards.outcomes import Failure
from rlhf_rollout.rewards.user_function import RewardTarget, Scored

_EXIT_TIMEOUT_S = 5.0

# The parent's import path, not its modules: nothing that the parent imported is loaded in the worker.
_BOOTSTRAP = (
    "import json, socket, sys; s = socket.socket(fileno=int(sys.argv[1])); f = s.makefile('rb'); "
    "sys.path[:] = json.loads(f.readline()); from rlhf_rollout.rewards.worker import main; main(s, f)"
)


class WorkerProcess:
    """A running worker.

    Args:
        target: the function it loads.
        startup_timeout_s: seconds for its imports.
        log_path: file that what the function prints is appended to; None for this process's standard error.

    Raises:
        RewardError: the function cannot be imported.
    """

    def __init__(self, target: RewardTarget, *, startup_timeout_s: float, log_path: Path | None = None) -> None:
        self._socket, theirs = socket.socketpair()
        with contextlib.ExitStack() as stack:
            stack.enter_context(theirs)
            output = 2 if log_path is None else stack.enter_context(log_path.open("ab"))
            self._process = subprocess.Popen(
                [sys.executable, "-c", _BOOTSTRAP, str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                pass_fds=[theirs.fileno()],
                start_new_session=True,  # Ctrl-C is the parent's; and its own children can be killed with it
            )
        path = [os.path.abspath(entry) for entry in sys.path]
        answer = self._exchange([path, asdict(target)], startup_timeout_s)
        if isinstance(answer, Failure):
            self.close()
            raise RewardError(_start_problem(target, answer, startup_timeout_s))

    @property
    def alive(self) -> bool:
        """Whether the process runs."""
        return self._process.poll() is None

    def call(
        self, queries: Sequence[str], prompts: Sequence[str], labels: Sequence[str], *, timeout_s: float
    ) -> Scored | Failure:
        """Return what the function says about the samples; after some failures the worker is dead (see `alive`)."""
        request = {"queries": list(queries), "prompts": list(prompts), "labels": list(labels)}
        answer = self._exchange([request], timeout_s)
        return answer if isinstance(answer, Failure) else Scored(**answer["scored"])

    def kill(self) -> None:
        """End the worker and every process that it started."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def close(self) -> None:
        """End the worker and free its socket; not while a call is running in another thread."""
        self.kill()
        self._socket.close()

    def _exchange(self, values: Sequence[Any], timeout_s: float) -> dict[str, Any] | Failure:
        """Send values and return the answer; a worker that is late or gone is dead afterwards."""
        deadline = time.monotonic() + timeout_s
        try:
            self._socket.settimeout(max(timeout_s, 0.001))
            self._socket.sendall(b"".join(json.dumps(value).encode() + b"\n" for value in values))
            chunks = []
            while not chunks or not chunks[-1].endswith(b"\n"):
                left = deadline - time.monotonic()
                if left <= 0:
                    raise TimeoutError
                self._socket.settimeout(left)
                chunks.append(self._socket.recv(1 << 20))
                if not chunks[-1]:
                    raise ConnectionError
        except TimeoutError:
            self.close()
            return Failure(VerdictKind.TIMEOUT, f"no answer within {timeout_s:g} s")
        except OSError:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(timeout=_EXIT_TIMEOUT_S)
            self.close()
            return Failure(VerdictKind.CRASH, f"the reward worker {_ending(self._process.returncode)}")
        answer = json.loads(b"".join(chunks))
        for kind in ("invalid", "error"):
            if kind in answer:
                return Failure(VerdictKind.CRASH, answer[kind], is_invalid=kind == "invalid")
        return answer


def _start_problem(target: RewardTarget, failure: Failure, timeout_s: float) -> str:
    if failure.is_invalid:
        return failure.detail
    if failure.kind is VerdictKind.TIMEOUT:
        message = f"importing the reward function from {target.module} took longer than {timeout_s:g} s"
        return with_hint(message, "move slow work into the function, or raise the time limit")
    message = f"cannot import the reward function from {target.module}: {failure.detail}"
    return with_hint(message, "it must import in a fresh interpreter; its own folder is on the import path")


def _ending(code: int) -> str:
    if code >= 0:
        return f"exited with status {code}"
    try:
        return f"was ended by {signal.Signals(-code).name}"
    except ValueError:
        return f"was ended by signal {-code}"
