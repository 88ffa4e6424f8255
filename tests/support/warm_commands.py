"""Runs commands of `rlhf`, and workers of Ray, in forks of processes that have imported the libraries.

That saves seconds per process. A fork takes folder, environment, arguments and standard streams of its caller, and ends
as a new interpreter would. It is killed when its caller is gone, or the process that has the libraries imported.
"""

import atexit
import contextlib
import gc
import importlib
import json
import os
import runpy
import select
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any, NoReturn

# What commands and workers import, beside transformers, DeepSpeed and PEFT. vLLM changes settings of torch, so both do
# without it; commands that generate have their engine in another process. Ray is left to the one command that uses it,
# and to workers, because it reads the environment when it is imported. A worker becomes a rank or an engine: it has
# imported what vLLM imports of others.
LIBRARIES = {
    "trainer": ("rlhf_cli.commands.ppo", "rlhf_cli.preflight.inputs", "rlhf_train.offline.job"),
    "worker": (
        "aiohttp", "openai.types.responses", "torch._dynamo.aot_compile_types",
        "torch._inductor.lowering", "transformers.models.auto.image_processing_auto",
        "rlhf_train.learning.kernels_ahead",
    ),
}  # fmt: skip
SOCKETS = "RLHF_WARM_WORKERS"  # names the folder of the sockets to `for_workers`
PATIENCE_S = 30.0  # after which a worker is a new interpreter: Ray gives it 60 s to start
# Names of variables, or their first letters, that no library of a worker reads when it is imported. A worker that
# differs in others from the process that would fork is a new interpreter, too.
READ_LATER = (
    *("BUILD_", "COLUMNS", "GLOO_", "LINES", "NCCL_", "OLDPWD", "PWD", "PYTEST_", "PYTHONBREAKPOINT"),
    *("RAY_", "RLHF_", "SHLVL", "SPT_", "TEST_", "VLLM_", "_"),
)


@contextlib.contextmanager
def warm_commands(kinds: Collection[str] = tuple(LIBRARIES)) -> Iterator[list[str]]:
    """Yield the words that start a command, before its name. It has one OpenMP thread.

    With the kind "worker", this also concerns workers of clusters that commands start in this `with` block. With a GPU,
    which forks cannot share, all are new interpreters.
    """
    from unittest import mock  # which a caller must not wait for

    from rlhf_rollout.host import local_gpus

    if local_gpus() > 0:
        yield [sys.executable, "-m", "rlhf_cli.main"]
        return
    # The path of a socket has at most 107 characters, and Bazel's TEST_TMPDIR is too long.
    with tempfile.TemporaryDirectory(prefix="rlhf", dir="/tmp") as folder, contextlib.ExitStack() as stack:
        listeners = {kind: stack.enter_context(socket.socket(socket.AF_UNIX)) for kind in kinds}
        for kind, listener in listeners.items():
            listener.bind(f"{folder}/{kind}")
            listener.listen()
        numbers = {kind: listener.fileno() for kind, listener in listeners.items()}
        server = subprocess.Popen(
            [sys.executable, __file__, "serve", json.dumps(numbers)],
            env=os.environ | {"OMP_NUM_THREADS": "1"}, pass_fds=list(numbers.values()), process_group=0,
        )  # fmt: skip
        stack.close()  # only the server listens: once it is gone, calls fail
        hook = {"RAY_RUNTIME_ENV_HOOK": "warm_commands.for_workers", SOCKETS: folder}
        hook["PYTHONPATH"] = os.pathsep.join([*paths(os.environ), os.path.dirname(os.path.abspath(__file__))])
        try:
            with mock.patch.dict(os.environ, hook if "worker" in kinds else {}):
                yield caller(folder)
        finally:
            os.killpg(server.pid, signal.SIGKILL)
            server.wait()


def caller(folder: str) -> list[str]:
    """Return the words that call the server whose sockets are in `folder`."""
    return [sys.executable, "-I", "-S", __file__, "call", folder]


def for_workers(runtime_env: dict[str, Any] | None) -> dict[str, Any]:
    """Return the environment in which Ray starts workers as forks; Ray calls this with the one that was asked for."""
    return (runtime_env or {}) | {"py_executable": shlex.join(caller(os.environ[SOCKETS]))}


def call(folder: str, words: list[str]) -> int:
    """Let the server whose sockets are in `folder` run a command, or Ray's program; return its exit status."""
    is_worker = words[0].endswith(".py")
    kind = "worker" if is_worker else "trainer"
    answer = b""
    with socket.socket(socket.AF_UNIX) as connection, contextlib.suppress(TimeoutError):
        connection.connect(f"{folder}/{kind}")
        connection.settimeout(PATIENCE_S if is_worker else None)
        connection.recv(1)  # it has imported the libraries
        connection.settimeout(None)
        socket.send_fds(connection, [b"s"], [0, 1, 2])
        connection.sendall(json.dumps([words, os.getcwd(), dict(os.environ), os.getpgrp()]).encode())
        connection.shutdown(socket.SHUT_WR)
        answer = received(connection)
    if is_worker and not answer:
        os.execv(sys.executable, [sys.executable, *words])
    code = int(answer or 70)  # no answer: the server is gone
    return code if code >= 0 else 128 - code


