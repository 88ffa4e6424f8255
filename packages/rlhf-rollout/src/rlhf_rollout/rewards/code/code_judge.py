"""Runs inside a sandbox: starts a program once per test and reports what it printed or returned, or checks assertions.

`sandbox.py` hands the source of this file to Python. It uses the standard library only, of Python 3.9 or later, because
a server may run it. Standard input has the job, which `sandbox.py` describes. Standard output gets one JSON value per
line: first `{"ready": true}`, then the result of each test.

This process is the judge. The program runs in another process, which can read neither the judge's memory nor its files,
so it sees only the input of its own test. Assertions run in the judge: they call functions of the program, and only
plain values come back. The program thus cannot replace what an assertion compares, nor report a result.

Each process locks itself before it runs code that is not trusted: limits for memory, time, threads, files, and a filter
that forbids new processes, sockets, and calls whose memory or effects no limit covers.
"""

import builtins
import ctypes
import importlib
import itertools
import json
import math
import os
import resource
import signal
import subprocess
import sys
import tempfile
import threading
import time
import types

_MAX_THREADS = 64
_MAX_FILES = 64  # open ones
_MAX_INODES = 10_000  # in `/tmp`
_MAX_ITEMS = 100_000  # items that are taken from an iterator that a program returns
_WATCH_S = 0.02
_STDERR_BYTES = 4000  # the end of what a program writes to standard error, which says why it ended

_PR_SET_DUMPABLE = 4
_PR_SET_SECCOMP = 22
_PR_SET_NO_NEW_PRIVS = 38
_CLONE_THREAD = 0x10000
_ALLOW = 0x7FFF0000
_REFUSE = 0x00050000  # plus the error number
_EPERM = 1
_ENOSYS = 38

# Per machine: its audit number, the numbers of clone, fork and vfork, and the column of the table.
_MACHINES = {"x86_64": (0xC000003E, 56, (57, 58), 1), "aarch64": (0xC00000B7, 220, (), 2)}
_CLONE3 = 435
# Calls that a program must not make: their names and numbers. clone3 and fork are handled apart. Whatever needs a
# capability is missing, because the sandbox has none.
_FORBIDDEN = """
socket 41 198, ptrace 101 117, process_vm_readv 310 270, process_vm_writev 311 271, process_madvise 440 440,
kcmp 312 272, pidfd_getfd 438 438, memfd_create 319 279, memfd_secret 447 447, shmget 29 194, msgget 68 186,
semget 64 190, mq_open 240 180, keyctl 250 219, add_key 248 217, request_key 249 218, bpf 321 280,
perf_event_open 298 241, userfaultfd 323 282, io_uring_setup 425 425, io_uring_enter 426 426,
io_uring_register 427 427, unshare 272 97, setns 308 268, mount 165 40, umount2 166 39, open_tree 428 428,
move_mount 429 429, fsopen 430 430, fsmount 432 432, mount_setattr 442 442, name_to_handle_at 303 264,
open_by_handle_at 304 265, personality 135 92, quotactl 179 60, fanotify_init 300 262
"""


def main():
    """Read the job and answer it."""
    job = json.loads(sys.stdin.buffer.read())
    _prctl(_PR_SET_DUMPABLE, 0)  # closes /proc/PID/{mem,fd,environ} and ptrace to the program
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    silence = os.open(os.devnull, os.O_WRONLY)
    for descriptor in (1, 2):
        os.dup2(silence, descriptor)
    results = _assertions(job) if job["form"] == "assertions" else _outputs(job)
    for result in itertools.chain([{"ready": True}], results):
        answers.write(json.dumps(result) + "\n")
        answers.flush()
    os._exit(0)


def _outputs(job):
    """Yield the output of the program, and why it failed if it did, for each input."""
    for text in job["inputs"]:
        if time.monotonic() > job.get("deadline", math.inf):
            yield {"output": "", "why": "there was no time left for it"}
            continue
        with tempfile.TemporaryFile() as stdin:
            stdin.write(text.encode())
            stdin.seek(0)
            process, stderr = _start(job, stdin)
        with stderr:
            output = process.stdout.read(job["output_bytes"] + 1)
            if len(output) > job["output_bytes"]:
                process.kill()
            code = process.wait()
            why = "" if code == 0 else _reason(job, code, stderr)
        if len(output) > job["output_bytes"]:
            why = "it printed more than {} bytes".format(job["output_bytes"])
        yield {"output": output[: job["output_bytes"]].decode(errors="replace"), "why": why}


