"""The door with the clients of OpenAI and Anthropic over loopback: what is recorded, and what is answered."""

import asyncio
import json

import pytest

from door_testing import HI, TOKENIZER, opened, writes
from rlhf_data.records import SpanSource
from rlhf_data.testing import EOS_ID, ByteTokenizer
from rlhf_rollout.agents.conversation import rewritten_parts
from rlhf_rollout.engines.fake import FakeEngine

PROMPT, POLICY, ENVIRONMENT = SpanSource.PROMPT, SpanSource.POLICY, SpanSource.ENVIRONMENT
CALL = 'I ask. <tool_call>{"name":"add","arguments":{"a":1,"b":[2]}}</tool_call>'
ADD = {"name": "add", "description": "Add.", "parameters": {"type": "object", "properties": {}}}


class Thinking(ByteTokenizer):
    """Its template drops the reasoning of answers that another message follows, and white space around answers."""

    def apply_chat_template(self, conversation, **options):
        last = len(conversation) - 1
        shown = [
            {**message, "content": message["content"].rpartition("</think>")[2].strip()}
            if message["role"] == "assistant" and index < last
            else message
            for index, message in enumerate(conversation)
        ]
        return super().apply_chat_template(shown, **options)


async def test_conversation_is_recorded_and_its_answers_are_never_tokenized_again():
    class Once(ByteTokenizer):
        """Knows a token that no text becomes."""

        def decode(self, token_ids, *, skip_special_tokens=False):
            return super().decode(
                [ord("4") if t == 200 else t for t in token_ids], skip_special_tokens=skip_special_tokens
            )

    engine = FakeEngine(script=lambda prompt, _: [ord(" "), 200, EOS_ID])

    async with opened(engine, tokenizer=Once(add_bos=False)) as door:
        first = await door.chat([HI])
        assert (first.message.content, first.finish_reason) == (" 4", "stop")
        # As agents send it back: with fields that it did not have, and without white space around it.
        answer = {**first.message.model_dump(), "content": first.message.content.strip()}
        await door.chat([HI, answer, {"role": "user", "content": [{"type": "text", "text": "more"}]}])
        [rollout] = door.recorder.episode((), None).rollouts
    texts = [(span.source, span.token_ids.tolist()) for span in rollout.spans]
    assert texts == [
        (PROMPT, [2, *b"user: hi", 0, *b"\nassistant: "]),
        (POLICY, [ord(" "), 200, EOS_ID]),
        (ENVIRONMENT, [*b"\nuser: more", 0, *b"\nassistant: "]),
        (POLICY, [ord(" "), 200, EOS_ID]),
    ]


async def test_answer_that_was_cut_gets_the_end_that_the_template_writes():
    async with opened(writes("abcdef")) as door:
        first = await door.chat([HI], max_completion_tokens=3)
        assert (first.message.content, first.finish_reason) == ("abc", "length")
        await door.chat([HI, {"role": "assistant", "content": "abc"}, HI], max_tokens=2)
        assert door.rollouts()[0][1:] == [
            (POLICY, "abc"),
            (ENVIRONMENT, "<eos>\nuser: hi<eos>\nassistant: "),
            (POLICY, "ab"),
        ]


@pytest.mark.parametrize("answer", ["plain", CALL, ""])
async def test_stream_tells_the_same(answer):
    async with opened(writes(answer)) as door:
        tools = [{"type": "function", "function": ADD}]
        whole = await door.chat([HI], tools=tools, logprobs=True)
        options = {"tools": tools, "logprobs": True, "stream_options": {"include_usage": True}}
        content, calls, reasons, logprobs, usage = "", [], [], [], None
        stream = await door.client.chat.completions.create(model="m", messages=[HI], stream=True, **options)
        async for chunk in stream:
            usage = chunk.usage or usage
            for choice in chunk.choices:
                content += choice.delta.content or ""
                calls += [(call.index, call.function) for call in choice.delta.tool_calls or []]
                reasons += [choice.finish_reason] if choice.finish_reason else []
                logprobs += choice.logprobs.content if choice.logprobs else []
        assert content == (whole.message.content or "")
        assert [(n, f.name, f.arguments) for n, f in calls] == [
            (n, call.function.name, call.function.arguments) for n, call in enumerate(whole.message.tool_calls or [])
        ]
        assert reasons == [whole.finish_reason] and logprobs == whole.logprobs.content
        assert len(logprobs) == usage.completion_tokens == len(answer) + 1
        assert usage.prompt_tokens == len(door.recorder.episode((), None).rollouts[0].spans[0].token_ids)
        messages = {
            "model": "m",
            "max_tokens": 99,
            "messages": [HI],
            "tools": [{"name": "add", "input_schema": {}}],
        }
        told = await door.anthropic.messages.create(**messages)
        async with door.anthropic.messages.stream(**messages) as events:
            streamed = await events.get_final_message()
        plain = [{"type": b.type, **b.model_dump(include={"text", "name", "input"})} for b in told.content]
        assert plain == [{"type": b.type, **b.model_dump(include={"text", "name", "input"})} for b in streamed.content]
        assert (told.stop_reason, told.usage.output_tokens) == (streamed.stop_reason, streamed.usage.output_tokens)


