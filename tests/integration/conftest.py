"""What runs a command in little time: main_job_test.py runs it in a new interpreter."""

import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from warm_commands import warm_commands

TIMEOUT_S = 600


@pytest.fixture(scope="session")
def words() -> Iterator[list[str]]:
    """The words that start a command that trains, before its name. Its ranks and engines are forks, too."""
    with warm_commands() as words:
        yield words


@pytest.fixture(scope="session")
def rlhf(words: list[str]) -> Callable[..., str]:
    """A function that runs a command of `rlhf` in a folder, with variables, and returns what it printed."""

    def run(*flags: str, folder: Path, **variables: str) -> str:
        environment = os.environ | {"BUILD_WORKING_DIRECTORY": str(folder)} | variables
        done = subprocess.run(
            [*words, *flags], cwd=folder, env=environment, capture_output=True, text=True, timeout=TIMEOUT_S
        )
        assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
        return done.stdout

    return run
