"""What all users of the HTTP client do with servers that are busy, slow, broken or not trusted, in simulated time."""

import asyncio
import gzip
import json
import os
import subprocess
import sys
from types import SimpleNamespace

import httpx
import numpy as np
import pytest

from record_testing import make_prompt, make_rollout
from rlhf_data.errors import ConfigError, EngineError
from rlhf_rollout.engines import EngineSpec
from rlhf_rollout.engines.http import HttpEngine
from rlhf_rollout.http import client as client_module
from rlhf_rollout.http.client import Client
from rlhf_rollout.protocols import SamplingParams
from rlhf_rollout.rewards.judge import KEY_VARIABLE, JudgeReward
from rlhf_rollout.rewards.remote import RemoteReward
from rlhf_rollout.rewards.sources import CallOptions, JudgeOptions
from rollout_testing import json_server, said
from simulated import now, simulate

COMPLETION = {"token_ids": [7], "logprobs": {"token_logprobs": [-0.25]}, "finish_reason": "stop"}
GOOD = {"reward": {"rewards": [1.0]}, "judge": said("<score>10</score>"), "engine": {"choices": [COMPLETION]}}
VARIABLES = {"reward": "RLHF_REMOTE_RM_TOKEN", "judge": KEY_VARIABLE, "engine": "RLHF_ENGINE_TOKEN"}
FIRST_PAUSE_S = {"reward": 0.5, "judge": 0.25, "engine": 0.5}
PASSING = [408, 425, 429, 500, 502, 503, 504]


class User:
    """Asks a server once, as a part of the product does.

    Attributes:
        kind: which part.
        requests: what the server was asked.
    """

    def __init__(self, kind, rubric):
        self.kind, self.rubric = kind, rubric
        self.requests = []

    def make(self, url="https://host", *, timeout_s=20.0, transport=None, **options):
        if self.kind == "reward":
            return RemoteReward([url], CallOptions(timeout_s=timeout_s), transport=transport, **options)
        if self.kind == "engine":
            spec = EngineSpec(model="m", base_url=url, request_timeout_s=timeout_s)
            return HttpEngine(spec, transport=transport, **options)
        reward = JudgeReward(self.rubric, CallOptions(timeout_s=timeout_s, judge=JudgeOptions(url=url, model="m")))
        reward.judge._client.transport = transport
        return reward

    def ask(self, *answers, **options):
        """Give the `answers` one after the other, the last one again and again; None is a good one.

        Returns what went wrong, "" for nothing, and how many seconds it took.
        """

        async def answer(request):
            if request.url.path == "/metrics":
                return httpx.Response(404)
            self.requests.append(request)
            given = answers[min(len(self.requests), len(answers)) - 1]
            given = httpx.Response(200, json=GOOD[self.kind]) if given is None else given
            return await given(request) if callable(given) else given

        async def run():
            asked = self.make(transport=httpx.MockTransport(answer), **options)
            try:
                return await self._problem(asked), now()
            finally:
                await asked.close()

        return simulate(run())

    async def _problem(self, asked):
        if self.kind == "engine":
            try:
                [completion] = await asked.generate(np.array([4, 5], np.int32), SamplingParams())
            except EngineError as error:
                return str(error)
            assert completion.token_ids.tolist() == [7]
            return ""
        prompt = make_prompt("2+2=", "4")
        [verdict] = await asked.score(prompt, [make_rollout(prompt, "4")])
        assert verdict.reward == (None if verdict.detail else 1.0)
        return verdict.detail


@pytest.fixture(params=["reward", "judge", "engine"])
def user(request, tmp_path, monkeypatch):
    for module in ("rewards.judge", "rewards.remote", "http.breaker"):
        monkeypatch.setattr(f"rlhf_rollout.{module}.time", SimpleNamespace(monotonic=now))
    monkeypatch.setattr("rlhf_rollout.http.batcher.MAX_WAIT_S", 0.0)
    for variable in VARIABLES.values():
        monkeypatch.delenv(variable, raising=False)
    (tmp_path / "polite.txt").write_text("Is it polite?", encoding="utf-8")
    return User(request.param, str(tmp_path / "polite.txt"))


