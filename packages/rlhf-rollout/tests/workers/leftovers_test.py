"""Processes of dead runs are ended at the start of the next one; those of living runs are left alone."""

import asyncio
import contextlib
import logging
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from agent_testing import agent_pool
from process_testing import eventually, is_running, stat_of
from rlhf_rollout.workers import leftovers

# Its server has left the session of the process, and the environment takes its time to close.
AGENT = """
    import os, pathlib, subprocess, time

    FOLDER = pathlib.Path(__file__).parent

    class Environment:
        def __init__(self):
            server = subprocess.Popen(["sleep", "1000"], start_new_session=True)
            FOLDER.joinpath("pids").write_text(f"{os.getppid()} {server.pid}")

        def reset(self): ...

        def step(self, action): ...

        def close(self):
            time.sleep(0.5)
            FOLDER.joinpath("closed").touch()
"""
RUN = """
    import asyncio, sys
    sys.path[:] = {path!r}
    from agent_testing import agent_pool

    async def main():
        await agent_pool({agent!r}).start()
        open({started!r}, "x").close()
        await asyncio.sleep(1000)

    asyncio.run(main())
"""


class Running:
    """A run: its process, the guard of its agent's process, and the server that the agent's environment has started."""

    def __init__(self, write, folder):
        folder.mkdir()
        self.folder = folder
        agent = write(AGENT, f"{folder.name}/agent.py")
        started = str(folder / "started")
        program = write(RUN.format(path=sys.path, agent=agent, started=started), f"{folder.name}/run.py")
        self.process = subprocess.Popen([sys.executable, program], stderr=subprocess.DEVNULL)

    def read(self):
        assert eventually((self.folder / "started").exists)  # a run whose guard dies before this ends with an error
        self.guard, self.server = map(int, (self.folder / "pids").read_text().split()[:2])


@pytest.fixture
def runs(write, tmp_path):
    """Three runs of an agent, each with a server that it has started."""
    found = {name: Running(write, tmp_path / name) for name in ("alive", "dead", "closing")}
    for run in found.values():
        run.read()
    yield found
    for run in found.values():
        run.process.kill()
        run.process.wait()
        for process_id in (run.guard, run.server):
            with contextlib.suppress(OSError):
                os.kill(process_id, signal.SIGKILL)


def test_pool_ends_what_a_dead_run_has_left_and_waits_for_what_closes(runs, write, monkeypatch, caplog):
    monkeypatch.setattr(leftovers, "GUARDS_S", 20.0)
    # Without their guards, the servers of two runs are orphans. One of these runs lives.
    for name in ("alive", "dead"):
        os.kill(runs[name].guard, signal.SIGKILL)
    for name in ("dead", "closing"):
        runs[name].process.kill()
        runs[name].process.wait()
    assert is_running(runs["dead"].server)

    async def start():
        pool = agent_pool(write("async def run_episode(session): ..."))
        await pool.start()
        await pool.close()

    with caplog.at_level(logging.WARNING):
        asyncio.run(start())
    assert not is_running(runs["dead"].server) and not is_running(runs["closing"].server)
    assert (runs["closing"].folder / "closed").exists()
    assert is_running(runs["alive"].server)
    assert runs["alive"].process.poll() is None
    [record] = caplog.records
    ended = f"ended processes that an earlier run had left on this machine: {runs['dead'].server} (sleep 1000)"
    assert record.message == ended


def has_begun(process, mark):
    """Return whether a process whose only variable is the mark has its own environment, and no longer its parent's."""
    return Path(f"/proc/{process.pid}/environ").read_bytes() == f"{leftovers.MARK}={mark}\0".encode()


def test_owner_is_gone_when_its_number_belongs_to_another_process_or_to_none(monkeypatch):
    monkeypatch.setattr(leftovers, "GUARDS_S", 0.0)
    me = os.getpid()
    here = os.readlink("/proc/self/ns/pid")
    gone = subprocess.Popen(["true"])
    unreaped = f"{gone.pid}:{stat_of(gone.pid)[19]}"
    assert eventually(lambda: not is_running(gone.pid))
    monkeypatch.setenv(leftovers.MARK, f"{me}:2:{here}")
    left = [f"{me}:1:{here}", f"{2**22 + 1}:1:{here}", f"{unreaped}:{here}"]
    kept = [
        *(f"{me}:{stat_of(me)[19]}:{here}", f"{me}:2:{here}", f"{me}:1:pid:[1]", f"1:{stat_of(1)[19]}:{here}"),
        *("", "x:1", f"{2**80}:1:{here}", f"{me}:1"),
    ]
    started = [subprocess.Popen(["sleep", "1000"], env={leftovers.MARK: mark}) for mark in left + kept]
    try:
        assert leftovers.own_mark() == kept[0]
        for process, mark in zip(started, left + kept, strict=True):
            assert eventually(lambda process=process, mark=mark: has_begun(process, mark))
        ended = leftovers.sweep()
        assert {process_id for process_id, command in ended.items() if command == "sleep 1000"} == {
            process.pid for process in started[: len(left)]
        }
        assert [process.poll() for process in started[len(left) :]] == [None] * len(kept)
        assert [process.wait(60) for process in started[: len(left)]] == [-signal.SIGKILL] * len(left)
        assert leftovers.sweep() == {}
    finally:
        for process in [*started, gone]:
            process.kill()
            process.wait()


def test_machine_that_stalls_while_guards_have_their_time_ends_nothing_less(monkeypatch):
    clock = iter([0.0, 1.0, *range(1000, 1100)])
    monkeypatch.setattr(leftovers, "time", SimpleNamespace(monotonic=lambda: next(clock), sleep=time.sleep))
    mark = f"{os.getpid()}:1:{os.readlink('/proc/self/ns/pid')}"
    process = subprocess.Popen(["sleep", "1000"], env={leftovers.MARK: mark})
    try:
        assert eventually(lambda: has_begun(process, mark))
        assert process.pid in leftovers.sweep()
        assert process.wait(60) == -signal.SIGKILL
    finally:
        process.kill()
        process.wait()


def test_process_that_does_not_end_holds_up_nobody_for_more_than_20_s(monkeypatch):
    now = [0.0]
    clock = SimpleNamespace(monotonic=lambda: now[0], sleep=lambda seconds: now.append(now.pop() + seconds))
    monkeypatch.setattr(leftovers, "time", clock)
    monkeypatch.setattr(leftovers, "_leftovers", lambda: [1] * (now[0] < 60.0))
    monkeypatch.setattr(leftovers, "_end", lambda process_id: "")
    assert leftovers.sweep() == {1: ""}
    assert now[0] == pytest.approx(20.0, abs=0.2)


def test_command_line_in_the_warning_is_short_and_has_no_controls(monkeypatch, caplog):
    monkeypatch.setattr(leftovers, "GUARDS_S", 0.0)
    mark = f"{os.getpid()}:1:{os.readlink('/proc/self/ns/pid')}"
    words = ["sleep", "1000", *["0"] * 100]
    process = subprocess.Popen(["\x1b[31msleep", *words[1:]], executable="/bin/sleep", env={leftovers.MARK: mark})
    try:
        assert eventually(lambda: has_begun(process, mark))
        leftovers.sweep()
        [record] = caplog.records
        said = record.message.rpartition(f"{process.pid} (")[2]
        assert said.startswith("[31msleep 1000 0 0") and len(said) <= 81
    finally:
        process.kill()
        process.wait()
