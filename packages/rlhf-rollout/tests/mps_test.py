"""The daemon of NVIDIA's Multi-Process Service, with a program in its place that notes its calls."""

import os
from pathlib import Path

import pytest

from rlhf_data.errors import ConfigError
from rlhf_rollout.mps import MpsDaemon

PROGRAM = """#!/bin/sh
echo "$@ $(cat) $CUDA_MPS_PIPE_DIRECTORY $CUDA_MPS_LOG_DIRECTORY" >> {log}
test -d "$CUDA_MPS_PIPE_DIRECTORY" -a -d "$CUDA_MPS_LOG_DIRECTORY" || exit 9
echo no device >&2
exit {status}
"""


@pytest.fixture
def install(monkeypatch, tmp_path):
    """Return a function that installs a program with an exit status, and returns the file of its calls."""

    def write(status):
        program = tmp_path / "bin/nvidia-cuda-mps-control"
        program.parent.mkdir()
        program.write_text(PROGRAM.format(log=tmp_path / "calls", status=status))
        program.chmod(0o755)
        monkeypatch.setenv("PATH", f"{program.parent}{os.pathsep}{os.environ['PATH']}")
        return tmp_path / "calls"

    return write


def test_daemon_has_folders_of_its_own_and_is_told_to_quit(install):
    calls = install(0)
    daemon = MpsDaemon()
    environ = daemon.start()
    pipe, log = environ["CUDA_MPS_PIPE_DIRECTORY"], environ["CUDA_MPS_LOG_DIRECTORY"]
    assert len(environ) == 2 and pipe != log
    assert not environ.keys() & os.environ.keys()  # no other process becomes a client
    daemon.stop()
    assert [line.split() for line in calls.read_text().splitlines()] == [["-d", pipe, log], ["quit", pipe, log]]
    assert not Path(pipe).parent.exists()


def test_daemon_that_does_not_start_is_an_error_with_its_words(install):
    install(1)
    daemon = MpsDaemon()
    with pytest.raises(ConfigError, match=r"does not start: no device\s+hint: .*without MPS"):
        daemon.start()
    daemon.stop()  # nothing runs


def test_missing_program_says_what_to_do(monkeypatch):
    monkeypatch.setenv("PATH", "")
    with pytest.raises(ConfigError, match=r"hint: .*without MPS"):
        MpsDaemon().start()