def status(number, text="", **headers):
    return lambda request: _later(httpx.Response(number, text=text, headers=headers))


async def _later(response):
    return response


async def silent(request):
    await asyncio.sleep(1000)


async def trickle(request):
    class Trickle(httpx.AsyncByteStream):
        async def __aiter__(self):
            while True:  # every read is quick, and there is no end of them
                await asyncio.sleep(0.01)
                yield b" "

    return httpx.Response(200, stream=Trickle())


# -- tries again -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", PASSING)
def test_temporary_status_is_asked_again_after_the_pause_that_the_server_names(user, number):
    problem, seconds = user.ask(*[status(number, "later", **{"Retry-After": "0.7"})] * 3, None)
    assert (problem, len(user.requests), seconds) == ("", 4, pytest.approx(2.1))
    assert len({request.content for request in user.requests}) == 1


@pytest.mark.parametrize("retry_after", [None, "soon", "", "0", "-1", "nan", "inf"])
def test_pause_without_one_that_the_server_names_is_random_up_to_twice_the_shortest(user, retry_after):
    headers = {} if retry_after is None else {"Retry-After": retry_after}
    problem, seconds = user.ask(status(503, **headers), None)
    assert problem == ""
    assert FIRST_PAUSE_S[user.kind] <= seconds <= 2 * FIRST_PAUSE_S[user.kind]


@pytest.mark.parametrize("number", [400, 401, 404, 422, 302])
def test_refused_request_is_not_repeated(user, number):
    problem, seconds = user.ask(status(number, "no"))
    assert f"status {number}: no" in problem
    assert (len(user.requests), seconds) == (1, 0)


@pytest.mark.parametrize("error", [httpx.ConnectError, httpx.ConnectTimeout, httpx.RemoteProtocolError])
def test_broken_connection_is_tried_again_and_named(user, error):
    def broken(request):
        raise error("nobody is there")

    assert user.ask(broken, None)[0] == ""
    problem, _ = user.ask(broken, timeout_s=1.5)
    assert f"{error.__name__}: nobody is there" in problem and len(user.requests) > 3


@pytest.mark.parametrize("asked_s", ["60", "86400"])
def test_pause_of_a_server_is_not_waited_for_longer_than_half_a_minute_or_beyond_the_deadline(user, asked_s):
    problem, seconds = user.ask(status(429, "tomorrow", **{"Retry-After": asked_s}), None, timeout_s=60.0)
    if user.kind == "judge":  # its time limit is for all tries
        assert "asked 1 times within 60 s" in problem and seconds == 0
    else:
        assert (problem, seconds) == ("", 30)


def test_pauses_grow_up_to_half_a_minute(user, monkeypatch):
    monkeypatch.setattr(client_module.random, "uniform", lambda low, high: high)
    if user.kind == "judge":
        user.ask(status(503), timeout_s=200.0)
        # 0.5 + 1 + 2 + 4 + 8 + 16 = 31.5 s, then 30 s each while they end before the deadline.
        assert len(user.requests) == 1 + 6 + 5
    else:
        _, seconds = user.ask(status(503), num_retries=8)
        # 1 + 2 + 4 + 8 + 16 = 31 s, then three of 30 s.
        assert (seconds, len(user.requests)) == (pytest.approx(31 + 3 * 30), 9)


@pytest.mark.parametrize(
    "number", [300, 400, 401, 404, 408, 409, 413, 414, 422, 423, 425, 426, 429, 500, 501, 503, 505]
)
def test_status_says_whether_another_try_or_another_batch_may_succeed(number):
    transport = httpx.MockTransport(lambda request: httpx.Response(number))

    async def ask():
        return await Client(["http://host"], timeout_s=1.0, transport=transport).send("http://host", {})

    failure = asyncio.run(ask())
    assert (failure.status, failure.passing) == (number, number in PASSING)
    assert failure.of_sample == (number in (400, 413, 422, 500))


