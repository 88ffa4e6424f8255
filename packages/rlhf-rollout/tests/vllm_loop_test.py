"""The stepping thread around vLLM, on a core whose steps are scripted: no model is loaded."""

import threading
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from rlhf_data.errors import EngineError
from rlhf_data.records import FinishReason
from rlhf_rollout.protocols import SamplingParams

pytest.importorskip("vllm")

from vllm.v1.engine import FinishReason as VllmFinishReason

from rlhf_rollout.engines.vllm.loop import Job, StepLoop


class ScriptedCore:
    """Gives every request the tokens 1, 2, 3 ... and ends it at max_tokens; `allowed` permits steps one by one."""

    def __init__(self) -> None:
        self.allowed = threading.Semaphore(0)
        self.entered = threading.Semaphore(0)
        self.running: dict[str, tuple[Any, int]] = {}
        self.added: list[Any] = []
        self.aborted: list[str] = []
        self.batches: list[list[str]] = []
        self.failure: Exception | None = None
        self.refusal: Exception | None = None
        self.down = False
        self.shutdown_s = 0.0
        self.paused: tuple[str, bool] | None = None
        self.finished_early: set[str] = set()
        self.routes: Callable[[Any, int], np.ndarray | None] = lambda request, token: None
        self.end_reason = VllmFinishReason.LENGTH
        self.engine_core = SimpleNamespace(
            batch_queue=None,
            scheduler=SimpleNamespace(has_requests=lambda: bool(self.running)),
            pause_scheduler=lambda mode, clear_cache: setattr(self, "paused", (mode, clear_cache)),
            resume_scheduler=lambda: setattr(self, "paused", None),
        )

    def add_request(self, request: Any) -> None:
        if self.refusal is not None:
            raise self.refusal
        self.added.append(request)
        self.running[request.request_id] = (request, 0)

    def abort_requests(self, request_ids: list[str]) -> None:
        self.aborted += request_ids
        for request_id in request_ids:
            self.running.pop(request_id, None)

    def get_output(self) -> Any:
        self.entered.release()
        self.allowed.acquire()
        if self.failure is not None:
            raise self.failure
        self.batches.append(sorted(self.running))
        outputs = []
        for request_id, (request, step) in list(self.running.items()):
            token = step + 1
            done = token == request.sampling_params.max_tokens or request_id in self.finished_early
            self.running[request_id] = (request, token)
            if done:
                del self.running[request_id]
            outputs.append(
                SimpleNamespace(
                    request_id=request_id,
                    new_token_ids=[token],
                    new_logprobs=[-0.5 * token],
                    routed_experts=self.routes(request, token),
                    finish_reason=self.end_reason if done else None,
                    prefill_stats=SimpleNamespace(num_cached_tokens=token) if token == 1 else None,
                )
            )
        return SimpleNamespace(outputs=outputs)

    def shutdown(self) -> None:
        time.sleep(self.shutdown_s)
        self.down = True


@pytest.fixture
def core() -> ScriptedCore:
    return ScriptedCore()


@pytest.fixture
def loop(core: ScriptedCore) -> Iterator[StepLoop]:
    loop = StepLoop(lambda: core, end_token_ids=(99,), seed=0, seed_every_row=True)
    yield loop
    for _ in range(100):
        core.allowed.release()
    loop.close()


def submit(loop: StepLoop, **sampling: Any) -> Job:
    return loop.submit([5, 6], SamplingParams(**sampling))


def barrier(loop: StepLoop) -> None:
    """Return once the thread has taken in what was sent before; requests among it may still wait to be started."""
    loop.call(lambda core: None, drain=False).result(60)


def wait_for_step(core: ScriptedCore) -> None:
    """Return once another step has begun, with every request started that was sent before it."""
    assert core.entered.acquire(timeout=60)


def test_step_loop_joins_the_samples_of_a_job(core: ScriptedCore, loop: StepLoop) -> None:
    job = submit(loop, num_samples=2, max_tokens=3)
    for _ in range(3):
        core.allowed.release()
    completions = job.future.result(60)
    assert [completion.token_ids.tolist() for completion in completions] == [[1, 2, 3]] * 2
    assert [completion.logprobs.tolist() for completion in completions] == [[-0.5, -1.0, -1.5]] * 2
    assert completions[0].finish_reason is FinishReason.LENGTH


