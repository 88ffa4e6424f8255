"""Calls into the stepping thread around vLLM: what drains, freezes, restarts, refuses or closes; no model is loaded."""

import threading
from typing import Any

import pytest

from rlhf_data.errors import EngineError
from scripted_core import ScriptedCore, barrier, submit, wait_for_step

pytest.importorskip("vllm")

from rlhf_rollout.engines.vllm.loop import StepLoop


def test_step_loop_call_lets_a_batch_that_was_scheduled_ahead_run_out(core: ScriptedCore, loop: StepLoop) -> None:
    core.engine_core.batch_queue = ["a batch that was scheduled ahead"]
    call = loop.call(lambda core: list(core.engine_core.batch_queue), drain=True)
    wait_for_step(core)
    core.engine_core.batch_queue = []
    core.allowed.release()
    assert call.result(60) == []
    assert len(core.batches) == 1


def test_step_loop_abort_gives_every_sample_up(core: ScriptedCore, loop: StepLoop) -> None:
    job = submit(loop, num_samples=2, max_tokens=9)
    wait_for_step(core)
    loop.abort(job)
    core.allowed.release()
    barrier(loop)
    assert sorted(core.aborted) == sorted(job.request_ids)
    assert loop.num_in_flight == 0


def test_step_loop_that_nobody_closes_does_not_keep_the_process_alive(loop: StepLoop) -> None:
    threads = [thread for thread in threading.enumerate() if thread.name == "vllm-steps"]
    assert threads and all(thread.daemon for thread in threads)


def test_step_loop_survives_waiters_that_give_up(core: ScriptedCore, loop: StepLoop) -> None:
    job = submit(loop, max_tokens=1)
    wait_for_step(core)
    called = loop.call(lambda core: 3, drain=False)
    assert not job.future.cancel() and not called.cancel()
    core.allowed.release()
    assert job.future.result(60)[0].token_ids.tolist() == [1] and called.result(60) == 3


def test_step_loop_failed_call_reaches_its_caller_only(core: ScriptedCore, loop: StepLoop) -> None:
    with pytest.raises(ZeroDivisionError):
        loop.call(lambda core: 1 // 0, drain=False).result(60)
    assert loop.failure is None


def test_step_loop_close_fails_what_is_in_flight_and_shuts_the_core_down(core: ScriptedCore) -> None:
    loop = StepLoop(lambda: core, end_token_ids=(), seed=0, seed_every_row=False)
    job = submit(loop, max_tokens=1_000_000)
    wait_for_step(core)
    closer = threading.Thread(target=loop.close)
    closer.start()
    while closer.is_alive():  # steps may begin before the thread is told to end
        core.allowed.release()
        closer.join(0.01)
    with pytest.raises(EngineError, match="the engine was closed"):
        job.future.result(60)
    assert core.down


def test_step_loop_frozen_requests_go_on_with_a_new_span(core: ScriptedCore, loop: StepLoop) -> None:
    job = submit(loop, num_samples=2, max_tokens=3)
    wait_for_step(core)
    frozen = loop.call(loop.freeze, drain=False)
    core.allowed.release()
    frozen.result(60)
    assert core.paused == ("keep", False)  # the cache still serves when they go on under the same weights
    later = submit(loop, max_tokens=1)
    barrier(loop)
    loop.call(lambda core: loop.advance(7), drain=True).result(60)  # nothing in flight advances, so nothing to drain
    core.allowed.release()
    barrier(loop)
    assert len(core.batches) == 1
    assert not later.future.done()

    def resume(core: Any) -> None:
        loop.unfreeze(core)
        loop.holding = False

    loop.call(resume, drain=False).result(60)
    assert core.paused is None
    for _ in range(4):
        core.allowed.release()
    for completion in job.future.result(60):
        assert [span.policy_version for span in completion.spans] == [0, 7]
        assert [span.token_ids.tolist() for span in completion.spans] == [[1], [2, 3]]
        assert [span.logprobs.tolist() for span in completion.spans] == [[-0.5], [-1.0, -1.5]]
    assert [span.policy_version for span in later.future.result(60)[0].spans] == [7]


def test_step_loop_freeze_takes_in_the_batch_under_way(core: ScriptedCore, loop: StepLoop) -> None:
    job = submit(loop, max_tokens=3)
    wait_for_step(core)
    core.engine_core.batch_queue = ["a batch that was scheduled ahead"]
    frozen = loop.call(loop.freeze, drain=False)
    core.allowed.release()  # the step at hand
    wait_for_step(core)
    core.engine_core.batch_queue = []
    core.allowed.release()  # the batch under way
    frozen.result(60)
    loop.call(lambda core: loop.advance(5), drain=False).result(60)
    loop.call(loop.unfreeze, drain=False).result(60)
    core.allowed.release()
    spans = job.future.result(60)[0].spans
    assert [(span.token_ids.tolist(), span.policy_version) for span in spans] == [([1, 2], 0), ([3], 5)]


def test_step_loop_restart_goes_on_and_keeps_samples_that_were_done(core: ScriptedCore, loop: StepLoop) -> None:
    loop.call(lambda core: setattr(loop, "holding", True), drain=False)
    job = submit(loop, num_samples=2, max_tokens=2)
    other = submit(loop, max_tokens=1)
    loop.call(lambda core: setattr(loop, "holding", False), drain=False)  # both start in one step
    wait_for_step(core)
    core.finished_early.add("0")
    restarted = loop.call(loop.restart, drain=False)
    core.allowed.release()
    restarted.result(60)
    assert core.aborted == ["1"]
    assert loop.call(lambda core: loop.num_in_flight, drain=False).result(60) == 2
    assert other.future.done()

    def resume(core: Any) -> None:
        loop.advance(4)
        loop.unfreeze(core)
        loop.holding = False

    loop.call(resume, drain=False).result(60)
    core.allowed.release()
    first, second = job.future.result(60)
    again = core.added[-1]
    assert (again.prompt_token_ids, again.sampling_params.max_tokens) == ([5, 6, 1], 1)
    assert (first.token_ids.tolist(), first.policy_version) == ([1], 0)
    assert [(span.token_ids.tolist(), span.policy_version) for span in second.spans] == [([1], 0), ([1], 4)]


def test_step_loop_closed_answers_at_once(core: ScriptedCore) -> None:
    core.shutdown_s = 0.2
    loop = StepLoop(lambda: core, end_token_ids=(), seed=0, seed_every_row=False)
    loop.close()
    assert core.down  # it has waited for the thread
    loop.close()
    with pytest.raises(EngineError, match="the engine was closed"):
        submit(loop, max_tokens=1).future.result(60)
    with pytest.raises(EngineError, match="the engine was closed"):
        loop.call(lambda core: None, drain=False).result(60)