@pytest.mark.parametrize("user", ["judge"], indirect=True)
def test_server_may_be_asked_more_often_than_calls_may_be_nested(user):
    busy = [status(503, **{"Retry-After": "0.001"})] * 1100
    problem, seconds = user.ask(*busy, None)
    assert (problem, seconds) == ("", pytest.approx(1.1))


# -- answers that do not come, or not as they should -----------------------------------------------------------------


@pytest.mark.parametrize("slow", [silent, trickle])
def test_second_timeout_ends_the_tries(user, slow):
    problem, seconds = user.ask(slow, timeout_s=2.0)
    assert "no answer within 2 s" in problem
    num_tries, grace_s = {"judge": (1, 0), "reward": (2, 0), "engine": (2, 1)}[user.kind]
    assert len(user.requests) == num_tries
    pauses_s = (num_tries - 1) * 2 * FIRST_PAUSE_S[user.kind]
    least_s = num_tries * (2 + grace_s)
    assert least_s <= seconds <= 1.2 * least_s + pauses_s


@pytest.mark.parametrize("is_packed", [False, True])
def test_answer_is_read_up_to_a_limit(user, monkeypatch, is_packed):
    limit = 2**22 if user.kind == "judge" else 1000
    monkeypatch.setattr(client_module, "MAX_BYTES", 1000)

    def answer(size):
        body = json.dumps(GOOD[user.kind]).encode().ljust(size)
        headers = {"Content-Encoding": "gzip"} if is_packed else {}
        return status_of(200, gzip.compress(body) if is_packed else body, headers)

    assert user.ask(answer(limit))[0] == ""
    assert f"ReadError: the answer is longer than {limit} bytes" in user.ask(answer(limit + 1), timeout_s=0.5)[0]


def status_of(number, content, headers):
    return lambda request: _later(httpx.Response(number, content=content, headers=headers))


def test_answer_that_cannot_be_unpacked_is_a_failure(user):
    class Body(httpx.AsyncByteStream):
        async def __aiter__(self):
            yield b"no gzip"

    def answer(request):
        return _later(httpx.Response(200, headers={"Content-Encoding": "gzip"}, stream=Body()))

    assert "DecodingError" in user.ask(answer, timeout_s=0.5)[0]


def test_long_answer_is_told_by_its_beginning(user):
    problem, _ = user.ask(status(404, "x" * 301))
    assert problem.partition("\n")[0].endswith("status 404: " + "x" * 300 + " ...")
    problem, _ = user.ask(status(404, "x" * 300))
    assert problem.partition("\n")[0].endswith("status 404: " + "x" * 300)


# -- tokens ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [200, 401, 500])
def test_token_is_sent_and_never_shown(user, monkeypatch, number):
    monkeypatch.setenv(VARIABLES[user.kind], " s3cret-key\n")
    problem, _ = user.ask(status(number, "you sent Bearer s3cret-key"), timeout_s=0.3)
    assert user.requests[0].headers["Authorization"] == "Bearer s3cret-key"
    assert "you sent Bearer ***" in problem and "s3cret" not in problem


def test_token_is_not_sent_to_where_a_server_points(user, monkeypatch):
    monkeypatch.setenv(VARIABLES[user.kind], "s3cret-key")
    assert "status 307" in user.ask(status(307, "there", Location="https://thief/x"))[0]
    assert [request.url.host for request in user.requests] == ["host"]


def test_each_server_gets_its_own_token_and_no_message_has_the_query_of_a_url(monkeypatch):
    monkeypatch.setenv("RLHF_REMOTE_RM_TOKEN", "https://far=t0ken")
    sent = []

    def answer(request):
        sent.append(request.headers.get("Authorization"))
        return httpx.Response(500, text=f"you asked {request.url}")

    async def run():
        client = Client([far, here], timeout_s=1.0, transport=httpx.MockTransport(answer))
        return [(await client.send(url, {})).detail for url in (far, here)]

    far, here = "https://far/get_reward?key=s3cret", "http://127.0.0.1:5000/get_reward"
    details = asyncio.run(run())
    assert sent == ["Bearer t0ken", None]
    assert details[0] == "https://far/get_reward?***: status 500: you asked https://far/get_reward?***"


