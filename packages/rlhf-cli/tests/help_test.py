"""What must be quick: --help and bad flags, in a fresh process, without the heavy libraries."""

import os
import resource
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from rlhf_cli.main import COMMANDS, command_line

HEAVY = ("torch", "ray", "vllm", "deepspeed", "transformers", "fastapi")
UNIT = "import asyncio, numpy, pydantic"  # what every command imports; 0.2 s where --help takes 0.65 s
HELP_LIMIT = 5.0  # in units, because a slow machine stretches both alike
NUM_TRIES = 3  # the first one may have to compile the sources


def run(code: str) -> tuple[subprocess.CompletedProcess[str], float]:
    """Return how a process ended, and the processor's seconds that it took, whatever else the machine does."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    # What is installed has its bytecode beside it; sources that are tested where they lie get theirs at the first run.
    environment |= {"PYTHONPYCACHEPREFIX": str(Path(tempfile.gettempdir()) / "rlhf-help-bytecode")}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    started = children_seconds()
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=False)
    return done, children_seconds() - started


def children_seconds() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def command(*lines: list[str]) -> str:
    """Code that runs command lines one after the other, and ends with the status of the last one."""
    return f"""
import sys
from rlhf_cli.main import main
for words in {list(lines)!r}:
    try:
        status = main(words)
    except SystemExit as end:
        status = end.code
    print("heavy:", words, [name for name in {HEAVY!r} if name in sys.modules])
sys.exit(status)
"""


@pytest.fixture(scope="module")
def pages() -> subprocess.CompletedProcess[str]:
    """The help of all commands, by one process."""
    return run(command(*([name, "--help"] for name in COMMANDS)))[0]


@pytest.mark.parametrize("name", COMMANDS)
def test_help_brings_no_heavy_library(pages, name):
    assert pages.returncode == 0, pages.stderr
    assert f"usage: rlhf {name} " in pages.stdout
    assert f"heavy: {[name, '--help']} []" in pages.stdout


@pytest.mark.parametrize("words", [["--help"], ["ppo", "--help"], ["sft", "--help"]], ids=" ".join)
def test_help_is_quick(words):
    for _ in range(NUM_TRIES):
        _, unit = run(UNIT)
        done, seconds = run(command(words))
        if seconds < HELP_LIMIT * unit:
            break
    assert done.returncode == 0, done.stderr
    assert "usage: rlhf" in done.stdout
    assert f"heavy: {words} []" in done.stdout
    assert seconds < HELP_LIMIT * unit


def test_bad_flag_exits_with_2_and_a_hint_without_heavy_imports():
    done, _ = run(command(["ppo", "--advantage_estimatr", "gae"]))
    assert done.returncode == 2
    message, hint = "unknown flag `--advantage_estimatr`", "did you mean `--advantage_estimator`?"
    assert done.stderr == f"error: {message}\n\nhint: {hint} `rlhf ppo --help` lists the flags\n"
    assert "gae'] []" in done.stdout


def test_help_shows_words_before_flags_and_which_switches_are_on():
    pages = {name: " ".join(command_line(name).parser().format_help().split()) for name in ("ppo", "replay")}
    assert pages["replay"].startswith("usage: rlhf replay RUN_DIR --step N [--config FILE.toml]")
    assert pages["ppo"].startswith("usage: rlhf ppo [--preset NAME] [--config FILE.toml]")
    assert "which --replay and `rlhf replay` read (default: true)" in pages["ppo"]
    assert "generate and train at the same time; nothing may sleep --max_staleness" in pages["ppo"]
