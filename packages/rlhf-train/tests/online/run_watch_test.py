"""What a run waits for is said after a minute, against a clock that the tests set by hand."""

import time
from types import SimpleNamespace

import pytest

from online_fakes import Listener
from record_testing import ManualClock
from rlhf_data.errors import EngineError
from rlhf_train.learning import rank_actor
from rlhf_train.learning.rank_actor import RankActor
from rlhf_train.run.timeline import PHASES, Timeline
from rlhf_train.run.watch import Watch, stacks_written


class Patient(Listener):
    """Keeps what it is told of waiting and of phases."""

    def __init__(self) -> None:
        super().__init__()
        self.said: list[str] = []
        self.begun: list[str] = []

    def waiting(self, text: str) -> None:
        self.said.append(text)

    def starting(self, text: str) -> None:
        self.begun.append(text)

    def phase(self, name: str) -> None:
        self.begun.append(name)

    def ending(self, error: BaseException) -> None:
        self.begun.append(type(error).__name__)


@pytest.fixture
def clock():
    return ManualClock()


@pytest.fixture
def listener():
    return Patient()


@pytest.fixture
def watch(clock, listener):
    return Watch(listener, clock=clock)


def seconds_until_said(watch, clock, listener, count):
    """Let time pass in seconds; return after how many of them something was said, `count` times."""
    found = []
    for second in range(1, 2000):
        clock.now += 1
        num_said = len(listener.said)
        watch.look()
        found += [second] * (len(listener.said) - num_said)
        if len(found) == count:
            break
    return found


def test_wait_is_said_after_a_minute_and_each_time_it_is_twice_as_long(watch, clock, listener):
    watch.starting("Ray")
    assert seconds_until_said(watch, clock, listener, 4) == [60, 120, 240, 480]
    assert listener.said[:2] == ["waiting for 1 min 0 s: the start of Ray", "waiting for 2 min 0 s: the start of Ray"]
    assert listener.begun == ["Ray"]


def test_next_phase_starts_anew_and_nothing_is_said_before_the_first(watch, clock, listener):
    clock.now += 600
    watch.look()
    assert not listener.said
    timeline = Timeline(clock, on_phase=watch.phase)
    for name in ("generate", "sync"):
        with timeline.phase(name):
            clock.now += 59
            watch.look()
    assert not listener.said and listener.begun == ["generate", "sync"]
    clock.now += 1
    watch.look()
    assert listener.said == [f"waiting for 1 min 0 s: {PHASES['sync']}"]


def test_early_end_of_a_run_is_no_wait_of_its_last_phase(watch, clock, listener):
    with pytest.raises(EngineError), Timeline(clock, on_phase=watch.phase).phase("train"):
        raise EngineError("the engine is gone")
    watch.ending(EngineError("the engine is gone"))
    clock.now += 60
    watch.look()
    assert listener.said == ["waiting for 1 min 0 s: the end of the run after EngineError: the engine is gone"]
    assert listener.begun == ["train", "EngineError"]


def test_details_that_know_something_are_added(watch, clock, listener):
    watch.details = [lambda: "", lambda: "no answer from 1 of 2: 1", lambda: "engine 0 has 4 completions in flight"]
    watch.phase("sync")
    clock.now += 60
    watch.look()
    assert listener.said[0].endswith("; no answer from 1 of 2: 1; engine 0 has 4 completions in flight")


def test_stacks_of_all_threads_are_written_once_a_wait_lasts_ten_minutes(watch, clock, listener, capfd):
    watch.phase("train")
    written = []
    for second in range(1, 1300):
        clock.now += 1
        watch.look()
        if "in write_stacks" in capfd.readouterr().err:
            written.append(second)
    assert written == [600, 1200]
    assert len(listener.said) == 6  # after 60, 120, 240 and 480 s, too


def test_rank_that_takes_long_writes_where_it_is_to_its_log(monkeypatch, capfd):
    def pass_that_waits(seconds):
        time.sleep(seconds)

    monkeypatch.setattr(rank_actor, "stacks_written", lambda: stacks_written(0.2))
    rank = RankActor.__new__(RankActor)
    rank._worker = SimpleNamespace(run_model=pass_that_waits)
    rank.work("run_model", 0.0)
    time.sleep(0.5)
    assert not capfd.readouterr().err
    rank.work("run_model", 0.5)
    assert "in pass_that_waits" in capfd.readouterr().err


def test_thread_says_it_survives_what_fails_and_ends_with_the_block(listener, monkeypatch):
    monkeypatch.setattr("rlhf_train.run.watch._CHECK_S", 0.01)
    failures = iter([RuntimeError("dictionary changed size during iteration")])

    def fails_once():
        for error in failures:
            raise error
        return "known"

    with Watch(listener, first_s=0.02) as watch:
        watch.details = [fails_once]
        watch.phase("generate")
        deadline = time.monotonic() + 60
        while not listener.said and time.monotonic() < deadline:
            time.sleep(0.01)
    assert listener.said[0].endswith("engines answer prompts; known")
    time.sleep(0.05)
    num_said = len(listener.said)
    time.sleep(0.2)
    assert len(listener.said) == num_said


def test_pending_names_the_oldest_group_what_it_waits_for_and_each_engine(make_run):
    """An engine and a reward ask, while they are at work, what the run is waiting for."""
    from online_fakes import SpreadReward

    heard = []

    class Asking(SpreadReward):
        async def score(self, prompt, rollouts):
            heard.append(run.controller.rollouts.pending())
            return await super().score(prompt, rollouts)

    run = make_run(Asking())
    generate = run.world.generate

    async def asking(token_ids, *arguments, **options):
        heard.append(run.controller.rollouts.pending())
        return await generate(token_ids, *arguments, **options)

    run.world.generate = asking
    assert run.controller.rollouts.pending() == ""
    run.controller.start()
    run.controller.generate(1)
    assert heard[0] == (
        "1 rollout groups in flight; the oldest, step1/00000, waits for an engine since 0 s;"
        " engine 0 has 4 completions in flight"
    )
    assert any("waits for its reward since 0 s" in text for text in heard)
    assert run.controller.rollouts.pending() == ""
