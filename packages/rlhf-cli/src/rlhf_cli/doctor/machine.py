"""Findings on the machine: GPUs, memory, disk, limits, network, clock."""

import os
import resource
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import Any

from rlhf_cli.config.paths import check_writable
from rlhf_cli.doctor.finding import FAULT, NOTICE, OK, Finding, of_error
from rlhf_data.errors import ConfigError, first_line
from rlhf_data.pretrained import hub_date
from rlhf_rollout.host import free_port, local_gpus

_GIB = 1 << 30
_QUERY = ("--query-gpu=name,driver_version,memory.total,memory.used", "--format=csv,noheader,nounits")
_BUSY = 0.05  # share of a GPU's memory that others use
_NEEDED_SHM_BYTES = _GIB // 2  # NCCL and vLLM's processes of one engine talk through it
_RAY_SHARE, _RAY_BYTES = 0.3, 10**10  # of the memory, and at most, that Ray's object store takes of /dev/shm
_FEW_FILES, _ENOUGH_FILES = 1024, 4096  # Ray's own bounds: it raises the limit to the hard one, and warns below 4096
_TRIAL_BYTES = 64 << 20
_LITTLE_DISK_BYTES = 10 * _GIB
_SLOW_BYTES = 100e6  # per second
_SKEW_S = 60.0


def gpus(count: Callable[[], int] = local_gpus, ask: Callable[..., Any] = subprocess.run) -> Finding:
    """Return the GPUs and their driver."""
    number = count()
    if not number:
        hidden = os.environ.get("CUDA_VISIBLE_DEVICES")
        found = "there is none" if hidden is None else f"CUDA_VISIBLE_DEVICES={hidden} names none"
        hint = "nvidia-smi, if there should be one; in a container, start it with --gpus all"
        hint = hint if hidden is None else "unset CUDA_VISIBLE_DEVICES"
        return Finding("GPU", NOTICE, found, "everything runs on CPUs, which is quick for tiny models alone", hint)
    try:
        said = ask(["nvidia-smi", *_QUERY], capture_output=True, text=True, timeout=30, check=True).stdout
        rows = [[cell.strip() for cell in line.split(",")] for line in said.strip().splitlines()]
        sizes = [(name, driver, int(total), int(used)) for name, driver, total, used in rows]
        name, driver, total, _ = sizes[0]
    except (OSError, subprocess.SubprocessError, ValueError, IndexError) as error:
        hint = "start a container with --gpus all; otherwise `nvidia-smi` tells what the driver lacks"
        found = f"{number} visible, and nvidia-smi fails: {first_line(error)}"
        return Finding("GPU", FAULT, found, "no GPU can be used", hint)
    text = f"{number} visible of {len(sizes)} x {name}, {total / 1024:.0f} GiB, driver {driver}"
    taken = {index: used for index, (*_, size, used) in enumerate(sizes) if used > _BUSY * size}
    if taken:
        found = ", ".join(f"{used / 1024:.1f} GiB of GPU {index}" for index, used in taken.items())
        return Finding("GPU", NOTICE, f"{text}; in use: {found}", "runs have that much less", "nvidia-smi")
    return Finding("GPU", OK, text)


def shared_memory(usage: Callable[[str], Any] = shutil.disk_usage, memory_bytes: int | None = None) -> Finding:
    """Return the space in /dev/shm, of which Ray wants 30 % of the memory, at most 10 GB."""
    title = "shared memory"
    try:
        free = usage("/dev/shm").free
    except OSError as error:
        return of_error(title, error, "Ray keeps objects on the disk")
    memory_bytes = memory_bytes or os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    wanted = min(_RAY_SHARE * memory_bytes, _RAY_BYTES)
    text = f"{free / _GIB:.2f} GiB free in /dev/shm"
    if free >= wanted:
        return Finding(title, OK, text)
    hint = f"start the container with --shm-size {wanted / _GIB:.0f}g or --ipc=host; else remove files of /dev/shm"
    if free < _NEEDED_SHM_BYTES:
        return Finding(title, FAULT, text, "NCCL and engines on several GPUs end; Ray keeps objects on the disk", hint)
    return Finding(title, NOTICE, text, f"Ray wants {wanted / _GIB:.1f} GiB, and keeps objects on the disk", hint)


