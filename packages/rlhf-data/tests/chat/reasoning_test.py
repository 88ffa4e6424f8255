"""Answers with reasoning, which templates of reasoning models drop: the policy's own text is trained."""

import pytest

from record_testing import write_jsonl
from rlhf_data.chat.conversation import encode_conversation
from rlhf_data.errors import ConfigError, DataError
from rlhf_data.examples.preference import PreferenceEncoder
from rlhf_data.examples.sft import SftEncoder
from rlhf_data.prompts import load_prompts
from rlhf_data.rows.row import Row
from rlhf_data.rows.sources import open_sources
from sentencepiece_testing import make_tokenizer

THOUGHT = "<think>\n1 and 1\n</think>\n\nIt is 2."
# R1's distilled models: all answers lose their thoughts, and the generation prompt may begin one.
ANSWER = "{{ m.content.split('</think>')[-1] + '</s>' }}"
R1 = "{% for m in messages %}{% if m.role == 'user' %}{{ 'U:' + m.content }}{% else %}{{ 'A:' }}"
R1 += ANSWER + "{% endif %}{% endfor %}{% if add_generation_prompt %}{{ 'A:' }}{% endif %}"
R1_OPENS = R1.removesuffix("{{ 'A:' }}{% endif %}") + "{{ 'A:<think>\n' }}{% endif %}"
# Qwen3: only the last answer keeps its thoughts, in a form of its own, and gets empty ones without any.
QWEN3 = (
    "{% for m in messages %}{% if m.role == 'user' %}{{ 'U:' + m.content }}{% else %}{{ 'A:' }}"
    "{% set thought = m.content.split('</think>')[0].split('<think>')[-1] if '</think>' in m.content else '' %}"
    "{% if loop.last %}{{ '<think>\n' + thought.strip() + '\n</think>\n\n' }}{% endif %}"
    "{{ m.content.split('</think>')[-1].lstrip() + '</s>\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'A:' }}{% if enable_thinking is defined and not enable_thinking %}"
    "{{ '<think>\n\n</think>\n\n' }}{% endif %}{% endif %}"
)
# Qwen3.8: thoughts are beside the content, and the generation prompt begins one.
BESIDE = (
    "{% for m in messages %}{% if m.role == 'user' %}{{ 'U:' + m.content }}{% else %}"
    "{{ 'A:<think>\\n' + (m.reasoning_content or '') + '\\n</think>\\n\\n' + m.content + '</s>\\n' }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}{{ 'A:<think>\\n' }}{% endif %}"
)
MARKED = R1.replace(ANSWER, "{% generation %}" + ANSWER + "{% endgeneration %}")
MARKED_BESIDE = BESIDE.replace("'A:<think>", "'A:' }}{% generation %}{{ '<think>", 1)
MARKED_BESIDE = MARKED_BESIDE.replace("+ '</s>\\n' }}", "+ '</s>' }}{% endgeneration %}")
ASKED = [{"role": "user", "content": "1+1?"}]
ANSWERED = [*ASKED, {"role": "assistant", "content": "<think>\nsum\n</think>\n\n2"}, {"role": "user", "content": "+1?"}]


def tokenizer_with(template):
    tokenizer = make_tokenizer("bytes")
    tokenizer.chat_template = template
    return tokenizer


def encode(template, messages, *, row=None, **options):
    """The text of the conversation, with what is trained in brackets."""
    tokenizer = tokenizer_with(template)
    ids, mask = encode_conversation(Row(row or {}, "o", 1), messages, tokenizer, **options)
    first = int(mask.argmax())
    assert mask[first:].all()
    return f"{tokenizer.decode(ids[:first])}[{tokenizer.decode(ids[first:])}]"


def answered(content, before=ASKED, **more):
    return [*before, {"role": "assistant", "content": content, **more}]


@pytest.mark.parametrize(
    ("template", "content", "expected"),
    [
        (R1, THOUGHT, f"U:1+1?A:[{THOUGHT}</s>]"),
        (R1, "It is 2.", "U:1+1?A:[It is 2.</s>]"),
        (MARKED, THOUGHT, f"U:1+1?A:[{THOUGHT}</s>]"),
        (MARKED, "It is 2.", "U:1+1?A:[It is 2.</s>]"),
        # What the policy wrote, and what others write, with the tag.
        (R1_OPENS, "1 and 1\n</think>\n\nIt is 2.", "U:1+1?A:<think>\n[1 and 1\n</think>\n\nIt is 2.</s>]"),
        (R1_OPENS, THOUGHT, "U:1+1?A:<think>\n[1 and 1\n</think>\n\nIt is 2.</s>]"),
        (R1_OPENS, "\n<think>\n\nx</think>y", "U:1+1?A:<think>\n[\nx</think>y</s>]"),
        (R1_OPENS, "It is 2.", "U:1+1?A:<think>\n[It is 2.</s>]"),
        (BESIDE, "1 and 1\n</think>\n\nIt is 2.", "U:1+1?A:<think>\n[1 and 1\n</think>\n\nIt is 2.</s>]"),
        (BESIDE, THOUGHT, "U:1+1?A:<think>\n[1 and 1\n</think>\n\nIt is 2.</s>]"),
        (BESIDE, "It is 2.", "U:1+1?A:<think>\n[\n</think>\n\nIt is 2.</s>]"),
        (MARKED_BESIDE, THOUGHT, "U:1+1?A:<think>\n[1 and 1\n</think>\n\nIt is 2.</s>]"),
        (MARKED_BESIDE, "It is 2.", "U:1+1?A:[<think>\n\n</think>\n\nIt is 2.</s>]"),
        (QWEN3, THOUGHT, f"U:1+1?A:[{THOUGHT}</s>]"),
        (QWEN3, "<think>1 and 1</think>It is 2.", "U:1+1?A:[<think>1 and 1</think>It is 2.</s>]"),
        (QWEN3, "It is 2.", "U:1+1?A:[<think>\n\n</think>\n\nIt is 2.</s>]"),
    ],
)
def test_last_answer_is_trained_as_it_is(template, content, expected):
    assert encode(template, answered(content)) == expected


