"""Rendering and tokenizing: what the template writes, and special tokens exactly once."""

import json

import pytest

from record_testing import write_jsonl
from rlhf_data.chat.conversation import encode_conversation
from rlhf_data.chat.input_template import InputTemplate
from rlhf_data.chat.messages import joined_messages, row_messages, row_tools
from rlhf_data.chat.template import render_chat, render_follow_up
from rlhf_data.chat.tokens import encode_completion, encode_prompts
from rlhf_data.errors import ConfigError, DataError
from rlhf_data.rows.row import Row
from rlhf_data.rows.sources import open_sources
from rlhf_data.testing import BOS_ID, EOS_ID, ByteTokenizer


def row_of(tmp_path, value):
    return next(iter(open_sources(write_jsonl(tmp_path / "a.jsonl", [{"q": value}]))))


def render(row, **template):
    return InputTemplate(tokenizer=ByteTokenizer(), **template).render(row, "q")


def test_input_template_chat_template_wraps_text_as_user_message(tmp_path):
    text = render(row_of(tmp_path, "2+2"), apply_chat_template=True)
    assert text == "<bos>user: 2+2<eos>\nassistant: "


def test_input_template_is_literal_but_for_the_placeholder(tmp_path):
    text = render(row_of(tmp_path, "a {} b"), input_template='{"q": "{}"} %s {0}')
    assert text == '{"q": "a {} b"} %s {0}'


@pytest.mark.parametrize("template", ["", "no place", "{} and {}", "{0}"])
def test_input_template_without_exactly_one_placeholder_is_refused(template):
    with pytest.raises(ConfigError, match=r"must contain `\{\}` exactly once"):
        InputTemplate(tokenizer=ByteTokenizer(), input_template=template)


def test_input_template_two_templates_or_none_to_apply_is_refused():
    with pytest.raises(ConfigError, match="``input_template`` has no effect"):
        InputTemplate(tokenizer=ByteTokenizer(), apply_chat_template=True, input_template="{}")
    with pytest.raises(ConfigError, match=r"has no chat template\n\nhint: .*``set_chat_template.text``"):
        InputTemplate(tokenizer=ByteTokenizer(chat_template=None), apply_chat_template=True)


@pytest.mark.parametrize(
    ("value", "says"),
    [
        ([], "empty list of messages"),
        (["hi"], "message 0 of `q` needs a text `role`"),
        ([{"role": "user", "content": "x"}, {"role": "user"}], "message 1 of `q`"),
        ([{"role": "user", "content": None}], "message 0 of `q`"),
        ([{"role": "assistant", "content": "x"}], "the chat template refuses the messages: no user message"),
        ("  \n", "`q` is empty"),
        (None, "got null"),
        ({"role": "user", "content": "x"}, "got an object"),
    ],
)
def test_input_template_broken_input_names_file_and_line(tmp_path, value, says):
    with pytest.raises(DataError) as caught:
        render(row_of(tmp_path, value), apply_chat_template=True)
    assert f"{tmp_path / 'a.jsonl'}:1: " in str(caught.value)
    assert says in str(caught.value)


CALL = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": {"a": 2}}}
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {"a": {}}}}}
CALLED = [
    {"role": "user", "content": "2+2?"},
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "c1", "content": "4"},
]
TOOLS_TEXT = '<bos>tools: [{"type": "function", "function": {"name": "add", "parameters": {"type": "object", '
TOOLS_TEXT += '"properties": {"a": {}}}}}]<eos>\nuser: 2+2?<eos>\n'
CALL_TEXT = 'assistant: \n<tool_call>\n{"name": "add", "arguments": {"a": 2}}\n</tool_call><eos>\n'


@pytest.mark.parametrize("tools", [[TOOL], json.dumps([TOOL])], ids=["list", "text"])
def test_input_template_writes_the_tools_of_a_row(tools):
    row = Row({"q": CALLED, "t": tools}, "a", 1)
    assert render(row, apply_chat_template=True, tools_key="t") == f"{TOOLS_TEXT}{CALL_TEXT}tool: 4<eos>\nassistant: "
    assert "add" in render(row, apply_chat_template=True)  # the call
    assert "tools: " not in render(row, apply_chat_template=True)


ASK, ANSWER = ({"role": role, "content": "x"} for role in ("user", "assistant"))