def told(request: Any, token: int) -> np.ndarray:
    """As vLLM: those of the prompt, 10 and 11, with the first token; then that of the token before."""
    return np.array([10, 11] if token == 1 else [token - 1], np.uint8).reshape(-1, 1, 1)


def test_step_loop_joins_the_routes_of_a_request_over_weight_updates(core: ScriptedCore, loop: StepLoop) -> None:
    core.routes = told
    job = submit(loop, num_samples=2, max_tokens=3)
    wait_for_step(core)
    core.allowed.release()
    wait_for_step(core)
    loop.call(lambda core: loop.advance(7), drain=False)
    for _ in range(2):
        core.allowed.release()
    for completion in job.future.result(60):
        assert [span.policy_version for span in completion.spans] == [0, 7]
        assert completion.routes[:, 0, 0].tolist() == [10, 11, 1, 2]


@pytest.mark.parametrize("silent", [1, 2])
def test_step_loop_gives_no_routes_when_vllm_left_some_out(core: ScriptedCore, loop: StepLoop, silent: int) -> None:
    core.routes = lambda request, token: None if token == silent else told(request, token)
    job = submit(loop, max_tokens=3)
    for _ in range(3):
        core.allowed.release()
    [completion] = job.future.result(60)
    assert completion.routes is None and completion.token_ids.tolist() == [1, 2, 3]


def test_step_loop_asks_for_end_tokens_logprobs_and_own_seeds(core: ScriptedCore, loop: StepLoop) -> None:
    job = submit(loop, num_samples=2, max_tokens=1, stop_token_ids=(7,))
    core.allowed.release()
    job.future.result(60)
    first, second = (request.sampling_params for request in core.added)
    assert sorted(first.stop_token_ids) == [7, 99]
    assert (first.logprobs, first.detokenize) == (0, False)
    # Written down, so that one seed gives the same responses in every release.
    assert (first.seed, second.seed) == (2937467307694268567, 1244171615822312904)


def test_step_loop_keeps_greedy_and_sampled_requests_apart(core: ScriptedCore, loop: StepLoop) -> None:
    sampled = submit(loop, max_tokens=2)
    wait_for_step(core)
    greedy = submit(loop, max_tokens=1, temperature=0.0)
    for _ in range(3):
        core.allowed.release()
    sampled.future.result(60), greedy.future.result(60)
    # Two steps of the sampled request alone, then one of the greedy request alone.
    assert core.batches == [["0"], ["0"], ["1"]]


def test_step_loop_gathers_requests_of_an_idle_engine_into_one_batch(core: ScriptedCore) -> None:
    loop = StepLoop(lambda: core, end_token_ids=(), seed=0, seed_every_row=False, gather_s=0.9)
    first = submit(loop, max_tokens=1)
    time.sleep(0.1)  # the thread has taken the first request in, and waits for another one
    second = submit(loop, max_tokens=1)
    core.allowed.release()
    first.future.result(60), second.future.result(60)
    assert core.batches == [["0", "1"]]
    loop.close()


def test_step_loop_call_lets_a_batch_that_was_scheduled_ahead_run_out(core: ScriptedCore, loop: StepLoop) -> None:
    core.engine_core.batch_queue = ["a batch that was scheduled ahead"]
    call = loop.call(lambda core: list(core.engine_core.batch_queue), drain=True)
    wait_for_step(core)
    core.engine_core.batch_queue = []
    core.allowed.release()
    assert call.result(60) == []
    assert len(core.batches) == 1


def test_step_loop_call_that_drains_waits_and_holds_newcomers_back(core: ScriptedCore, loop: StepLoop) -> None:
    first = submit(loop, max_tokens=2)
    wait_for_step(core)
    seen: list[int] = []
    call = loop.call(lambda core: seen.append(len(core.running)), drain=True)
    second = submit(loop, max_tokens=1)
    for _ in range(2):
        core.allowed.release()
    call.result(60)
    assert first.future.done()
    assert seen == [0]
    core.allowed.release()
    second.future.result(60)
    assert core.batches == [["0"], ["0"], ["1"]]


