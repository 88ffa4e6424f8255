"""`serve` over real sockets: what a trainer elsewhere does with it, what it refuses, and what it tells about itself."""

import asyncio
import dataclasses
import json
import os
import re
import signal
import subprocess
import sys
import time
import zlib

import httpx
import numpy as np
import openai
import pytest
import safetensors.numpy
from fastapi import FastAPI

from engine_testing import wait_until_up
from rlhf_data.errors import EngineError, WeightSyncError
from rlhf_models.testing import tiny_model_dir
from rlhf_rollout.commands import serve
from rlhf_rollout.commands.main import main
from rlhf_rollout.commands.serve import create_app
from rlhf_rollout.engines import EngineSpec, build_engine
from rlhf_rollout.engines.adapter_files import LoraModule
from rlhf_rollout.engines.fake import FakeEngine
from rlhf_rollout.engines.http import HttpEngine
from rlhf_rollout.host import free_port
from rlhf_rollout.http import sessions
from rlhf_rollout.protocols import EngineHealth, SamplingParams
from rlhf_rollout.router import EngineRouter
from rollout_testing import app_server, shared_memory_bucket

PROMPT = np.array([4, 5, 6], np.int32)
# More than one piece on its way, and weights that do not fill their places.
WEIGHTS = {"a": np.arange(700_001, dtype=np.float32), "b": np.ones((3, 5), np.float16)}


def client(url):
    return HttpEngine(EngineSpec(model="m", base_url=url, health_timeout_s=60.0))


async def send(engine, version, weights=WEIGHTS, *, checksum=True):
    await engine.begin_weight_update(version)
    for name, array in weights.items():
        with shared_memory_bucket({name: array}, checksum=checksum) as bucket:
            await engine.receive_weights(bucket)
    await engine.finish_weight_update()


def test_command_in_another_process_answers_token_for_token_as_the_engine_here(tmp_path):
    """A trainer's round: generate, update the weights, generate with the new version."""
    port = free_port()
    words = ["serve", "--engine", "fake", "--port", str(port), "--max_model_len", "64"]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    command = [sys.executable, "-m", "rlhf_rollout.commands.main", *words]
    process = subprocess.Popen(command, env=environment | {"TMPDIR": str(tmp_path)}, stderr=subprocess.PIPE, text=True)
    url = f"http://127.0.0.1:{port}"
    try:
        wait_until_up(url, process)
        here = build_engine("fake", EngineSpec(model="fake"))
        there = build_engine("http", EngineSpec(model="fake", base_url=url))

        async def rounds(engine):
            found = []
            for version in (3, 7):
                await send(engine, version)
                for seed in (11, 12):
                    sampling = SamplingParams(num_samples=3, max_tokens=20, seed=seed)
                    found += await engine.generate(PROMPT + seed, sampling)
                found += await engine.generate(PROMPT, SamplingParams(temperature=0.0))
            with pytest.raises(EngineError, match="exceed the engine's context of 64 tokens"):
                await there.generate(PROMPT, SamplingParams(max_tokens=62))
            return [
                [(span.policy_version, span.token_ids.tolist(), span.logprobs.tolist()) for span in completion.spans]
                for completion in found
            ]

        assert asyncio.run(rounds(here)) == asyncio.run(rounds(there))
        assert httpx.get(f"{url}/version").json() == {
            "engine": "fake",
            "model": "fake",
            "max_model_len": 64,
            "policy_version": 7,
        }
    finally:
        process.send_signal(signal.SIGINT)
        said = process.communicate(timeout=60)[1]
    assert f"POST to {url}/v1/completions" in said and "Traceback" not in said


