"""Fixtures of all tests of this package."""

import functools
import textwrap

import httpx
import pytest


@pytest.fixture(autouse=True)
def patience(monkeypatch):
    """Give requests of tests a minute: httpx's five seconds are too few for a machine that is busy with other tests."""
    for name in ("delete", "get", "post"):
        monkeypatch.setattr(httpx, name, functools.partial(getattr(httpx, name), timeout=60))


@pytest.fixture
def quick_retries(monkeypatch):
    """Let pauses between two tries of a request begin with a millisecond."""
    monkeypatch.setattr("rlhf_rollout.http.client.random.uniform", lambda low, high: 0.002)


@pytest.fixture
def write(tmp_path):
    """Return a function that writes the code of a module, by default of a reward, and returns its path."""

    def write(code, name="reward.py"):
        path = tmp_path / name
        path.write_text(textwrap.dedent(code))
        return str(path)

    return write
