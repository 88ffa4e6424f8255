"""Ray joined, started, and explained when it is neither."""

import gc
import json
import os
import socket
import subprocess
import sys
import threading
import time
import weakref
from contextlib import contextmanager, suppress
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import ray
from ray._private import services
from ray._private.node import Node
from ray._raylet import AuthenticationMode, AuthenticationTokenLoader, get_authentication_mode
from ray.exceptions import AuthenticationError, ObjectLostError, RayActorError, RayError, RayTaskError

from rlhf_data.errors import ConfigError, EngineError
from rlhf_rollout.host import socket_folder
from rlhf_rollout.ray_internals import NAMES, changed_start
from rlhf_train.cluster import ray_session
from rlhf_train.cluster.ray_session import (
    START_ATTEMPTS,
    LostProcessError,
    check_resources,
    find_cluster,
    join,
    started_cluster,
    unanswered,
    wait,
    worker_environment,
)
from rlhf_train.cluster.session_folders import sweep
from rlhf_train.run.interrupts import Interrupted

TIMED_OUT = Exception("The current node timed out during startup.")


@pytest.fixture(autouse=True)
def no_cluster(monkeypatch, tmp_path):
    """Neither a named cluster nor one that `ray start` left, and no connection; variables that Ray gets come and go."""
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    monkeypatch.setattr(ray_session, "socket_folder", lambda folder, num_bytes: folder)
    monkeypatch.setenv("PYTHONPATH", os.environ.get("PYTHONPATH", ""))
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(ray, "shutdown", lambda: None)


@pytest.fixture
def left_behind(tmp_path):
    """Return a function that writes what `ray start` writes."""

    def write(address):
        (tmp_path / "ray").mkdir()
        (tmp_path / "ray/ray_current_cluster").write_text(f"{address}\n")

    return write


@contextmanager
def server_that_says(words, host="127.0.0.1"):
    """Yield the port of a server that answers the first connection with these words; with None, it says nothing."""
    with socket.create_server((host, 0)) as server:

        def answer():
            connection, _ = server.accept()
            with suppress(OSError), connection:
                connection.sendall(words or b"")
                while connection.recv(64) and words is None:
                    pass

        threading.Thread(target=answer, daemon=True).start()
        yield server.getsockname()[1]


SETTINGS = bytes.fromhex("00000c 04 00 00000000")  # the header of a frame of 12 bytes of settings


def test_cluster_that_ray_start_left_is_found_while_it_answers(left_behind):
    with server_that_says(SETTINGS) as port:
        left_behind(f"127.0.0.1:{port}")
        assert find_cluster() == f"127.0.0.1:{port}"
    assert find_cluster() is None


@pytest.mark.parametrize("text", ["", "nonsense", "127.0.0.1:x"])
def test_unreadable_address_of_a_cluster_is_no_cluster(left_behind, text):
    assert find_cluster() is None
    left_behind(text)
    assert find_cluster() is None


@pytest.mark.parametrize(("named", "found"), [("head:6379", "head:6379"), ("auto", "auto"), ("local", None)])
def test_named_cluster_comes_before_one_that_was_left(monkeypatch, left_behind, named, found):
    with socket.create_server(("127.0.0.1", 0)) as server:
        left_behind(f"127.0.0.1:{server.getsockname()[1]}")
        monkeypatch.setenv("RAY_ADDRESS", named)
        assert find_cluster() == found


@pytest.mark.parametrize("kind", [ConnectionError, RuntimeError, ValueError, RayError, AuthenticationError])
def test_cluster_that_cannot_be_joined_is_named_with_what_to_type(monkeypatch, kind):
    monkeypatch.setattr(ray, "init", Mock(side_effect=kind("no route")))
    monkeypatch.setattr(ray_session, "_answers", lambda *_: True)
    with pytest.raises(ConfigError) as caught:
        join("head:1")
    message, _, hint = str(caught.value).partition("hint: ")
    assert message.strip() == "the Ray cluster at head:1 cannot be joined: no route"
    texts = ["`ray get-auth-token`", "export RAY_AUTH_MODE=token RAY_AUTH_TOKEN=", "RAY_ADDRESS=local"]
    assert all(text in hint for text in texts)
    assert ("`ray start --head`" in hint) is (kind is not AuthenticationError)


