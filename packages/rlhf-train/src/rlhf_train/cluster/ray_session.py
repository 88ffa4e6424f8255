"""This process's connection to Ray: joining a running cluster, starting one for the run, and waiting for results."""

import gc
import json
import logging
import math
import os
import shutil
import socket
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import AuthenticationError, RayError, RayTaskError

import rlhf_train
from rlhf_data.errors import ConfigError, EngineError, RlhfError
from rlhf_rollout.host import socket_folder
from rlhf_rollout.ray_actors import plain_errors
from rlhf_rollout.ray_internals import (
    bootstrap_address,
    changed_start,
    check_ray,
    last_cluster,
    outlive_sigterm,
    private_cluster,
    session_folder,
    use_token,
)
from rlhf_train.cluster.session_folders import LOCK, children, kill, locked, own_sessions, sessions_home, sweep

START_ATTEMPTS = 3
_ANSWER_TIMEOUT_S = 10.0  # a cluster on a busy machine takes its time
# How a client greets (RFC 9113, 3.4): a fixed text and an empty frame of settings, whose header is length, type, flags
# and stream. The server's first frame has the same type.
_HTTP2_SETTINGS = b"\x04"
_HTTP2_GREETING = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(3) + _HTTP2_SETTINGS + bytes(5)
_DEATH_S = 5.0  # within which Ray notices that a process has died
_OPTIONS: Mapping[str, Any] = {"logging_level": "ERROR", "log_to_driver": False}
_SOCKET = "/ray/session_2026-01-01_00-00-00_000000_4194304/sockets/plasma_store.1"  # as long as any
_SUBMITTED = "RAY_JOB_CONFIG_JSON_ENV_VAR"  # set by `ray job submit` in the process that it starts
_TOKEN = (
    "copy the token of the account that started the cluster (`ray get-auth-token` prints it there) and type"
    " `export RAY_AUTH_MODE=token RAY_AUTH_TOKEN=...` with it"
)
_OWN = "set RAY_ADDRESS=local to start one for this run"

_logger = logging.getLogger(__name__)
_waits: dict[int, tuple[str, Sequence[Any], Sequence[Any]]] = {}  # by thread: see `unanswered`


class LostProcessError(EngineError):
    """A process of the run has died, or was lost with its node."""


def wait(references: Sequence[Any], *, timeout_s: float | None = None, what: str = "a call") -> list[Any]:
    """Wait for Ray `references` and return their results.

    Args:
        references: of calls.
        timeout_s: for all of them together; None waits as long as the processes live, since training may take hours.
        what: the calls, for the error.

    Raises:
        RlhfError: the remote call raised it.
        LostProcessError: a remote process has died.
        EngineError: results are missing after `timeout_s`.
        ray.exceptions.RayTaskError: the remote call raised any other error; the message has its traceback.
    """
    if not references:
        return []  # `ray.get` would start a cluster in a process that has none
    pending = list(references)
    ends = math.inf if timeout_s is None else time.monotonic() + timeout_s
    with plain_errors(LostProcessError, "a process of the run"), _noted(what, references, pending):
        # One result at a time: when a rank has died, the others may wait for it forever.
        while pending:
            left = None if timeout_s is None else max(ends - time.monotonic(), 0.0)
            done, pending[:] = ray.wait(pending, num_returns=1, timeout=left)
            if not done:
                hint = "the processes' logs in Ray's session folder tell what they wait for, such as a disk"
                raise EngineError(f"{what} took longer than {timeout_s:g} s", hint=f"{hint} or a download")
            _check(done, pending)
        return ray.get(list(references))


@contextmanager
def _noted(what: str, references: Sequence[Any], pending: Sequence[Any]) -> Iterator[None]:
    """Let `unanswered` know of a wait for the time of a `with` block."""
    _waits[threading.get_ident()] = what, references, pending
    try:
        yield
    finally:
        del _waits[threading.get_ident()]


def unanswered() -> str:
    """Return which calls this process is in `wait` for, such as "a call: no answer from 1 of 2: 0"; for `Watch`."""
    texts = []
    for what, references, pending in list(_waits.values()):
        missing = [str(number) for number, reference in enumerate(references) if reference in pending]
        texts.append(f"{what}: no answer from {len(missing)} of {len(references)}: {', '.join(missing)}")
    return "; ".join(texts)


