"""The door: what a request may change of how answers are sampled, what is ignored, and what is sent whatever it is."""

import asyncio
import dataclasses
import json
import math

import httpx
import pytest

from door_testing import HI, opened, writes
from rlhf_data.records import FinishReason
from rlhf_rollout.agents.recorder import EpisodeLimits
from rlhf_rollout.engines.fake import FakeEngine

ADD = {"name": "add", "description": "Add.", "parameters": {"type": "object", "properties": {}}}


@pytest.mark.parametrize(
    ("max_tokens", "asked", "limits", "told", "recorded"),
    [
        (9, 4, None, "length", FinishReason.STOP),  # the agent wanted no more
        (9, 9, None, "length", FinishReason.LENGTH),  # the run's answers are no longer
        (9, None, None, "length", FinishReason.LENGTH),
        (9, 4, EpisodeLimits(max_length=22 + 4), "length", FinishReason.LENGTH),  # nor its conversations
        (9, 4, EpisodeLimits(max_length=22 + 5), "length", FinishReason.STOP),
        (60, 55, None, "stop", FinishReason.STOP),  # the policy ended it
    ],
)
def test_only_the_limits_of_the_run_truncate_a_rollout(max_tokens, asked, limits, told, recorded):
    async def run():
        async with opened(writes("a" * 50), max_tokens=max_tokens, limits=limits) as door:
            options = {} if asked is None else {"max_tokens": asked}
            assert (await door.chat([HI], **options)).finish_reason == told
            [rollout] = door.recorder.episode((), None).rollouts
            assert len(rollout.spans[0].token_ids) == 22
            return rollout.finish_reason

    assert asyncio.run(run()) is recorded


def test_logprobs_0_asks_for_those_of_the_answer_without_alternatives():
    async def run():
        async with opened(writes("a")) as door:
            create = door.client.completions.create
            answers = [await create(model="m", prompt="x", **options) for options in ({"logprobs": 0}, {})]
            return [answer.choices[0].logprobs for answer in answers]

    told, none = asyncio.run(run())
    assert none is None
    assert told.tokens == ["a", "<eos>"]
    assert told.token_logprobs == pytest.approx([-math.log(256)] * 2)


@pytest.mark.parametrize(
    ("path", "choice", "is_ignored"),
    [
        ("chat/completions", "required", True),
        ("chat/completions", {"type": "function", "function": {"name": "add"}}, True),
        ("chat/completions", "auto", False),
        ("chat/completions", "none", False),
        ("responses", "required", True),
        ("responses", {"type": "function", "name": "add"}, True),
        ("responses", "none", False),
        ("messages", {"type": "any"}, True),
        ("messages", {"type": "tool", "name": "add"}, True),
        ("messages", {"type": "auto"}, False),
        ("messages", {"type": "none"}, False),
    ],
)
def test_header_says_that_the_policy_is_not_forced_to_call_a_tool(path, choice, is_ignored):
    async def run():
        async with opened(writes("no call")) as door, httpx.AsyncClient(timeout=60) as client:
            said = {"input": "hi"} if path == "responses" else {"messages": [HI]}
            body = {**said, "tool_choice": choice}
            return await client.post(f"{door.session.url}/v1/{path}", json=body)

    answer = asyncio.run(run())
    assert answer.status_code == 200
    assert answer.headers.get("x-ignored-parameters") == ("tool_choice" if is_ignored else None)


def test_sampling_of_vllm_is_ignored_and_said():
    async def run():
        async with opened(writes("a")) as door:
            create = door.client.chat.completions.with_raw_response.create
            more = {"min_tokens": 3, "ignore_eos": True, "stop_token_ids": [5]}
            return (await create(model="m", messages=[HI], extra_body=more)).headers["x-ignored-parameters"]

    assert asyncio.run(run()) == "min_tokens, ignore_eos, stop_token_ids"


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity", "1e999", '"\\ud800"'])
@pytest.mark.parametrize("path", ["chat/completions", "responses", "messages"])
@pytest.mark.parametrize("stream", [False, True])
def test_answers_are_valid_json_whatever_the_policy_writes_as_arguments(number, path, stream):
    call = '<tool_call>{"name": "add", "arguments": {"x": ' + number + "}}</tool_call>"

    async def run():
        async with opened(writes(call)) as door, httpx.AsyncClient(timeout=60) as client:
            said = {"input": "hi"} if path == "responses" else {"messages": [HI]}
            tool = {"type": "function", "function": ADD} if path == "chat/completions" else {"type": "function", **ADD}
            body = {**said, "tools": [tool], "stream": stream}
            return await client.post(f"{door.session.url}/v1/{path}", json=body)

    def refuse(constant):
        raise AssertionError(f"{constant} is no JSON")

    answer = asyncio.run(run())
    assert answer.status_code == 200, answer.text
    parts = [line[5:] for line in answer.text.splitlines() if line.startswith("data:")] if stream else [answer.text]
    parsed = [json.loads(part, parse_constant=refuse) for part in parts if part.strip() != "[DONE]"]
    assert "<tool_call>" in json.dumps(parsed)  # what cannot be read is a text


class Measured(FakeEngine):
    """Writes "abc" again and again, and counts the tokens that it draws."""

    def __init__(self):
        super().__init__(script=lambda prompt, seed: list(b"abc" * 60))
        self.num_drawn = 0

    async def _complete(self, token_ids, sampling, drafts):
        completions = await super()._complete(token_ids, sampling, drafts)
        self.num_drawn += sum(len(completion.token_ids) for completion in completions)
        return completions


@pytest.mark.parametrize(
    ("of_run", "of_request", "text", "size"),
    [
        ((), "cab", "ab", 5),
        ((), ["never", "cab"], "ab", 5),
        (("ca",), None, "ab", 4),
        (("ca",), "bc", "a", 3),  # a request adds to the run's
        (("ca",), "abcabc", "ab", 4),
    ],
)
def test_engine_draws_no_token_after_a_text_that_ends_the_answer(of_run, of_request, text, size):
    engine = Measured()

    async def run():
        async with opened(engine, stop=of_run) as door:
            options = {} if of_request is None else {"stop": of_request}
            choice = await door.chat([HI], **options)
            [rollout] = door.recorder.episode((), None).rollouts
            return choice.message.content, choice.finish_reason, rollout

    content, reason, rollout = asyncio.run(run())
    assert (content, reason, rollout.finish_reason) == (text, "stop", FinishReason.STOP)
    assert rollout.num_response_tokens == engine.num_drawn == size


def test_run_that_wants_more_tokens_than_an_agent_gets_no_more():
    async def run():
        async with opened(writes("abcdefgh"), max_tokens=9) as door:
            door.recorder.sampling = dataclasses.replace(door.recorder.sampling, min_tokens=5)
            return (await door.chat([HI], max_tokens=2)).message.content

    assert asyncio.run(run()) == "ab"


def test_call_of_a_tool_that_ends_without_an_end_token_is_read():
    call = '<tool_call>{"name":"add","arguments":{"a":1}}</tool_call>'

    async def run():
        async with opened(writes(call)) as door:
            tools = [{"type": "function", "function": ADD}]
            choice = await door.chat([HI], tools=tools, max_tokens=len(call))
            return choice.finish_reason, [one.function.arguments for one in choice.message.tool_calls or []]

    assert asyncio.run(run()) == ("length", ['{"a": 1}'])