def test_weights_arrive_byte_for_byte_and_wrong_ones_are_refused():
    engine = FakeEngine()
    with app_server(create_app(engine, {})) as url:
        asyncio.run(send(client(url), 5))
        assert engine.weight_checksums == {name: zlib.crc32(array.tobytes()) for name, array in WEIGHTS.items()}
        assert engine.policy_version == 5

        async def of_two_trainers():
            first, second = client(url), client(url)
            await first.begin_weight_update(6)
            await second.begin_weight_update(9)
            with shared_memory_bucket(WEIGHTS) as bucket:
                with pytest.raises(WeightSyncError, match=r"version 6 arrived in the update to version 9\s+hint: one"):
                    await first.receive_weights(bucket)
                with pytest.raises(WeightSyncError, match="version 6 arrived"):
                    await first.finish_weight_update()
                await second.receive_weights(bucket)
            await second.finish_weight_update()

        asyncio.run(of_two_trainers())
        assert engine.policy_version == 9


HEAD = {"policy_version": 1, "tensors": [["a", "float32", [2], 0, 8]]}


NO_BUCKETS = [
    (json.dumps(HEAD).encode() + b"\n1234567", 409, "a bucket of 8 bytes arrived with 7 bytes"),
    (json.dumps(HEAD).encode() + b"\n123456789", 409, "a bucket of 8 bytes arrived with 9 bytes"),
    (json.dumps(HEAD | {"checksum": 1}).encode() + b"\n12345678", 409, "has checksum 0x9ae0daaf"),
    (json.dumps(HEAD | {"policy_version": 2}).encode() + b"\n12345678", 409, "in the update to version 1"),
    (json.dumps(HEAD | {"tensors": [["a", "float32", [2], -8, 8]]}).encode() + b"\n", 422, "greater_than_equal"),
    (b"12345678", 422, "model_type"),
    (b"\n12345678", 422, "json_invalid"),
    (b"1" * 200, 413, "the first line of a bucket is longer than 100 bytes"),
    (json.dumps(HEAD).encode() + b"\n" + b"1" * 1000, 413, "longer than 900 bytes; send smaller buckets"),
]


def test_bytes_that_are_no_bucket_are_refused(monkeypatch):
    monkeypatch.setattr(serve, "MAX_HEAD_BYTES", 100)
    monkeypatch.setattr(serve, "MAX_BUCKET_BYTES", 900)
    engine = FakeEngine()
    with app_server(create_app(engine, {})) as url:
        early = httpx.post(url + "/engine/receive_weights", content=json.dumps(HEAD).encode() + b"\n12345678")
        assert early.json() == {"kind": "WeightSyncError", "detail": "no weight update has begun"}
        for body, status, says in NO_BUCKETS:
            httpx.post(url + "/engine/begin_weight_update", json={"policy_version": 1})
            answer = httpx.post(url + "/engine/receive_weights", content=body)
            assert (answer.status_code, says in answer.text) == (status, True), answer.text
            assert engine.weight_checksums == {}


UNANSWERABLE = [
    ({"prompt": "text"}, 422, "list"),
    ({"prompt": [2**31]}, 422, "less_than"),
    ({"prompt": [1], "stream": True}, 422, "extra_forbidden"),
    ({"prompt": [1], "logprobs": 5}, 422, "literal_error"),
    ({"prompt": [1], "n": 5000}, 422, "less_than_equal"),
    ({"prompt": [1], "top_p": 0}, 422, "``top_p`` is 0.0; it must be above 0 and at most 1"),
    ({"prompt": [300]}, 409, "token id 300 is outside"),
    ({"prompt": []}, 409, "the prompt has no tokens"),
    ({"prompt": [1], "timeout_s": 0}, 422, "greater_than"),
    ({"prompt": [1], "min_p": 2}, 422, "``min_p`` is 2.0; it must be at least 0 and at most 1"),
    ({"prompt": [1], "stop": [""]}, 422, "stop must be a list of texts"),
]


def test_requests_that_cannot_be_answered_in_full_are_refused():
    with app_server(create_app(FakeEngine(), {})) as url:
        for body, status, says in UNANSWERABLE:
            answer = httpx.post(url + "/v1/completions", json=body)
            assert (answer.status_code, says in answer.text) == (status, True), answer.text
        assert httpx.post(url + "/v1/completions", json={"prompt": [1], "seed": 3}).status_code == 200


