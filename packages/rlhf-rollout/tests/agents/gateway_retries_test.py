"""The door with clients that lose their connection: the same request again gets the same answer, recorded once."""

import asyncio
import dataclasses
import json
import socket
import urllib.parse

import httpx
import openai
import pytest

from door_testing import HI, opened
from rlhf_data.records import SpanSource
from rlhf_data.testing import EOS_ID
from rlhf_rollout.agents import gateway as gateway_module
from rlhf_rollout.engines.fake import FakeEngine

POLICY = SpanSource.POLICY


class Counting(FakeEngine):
    """Answers its request number N by "answer N", slowly; `asked` counts the requests."""

    def __init__(self, latency_s, **options):
        super().__init__(script=self._next, latency_s=latency_s, **options)
        self.asked = 0

    def _next(self, prompt, seed):
        self.asked += 1
        return [*f"answer {self.asked}".encode(), EOS_ID]


async def leave(door, engine, *bodies):
    """Send requests for chat completions at the same time, and close their connections while the engine works."""
    place = urllib.parse.urlsplit(door.session.url)
    before = (await engine.health()).num_in_flight
    writers = []
    for number, body in enumerate(bodies or [{}], 1):
        content = json.dumps({"messages": [HI], **body}).encode()
        _, writer = await asyncio.open_connection(place.hostname, place.port)
        head = f"POST {place.path}/v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(content)}\r\n\r\n"
        writer.write(head.encode() + content)
        writers.append(writer)
        async with asyncio.timeout(60):
            while (await engine.health()).num_in_flight != before + number:
                await asyncio.sleep(0.005)
    for writer in writers:
        writer.close()
        await writer.wait_closed()
    await asyncio.sleep(0.05)  # until the server has seen it


async def text_of(door, *, client=None, is_stream, **options):
    """Return the text of a chat completion."""
    client = client or door.client
    answer = await client.chat.completions.create(model="m", messages=[HI], stream=is_stream, **options)
    if not is_stream:
        return answer.choices[0].message.content
    return "".join([chunk.choices[0].delta.content or "" async for chunk in answer])


def answers_of(door):
    return [text for spans in door.rollouts() for source, text in spans if source is POLICY]


async def ask_openai(door, is_stream):
    return await text_of(door, client=door.client.with_options(timeout=0.3, max_retries=4), is_stream=is_stream)


async def ask_anthropic(door, is_stream):
    client = door.anthropic.with_options(timeout=0.3, max_retries=4)
    options = {"model": "m", "max_tokens": 99, "messages": [HI]}
    if not is_stream:
        return (await client.messages.create(**options)).content[0].text
    async with client.messages.stream(**options) as events:
        return (await events.get_final_message()).content[0].text


@pytest.mark.parametrize("ask", [ask_openai, ask_anthropic])
@pytest.mark.parametrize("is_stream", [False, True])
async def test_client_that_times_out_and_asks_again_gets_the_answer_that_was_being_sampled(ask, is_stream):
    engine = Counting(latency_s=0.9)

    async with opened(engine) as door:
        assert await ask(door, is_stream) == "answer 1"
        assert answers_of(door) == ["answer 1<eos>"]
    assert door.recorder.num_turns == engine.asked == 1


async def test_what_was_not_delivered_is_no_part_of_the_episode():
    engine = Counting(latency_s=0.2)

    async with opened(engine) as door:
        await leave(door, engine)
        assert (await door.chat([{**HI, "content": "other"}])).message.content == "answer 2"
        assert (door.recorder.num_turns, door.recorder.num_answers) == (2, 1)
        assert answers_of(door) == ["answer 2<eos>"]


async def test_requests_that_were_left_are_answered_in_their_order_and_then_a_new_one_begins():
    engine = Counting(latency_s=0.2)

    async with opened(engine) as door:
        await leave(door, engine, {}, {"temperature": 0.1, "stream": True})  # the same, as far as is sampled
        texts = [(await door.chat([HI])).message.content for _ in range(3)]
        recorded = answers_of(door)
    assert texts == ["answer 1", "answer 2", "answer 3"]
    assert recorded == [text + "<eos>" for text in texts]


async def test_request_that_differs_in_what_is_sampled_gets_an_answer_of_its_own():
    engine = Counting(latency_s=0.1)

    async with opened(engine) as door:
        tools = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
        await leave(door, engine, {"max_tokens": 7}, {"stop": "x"}, {"tools": tools})
        assert (await door.chat([HI])).message.content == "answer 4"


async def test_retry_of_an_answer_that_was_lost_on_its_way_gets_it_again():
    engine = Counting(latency_s=0.0)

    async with opened(engine) as door:
        tool = {"type": "function", "function": {"name": "f", "parameters": {}}}
        same = dict(reversed(tool.items()))  # the order of keys means nothing in JSON
        first = await door.chat([HI], tools=[tool])
        lost = await door.chat([HI], tools=[same], extra_headers={"x-stainless-retry-count": "1"})
        new = await door.chat([HI], extra_headers={"x-stainless-retry-count": "0"})
        texts = [choice.message.content for choice in (first, lost, new)]
        recorded = answers_of(door)
    assert texts == ["answer 1", "answer 1", "answer 2"]
    assert recorded == ["answer 1<eos>", "answer 2<eos>"]