def _assertions(job):
    """Yield whether each test raised nothing, and why if it did."""
    process, stderr = _start(job, subprocess.PIPE)
    program = _Program(process)
    _lock(job)
    try:
        defined = {str(name): value for name, value in program.read().items()}
    except (EOFError, ValueError, AttributeError):
        process.kill()
        why = _reason(job, process.wait(), stderr)
        for _ in job["tests"]:
            yield {"passed": False, "why": why}
        return
    # Names that tests use without importing them: modules are the real ones, all else is the program's.
    # `__builtins__` among them would replace what the tests compare with.
    names = {name: defined[name] for name in defined if not name.startswith("__") and not hasattr(builtins, name)}
    code = "".join(job["tests"])
    for name in ("math", "re", "random", "copy", "itertools", "collections", "functools", "string", "numpy", "np"):
        if name + "." in code:
            names[name] = importlib.import_module("numpy" if name == "np" else name)
    for test in job["tests"]:
        why = ""
        try:
            exec(compile(test, "test", "exec"), {"__name__": "test", **names})
        except BaseException as error:  # also SystemExit
            why = f"{type(error).__name__}: {error}"[:_STDERR_BYTES]
        yield {"passed": not why, "why": why}


def _start(job, stdin):
    """Start the program; return its process and the file of its standard error."""
    stderr = tempfile.TemporaryFile()  # noqa: SIM115 - the caller closes it
    with tempfile.TemporaryFile() as setup:
        setup.write(json.dumps({key: job[key] for key in (*_LIMITS, "form", "program", "name")}).encode())
        setup.flush()
        setup.seek(0)
        command = [sys.executable, *job["flags"], "-X", "utf8", "-c", job["judge"], str(setup.fileno())]
        options = {"stdin": stdin, "stdout": subprocess.PIPE, "stderr": stderr, "pass_fds": [setup.fileno()]}
        try:
            # As root on a server, the program could read the judge. A sandbox of ours knows only one user.
            user = {} if job["strict"] or os.geteuid() else {"user": 65534, "group": 65534, "extra_groups": []}
            process = subprocess.Popen(command, **options, **user)
        except OSError:  # that user may be unknown, or must not read the interpreter
            process = subprocess.Popen(command, **options)
    job.setdefault("deadline", time.monotonic() + job["timeout_s"])
    threading.Thread(target=_watch, args=(process, job["deadline"]), daemon=True).start()
    return process, stderr


def _watch(process, deadline):
    """Kill the program when it is late, or has too many threads or files, for which the kernel has no limit here."""
    while process.poll() is None:
        try:
            num_threads = len(os.listdir(f"/proc/{process.pid}/task"))
        except OSError:
            num_threads = 0
        disk = os.statvfs(tempfile.gettempdir())
        num_new = disk.f_files - disk.f_ffree if os.getpid() == 1 else 0  # the folder of a server is not ours alone
        if time.monotonic() > deadline or num_threads > _MAX_THREADS or num_new > _MAX_INODES:
            process.kill()
        time.sleep(_WATCH_S)


def _reason(job, code, stderr):
    """Return in one line why the program ended with an exit code, or by the signal -code."""
    if time.monotonic() > job["deadline"] or code == -signal.SIGXCPU:
        return "no end within {:g} s".format(job["timeout_s"])
    stderr.seek(max(stderr.seek(0, 2) - _STDERR_BYTES, 0))
    lines = stderr.read().decode(errors="replace").strip().splitlines()
    return lines[-1] if lines else f"it ended with status {code}"


