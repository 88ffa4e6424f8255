"""The door over loopback: limits of an episode, requests that are refused, clients that leave, engines that fail."""

import asyncio
import json
import socket
import urllib.parse

import anthropic
import httpx
import openai
import pytest

from door_testing import HI, opened, texts_of, writes
from rlhf_data.records import FinishReason, SpanSource
from rlhf_data.testing import ByteTokenizer
from rlhf_rollout.agents.recorder import EpisodeLimits
from rlhf_rollout.engines.fake import FakeEngine
from rlhf_rollout.http import server
from rlhf_rollout.workers.rpc import Activity

PROMPT, POLICY = SpanSource.PROMPT, SpanSource.POLICY


@pytest.mark.parametrize("limits", [{"max_turns": 1}, {"max_length": 30}])
async def test_spent_episode_answers_once_with_nothing_and_then_refuses(limits):
    async with opened(writes("abc"), limits=EpisodeLimits(**limits)) as door:
        first = await door.chat([HI])
        assert first.message.content == "abc"
        history = [HI, {"role": "assistant", "content": "abc"}, HI]
        cut = await door.chat(history)
        assert (cut.message.content, cut.finish_reason) == ("", "length")
        assert not door.session.is_refused
        with pytest.raises(openai.BadRequestError, match="no turns, tokens or time left") as caught:
            await door.chat(history)
        assert caught.value.code == "episode_budget_spent" and door.session.is_refused
        with pytest.raises(anthropic.BadRequestError, match="no turns"):
            await door.anthropic.messages.create(model="m", max_tokens=5, messages=history)
        [rollout] = door.recorder.episode((), None).rollouts
    assert texts_of(rollout)[1:] == [(POLICY, "abc<eos>")]
    assert rollout.finish_reason is FinishReason.LENGTH


async def raw(url, content, method="POST"):
    async with httpx.AsyncClient(timeout=60) as client:
        return await client.request(method, url, content=content)


CHAT = "chat/completions"
IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
TEXT = "completions"
MESSAGES = "messages"
RESPONSES = "responses"