def disk(folder: Path, clock: Callable[[], float] = time.perf_counter) -> Finding:
    """Return the free space of the file system where a run writes, and the speed of a write with `fsync`."""
    title = "disk"
    try:
        check_writable(folder, "--save_path")
    except ConfigError as error:
        return of_error(title, error, "no run can write its results")
    there = next(path for path in (folder, *folder.parents) if path.exists())
    block = os.urandom(1 << 20)  # file systems that compress would store zeros in no time
    try:
        with tempfile.TemporaryFile(dir=there) as file:
            started = clock()
            for _ in range(_TRIAL_BYTES // len(block)):
                file.write(block)
            file.flush()
            os.fsync(file.fileno())
            speed = _TRIAL_BYTES / max(clock() - started, 1e-9)
        free = shutil.disk_usage(there).free
    except OSError as error:
        return of_error(title, error, "no run can write its results")
    text = f"{free / _GIB:.0f} GiB free for {folder}, written with {speed / 1e6:.0f} MB/s"
    hint = "name a folder on another disk with --save_path, or with --ckpt_path for checkpoints alone"
    if free < _LITTLE_DISK_BYTES:
        return Finding(title, NOTICE, text, "a checkpoint of 1 billion weights may not fit", hint)
    if speed < _SLOW_BYTES:
        return Finding(title, NOTICE, text, f"10 GB of a checkpoint take {1e10 / speed:.0f} s", hint)
    return Finding(title, OK, text)


def open_files(limits: Callable[[int], tuple[int, int]] = resource.getrlimit) -> Finding:
    """Return the limit of open files. The hard one counts: Ray raises the other to it."""
    title = "open files"
    soft, hard = limits(resource.RLIMIT_NOFILE)
    most = float("inf") if hard == resource.RLIM_INFINITY else hard
    text = f"at most {soft}, which a process may raise to {'any number' if most > 2**40 else hard}"
    hint = "ulimit -n 65536, as root; in a container, start it with --ulimit nofile=65536"
    if most < _FEW_FILES:
        return Finding(title, FAULT, text, "Ray and engines end with `Too many open files`", hint)
    if most < _ENOUGH_FILES:
        return Finding(title, NOTICE, text, "runs of many engines or rewards end with `Too many open files`", hint)
    return Finding(title, OK, text)


def ports(choose: Callable[[], int] = free_port) -> Finding:
    """Return whether processes of this machine reach each other by TCP."""
    title = "ports"
    try:
        with socket.create_server(("127.0.0.1", choose())) as server:
            number = server.getsockname()[1]
            with socket.create_connection(("127.0.0.1", number), timeout=5):
                return Finding(title, OK, f"127.0.0.1:{number} is free and answers")
    except OSError as error:
        hint = "ip link set lo up; in a container, allow the loopback interface"
        return Finding(title, FAULT, first_line(error), "no process of a run reaches another", hint)


def sandbox(check: Callable[[str | None], None] | None = None) -> Finding:
    """Return whether programs that a model wrote can be isolated here."""
    if check is None:
        from rlhf_rollout.rewards.code.sandbox import check_sandbox as check
    try:
        check(None)
    except Exception as error:
        return of_error("sandbox", error, "the reward `code` cannot run on this machine", NOTICE)
    return Finding("sandbox", OK, "a program runs in user namespaces of its own")


def hub(
    environ: Mapping[str, str] = os.environ, ask: Callable[[], str | None] = hub_date
) -> tuple[Finding, float | None]:
    """Return whether the hub answers, and by how many seconds this machine's clock is ahead of it, if it says its own.

    `ask` returns the date that the hub answers with; see `hub_date`.
    """
    from huggingface_hub import constants

    title = "hub"
    costs = "only models and data on this machine can be used"
    if constants.HF_HUB_OFFLINE:
        return Finding(title, NOTICE, "HF_HUB_OFFLINE forbids to ask it", costs, "unset HF_HUB_OFFLINE"), None
    proxies = [f"{name}={environ[name]}" for name in ("HTTPS_PROXY", "https_proxy") if environ.get(name)]
    by = f" through {proxies[0]}" if proxies else ""
    try:
        date = ask()
    except Exception as error:  # of any HTTP library
        hint = f"curl -I {constants.ENDPOINT}; set HTTPS_PROXY, or HF_ENDPOINT to a mirror, or HF_HUB_OFFLINE=1"
        return Finding(
            title, NOTICE, f"{constants.ENDPOINT} does not answer{by}: {first_line(error)}", costs, hint
        ), None
    ahead = None if date is None else time.time() - parsedate_to_datetime(date).timestamp()
    return Finding(title, OK, f"{constants.ENDPOINT} answers{by}"), ahead


def clock(folder: Path, hub_ahead_s: float | None, now: Callable[[], float] = time.time) -> Finding:
    """Return whether this machine's clock agrees with that of the hub, and with that of a disk."""
    title = "clock"
    there = next(path for path in (folder, *folder.parents) if path.exists())
    ahead = {} if hub_ahead_s is None else {"the hub's": hub_ahead_s}
    try:
        with tempfile.NamedTemporaryFile(dir=there) as file:
            ahead["the disk's"] = now() - os.stat(file.name).st_mtime
    except OSError:
        pass  # `disk` tells of it
    wrong = [f"{seconds:+.0f} s from {name}" for name, seconds in ahead.items() if abs(seconds) > _SKEW_S]
    if wrong:
        costs = "connections with certificates fail, and the newest run or checkpoint may be taken for an older one"
        return Finding(title, FAULT, f"it is {' and '.join(wrong)}", costs, "timedatectl set-ntp true")
    return Finding(title, OK, f"it agrees with {' and '.join(ahead)}" if ahead else "no other clock is at hand")