async def test_answer_that_cannot_be_written_is_not_sampled_again(monkeypatch):
    engine = Counting(latency_s=0.0)
    chat = gateway_module.DIALECTS["chat/completions"]
    failures = [RuntimeError("planted")]

    def write(request, answer):
        if failures:
            raise failures.pop()
        return chat.write(request, answer)

    monkeypatch.setitem(gateway_module.DIALECTS, "chat/completions", dataclasses.replace(chat, write=write))

    async with opened(engine) as door:
        assert (await door.chat([HI])).message.content, answers_of(door) == ("answer 1", ["answer 1<eos>"])


@pytest.mark.parametrize("is_stream", [False, True])
def test_slow_answers_keep_their_connection_alive(monkeypatch, is_stream):
    monkeypatch.setattr(gateway_module, "KEEP_ALIVE_S", 0.1)
    engine = Counting(latency_s=1.2)

    async def run():
        async with opened(engine) as door:
            # No retries: each read of this client waits for 0.5 s at most.
            client = door.client.with_options(timeout=0.5, max_retries=0)
            whole = await client.chat.completions.with_raw_response.create(
                model="m", messages=[HI], stream=is_stream, temperature=0.5
            )
            assert whole.headers["x-ignored-parameters"] == "temperature"
            answer = whole.parse()
            if not is_stream:
                return answer.choices[0].message.content
            return "".join([chunk.choices[0].delta.content or "" async for chunk in answer])

    assert asyncio.run(run()) == "answer 1"


@pytest.mark.parametrize("is_stream", [False, True])
async def test_failure_after_the_headers_reaches_the_client(monkeypatch, is_stream):
    monkeypatch.setattr(gateway_module, "KEEP_ALIVE_S", 0.05)
    engine = Counting(latency_s=0.4, fail_after=0)

    async with opened(engine) as door:
        # A stream tells it by an event; otherwise the connection ends, and the retry gets the status.
        with pytest.raises(openai.APIError, match="told to fail") as caught:
            await text_of(door, is_stream=is_stream)
        assert door.recorder.num_turns == 1
        assert isinstance(caught.value, openai.InternalServerError) is not is_stream


@pytest.mark.parametrize("late_s", [0.0, 0.15])
async def test_retry_that_arrives_with_the_end_of_its_first_connection_or_before_it_gets_the_first_answer(late_s):
    engine = Counting(latency_s=0.3 + late_s)

    async with opened(engine) as door:
        place = urllib.parse.urlsplit(door.session.url)
        content = json.dumps({"messages": [HI]}).encode()
        head = f"POST {place.path}/v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(content)}\r\n"
        first, second = [socket.create_connection((place.hostname, place.port)) for _ in range(2)]
        first.sendall(head.encode() + b"\r\n" + content)
        async with asyncio.timeout(60):
            while not (await engine.health()).num_in_flight:
                await asyncio.sleep(0.005)
        # Without `await`: the server, in this event loop, reads all of it at once.
        second.sendall(head.encode() + b"X-Stainless-Retry-Count: 1\r\n\r\n" + content)
        if late_s:
            await asyncio.sleep(late_s)
        first.close()
        async with asyncio.timeout(60):
            while not door.recorder.num_answers:
                await asyncio.sleep(0.005)
        second.close()
        assert answers_of(door) == ["answer 1<eos>"]
    assert engine.asked == 1


async def test_equal_requests_at_the_same_time_are_draws_of_their_own_also_when_both_are_sent_again():
    engine = Counting(latency_s=0.6)

    async with opened(engine) as door:
        asking = [ask_openai(door, is_stream=False) for _ in range(2)]
        assert sorted(await asyncio.gather(*asking)) == ["answer 1", "answer 2"]
        assert sorted(answers_of(door)) == ["answer 1<eos>", "answer 2<eos>"]
    assert engine.asked == 2


async def test_door_forgets_the_conversations_of_delivered_requests():
    engine = Counting(latency_s=0.0)

    async with opened(engine) as door:
        await door.chat([HI])
        [[asked]] = door.session._asked.values()
        assert (asked.is_delivered, asked.request, asked.sampled) == (True, None, None)


# How deep a value may be depends on how deep the server's own calls are.
@pytest.mark.parametrize(("depth", "statuses"), [(950, (200, 400)), (990, (200, 400)), (100_000, (400,))])
async def test_requests_that_are_nested_deeply_are_answered_or_refused(depth, statuses):
    engine = Counting(latency_s=0.0)

    async with opened(engine) as door, httpx.AsyncClient(timeout=60) as client:
        tool = '{"type":"function","function":{"name":"f","parameters":' + '{"a":' * depth + "1" + "}" * depth + "}}"
        body = '{"messages":[{"role":"user","content":"hi"}],"tools":[' + tool + "]}"
        answer = await client.post(f"{door.session.url}/v1/chat/completions", content=body)
    assert answer.status_code in statuses, answer.text
    assert answer.status_code == 200 or "recursion" in answer.text


async def test_request_whose_body_arrives_after_the_end_of_the_episode_is_refused():
    engine = Counting(latency_s=0.0)

    async with opened(engine) as door:

        async def body():
            yield b'{"messages":'
            await asyncio.sleep(0.1)
            door.session.close()
            yield json.dumps([HI]).encode() + b"}"

        async with httpx.AsyncClient(timeout=60) as client:
            assert (await client.post(f"{door.session.url}/v1/chat/completions", content=body())).status_code == 404
    assert engine.asked == 0
