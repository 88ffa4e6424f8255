"""Chat templates that write the time or the date."""

import pickle
from datetime import datetime

import pytest

from record_testing import write_jsonl
from rlhf_data.chat.template import render_chat, template_clock, template_dates
from rlhf_data.examples.load import load_examples
from rlhf_data.examples.sft import SftEncoder
from rlhf_data.rows.sources import open_sources
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


def test_processes_that_encode_have_the_same_time(tokenizer):
    """Workers get a pickled tokenizer."""
    now = template_clock(tokenizer, datetime(2025, 1, 2))
    assert template_clock(pickle.loads(pickle.dumps(tokenizer))) == now


def test_cached_examples_are_those_of_the_same_date(tokenizer, tmp_path):
    data = write_jsonl(tmp_path / "a.jsonl", [{"input": "2+2?", "output": "?"}])
    tokenizer.chat_template = TEMPLATE.replace(" %f", "")

    def is_read_again(*when):
        template_clock(tokenizer, datetime(*when))
        calls = []
        encoder = SftEncoder(tokenizer=tokenizer, apply_chat_template=True)
        load_examples(open_sources(data), encoder, cache_dir=tmp_path / "cache", progress=calls.append)
        return not calls

    assert not is_read_again(2025, 12, 31, 8)
    assert is_read_again(2025, 12, 31, 23)
    assert not is_read_again(2026, 1, 1)
    assert is_read_again(2025, 12, 31, 9)


def test_dates_are_those_that_the_template_writes_in_its_order(tokenizer):
    template_clock(tokenizer, datetime(2025, 1, 2))
    tokenizer.chat_template += '{{ strftime_now("%Y") }}'
    assert template_dates(tokenizer) == ["02 Jan 2025 000000", "2025"]


def test_templates_without_a_time_have_no_clock():
    assert template_clock(ByteTokenizer(), datetime(2025, 1, 2)) is None
    assert template_dates(ByteTokenizer()) == []
