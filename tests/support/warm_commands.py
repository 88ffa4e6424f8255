"""Runs commands of `rlhf` in forks of processes that have imported the libraries, which saves seconds per command.

A fork takes folder, environment, arguments and standard streams of its caller, and ends as a new interpreter would.
"""

import contextlib
import gc
import importlib
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Collection, Iterator

# By kind of command, what it imports. vLLM changes settings of torch, so trainers do without it. Ray is left to the one
# command that uses it, because it reads the environment when it is imported.
LIBRARIES = {
    "engine": ("rlhf_rollout.engines.vllm.loop", "vllm.engine.arg_utils", "vllm.v1.engine.core_client"),
    "trainer": ("peft", "rlhf_train.offline.epochs"),
}
ENGINE_COMMANDS = ("chat", "generate")


@contextlib.contextmanager
def warm_commands(kinds: Collection[str] = tuple(LIBRARIES)) -> Iterator[list[str]]:
    """Yield the words that start a command, before its name. It is of one of `kinds`, and has one OpenMP thread.

    Commands of one kind run one after the other. With a GPU, which forks cannot share, they are new interpreters.
    """
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
        try:
            yield [sys.executable, "-I", "-S", __file__, "call", folder]
        finally:
            os.killpg(server.pid, signal.SIGKILL)
            server.wait()


def call(folder: str, words: list[str]) -> int:
    """Let the server whose sockets are in `folder` run a command; return its exit status."""
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(f"{folder}/{'engine' if words[0] in ENGINE_COMMANDS else 'trainer'}")
        socket.send_fds(connection, [b"s"], [0, 1, 2])
        connection.sendall(json.dumps([words, os.getcwd(), dict(os.environ)]).encode())
        connection.shutdown(socket.SHUT_WR)
        code = int(received(connection) or 70)  # no answer: the server is gone
        return code if code >= 0 else 128 - code


def serve(numbers: dict[str, int]) -> None:
    """Import the libraries of each kind in a process, and fork it for each connection to the socket of that kind."""
    from rlhf_rollout.engines.vllm.core import prepare_environment
    from rlhf_rollout.host import wait_passively

    wait_passively()  # as every command does before it imports torch
    importlib.import_module("transformers.models.qwen2.modeling_qwen2")
    *others, kind = numbers
    kind = next((other for other in others if os.fork() == 0), kind)
    listener = socket.socket(fileno=numbers.pop(kind))
    for other in numbers.values():
        os.close(other)
    if kind == "engine":
        prepare_environment()
    else:
        from rlhf_train.engine.deepspeed_internals import import_deepspeed

        import_deepspeed("cpu")
    before = dict(os.environ)
    for name in LIBRARIES[kind]:
        importlib.import_module(name)
    set_on_import = dict(os.environ.items() - before.items())
    assert len(os.listdir("/proc/self/task")) == 1, "a fork would lack the other threads"
    gc.freeze()
    while True:
        connection, _ = listener.accept()
        _, streams, _, _ = socket.recv_fds(connection, 1, 3)
        words, folder, environment = json.loads(received(connection))
        if (child := os.fork()) == 0:
            break
        _, status = os.waitpid(child, 0)
        for stream in streams:
            os.close(stream)
        with connection:
            connection.sendall(str(os.waitstatus_to_exitcode(status)).encode())
    connection.close()
    listener.close()
    run(streams, words, folder, environment | set_on_import)


def run(streams: list[int], words: list[str], folder: str, environment: dict[str, str]) -> None:
    """Run a command in this process, as `python -m rlhf_cli.main` would in a new one."""
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
        os.close(stream)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    if not sys.flags.safe_path:
        sys.path[0] = folder
    sys.argv[1:] = words
    runpy.run_module("rlhf_cli.main", run_name="__main__", alter_sys=True)


def received(connection: socket.socket) -> bytes:
    """Return what the other side sends until it ends its half."""
    return b"".join(iter(lambda: connection.recv(65536), b""))


if __name__ == "__main__":
    if sys.argv[1] == "serve":
        serve(json.loads(sys.argv[2]))
    else:
        sys.exit(call(sys.argv[2], sys.argv[3:]))