@pytest.mark.parametrize(
    ("answer", "whole"),
    [
        ([ASK, ANSWER], [ASK, ANSWER]),
        ([{"role": "system", "content": "s"}, ASK, ANSWER], [{"role": "system", "content": "s"}, ASK, ANSWER]),
        ([ANSWER], [ASK, ANSWER]),
        ([ASK], [ASK, ASK]),  # what ends with the prompt has no answer to it
    ],
)
def test_answer_that_begins_with_the_prompt_is_the_whole_conversation(answer, whole):
    assert joined_messages([ASK], answer) == whole


@pytest.mark.parametrize("text", [None, 3])
def test_content_with_a_part_whose_text_is_none_is_refused(text):
    parts = [{"type": "text", "text": part} for part in ("a", text)]
    with pytest.raises(DataError, match="o:1: "):
        row_messages(Row({"m": [{"role": "user", "content": parts}]}, "o", 1), "m")


@pytest.mark.parametrize("none", [None, [], "null", "[]"])
def test_input_template_row_without_tools_has_none(none):
    row = Row({"q": "2+2", "t": none}, "a", 1)
    assert render(row, apply_chat_template=True, tools_key="t") == "<bos>user: 2+2<eos>\nassistant: "


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({}, "o:1: unknown key `t`; known: q"),
        ({"t": "{"}, "o:1: `t` is not JSON: "),
        ({"t": '{"a": 1}'}, "o:1: `t` must be a list of tools, or its JSON text, got an object"),
        ({"t": ["add"]}, "o:1: `t` must be a list of tools, or its JSON text, got a list"),
        ({"t": 3}, "got a number\n\nhint: a tool looks like {"),
    ],
)
def test_input_template_tools_that_are_none_are_refused(values, says):
    with pytest.raises(DataError) as caught:
        render(Row({"q": "2+2"} | values, "o", 1), apply_chat_template=True, tools_key="t")
    assert says in str(caught.value)


def test_input_template_tools_need_a_chat_template_that_writes_them():
    with pytest.raises(ConfigError, match="``tools_key`` has no effect without ``apply_chat_template``"):
        InputTemplate(tokenizer=ByteTokenizer(), tools_key="t")
    for template in (PLAIN, MARKED.replace("INSIDE", "+ ' </s>'").replace("OUTSIDE", "")):
        with pytest.raises(DataError, match=r"^o:1: the chat template does not write the tool 'add'"):
            encode_conversation(Row({}, "o", 1), TALK, word_tokenizer(template), tools=[TOOL])


@pytest.mark.parametrize("role", ["system", "developer", "tool"])
def test_messages_that_a_template_does_not_write_are_refused(role):
    question = {"role": "user", "content": "2+2?"}
    messages = [question, {"role": "assistant", "content": "it"}, {"role": role, "content": " <b>4 "}, question]
    only = "{% for m in messages if m.role in ('user', 'assistant') %}{{ m.content }}{% endfor %}"
    with pytest.raises(DataError, match=rf"^o:1: the chat template does not write message 2, of role `{role}`\n\nhint"):
        render_chat(messages, word_tokenizer(only), origin="o:1", add_generation_prompt=False)
    changed = word_tokenizer("{% for m in messages %}{{ m.content|trim|escape }}{% endfor %}")
    text = render_chat(messages, changed, origin="o:1", add_generation_prompt=False)
    assert text == "2+2?it&lt;b&gt;42+2?"
    short = render_chat(messages, word_tokenizer(only), origin="o", add_generation_prompt=False, must_write_all=False)
    assert short == "2+2?it2+2?"
    # Models that read images have templates that go through the parts of a content, and text has none.
    parts = word_tokenizer("{% for m in messages %}{% for p in m.content %}{{ p.text }}{% endfor %}{% endfor %}")
    with pytest.raises(DataError, match=r"does not write message 0, of role `user`\n\nhint: .* ``image_key``"):
        render_chat([question], parts, origin="o", add_generation_prompt=False, must_write_all=False)
    asked = [{"role": "user", "content": [{"type": "text", "text": "2+2?"}]}]
    assert render_chat(asked, parts, origin="o", add_generation_prompt=False) == "2+2?"


@pytest.mark.parametrize("answer", ["m.content|upper", "m.content + m.content", "''"])
def test_what_follows_an_answer_that_a_template_changes_is_not_known(answer):
    tokenizer = word_tokenizer("{% for m in messages %}{{ m.content if m.role == 'user' else ANSWER }} {% endfor %}")
    tokenizer.chat_template = tokenizer.chat_template.replace("ANSWER", answer)
    with pytest.raises(DataError, match=r"^o:1: the chat template does not write an answer as it is once messages"):
        render_follow_up([{"role": "user", "content": "one"}], tokenizer, origin="o:1")


