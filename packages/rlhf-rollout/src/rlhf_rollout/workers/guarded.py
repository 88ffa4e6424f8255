"""A process that runs a user's code: limited in memory, without secrets, and ended with all that it started."""

import contextlib
import logging
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from rlhf_data.bounds import bounded, check_bounds
from rlhf_data.errors import ConfigError
from rlhf_data.safety import loopback_unproxied, without_secrets
from rlhf_rollout.workers import guard, leftovers

_LOGGER = logging.getLogger(__name__)
_EXIT_TIMEOUT_S = 10.0
_GIB = 2**30

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


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerOptions:
    """How the processes of reward functions and agents run.

    Attributes:
        start_timeout_s: time limit of importing the user's code, in seconds.
        memory_gb: limit for the data of each process, in GiB; None for half of this machine's memory.
        env: names of environment variables that workers receive besides `INHERITED`.
        extra_keys: the keys of `Prompt.extra` that a reward function receives as keyword arguments.

    Raises:
        ConfigError: a number is not positive, or a name cannot be that of a variable.
    """

    start_timeout_s: float = bounded(120.0, gt=0)
    memory_gb: float | None = bounded(None, gt=0)
    env: tuple[str, ...] = ()
    extra_keys: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        check_bounds(self)
        for name in self.env:
            if not name.isidentifier():
                message = f"`{name}` is no name of an environment variable"
                raise ConfigError(message, hint="give names such as OPENAI_API_KEY, separated by commas")


DEFAULT_WORKER = WorkerOptions()


class GuardedProcess:
    """A process that runs a user's code with a limit of memory and without this process's secrets.

    What the code prints is appended to `log_path`; None for this process's standard error. `guard.py` says how both are
    limited, and which processes end with this one.
    """

    def __init__(self, options: WorkerOptions, *, log_path: Path | None = None) -> None:
        self._connection, theirs = socket.socketpair()
        with theirs:
            descriptor = str(theirs.fileno())
            memory_bytes = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
            if options.memory_gb is not None:
                memory_bytes = int(options.memory_gb * _GIB)
            # -P: files of the working folder are not modules. The guard is a script, which imports nothing of ours.
            command = [sys.executable, "-P", guard.__file__, descriptor, str(log_path or ""), str(memory_bytes)]
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

    def ending(self) -> str:
        """Return in words how the process has ended."""
        self.wait()
        code = self._process.returncode
        if code is None:
            return "closed its connection"
        if code >= 0:
            return f"exited with status {code}"
        try:
            return f"was ended by {signal.Signals(-code).name}"
        except ValueError:
            return f"was ended by signal {-code}"

    def wait(self, timeout_s: float = _EXIT_TIMEOUT_S) -> None:
        """Wait until the process has ended, or for `timeout_s` seconds."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout_s)


def import_path() -> list[str]:
    """Return `sys.path` with the working folder last, so that no file in it takes the place of a library."""
    return sorted(map(os.path.abspath, sys.path), key=os.getcwd().__eq__)


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