class _Program:
    """The judge's connection to the program: one JSON value per line in both directions."""

    def __init__(self, process):
        self._process = process

    def ask(self, *request):
        """Return the program's answer to a request as plain values and `_Remote`s; raise its error."""
        line = json.dumps(_encode(request, lambda value: ["remote", value._number]))
        try:
            self._process.stdin.write(line.encode() + b"\n")
            self._process.stdin.flush()
            kind, value = self.read()
        except (OSError, EOFError, ValueError):
            raise RuntimeError("the program ended, was late or gave no answer") from None
        if kind == "value":
            return value
        error = getattr(builtins, str(kind), None)
        # StopIteration would end a loop of the test instead of failing it.
        if not (isinstance(error, type) and issubclass(error, Exception)) or "Stop" in error.__name__:
            error = RuntimeError
        try:
            raised = error(str(value))
        except TypeError:
            raised = RuntimeError(str(value))
        raise raised

    def read(self):
        """Return the next value from the program. Raises EOFError without one and ValueError for anything else."""
        line = self._process.stdout.readline(2**26)
        if not line.endswith(b"\n"):
            raise EOFError
        try:
            return _decode(json.loads(line), lambda number: _Remote(self, number))
        except (RecursionError, TypeError, LookupError) as error:
            raise ValueError(str(error)) from None


class _Remote:
    """An object of the program. It is equal to itself alone, and its comparisons and arithmetic are not forwarded."""

    __slots__ = ("_number", "_program")

    def __init__(self, program, number):
        object.__setattr__(self, "_program", program)
        object.__setattr__(self, "_number", number)

    def __call__(self, *args, **kwargs):
        return self._program.ask("call", self, args, kwargs)

    def __getattr__(self, name):
        return self._program.ask("get", self, name)

    def __setattr__(self, name, value):
        self._program.ask("set", self, name, value)

    def __iter__(self):
        return iter(self._program.ask("list", self))


