"""What all servers do with tokens, bodies and clients that leave, and how they listen."""

import asyncio
import contextlib
import json
import signal
import socket
import sys

import httpx
import pytest
import uvicorn
from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import PlainTextResponse

from rlhf_data.errors import ConfigError
from rlhf_data.records import Verdict, VerdictKind
from rlhf_data.testing import ByteTokenizer
from rlhf_rollout.commands import serve, serve_rm
from rlhf_rollout.engines.fake import FakeEngine
from rlhf_rollout.http import server
from rlhf_rollout.http.server import LocalServer, application, listen, read_body, token_for, while_connected
from rollout_testing import app_server


class OneEach:
    """A reward of 1 for everything."""

    async def score(self, prompt, rollouts):
        return [Verdict(VerdictKind.OK, 1.0) for _ in rollouts]


class Service:
    """One of the servers.

    Attributes:
        path: takes POST requests of `body`.
        advice: what it says to those whose bodies are too long.
        variable: holds its token.
    """

    def __init__(self, kind):
        self.kind = kind
        is_engine = kind == "engine"
        self.path = "/v1/completions" if is_engine else "/get_reward"
        self.body = {"prompt": [1], "seed": 3} if is_engine else {"query": ["a"]}
        self.advice = "send a shorter prompt" if is_engine else "send fewer queries"
        self.variable = "RLHF_ENGINE_TOKEN" if is_engine else "RLHF_REMOTE_RM_TOKEN"

    def app(self, token=""):
        if self.kind == "engine":
            return serve.create_app(FakeEngine(), {}, token=token)
        return serve_rm.create_app(OneEach(), ByteTokenizer(), contextlib.AsyncExitStack(), token=token)


@pytest.fixture(params=["engine", "reward"])
def service(request):
    return Service(request.param)