@pytest.mark.parametrize("calls_of", [1, 3])
def test_tool_calls_that_a_template_does_not_write_are_refused(calls_of):
    # Left out, the model would learn to answer with nothing where it should call.
    messages = row_messages(Row({"q": [*CALLED, {"role": "assistant", "content": "it is four"}]}, "o", 1), "q")
    says = r"^o:1: the chat template does not write the call of 'add'\n\nhint: .*, or write calls into the content"
    for template in (PLAIN, MARKED.replace("INSIDE", "+ ' </s>'").replace("OUTSIDE", "")):
        with pytest.raises(DataError, match=says):
            encode_conversation(Row({}, "o", 1), messages[: 1 + calls_of], word_tokenizer(template))
    written = word_tokenizer(PLAIN.replace("m.content", "m.content + (m.tool_calls or '')|string"))
    ids, _ = encode_conversation(Row({}, "o", 1), messages[: 1 + calls_of], written)
    assert len(ids)


def test_row_messages_beside_tool_calls_read_null_content_and_arguments_in_json():
    function = {"name": "add", "arguments": '{"a": 2}'}
    for content in ({"content": None}, {}, {"content": ""}):
        asked = [CALLED[0], {"role": "assistant", **content, "tool_calls": [CALL | {"function": function}]}]
        read = row_messages(Row({"q": asked}, "o", 1), "q")
        assert read == [CALLED[0], {"role": "assistant", "content": "", "tool_calls": [CALL]}]
    assert function["arguments"] == '{"a": 2}'  # the row is as it was
    broken = CALL | {"function": {"name": "add", "arguments": "not JSON"}}
    kept = row_messages(Row({"q": [{"role": "assistant", "tool_calls": [broken]}]}, "o", 1), "q")
    assert kept[0]["tool_calls"] == [broken]


def test_render_chat_gives_a_template_that_takes_no_objects_the_arguments_as_text():
    tokenizer = word_tokenizer(PLAIN)
    tokenizer.chat_template = "{% for m in messages %}{{ m.role + ':' + m.content }}{% for c in m.tool_calls or [] %}"
    tokenizer.chat_template += "{{ c.function.name + c.function.arguments }}{% endfor %} {% endfor %}"
    for arguments in ({"a": "é"}, '{"a": "é"}'):
        call = CALL | {"function": {"name": "add", "arguments": arguments}}
        asked = [CALLED[0], {"role": "assistant", "content": "", "tool_calls": [call]}]
        text = render_chat(asked, tokenizer, origin="o", add_generation_prompt=False)
        assert text == 'user:2+2? assistant:add{"a": "é"} '
    with pytest.raises(DataError, match="refuses the messages"):
        render_chat([{"role": "user", "content": 3}], tokenizer, origin="o", add_generation_prompt=False)


def test_rows_of_tables_lose_the_nulls_that_other_rows_leave_in_tools_and_calls():
    filled = {"name": "add", "parameters": {"type": "object", "properties": {"a": {}, "city": None}}}
    call = CALL | {"function": {"name": "add", "arguments": {"a": 2, "city": None}}}
    values = {"q": [{"role": "assistant", "content": None, "tool_calls": [call]}], "t": [TOOL | {"function": filled}]}
    table, lines = Row(values, "o", 0, has_lines=False), Row(values, "o", 1)
    assert row_tools(table, "t") == [TOOL]
    assert row_messages(table, "q")[0]["tool_calls"] == [CALL]
    assert row_tools(lines, "t") == values["t"]
    assert row_messages(lines, "q")[0]["tool_calls"] == [call]
    assert row_tools(Row({"t": json.dumps(values["t"])}, "o", 0, has_lines=False), "t") == values["t"]


