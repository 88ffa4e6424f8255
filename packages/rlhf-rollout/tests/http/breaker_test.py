"""When calls of a scorer that keeps failing are held back, and when they are let through again."""

import asyncio

import pytest

from record_testing import make_prompt, make_rollout
from rlhf_data.records import VerdictKind
from rlhf_rollout.http.breaker import Breaker, Failure
from rlhf_rollout.rewards.function import FunctionReward
from rlhf_rollout.rewards.sources import CallOptions

HANG = Failure(VerdictKind.TIMEOUT, "no answer within 5 s")


@pytest.fixture
def clock(monkeypatch):
    now = [100.0]
    monkeypatch.setattr("rlhf_rollout.http.breaker.time.monotonic", lambda: now[0])
    return now


def test_breaker_holds_calls_back_after_costly_failures_in_a_row(clock):
    breaker = Breaker(3)
    assert [breaker.note(HANG, 5.0), breaker.note(HANG, 5.0)] == [False, False]
    assert breaker.refusal() is None
    assert not breaker.is_open
    assert breaker.note(HANG, 5.0)
    assert breaker.is_open
    refusal = breaker.refusal()
    assert (refusal.kind, refusal.of_sample) == (VerdictKind.TIMEOUT, False)
    assert refusal.detail == "not called, because 3 calls in a row failed; the last one: no answer within 5 s"


def test_breaker_lets_one_call_through_after_four_times_the_failures_time(clock):
    breaker = Breaker(1)
    assert breaker.note(HANG, 5.0)
    clock[0] += 19.75
    assert breaker.refusal() is not None
    clock[0] += 0.25
    assert breaker.refusal() is None
    assert breaker.refusal() is not None  # one at a time
    assert not breaker.note(HANG, 2.0)  # said once
    clock[0] += 8.1
    assert breaker.refusal() is None
    breaker.note(None, 1.0)
    assert breaker.refusal() is None
    assert not breaker.is_open


@pytest.mark.parametrize("outcome", [(None, 60.0), (HANG, 0.5)], ids=["success", "quick failure"])
def test_breaker_starts_anew_after_a_success_or_a_quick_failure(clock, outcome):
    breaker = Breaker(2)
    for _ in range(5):
        breaker.note(HANG, 5.0)
        breaker.note(*outcome)
    assert breaker.refusal() is None


def test_breaker_counts_quick_failures_that_broke_something(clock):
    breaker = Breaker(2)
    breaker.note(HANG, 0.01, costly=True)
    assert breaker.note(HANG, 0.01, costly=True)


@pytest.mark.parametrize(("seconds", "is_counted"), [(0.99, False), (1.0, True)])
def test_breaker_counts_failures_of_a_second_or_more(clock, seconds, is_counted):
    assert Breaker(1).note(HANG, seconds) == is_counted


def test_breaker_needs_failures_of_two_prompts(clock):
    breaker = Breaker(4)
    assert not any(breaker.note(HANG, 5.0, prompt_id="a") for _ in range(20))
    assert breaker.refusal() is None
    # With two of prompt a: one of prompt b is the third, and one of no prompt is the fourth.
    assert [breaker.note(HANG, 5.0, prompt_id=name) for name in ("b", None)] == [False, True]
    assert breaker.refusal().detail.startswith("not called, because 22 calls in a row failed")
    assert not breaker.note(HANG, 5.0, prompt_id="a")  # said once


def test_breaker_counts_the_failures_of_a_prompt_anew_after_a_success(clock):
    breaker = Breaker(3)
    for _ in range(2):
        breaker.note(HANG, 5.0, prompt_id="a")
    breaker.note(None, 1.0, prompt_id="b")
    assert not any(breaker.note(HANG, 5.0, prompt_id="a") for _ in range(2))
    assert breaker.note(HANG, 5.0, prompt_id="b")


def test_function_that_always_hangs_is_held_back_with_its_last_error(write, tmp_path, caplog, monkeypatch):
    monkeypatch.setattr("rlhf_rollout.rewards.function.MAX_FAILURES", 2)
    reward = write(f"""
        import time
        def reward_func(queries, prompts, labels):
            open({str(tmp_path / "calls")!r}, "a").write("x")
            time.sleep(1000)
    """)

    async def run():
        function = FunctionReward(reward, CallOptions(timeout_s=2.0))
        verdicts = []
        for prompt in [make_prompt("one"), make_prompt("two")] * 15:
            verdicts += await function.score(prompt, [make_rollout(prompt, "4")])
        await function.close()
        return verdicts

    verdicts = asyncio.run(run())
    assert {verdict.kind for verdict in verdicts} == {VerdictKind.TIMEOUT}
    assert len((tmp_path / "calls").read_text()) <= 3
    assert verdicts[1].detail == "no answer within 2 s"
    assert verdicts[2].detail == "not called, because 2 calls in a row failed; the last one: no answer within 2 s"
    assert "keeps failing" in caplog.text
