"""Plain functions of agents in threads: what they return, and how those that hang are counted."""

import asyncio
import contextvars
import threading
import time

import pytest

from rlhf_rollout.workers import serving
from rlhf_rollout.workers.threads import CALL, CodeThread, called, num_hanging

WHO = contextvars.ContextVar("who")


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


def test_function_that_runs_on_after_its_call_is_counted_until_it_ends():
    release, begun = threading.Event(), threading.Event()

    async def call(*running):
        CALL.set(asyncio.current_task())
        await asyncio.wait([asyncio.create_task(each) for each in running], timeout=0.1)
        return num_hanging()

    async def scenario():
        thread = CodeThread()
        outside = asyncio.create_task(called(release.wait, 30.0))  # no call has it
        own = thread.run(release.wait, 30.0)
        during = await asyncio.create_task(call(called(release.wait, 30.0), own, thread.run(begun.set)))
        after = num_hanging()
        assert not begun.is_set()  # there is one thread
        release.set()
        await outside
        thread.close()
        deadline = time.monotonic() + 30.0
        while num_hanging() and time.monotonic() < deadline:
            await asyncio.sleep(0.01)
        return during, after, num_hanging()

    assert asyncio.run(scenario()) == (0, 2, 0)


def test_function_that_raises_is_not_counted():
    def fails():
        raise KeyError("no")

    async def call():
        CALL.set(asyncio.current_task())
        with pytest.raises(KeyError):
            await called(fails)

    async def scenario():
        await asyncio.create_task(call())
        return num_hanging()

    assert asyncio.run(scenario()) == 0


def test_functions_that_hang_are_told_once_all_of_five_counts_have_them(monkeypatch):
    counts = iter([2, 2, 2, 2, 0, 3, 3, 4, 3, 3, 1])
    told = []
    monkeypatch.setattr(serving, "_HANGING_CHECK_S", 0.0)
    monkeypatch.setattr(serving, "num_hanging", lambda: next(counts))
    server = serving._Server(None, None, None)
    server._send = told.append
    with pytest.raises(RuntimeError):  # there are no more counts
        asyncio.run(server._watch())
    assert told == [{"hanging": 3}, {"hanging": 1}]


def test_closed_thread_ends_after_its_last_function_and_holds_up_nobody():
    release = threading.Event()
    threads = []
    thread = CodeThread()

    def last():
        threads.append(threading.current_thread())
        release.wait(30.0)

    async def scenario():
        running = asyncio.create_task(thread.run(last))
        await asyncio.sleep(0.1)
        running.cancel()
        started = time.monotonic()
        thread.close()
        return time.monotonic() - started

    took_s = asyncio.run(scenario())
    assert took_s < 5.0 and threads[0].is_alive()
    release.set()
    threads[0].join(30.0)
    assert not threads[0].is_alive()
