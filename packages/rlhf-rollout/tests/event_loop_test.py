"""An event loop on a thread of its own: results and errors, what goes on between calls, interruptions, and the end."""

import asyncio
import os
import signal
import threading
import time

import pytest

from rlhf_rollout.event_loop import EventLoopThread


@pytest.fixture
def loop():
    loop = EventLoopThread("generation")
    yield loop
    loop.close()


def test_results_and_errors_come_back(loop):
    async def double(number):
        await asyncio.sleep(0)
        return 2 * number

    async def fail():
        raise ValueError("not this one")

    assert loop.run(double(4)) == 8
    assert loop.wait(loop.start(double(5))) == 10
    assert loop.call(lambda: threading.current_thread().name) == "generation"
    with pytest.raises(ValueError, match="not this one"):
        loop.run(fail())


@pytest.mark.parametrize("kind", [KeyboardInterrupt, SystemExit])
def test_an_interrupt_in_a_task_ends_the_task_alone(loop, kind):
    async def stop():
        raise kind

    with pytest.raises(kind):
        loop.start(stop()).result(60)
    assert loop.call(lambda: 3) == 3


def test_tasks_go_on_between_two_calls(loop):
    seen = []

    async def tick():
        while True:
            seen.append(1)
            await asyncio.sleep(0.001)

    loop.start(tick())
    deadline = time.monotonic() + 60
    while len(seen) < 3:
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_reports_are_made_on_the_calling_thread_at_once_or_with_the_next_call(loop):
    made = []

    def report(text):
        loop.report(lambda: made.append((text, threading.current_thread() is threading.main_thread())))

    async def work():
        report("during")
        while not made:  # the call goes on, and the report is made already
            await asyncio.sleep(0.001)

    loop.run(work())
    assert made == [("during", True)]

    async def later():
        report("between")

    loop.start(later()).result(60)
    assert made == [("during", True)]
    loop.call(lambda: None)
    assert made == [("during", True), ("between", True)]


def test_interruption_cancels_the_coroutine_that_is_waited_for(loop):
    ended = threading.Event()
    # SIGINT may be ignored where this test runs.
    before = signal.signal(signal.SIGUSR1, signal.default_int_handler)

    async def wait():
        while not waits.is_set():
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.3)  # the main thread waits again by now
        os.kill(os.getpid(), signal.SIGUSR1)
        try:
            await asyncio.sleep(60)
        finally:
            ended.set()

    waits = threading.Event()
    loop.report(waits.set)  # the main thread calls it where it waits
    try:
        with pytest.raises(KeyboardInterrupt):
            loop.run(wait())
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert ended.wait(60)
    assert loop.call(lambda: 3) == 3


def test_close_cancels_all_tasks_and_waits_for_their_cleaning_up():
    loop = EventLoopThread("generation")
    cleaned = []

    async def work():
        try:
            await asyncio.sleep(60)
        finally:
            await asyncio.sleep(0.05)
            cleaned.append(True)

    loop.start(work())
    loop.call(lambda: None)
    loop.close()
    assert cleaned == [True]
    assert "generation" not in {thread.name for thread in threading.enumerate()}