@pytest.mark.parametrize("named", ["auto", "localhost:{}", "[::1]:{}"])
def test_cluster_where_nothing_listens_is_refused_before_ray_waits_for_it(monkeypatch, named):
    monkeypatch.setattr(ray, "init", lambda **options: pytest.fail("Ray tries for minutes"))
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    monkeypatch.setattr(services, "find_gcs_addresses", lambda: {f"127.0.0.1:{port}"})
    with pytest.raises(ConfigError, match=rf"(?s)no cluster answers at .*:{port} .*hint: .*RAY_ADDRESS=local"):
        join(named.format(port))


@pytest.mark.parametrize("words", [None, b"", b"HTTP/1.1 400 Bad Request\r\n\r\n", SETTINGS])
def test_server_that_is_no_cluster_is_refused_before_ray_waits_for_it(monkeypatch, words):
    monkeypatch.setattr(ray, "init", lambda **options: pytest.fail("Ray tries for minutes"))
    monkeypatch.setattr(ray_session, "_ANSWER_TIMEOUT_S", 0.2)
    with server_that_says(words, "0.0.0.0") as port:
        expected = "Ray tries for minutes" if words == SETTINGS else rf"no cluster answers at .*:{port} "
        with pytest.raises((ConfigError, pytest.fail.Exception), match=expected):
            join(f"127.0.0.1:{port}")


def fake_init(monkeypatch, *failures):
    """Let the first calls of `ray.init` fail, each with a process and a folder left behind; return the calls and the
    processes.

    Ray's session folder is then `session_own` in its folder for temporary files.
    """
    session = Path(os.environ["RAY_TMPDIR"], "ray/session_own")
    calls, processes, waiting = [], [], list(failures)

    def init(**options):
        calls.append(options)
        if waiting:
            processes.append(subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]))
            session.with_name(f"session_{len(calls)}_{os.getpid()}").mkdir(parents=True)
            raise waiting.pop(0)
        session.mkdir(parents=True, exist_ok=True)

    node = SimpleNamespace(get_session_dir_path=lambda: str(session))
    monkeypatch.setattr(ray._private.worker, "_global_node", node)
    monkeypatch.setattr(ray, "init", init)
    return calls, processes


def test_start_that_times_out_is_tried_again_and_its_processes_are_ended(monkeypatch, caplog):
    neighbour = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    calls, processes = fake_init(monkeypatch, TIMED_OUT, RuntimeError("Failed to start GCS"))
    with started_cluster(3, 1):
        assert [path.name for path in Path(os.environ["RAY_TMPDIR"], "ray").iterdir()] == ["session_own"]
    assert [(call["address"], call["num_cpus"], call["num_gpus"]) for call in calls] == [("local", 3, 1)] * 3
    assert [process.wait(timeout=60) for process in processes] == [-9, -9]
    assert neighbour.poll() is None
    neighbour.kill()
    neighbour.wait()
    assert "attempt 1 of 3: The current node timed out" in caplog.text


@pytest.mark.parametrize("variable", ["RAY_TMPDIR", "TMPDIR"])
def test_session_folder_with_too_long_a_path_moves_with_a_notice(monkeypatch, tmp_path, caplog, variable):
    monkeypatch.setattr(ray_session, "socket_folder", socket_folder)
    monkeypatch.setenv("RAY_TMPDIR", "")
    home = str(tmp_path / ("x" * 40))
    monkeypatch.setenv(variable, home)
    ray_session._shorten_paths()
    assert ray._common.utils.get_default_ray_temp_dir() == "/tmp/ray"
    assert caplog.messages == [f"Ray's session folder is in /tmp: its sockets would have too long paths in {home}"]


def test_session_folder_with_a_short_path_stays(monkeypatch, caplog):
    """A path of 37 bytes is the longest: Ray's checks allow 107 bytes."""
    monkeypatch.setattr(ray_session, "socket_folder", socket_folder)
    name = ray_session._SOCKET
    longest = 107 - len(name)
    for size, home in ((longest, "/" + "x" * (longest - 1)), (longest + 1, "/tmp")):
        monkeypatch.setenv("RAY_TMPDIR", "/" + "x" * (size - 1))
        ray_session._shorten_paths()
        assert os.environ["RAY_TMPDIR"] == home
        ray._private.utils.validate_socket_filepath(home + name)
    assert len(caplog.messages) == 1