def test_token_guards_every_path_and_what_is_mounted(monkeypatch):
    app = create_app(FakeEngine(), {}, token="secret")
    inner = FastAPI()
    inner.add_api_route("/hello", lambda: "there")
    app.mount("/more", inner)
    given = {"Authorization": "Bearer secret"}
    with app_server(app) as url:
        for path in ("/metrics", "/version", "/sessions/x", "/more/hello", "/more/health"):
            assert httpx.get(url + path).status_code == 401
        assert httpx.get(url + "/more/hello", headers=given).json() == "there"
        assert httpx.get(url + "/health").json()["status"] == "ok"
        sampling = SamplingParams(seed=1)
        monkeypatch.setenv("RLHF_ENGINE_TOKEN", "secret")
        assert asyncio.run(client(url).generate(PROMPT, sampling))
        monkeypatch.setenv("RLHF_ENGINE_TOKEN", "wrong")
        with pytest.raises(EngineError, match=r"(?s)status 401.*hint: set RLHF_ENGINE_TOKEN"):
            asyncio.run(client(url).generate(PROMPT, sampling))


def metric(url, name):
    [value] = re.findall(rf"^rlhf_rollout_{re.escape(name)} (\S+)$", httpx.get(url + "/metrics").text, re.MULTILINE)
    return float(value)


def test_metrics_count_what_happened_and_a_client_that_goes_frees_the_engine():
    engine = FakeEngine(script=lambda prompt, seed: [7, 8, 9, 0], token_latency_s=0.001)
    with app_server(create_app(engine, {})) as url:
        asyncio.run(client(url).generate(PROMPT, SamplingParams(num_samples=2)))
        with pytest.raises(EngineError, match="is outside"):
            asyncio.run(client(url).generate(PROMPT + 300, SamplingParams()))
        asyncio.run(send(client(url), 4))

        async def leave():
            await client(url).pause("drain")
            task = asyncio.create_task(client(url).generate(PROMPT, SamplingParams()))
            while (await client(url).health()).num_in_flight == 0:
                await asyncio.sleep(0.01)
            assert metric(url, "requests_in_flight") == 1
            task.cancel()
            while (await client(url).health()).num_in_flight:
                await asyncio.sleep(0.01)

        asyncio.run(asyncio.wait_for(leave(), 60))
        deadline = time.monotonic() + 60
        while metric(url, "requests_in_flight"):
            assert time.monotonic() < deadline
        for outcome, count in (("ok", 1), ("failed", 1), ("cancelled", 1)):
            assert metric(url, f'requests_total{{outcome="{outcome}"}}') == count
        assert metric(url, "prompt_tokens_total") == 3 and metric(url, "generated_tokens_total") == 8
        assert metric(url, "request_seconds_count") == 3
        assert metric(url, 'request_seconds_bucket{le="+Inf"}') == 3
        assert metric(url, "policy_version") == 4 and metric(url, "weight_updates_total") == 1
        assert metric(url, "engine_up") == 1
        state = EngineHealth(policy_version=4, num_in_flight=0, is_paused=True, is_asleep=False)
        assert asyncio.run(client(url).health()) == state
        asyncio.run(engine.close())
        assert metric(url, "engine_up") == 0
        assert httpx.get(url + "/health").status_code == 503
        with pytest.raises(EngineError, match=r"^the engine was closed$"):
            asyncio.run(client(url).health())


class Caching(FakeEngine):
    """An engine that has two tokens of each prompt in its cache."""

    async def generate(self, token_ids, sampling, **options):
        completions = await super().generate(token_ids, sampling, **options)
        return [dataclasses.replace(completion, num_cached_tokens=2) for completion in completions]


