"""Fixtures of the tests here; the engines of `engine_testing` are built where a test asks for them."""

import functools
import os
import textwrap

import httpx
import pytest

from engine_testing import model_dir, subject
from rlhf_data.errors import ConfigError
from rlhf_rollout.rewards.code.sandbox import Bubblewrap, check_sandbox
from scripted_core import core, loop

__all__ = ["core", "loop", "model_dir", "subject"]


@pytest.fixture(autouse=True)
def patience(monkeypatch):
    """Give requests of tests a minute: httpx's five seconds are too few for a machine that is busy with other tests."""
    for name in ("delete", "get", "post"):
        monkeypatch.setattr(httpx, name, functools.partial(getattr(httpx, name), timeout=60))


@pytest.fixture
def write(tmp_path):
    """Return a function that writes the code of a module, by default of a reward, and returns its path."""

    def write(code, name="reward.py"):
        path = tmp_path / name
        path.write_text(textwrap.dedent(code))
        return str(path)

    return write


@pytest.fixture(scope="session")
def bubblewrap():
    """Return a sandbox. Where none works, tests are skipped; with RLHF_REQUIRE_SANDBOX=1, as in Bazel, they fail."""
    try:
        check_sandbox(None)
    except ConfigError as error:
        if os.environ.get("RLHF_REQUIRE_SANDBOX") == "1":
            raise
        pytest.skip(str(error))
    return Bubblewrap()
