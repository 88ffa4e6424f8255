"""Requests in the stepping thread around vLLM, on a core whose steps are scripted: no model is loaded."""

import copy
import time
from typing import Any

import numpy as np
import pytest

from rlhf_data.errors import EngineError
from rlhf_data.records import FinishReason
from rlhf_rollout.engines.requests import sample_seeds
from rlhf_rollout.protocols import Draft, SamplingParams
from scripted_core import ScriptedCore, barrier, submit, wait_for_step

pytest.importorskip("vllm")

from vllm.v1.engine import FinishReason as VllmFinishReason

from rlhf_rollout.engines.vllm.loop import StepLoop


def test_step_loop_ends_a_sample_at_the_token_that_completes_a_text(core: ScriptedCore, loop: StepLoop) -> None:
    sampling = SamplingParams(num_samples=2, max_tokens=9, stop=("bc",))
    job = loop.submit([5, 6], sampling, lambda ids: "".join(chr(96 + token) for token in ids))
    for _ in range(3):
        core.allowed.release()
    for completion in job.future.result(60):
        assert completion.token_ids.tolist() == [1, 2, 3]
        assert completion.logprobs.tolist() == [-0.5, -1.0, -1.5]
        assert completion.finish_reason is FinishReason.STOP
    barrier(loop)
    assert core.aborted == ["0", "1"] and loop.call(lambda core: loop.num_running, drain=False).result(60) == 0


def test_step_loop_text_at_the_last_token_has_stopped_the_sample(core: ScriptedCore, loop: StepLoop) -> None:
    job = loop.submit([5, 6], SamplingParams(max_tokens=1, stop=("1",)), lambda ids: "".join(map(str, ids)))
    core.allowed.release()
    [completion] = job.future.result(60)
    assert (completion.finish_reason, core.aborted) == (FinishReason.STOP, [])


@pytest.mark.parametrize("max_tokens", [9, 4])  # vLLM goes on; it ends with the same step
def test_a_text_in_the_middle_of_a_step_ends_tokens_and_log_probs(core, loop, max_tokens) -> None:
    core.num_tokens = 4
    sampling = SamplingParams(max_tokens=max_tokens, stop=("23",))
    job = loop.submit([5, 6], sampling, lambda ids: "".join(map(str, ids)))
    core.allowed.release()
    [completion] = job.future.result(60)
    [span] = completion.spans
    assert (span.token_ids.tolist(), span.logprobs.tolist()) == ([1, 2, 3], [-0.5, -1.0, -1.5])
    assert completion.finish_reason is FinishReason.STOP and len(core.aborted) == (max_tokens > 4)


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


def test_step_loop_goes_on_behind_drafts_of_another_engine(core: ScriptedCore, loop: StepLoop) -> None:
    core.routes = lambda request, token: np.array(
        [*range(10, 10 + len(request.prompt_token_ids))] if token == 1 else [100 + token], np.uint8
    ).reshape(-1, 1, 1)
    kept = np.array([50, 51, 52], np.uint8).reshape(-1, 1, 1)  # of the prompt and the first of its two tokens
    drafts = [
        Draft([31, 32], [-1.0, -2.0], [(0, 3)], [kept]),
        Draft([33], [-3.0], [(0, 3)], finish_reason=FinishReason.STOP),
        Draft(),
    ]
    sampling = SamplingParams(num_samples=3, max_tokens=4, min_tokens=3, seed=7)
    loop.call(lambda core: loop.advance(5), drain=False)
    job = loop.submit([5, 6], sampling, drafts=drafts)
    for _ in range(4):
        core.allowed.release()
    begun, done, fresh = job.future.result(60)
    assert [request.prompt_token_ids for request in core.added] == [[5, 6, 31, 32], [5, 6]]
    params = [request.sampling_params for request in core.added]
    assert [(one.max_tokens, one.min_tokens) for one in params] == [(2, 1), (4, 3)]
    first, _, third = sample_seeds(7, 3)
    assert params[1].seed == third
    # With the sample's own seed, the rest would get the random numbers of its first tokens again.
    assert params[0].seed not in (first, third)
    assert [(span.policy_version, span.token_ids.tolist()) for span in begun.spans] == [(3, [31, 32]), (5, [1, 2])]
    assert begun.logprobs.tolist() == [-1.0, -2.0, -0.5, -1.0]
    # Those of the kept tokens are the old engine's, that of the last one the new engine's.
    assert begun.routes[:, 0, 0].tolist() == [50, 51, 52, 13, 102]
    assert (done.token_ids.tolist(), done.finish_reason) == ([33], FinishReason.STOP)
    assert fresh.token_ids.tolist() == [1, 2, 3, 4]


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


def test_step_loop_refused_request_fails_alone(core: ScriptedCore, loop: StepLoop) -> None:
    core.refusal = ValueError("no such token")
    with pytest.raises(EngineError, match="vLLM does not take the request: no such token"):
        submit(loop, num_samples=2, max_tokens=1).future.result(60)
    core.refusal = None
    job = submit(loop, max_tokens=1)
    core.allowed.release()
    assert len(job.future.result(60)) == 1


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


def test_step_loop_gives_whole_samples_all_tokens_beside_one_that_has_begun(core: ScriptedCore) -> None:
    loop = StepLoop(lambda: core, end_token_ids=(), seed=0, seed_every_row=False)
    drafts = [Draft(), Draft([31, 32], [-1.0, -2.0], [(0, 0)]), Draft(), Draft([33], [-3.0], [(0, 0)])]
    for given in (drafts, drafts[1:]):
        sampling = SamplingParams(num_samples=len(given), max_tokens=4, min_tokens=3)
        job = loop.submit([5, 6], sampling, drafts=copy.deepcopy(given))
        for _ in range(4):
            core.allowed.release()
        assert [len(completion.token_ids) for completion in job.future.result(60)] == [4] * len(given)
    params = [request.sampling_params for request in core.added]
    bounds = [(4, 3), (2, 1), (4, 3), (3, 2)]
    assert [(one.max_tokens, one.min_tokens) for one in params] == bounds + bounds[1:]
    assert params[0] is params[2]  # thousands of them are the same
    loop.close()


def test_step_loop_failed_build_raises() -> None:
    def build() -> Any:
        raise RuntimeError("no device")

    with pytest.raises(RuntimeError, match="no device"):
        StepLoop(build, end_token_ids=(), seed=0, seed_every_row=True)
