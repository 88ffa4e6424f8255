"""Chat templates that write the time or the date."""

from datetime import datetime

import pytest

from rlhf_data.chat import encode_conversation, render_chat, template_clock
from rlhf_data.rows import Row
from rlhf_data.testing import ByteTokenizer

TEMPLATE = (
    "{{ strftime_now('%d %b %Y %f') }}|{% for m in messages %}{{ m.role + ':' + m.content + '|' }}{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)
QUESTION = {"role": "user", "content": "2+2?"}


@pytest.fixture
def tokenizer():
    tokenizers = pytest.importorskip("tokenizers")
    transformers = pytest.importorskip("transformers")
    core = tokenizers.Tokenizer(tokenizers.models.WordLevel({"?": 0, "|": 1}, unk_token="?"))
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=core, eos_token="|")
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def rendered(tokenizer):
    return render_chat([QUESTION], tokenizer, origin="x", add_generation_prompt=True)


def test_template_writes_the_time_of_its_first_rendering(tokenizer):
    first = rendered(tokenizer)
    assert [rendered(tokenizer) for _ in range(3)] == [first] * 3
    assert first.startswith(template_clock(tokenizer).strftime("%d %b %Y %f|"))


def test_template_writes_the_time_that_it_is_given(tokenizer):
    now = datetime(2025, 12, 31, 23, 59, 59, 7)
    assert template_clock(tokenizer, now) == now
    assert rendered(tokenizer) == "31 Dec 2025 000007|user:2+2?|assistant:"
    assert template_clock(tokenizer) == now
    assert template_clock(tokenizer, None) == now


def test_named_templates_have_the_time_too(tokenizer):
    tokenizer.chat_template = {"default": TEMPLATE, "tool_use": "none"}
    template_clock(tokenizer, datetime(2025, 1, 2))
    assert rendered(tokenizer).startswith("02 Jan 2025 000000|")


def test_prompt_and_answer_have_the_same_time(tokenizer):
    """The mask comes from two renderings, which must agree."""
    ids, _ = encode_conversation(Row({}, "x", 1), [QUESTION, {"role": "assistant", "content": "4"}], tokenizer)
    assert len(ids)


def test_templates_without_a_time_have_no_clock():
    assert template_clock(ByteTokenizer(), datetime(2025, 1, 2)) is None
