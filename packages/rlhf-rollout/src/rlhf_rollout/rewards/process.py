"""The parent's side of a reward worker: a fresh interpreter, called with a deadline, killed with its children."""

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict
from multiprocessing import Pipe
from pathlib import Path
from typing import Any

from rlhf_data.errors import RewardError, with_hint
from rlhf_data.records import VerdictKind
from rlhf_rollout.rewards.outcomes import Failure
from rlhf_rollout.rewards.user_function import RewardTarget, Scored

_EXIT_TIMEOUT_S = 5.0

Samples = tuple[list[str], list[str], list[str]]  # queries, prompts, labels

# The worker gets the parent's import path, but loads none of the modules that the parent has imported.
_BOOTSTRAP = (
    "import json, sys; from multiprocessing.connection import Connection; c = Connection(int(sys.argv[1])); "
    "sys.path[:] = json.loads(c.recv_bytes()); from rlhf_rollout.rewards.worker import main; main(c)"
)


class WorkerProcess:
    """A running worker that has loaded the function of `target`.

    What the function prints is appended to `log_path`; None for this process's standard error. Raises RewardError when
    the function cannot be imported within `startup_timeout_s` seconds.
    """

    def __init__(self, target: RewardTarget, *, startup_timeout_s: float, log_path: Path | None = None) -> None:
        self._connection, theirs = Pipe()
        with contextlib.ExitStack() as stack:
            stack.enter_context(theirs)
            output = 2 if log_path is None else stack.enter_context(log_path.open("ab"))
            self._process = subprocess.Popen(
                [sys.executable, "-c", _BOOTSTRAP, str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                pass_fds=[theirs.fileno()],
                start_new_session=True,  # Ctrl-C does not reach it, and `kill` can end its children, too
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

    def call(self, samples: Samples, timeout_s: float) -> Scored | Failure:
        """Return the function's result for the samples. After a timeout or a crash the worker is dead: see `alive`."""
        request = dict(zip(("queries", "prompts", "labels"), samples, strict=True))
        answer = self._exchange([request], timeout_s)
        return answer if isinstance(answer, Failure) else Scored(**answer["scored"])

    def kill(self) -> None:
        """End the worker and every process that it started."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def close(self) -> None:
        """End the worker and free its connection. Must not be called while another thread is in `call`."""
        self.kill()
        self._connection.close()

    def _exchange(self, values: Sequence[Any], timeout_s: float) -> dict[str, Any] | Failure:
        """Send values and return the answer. A worker that is late or has ended is dead afterwards."""
        try:
            for value in values:
                self._connection.send_bytes(json.dumps(value).encode())
            if not self._connection.poll(timeout_s):
                self.close()
                return Failure(VerdictKind.TIMEOUT, f"no answer within {timeout_s:g} s")
            answer = json.loads(self._connection.recv_bytes())
        except (EOFError, OSError):  # the worker has closed its end; wait for its exit status
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(timeout=_EXIT_TIMEOUT_S)
            self.close()
            return Failure(VerdictKind.CRASH, f"the reward worker {_ending(self._process.returncode)}")
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