def test_own_cluster_has_a_token_of_its_own_and_the_environment_is_as_before(monkeypatch):
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    monkeypatch.delenv("RAY_AUTH_TOKEN", raising=False)
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth7")
    fake_init(monkeypatch)
    tokens = []
    for _ in range(2):
        with started_cluster(1, 0):
            assert (os.environ["RAY_AUTH_MODE"], os.environ["GLOO_SOCKET_IFNAME"]) == ("token", "lo")
            assert get_authentication_mode() == AuthenticationMode.TOKEN
            tokens.append(os.environ["RAY_AUTH_TOKEN"])
            assert AuthenticationTokenLoader.instance().get_raw_token() == tokens[-1]
        assert (os.environ["RAY_AUTH_MODE"], os.environ["GLOO_SOCKET_IFNAME"]) == ("disabled", "eth7")
        assert "RAY_AUTH_TOKEN" not in os.environ
        assert get_authentication_mode() == AuthenticationMode.DISABLED
    assert len(set(tokens)) == 2 and all(len(token) == 64 for token in tokens)


def test_start_leaves_out_what_a_run_does_not_use_and_its_servers_outlive_a_signal_to_the_group():
    names = ("start_api_server", "start_log_monitor", "start_monitor")
    before = [getattr(Node, name) for name in names]
    with changed_start():
        assert [getattr(Node, name)(None, "anything") for name in names] == [None] * 3
        with services.ConsolePopen(["sleep", "1000"]) as server:
            assert os.getpgid(server.pid) == server.pid != os.getpgid(0)
            server.kill()
    assert [getattr(Node, name) for name in names] == before


@pytest.mark.parametrize("place", list(NAMES))
def test_ray_that_lacks_a_name_is_refused_before_it_starts(place, monkeypatch):
    module, _, kind = place.partition(":")
    monkeypatch.delattr(import_module(module), name := kind or NAMES[place][0])
    message = rf"^Ray [\d.]+ is untested, and has no {module}\.{name}\n(.|\n)*hint: install ray==2.60.0"
    with pytest.raises(EngineError, match=message):
        ray_session._prepare_environment()


def test_start_that_never_succeeds_is_explained(monkeypatch):
    calls, processes = fake_init(monkeypatch, *[TIMED_OUT] * START_ATTEMPTS)
    message = r"(?s)in 3 attempts \(load average .*timed out during startup.*hint: .*ray start"
    with pytest.raises(EngineError, match=message), started_cluster(2, 0):
        pytest.fail("it did not start")
    assert len(calls) == START_ATTEMPTS
    assert [process.wait(timeout=60) for process in processes] == [-9] * START_ATTEMPTS


@pytest.mark.parametrize("error", [TypeError("no such argument"), ValueError("num_cpus"), Interrupted(15)])
def test_other_errors_of_a_start_are_raised_at_once(monkeypatch, error):
    calls, processes = fake_init(monkeypatch, error, error)
    with pytest.raises(type(error)), started_cluster(2, 0):
        pytest.fail("it did not start")
    assert len(calls) == 1
    assert processes[0].wait(timeout=60) == -9


def test_start_that_is_interrupted_leaves_no_session_folder(monkeypatch, tmp_path):
    fake_init(monkeypatch, Interrupted(15))
    earlier, other = (tmp_path / f"ray/session_2026_{pid}" for pid in (os.getpid(), os.getpid() + 1))
    earlier.mkdir(parents=True)
    other.mkdir()
    with pytest.raises(Interrupted), started_cluster(2, 0):
        pytest.fail("it did not start")
    assert set((tmp_path / "ray").iterdir()) == {earlier, other}


def test_session_folder_goes_though_ray_makes_it_anew_while_it_ends_and_another_run_starts(monkeypatch, tmp_path):
    fake_init(monkeypatch)
    session = tmp_path / "ray/session_own"

    def shutdown():
        sweep(session.parent)  # as the start of another run does
        (session / "ray_spilled_objects").mkdir(parents=True)

    monkeypatch.setattr(ray, "shutdown", shutdown)
    with started_cluster(1, 0):
        pass
    assert not session.exists()


