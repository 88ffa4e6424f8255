"""A worker that is a fork is what its caller would have been as a new interpreter, and neither outlives the other."""

import json
import os
import shlex
import signal
import socket
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from process_testing import eventually, is_running
from rlhf_rollout.host import local_gpus
from warm_commands import SOCKETS, for_workers

pytestmark = pytest.mark.skipif(local_gpus() > 0, reason="with a GPU, nothing is forked")
PROGRAM = """
import json, os, sys, time
import found
told = {"pid": os.getpid(), "group": os.getpgrp(), "words": sys.argv, "folder": os.getcwd(), "found": found.__file__}
told |= {"variable": os.environ["RLHF_TEST"], "is_fork": "torch" in sys.modules}
print(json.dumps(told), flush=True)
time.sleep(float(sys.argv[1]))
sys.exit(7)
"""


def wait_for_server(folder: str) -> None:
    """Wait until the process that is forked for workers has imported the libraries: no caller will lose patience."""
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(f"{folder}/worker")
        connection.recv(1)


@pytest.fixture(scope="module")
def server(words: list[str]) -> None:
    """The process that is forked."""
    wait_for_server(os.environ[SOCKETS])


@pytest.fixture
def program(tmp_path, server) -> Path:
    """A program of a worker, and a module that only it finds."""
    (tmp_path / "modules").mkdir()
    (tmp_path / "modules/found.py").touch()
    (tmp_path / "program.py").write_text(PROGRAM)
    return tmp_path / "program.py"


def start(program: Path, seconds: int, **variables: str) -> tuple[subprocess.Popen[str], dict[str, object]]:
    """Start the program, which waits; return the process that Ray would have started, and what the program tells."""
    path = os.pathsep.join([os.environ["PYTHONPATH"], str(program.parent / "modules")])
    environment = os.environ | {"RLHF_TEST": "a b", "PYTHONPATH": path} | variables
    words = [*shlex.split(for_workers(None)["py_executable"]), str(program), str(seconds)]
    run = subprocess.Popen(words, cwd=program.parent, env=environment, stdout=subprocess.PIPE, text=True)
    return run, json.loads(run.stdout.readline())


@pytest.mark.parametrize(("variables", "is_fork"), [({"VLLM_X": "1"}, True), ({"HF_HOME": "/nowhere"}, False)])
def test_worker_has_its_callers_words_folder_environment_and_status_and_is_new_if_libraries_read_it(
    program, variables, is_fork
):
    run, told = start(program, 0, **variables)
    assert run.wait(60) == 7
    expected = {"words": [str(program), "0"], "folder": str(program.parent), "variable": "a b"}
    expected |= {"group": os.getpgrp(), "found": str(program.parent / "modules/found.py"), "is_fork": is_fork}
    assert told == {"pid": told["pid"]} | expected
    assert (told["pid"] == run.pid) != is_fork


def test_killed_worker_ends_its_caller_and_a_killed_caller_its_worker(program):
    run, told = start(program, 600)
    assert told["is_fork"]
    os.kill(told["pid"], signal.SIGKILL)
    assert run.wait(60) == 128 + signal.SIGKILL
    run, told = start(program, 600)
    worker = psutil.Process(told["pid"])
    run.kill()
    worker.wait(60)
    run.wait(60)


@pytest.mark.usefixtures("words")  # PYTHONPATH is that of their processes
def test_processes_to_fork_end_with_one_that_is_terminated():
    code = "import os, time, warm_commands as warm\nwith warm.warm_commands():"
    code += " print(os.environ[warm.SOCKETS], flush=True); time.sleep(600)"
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as run:
        wait_for_server(run.stdout.readline().strip())
        [server] = psutil.Process(run.pid).children()
        ends = [server.pid, *(child.pid for child in server.children())]
        run.terminate()
        run.wait(60)
    assert len(ends) == 2 and eventually(lambda: not any(map(is_running, ends)))
