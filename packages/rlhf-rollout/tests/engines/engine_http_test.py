"""The HTTP engine against a small server on this machine."""

import asyncio
import json
import zlib
from typing import Any

import httpx
import numpy as np
import pytest

from rlhf_data.errors import ConfigError, EngineError, WeightSyncError
from rlhf_data.records import FinishReason
from rlhf_rollout.engines import EngineSpec, build_engine
from rlhf_rollout.engines.http import HttpEngine
from rlhf_rollout.protocols import EngineHealth, SamplingParams
from rlhf_rollout.weights.bucket import WeightBucket
from rollout_testing import shared_memory_bucket
from simulated import now, simulate, simulated

PROMPT = np.array([4, 5, 6], np.int32)


class Stub:
    """Answers from a list of (status, body); the last one again and again. Remembers the requests."""

    def __init__(self) -> None:
        self.answers: list[tuple[int, Any]] = []
        self.requests: list[dict[str, Any]] = []
        self.headers: list[httpx.Headers] = []

    async def __call__(self, request: httpx.Request) -> httpx.Response:
        if request.url.path == "/metrics":
            return httpx.Response(404)
        self.requests.append(json.loads(request.content) | {"path": request.url.path})
        self.headers.append(request.headers)
        status, answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        return httpx.Response(status, text=answer if isinstance(answer, str) else json.dumps(answer))


def choice(index: int, token_ids: list[int], reason: str = "stop") -> dict[str, Any]:
    logprobs = {"token_logprobs": [-0.25 * token for token in token_ids]}
    return {"index": index, "text": "", "token_ids": token_ids, "logprobs": logprobs, "finish_reason": reason}


@pytest.fixture
def stub() -> Stub:
    return Stub()


def mocked(answer: Any, url: str = "http://engine", **options: Any) -> HttpEngine:
    """Return an engine whose server answers what `answer` makes of a request."""
    limits = {"request_timeout_s": 60.0, "control_timeout_s": 2.0, "health_timeout_s": 3.0}
    spec = EngineSpec(model="policy", base_url=url, max_model_len=64, **limits)
    return HttpEngine(spec, transport=httpx.MockTransport(answer), **options)


def ask(stub: Stub, sampling: SamplingParams | None = None, url: str = "http://engine") -> Any:
    return simulate(mocked(stub, url).generate(PROMPT, sampling or SamplingParams(max_tokens=4)))


def test_http_engine_without_base_url_raises() -> None:
    with pytest.raises(ConfigError, match="base_url"):
        build_engine("http", EngineSpec(model="policy"))


def test_http_engine_sends_tokens_and_reads_tokens(stub: Stub, monkeypatch) -> None:
    monkeypatch.setenv("RLHF_ENGINE_TOKEN", "secret")
    stub.answers = [(200, {"choices": [choice(1, [8, 2]), choice(0, [7], "length")]})]
    sampling = SamplingParams(
        num_samples=2,
        max_tokens=4,
        min_tokens=1,
        temperature=0.7,
        top_p=0.9,
        top_k=5,
        stop_token_ids=(2,),
        seed=11,
        min_p=0.1,
        repetition_penalty=1.2,
        stop=("Question:",),
    )
    first, second = ask(stub, sampling, "https://engine")
    # The answer came out of order; -0.25 * token is the stub's log-prob.
    assert (first.token_ids.tolist(), first.logprobs.tolist()) == ([7], [-1.75])
    assert (second.token_ids.tolist(), second.logprobs.tolist()) == ([8, 2], [-2.0, -0.5])
    assert (first.finish_reason, second.finish_reason) == (FinishReason.LENGTH, FinishReason.STOP)
    assert first.policy_version == 0
    (request,) = stub.requests
    assert request["path"] == "/v1/completions"
    assert request["prompt"] == [4, 5, 6]
    expected = {
        "model": "policy",
        "n": 2,
        "max_tokens": 4,
        "min_tokens": 1,
        "temperature": 0.7,
        "top_p": 0.9,
        "top_k": 5,
        "min_p": 0.1,
        "repetition_penalty": 1.2,
        "stop_token_ids": [2],
        "stop": ["Question:"],
        "skip_special_tokens": False,
        "logprobs": 0,
        "return_token_ids": True,
        "add_special_tokens": False,
        "request_seed": 11,
        "timeout_s": 60.0,
    }
    assert {key: request[key] for key in expected} == expected
    assert 0 <= request["seed"] < 2**63
    assert stub.headers[0]["Authorization"] == "Bearer secret"


