"""The door with `client.responses` of the `openai` library: what is recorded, streamed, counted and refused."""

import json

import openai
import pytest

from door_testing import HI, opened, writes
from rlhf_data.records import SpanSource
from rlhf_rollout.agents.dialects.openai_dialect import RESPONSES
from rlhf_rollout.agents.recorder import EpisodeLimits

PROMPT, POLICY, ENVIRONMENT = SpanSource.PROMPT, SpanSource.POLICY, SpanSource.ENVIRONMENT
CALL = 'I ask. <tool_call>{"name":"add","arguments":{"a":1,"b":[2]}}</tool_call>'
TWO = '<tool_call>{"name":"add","arguments":{"a":1}}</tool_call><tool_call>{"name":"add","arguments":{}}</tool_call>'
ADD = {"type": "function", "name": "add", "description": "Add.", "parameters": {"type": "object"}, "strict": True}
LOGPROBS = ["message.output_text.logprobs"]


async def test_agent_with_a_tool_is_one_rollout():
    async with opened(writes(CALL, "3", "bye")) as door:
        common = {"model": "m", "instructions": "Be brief.", "tools": [ADD], "temperature": 0.5}
        first = await door.client.responses.create(input="hi", **common)
        [message, call] = first.output
        assert (first.status, first.output_text, message.role) == ("completed", "I ask.", "assistant")
        assert (call.name, json.loads(call.arguments)) == ("add", {"a": 1, "b": [2]})
        # As agents send it back: the items of the answer, and behind them what the tool has found.
        history = [HI, *first.output]
        found = [{"type": "input_text", "text": "3"}]
        history.append({"type": "function_call_output", "call_id": call.call_id, "output": found})
        second = await door.client.responses.create(input=history, **common)
        assert second.output_text == "3"
        history += [*second.output, {"type": "reasoning", "id": "r", "summary": []}]
        history.append({"type": "message", "role": "user", "content": [{"type": "input_text", "text": "so?"}]})
        raw = await door.client.responses.with_raw_response.create(input=history, **common)
        assert raw.headers["x-ignored-parameters"] == "temperature"
        assert raw.parse().output_text == "bye"
        [spans] = door.rollouts()
    told, _, rest = spans[0][1].partition("system: ")
    assert '"name": "add", "description": "Add.", "parameters": {"type": "object"}' in told
    assert rest == "Be brief.<eos>\nuser: hi<eos>\nassistant: "
    assert spans[1:] == [
        (POLICY, CALL + "<eos>"),
        (ENVIRONMENT, "\ntool: 3<eos>\nassistant: "),
        (POLICY, "3<eos>"),
        (ENVIRONMENT, "\nuser: so?<eos>\nassistant: "),
        (POLICY, "bye<eos>"),
    ]


@pytest.mark.parametrize("answer", ["plain", CALL, TWO, ""])
async def test_stream_tells_the_same(answer):
    async with opened(writes(answer)) as door:
        asked = {"model": "m", "input": [HI], "tools": [ADD], "include": LOGPROBS}
        whole = await door.client.responses.create(**asked)
        async with door.client.responses.stream(**asked) as events:
            text, arguments = "", {}
            async for event in events:
                if event.type == "response.output_text.delta":
                    text += event.delta
                elif event.type == "response.function_call_arguments.delta":
                    arguments[event.output_index] = arguments.get(event.output_index, "") + event.delta
            streamed = await events.get_final_response()
        stream = await door.client.responses.create(**asked, stream=True)
        events = [event async for event in stream]
        assert [event.sequence_number for event in events] == list(range(len(events)))
        assert [event.response.status for event in events[:2]] == ["in_progress"] * 2
        for event in events:
            told = event.to_dict()
            type(event).model_validate(told)  # raises if a field is missing that the library requires
            if event.type == "response.output_item.added":
                assert (told["item"].get("content"), told["item"].get("arguments")) in (([], None), (None, ""))

        def plain(response):
            items = [item.model_dump(exclude={"id", "call_id", "parsed_arguments"}) for item in response.output]
            for item in items:
                for part in item.get("content") or []:
                    part.pop("parsed", None)
            return items, response.status, response.usage

        type(whole).model_validate(whole.to_dict())
        details = (
            whole.usage.input_tokens_details.cached_tokens,
            whole.usage.output_tokens_details.reasoning_tokens,
        )
        assert details == (0, 0)
        assert plain(streamed) == plain(whole)
        assert text == whole.output_text
        calls = {index: item.arguments for index, item in enumerate(whole.output) if item.type == "function_call"}
        assert (arguments, len(calls)) == (calls, answer.count("<tool_call>"))
        assert whole.usage.output_tokens == len(answer) + 1
        spans = door.recorder.episode((), None).rollouts[0].spans
        assert whole.usage.input_tokens == len(spans[0].token_ids)
        assert whole.usage.total_tokens == whole.usage.input_tokens + whole.usage.output_tokens
        if answer == "plain":
            logprobs = whole.output[0].content[0].logprobs
            assert "".join(one.token for one in logprobs) == "plain<eos>"
            assert [one.logprob for one in logprobs] == spans[1].logprobs.tolist()


async def test_answer_that_is_cut_is_incomplete_and_tools_may_be_forbidden():
    async with opened(writes("abcdef", CALL), limits=EpisodeLimits(max_turns=2)) as door:
        create = door.client.responses.create
        cut = await create(model="m", input="hi", max_output_tokens=3)
        assert (cut.status, cut.incomplete_details.reason) == ("incomplete", "max_output_tokens")
        assert cut.output_text == "abc" and cut.output[0].content[0].logprobs == []
        plain = await create(model="m", input="hi", tools=[ADD], tool_choice="none")
        assert (plain.output_text, plain.incomplete_details) == (CALL, None)
        spent = [event async for event in await create(model="m", input="hi", stream=True)]
        assert spent[-1].type == "response.incomplete" and spent[-1].response.output_text == ""
        with pytest.raises(openai.BadRequestError, match="no turns"):
            await create(model="m", input="hi")


@pytest.mark.parametrize(
    ("items", "messages"),
    [
        (["call"], [("assistant", 1)]),
        (["hi", "call", "call"], [("user", 0), ("assistant", 2)]),
        (["hi", "answer", "call", "result", "call"], [("user", 0), ("assistant", 1), ("tool", 0), ("assistant", 1)]),
    ],
)
def test_calls_belong_to_the_answer_before_them_or_to_one_without_text(items, messages):
    known = {
        "hi": {"role": "user", "content": "hi"},
        "answer": {"type": "message", "role": "assistant", "content": "I ask."},
        "call": {"type": "function_call", "call_id": "c", "name": "add", "arguments": "{}"},
        "result": {"type": "function_call_output", "call_id": "c", "output": "3"},
    }
    read = RESPONSES.read({"model": "m", "input": [known[item] for item in items]}).messages
    assert [(message["role"], len(message.get("tool_calls", ()))) for message in read] == messages