def _check(done: Sequence[Any], pending: Sequence[Any]) -> None:
    """Raise the error of a finished call, if it has one, or the death of another process that explains it."""
    try:
        ray.get(done)
    except RayTaskError as error:
        if isinstance(error.cause, RlhfError):
            raise
        if isinstance(error.cause, RayError):  # an object that another process held
            raise LostProcessError(f"a process of the run is gone: {error.cause}") from error
        # The peers of a rank that dies fail in their next collective, perhaps before Ray notices the death.
        others, _ = ray.wait(list(pending), num_returns=len(pending), timeout=_DEATH_S) if pending else ([], [])
        for other in others:
            with suppress(RayTaskError):
                ray.get([other])
        raise


class DeviceMemoryError(EngineError):
    """The memory of a rank's device did not suffice."""


def is_unforeseen(error: BaseException) -> bool:
    """Return whether a rank raised an error at any place, such as one of PyTorch: its peers may wait for it there."""
    if isinstance(error, RlhfError):
        return isinstance(error, DeviceMemoryError)
    return isinstance(error, RayTaskError)


def find_cluster() -> str | None:
    """Return the address of the cluster to join, or None when the run should start its own.

    If RAY_ADDRESS is set, it decides; its value `local` means an own cluster. Otherwise the function looks for the
    cluster that `ray start` last started on this machine, and checks that it answers.
    """
    named = os.environ.get("RAY_ADDRESS")
    if named:
        return None if named == "local" else named
    left = last_cluster()
    return left if left and _answers(left) else None


def join(address: str) -> list[dict[str, float]]:
    """Connect to the cluster at `address`, unless this process is connected already; return the resources of each of
    its nodes.

    Raises:
        ConfigError: no cluster answers there, it requires another token, or it runs another version of Ray or Python.
    """
    if not ray.is_initialized():
        _connect(address)
    return [node["Resources"] for node in ray.nodes() if node["Alive"]]


def _connect(address: str) -> None:
    _prepare_environment()
    # Ray does this itself when it discovers the cluster, but not when it is given an address, as here. The token must
    # not go to a foreign cluster that the user named.
    if not os.environ.get("RAY_ADDRESS"):
        use_token()
    submitted = os.environ.get(_SUBMITTED)
    try:
        if "://" not in address:  # addresses of Ray Client have other servers
            _check_answer(bootstrap_address(address))
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
    """Start a cluster with these resources on this machine, and stop it after the `with` block.

    Nobody else gets in: its processes listen on the loopback address, and every call needs a token that is drawn here.
    Ray gives its node 30 s to start, which is too short on a busy machine. The start is therefore tried
    `START_ATTEMPTS` times. Raises EngineError when none succeeds.

    Ray's session folder, with the logs of all processes, is removed, unless an error ends the run. What runs that were
    killed have left, folders and processes, is removed, too.
    """
    _prepare_environment()
    _shorten_paths()
    with private_cluster():
        _start(num_cpus, num_gpus)
        session = Path(session_folder())
        try:
            with locked(session / LOCK):
                try:
                    sweep(session.parent)
                    yield
                except Exception:
                    (session / LOCK).unlink()
                    raise
                finally:
                    _disconnect()  # under the lock: Ray would make the folder anew after another run's sweep
        finally:
            sweep(session.parent)


def _shorten_paths() -> None:
    """Let Ray have its session folder in /tmp if the paths of its sockets would be too long where it is."""
    home = sessions_home()
    folder = socket_folder(home, len(_SOCKET))
    if folder != home:
        os.environ["RAY_TMPDIR"] = folder
        _logger.warning("Ray's session folder is in %s: its sockets would have too long paths in %s", folder, home)


def _disconnect() -> None:
    """Leave the cluster.

    Ray ends the process, with an exit status of 1, when a reference is dropped while it disconnects. Other threads,
    such as those of Weights & Biases, may run Python's collector of garbage at any time, so it must wait.
    """
    gc.collect()
    is_enabled = gc.isenabled()
    gc.disable()
    try:
        ray.shutdown()
    finally:
        if is_enabled:
            gc.enable()


