"""How long a server may take for a request: as long as it writes. By a simulated clock."""

import asyncio

import httpx
import numpy as np
import pytest

from rlhf_data.errors import EngineError
from rlhf_rollout.commands.serve import create_app
from rlhf_rollout.engines.fake import FakeEngine
from rlhf_rollout.engines.http import HttpEngine
from rlhf_rollout.engines.spec import EngineSpec
from rlhf_rollout.protocols import SamplingParams
from simulated import now, simulate

PROMPT = np.array([3], np.int32)
LIMIT_S = 60.0
# Real servers end a request themselves; here only the client's limit counts.
SERVER = EngineSpec(model="fake", request_timeout_s=1e6, max_model_len=1024)


def client(transport):
    spec = EngineSpec(model="m", base_url="http://engine", request_timeout_s=LIMIT_S, max_model_len=1024)
    return HttpEngine(spec, num_retries=0, transport=transport)


def ask(engine):
    """Return the size of the answer and when it came."""

    async def scenario():
        [completion] = await engine.generate(PROMPT, SamplingParams(max_tokens=200))
        await asyncio.sleep(0)
        assert engine._listening.done()
        return len(completion.token_ids), now()

    return simulate(scenario())


class Server(FakeEngine):
    """An answer has 200 tokens, one per 10 s, of which `num_written` are written."""

    def __init__(self, num_written=200):
        super().__init__(SERVER, script=lambda tokens, seed: [7] * 199 + [0], token_latency_s=self.pace)
        self.num_written = num_written

    def pace(self, tokens, seed):
        asyncio.get_running_loop().call_later(10.0 * self.num_written + 1, self._writing.close)
        return 10.0

    async def generate(self, *arguments, timeout_s, **options):
        return await super().generate(*arguments, **options)  # with its own limit, not the client's


def test_answer_takes_as_long_as_the_server_writes():
    assert ask(client(httpx.ASGITransport(create_app(Server(), {})))) == (200, pytest.approx(2000, abs=1))


@pytest.mark.parametrize("num_written", [0, 50])
def test_server_that_writes_nothing_any_more_fails(num_written):
    async def scenario():
        with pytest.raises(EngineError, match="no answer within 60 s"):
            await client(httpx.ASGITransport(create_app(Server(num_written), {}))).generate(
                PROMPT, SamplingParams(max_tokens=200)
            )
        return now()

    last_s = 10.0 * num_written
    assert last_s + LIMIT_S <= simulate(scenario()) < last_s + LIMIT_S * 1.3


class Servers:
    """Answers after `lasts_s`; `metrics` returns what the servers tell, one after the other, at a time."""

    def __init__(self, lasts_s, metrics):
        self.lasts_s = lasts_s
        self.metrics = metrics
        self.num_asked = 0

    async def __call__(self, request):
        if request.url.path == "/metrics":
            told = self.metrics[self.num_asked % len(self.metrics)](now())
            self.num_asked += 1
            return httpx.Response(200 if told else 404, text=told or "no such page")
        if request.url.path.startswith("/engine/"):
            return httpx.Response(200, json={"num_in_flight": 1})
        await asyncio.sleep(self.lasts_s)
        logprobs = {"token_logprobs": [-1.0]}
        return httpx.Response(
            200, json={"choices": [{"token_ids": [7], "logprobs": logprobs, "finish_reason": "stop"}]}
        )


def vllm(number):
    lines = [
        "# TYPE vllm:generation_tokens_total counter",
        'vllm:generation_tokens_total{engine="0",model_name="m"} 5.0',
        f'vllm:generation_tokens_total{{engine="1",model_name="m"}} {number:.0f}',
        "python_gc_seconds_total 1e-3",
    ]
    return "\n".join(lines)


@pytest.mark.parametrize(
    ("metrics", "is_whole"),
    [
        ([lambda second: vllm(second)], True),
        ([lambda second: vllm(77)], False),
        ([lambda second: vllm(77) + f"\nprocess_cpu_seconds_total {second}"], False),
        ([lambda second: None], False),
        ([lambda second: vllm(77), lambda second: vllm(88)], False),  # two servers behind one address, both hang
        ([lambda second: vllm(777), lambda second: vllm(second)], True),
    ],
)
def test_counters_of_a_server_tell_whether_it_writes(metrics, is_whole):
    engine = client(httpx.MockTransport(Servers(1000.0, metrics)))
    if is_whole:
        assert ask(engine) == (1, pytest.approx(1000, abs=1))
    else:
        with pytest.raises(EngineError, match="no answer within 60 s"):
            ask(engine)


def test_server_whose_metrics_hang_or_fail_has_the_limit_of_a_request():
    async def answer(request):
        if request.url.path == "/metrics" and now() > 20:
            raise httpx.ConnectError("gone")
        await asyncio.sleep(1e4)

    async def scenario():
        with pytest.raises(EngineError, match="no answer within 60 s"):
            await client(httpx.MockTransport(answer)).generate(PROMPT, SamplingParams())
        return now()

    assert LIMIT_S <= simulate(scenario()) < LIMIT_S * 1.3


@pytest.mark.parametrize(("lasts_s", "expected"), [(540.0, "answered at 540"), (1000.0, "failed at 561")])
def test_limit_of_a_request_counts_from_the_end_of_a_pause(lasts_s, expected):
    async def scenario():
        engine = client(httpx.MockTransport(Servers(lasts_s, [lambda second: None])))
        asking = asyncio.create_task(engine.generate(PROMPT, SamplingParams()))
        await asyncio.sleep(10)
        assert await engine.pause("keep") == 1
        await asyncio.sleep(490)
        await engine.resume()
        try:
            await asking
        except EngineError:
            return f"failed at {min(now(), 561):.0f}" if now() < 570 else "failed late"
        return f"answered at {now():.0f}"

    assert simulate(scenario()) == expected
