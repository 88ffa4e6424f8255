"""What libraries write stays off the terminal."""

import json
import os
import re
import subprocess
import sys
import threading
from importlib.metadata import version
from pathlib import Path
from threading import Event

import pytest

from rlhf_cli.builtin import BUILTIN
from rlhf_cli.console.capture import captured
from rlhf_cli.console.views import Console
from rlhf_data.errors import ConfigError
from rlhf_data.options import capture

# Noisy when a heavy library is imported: as C code that writes to the descriptors, and as Python's own ways.
NOISE = """
import os, sys

class Noisy:
    def find_spec(self, name, path=None, target=None):
        if name in ("torch", "deepspeed") and name not in said:
            said.add(name)
            os.write(1, b"NOISE from C on stdout\\n")
            os.write(2, b"NOISE from C on stderr\\n")
            print("NOISE from print", file=sys.stderr)
            import warnings
            warnings.warn("NOISE from a warning", FutureWarning)
        return None

said = set()
sys.meta_path.insert(0, Noisy())
"""

SCRIPT = """
import logging, os, sys, warnings
from pathlib import Path
from rlhf_cli.console.capture import captured
from rlhf_data.errors import ConfigError

os.write(1, b"before\\n")
try:
    with captured(Path(sys.argv[1])) as (out, err):
        os.write(1, b"C out\\n")
        os.write(2, b"C err\\n")
        print("python out")
        warnings.warn("a warning")
        logging.getLogger("rlhf_rollout.workers.rpc").warning("importing takes long")
        os.system("echo a child")
        print("result", file=out)
        os.write(out.fileno(), b"now\\n")
        print("progress", file=err)
        if sys.argv[2] == "unexpected":
            raise KeyError("unexpected")
        if sys.argv[2] == "refused":
            raise ConfigError("refused")
        if sys.argv[2] == "run":
            (Path(sys.argv[1]) / "metrics.jsonl").touch()
except ConfigError as error:
    print("error:", error, file=sys.stderr)
print("after")
"""


def run_script(folder: Path, how: str) -> subprocess.CompletedProcess:
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "PYTHONUNBUFFERED": ""}
    command = [sys.executable, "-c", SCRIPT, str(folder), how]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


def test_everything_but_ours_is_in_the_log(tmp_path):
    done = run_script(tmp_path / "new/run", "run")
    assert (done.stdout, done.stderr) == (
        "before\nresult\nnow\nafter\n",
        "warning: importing takes long\nprogress\n",
    )
    log = (tmp_path / "new/run/log.txt").read_text()
    for said in ("C out", "C err", "python out", "a warning", "a child"):
        assert said in log
    assert "result" not in log


def test_a_command_that_is_refused_leaves_no_folder(tmp_path):
    done = run_script(tmp_path / "new/run", "refused")
    assert done.stderr.endswith("error: refused\n")
    assert list(tmp_path.iterdir()) == []


def test_an_unexpected_error_shows_its_traceback_and_leaves_the_log(tmp_path):
    done = run_script(tmp_path / "run", "unexpected")
    assert "Traceback" in done.stderr
    assert done.stderr.endswith("KeyError: 'unexpected'\n")
    log = (tmp_path / "run/log.txt").read_text()
    assert "C err" in log and "error: KeyError('unexpected')\n" in log


def test_replaced_streams_are_written_to_as_they_are(tmp_path, capsys):
    with captured(tmp_path / "run") as (out, err):
        print("result", file=out)
        print("progress", file=err)
        Console(out, err).notice("``kl_coef``\nis \x1b high")
        assert (tmp_path / "run/log.txt").read_text() == "notice: --init_kl_coef is \\x1b high\n"
    assert capsys.readouterr() == ("result\n", "progress\nnotice: --init_kl_coef\nis \\x1b high\n")
    with pytest.raises(ConfigError), captured(tmp_path / "run"):
        raise ConfigError("refused")
    assert not (tmp_path / "run").exists()


def test_line_that_is_known_late_goes_to_the_log_of_its_own_block_alone(tmp_path):
    known = Event()

    def text():
        assert known.wait(30)
        return "known late"

    before = set(threading.enumerate())
    with capture.captured(tmp_path / "first.log"):
        capture.keep_later(text)
    [thread] = set(threading.enumerate()) - before
    with capture.captured(tmp_path / "second.log"):
        known.set()
        thread.join(30)
    assert (tmp_path / "first.log").read_text() == "known late\n"
    assert (tmp_path / "second.log").read_text() == ""
    capture.keep_later(lambda: 1 / 0)  # outside of a block nobody is asked


SFT = (
    *("sft", "--pretrain", BUILTIN, "--dataset", BUILTIN, "--input_key", "prompt", "--output_key", "answer"),
    *("--max_samples", "8", "--train_batch_size", "4", "--max_len", "64"),
)


def test_a_short_run_shows_no_word_of_a_library(tmp_path):
    (tmp_path / "sitecustomize.py").write_text(NOISE)
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])}
    command = [sys.executable, "-m", "rlhf_cli.main", *SFT, "--save_path", str(tmp_path / "out")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "NOISE" not in done.stdout + done.stderr
    assert "warning" not in (done.stdout + done.stderr).lower()
    log = (tmp_path / "out/log.txt").read_text()
    for way in ("C on stdout", "C on stderr", "print", "a warning"):
        assert f"NOISE from {way}" in log
    assert done.stderr.count("log.txt") == 1
    [said] = re.findall(r"^environment: (.*)$", log, re.MULTILINE)
    assert json.loads(said)["torch"] == version("torch")
    assert log.splitlines()[-1] == "update 2 of 2 ended"
