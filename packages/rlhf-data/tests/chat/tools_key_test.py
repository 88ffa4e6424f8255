"""The tools of a row reach the chat template in every kind of example, in prompts and on the command line."""

import json

import pytest

from record_testing import write_jsonl
from rlhf_data.chat.messages import row_tools
from rlhf_data.chat.tokens import encode_prompts
from rlhf_data.errors import DataError
from rlhf_data.examples.preference import PreferenceEncoder, UnpairedEncoder
from rlhf_data.examples.sft import SftEncoder
from rlhf_data.keys import check_keys, unread_tools
from rlhf_data.options.sections import ChatSection
from rlhf_data.prompts import load_prompts
from rlhf_data.rows.row import Row
from rlhf_data.rows.sources import open_sources
from rlhf_data.testing import ByteTokenizer

TOKENIZER = ByteTokenizer()
TOOL = {"type": "function", "function": {"name": "add", "description": "adds"}}
ASKED = '<bos>tools: [{"type": "function", "function": {"name": "add", "description": "adds"}}]<eos>\n'
ASKED += "user: 2+2?<eos>\nassistant: "
VALUES = {"q": "2+2?", "good": "4", "bad": "5", "verdict": 1, "t": [TOOL]}
CHAT = {"tokenizer": TOKENIZER, "apply_chat_template": True, "tools_key": "t"}


def text_of(example):
    return TOKENIZER.decode(example.token_ids)


@pytest.mark.parametrize(
    ("value", "says"), [("\ud800", "holds half of a surrogate pair"), (float("inf"), "cannot be written as JSON")]
)
def test_tools_that_no_file_can_hold_are_refused(value, says):
    row = Row({"tools": [{"function": {"name": value}}]}, "x", 7)
    with pytest.raises(DataError, match=f"x:7: `tools` {says}"):
        row_tools(row, "tools")


def test_all_examples_and_prompts_have_the_tools(tmp_path):
    row = Row(VALUES, "o", 1)
    keys = {"input_key": "q", "output_key": "good", **CHAT}
    for encoder in (SftEncoder(**keys), UnpairedEncoder(label_key="verdict", **keys)):
        assert text_of(encoder(row)) == f"{ASKED}4<eos>"
    pair = PreferenceEncoder(prompt_key="q", chosen_key="good", rejected_key="bad", **CHAT)(row)
    assert (text_of(pair.chosen), text_of(pair.rejected)) == (f"{ASKED}4<eos>", f"{ASKED}5<eos>")
    rows = open_sources(write_jsonl(tmp_path / "a.jsonl", [VALUES]))
    [prompt] = load_prompts(rows, TOKENIZER, input_key="q", apply_chat_template=True, tools_key="t")
    assert prompt.text == ASKED
    assert prompt.token_ids.tolist() == encode_prompts([ASKED], TOKENIZER, has_special_tokens=True)[0]


@pytest.mark.parametrize(
    ("rows", "options", "says"),
    [
        ([{"q": 1}, {"q": 1, "tools": [TOOL]}], {}, ":2 has `tools`, which the chat template does not get"),
        ([{"tools": json.dumps([TOOL])}], {}, ":1 has `tools`"),
        ([{"tools": None}, {"tools": []}], {}, None),
        ([{"tools": [TOOL]}], {"tools_key": "tools"}, None),
        ([{"tools": [TOOL]}], {"apply_chat_template": False}, None),
    ],
)
def test_tools_that_no_option_names_are_a_notice(tmp_path, rows, options, says):
    plain = open_sources(write_jsonl(tmp_path / "plain.jsonl", [{"q": 1}]))
    found = unread_tools(
        [plain, open_sources(write_jsonl(tmp_path / "a.jsonl", rows))],
        ChatSection(**{"apply_chat_template": True} | options),
    )
    assert len(found) == (says is not None)
    assert not found or says in found[0]


def test_wrong_tools_key_is_told_the_right_one(tmp_path):
    rows = open_sources(write_jsonl(tmp_path / "a.jsonl", [{"q": "x", "functions": []}]))
    with pytest.raises(DataError, match=r"--tools_key: .*unknown key `tools`[^$]*did you mean --tools_key functions"):
        check_keys(rows, {"input_key": "q", "tools_key": "tools"}, ["tools_key"])
