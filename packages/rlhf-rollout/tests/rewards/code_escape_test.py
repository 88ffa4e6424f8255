"""Attempts of a program to get out of the sandbox or to harm the machine: none gets through.

A program prints THROUGH if its attempt succeeded. Programs that harm nothing also run without the sandbox, where they
must print THROUGH: this shows that the attempt is a real one.
"""

import asyncio
import contextlib
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from process_testing import descendants, eventually
from record_testing import named_programs

MEMORY_BYTES = 2**28
OUTPUT_BYTES = 2**16
THROUGH = "THROUGH"

# What each program begins with, besides SECRET and CANARY (paths), PORT and ABSTRACT (addresses), and HOST (the id of
# the test's process).
PRELUDE = "import ctypes, os, socket\nlibc = ctypes.CDLL(None, use_errno=True)\n"

# Each program follows a comment with its name.
ATTEMPTS = r"""
# read a secret (harmless)
if open(SECRET).read(): print('THROUGH')

# read secrets of the environment (harmless)
if 'ESCAPE_SECRET' in os.environ: print('THROUGH')

# read the environment of the first process
if open('/proc/1/environ', 'rb').read(): print('THROUGH')

# read the environment of the host
if open(f'/proc/{HOST}/environ', 'rb').read(): print('THROUGH')

# reach the host's root through proc (harmless)
if open(f'/proc/{HOST}/root' + SECRET).read(): print('THROUGH')

# read through a hard link (harmless)
os.link(SECRET, CANARY + '.link')
print('THROUGH')

# change a file of the host (harmless)
open(CANARY, 'a').write('changed')
print('THROUGH')

# write outside of the temporary folder
import sys
places = '/ /usr /usr/lib /lib /dev /dev/shm /proc /packages /packages/numpy /home /var'.split()
places += [line.split()[4] for line in open('/proc/self/mountinfo')] + [os.path.dirname(os.__file__), sys.prefix]
for place in places:
    if place != '/tmp':
        try:
            os.close(os.open(os.path.join(place, 'new'), os.O_CREAT | os.O_WRONLY))
            print('THROUGH', place)
        except OSError:
            pass

# change the interpreter
for flags in (os.O_WRONLY, os.O_RDWR):
  os.open(os.__file__, flags)
  print('THROUGH')

# use descriptors that are left open
for number in range(3, 1024):
    try:
        target = os.readlink(f'/proc/self/fd/{number}')
    except OSError:
        continue
    if target.startswith('/') and not target.startswith(('/proc', '/dev/null')):
        print('THROUGH', target)

# read kernel memory and disks
for path in '/proc/kcore /dev/mem /dev/kmsg /proc/kmsg /dev/vda /dev/sda /dev/nvme0n1 /sys/kernel'.split():
    try:
        os.listdir(path) if os.path.isdir(path) else os.read(os.open(path, os.O_RDONLY), 1)
        print('THROUGH', path)
    except OSError:
        pass

# make a device
import stat
os.mknod('/tmp/disk', 0o600 | stat.S_IFBLK, os.makedev(8, 0))
print('THROUGH')

# set kernel parameters
names = 'sys/kernel/core_pattern sysrq-trigger 1/oom_adj self/uid_map sys/user/max_user_namespaces'
for path in [f'/proc/{name}' for name in names.split()]:
    try:
        os.open(path, os.O_WRONLY)
        print('THROUGH', path)
    except OSError:
        pass

# open a file by its handle
handle = ctypes.create_string_buffer(136)
ctypes.c_uint.from_buffer(handle).value = 128
mount = ctypes.c_int()
if libc.name_to_handle_at(-100, b'/usr/lib', handle, ctypes.byref(mount), 0) == 0: print('THROUGH')

# mount
if libc.mount(b'none', b'/tmp', b'tmpfs', 0, None) == 0: print('THROUGH')

# make a mount writable
if libc.mount(None, b'/usr/lib', None, 32 | 4096, None) == 0: print('THROUGH')

# change the root
os.chroot('/tmp')
print('THROUGH')

# make a user namespace
if libc.unshare(0x10000000) == 0: print('THROUGH')

# make a user namespace with clone3

arguments = (ctypes.c_ulonglong * 11)(0x10000000, 0, 0, 0, 17)
child = libc.syscall(435, arguments, 88)
if child >= 0: print('THROUGH', flush=True)

# enter a namespace of the host
if libc.setns(os.open('/proc/1/ns/mnt', os.O_RDONLY), 0) == 0: print('THROUGH')

# become root
os.setuid(0)
print('THROUGH')

# raise its own limits
import resource
for name in (resource.RLIMIT_AS, resource.RLIMIT_CPU):
  resource.setrlimit(name, (-1, -1))
  print('THROUGH')

# load a kernel module
for number in (175, 313, 246, 321) if os.uname().machine == 'x86_64' else (105, 273, 104, 280):
  if libc.syscall(number, 0, 0, 0, 0) == 0: print('THROUGH')

# run a program of the system (harmless)
if any(os.access(p, os.X_OK) for p in ('/bin/sh', '/usr/bin/env')):
  print('THROUGH')

# read keys of the session
if libc.syscall(250, 0, -3, 1) >= 0 or libc.syscall(219, 0, -3, 1) >= 0:
  print('THROUGH')

# bomb of forks
import time
count = 0
for _ in range(300):
    try:
        if not os.fork():
            time.sleep(3)
            os._exit(0)
        count += 1
    except OSError:
        pass
if count: print('THROUGH', count)

# start another interpreter (harmless)
import subprocess, sys
subprocess.run([sys.executable, '-c', ''], check=True)
print('THROUGH')

# clone without the library
for number in (57, 58, 56, 220):
  if libc.syscall(number, 17, 0, 0, 0, 0) > 0: print('THROUGH')

# bomb of threads
import threading, time
threading.stack_size(65536)
for count in range(3000):
    threading.Thread(target=time.sleep, args=(2,), daemon=True).start()
print('THROUGH')

# leave a daemon behind
import time
if not os.fork():
    os.setsid()
    if not os.fork():
        time.sleep(60)
print('THROUGH')

# ignore the end of its time (hangs)
import signal
for number in range(1, 65):
    try: signal.signal(number, signal.SIG_IGN)
    except (OSError, ValueError): pass
while True: pass

# kill everything in sight (hangs)
import signal
for number in (os.getppid(), 1, HOST, -1):
    try: os.kill(number, signal.SIGKILL)
    except OSError: pass
signal.pause()

# trace the judge
if libc.ptrace(16, 1, 0, 0) == 0 or libc.ptrace(0x4206, 1, 0, 0) == 0: print('THROUGH')

# write into the judge's memory
open('/proc/1/mem', 'r+b')
print('THROUGH')

# connect by TCP (harmless)
socket.create_connection(('127.0.0.1', PORT), 2)
print('THROUGH')

# connect to an abstract socket (harmless)
socket.socket(socket.AF_UNIX).connect(ABSTRACT)
print('THROUGH')

# ask for a host's address
socket.getaddrinfo('localhost.localdomain', 80)
print('THROUGH')

# open other kinds of sockets
for family in (16, 17, 38, 40):
    try:
        socket.socket(family, socket.SOCK_RAW if family == 16 else socket.SOCK_STREAM)
        print('THROUGH', family)
    except OSError:
        pass

# fill the memory
blocks = []
for _ in range(16): blocks.append(bytearray(2**26))
print('THROUGH')

# fill the memory with files in memory
for number in range(8):
  os.write(os.memfd_create('m'), bytes(2**20))
print('THROUGH')

# fill the memory with shared segments
if libc.shmget(0, 2**20, 0o1600) >= 0: print('THROUGH')

# fill the disk
for number in range(9):
  open(f'/tmp/{number}', 'wb').write(bytes(2**24))
print('THROUGH')

# fill the disk with empty files
import time
for number in range(40_000):
    os.close(os.open(f'/tmp/{number}', os.O_CREAT | os.O_WRONLY))
time.sleep(0.5)
print('THROUGH')

# print a lot
import sys
for _ in range(2000): sys.stdout.write('x' * 2**16)
sys.stdout.flush()
print('THROUGH')

# print a lot of errors
for _ in range(3000): os.write(2, b'x' * 2**16)
print('THROUGH')
"""


