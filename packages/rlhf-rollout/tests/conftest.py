"""Fixtures of all tests of this package."""

import asyncio
import functools
import inspect
import textwrap

import httpx
import pytest


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem):
    """Run a test that is a coroutine function in an event loop of its own, or as `simulated` says."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    names = inspect.signature(pyfuncitem.obj).parameters
    run = getattr(pyfuncitem.obj, "run_by", asyncio.run)
    run(pyfuncitem.obj(**{name: pyfuncitem.funcargs[name] for name in names}))
    return True


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
