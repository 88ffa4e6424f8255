"""What starts a command in little time."""

from collections.abc import Iterator

import pytest

from warm_commands import warm_commands


@pytest.fixture(scope="session")
def words() -> Iterator[list[str]]:
    """The words that start a command that trains, before its name. main_job_test.py has it in a new interpreter."""
    with warm_commands(["trainer"]) as words:
        yield words
