"""Signals end a run at once, except while they are held."""

import asyncio
import os
import signal
import threading
import time

import pytest

from rlhf_train.run.interrupts import Interrupted, Interrupts


def send(number: int = signal.SIGTERM) -> None:
    os.kill(os.getpid(), number)


def interrupted(body) -> Interrupted:
    """Call `body` with an `Interrupts` in force, which must end in `Interrupted`, and return that."""

    def run() -> None:
        with Interrupts() as interrupts:
            body(interrupts)

    with pytest.raises(Interrupted) as caught:
        run()
    return caught.value


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signal_raises_with_its_number_and_handlers_come_back(number):
    before = signal.getsignal(number)
    assert interrupted(lambda _: send(number)).signal_number == number
    assert signal.getsignal(number) is before


def test_interrupt_of_a_library_gets_the_number_of_the_signal_and_one_without_a_signal_passes():
    def body(interrupts: Interrupts) -> None:
        interrupts.hold()
        send()
        raise KeyboardInterrupt  # as Ray does

    assert interrupted(body).signal_number == signal.SIGTERM
    with pytest.raises(KeyboardInterrupt) as caught, Interrupts():
        raise KeyboardInterrupt
    assert caught.type is KeyboardInterrupt


def test_held_signal_raises_at_the_release():
    done = []

    def body(interrupts: Interrupts) -> None:
        interrupts.hold()
        send()
        done.append("update")
        assert interrupts.is_held and interrupts.received == signal.SIGTERM
        interrupts.release()
        done.append("never")

    interrupted(body)
    assert done == ["update"]


def test_release_without_a_signal_goes_on_and_later_signals_raise_again():
    def body(interrupts: Interrupts) -> None:
        interrupts.hold()
        interrupts.release()
        send()
        pytest.fail("the signal did not raise")

    interrupted(body)


def test_signal_in_an_event_loop_cancels_its_tasks_and_lets_them_clean_up():
    cleaned = []

    async def work(name: str) -> None:
        try:
            await asyncio.sleep(60)
        finally:
            cleaned.append(name)

    async def both() -> None:
        asyncio.get_running_loop().call_later(0.05, send)
        await asyncio.gather(work("one"), work("two"))

    with asyncio.Runner() as runner:
        with pytest.raises(Interrupted), Interrupts():
            runner.run(both())
        assert sorted(cleaned) == ["one", "two"]
        assert runner.run(asyncio.sleep(0, "still works")) == "still works"


def test_signal_that_cancelled_nothing_raises_at_the_next_hold_and_cancels_nothing_later():
    """A signal that arrives as a loop ends is seen by nobody in it."""

    async def end() -> None:
        send()

    with asyncio.Runner() as runner:

        def body(interrupts: Interrupts) -> None:
            runner.run(end())
            with pytest.raises(Interrupted):
                interrupts.hold()
            assert not interrupts.is_held
            interrupts.close()
            assert runner.run(asyncio.sleep(0, "cleaned up")) == "cleaned up"
            interrupts.release()

        interrupted(body)


def test_closed_interrupts_only_remember_until_the_release():
    done = []

    def body(interrupts: Interrupts) -> None:
        interrupts.close()
        send()
        done.append("cleaned up")
        assert not interrupts.is_held and interrupts.received == signal.SIGTERM
        with pytest.raises(Interrupted):
            interrupts.release()
        send(signal.SIGINT)

    assert interrupted(body).signal_number == signal.SIGINT
    assert done == ["cleaned up"]


def test_second_signal_in_an_event_loop_does_not_disturb_the_cleaning_up():
    cleaned = []

    async def work() -> None:
        try:
            await asyncio.sleep(60)
        finally:
            send()
            await asyncio.sleep(0.05)
            cleaned.append(True)

    async def both() -> None:
        asyncio.get_running_loop().call_later(0.05, send)
        await work()

    with asyncio.Runner() as runner, pytest.raises(Interrupted), Interrupts():
        runner.run(both())
    assert cleaned == [True]


def test_cancellation_without_a_signal_stays_a_cancellation():
    with pytest.raises(asyncio.CancelledError), Interrupts():
        raise asyncio.CancelledError


def test_listen_takes_signals_back_from_a_library():
    def body(interrupts: Interrupts) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        interrupts.listen()
        send()
        pytest.fail("the signal did not raise")

    interrupted(body)


def test_alarm_of_a_handler_that_came_first_does_not_end_the_process():
    ended = []
    before = signal.signal(signal.SIGALRM, lambda *_: ended.append(True))

    def body(interrupts: Interrupts) -> None:
        signal.alarm(1)
        send()

    try:
        interrupted(body)
        time.sleep(1.2)
        assert not ended and signal.alarm(0) == 0
    finally:
        signal.signal(signal.SIGALRM, before)


def test_other_threads_are_left_alone():
    def enter() -> None:
        with Interrupts() as interrupts:
            interrupts.listen()

    before = signal.getsignal(signal.SIGTERM)
    thread = threading.Thread(target=enter)
    thread.start()
    thread.join()
    assert signal.getsignal(signal.SIGTERM) is before