@pytest.mark.parametrize("template", [R1, R1_OPENS, QWEN3])
def test_earlier_answers_are_as_in_generation(template):
    rendered = tokenizer_with(template).apply_chat_template(ANSWERED, tokenize=False, add_generation_prompt=True)
    assert "sum" not in rendered
    trained = THOUGHT.removeprefix("<think>\n") if template == R1_OPENS else THOUGHT
    assert encode(template, answered(THOUGHT, ANSWERED)) == f"{rendered}[{trained}</s>]"


@pytest.mark.parametrize("template", [R1, R1_OPENS, QWEN3, MARKED])
def test_earlier_answers_cannot_be_trained_without_their_thoughts(template):
    with pytest.raises(ConfigError, match=r"^o:1: the chat template rewrites message [13], or") as caught:
        encode(template, answered(THOUGHT, ANSWERED), all_turns=True)
    assert "or train the last answer only" in str(caught.value)


@pytest.mark.parametrize(
    ("template", "content", "expected"),
    [
        (R1, "<think>\n1 and 1\n</think>\n\nIt", "U:1+1?A:[<think>\n1 and 1\n</think>\n\nIt]"),
        (R1_OPENS, "<think>\n1 an", "U:1+1?A:<think>\n[1 an]"),
        (R1_OPENS, "1 an", "U:1+1?A:<think>\n[1 an]"),
        (BESIDE, "1 an", "U:1+1?A:<think>\n[1 an]"),
        (QWEN3, "<think>1 and 1</think>It", "U:1+1?A:[<think>1 and 1</think>It]"),
    ],
)
def test_truncated_answer_is_trained_without_an_end(template, content, expected):
    assert encode(template, answered(content), row={"finish_reason": "length"}) == expected


def test_generated_answer_is_trained_after_the_tokens_of_its_prompt(tmp_path):
    tokenizer = tokenizer_with(R1_OPENS)
    rows = open_sources(
        write_jsonl(tmp_path / "a.jsonl", [{"q": "1+1?", "good": "1 and 1\n</think>\n\nIt is 2.", "bad": "3"}])
    )
    [prompt] = load_prompts(rows, tokenizer, input_key="q", apply_chat_template=True)
    generated = tokenizer("1 and 1\n</think>\n\nIt is 2.", add_special_tokens=False)["input_ids"]
    expected = [*prompt.token_ids.tolist(), *generated, tokenizer.eos_token_id]
    [row] = rows
    options = {"tokenizer": tokenizer, "apply_chat_template": True}
    assert SftEncoder(input_key="q", output_key="good", **options)(row).token_ids.tolist() == expected
    pair = PreferenceEncoder(prompt_key="q", chosen_key="good", rejected_key="bad", **options)(row)
    assert pair.chosen.token_ids.tolist() == expected
    assert tokenizer.decode(pair.rejected.token_ids) == "U:1+1?A:<think>\n3</s>"


@pytest.mark.parametrize("template", [R1, MARKED])
@pytest.mark.parametrize("key", ["reasoning_content", "reasoning", "thinking"])
def test_reasoning_beside_the_content_is_never_dropped(template, key):
    says = rf"^o:1: the chat template does not write the `{key}` of an answer\n\nhint: write it"
    with pytest.raises(DataError, match=says):
        encode(template, answered("It is 2.", **{key: "1 and 1"}))
    writes = template.replace("{{ m.content", f"{{{{ (m.{key} or '') + m.content")
    assert encode(writes, answered("It is 2.", **{key: "1 and 1 "})) == "U:1+1?A:[1 and 1 It is 2.</s>]"
    assert encode(template, answered("It is 2.", **{key: None})) == "U:1+1?A:[It is 2.</s>]"
    # That of an earlier answer is not trained, and not there in generation either.
    earlier = [*answered("2", **{key: "1 and 1"}), {"role": "user", "content": "+1?"}]
    assert encode(template, answered("It is 3.", earlier)) == "U:1+1?A:2</s>U:+1?A:[It is 3.</s>]"


def test_tool_calls_that_a_template_leaves_out_or_rewrites_are_refused():
    calls = [{"type": "function", "function": {"name": "add", "arguments": {}}}]
    with pytest.raises(DataError, match="does not write the call of 'add'"):
        encode(R1_OPENS, answered("", tool_calls=calls))
    with pytest.raises(ConfigError, match="rewrites message 1"):
        encode("{{ messages[-1].tool_calls }}" + R1_OPENS, answered("", tool_calls=calls))
