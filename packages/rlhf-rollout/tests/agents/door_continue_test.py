"""The door: a last message of the assistant is the beginning of the answer, and how requests say otherwise."""

import asyncio
import logging

import httpx
import numpy as np
import pytest

from door_testing import HI, TOKENIZER, opened, writes
from rlhf_data.records import Prompt, SpanSource
from rlhf_rollout.agents import recorder as recorder_module
from rlhf_rollout.agents.recorder import EpisodeLimits, EpisodeRecorder
from rlhf_rollout.engines.fake import FakeEngine
from rlhf_rollout.protocols import SamplingParams
from rlhf_rollout.router import EngineRouter

BEGUN = {"role": "assistant", "content": "It is"}
PROMPT, POLICY, ENVIRONMENT = SpanSource.PROMPT, SpanSource.POLICY, SpanSource.ENVIRONMENT
HEADER = "<bos>user: hi<eos>\nassistant: "


def post(path, *bodies, engine=None):
    """Return the answers to requests, one after the other, and the rollouts."""

    async def run():
        async with opened(engine or writes(" 4.", "5"), max_tokens=9) as door, httpx.AsyncClient(timeout=60) as client:
            answers = [await client.post(f"{door.session.url}/v1/{path}", json=body) for body in bodies]
            return answers, door.rollouts()

    return asyncio.run(run())


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"continue_final_message": True},
        {"continue_final_message": True, "add_generation_prompt": False},
        {"add_generation_prompt": False},
    ],
)
def test_policy_continues_the_beginning_of_its_answer(fields):
    [answer], [rollout] = post("chat/completions", {"messages": [HI, BEGUN], **fields})
    assert answer.json()["choices"][0]["message"]["content"] == " 4."
    assert rollout == [(PROMPT, HEADER + "It is"), (POLICY, " 4.<eos>")]


@pytest.mark.parametrize("fields", [{"add_generation_prompt": True}, {"continue_final_message": False}])
def test_policy_begins_a_message_of_its_own_where_the_request_says_so(fields):
    [answer], [rollout] = post("chat/completions", {"messages": [HI, BEGUN], **fields})
    assert answer.status_code == 200
    assert rollout[0] == (PROMPT, HEADER + "It is<eos>\nassistant: ")


@pytest.mark.parametrize("path", ["messages", "responses"])
def test_other_protocols_continue_it_too(path):
    body = {"messages": [HI, BEGUN], "max_tokens": 9} if path == "messages" else {"input": [HI, BEGUN]}
    [answer], [rollout] = post(path, body)
    assert answer.status_code == 200
    assert rollout[0] == (PROMPT, HEADER + "It is")


@pytest.mark.parametrize("fields", [{}, {"add_generation_prompt": True}, {"continue_final_message": False}])
def test_question_is_followed_by_the_header_of_an_answer(fields):
    _, [rollout] = post("chat/completions", {"messages": [HI], **fields})
    assert rollout[0] == (PROMPT, HEADER)


@pytest.mark.parametrize(
    ("last", "fields", "message"),
    [
        (BEGUN, {"continue_final_message": True, "add_generation_prompt": True}, "exclude each other"),
        (HI, {"continue_final_message": True}, "the last message is not the assistant's"),
        (HI, {"add_generation_prompt": False}, "the last message must be the beginning of the answer"),
        (BEGUN, {"add_generation_prompt": False, "continue_final_message": False}, "must be the beginning"),
        (BEGUN, {"continue_final_message": "yes"}, "`continue_final_message` must be true or false, got 'yes'"),
        ({"role": "assistant", "content": " "}, {}, "the assistant's and empty"),
        (
            {"role": "assistant", "content": "x", "tool_calls": [{"id": "1", "function": {"name": "f"}}]},
            {},
            "calls tools",
        ),
    ],
)
def test_request_that_leaves_nothing_to_continue_is_refused(last, fields, message):
    [answer], _ = post("chat/completions", {"messages": [HI, last], **fields})
    assert answer.status_code == 400
    assert message in answer.json()["error"]["message"]


