"""The parent's side of a reward worker: a fresh interpreter, called with deadlines, killed with all that it started."""

import contextlib
import itertools
import json
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import Any

from rlhf_data.errors import RewardError, nearest, with_hint
from rlhf_data.records import VerdictKind
from rlhf_data.safety import loopback_unproxied, without_secrets
from rlhf_rollout.rewards import guard, leftovers
from rlhf_rollout.rewards.outcomes import Failure
from rlhf_rollout.rewards.sources import WorkerOptions
from rlhf_rollout.rewards.user_function import BUILTIN, RewardTarget, Scored

_LOGGER = logging.getLogger(__name__)
_EXIT_TIMEOUT_S = 10.0
_NOTICE_S = 10.0  # of importing, after which the user is told what is waited for
_MAX_ANSWER_BYTES = 2**27
_GIB = 2**30
PROGRAM = "rlhf_rollout.rewards.worker"

# What a worker inherits of the environment: where programs, libraries and caches are, languages, devices, threads, and
# the way to the network. Everything else may be a secret.
_INHERITED = (
    "PATH HOME USER LOGNAME SHELL LANG LANGUAGE LC_ALL LC_CTYPE TZ TMPDIR TMP TEMP VIRTUAL_ENV CONDA_PREFIX PYTHONPATH"
    " PYTHONHOME PYTHONHASHSEED LD_LIBRARY_PATH DYLD_LIBRARY_PATH CUDA_HOME CUDA_VISIBLE_DEVICES NVIDIA_VISIBLE_DEVICES"
    " OMP_NUM_THREADS MKL_NUM_THREADS OPENBLAS_NUM_THREADS TOKENIZERS_PARALLELISM HF_HOME HF_HUB_CACHE HF_HUB_OFFLINE"
    " HF_DATASETS_CACHE HF_DATASETS_OFFLINE TRANSFORMERS_OFFLINE TORCH_HOME NLTK_DATA XDG_CACHE_HOME XDG_CONFIG_HOME"
    " XDG_DATA_HOME SSL_CERT_FILE SSL_CERT_DIR REQUESTS_CA_BUNDLE CURL_CA_BUNDLE"
)
# Proxies and the hub; these may hold a user and password.
_PROXIES = ("http_proxy", "https_proxy", "all_proxy", "no_proxy")
_URLS = frozenset(["HF_ENDPOINT", *_PROXIES, *map(str.upper, _PROXIES)])
INHERITED = frozenset(_INHERITED.split()) | _URLS

_IMPORT_HINT = (
    "it must import in a fresh interpreter; its own folder is on the import path, and of environment variables such as"
    " HF_TOKEN it receives those that ``WorkerOptions.env`` names"
)
Samples = tuple[list[str], list[str], list[str]]  # queries, prompts, labels