def serve(numbers: dict[str, int]) -> None:
    """Import the libraries of each kind in a process, and fork it for each connection to the socket of that kind."""
    from rlhf_rollout.host import wait_passively
    from rlhf_train.engine.deepspeed_internals import import_deepspeed

    parent = os.pidfd_open(os.getppid())
    started = dict(os.environ)
    gc.disable()  # it would look at all imported modules again and again
    wait_passively()  # as every command does before it imports torch
    importlib.import_module("transformers.models.qwen2.modeling_qwen2")
    import_deepspeed("cpu")
    importlib.import_module("peft")
    *others, kind = numbers
    kind = next((other for other in others if os.fork() == 0), kind)
    listener = socket.socket(fileno=numbers.pop(kind))
    for other in numbers.values():
        os.close(other)
    before = started if kind == "worker" else dict(os.environ)
    for name in LIBRARIES[kind]:
        importlib.import_module(name)
    own = dict(os.environ.items() - before.items())  # which a new interpreter would set, too
    assert len(os.listdir("/proc/self/task")) == 1, "a fork would lack the other threads"
    gc.freeze()
    gc.enable()
    run(*next_call(listener, own, parent, is_worker=kind == "worker"))


def next_call(
    listener: socket.socket, own: dict[str, str], parent: int, *, is_worker: bool
) -> tuple[list[int], list[str], str, dict[str, str], int]:
    """Fork for each call; return in the fork only, with the call's streams, words, folder, environment and group.

    When the process of the descriptor `parent` is gone, which may have been killed, this one and its forks are killed.
    """
    callers: dict[int, int] = {}  # by descriptor of a connection, that of its fork
    forks: dict[int, tuple[int, socket.socket]] = {}
    events = select.poll()
    events.register(listener, select.POLLIN)
    events.register(parent, select.POLLIN)
    while True:
        number, _ = events.poll()[0]
        if number == parent:
            os.killpg(0, signal.SIGKILL)
        elif number in callers:
            signal.pidfd_send_signal(callers[number], signal.SIGKILL)
            events.unregister(number)
            del callers[number]
        elif number in forks:
            child, connection = forks.pop(number)
            _, status = os.waitpid(child, 0)
            events.unregister(number)
            os.close(number)
            if callers.pop(connection.fileno(), None) is not None:
                events.unregister(connection)
                with contextlib.suppress(OSError):
                    connection.sendall(str(os.waitstatus_to_exitcode(status)).encode())
            connection.close()
        else:
            connection, _ = listener.accept()
            streams: list[int] = []
            with contextlib.suppress(OSError):
                connection.sendall(b"r")
                _, streams, _, _ = socket.recv_fds(connection, 1, 3)
            if not streams:  # the caller is gone, or has lost its patience
                connection.close()
                continue
            words, folder, environment, group = json.loads(received(connection))
            environment = own | environment
            child = -1 if is_worker and differing(environment) else os.fork()
            if child == 0:
                for other in (listener, connection, *(other for _, other in forks.values())):
                    other.close()
                return streams, words, folder, environment, group
            for stream in streams:
                os.close(stream)
            if child < 0:
                connection.close()
                continue
            descriptor = os.pidfd_open(child)
            events.register(descriptor, select.POLLIN)
            events.register(connection, 0)  # tells that the other side is gone
            callers[connection.fileno()] = descriptor
            forks[descriptor] = (child, connection)


def differing(environment: dict[str, str]) -> set[str]:
    """Return the variables in which something that this process has imported may have found another value.

    Other folders to import from are none, unless they hold a module that this process has imported.
    """
    changed = {name for name, _ in environment.items() ^ os.environ.items()}
    folders = set(paths(environment)) - set(paths(os.environ))
    modules = {name.partition(".")[0] for folder in folders if os.path.isdir(folder) for name in os.listdir(folder)}
    if not modules & {"sitecustomize", "usercustomize", *sys.modules}:
        changed.discard("PYTHONPATH")
    early = {name for name in changed if not name.startswith(READ_LATER)}
    if early:
        print(f"a worker is no fork, because of {', '.join(sorted(early))}", file=sys.stderr, flush=True)
    return early


def paths(environment: Mapping[str, str]) -> list[str]:
    return [path for path in environment.get("PYTHONPATH", "").split(os.pathsep) if path]


def run(streams: list[int], words: list[str], folder: str, environment: dict[str, str], group: int) -> NoReturn:
    """Run a command or a program in this process, as a new interpreter would."""
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
        os.close(stream)
    os.chdir(folder)
    is_program = words[0].endswith(".py")
    first = [] if sys.flags.safe_path else [os.path.dirname(words[0]) if is_program else folder]
    others = [path for path in sys.path[len(first) :] if path not in paths(os.environ)]
    sys.path[:] = [*first, *paths(environment), *others]
    os.environ.clear()
    os.environ.update(environment)
    if is_program:
        try:
            os.setpgid(0, group)  # Ray ends the group of a worker with it
        except PermissionError:  # that of another session
            os.setpgid(0, 0)
        importlib.import_module("numpy").random.seed()
        sys.argv[:] = words
        end_with(lambda: runpy.run_path(words[0], run_name="__main__"))
    sys.argv[1:] = words
    end_with(lambda: runpy.run_module("rlhf_cli.main", run_name="__main__", alter_sys=True))


def end_with(program: Callable[[], object]) -> NoReturn:
    """Run a program and end as an interpreter does after it, but leave the modules: their end copies their memory."""
    status = 0
    try:
        program()
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
    except BaseException:
        status = 1
        sys.excepthook(*sys.exc_info())
    threading._shutdown()
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(status)


def received(connection: socket.socket) -> bytes:
    """Return what the other side sends until it ends its half."""
    return b"".join(iter(lambda: connection.recv(65536), b""))


if __name__ == "__main__":
    if sys.argv[1] == "serve":
        serve(json.loads(sys.argv[2]))
    else:
        sys.exit(call(sys.argv[2], sys.argv[3:]))
