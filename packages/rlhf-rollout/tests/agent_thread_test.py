"""Plain functions of agents in threads: what they return, and how those that hang are counted."""

import asyncio
import contextlib
import contextvars
import threading
import time

import pytest

from rlhf_rollout.workers.threads import CodeThread, called, num_hanging

WHO = contextvars.ContextVar("who")


async def given_up(call):
    """Begin a call, cancel it, and return its task."""
    task = asyncio.create_task(call)
    await asyncio.sleep(0.1)
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task
    return task


async def until_none_hangs():
    deadline = time.monotonic() + 30.0
    while num_hanging(0.0) and time.monotonic() < deadline:
        await asyncio.sleep(0.01)
    return num_hanging(0.0)


def test_functions_of_all_kinds_return_their_result():
    async def slept(value):
        await asyncio.sleep(0)
        return value, threading.current_thread() is threading.main_thread()

    def plain(value, more=0):
        return value + more + WHO.get(), threading.current_thread() is threading.main_thread()

    async def scenario():
        WHO.set(100)
        thread = CodeThread()
        try:
            results = [await called(slept, 1), await called(plain, 2), await thread.run(plain, 3, more=4)]
            return [*results, await thread.run(lambda: slept(5))]
        finally:
            thread.close()

    assert asyncio.run(scenario()) == [(1, True), (102, False), (107, False), (5, True)]


def test_function_that_runs_on_is_counted_until_it_ends():
    release = threading.Event()

    async def scenario():
        thread = CodeThread()
        counts = [num_hanging(0.0)]
        running = asyncio.create_task(called(release.wait, 30.0))
        await asyncio.sleep(0.1)
        counts.append(num_hanging(0.0))  # somebody waits for it
        await given_up(thread.run(release.wait, 30.0))
        await given_up(called(release.wait, 30.0))
        counts.append(num_hanging(0.0))
        await given_up(thread.run(release.wait, 30.0))  # has not begun, and never will
        counts += [num_hanging(0.0), num_hanging(20.0)]
        release.set()
        await running
        thread.close()
        return [*counts, await until_none_hangs()]

    assert asyncio.run(scenario()) == [0, 0, 2, 2, 0, 0]


def test_function_that_takes_longer_than_its_caller_waits_is_counted():
    release = threading.Event()

    async def scenario():
        running = asyncio.create_task(called(release.wait, 30.0, patience_s=0.3))
        await asyncio.sleep(0.1)
        early = num_hanging(0.0)
        await asyncio.sleep(0.4)
        late = num_hanging(0.0)
        release.set()
        await running
        return early, late, num_hanging(0.0)

    assert asyncio.run(scenario()) == (0, 1, 0)


def test_function_that_raises_is_not_counted():
    def fails():
        raise KeyError("no")

    async def scenario():
        with pytest.raises(KeyError):
            await called(fails, patience_s=0.0)
        return num_hanging(0.0)

    assert asyncio.run(scenario()) == 0


def test_closed_thread_ends_after_its_last_function_and_holds_up_nobody():
    release = threading.Event()
    threads = []

    def last():
        threads.append(threading.current_thread())
        release.wait(30.0)

    async def scenario():
        thread = CodeThread()
        await given_up(thread.run(last))
        started = time.monotonic()
        thread.close()
        return time.monotonic() - started

    took_s = asyncio.run(scenario())
    assert took_s < 5.0 and threads[0].is_alive()
    release.set()
    threads[0].join(30.0)
    assert not threads[0].is_alive()