def test_answer_that_was_begun_is_known_to_the_next_request():
    whole = {"role": "assistant", "content": "It is 4."}
    _, [rollout] = post("chat/completions", {"messages": [HI, BEGUN]}, {"messages": [HI, whole, HI]})
    expected = [(PROMPT, HEADER + "It is"), (POLICY, " 4.<eos>"), (ENVIRONMENT, "\nuser: hi<eos>\nassistant: ")]
    assert rollout == [*expected, (POLICY, "5<eos>")]


def test_next_answer_of_a_conversation_may_be_begun():
    first = {"role": "assistant", "content": " 4."}
    _, [rollout] = post("chat/completions", {"messages": [HI]}, {"messages": [HI, first, HI, BEGUN]})
    assert rollout[2] == (ENVIRONMENT, "\nuser: hi<eos>\nassistant: It is")


def test_answer_that_was_cut_goes_on_behind_its_own_tokens():
    cut = {"role": "assistant", "content": "abcd"}
    bodies = {"messages": [HI], "max_tokens": 4}, {"messages": [HI, cut]}
    _, [rollout] = post("chat/completions", *bodies, engine=writes("abcdefgh", "efgh"))
    assert rollout == [(PROMPT, HEADER), (POLICY, "abcd"), (POLICY, "efgh<eos>")]


def test_answer_that_has_ended_is_continued_as_another_rollout():
    ended = {"role": "assistant", "content": " 4."}
    _, rollouts = post("chat/completions", {"messages": [HI]}, {"messages": [HI, ended]})
    assert [rollout[0][1] for rollout in rollouts] == [HEADER, HEADER + " 4."]


def test_equal_messages_that_end_differently_are_not_one_request():
    bodies = [{"messages": [HI, BEGUN], "add_generation_prompt": flag} for flag in (True, False)]
    _, rollouts = post("chat/completions", *bodies)
    assert len({rollout[0][1] for rollout in rollouts}) == 2


@pytest.mark.parametrize(
    ("path", "asked", "ignored"),
    [
        ("chat/completions", {"logprobs": True, "top_logprobs": 3}, "top_logprobs"),
        ("chat/completions", {"logprobs": True, "top_logprobs": 0}, None),
        ("completions", {"logprobs": 2}, "logprobs"),
        ("completions", {"logprobs": 0}, None),
        ("completions", {"logprobs": True}, None),
    ],
)
def test_alternatives_to_tokens_are_said_to_be_missing(path, asked, ignored, caplog):
    body = {**({"prompt": "x"} if path == "completions" else {"messages": [HI]}), **asked}
    with caplog.at_level(logging.WARNING):
        answers, _ = post(path, body, body | {"stop": "z"})
    for answer in answers:
        assert answer.json()["choices"][0]["logprobs"] is not None
        assert answer.headers.get("x-ignored-parameters") == ignored
    said = [record.getMessage() for record in caplog.records if "is ignored" in record.getMessage()]
    assert len(said) == (ignored is not None)
    assert all(f"agents ask for {ignored}," in text and "without alternatives" in text for text in said)


@pytest.mark.parametrize(("asked", "size", "is_said"), [(99, 8, True), (8, 8, False), (3, 3, False)])
def test_agent_gets_no_longer_answers_than_those_of_the_run(asked, size, is_said, caplog):
    recorder_module._say_that_answers_are_no_longer.cache_clear()

    async def run():
        recorder = EpisodeRecorder(
            EngineRouter([FakeEngine(script=lambda prompt, seed: [7] * 100)]),
            Prompt("p", np.array([4, 5]), "p"),
            SamplingParams(max_tokens=8),
            name="g/0",
            group_id="g",
            limits=EpisodeLimits(),
            decode=TOKENIZER.decode,
        )
        sampled = [await recorder.sample([4, 5], {"max_tokens": asked}) for _ in range(2)]
        return {(len(one.completion.token_ids), one.is_truncated) for one in sampled}

    with caplog.at_level(logging.WARNING):
        assert asyncio.run(run()) == {(size, size == 8)}
    said = [record.getMessage() for record in caplog.records]
    expected = "agents ask for answers longer than those of the run, which have at most 8 tokens"
    assert said == [expected] * is_said