async def test_tool_calls_come_out_and_go_back_in():
    async with opened(writes(CALL, "3")) as door:
        tools = [{"type": "function", "function": ADD}]
        first = await door.chat([HI], tools=tools)
        assert (first.finish_reason, first.message.content) == ("tool_calls", "I ask.")
        [call] = first.message.tool_calls
        assert (call.function.name, json.loads(call.function.arguments)) == ("add", {"a": 1, "b": [2]})
        result = {"role": "tool", "tool_call_id": call.id, "content": "3"}
        await door.chat([HI, first.message.model_dump(), result], tools=tools)
        [spans] = door.rollouts()
    assert spans[0][1].startswith('<bos>tools: [{"type": "function", "function": {"name": "add"')
    assert spans[1:] == [(POLICY, CALL + "<eos>"), (ENVIRONMENT, "\ntool: 3<eos>\nassistant: "), (POLICY, "3<eos>")]


async def test_anthropic_agent_with_a_tool_is_one_rollout():
    async with opened(writes(CALL, "3", "bye")) as door:
        common = {"model": "m", "max_tokens": 99, "system": "Be brief.", "stop_sequences": ["###"]}
        common["tools"] = [{"name": "add", "description": "Add.", "input_schema": {"type": "object"}}]
        first = await door.anthropic.messages.create(messages=[HI], **common)
        assert [block.type for block in first.content] == ["text", "tool_use"] and first.stop_reason == "tool_use"
        used = first.content[1]
        assert (used.name, used.input) == ("add", {"a": 1, "b": [2]})
        blocks = [block.model_dump(exclude_none=True) for block in first.content]
        result = {"type": "tool_result", "tool_use_id": used.id, "content": [{"type": "text", "text": "3"}]}
        messages = [HI, {"role": "assistant", "content": blocks}]
        messages.append({"role": "user", "content": [result, {"type": "text", "text": "so?"}]})
        second = await door.anthropic.messages.create(messages=messages, **common)
        messages += [{"role": "assistant", "content": second.content[0].text}, HI]
        await door.anthropic.messages.create(messages=messages, **common)
        [spans] = door.rollouts()
    assert spans[0][1].partition("system: ")[2] == "Be brief.<eos>\nuser: hi<eos>\nassistant: "
    assert spans[1:] == [
        (POLICY, CALL + "<eos>"),
        (ENVIRONMENT, "\ntool: 3<eos>\nuser: so?<eos>\nassistant: "),
        (POLICY, "3<eos>"),
        (ENVIRONMENT, "\nuser: hi<eos>\nassistant: "),
        (POLICY, "bye<eos>"),
    ]


async def test_shortened_forked_and_changed_histories_are_rollouts_of_their_own():
    async with opened(writes("a", "b", "c", "d")) as door:
        answer = {"role": "assistant", "content": "a"}
        await door.chat([HI])
        await door.chat([HI, answer, {"role": "user", "content": "1"}])
        await door.chat([HI, answer, {"role": "user", "content": "2"}])  # a fork
        await door.chat([{"role": "developer", "content": "s"}, HI, {**answer, "content": "A"}, HI])
        first, fork, changed = door.rollouts()
    assert first[1:] == [(POLICY, "a<eos>"), (ENVIRONMENT, "\nuser: 1<eos>\nassistant: "), (POLICY, "b<eos>")]
    assert fork == [
        (PROMPT, "<bos>user: hi<eos>\nassistant: a<eos>\nuser: 2<eos>\nassistant: "),
        (POLICY, "c<eos>"),
    ]
    history = "<bos>system: s<eos>\nuser: hi<eos>\nassistant: A<eos>\nuser: hi<eos>\nassistant: "
    assert changed == [(PROMPT, history), (POLICY, "d<eos>")]


