"""The door: what a request may change of how answers are sampled, what is ignored, and what is sent whatever it is."""

import dataclasses
import itertools
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
async def test_only_the_limits_of_the_run_truncate_a_rollout(max_tokens, asked, limits, told, recorded):
    async with opened(writes("a" * 50), max_tokens=max_tokens, limits=limits) as door:
        options = {} if asked is None else {"max_tokens": asked}
        assert (await door.chat([HI], **options)).finish_reason == told
        [rollout] = door.recorder.episode((), None).rollouts
        assert len(rollout.spans[0].token_ids) == 22
        assert rollout.finish_reason is recorded


async def test_logprobs_0_asks_for_those_of_the_answer_without_alternatives():
    async with opened(writes("a")) as door:
        create = door.client.completions.create
        answers = [await create(model="m", prompt="x", **options) for options in ({"logprobs": 0}, {})]
        told, none = [answer.choices[0].logprobs for answer in answers]
    assert none is None
    assert told.tokens == ["a", "<eos>"]
    assert told.token_logprobs == pytest.approx([-math.log(256)] * 2)


ASKED = [
    ("chat/completions", {"tool_choice": "required"}, "tool_choice"),
    ("chat/completions", {"tool_choice": {"type": "function", "function": {"name": "add"}}}, "tool_choice"),
    ("chat/completions", {"tool_choice": "auto"}, None),
    ("chat/completions", {"tool_choice": "none"}, None),
    ("responses", {"tool_choice": "required"}, "tool_choice"),
    ("responses", {"tool_choice": {"type": "function", "name": "add"}}, "tool_choice"),
    ("responses", {"tool_choice": "none"}, None),
    ("messages", {"tool_choice": {"type": "any"}}, "tool_choice"),
    ("messages", {"tool_choice": {"type": "tool", "name": "add"}}, "tool_choice"),
    ("messages", {"tool_choice": {"type": "auto"}}, None),
    ("messages", {"tool_choice": {"type": "none"}}, None),
    ("chat/completions", {"min_tokens": 3, "stop_token_ids": [5]}, "min_tokens, stop_token_ids"),  # vLLM's
    ("messages", {"ignore_eos": True}, "ignore_eos"),
]


async def test_header_says_what_is_ignored():
    async with opened(writes("no call")) as door, httpx.AsyncClient(timeout=60) as client:
        for path, more, ignored in ASKED:
            said = {"input": "hi"} if path == "responses" else {"messages": [HI]}
            answer = await client.post(f"{door.session.url}/v1/{path}", json={**said, **more})
            found = (answer.status_code, answer.headers.get("x-ignored-parameters"))
            assert found == (200, ignored), (path, more)


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity", "1e999", '"\\ud800"'])
async def test_answers_are_valid_json_whatever_the_policy_writes_as_arguments(number):
    call = '<tool_call>{"name": "add", "arguments": {"x": ' + number + "}}</tool_call>"

    def refuse(constant):
        raise AssertionError(f"{constant} is no JSON")

    async with opened(writes(call)) as door, httpx.AsyncClient(timeout=60) as client:
        for path, stream in itertools.product(["chat/completions", "responses", "messages"], [False, True]):
            said = {"input": "hi"} if path == "responses" else {"messages": [HI]}
            tool = {"type": "function", "function": ADD} if path == "chat/completions" else {"type": "function", **ADD}
            body = {**said, "tools": [tool], "stream": stream}
            answer = await client.post(f"{door.session.url}/v1/{path}", json=body)
            assert answer.status_code == 200, answer.text
            lines = [line[5:] for line in answer.text.splitlines() if line.startswith("data:")]
            parts = lines if stream else [answer.text]
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
async def test_engine_draws_no_token_after_a_text_that_ends_the_answer(of_run, of_request, text, size):
    engine = Measured()

    async with opened(engine, stop=of_run) as door:
        options = {} if of_request is None else {"stop": of_request}
        choice = await door.chat([HI], **options)
        [rollout] = door.recorder.episode((), None).rollouts
        content = choice.message.content
        reason = choice.finish_reason
    assert (content, reason, rollout.finish_reason) == (text, "stop", FinishReason.STOP)
    assert rollout.num_response_tokens == engine.num_drawn == size


async def test_run_that_wants_more_tokens_than_an_agent_gets_no_more():
    async with opened(writes("abcdefgh"), max_tokens=9) as door:
        door.recorder.sampling = dataclasses.replace(door.recorder.sampling, min_tokens=5)
        assert (await door.chat([HI], max_tokens=2)).message.content == "ab"


async def test_call_of_a_tool_that_ends_without_an_end_token_is_read():
    call = '<tool_call>{"name":"add","arguments":{"a":1}}</tool_call>'

    async with opened(writes(call)) as door:
        tools = [{"type": "function", "function": ADD}]
        choice = await door.chat([HI], tools=tools, max_tokens=len(call))
        assert choice.finish_reason == "length"
        assert [one.function.arguments for one in choice.message.tool_calls] == ['{"a": 1}']