def test_sessions_are_counted_and_can_be_ended(monkeypatch):
    script = {"script": lambda prompt, seed: [7, 8, 9, 0]}
    with app_server(create_app(Caching(**script), {})) as url:
        router = EngineRouter([client(url)])

        async def ask(name, samples=1):
            await router.generate(PROMPT, SamplingParams(num_samples=samples), conversation=name)

        for name, samples in (("g 1/0", 1), ("g 1/0", 2), ("other", 1), (None, 1)):
            asyncio.run(ask(name, samples))
        used = {"requests": 2, "prompt_tokens": 6, "cached_prompt_tokens": 4, "generated_tokens": 12}
        place = f"{url}/sessions/g%201/0"
        assert httpx.get(place).json() == used
        assert (metric(url, "sessions"), metric(url, "cached_prompt_tokens_total")) == (2, 8)
        # The client tells the router of cached tokens, too.
        assert router.prompt_tokens.tolist() == [15, 10]  # per completion
        assert httpx.delete(place).json() == used
        assert [httpx.get(place).status_code, httpx.delete(place).status_code] == [404, 404]
        assert metric(url, "sessions") == 1
        monkeypatch.setattr(sessions, "IDLE_S", 0.0)
        assert metric(url, "sessions") == 0
        assert httpx.get(f"{url}/sessions/other").status_code == 404


def test_end_of_a_session_cancels_its_requests_and_no_others():
    engine = FakeEngine()
    with app_server(create_app(engine, {})) as url:

        async def end():
            here = client(url)
            await here.pause("drain")
            mine, other = (
                asyncio.create_task(here.generate(PROMPT, SamplingParams(), conversation=name)) for name in "ab"
            )
            while (await here.health()).num_in_flight < 2:
                await asyncio.sleep(0.01)
            ended = await asyncio.to_thread(httpx.delete, f"{url}/sessions/a")
            assert ended.json()["requests"] == 1
            with pytest.raises(EngineError, match=r"status 410: .*the session of the request has ended"):
                await mine
            await here.resume()
            assert len(await other) == 1

        asyncio.run(asyncio.wait_for(end(), 60))
        assert metric(url, 'requests_total{outcome="cancelled"}') == 1
        assert metric(url, "sessions") == 1


def test_server_in_front_of_servers_hands_sessions_on():
    with app_server(create_app(FakeEngine(), {})) as url, app_server(create_app(client(url), {})) as front:
        asyncio.run(client(front).generate(PROMPT, SamplingParams(), conversation="chat"))
        asyncio.run(client(front).generate(PROMPT, SamplingParams()))
        assert httpx.get(f"{front}/sessions/chat").json()["requests"] == 1
        assert httpx.get(f"{url}/sessions/chat").json()["prompt_tokens"] == 3
        assert metric(url, "sessions") == 1


def test_sessions_beyond_the_limit_are_forgotten_the_oldest_first(monkeypatch):
    monkeypatch.setattr(sessions, "_MAX_SESSIONS", 2)
    with app_server(create_app(FakeEngine(), {})) as url:
        for name in ("a", "b", "a", "c"):
            asyncio.run(client(url).generate(PROMPT, SamplingParams(), conversation=name))
        found = [httpx.get(f"{url}/sessions/{name}").status_code for name in "abc"]
    assert found == [200, 404, 200]


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--engine", "fake", "--host", "0.0.0.0"], "and no token is set\n\nhint: set RLHF_ENGINE_TOKEN here"),
        ([], "--pretrain is missing: engine vllm needs a model"),
        (["--engine", "http", "--pretrain", "m"], "--base_url is missing"),
        (["--pretrain", "./none"], "there is no model folder"),
        (["--engine", "fake", "--max_model_len", "1"], "--max_model_len is 1; it must be at least 2"),
    ],
    ids=" ".join,
)
def test_command_that_cannot_serve_is_refused(capsys, monkeypatch, words, says):
    monkeypatch.delenv("RLHF_ENGINE_TOKEN", raising=False)
    assert main(["serve", *words]) == 2
    assert says in capsys.readouterr().err


class Recorder(FakeEngine):
    """Keeps the adapter of each request."""

    def __init__(self):
        super().__init__()
        self.adapters = []

    async def generate(self, token_ids, sampling, **options):
        self.adapters.append(sampling.adapter)
        return await super().generate(token_ids, dataclasses.replace(sampling, adapter=None), **options)