def test_template_that_drops_reasoning_is_found_out_and_its_conversations_are_kept_or_split():
    thinking, answer = Thinking(add_bos=False), "<think>2+2</think> 4"
    assert rewritten_parts(TOKENIZER) == ()
    assert rewritten_parts(thinking) == ("reasoning",)

    async def run(history):
        async with opened(writes(answer, "6"), tokenizer=thinking, history=history) as door:
            first = await door.chat([HI])
            await door.chat([HI, first.message.model_dump(), HI])
            return door.rollouts()

    [appended] = asyncio.run(run("append"))
    assert appended[1:] == [
        (POLICY, answer + "<eos>"),
        (ENVIRONMENT, "\nuser: hi<eos>\nassistant: "),
        (POLICY, "6<eos>"),
    ]
    first, second = asyncio.run(run("split"))
    assert first[1:] == [(POLICY, answer + "<eos>")]
    assert second == [(PROMPT, "<bos>user: hi<eos>\nassistant: 4<eos>\nuser: hi<eos>\nassistant: "), (POLICY, "6<eos>")]


async def test_split_keeps_what_the_template_does_not_rewrite():
    async with opened(writes("a", "b"), history="split") as door:
        await door.chat([HI])
        await door.chat([HI, {"role": "assistant", "content": "a"}, HI])
        [spans] = door.rollouts()
    assert spans[2:] == [(ENVIRONMENT, "\nuser: hi<eos>\nassistant: "), (POLICY, "b<eos>")]


async def test_requests_at_the_same_time_are_rollouts_of_their_own():
    async with opened(writes("a", "b", "c", latency_s=0.2)) as door:
        choices = await asyncio.gather(*(door.chat([HI]) for _ in range(3)))
        follow = [HI, choices[1].message.model_dump(), HI]
        await door.chat(follow)
        contents = [choice.message.content for choice in choices]
        rollouts = door.rollouts()
    assert sorted(contents) == ["a", "b", "c"]
    assert sorted(spans[1][1] for spans in rollouts) == ["a<eos>", "b<eos>", "c<eos>"]
    continued = [spans for spans in rollouts if len(spans) == 4]
    assert [spans[1][1] for spans in continued] == [contents[1] + "<eos>"]


async def test_equal_texts_are_continued_each_by_itself_at_the_same_time():
    # The text that is continued first gets its answer last, and so continues the second of the equal answers.
    async with opened(writes("same", "same", "a long answer", "b", token_latency_s=0.05)) as door:
        for prompt in ("hi", "hisame"):
            asked = [door.client.completions.create(model="m", prompt=prompt) for _ in range(2)]
            await asyncio.gather(*asked)
        answers = [[text for source, text in spans if source is POLICY] for spans in door.rollouts()]
    assert answers == [["same<eos>", "b<eos>"], ["same<eos>", "a long answer<eos>"]]


async def test_stop_text_ends_the_answer_and_what_is_recorded():
    engine = writes("Thought: add. Observation: 3 Observation: 4")

    async with opened(engine) as door:
        first = await door.chat([HI], stop=["Observation:", "never"], logprobs=True)
        assert (first.message.content, first.finish_reason) == ("Thought: add. ", "stop")
        assert "".join(one.token for one in first.logprobs.content) == "Thought: add. Observation:"
        await door.chat([HI, first.message.model_dump(), HI], stop="Thought")
        text = await door.client.completions.create(model="m", prompt="x", stop="add")
        assert (text.choices[0].text, text.choices[0].finish_reason) == ("Thought: ", "stop")
        first, second = door.rollouts()
    assert first[1:] == [
        (POLICY, "Thought: add. Observation:"),
        (ENVIRONMENT, "<eos>\nuser: hi<eos>\nassistant: "),
        (POLICY, "Thought"),
    ]
    assert second == [(PROMPT, "x"), (POLICY, "Thought: add")]


async def test_completions_continue_texts_and_tokens():
    async with opened(writes("a", "b", "c", "d")) as door:
        create = door.client.completions.create
        first = (await create(model="m", prompt="x", logprobs=1)).choices[0]
        assert (first.text, first.logprobs.tokens, first.logprobs.text_offset) == ("a", ["a", "<eos>"], [0, 1])
        stream = await create(model="m", prompt=["xa and"], stream=True)
        assert [chunk.choices[0].text async for chunk in stream] == ["b"]
        await create(model="m", prompt=[1, 5, 5])
        await create(model="m", prompt=[1, 5, 5, ord("c"), EOS_ID, 7])
        [texts, tokens] = door.rollouts()
    assert texts == [(PROMPT, "x"), (POLICY, "a<eos>"), (ENVIRONMENT, " and"), (POLICY, "b<eos>")]
    assert tokens == [(PROMPT, "\x01\x05\x05"), (POLICY, "c<eos>"), (ENVIRONMENT, "\x07"), (POLICY, "d<eos>")]