def _encode(value, refer):
    """Return a value as JSON: a list of the name of its type and its content. `refer` encodes any other object."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return value  # JSON has no derived types
    if hasattr(type(value), "tolist"):  # an array or a number of numpy
        return _encode(value.tolist(), refer)
    if isinstance(value, complex):
        return ["complex", value.real, value.imag]
    if isinstance(value, (bytes, bytearray)):
        return ["bytes", value.hex()]
    for kind in (list, tuple, set, frozenset):
        if isinstance(value, kind):
            return [kind.__name__, *[_encode(item, refer) for item in value]]
    if isinstance(value, dict):
        return ["dict", *[[_encode(key, refer), _encode(item, refer)] for key, item in value.items()]]
    return refer(value)


def _decode(value, resolve):
    """Return the value that `_encode` wrote. `resolve` returns the object that another number refers to."""
    if not isinstance(value, list):
        return value
    kind, *content = value
    if kind == "remote":
        return resolve(content[0])
    if kind == "complex":
        return complex(*content)
    if kind == "bytes":
        return bytes.fromhex(content[0])
    if kind == "dict":
        return {_decode(key, resolve): _decode(item, resolve) for key, item in content}
    return {"list": list, "tuple": tuple, "set": set, "frozenset": frozenset}[kind](
        [_decode(item, resolve) for item in content]
    )


_LIMITS = ("memory_bytes", "disk_bytes", "timeout_s", "strict")


def _lock(job):
    """Limit this process, and forbid it what a program of tests does not need. Raises OSError if that is not possible.

    Without `strict`, as on a server with a sandbox of its own, a filter that cannot be set is left out.
    """
    seconds = int(job["timeout_s"]) + 1
    limits = {"AS": job["memory_bytes"], "FSIZE": job["disk_bytes"], "CPU": seconds, "NOFILE": _MAX_FILES, "CORE": 0}
    if job["strict"]:  # else other processes of the user would count
        limits["NPROC"] = _MAX_THREADS
    for name, value in {**limits, "MSGQUEUE": 0, "MEMLOCK": 0}.items():
        number = getattr(resource, "RLIMIT_" + name)
        hard = resource.getrlimit(number)[1]
        value = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(number, (value, value))
    try:
        audit, clone, forks, column = _MACHINES[os.uname().machine]
        rows = [row.split() for row in _FORBIDDEN.split(",")]
        forbidden = [*forks, *[int(row[column]) for row in rows]]
        _filter(audit, clone, forbidden)
    except (KeyError, OSError):
        if job["strict"]:
            raise


def _filter(audit, clone, forbidden):
    """Install a seccomp filter: threads may start but no processes, and forbidden calls fail with EPERM."""
    load, equal, at_least, any_bit, give = 0x20, 0x15, 0x35, 0x45, 0x06
    code = [(load, 0, 0, 4), (equal, 1, 0, audit), (give, 0, 0, _REFUSE | _EPERM), (load, 0, 0, 0)]
    code += [(at_least, 0, 1, 0x40000000), (give, 0, 0, _REFUSE | _EPERM)]  # the x32 calls have numbers of their own
    code += [(equal, 0, 1, _CLONE3), (give, 0, 0, _REFUSE | _ENOSYS)]  # the library then uses clone
    for number in forbidden:
        code += [(equal, 0, 1, number), (give, 0, 0, _REFUSE | _EPERM)]
    code += [(equal, 0, 3, clone), (load, 0, 0, 16), (any_bit, 1, 0, _CLONE_THREAD), (give, 0, 0, _REFUSE | _EPERM)]
    code += [(give, 0, 0, _ALLOW)]

    class Instruction(ctypes.Structure):
        _fields_ = [("code", ctypes.c_ushort), ("yes", ctypes.c_ubyte), ("no", ctypes.c_ubyte), ("k", ctypes.c_uint)]

    class Filter(ctypes.Structure):
        _fields_ = [("length", ctypes.c_ushort), ("code", ctypes.POINTER(Instruction))]

    code = (Instruction * len(code))(*code)
    _prctl(_PR_SET_NO_NEW_PRIVS, 1)
    _prctl(_PR_SET_SECCOMP, 2, ctypes.byref(Filter(len(code), code)))


def _prctl(option, *values):
    values = [value if not isinstance(value, int) else ctypes.c_ulong(value) for value in values]
    values += [ctypes.c_ulong(0)] * (4 - len(values))
    if ctypes.CDLL(None, use_errno=True).prctl(option, *values):
        raise OSError(ctypes.get_errno(), f"prctl {option}")


def run_program(descriptor):
    """Be the program: `descriptor` is a file with its source, its form and its limits."""
    with os.fdopen(descriptor, "rb") as file:
        setup = json.load(file)
    builtins.exit = builtins.quit = sys.exit  # as `site` sets them
    is_main = setup["form"] == "stdin"
    if not is_main:
        stdin, stdout = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "w", encoding="utf-8")
        os.dup2(os.open(os.devnull, os.O_RDWR), 0)
        os.dup2(2, 1)  # what the program prints is no answer
    name = "__main__" if is_main else "program"
    module = sys.modules[name] = types.ModuleType(name)
    _lock(setup)
    exec(compile(setup["program"], "program", "exec"), module.__dict__)
    if setup["form"] == "call":
        value = _find(module, setup["name"])(*json.load(stdin))
        stdout.write(json.dumps(value, default=lambda other: other.tolist()))
        stdout.flush()
    elif setup["form"] == "assertions":
        _serve(module, stdin, stdout)


def _find(module, name):
    """Return the function of a name; it may be a method of a class `Solution`, as on LeetCode."""
    if hasattr(module, name):
        return getattr(module, name)
    return getattr(module.Solution(), name)


def _serve(module, stdin, stdout):
    """Answer the judge's requests, each of which concerns an object by its number."""
    objects = []

    def refer(value):
        objects.append(value)
        return ["remote", len(objects) - 1]

    def answer(value):
        stdout.write(json.dumps(_encode(value, refer)) + "\n")
        stdout.flush()

    actions = {
        "call": lambda function, args, kwargs: function(*args, **kwargs),
        "get": getattr,
        "set": setattr,
        "list": lambda value: list(itertools.islice(value, _MAX_ITEMS)),
    }
    names = vars(module).items()
    answer({name: value for name, value in names if not name.startswith("__") and type(value) is not type(sys)})
    for line in stdin:
        action, *arguments = _decode(json.loads(line), objects.__getitem__)
        try:
            answer(("value", actions[action](*arguments)))
        except Exception as error:
            answer((type(error).__name__, str(error)))


if __name__ == "__main__":
    sys.path.append("/packages")
    if sys.argv[1:]:
        run_program(int(sys.argv[1]))
    else:
        main()