class GuardedProcess:
    """A process that runs a user's code with a limit of memory and without this process's secrets.

    What the code prints is appended to `log_path`; None for this process's standard error. `guard.py` says how both are
    limited, and which processes end with this one.
    """

    def __init__(self, options: WorkerOptions, *, log_path: Path | None = None) -> None:
        self._connection, theirs = socket.socketpair()
        with theirs:
            descriptor = str(theirs.fileno())
            memory_bytes = str(_memory_bytes(options.memory_gb))
            # -P: files of the working folder are not modules. The guard is a script, which imports nothing of ours.
            command = [sys.executable, "-P", guard.__file__, descriptor, str(log_path or ""), memory_bytes]
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=2,
                stderr=2,
                pass_fds=[theirs.fileno()],
                env=_environment(options.env) | {leftovers.MARK: leftovers.own_mark()},
                start_new_session=True,  # Ctrl-C does not reach it
            )

    @property
    def alive(self) -> bool:
        """Whether the process runs."""
        return self._process.poll() is None

    def kill(self) -> None:
        """End the process and every process that it started."""
        with contextlib.suppress(ProcessLookupError):
            self._process.send_signal(signal.SIGTERM)  # the guard kills the others first
        self.wait()
        with contextlib.suppress(OSError):  # without its guard, a worker is still in the guard's session
            os.killpg(self._process.pid, signal.SIGKILL)
        self.wait()

    def close(self) -> None:
        """End the process and free its connection. Must not be called while another thread uses the connection."""
        self.kill()
        self._connection.close()

    def ending(self) -> str:
        """Return in words how the process has ended."""
        self.wait()
        return _ending(self._process.returncode)

    def wait(self, timeout_s: float = _EXIT_TIMEOUT_S) -> None:
        """Wait until the process has ended, or for `timeout_s` seconds."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout_s)


def import_path() -> list[str]:
    """Return `sys.path` with the working folder last, so that no file in it takes the place of a library."""
    return sorted(map(os.path.abspath, sys.path), key=os.getcwd().__eq__)


class WorkerProcess(GuardedProcess):
    """A worker for the function of `target`. It must be started before it is called."""

    def __init__(self, target: RewardTarget, options: WorkerOptions, *, log_path: Path | None = None) -> None:
        super().__init__(options, log_path=log_path)
        self._target = target
        self._start_timeout_s = options.start_timeout_s
        self._numbers = itertools.count()
        self._received = bytearray()
        self._extra_keys = options.extra_keys
        self._extras: Sequence[str] = ()

    def start(self) -> None:
        """Have the worker import the function. Raises RewardError when that fails or takes too long."""
        module, limit = self._target.module, self._start_timeout_s
        notice = f"importing {module} takes longer than {_NOTICE_S:g} s; the limit is {limit:g} s"
        timer = threading.Timer(_NOTICE_S, _LOGGER.warning, [notice])
        timer.start()
        try:
            first = {"path": import_path(), "program": PROGRAM, "target": asdict(self._target)}
            first["extra_keys"] = self._extra_keys
            answer = self._exchange(first, limit)
        finally:
            timer.cancel()
        if isinstance(answer, Failure):
            self.close()
            raise RewardError(_start_problem(self._target, answer, limit))
        self._extras = answer["extras"]

    def call(self, samples: Samples, extras: Mapping[str, list[Any]], timeout_s: float) -> Scored | Failure:
        """Return the function's result for the samples. After a timeout or a crash the worker is dead: see `alive`.

        Of the `extras` the function receives those that it has parameters for.
        """
        wanted = {name: extras[name] for name in self._extras}
        answer = self._exchange({"arguments": samples, "extras": wanted}, timeout_s)
        return answer if isinstance(answer, Failure) else Scored(**answer["scored"])

    def _exchange(self, message: Mapping[str, Any], timeout_s: float) -> dict[str, Any] | Failure:
        """Send a message and return the answer. A worker that is late or has ended is dead afterwards."""
        deadline = time.monotonic() + timeout_s
        number = next(self._numbers)
        try:
            self._connection.settimeout(timeout_s)
            self._connection.sendall(json.dumps({"call": number, **message}).encode() + b"\n")
            answer = json.loads(self._line(deadline))
            while answer["call"] != number:  # a second answer to an earlier call
                answer = json.loads(self._line(deadline))
        except TimeoutError:
            self.close()
            return Failure(VerdictKind.TIMEOUT, f"no answer within {timeout_s:g} s")
        except (EOFError, OSError):  # the worker has closed its end, or another thread has closed this one
            how = self.ending()
            self.close()
            return Failure(VerdictKind.CRASH, f"the reward worker {how}")
        except (ValueError, TypeError, KeyError):
            self.close()
            return Failure(VerdictKind.CRASH, "something other than an answer came from the reward worker")
        for kind in ("invalid", "error"):
            if kind in answer:
                return Failure(VerdictKind.CRASH, answer[kind], is_invalid=kind == "invalid")
        return answer

    def _line(self, deadline: float) -> bytes:
        """Return the next line from the worker. Raises TimeoutError, EOFError, or ValueError when it is too long."""
        searched = 0
        while (end := self._received.find(b"\n", searched)) == -1:
            searched = len(self._received)
            if searched > _MAX_ANSWER_BYTES:
                raise ValueError("the answer is too long")
            self._connection.settimeout(max(deadline - time.monotonic(), 1e-3))
            piece = self._connection.recv(2**20)
            if not piece:
                raise EOFError
            self._received += piece
        line = bytes(self._received[:end])
        del self._received[: end + 1]
        return line


def _environment(named: Sequence[str]) -> dict[str, str]:
    """Return the variables that a worker receives: those that it inherits, and those that the user has named."""
    given = {name: os.environ[name] for name in INHERITED.union(named) & os.environ.keys()}
    secret = [name for name in sorted(_URLS.difference(named) & given.keys()) if _holds_password(given[name])]
    if secret:
        _tell_withheld(",".join(secret))
    kept = {name: value for name, value in given.items() if name not in secret}
    return kept | loopback_unproxied(os.environ)  # an agent's clients ask the policy on this machine


def _holds_password(value: str) -> bool:
    # Programs also take a proxy without a scheme, such as user:password@host:3128.
    return "@" in value or without_secrets(value) != value


@cache
def _tell_withheld(names: str) -> None:
    text = "reward functions and agents do not receive %s, which holds a password, unless reward_env names it"
    _LOGGER.warning(text, names)


def _memory_bytes(memory_gb: float | None) -> int:
    if memory_gb is not None:
        return int(memory_gb * _GIB)
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2


def _start_problem(target: RewardTarget, failure: Failure, timeout_s: float) -> str:
    if failure.is_invalid:
        return failure.detail
    if failure.kind is VerdictKind.TIMEOUT:
        message = f"importing the reward function from {target.module} took longer than {timeout_s:g} s"
        return with_hint(message, "move slow work into the function, or raise ``start_timeout_s``")
    message = f"cannot import the reward function from {target.module}: {failure.detail}"
    if guess := nearest(target.module, BUILTIN):
        return with_hint(message, f"did you mean the built-in reward `{guess}`?")
    return with_hint(message, _IMPORT_HINT)


def _ending(code: int | None) -> str:
    if code is None:
        return "closed its connection"
    if code >= 0:
        return f"exited with status {code}"
    try:
        return f"was ended by {signal.Signals(-code).name}"
    except ValueError:
        return f"was ended by signal {-code}"