def test_http_engine_leaves_no_sampling_to_the_server_and_sends_no_seed_without_one(stub: Stub) -> None:
    # vLLM's server takes what a request leaves out from the model's generation_config.json.
    stub.answers = [(200, {"choices": [choice(0, [7])]})]
    [completion] = ask(stub, url="http://engine/v1/")
    assert (completion.policy_version, completion.num_cached_tokens) == (0, None)
    neutral = {"temperature": 1.0, "top_p": 1.0, "top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0, "stop": []}
    [request] = stub.requests
    assert {name: request[name] for name in neutral} == neutral
    assert "seed" not in request and request["path"] == "/v1/completions"


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        ("not json", "answered no JSON"),
        ("[" * 100_000, "answered no JSON"),
        ({"choices": []}, "without 1 choices"),
        ({"choices": {"0": choice(0, [7])}}, "without 1 choices"),
        ([choice(0, [7])], "without 1 choices"),
        ({"choices": [{"index": 0, "text": "hi", "finish_reason": "stop"}]}, "return_token_ids"),
        ({"choices": [choice(0, [7]) | {"logprobs": {"token_logprobs": [None]}}]}, "answered 1 tokens with log-probs"),
        ({"choices": [choice(0, [7]) | {"token_ids": [7, 8]}]}, "answered 2 tokens with log-probs"),
        ({"choices": [choice(0, [7], "content_filter")]}, "content_filter"),
        (
            {"choices": [choice(0, [7, 8]) | {"policy_versions": [[4, 1]]}]},
            r"2 tokens with policy_versions \[\[4, 1\]\]",
        ),
    ],
    ids=["json", "deep", "choices", "object", "list", "tokens", "logprobs", "sizes", "reason", "versions"],
)
def test_http_engine_unusable_answer_raises(stub: Stub, answer: Any, message: str) -> None:
    stub.answers = [(200, answer)]
    with pytest.raises(EngineError, match=message):
        ask(stub)


def test_http_engine_long_prompt_raises_before_it_is_sent(stub: Stub) -> None:
    with pytest.raises(EngineError, match="exceed the engine's context of 64"):
        ask(stub, SamplingParams(max_tokens=62))
    assert stub.requests == []


def test_http_engine_of_a_server_without_control_calls_says_which_server_has_them(stub: Stub) -> None:
    stub.answers = [(404, {"detail": "Not Found"})]
    engine = mocked(stub)
    calls = (engine.pause("keep"), engine.resume(), engine.begin_weight_update(1), engine.sleep(), engine.wake_up())
    for call in (*calls, engine.finish_weight_update()):
        with pytest.raises(
            EngineError, match=r"/engine/\w+ does not exist\s+hint: only a server of `rlhf-rollout serve`"
        ):
            asyncio.run(call)
    names = ["pause", "resume", "begin_weight_update", "sleep", "wake_up", "finish_weight_update"]
    assert [request["path"] for request in stub.requests] == [f"/engine/{name}" for name in names]
    assert stub.requests[0]["mode"] == "keep" and stub.requests[2]["policy_version"] == 1
    with pytest.raises(WeightSyncError, match="sends buckets of shared_memory, not of ipc"):
        asyncio.run(engine.receive_weights(WeightBucket("ipc", (), "none")))


def test_http_engine_pause_returns_what_the_server_found(stub: Stub) -> None:
    engine = mocked(stub)
    stub.answers = [(200, {"num_in_flight": 3})]
    assert asyncio.run(engine.pause("keep")) == 3
    for answer in ({}, [3], {"num_in_flight": "3"}):
        stub.answers = [(200, answer)]
        with pytest.raises(EngineError, match="paused without the number of its requests"):
            asyncio.run(engine.pause("keep"))


@simulated
async def test_http_engine_control_call_that_hangs_ends_at_its_deadline() -> None:
    async def silent(request: httpx.Request) -> httpx.Response:
        await asyncio.sleep(1000)
        raise AssertionError

    engine = mocked(silent)
    for call, limit_s in (
        (engine.pause("drain"), 62),
        (engine.begin_weight_update(1), 62),
        (engine.finish_weight_update(), 2),
        (engine.pause("keep"), 2),
        (engine.resume(), 2),
        (engine.health(), 3),
    ):
        began = now()
        with pytest.raises(EngineError, match=rf"(`\w+`|/\w+) took longer than {limit_s} s"):
            await call
        assert now() - began == pytest.approx(limit_s)


def test_password_of_the_address_is_not_in_messages():
    engine = HttpEngine(EngineSpec(model="m", base_url="http://me:s3cret@127.0.0.1:9"), num_retries=0)
    for call in (engine.health, lambda: engine.generate(np.array([1]), SamplingParams(max_tokens=2))):
        with pytest.raises(EngineError, match=r"http://\*\*\*@127\.0\.0\.1:9/") as caught:
            asyncio.run(call())
        assert "s3cret" not in str(caught.value)


