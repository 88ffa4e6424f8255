"""NVIDIA's Multi-Process Service (MPS): kernels of several processes run on one GPU at the same time."""

import os
import shutil
import subprocess
import tempfile
from contextlib import suppress
from pathlib import Path

from rlhf_data.errors import ConfigError
from rlhf_rollout.host import socket_folder

# Help of the option `vllm_use_mps`, which several commands have.
USE_MPS_HELP = (
    "engines on one GPU run at the same time instead of in time slices, by NVIDIA's Multi-Process Service; needs"
    " nvidia-cuda-mps-control of the driver, and several engines on a GPU"
)
_PROGRAM = "nvidia-cuda-mps-control"
_SOCKET_BYTES = 40  # length of a socket's path after the folder for temporary files
_QUIT_S = 30.0  # within which clients that are being ended are gone


class MpsDaemon:
    """A daemon of its own for the processes that have the variables which `start` returns.

    Others on the same GPUs are not its clients.
    """

    def __init__(self) -> None:
        self._folder: Path | None = None
        self._environ: dict[str, str] = {}

    def start(self) -> dict[str, str]:
        """Start the daemon; return environment variables of clients, which CUDA reads when a process first uses it.

        Raises ConfigError when the daemon's program is not installed, or does not start.
        """
        if shutil.which(_PROGRAM) is None:
            message = f"there is no {_PROGRAM} on this machine"
            raise ConfigError(message, hint="it comes with the driver; run without MPS")
        # Sockets lie in it, whose paths must be short.
        home = socket_folder(tempfile.gettempdir(), _SOCKET_BYTES)
        folder = Path(tempfile.mkdtemp(prefix="mps", dir=home))
        self._environ = {f"CUDA_MPS_{name}_DIRECTORY": str(folder / name.lower()) for name in ("PIPE", "LOG")}
        for path in self._environ.values():
            os.mkdir(path)
        started = self._run("-d")
        if started.returncode:
            shutil.rmtree(folder, ignore_errors=True)
            said = (started.stdout + started.stderr).strip()
            raise ConfigError(f"{_PROGRAM} does not start: {said}", hint="run without MPS")
        self._folder = folder
        return self._environ

    def stop(self) -> None:
        """End the daemon, if it runs, once its clients have ended, and remove its folder."""
        if self._folder is None:
            return
        try:
            self._run(commands="quit\n")
        except subprocess.TimeoutExpired:
            with suppress(subprocess.TimeoutExpired):
                self._run(commands="quit -t 1\n")
        finally:
            shutil.rmtree(self._folder, ignore_errors=True)

    def _run(self, *arguments: str, commands: str = "") -> "subprocess.CompletedProcess[str]":
        # It serves all GPUs: clients would count the GPUs of a daemon that sees only some of them from 0.
        return subprocess.run(
            [_PROGRAM, *arguments],
            env={name: value for name, value in os.environ.items() if name != "CUDA_VISIBLE_DEVICES"} | self._environ,
            input=commands,
            capture_output=True,
            text=True,
            timeout=_QUIT_S,
        )