def test_requests_choose_an_adapter_by_the_name_of_a_model_that_exists():
    engine = Recorder()
    modules = [LoraModule("math", "/adapters/math"), LoraModule("code", "/adapters/code")]
    with app_server(create_app(engine, {"model": "base", "max_model_len": 64}, modules=modules)) as url:
        for model in (None, "base", "math", "code"):
            body = {"prompt": [4], **({} if model is None else {"model": model})}
            assert httpx.post(f"{url}/v1/completions", json=body).status_code == 200
        sampling = SamplingParams(adapter="code")
        asyncio.run(client(url.removesuffix("/")).generate(PROMPT, sampling))
        asyncio.run(HttpEngine(EngineSpec(model="math", base_url=url)).generate(PROMPT, SamplingParams()))
        relay = HttpEngine(EngineSpec(model="base", base_url=url))
        with app_server(create_app(relay, {"model": "base"})) as front:
            for model in (None, "code"):
                body = {"prompt": [4], **({} if model is None else {"model": model})}
                assert httpx.post(f"{front}/v1/completions", json=body).status_code == 200
        assert engine.adapters == [None, None, "math", "code", "code", "math", None, "code"]
        answer = httpx.post(f"{url}/v1/completions", json={"prompt": [4], "model": "maths"})
        assert (answer.status_code, answer.json()["error"]["param"]) == (404, "model")
        assert answer.json()["error"]["message"] == "The model `maths` does not exist; known: base, math, code"
        found = openai.OpenAI(base_url=f"{url}/v1", api_key="none").models.list().data
        assert [(model.id, model.root, model.parent, model.max_model_len) for model in found] == [
            ("base", "base", None, 64),
            ("math", "/adapters/math", "base", 64),
            ("code", "/adapters/code", "base", 64),
        ]
        with pytest.raises(openai.NotFoundError, match="`maths` does not exist"):
            openai.OpenAI(base_url=f"{url}/v1", api_key="none").completions.create(model="maths", prompt=[4])
    with app_server(create_app(Recorder(), {"model": "base"})) as url:  # one model answers to any name
        assert httpx.post(f"{url}/v1/completions", json={"prompt": [4], "model": "maths"}).status_code == 200


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--engine", "fake", "--lora_modules", "a=x"], "engine fake applies no adapters"),
        (["--lora_modules", "a=x,a=y"], "--lora_modules has two adapters a: x and y"),
        (["--lora_modules", "m=x"], "--lora_modules calls an adapter m, as --pretrain calls the model"),
        (["--lora_modules", "a=x", "--vllm_speculative", "ngram"], "is not tested with --lora_modules"),
        (["--lora_modules", "a=x", "--vllm_quantization", "fp8", "--bf16"], "not tested with --vllm_quantization fp8"),
    ],
)
def test_adapters_that_the_engine_cannot_have_are_refused_before_it_starts(capsys, words, says):
    assert main(["serve", "--pretrain", "m", *words, "--dry_run"]) == 2
    assert says in capsys.readouterr().err


def test_dry_run_looks_at_adapters_and_tells_of_those_of_another_model(tmp_path, capsys):
    model = tiny_model_dir(tmp_path / "model")
    adapter = tmp_path / "adapter"
    words = ["serve", "--pretrain", str(model), "--lora_modules", f"math={adapter}", "--dry_run"]
    assert main(words) == 2
    assert f"there is no adapter math in {adapter}" in capsys.readouterr().err
    adapter.mkdir()
    config = {"peft_type": "LORA", "lora_alpha": 1, "base_model_name_or_path": "owner/other"}
    (adapter / "adapter_config.json").write_text(json.dumps(config))
    layer = "base_model.model.model.layers.0.self_attn.q_proj.lora_"
    tensors = {f"{layer}A.weight": np.ones((2, 64), np.float32), f"{layer}B.weight": np.ones((64, 2), np.float32)}
    safetensors.numpy.save_file(tensors, adapter / "adapter_model.safetensors")
    assert main(words) == 0
    assert f"notice: the adapter math was trained on owner/other, and is not on {model}" in capsys.readouterr().err
    words[2] = "owner/other"  # a hub name, whose model is not downloaded
    assert main(words) == 0
    assert "notice" not in capsys.readouterr().err