@pytest.mark.parametrize(
    ("timeout_s", "told_s", "says", "ends_s"),
    [
        (8.0, 8.0, r"a request to http://engine took longer than 8 s without a new token", 9.0),
        (None, 60.0, "no answer within 60 s", 61.0),
        (100.0, 60.0, "no answer within 60 s", 61.0),
    ],
)
def test_server_has_a_second_more_than_it_was_told_to_say_that_it_is_late(timeout_s, told_s, says, ends_s) -> None:
    asked = []

    async def silent(request: httpx.Request) -> httpx.Response:
        if request.url.path == "/v1/completions":
            asked.append(json.loads(request.content)["timeout_s"])
        await asyncio.sleep(1000)
        raise AssertionError

    async def scenario() -> float:
        with pytest.raises(EngineError, match=says):
            await mocked(silent, num_retries=0).generate(PROMPT, SamplingParams(max_tokens=4), timeout_s=timeout_s)
        return now()

    assert simulate(scenario()) == pytest.approx(ends_s)
    assert asked == [told_s]


def test_health_of_a_server_that_says_no_more_counts_the_requests_from_here() -> None:
    async def answer(request: httpx.Request) -> httpx.Response:
        if request.url.path == "/v1/completions":
            await asyncio.sleep(5)
            return httpx.Response(200, json={"choices": [choice(0, [7])]})
        return httpx.Response(200)

    async def scenario() -> Any:
        engine = mocked(answer)
        asking = [asyncio.create_task(engine.generate(PROMPT, SamplingParams(max_tokens=4))) for _ in range(2)]
        await asyncio.sleep(1)
        during = await engine.health()
        await asyncio.gather(*asking)
        return during, await engine.health()

    during, after = simulate(scenario())
    assert during == EngineHealth(policy_version=0, num_in_flight=2, is_paused=False, is_asleep=False)
    assert after == EngineHealth(policy_version=0, num_in_flight=0, is_paused=False, is_asleep=False)


@pytest.mark.parametrize(
    ("status", "content", "kind", "says"),
    [
        (200, "{}", EngineError, "http://engine.* without the engine's state: {}"),
        (200, "[1]", EngineError, r"http://engine.* without the engine's state: \[1\]"),
        (409, '{"kind": "WeightSyncError", "detail": "wrong bytes"}', WeightSyncError, "^wrong bytes"),
        (409, '{"kind": "Strange", "detail": "wrong mood"}', EngineError, "^wrong mood"),
        (422, '{"detail": "no"}', EngineError, 'refused the request with status 422: {"detail": "no"}$'),
        (422, "[1]", EngineError, r"refused the request with status 422: \[1\]$"),
        (401, "who?", EngineError, r"status 401: who\?\s+hint: set RLHF_ENGINE_TOKEN to the server's token"),
    ],
)
def test_answer_that_is_no_success_is_the_error_that_the_server_names(status, content, kind, says) -> None:
    with pytest.raises(kind, match=says):
        simulate(mocked(lambda request: httpx.Response(status, text=content)).health())


def test_weights_belong_to_an_update_and_long_ones_are_sent_in_pieces() -> None:
    sent = []
    weights = {"a": np.arange(600_000, dtype=np.float32)}  # 2.4 MB

    async def answer(request: httpx.Request) -> httpx.Response:
        sent.append((request.url.path, request.headers["content-length"], request.content))
        return httpx.Response(200, json={})

    async def scenario() -> None:
        engine = mocked(answer)
        with shared_memory_bucket(weights, checksum=True) as bucket:
            with pytest.raises(WeightSyncError, match="no weight update has begun"):
                await engine.receive_weights(bucket)
            await engine.begin_weight_update(7)
            await engine.receive_weights(bucket)
            await engine.finish_weight_update()
            with pytest.raises(WeightSyncError, match="no weight update has begun"):
                await engine.receive_weights(bucket)
        await engine.close()
        with pytest.raises(EngineError, match="the engine was closed"):
            await engine.resume()

    asyncio.run(scenario())
    (begin, _, version), (_, size, body), (finish, _, again) = sent
    assert (begin, finish) == ("/engine/begin_weight_update", "/engine/finish_weight_update")
    assert json.loads(version) == json.loads(again) == {"policy_version": 7}
    head, _, content = body.partition(b"\n")
    assert content == weights["a"].tobytes()
    assert int(size) == len(body)
    expected = {"policy_version": 7, "tensors": [["a", "float32", [600_000], 0, 2_400_000]]}
    assert json.loads(head) == expected | {"checksum": zlib.crc32(content)}


@pytest.mark.parametrize(("told", "known"), [(2, 2), (None, None), ("many", None)])
def test_tokens_from_the_cache_are_known_if_the_server_counts_them(stub: Stub, told, known) -> None:
    stub.answers = [(200, {"choices": [choice(0, [7]) | {"num_cached_tokens": told}]})]
    assert ask(stub)[0].num_cached_tokens == known