def _start(num_cpus: int, num_gpus: int) -> None:
    earlier = own_sessions()
    failed: set[Path] = set()
    for attempt in range(1, START_ATTEMPTS + 1):
        before = children()
        try:
            with changed_start():
                ray.init(address="local", num_cpus=num_cpus, num_gpus=num_gpus, include_dashboard=False, **_OPTIONS)
            for folder in failed:
                shutil.rmtree(folder, ignore_errors=True)
            return
        except BaseException as error:
            _disconnect()
            kill(children() - before)
            failed = own_sessions() - earlier
            if isinstance(error, KeyboardInterrupt):
                for folder in failed:
                    shutil.rmtree(folder, ignore_errors=True)
            # Ray reports a time-out as a plain Exception, RuntimeError or TimeoutError. Subclasses are other errors.
            if type(error) not in (Exception, RuntimeError, TimeoutError):
                raise
            failure = error
        _logger.warning("Ray did not start, attempt %d of %d: %s", attempt, START_ATTEMPTS, failure)
    load = f"{os.getloadavg()[0]:.1f} on {os.cpu_count()} cores"
    hint = "end other programs and try again, or run `ray start --head` first: the next run joins that cluster"
    message = f"Ray did not start in {START_ATTEMPTS} attempts (load average {load}): {failure}"
    raise EngineError(message, hint=hint) from failure


def check_resources(num_cpus: float, num_gpus: float) -> None:
    """Raise EngineError when the cluster has fewer CPUs or GPUs in total, free or not, than the run needs."""
    have = ray.cluster_resources()
    if have.get("CPU", 0) >= num_cpus and have.get("GPU", 0) >= num_gpus:
        return
    message = f"the run needs {num_cpus:g} CPUs and {num_gpus:g} GPUs,"
    message += f" and the Ray cluster has {have.get('CPU', 0):g} and {have.get('GPU', 0):g}"
    flags = f"--num-cpus {num_cpus:g}" + (f" --num-gpus {num_gpus:g}" if num_gpus else "")
    raise EngineError(message, hint=f"start it with `ray start --head {flags}`, add nodes, or {_OWN}")


def worker_environment(environ: Mapping[str, str], submitted: str | None) -> dict[str, Any]:
    """Return the Ray runtime environment with which workers of a joined cluster find this process's packages.

    Args:
        environ: this process's environment variables.
        submitted: JSON configuration of the job if `ray job submit` started this process, else None. Ray refuses a
            variable that both the job and the driver set; the job's value is kept.
    """
    path = environ.get("PYTHONPATH")
    given = (json.loads(submitted).get("runtime_env") or {}) if submitted else {}
    if not path or _is_installed() or "PYTHONPATH" in given.get("env_vars", {}):
        return {}
    return {"env_vars": {"PYTHONPATH": path}}


def _prepare_environment() -> None:
    """Set environment variables for Ray and for the workers of a cluster that this process starts.

    Raises EngineError for a version of Ray that lacks what a run needs.
    """
    check_ray()
    if not _is_installed():
        own = [path for path in sys.path if path and not path.startswith((sys.prefix, sys.base_prefix))]
        before = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
        os.environ["PYTHONPATH"] = os.pathsep.join(dict.fromkeys([*own, *before]))
    # Under `uv run`, Ray would start its workers through `uv run` too, and they hang.
    os.environ.setdefault("RAY_ENABLE_UV_RUN_RUNTIME_ENV", "0")
    # Keep CUDA_VISIBLE_DEVICES of workers without GPUs as it is.
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    # By default Ray lowers the priority of its workers, so that ranks and engines lose to every other program.
    os.environ.setdefault("RAY_worker_niceness", "0")
    outlive_sigterm()


def _is_installed() -> bool:
    """Return whether the packages are in site-packages, where every process of this interpreter finds them.

    In a checkout or in Bazel's runfiles they are not, and workers need PYTHONPATH.
    """
    source = Path(rlhf_train.__file__).parents[1]
    return any(source.is_relative_to(path) for path in sys.path if path.endswith("site-packages"))


def _check_answer(address: str) -> None:
    """Raise ConnectionError if no cluster answers at `address`: Ray would try for minutes.

    "auto" may lead to a cluster that a run started for itself. It listens on the loopback address only, while Ray tries
    another one of this machine.
    """
    if not _answers(address):
        raise ConnectionError(f"no cluster answers at {address} (nobody joins one that a run starts for itself)")


def _answers(address: str) -> bool:
    """Return whether a server speaks HTTP/2 there, as a cluster's does: Ray would wait for any other for minutes."""
    host, _, port = address.rpartition(":")
    try:
        with socket.create_connection((host.strip("[]"), int(port)), timeout=_ANSWER_TIMEOUT_S) as connection:
            if os.environ.get("RAY_USE_TLS", "0").lower() in ("1", "true"):
                return True
            connection.sendall(_HTTP2_GREETING)
            with connection.makefile("rb") as answer:
                return answer.read(4)[3:] == _HTTP2_SETTINGS
    except (OSError, ValueError):
        return False
