"""Conversations with a tokenizer that writes a space before each text: what is added has no space of its own."""

import numpy as np
import pytest

from rlhf_rollout.agents.conversation import Conversations
from rlhf_rollout.agents.hosted import HostedAgent
from rlhf_rollout.agents.recorder import EpisodeLimits
from rlhf_rollout.engines.fake import FakeEngine
from rlhf_rollout.router import EngineRouter
from sentencepiece_testing import make_tokenizer

QUESTION = {"role": "user", "content": "What is 3 plus 4?"}
ANSWER = {"role": "assistant", "content": "It is 7."}
NEXT = {"role": "user", "content": "Yes"}


@pytest.fixture(params=["first", "prepend"])
def tokenizer(request):
    # A template whose follow-up begins with text, so that a space before it would be seen.
    made = make_tokenizer(request.param)
    made.chat_template = "{% for m in messages %}{{ m.role + '\n' + m.content + '|\n' }}{% endfor %}"
    made.chat_template += "{% if add_generation_prompt %}{{ 'assistant\n' }}{% endif %}"
    return made


def ids(tokenizer, text):
    return tokenizer(text, add_special_tokens=False)["input_ids"]


def test_text_of_an_environment_continues_the_conversation(tokenizer):
    agent = HostedAgent(EngineRouter([FakeEngine()]), None, tokenizer, EpisodeLimits())
    before = ids(tokenizer, "What is 3?\n")
    assert [*before, *agent.encode("It is 4")] == ids(tokenizer, "What is 3?\nIt is 4")
    assert agent.encode("It is 4", "") == ids(tokenizer, "It is 4")


def test_follow_up_of_messages_has_the_tokens_of_the_whole(tokenizer):
    messages = [QUESTION, ANSWER, NEXT]
    whole = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    start = ids(tokenizer, "user\nWhat is 3 plus 4?|\nassistant\nIt is 7.")
    agent = HostedAgent(EngineRouter([FakeEngine()]), None, tokenizer, EpisodeLimits())
    assert agent.render([QUESTION], [], [], "e") == ids(tokenizer, "user\nWhat is 3 plus 4?|\nassistant\n")
    assert [*start, *agent.render([NEXT], [], start, "e")] == whole
    chats = Conversations(tokenizer)
    chats.add_chat([QUESTION, ANSWER], [], np.array(start), is_ended=False)
    assert chats.encode_chat(messages, []).token_ids.tolist() == whole


def test_follow_up_of_a_text_has_the_tokens_of_the_whole(tokenizer):
    texts = Conversations(tokenizer)
    texts.add_text("What is 3?\n", np.array(ids(tokenizer, "What is 3?\n")))
    assert texts.encode_text("What is 3?\nIt is 4").tolist() == ids(tokenizer, "What is 3?\nIt is 4")


def test_answer_that_is_continued_after_its_end_has_the_tokens_without_the_end(tokenizer):
    chats = Conversations(tokenizer)
    start = ids(tokenizer, "user\nWhat is 3 plus 4?|\nassistant\nIt is 7.")
    for end, is_ended in (([9], True), ([], False)):
        chats.add_chat([QUESTION, ANSWER], [], np.array([*start, *end]), is_ended=is_ended)
        assert chats.encode_chat([QUESTION, ANSWER], [], is_continued=True).token_ids.tolist() == start


def test_follow_up_that_a_template_refuses_alone_is_rendered_with_the_whole(tokenizer):
    tokenizer.chat_template = (
        "{% if messages[0].content == '?' %}{{ raise_exception('no such call') }}{% endif %}" + tokenizer.chat_template
    )
    chats = Conversations(tokenizer)
    chats.add_chat([QUESTION, ANSWER], [], np.array([1, 2, 3]), is_ended=True)
    whole = "user\nWhat is 3 plus 4?|\nassistant\nIt is 7.|\nuser\nYes|\nassistant\n"
    assert chats.encode_chat([QUESTION, ANSWER, NEXT], []).token_ids.tolist() == ids(tokenizer, whole)