def test_encode_conversation_with_tools_trains_calls_and_answers():
    messages = row_messages(Row({"q": [*CALLED, {"role": "assistant", "content": "4"}]}, "o", 1), "q")
    for all_turns in (True, False):
        ids, mask = encode_conversation(
            Row({}, "o", 1),
            messages,
            ByteTokenizer(),
            all_turns=all_turns,
            tools=row_tools(Row({"t": [TOOL]}, "o", 1), "t"),
        )
        assert ByteTokenizer().decode(ids) == f"{TOOLS_TEXT}{CALL_TEXT}tool: 4<eos>\nassistant: 4<eos>"
        learned = f"{CALL_TEXT.removeprefix('assistant: ').strip()}4<eos>" if all_turns else "4<eos>"
        assert ByteTokenizer().decode(ids[mask]).strip() == learned
    ids, mask = encode_conversation(Row({}, "o", 1), messages[:2], ByteTokenizer(), tools=[TOOL])
    assert ByteTokenizer().decode(ids[mask]) == CALL_TEXT.removeprefix("assistant: ").strip(" ")[:-1]


def test_encode_prompts_after_chat_template_has_one_bos():
    ids = encode_prompts(["<bos>A"], ByteTokenizer(), has_special_tokens=True)
    assert ids == [[BOS_ID, 65]]


@pytest.mark.parametrize("text", ["A", "<bos>A"])
def test_encode_prompts_plain_text_begins_with_one_bos_and_is_not_ended(text):
    ids = encode_prompts([text], ByteTokenizer(add_eos=True), has_special_tokens=False)
    assert ids == [[BOS_ID, 65]]


def test_encode_prompts_tokenizer_without_bos_adds_none_and_keeps_a_written_eos():
    ids = encode_prompts(["A<eos>", "<eos>B"], ByteTokenizer(add_bos=False), has_special_tokens=False)
    assert ids == [[65, EOS_ID], [EOS_ID, 66]]


@pytest.mark.parametrize("text", ["A", "A<eos>", "A<eos>\n", "A<eos> \n\n"])
def test_encode_completion_ends_with_one_eos(text):
    assert encode_completion(text, ByteTokenizer()) == [65, EOS_ID]


def test_encode_completion_eos_inside_is_not_the_end():
    assert encode_completion("A<eos>B", ByteTokenizer()) == [65, EOS_ID, 66, EOS_ID]
    assert encode_completion("A<eos><bos>", ByteTokenizer()) == [65, EOS_ID, BOS_ID, EOS_ID]


def test_encode_completion_without_eos_token_is_refused():
    tokenizer = ByteTokenizer()
    tokenizer.eos_token_id = None
    with pytest.raises(ConfigError, match="no EOS token"):
        encode_completion("A", tokenizer)


@pytest.mark.parametrize("text", ["A", "A<eos>\n"])
def test_encode_completion_truncated_gets_no_eos_of_ours(text):
    ids = encode_completion(text, ByteTokenizer(), is_truncated=True)
    assert ids == ([65] if text == "A" else [65, EOS_ID, 10])


WORDS = ["<unk>", "<s>", "</s>", "user", "assistant", "one", "two", "three", "<think>", "</think>", "<end>"]
TALK = [
    {"role": "user", "content": "one"},
    {"role": "assistant", "content": "two"},
    {"role": "user", "content": "three"},
    {"role": "assistant", "content": "one two"},
]
PLAIN = "{% for m in messages %}{{ ' ' + m.role + ' ' + m.content + ' </s>' }}{% endfor %}"
GENERATION_PROMPT = "{% if add_generation_prompt %} assistant {% endif %}"
# Each answer in marks, with or without the end of its turn.
MARKED = (
    "{% for m in messages %}{{ ' ' + m.role }}{% if m.role == 'assistant' %}"
    "{{ ' ' }}{% generation %}{{ m.content INSIDE }}{% endgeneration %}{{ '' OUTSIDE }}"
    "{% else %}{{ ' ' + m.content + ' </s>' }}{% endif %}{% endfor %}"
)
# What a model thought is dropped from all but the last answer, as reasoning models' templates do.
FORGETFUL = (
    "{% for m in messages %}{{ ' ' + m.role + ' ' }}"
    "{% if m.role == 'assistant' and loop.last %}{{ '<think> </think> ' }}{% endif %}"
    "{{ m.content + ' </s>' }}{% endfor %}"
)


