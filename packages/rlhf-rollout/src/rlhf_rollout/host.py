"""The process and its machine: GPUs, ports, how threads wait, and when garbage is collected."""

import gc
import os
import random
import socket
import tempfile
import uuid
from collections.abc import Iterator, MutableMapping
from contextlib import contextmanager, suppress
from pathlib import Path

from rlhf_data.safety import is_loopback

_SOCKET_PATH_BYTES = 107  # that Linux allows; folders for temporary files of clusters' jobs often leave no room
# The runtimes under PyTorch's CPU builds: GNU's reads the first, Intel's and LLVM's read both.
_PASSIVE_WAITING = {"OMP_WAIT_POLICY": "PASSIVE", "KMP_BLOCKTIME": "0"}
# The first and the last of the ports that the system gives to those that ask for any.
_GIVEN_PORTS = Path("/proc/sys/net/ipv4/ip_local_port_range")
_NUM_PORTS = 12_000  # that `free_port` chooses from; Ray's processes have those from 10,002 to 19,999
_PORT_ATTEMPTS = 100
_OBJECTS_PER_COLLECTION = 10_000  # Python's own is 700, or 2,000


def local_gpus() -> int:
    """Return the number of GPUs; see `visible_gpus`."""
    return len(visible_gpus())


def visible_gpus() -> list[str]:
    """Return the GPUs as CUDA_VISIBLE_DEVICES may name them, by it or the driver's device files: without a GPU library.

    Device files are only counted: without the variable, CUDA numbers GPUs from 0, whatever their files are called.
    """
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return [device.strip() for device in visible.split(",") if device.strip() not in ("", "-1", "NoDevFiles")]
    files = [path for path in Path("/dev").glob("nvidia*") if path.name.removeprefix("nvidia").isdigit()]
    return [str(number) for number in range(len(files))]


def free_port() -> int:
    """Return a TCP port that is free on this host at this moment.

    It lies below the range from which the system gives ports to connections, and to servers that ask for any port. Only
    a program that chooses the same number can take it before the caller binds it.
    """
    try:
        first_given = int(_GIVEN_PORTS.read_text().split()[0])
    except (OSError, ValueError, IndexError):  # not Linux
        first_given = 32768
    first = max(first_given - _NUM_PORTS, 1024)
    draw = random.SystemRandom()  # whatever seeds the program has set, processes must differ
    for _ in range(_PORT_ATTEMPTS if first < first_given else 0):
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("", port := draw.randrange(first, first_given)))
            return port
    with socket.socket() as probe:
        probe.bind(("", 0))
        return probe.getsockname()[1]


def wait_passively(environ: MutableMapping[str, str] = os.environ) -> None:
    """Let idle OpenMP threads sleep on a machine without GPUs; by default they spin and take time from other processes.

    Engines and trainers have a thread pool each on the same cores: threads of one that spin slow the other down.
    Variables that are already set keep their values. Call this before torch is imported, because the OpenMP runtime
    reads them once. Child processes inherit them.
    """
    if local_gpus() == 0:
        for name, value in _PASSIVE_WAITING.items():
            environ.setdefault(name, value)


def socket_folder(folder: str, num_bytes: int) -> str:
    """Return a folder for Unix sockets: `folder`, or /tmp if paths that are `num_bytes` longer would be too long."""
    return folder if len(os.fsencode(folder)) + num_bytes <= _SOCKET_PATH_BYTES else "/tmp"


def place_vllm_sockets() -> None:
    """Let vLLM make its sockets in a folder with a short path: that for temporary files, or /tmp."""
    os.environ.setdefault("VLLM_RPC_BASE_PATH", socket_folder(tempfile.gettempdir(), len(f"/{uuid.uuid4()}")))


def stay_on_loopback(host: str) -> None:
    """Have gloo and NCCL use the loopback interface if `host`, where processes meet, is a loopback address.

    By default they listen on the address of the machine's name. Variables that are already set keep their values.
    """
    if is_loopback(host):
        for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
            os.environ.setdefault(name, "lo")


@contextmanager
def collection_paused() -> Iterator[None]:
    """Pause Python's garbage collector for the time of a `with` block that imports large libraries.

    Otherwise the collector examines all imported objects again and again: about a tenth of the time of an import. It
    takes them for old ones afterwards, if they are many.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            if gc.get_count()[0] > 10 * _OBJECTS_PER_COLLECTION:
                is_frozen = gc.get_freeze_count() > 0
                gc.freeze()
                if not is_frozen:
                    gc.unfreeze()  # into the oldest generation
            gc.enable()


def spare_collection() -> None:
    """Let Python's garbage collector skip all objects that exist, and look at new ones less often, from now on.

    For the processes of engines and reward models. Their steps make thousands of objects, hardly any of which is in a
    cycle, and would wait while the collector looks at all.
    """
    gc.freeze()
    gc.set_threshold(_OBJECTS_PER_COLLECTION)


@contextmanager
def quick_collection() -> Iterator[None]:
    """Let Python's garbage collector skip all objects that exist, for the time of a `with` block.

    A collection takes half a second with all that PyTorch, transformers and DeepSpeed have imported, and milliseconds
    without.
    """
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