@pytest.fixture
def host(tmp_path, monkeypatch):
    """What the host has and programs must not reach: files, addresses, the environment."""
    secret, canary = tmp_path / "secret", tmp_path / "canary"
    secret.write_text("7f3a secret")
    canary.write_text("untouched")
    monkeypatch.setenv("ESCAPE_SECRET", "1")
    abstract = f"\0rlhf-escape-{os.getpid()}-{time.monotonic_ns()}"
    with contextlib.ExitStack() as stack:
        monkeypatch.chdir(tmp_path)
        tcp, hidden = (stack.enter_context(socket.socket(family)) for family in (socket.AF_INET, socket.AF_UNIX))
        tcp.bind(("127.0.0.1", 0))
        hidden.bind(abstract)
        for listener in (tcp, hidden):
            listener.listen()
            listener.setblocking(False)
        place = {"SECRET": str(secret), "CANARY": str(canary), "HOST": os.getpid()}
        place |= {"PORT": tcp.getsockname()[1], "ABSTRACT": abstract}
        header = "".join(f"{name} = {value!r}\n" for name, value in place.items())
        yield header, canary, [tcp, hidden]


def reached(listeners):
    """Return how many connections have arrived."""
    count = 0
    for listener in listeners:
        with contextlib.suppress(BlockingIOError):
            listener.accept()
            count += 1
    return count


def judges():
    """Return the ids of the processes of sandboxes that this test has started and that still run."""
    found = []
    for process_id in descendants():
        with contextlib.suppress(OSError):
            if b"Runs inside a sandbox: starts" in Path(f"/proc/{process_id}/cmdline").read_bytes():
                found.append(process_id)
    return found


def run(bubblewrap, program, timeout_s):
    limits = {"timeout_s": timeout_s, "memory_bytes": MEMORY_BYTES, "output_bytes": OUTPUT_BYTES}
    job = {"form": "stdin", "program": program, "name": "", "inputs": [""], **limits}
    return asyncio.run(bubblewrap.run(job))


@pytest.mark.parametrize("name", named_programs(ATTEMPTS))
def test_attempt_does_not_get_through(bubblewrap, host, name):
    header, canary, listeners = host
    program = header + PRELUDE + named_programs(ATTEMPTS)[name]
    (result,) = run(bubblewrap, program, timeout_s=2.0 if "(hangs)" in name else 120.0)
    assert THROUGH not in result["output"] and "secret" not in result["output"]
    assert len(result["output"]) <= OUTPUT_BYTES
    assert (canary.read_text(), os.listdir(canary.parent).count("canary.link")) == ("untouched", 0)
    assert reached(listeners) == 0
    assert eventually(lambda: not judges())
    if "(harmless)" in name:
        plain = subprocess.run([sys.executable, "-I", "-c", program], capture_output=True, text=True, check=False)
        assert THROUGH in plain.stdout, plain.stderr


def test_the_suite_has_forty_attempts():
    assert len(named_programs(ATTEMPTS)) == ATTEMPTS.count("\n# ") >= 40
