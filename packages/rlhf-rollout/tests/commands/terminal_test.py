"""What libraries write goes to a log file, and what the commands say stays on the terminal."""

import os
import select
import socket
import subprocess
import sys
import time

import pytest

from record_testing import write_jsonl
from rlhf_rollout.commands.terminal import Terminal, log_file

# Runs a command with an engine whose start is noisy in every way that a library has; it may also fail.
SCRIPT = """
import logging, os, sys, warnings
import rlhf_rollout.engines.process as process
from rlhf_data.errors import EngineError
from rlhf_rollout.commands.main import main
from rlhf_rollout.engines.fake import FakeEngine

def start(kind, spec):
    if how != "quiet":
        os.write(1, b"NOISE from C on stdout\\n")
        os.write(2, b"NOISE from C on stderr\\n")
        print("NOISE from print")
        warnings.warn("NOISE from a warning", FutureWarning)
        logging.getLogger("library").warning("NOISE from logging")
        os.system("echo NOISE from a child")
    if how == "refused":
        raise EngineError("the engine does not start", hint="try another one")
    if how == "broken":
        raise KeyError("unexpected")
    return FakeEngine(spec, script=lambda prompt, seed: [*b"fine", 0])

how = sys.argv[1]
process.build_engine = start
sys.exit(main(sys.argv[2:]))
"""
WAYS = ("C on stdout", "C on stderr", "print", "a warning", "logging", "a child")
POINTER = "messages of libraries and reward functions are in "


def environment(**variables):
    return {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), **variables}


def run(how, *words, **variables):
    command = [sys.executable, "-c", SCRIPT, how, *map(str, words)]
    env = environment(**variables)
    return subprocess.run(command, env=env, capture_output=True, text=True, check=False, timeout=120)


def generate(how, tmp_path, *more):
    prompts = write_jsonl(tmp_path / "prompts.jsonl", [{"input": "1+1="}])
    out = tmp_path / "new" / "out.jsonl"
    return run(how, "generate", "--engine", "fake", "--prompt_data", prompts, "--output_path", out, *more)


def test_what_libraries_write_is_beside_the_output_and_not_on_the_terminal(tmp_path):
    done = generate("noisy", tmp_path)
    log = tmp_path / "new" / "out.jsonl.log"
    assert done.returncode == 0, done.stderr
    assert "NOISE" not in done.stdout + done.stderr
    assert all(f"NOISE from {way}" in log.read_text() for way in WAYS)
    assert "1 rollouts in " in done.stderr and "rollouts in" not in log.read_text()
    assert done.stderr.count(f"{POINTER}{log}\n") == 1
    # The log of a run that is continued keeps what was in it.
    log.write_text("from before\n")
    assert "NOISE" not in generate("noisy", tmp_path, "--overwrite").stderr
    assert log.read_text().startswith("from before\n") and "NOISE from logging" in log.read_text()


def test_command_without_noise_leaves_no_log(tmp_path):
    done = generate("quiet", tmp_path)
    assert done.returncode == 0, done.stderr
    assert POINTER not in done.stderr
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["out.jsonl"]


@pytest.mark.parametrize(
    ("how", "status", "says"),
    [
        ("refused", 2, "error: the engine does not start\n\nhint: try another one\n"),
        ("broken", 1, "KeyError: 'unexpected'\n"),
    ],
)
def test_errors_stay_on_the_terminal_with_the_path_of_the_log(tmp_path, how, status, says):
    done = generate(how, tmp_path)
    log = tmp_path / "new" / "out.jsonl.log"
    assert done.returncode == status
    assert done.stderr.endswith(says)
    assert "NOISE" not in done.stdout + done.stderr
    assert f"{POINTER}{log}\n" in done.stderr
    assert "NOISE from logging" in log.read_text() and says not in log.read_text()


def test_command_that_is_refused_leaves_nothing(tmp_path):
    done = generate("noisy", tmp_path, "--input_key", "other")
    assert (done.returncode, "unknown key `other`" in done.stderr) == (2, True)
    assert not (tmp_path / "new").exists()


def test_server_tells_on_the_terminal_that_its_port_is_taken(tmp_path):
    pytest.importorskip("uvicorn")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        words = ("serve_rm", "--remote_rm_url", "rlhf_rollout.rewards.math", "--port", port)
        done = run("quiet", *words, TMPDIR=str(tmp_path))
    assert done.returncode != 0
    assert "address already in use" in done.stderr
    assert list(tmp_path.iterdir()) == []


def talk(lines, **variables):
    """Return what a terminal shows of a noisy chat in which a person types `lines`, and the exit status."""
    person, terminal = os.openpty()
    command = [sys.executable, "-c", SCRIPT, "noisy", "chat", "--engine", "fake"]
    env = environment(TERM="dumb", **variables)
    process = subprocess.Popen(command, env=env, stdin=terminal, stdout=terminal, stderr=terminal)
    os.close(terminal)
    shown, remaining = "", list(lines)
    deadline = time.monotonic() + 120
    while process.poll() is None or select.select([person], [], [], 0)[0]:
        assert time.monotonic() < deadline, shown
        if not select.select([person], [], [], 0.1)[0]:
            continue
        try:
            shown += os.read(person, 4096).decode(errors="replace")
        except OSError:  # nobody has the terminal any more
            break
        if shown.endswith("> ") and remaining:
            os.write(person, f"{remaining.pop(0)}\n".encode(errors="surrogateescape"))
    status = process.wait(60)
    os.close(person)
    return shown.replace("\r\n", "\n"), status


def test_chat_asks_and_answers_on_the_terminal_while_libraries_are_captured(tmp_path):
    shown, status = talk(["h\udcff", "hello", "/exit"], TMPDIR=str(tmp_path))
    [log] = tmp_path.iterdir()
    assert status == 0
    assert "NOISE" not in shown
    assert "this line is not UTF-8; type it again\n> hello\nfine\n> /exit\n" in shown
    assert shown.endswith(f"{POINTER}{log}\n")
    assert all(f"NOISE from {way}" in log.read_text() for way in WAYS)
    assert log.name.startswith("rlhf-chat-") and "fine" not in log.read_text()


def test_terminal_writes_to_the_streams_of_the_moment(tmp_path, capsys):
    terminal = Terminal()
    terminal.say("before")
    with terminal.captured(tmp_path / "log"):
        terminal.say("within")
        print("result", file=terminal.out)
        with terminal.progress.doing("counting"):
            pass
    terminal.say("lower ``max_len``")
    assert capsys.readouterr() == ("result\n", "before\nwithin\ncounting ...\nlower --max_len\n")


def test_log_files_lie_beside_outputs_and_else_in_a_folder_for_temporary_files(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    assert str(log_file("score", "rows/out.jsonl")) == "rows/out.jsonl.log"
    first, second = log_file("chat", None), log_file("chat", None)
    assert first != second and {first.parent, second.parent} == {tmp_path}