def answered(url, path, head=""):
    """Return the beginning of the answer to a request that declares a body and never sends it."""
    host, _, port = url.removeprefix("http://").partition(":")
    with socket.create_connection((host, int(port)), timeout=60) as connection:
        connection.sendall(f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n{head}\r\n".encode())
        return connection.recv(100).decode().partition("\r\n")[0]


def test_request_without_the_token_is_refused_before_its_body_is_read(service):
    with app_server(service.app("secret")) as url:
        for given in ("", "Bearer wrong", "Bearer Secret", "secret", "Bearer secrets"):
            head = f"Authorization: {given}\r\n" if given else ""
            assert "401" in answered(url, service.path, head)
            assert "401" in answered(url, "/nothing", head)
        assert httpx.get(url + "/health").status_code == 200
        right = {"Authorization": "Bearer secret"}
        assert httpx.post(url + service.path, json=service.body, headers=right).status_code == 200
        refused = httpx.post(url + service.path, json=service.body)
    assert refused.json() == {"detail": f"the request has no valid token; clients take it from {service.variable}"}


def test_body_is_read_up_to_a_limit(service, monkeypatch):
    monkeypatch.setattr(server, "MAX_BODY_BYTES", 1000)
    with app_server(service.app()) as url:
        body = json.dumps(service.body).encode()
        assert httpx.post(url + service.path, content=body.ljust(1000)).status_code == 200
        refused = httpx.post(url + service.path, content=body.ljust(1001))
    assert refused.status_code == 413
    assert refused.json() == {"detail": f"the body is longer than 1000 bytes; {service.advice}"}


def test_body_that_does_not_arrive_is_not_waited_for(service, monkeypatch):
    monkeypatch.setattr(server, "READ_TIMEOUT_S", 0.2)
    with app_server(service.app()) as url:
        assert "408" in answered(url, service.path)


NO_REQUESTS = {
    "empty": b"",
    "no UTF-8": b"\xff\xfe",
    "deep": b"[" * 100_000,
    "deep value": b'{"prompt": ' + b"[" * 3000 + b"]" * 3000 + b', "query": ' + b"[" * 3000 + b"]" * 3000 + b"}",
    "surrogate": b'{"prompt": "\\ud800", "query": ["\\ud800"]}',
    "digits": b'{"prompt": [' + b"9" * 5000 + b'], "query": [' + b"9" * 5000 + b"]}",
    "NaN": b'{"prompt": [NaN], "query": [NaN]}',
    "many": json.dumps({"prompt": ["s3cret"] * 9, "query": [{"s3cret": 1}] * 9}).encode(),
}


def test_body_that_is_no_request_is_refused_with_three_problems_at_most(service):
    with app_server(service.app()) as url:
        for name, body in NO_REQUESTS.items():
            answer = httpx.post(url + service.path, content=body)
            assert answer.status_code == 422, name
            problems = answer.json()["detail"]
            assert 1 <= len(problems) <= 3, name
            assert all(set(problem) == {"type", "loc", "msg"} for problem in problems), name  # not what the client sent


# -- clients that leave ----------------------------------------------------------------------------------------------


def request(*messages):
    """Return a request whose messages come one after the other, and then none."""
    waiting = list(messages)

    async def receive():
        if not waiting:
            await asyncio.Event().wait()
        return waiting.pop(0)

    return Request({"type": "http", "method": "POST", "path": "/", "headers": []}, receive)


GONE = {"type": "http.disconnect"}


def test_call_is_answered_while_its_client_waits():
    async def answer():
        await asyncio.sleep(0.01)
        return 7

    async def fail():
        raise ValueError("as told")

    assert asyncio.run(while_connected(request({"type": "http.request"}), answer())) == 7
    with pytest.raises(ValueError, match="as told"):
        asyncio.run(while_connected(request(), fail()))


def test_call_is_cancelled_when_its_client_leaves():
    ends = []

    async def work():
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            ends.append("cancelled")
            raise

    with pytest.raises(HTTPException) as caught:
        asyncio.run(while_connected(request({"type": "http.request"}, GONE), work()))
    assert (caught.value.status_code, caught.value.detail) == (499, "the client closed the connection")
    assert ends == ["cancelled"]


def test_call_that_somebody_else_cancels_is_told_as_the_end_of_its_session():
    async def run():
        call = asyncio.ensure_future(asyncio.Event().wait())
        asyncio.get_running_loop().call_soon(call.cancel)
        await while_connected(request(), call)

    with pytest.raises(HTTPException) as caught:
        asyncio.run(run())
    assert (caught.value.status_code, caught.value.detail) == (410, "the session of the request has ended")


def test_client_that_leaves_while_it_sends_is_told_from_a_slow_one():
    part = {"type": "http.request", "body": b"ab", "more_body": True}
    taken = bytearray()
    with pytest.raises(HTTPException) as caught:
        asyncio.run(read_body(request(part, part, GONE), taken.extend, advice="-"))
    assert (caught.value.status_code, caught.value.detail) == (400, "the client closed the connection")
    with pytest.raises(HTTPException) as caught:
        asyncio.run(read_body(request(part), taken.extend, advice="-", timeout_s=0.01))
    assert (caught.value.status_code, caught.value.detail) == (408, "the body did not arrive within 0.01 s")
    assert taken == b"ababab"
    with pytest.raises(HTTPException) as caught:
        asyncio.run(read_body(request(part, part), taken.extend, advice="be short", limit_bytes=3))
    assert (caught.value.status_code, caught.value.detail) == (413, "the body is longer than 3 bytes; be short")
    assert taken == b"abababab"


# -- how servers listen ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "::1"])
def test_server_of_this_machine_needs_no_token(monkeypatch, host):
    monkeypatch.delenv("T", raising=False)
    assert token_for(host, "T") == ""
    monkeypatch.setenv("T", " secret\n")
    assert token_for(host, "T") == token_for("0.0.0.0", "T") == "secret"


@pytest.mark.parametrize("token", [None, "", " \n"])
def test_server_that_others_reach_needs_a_token(monkeypatch, token):
    monkeypatch.delenv("T", raising=False)
    if token is not None:
        monkeypatch.setenv("T", token)
    with pytest.raises(ConfigError, match=r"^``host=0.0.0.0`` lets other machines.*\n\nhint: set T here"):
        token_for("0.0.0.0", "T")


@pytest.mark.parametrize("log", [None, sys.stdout])
def test_what_the_server_says_goes_to_the_user(monkeypatch, log):
    seen = {}
    monkeypatch.setattr(uvicorn, "run", lambda app, **options: seen.update(options, app=app))
    listen("app", "::1", 7, log=log)
    assert (seen["app"], seen["host"], seen["port"]) == ("app", "::1", 7)
    assert seen["log_config"]["handlers"]["default"]["stream"] == (log or "ext://sys.stderr")
    assert (seen["log_level"], seen["timeout_graceful_shutdown"]) == ("warning", 10.0)
    assert uvicorn.config.LOGGING_CONFIG["handlers"]["default"]["stream"] == "ext://sys.stderr"


def test_resources_are_open_while_the_application_is_served():
    states = []

    @contextlib.asynccontextmanager
    async def resources():
        states.append("open")
        yield
        states.append("closed")

    app = application("a", resources(), token="t", variable="T")
    app.add_api_route("/states", lambda: list(states))
    assert states == []
    with app_server(app) as url:
        assert httpx.get(url + "/states", headers={"Authorization": "Bearer t"}).json() == ["open"]
        assert httpx.get(url + "/openapi.json", headers={"Authorization": "Bearer t"}).status_code == 404
    assert states == ["open", "closed"]
    assert isinstance(app, FastAPI) and app.title == "a"


def test_local_server_listens_until_it_is_closed_and_leaves_signals_alone():
    async def run():
        before = signal.getsignal(signal.SIGINT)
        local = LocalServer(PlainTextResponse("hello"))
        await local.close()  # does nothing
        assert local.port == 0
        await local.start()
        port = local.port
        socket.create_connection(("127.0.0.1", port), timeout=60).close()  # at once, before the event loop goes on
        await local.start()
        assert local.port == port > 0
        async with httpx.AsyncClient(trust_env=False) as client:
            answers = await asyncio.gather(*[client.get(f"http://127.0.0.1:{port}/") for _ in range(20)])
        assert {answer.text for answer in answers} == {"hello"}
        assert signal.getsignal(signal.SIGINT) is before
        await local.close()
        return port

    port = asyncio.run(run())
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port), timeout=60)


def test_local_server_does_not_wait_for_requests_that_never_end():
    async def hang(scope, receive, send):
        await asyncio.Event().wait()

    async def run():
        local = LocalServer(hang)
        await local.start()
        _, writer = await asyncio.open_connection("127.0.0.1", local.port)
        writer.write(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
        await asyncio.sleep(0.05)
        async with asyncio.timeout(60):
            await local.close()
        writer.close()
        assert local._serving.done() and not local._serving.cancelled()  # it has not been waited for in vain

    asyncio.run(run())