@pytest.mark.parametrize("token", ["two\nlines", "schlüssel"])
def test_token_that_no_header_can_carry_is_refused_unseen(user, monkeypatch, token):
    monkeypatch.setenv(VARIABLES[user.kind], token)
    with pytest.raises(ConfigError, match=f"the token in {VARIABLES[user.kind]} has characters") as caught:
        user.make()
    assert token not in str(caught.value)


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("host/v1", "is no URL"),
        ("ftp://host/v1", "is no URL"),
        ("http://", "is no URL"),
        ("", "is no URL"),
        ("http://ho st:5000x/", "Invalid"),
        ("http://host:0/v1", "port 0 is not within 1 to 65535"),
        ("http://host:65536/v1", "port 65536 is not within 1 to 65535"),
    ],
)
@pytest.mark.parametrize("user", ["reward", "judge"], indirect=True)  # commands check the URL of an engine
def test_url_that_is_none_is_refused(user, url, says):
    giver, hint = {
        "reward": ("reward server", "give one such as http://host:5000/get_reward"),
        "judge": ("judge", "give ``JudgeOptions.url`` with the part before /chat/completions"),
    }[user.kind]
    with pytest.raises(ConfigError, match=rf"(?s)^{giver} {url}.*{says}.*hint: {hint}"):
        user.make(url)
    with pytest.raises(
        ConfigError, match=rf"the {giver}'s URL at host holds a password\n\nhint: .*{VARIABLES[user.kind]}"
    ):
        user.make("http://me:s3cret@host/")


# -- connections -----------------------------------------------------------------------------------------------------


def test_servers_on_this_machine_are_asked_without_the_proxy_of_the_environment(monkeypatch):
    seen = []
    with json_server(lambda body, headers: (200, "here")) as here, json_server(lambda *_: (200, "proxy")) as proxy:
        monkeypatch.delenv("no_proxy", raising=False)
        monkeypatch.delenv("NO_PROXY", raising=False)
        for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
            monkeypatch.setenv(name, proxy)

        async def run():
            for url in (here, here.replace("127.0.0.1", "localhost"), "http://192.0.2.1"):
                client = Client([url], timeout_s=30.0)
                seen.append((await client.send(url, {})).text)
                await client.close()

        asyncio.run(run())
    assert seen == ["here", "here", "proxy"]


@pytest.mark.parametrize(("timeout_s", "connect_s"), [(4.0, 2.0), (20.0, 10.0), (600.0, 10.0)])
def test_connections_are_as_many_as_it_takes_and_given_up_before_the_request(monkeypatch, timeout_s, connect_s):
    made = []
    monkeypatch.setattr(httpx, "AsyncClient", lambda **options: made.append(options) or SimpleNamespace())

    async def connect():
        _ = Client(["http://127.0.0.1:1"], timeout_s=timeout_s)._connections

    asyncio.run(connect())
    assert made[0]["timeout"] == httpx.Timeout(None, connect=connect_s)
    assert made[0]["limits"] == httpx.Limits(max_connections=None, keepalive_expiry=2.0)
    assert made[0]["mounts"] == {"all://127.0.0.1": None}


def test_client_is_shown_without_its_token():
    assert "s3cret" not in repr(Client(["https://host"], timeout_s=1.0, token="s3cret"))


def test_client_has_connections_for_each_event_loop():
    client = Client(["http://host"], timeout_s=1.0, transport=httpx.MockTransport(lambda _: httpx.Response(200)))

    async def ask():
        assert (await client.send("http://host")).status_code == 200
        await client.close()

    for _ in range(2):
        asyncio.run(ask())
    assert client._opened == {}


def test_client_needs_no_library_of_servers():
    modules = "rlhf_rollout.engines.http, rlhf_rollout.rewards.judge, rlhf_rollout.rewards.remote"
    check = f"import sys, {modules}; print(sorted({{'fastapi', 'starlette', 'uvicorn'}} & sys.modules.keys()))"
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    done = subprocess.run([sys.executable, "-c", check], env=environment, capture_output=True, text=True, timeout=120)
    assert (done.stdout, done.stderr) == ("[]\n", "")