def test_no_garbage_is_collected_while_ray_disconnects(monkeypatch):
    """Ray ends a process in which a thread drops a reference meanwhile."""
    fake_init(monkeypatch)
    found, dropped, cycle = [], [], {"self"}
    weakref.finalize(cycle, dropped.append, "reference")
    monkeypatch.setattr(ray, "shutdown", lambda: found.append((gc.isenabled(), *dropped)))
    with started_cluster(1, 0):
        cycle = [cycle]
        cycle.append(cycle)
        del cycle
    assert found == [(False, "reference")] and gc.isenabled()


HOLD = "import fcntl, sys; file = open(sys.argv[1], 'w'); fcntl.flock(file, 2); print('held', flush=True); input()"


def test_session_folders_of_runs_that_ended_are_removed_and_all_others_stay(monkeypatch, tmp_path):
    fake_init(monkeypatch)
    folders = {name: tmp_path / f"ray/session_{name}" for name in ("own", "killed", "live", "foreign")}
    for name, folder in folders.items():
        folder.mkdir(parents=True)
        (folder / "raylet.log").touch()
        if name in ("killed", "live"):
            (folder / "rlhf-run.lock").touch()
    command = [sys.executable, "-c", HOLD, str(folders["live"] / "rlhf-run.lock")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout.readline() == b"held\n"
        with started_cluster(1, 0):
            assert {name for name, folder in folders.items() if folder.exists()} == {"own", "live", "foreign"}
        assert {name for name, folder in folders.items() if folder.exists()} == {"live", "foreign"}


def test_agents_of_runs_that_ended_are_killed_and_all_other_processes_live(monkeypatch, tmp_path):
    fake_init(monkeypatch)
    killed, foreign = (tmp_path / f"ray/session_{name}" for name in ("killed", "foreign"))
    for folder in (killed, foreign):
        folder.mkdir(parents=True)
    (killed / "rlhf-run.lock").touch()

    def agent(title, folder):
        """Start a process with an open log in `folder`, whose first argument is `title`."""
        with (folder / "agent.log").open("w") as log:
            process = subprocess.Popen([title, "600"], executable="/bin/sleep", stdout=log)
        while not Path(f"/proc/{process.pid}/cmdline").read_bytes():  # Linux sets it a little after the program starts
            time.sleep(0.001)
        return process

    orphan = agent("ray::DashboardAgent", killed)
    # Someone who reads the log, and another cluster.
    others = [agent("tail", killed), agent("ray::DashboardAgent", foreign)]
    with started_cluster(1, 0):
        assert orphan.wait(timeout=60) == -9
        own = agent("ray::RuntimeEnvAgent", tmp_path / "ray/session_own")  # it is still there when Ray has ended
    assert own.wait(timeout=60) == -9
    assert [process.poll() for process in others] == [None, None]
    for process in others:
        process.kill()
        process.wait()


@pytest.mark.parametrize(("error", "stays"), [(EngineError("its log tells why"), True), (Interrupted(2), False)])
def test_session_folder_stays_for_the_next_runs_after_an_error_only(monkeypatch, tmp_path, error, stays):
    fake_init(monkeypatch)
    for _ in range(2):
        with pytest.raises(type(error)), started_cluster(1, 0):
            raise error
        assert (tmp_path / "ray/session_own").exists() is stays


def test_cluster_that_is_too_small_is_refused_with_the_numbers(monkeypatch):
    monkeypatch.setattr(ray, "cluster_resources", lambda: {"CPU": 2.0, "GPU": 4.0})
    check_resources(2, 4)
    with pytest.raises(EngineError, match=r"needs 3 CPUs and 0 GPUs, and the Ray cluster has 2 and 4") as caught:
        check_resources(3, 0)
    assert "`ray start --head --num-cpus 3`" in str(caught.value)
    with pytest.raises(EngineError, match=r"(?s)needs 2 CPUs and 5 GPUs.*--num-cpus 2 --num-gpus 5"):
        check_resources(2, 5)
    monkeypatch.setattr(ray, "cluster_resources", dict)
    with pytest.raises(EngineError, match="has 0 and 0"):
        check_resources(1, 0)


@pytest.mark.parametrize("job", [None, {"working_dir": "/openrlhf"}, {"env_vars": {"NCCL_DEBUG": "INFO"}}, "own path"])
def test_workers_of_a_joined_cluster_get_the_import_path_of_a_checkout(monkeypatch, job):
    runtime_env = {"env_vars": {"PYTHONPATH": "/job"}} if job == "own path" else job
    submitted = None if job is None else json.dumps({"runtime_env": runtime_env, "metadata": {}})
    for is_installed, path in ((False, "/a:/b"), (False, None), (True, "/a:/b")):
        monkeypatch.setattr(ray_session, "_is_installed", lambda answer=is_installed: answer)
        gets_it = path is not None and not is_installed and job != "own path"
        expected = {"env_vars": {"PYTHONPATH": path}} if gets_it else {}
        assert worker_environment({"PYTHONPATH": path} if path else {}, submitted) == expected


class Calls:
    """Stands for Ray's calls: `states` has the result of each, an error to raise, or None while it is not there."""

    def __init__(self, monkeypatch, *states):
        self.states = list(states)
        self.references = list(range(len(states)))
        monkeypatch.setattr(ray, "wait", self.wait)
        monkeypatch.setattr(ray, "get", lambda references: [self.get(reference) for reference in references])

    def get(self, reference):
        if isinstance(self.states[reference], Exception):
            raise self.states[reference]
        return self.states[reference]

    def wait(self, references, *, num_returns, timeout):
        there = [reference for reference in references if self.states[reference] is not None][:num_returns]
        assert there or timeout is not None, "this would wait forever"
        return there, [reference for reference in references if reference not in there]


def task_error(cause):
    return RayTaskError("run", "traceback", cause)


def test_wait_returns_results_in_the_order_of_the_calls(monkeypatch):
    assert wait(Calls(monkeypatch, "a", "b").references) == ["a", "b"]
    assert wait([]) == []


def test_unanswered_names_the_calls_that_a_wait_still_lacks(monkeypatch):
    calls = Calls(monkeypatch, "a", None, "c", None)
    heard = []

    def hear(references, **options):
        heard.append(unanswered())
        if len(references) == 2:
            raise EngineError("told to stop")
        return Calls.wait(calls, references, **options)

    monkeypatch.setattr(ray, "wait", hear)
    with pytest.raises(EngineError, match="told to stop"):
        wait(calls.references, what="the start of the engines")
    assert heard[0] == "the start of the engines: no answer from 4 of 4: 0, 1, 2, 3"
    assert heard[-1] == "the start of the engines: no answer from 2 of 4: 1, 3"
    assert unanswered() == ""


@pytest.mark.parametrize(
    ("states", "error", "message"),
    [
        ((None, RayActorError(), None), LostProcessError, "a process of the run is gone"),  # its peers hang
        # The collective of a peer failed because a rank had died.
        ((task_error(RuntimeError("Connection closed by peer")), RayActorError()), LostProcessError, "is gone"),
        ((task_error(RuntimeError("CUDA out of memory")), None), RayTaskError, "traceback"),  # nobody else explains it
        ((task_error(ObjectLostError("0" * 56, None, "")),), LostProcessError, "gone"),  # it went with its process
    ],
)
def test_wait_raises_what_tells_why_a_call_has_no_result(monkeypatch, states, error, message):
    with pytest.raises(error, match=message):
        wait(Calls(monkeypatch, *states).references)


def test_wait_raises_our_errors_as_they_are_and_at_once(monkeypatch):
    calls = Calls(monkeypatch, task_error(ConfigError("no such model")), None)
    monkeypatch.setattr(ray_session, "_DEATH_S", None)  # waiting for the peer would be an error
    with pytest.raises(ConfigError, match=r"^no such model$"):
        wait(calls.references)


def test_wait_ends_at_its_deadline_and_says_what_it_waited_for(monkeypatch):
    calls = Calls(monkeypatch, "a", None)
    with pytest.raises(EngineError, match=r"the start took longer than 0\.01 s\s+hint: the processes' logs") as caught:
        wait(calls.references, timeout_s=0.01, what="the start")
    assert not isinstance(caught.value, LostProcessError)
