"""This process's connection to Ray: a cluster that is running already or one that lives as long as the run, and what
its processes answer."""

import json
import logging
import os
import signal
import socket
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import ray
from ray._private import services
from ray.exceptions import AuthenticationError, RayError

import rlhf_train
from rlhf_data.errors import ConfigError, EngineError
from rlhf_rollout.ray_actors import plain_errors

START_ATTEMPTS = 3
_ANSWER_TIMEOUT_S = 2.0
_OPTIONS: Mapping[str, Any] = {"logging_level": "ERROR", "log_to_driver": False}
_SUBMITTED = "RAY_JOB_CONFIG_JSON_ENV_VAR"  # what `ray job submit` gives the process that it starts
_TOKEN = (
    "copy the token of the account that started the cluster (`ray get-auth-token` prints it there) and type"
    " `export RAY_AUTH_MODE=token RAY_AUTH_TOKEN=...` with it"
)
_OWN = "set RAY_ADDRESS=local to start one for this run"

_logger = logging.getLogger(__name__)


def wait(references: Sequence[Any]) -> list[Any]:
    """Return the results of Ray's `references`.

    Raises:
        RlhfError: the remote side raised it.
        EngineError: the process is gone.
        ray.exceptions.RayTaskError: any other error of the remote side, with its traceback.
    """
    if not references:
        return []  # `ray.get` would start a cluster in a process that has none
    with plain_errors(EngineError, "a process of the run"):
        return ray.get(list(references))


def find_cluster() -> str | None:
    """Return the address of the cluster to join, or None when the run starts its own.

    RAY_ADDRESS decides where it is set, and its value `local` asks for an own cluster. Otherwise this is the cluster
    that `ray start` last left running on this machine, if it answers.
    """
    named = os.environ.get("RAY_ADDRESS")
    if named:
        return None if named == "local" else named
    left = services.find_bootstrap_address(None)
    return left if left and _answers(left) else None


def join(address: str) -> None:
    """Connect to the cluster at `address`, unless this process is connected already.

    Raises:
        ConfigError: no cluster answers there, it asks for another token, or its Ray or Python version is another.
    """
    if ray.is_initialized():
        return
    _prepare_environment()
    if not os.environ.get("RAY_ADDRESS"):
        _use_token()
    submitted = os.environ.get(_SUBMITTED)
    try:
        ray.init(address=address, runtime_env=worker_environment(os.environ, submitted), **_OPTIONS)
    except (ConnectionError, ValueError, RuntimeError, RayError) as error:
        hint = f"start it with `ray start --head`; if it asks for a token, {_TOKEN}; or {_OWN}"
        reason = str(error)
        if isinstance(error, AuthenticationError):
            hint = f"{_TOKEN}; or {_OWN}"
            reason = error.message  # its text as a string holds advice for other situations, too
        raise ConfigError(f"the Ray cluster at {address} cannot be joined: {reason}", hint=hint) from None


@contextmanager
def started_cluster(num_cpus: int, num_gpus: int) -> Iterator[None]:
    """Start a cluster of these resources in this process; end it afterwards. Raises EngineError when it does not start.

    Ray gives its node 30 s to start, which a busy machine may not manage, so that a start is tried several times.
    """
    _prepare_environment()
    for attempt in range(1, START_ATTEMPTS + 1):
        before = _children()
        try:
            ray.init(address="local", num_cpus=num_cpus, num_gpus=num_gpus, include_dashboard=False, **_OPTIONS)
            break
        except Exception as error:
            # Ray has no class of its own for this: a plain Exception, RuntimeError or TimeoutError tells of a time-out.
            if type(error) not in (Exception, RuntimeError, TimeoutError):
                raise
            failure = error
        ray.shutdown()
        _kill(_children() - before)
        _logger.warning("Ray did not start, attempt %d of %d: %s", attempt, START_ATTEMPTS, failure)
    else:
        load = f"{os.getloadavg()[0]:.1f} on {os.cpu_count()} cores"
        hint = "end other programs and try again; or start Ray apart with `ray start --head`, which this run then joins"
        message = f"Ray did not start in {START_ATTEMPTS} attempts (load average {load}): {failure}"
        raise EngineError(message, hint=hint) from failure
    try:
        yield
    finally:
        ray.shutdown()


def check_resources(num_cpus: float, num_gpus: float) -> None:
    """Raise EngineError when the whole cluster has fewer CPUs or GPUs than the run needs."""
    have = ray.cluster_resources()
    if have.get("CPU", 0) >= num_cpus and have.get("GPU", 0) >= num_gpus:
        return
    message = f"the run needs {num_cpus:g} CPUs and {num_gpus:g} GPUs,"
    message += f" and the Ray cluster has {have.get('CPU', 0):g} and {have.get('GPU', 0):g}"
    flags = f"--num-cpus {num_cpus:g}" + (f" --num-gpus {num_gpus:g}" if num_gpus else "")
    raise EngineError(message, hint=f"start it with `ray start --head {flags}`, add nodes, or {_OWN}")


def worker_environment(environ: Mapping[str, str], submitted: str | None) -> dict[str, Any]:
    """Return the runtime environment that makes a joined cluster's workers import what this process imports.

    Args:
        environ: this process's variables.
        submitted: the configuration, in JSON, of the job that `ray job submit` started this process for. Ray refuses a
            variable that both set, and the job's counts.
    """
    path = environ.get("PYTHONPATH")
    given = (json.loads(submitted).get("runtime_env") or {}) if submitted else {}
    if not path or _is_installed() or "PYTHONPATH" in given.get("env_vars", {}):
        return {}
    return {"env_vars": {"PYTHONPATH": path}}


def _prepare_environment() -> None:
    """Set what Ray, and the workers of a cluster that this process starts, take from its environment."""
    if not _is_installed():
        own = [path for path in sys.path if path and not path.startswith((sys.prefix, sys.base_prefix))]
        before = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
        os.environ["PYTHONPATH"] = os.pathsep.join(dict.fromkeys([*own, *before]))
    os.environ.setdefault("RAY_ENABLE_UV_RUN_RUNTIME_ENV", "0")  # else workers start through `uv run`, and hang
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    os.environ.setdefault("RAY_worker_niceness", "0")  # else ranks and engines get what other programs leave them


def _use_token() -> None:
    """Send the token of this account, if it has one: a cluster that `ray start` began then asks for it.

    Ray does so itself where it finds the cluster. It sends no token to an address that is named, and neither do we.
    """
    try:
        from ray._private.authentication.authentication_token_setup import maybe_enable_token_auth_if_token_available
    except ImportError:  # Ray before 2.60 asks for a token only where RAY_AUTH_MODE says so
        return
    maybe_enable_token_auth_if_token_available(warn_if_disabled=False)


def _is_installed() -> bool:
    """Return whether every process of this interpreter finds the packages: not so in a checkout or Bazel's runfiles."""
    source = Path(rlhf_train.__file__).parents[1]
    return any(source.is_relative_to(path) for path in sys.path if path.endswith("site-packages"))


def _answers(address: str) -> bool:
    host, _, port = address.rpartition(":")
    try:
        with socket.create_connection((host, int(port)), timeout=_ANSWER_TIMEOUT_S):
            return True
    except (OSError, ValueError):
        return False


def _children() -> set[int]:
    """Return the ids of this process's child processes."""
    return {int(pid) for path in Path("/proc/self/task").glob("*/children") for pid in path.read_text().split()}


def _kill(pids: set[int]) -> None:
    """End what a failed start of Ray left behind: it would take memory and time from the next."""
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