REFUSED = [
    (CHAT, b"", "no JSON"),
    (CHAT, b"\xff\xfe", "no JSON"),
    (CHAT, b"[" * 100_000, "no JSON"),
    (CHAT, b"[]", "must be a JSON object"),
    (CHAT, {"messages": []}, "`messages` is empty"),
    (CHAT, {"messages": "hi"}, "`messages` must be a list"),
    (CHAT, {"messages": ["hi"]}, "a message is no object"),
    (CHAT, {"messages": [{"content": "hi"}]}, "a message's role must be a text"),
    (CHAT, {"messages": [{"role": "user", "content": 5}]}, "neither text nor a list"),
    (CHAT, {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "URL of an image must be a text"),
    (CHAT, {"messages": [{"role": "user", "content": [IMAGE]}]}, "this run reads text only"),
    (CHAT, {"messages": [HI, {"role": "assistant", "content": [IMAGE]}]}, "reads text only"),
    (CHAT, {"messages": [{"role": "system", "content": "x"}]}, "no user message"),
    (CHAT, {"messages": [{"role": "user", "content": "\ud800"}]}, "surrogate"),
    (CHAT, {"messages": [HI], "n": 2}, "`n` must be 1"),
    (CHAT, {"messages": [HI], "max_tokens": 0}, "positive whole number"),
    (CHAT, {"messages": [HI], "max_tokens": "9"}, "positive whole number"),
    (CHAT, {"messages": [HI], "stop": 5}, "`stop` must be"),
    (CHAT, {"messages": [HI], "tools": {}}, "`tools` must be a list"),
    (CHAT, {"messages": [HI, {"role": "assistant", "tool_calls": [{}]}]}, "has no function"),
    (TEXT, {}, "`prompt` must be one text"),
    (TEXT, {"prompt": ["a", "b"]}, "`prompt` must be one text"),
    (TEXT, {"prompt": [1, -1]}, "`prompt` must be one text"),
    (TEXT, {"prompt": [True]}, "`prompt` must be one text"),
    (TEXT, {"prompt": "a", "echo": True}, "`echo` is not supported"),
    (MESSAGES, {"messages": []}, "`messages` is empty"),
    (MESSAGES, {"messages": [{"role": "user", "content": 5}]}, "neither text nor a list"),
    (MESSAGES, {"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "reads text only"),
    (MESSAGES, {"messages": [HI], "tools": [{}]}, "a tool has no name"),
    (RESPONSES, {}, "`input` is empty"),
    (RESPONSES, {"input": 5}, "`input` must be a list"),
    (RESPONSES, {"input": ["hi"]}, "an item of `input` is no object"),
    (RESPONSES, {"input": [{"content": "hi"}]}, "a message's role must be a text"),
    (RESPONSES, {"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "URL of an image"),
    (RESPONSES, {"input": [{"type": "item_reference", "id": "x"}]}, "'item_reference' is not supported"),
    (RESPONSES, {"input": [{"type": ["x"]}]}, "is not supported"),
    (RESPONSES, {"input": [{"type": "function_call", "name": "add", "arguments": "{}"}]}, "call_id must be a text"),
    (
        RESPONSES,
        {"input": [{"type": "function_call", "call_id": "c"}]},
        "the name of a called function must be a text",
    ),
    (
        RESPONSES,
        {"input": [{"type": "function_call_output", "call_id": "c", "output": 3}]},
        "neither text nor a list",
    ),
    (RESPONSES, {"input": [{"type": "function_call_output", "output": "3"}]}, "call_id must be a text"),
    (RESPONSES, {"input": "hi", "tools": [{"type": "web_search"}]}, "a tool must be a function"),
    (RESPONSES, {"input": "hi", "tools": [{"type": "function"}]}, "a tool has no name"),
    (RESPONSES, {"input": "hi", "previous_response_id": "resp_1"}, "send the whole conversation as `input`"),
    (RESPONSES, {"input": "hi", "conversation": "conv_1"}, "`conversation` is not supported"),
    (RESPONSES, {"input": "hi", "background": True}, "`background` is not supported"),
    (RESPONSES, {"input": "hi", "max_output_tokens": 0}, "positive whole number"),
    (RESPONSES, {"input": "hi", "include": "all"}, "`include` must be a list"),
]


async def test_bodies_that_are_no_requests_are_refused_and_cost_nothing():
    async with opened(writes("a")) as door:
        for path, body, message in REFUSED:
            content = body if isinstance(body, bytes) else json.dumps(body).encode()
            answer = await raw(f"{door.session.url}/v1/{path}", content)
            assert (answer.status_code, answer.headers.get("x-should-retry")) == (400, "false"), (path, body)
            told = answer.json()
            assert message in told["error"]["message"], (path, body)
            assert told["error"]["type"] == "invalid_request_error"
            assert (told.get("type") == "error") is (path == MESSAGES)
        assert door.recorder.num_turns == 0
        assert (await door.chat([HI])).message.content == "a"


def test_session_is_the_authorization():
    async def run():
        async with opened(writes("a")) as door:
            url = door.session.url
            base, _, name = url.rpartition("/")
            assert len(name) >= 32
            for wrong in (base + "/" + "x" * len(name), base, url + "x", url + "/../" + name[:-1]):
                for path in ("/v1/chat/completions", "/v1/models"):
                    assert (await raw(wrong + path, b"{}")).status_code == 404
            assert (await raw(url + "/v1/models", None, "GET")).json()["data"][0]["id"] == "policy"
            assert (await raw(url + "/v1/models", b"{}")).status_code == 405
            assert (await raw(url + "/v1/messages", None, "GET")).status_code == 405
            assert [model.id async for model in door.client.models.list()] == ["policy"]
        return url, door.gateway.port

    async def closed():
        async with opened(writes("a")) as door:
            with door.gateway.session(door.recorder, Activity()) as other:
                pass
            return (await raw(other.url + "/v1/chat/completions", json.dumps({"messages": [HI]}).encode())).status_code

    _, port = asyncio.run(run())
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port), timeout=60)
    assert asyncio.run(closed()) == 404


async def exchange(url, head):
    """Return the first line that answers `head`, after which nothing else is sent."""
    place = urllib.parse.urlsplit(url)
    reader, writer = await asyncio.open_connection(place.hostname, place.port)
    writer.write(f"POST {place.path}/v1/completions HTTP/1.1\r\nHost: x\r\n{head}".encode())
    async with asyncio.timeout(60):
        line = await reader.readline()
    writer.close()
    return line.decode()


async def test_bodies_that_are_huge_or_slow_are_refused(monkeypatch):
    # Small, so that a client has sent all of it before it is answered.
    monkeypatch.setattr(server, "MAX_BODY_BYTES", 1000)

    async with opened(writes("a")) as door:
        url = door.session.url
        # No session: refused without waiting for the body, which never comes.
        assert " 404 " in await exchange(url + "x", "Content-Length: 1000\r\n\r\n")
        with monkeypatch.context() as patch:
            patch.setattr(server, "READ_TIMEOUT_S", 0.2)
            assert " 408 " in await exchange(url, "Content-Length: 1000\r\n\r\n{")
        assert (await raw(url + "/v1/completions", b" " * 1001)).status_code == 413
        assert (await door.chat([HI])).message.content == "a"


async def test_end_of_a_session_ends_its_requests():
    engine = writes("a", latency_s=1000.0)

    async with opened(engine) as door:
        with door.gateway.session(door.recorder, Activity()) as other:
            client = openai.AsyncOpenAI(base_url=other.url + "/v1", api_key="none")
            request = asyncio.create_task(client.completions.create(model="m", prompt="x"))
            async with asyncio.timeout(60):
                while not (await engine.health()).num_in_flight:
                    await asyncio.sleep(0.01)
        with pytest.raises(openai.NotFoundError, match="the session has ended"):
            await request
        await client.close()


async def test_engine_that_fails_is_an_error_that_is_not_sent_again():
    engine = FakeEngine(fail_after=0)

    async with opened(engine) as door:
        with pytest.raises(openai.InternalServerError, match="told to fail"):
            await door.chat([HI])
        assert door.recorder.num_turns == 1
        assert "told to fail" in str(door.recorder.error)


async def test_tokenizer_without_a_chat_template_completes_texts_only():
    async with opened(writes("a"), tokenizer=ByteTokenizer(add_bos=False, chat_template=None)) as door:
        with pytest.raises(openai.BadRequestError, match="no chat template"):
            await door.chat([HI])
        assert (await door.client.completions.create(model="m", prompt="x")).choices[0].text == "a"