def test_step_loop_abort_gives_every_sample_up(core: ScriptedCore, loop: StepLoop) -> None:
    job = submit(loop, num_samples=2, max_tokens=9)
    wait_for_step(core)
    loop.abort(job)
    core.allowed.release()
    barrier(loop)
    assert sorted(core.aborted) == sorted(job.request_ids)
    assert loop.num_in_flight == 0


def test_step_loop_failed_step_fails_everything_in_flight(core: ScriptedCore, loop: StepLoop) -> None:
    core.failure = RuntimeError("the device was lost")
    jobs = [submit(loop, max_tokens=4), submit(loop, max_tokens=4)]
    core.allowed.release()
    for job in jobs:
        with pytest.raises(EngineError, match="takes no more requests: RuntimeError: the device was lost"):
            job.future.result(60)
    with pytest.raises(EngineError, match="the device was lost"):
        submit(loop, max_tokens=1).future.result(60)
    with pytest.raises(EngineError, match="the device was lost"):
        loop.call(lambda core: None, drain=True).result(60)
    assert loop.failure is not None


def test_step_loop_request_that_vllm_fails_takes_the_other_samples_with_it(core: ScriptedCore, loop: StepLoop) -> None:
    core.finished_early.add("0")
    core.end_reason = VllmFinishReason.ERROR
    job = submit(loop, num_samples=2, max_tokens=9)
    wait_for_step(core)
    core.allowed.release()
    with pytest.raises(EngineError, match="vLLM ended a request for the reason"):
        job.future.result(60)
    core.allowed.release()
    barrier(loop)
    assert core.aborted == ["1"]
    assert loop.failure is None


def test_step_loop_that_nobody_closes_does_not_keep_the_process_alive(loop: StepLoop) -> None:
    threads = [thread for thread in threading.enumerate() if thread.name == "vllm-steps"]
    assert threads and all(thread.daemon for thread in threads)


def test_step_loop_refused_request_fails_alone(core: ScriptedCore, loop: StepLoop) -> None:
    core.refusal = ValueError("no such token")
    with pytest.raises(EngineError, match="vLLM does not take the request: no such token"):
        submit(loop, num_samples=2, max_tokens=1).future.result(60)
    core.refusal = None
    job = submit(loop, max_tokens=1)
    core.allowed.release()
    assert len(job.future.result(60)) == 1


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


def test_step_loop_without_seed_every_row_leaves_unseeded_requests_unseeded(core: ScriptedCore) -> None:
    loop = StepLoop(lambda: core, end_token_ids=(), seed=0, seed_every_row=False)
    jobs = [submit(loop, max_tokens=1), submit(loop, max_tokens=1, seed=3)]
    for job in jobs:
        core.allowed.release()
        job.future.result(60)
    seeds = [request.sampling_params.seed for request in core.added]
    assert seeds[0] is None
    assert seeds[1] is not None
    for _ in range(5):
        core.allowed.release()
    loop.close()


def test_step_loop_failed_build_raises() -> None:
    def build() -> Any:
        raise RuntimeError("no device")

    with pytest.raises(RuntimeError, match="no device"):
        StepLoop(build, end_token_ids=(), seed=0, seed_every_row=True)


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


def test_step_loop_restart_begins_anew_and_keeps_samples_that_were_done(core: ScriptedCore, loop: StepLoop) -> None:
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
    for _ in range(2):
        core.allowed.release()
    first, second = job.future.result(60)
    assert (first.token_ids.tolist(), first.policy_version) == ([1], 0)
    assert [(span.token_ids.tolist(), span.policy_version) for span in second.spans] == [([1, 2], 4)]


def test_step_loop_refusal_rejects_what_runs_what_waits_and_what_comes(core: ScriptedCore, loop: StepLoop) -> None:
    running = submit(loop, max_tokens=9)
    wait_for_step(core)
    greedy = submit(loop, max_tokens=1, temperature=0.0)
    refused = loop.call(lambda core: loop.refuse(core, "weights are missing", "send them"), drain=False)
    core.allowed.release()
    refused.result(60)
    for job in (running, greedy, submit(loop, max_tokens=1)):
        with pytest.raises(EngineError, match=r"weights are missing\s+hint: send them"):
            job.future.result(60)
    assert core.aborted == running.request_ids
    loop.call(lambda core: setattr(loop, "refusal", None), drain=False).result(60)
    job = submit(loop, max_tokens=1)
    core.allowed.release()
    assert len(job.future.result(60)) == 1


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
