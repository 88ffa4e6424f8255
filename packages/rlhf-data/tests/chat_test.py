"""Rendering and tokenizing: what the template writes, and special tokens exactly once."""

import pytest

from rlhf_data.chat import check_template, encode_completion, encode_prompts, render_prompt
from rlhf_data.errors import ConfigError, DataError
from rlhf_data.sources import read_rows
from rlhf_data.testing import BOS_ID, EOS_ID, ByteTokenizer, write_jsonl


def row_of(tmp_path, value):
    return read_rows(write_jsonl(tmp_path / "a.jsonl", [{"q": value}]))[0]


def render(row, *, tokenizer=None, apply_chat_template=False, input_template=None):
    return render_prompt(
        row,
        tokenizer or ByteTokenizer(),
        input_key="q",
        apply_chat_template=apply_chat_template,
        input_template=input_template,
    )


def test_render_prompt_chat_template_wraps_text_as_user_message(tmp_path):
    text = render(row_of(tmp_path, "2+2"), apply_chat_template=True)
    assert text == "<bos>user: 2+2<eos>\nassistant: "


def test_render_prompt_list_of_messages_is_used_as_is(tmp_path):
    messages = [{"role": "system", "content": "Be short."}, {"role": "user", "content": "2+2"}]
    text = render(row_of(tmp_path, messages), apply_chat_template=True)
    assert text == "<bos>system: Be short.<eos>\nuser: 2+2<eos>\nassistant: "


def test_render_prompt_input_template_is_literal_but_for_the_placeholder(tmp_path):
    text = render(row_of(tmp_path, "a {} b"), input_template='{"q": "{}"} %s {0}')
    assert text == '{"q": "a {} b"} %s {0}'


@pytest.mark.parametrize("template", ["", "no place", "{} and {}", "{0}"])
def test_check_template_without_exactly_one_placeholder_is_refused(template):
    with pytest.raises(ConfigError, match=r"must contain `\{\}` exactly once"):
        check_template(ByteTokenizer(), apply_chat_template=False, input_template=template)


def test_check_template_two_templates_or_none_to_apply_is_refused():
    with pytest.raises(ConfigError, match="input_template has no effect"):
        check_template(ByteTokenizer(), apply_chat_template=True, input_template="{}")
    with pytest.raises(ConfigError, match="has no chat template\n\nhint: "):
        check_template(ByteTokenizer(chat_template=None), apply_chat_template=True, input_template=None)


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
def test_render_prompt_broken_input_names_file_and_line(tmp_path, value, says):
    with pytest.raises(DataError) as caught:
        render(row_of(tmp_path, value), apply_chat_template=True)
    assert f"{tmp_path / 'a.jsonl'}:1: " in str(caught.value)
    assert says in str(caught.value)


def test_render_prompt_messages_without_chat_template_are_explained(tmp_path):
    with pytest.raises(DataError, match="messages need --apply_chat_template"):
        render(row_of(tmp_path, [{"role": "user", "content": "x"}]))


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


def test_encode_completion_without_eos_token_is_refused():
    tokenizer = ByteTokenizer()
    tokenizer.eos_token_id = None
    with pytest.raises(ConfigError, match="no EOS token"):
        encode_completion("A", tokenizer)