def word_tokenizer(template):
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    core = Tokenizer(models.WordLevel({word: index for index, word in enumerate(WORDS)}, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, bos_token="<s>", eos_token="</s>", unk_token="<unk>")
    tokenizer.chat_template = template + GENERATION_PROMPT
    return tokenizer


def encode(template, *, all_turns=True, messages=TALK, is_truncated=False):
    row = Row({"finish_reason": "length" if is_truncated else "stop"}, "o", 1)
    ids, mask = encode_conversation(row, messages, word_tokenizer(template), all_turns=all_turns)
    words = [WORDS[token] for token in ids]
    return " ".join(f"[{word}]" if flag else word for word, flag in zip(words, mask, strict=True))


BOTH = "user one </s> assistant [two] [</s>] user three </s> assistant [one] [two] [</s>]"
LAST = "user one </s> assistant two </s> user three </s> assistant [one] [two] [</s>]"


@pytest.mark.parametrize(
    "template",
    [
        PLAIN,
        MARKED.replace("INSIDE", "+ ' </s>'").replace("OUTSIDE", ""),
        MARKED.replace("INSIDE", "").replace("OUTSIDE", "+ ' </s>'"),
    ],
    ids=["prefixes", "marks", "marks without the end"],
)
@pytest.mark.parametrize(("all_turns", "expected"), [(True, BOTH), (False, LAST)])
def test_encode_conversation_trains_the_answers_and_their_ends(template, all_turns, expected):
    assert encode(template, all_turns=all_turns) == expected


def test_encode_conversation_counts_answers_and_not_other_messages():
    messages = [{"role": "system", "content": "three"}, *TALK]
    template = MARKED.replace("INSIDE", "+ ' </s>'").replace("OUTSIDE", "")
    assert encode(template, messages=messages) == f"<unk> three </s> {BOTH}"


def test_encode_conversation_trains_what_the_template_writes_after_the_end():
    template = PLAIN.replace("' </s>'", "' </s> <end>'")
    expected = "user one </s> <end> assistant [two] [</s>] [<end>] "
    expected += "user three </s> <end> assistant [one] [two] [</s>] [<end>] [</s>]"
    assert encode(template) == expected


def test_encode_conversation_marks_without_any_eos_end_with_one():
    template = MARKED.replace("INSIDE", "").replace("OUTSIDE", "+ ' <end>'")
    expected = "user one </s> assistant [two] <end> user three </s> assistant [one] [two] <end> [</s>]"
    assert encode(template) == expected


def test_encode_conversation_marks_allow_a_template_that_rewrites_history():
    marked = FORGETFUL.replace(
        "{{ m.content + ' </s>' }}",
        "{% if m.role == 'user' %}{{ m.content + ' </s>' }}"
        "{% else %}{% generation %}{{ m.content + ' </s>' }}{% endgeneration %}{% endif %}",
    )
    expected = "user one </s> assistant [two] [</s>] user three </s> assistant <think> </think> [one] [two] [</s>]"
    assert encode(marked) == expected


def test_encode_conversation_marks_that_are_not_one_run_an_answer_are_refused_for_the_last_answer():
    template = MARKED.replace("INSIDE", "+ ' <end>' }}{% endgeneration %} three {% generation %}{{ '</s>'").replace(
        "OUTSIDE", ""
    )
    expected = (
        "user one </s> assistant [two] [<end>] three [</s>] user three </s> assistant [one] [two] [<end>] three [</s>]"
    )
    assert encode(template) == expected
    with pytest.raises(ConfigError, match="marks 4 runs of tokens for 2 answers\n\nhint: train all of them"):
        encode(template, all_turns=False)


def test_encode_conversation_marks_that_miss_an_answer_are_refused():
    # White space that is no token hides the mark that begins with it, and all marks after it.
    hidden = (
        MARKED.replace("INSIDE", "+ ' </s>'").replace("OUTSIDE", "").replace("{% generation %}", "{% generation %} ")
    )
    with pytest.raises(
        ConfigError,
        match=r"^o:1: the chat template marks 0 runs of tokens for 2 answers\n\nhint: use a template without",
    ):
        encode(hidden)


def test_encode_conversation_truncated_answer_has_no_end():
    for template in (PLAIN, MARKED.replace("INSIDE", "+ ' </s>'").replace("OUTSIDE", "")):
        expected = "user one </s> assistant two </s> user three </s> assistant [one] [two]"
        assert encode(template, all_turns=False, is_truncated=True) == expected


def test_encode_conversation_template_that_rewrites_history_is_refused_for_all_turns_only():
    with pytest.raises(ConfigError, match=r"^o:1: the chat template rewrites message 3, [^$]*without ``multiturn``"):
        encode(FORGETFUL)
    expected = "user one </s> assistant two </s> user three </s> assistant [<think>] [</think>] [one] [two] [</s>]"
    assert encode(FORGETFUL, all_turns=False) == expected
