"""What counts as a tool call in each template's form, compared with vLLM's parsers where they read it."""

import json

import pytest

from rlhf_rollout.agents.tools.tool_calls import make_parser

GOOD = [
    ("hermes", 'Let me see.\n<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": [2]}}\n</tool_call><|im_end|>'),
    (
        "hermes",
        '<tool_call>{"name": "f", "arguments": {}}</tool_call>\n<tool_call>{"name": "g", "arguments": {"x": "é"}}',
    ),
    ("hermes", "The answer is 4.<|im_end|>"),
    ("llama3_json", '<|python_tag|>{"name": "add", "parameters": {"a": 1}}<|eom_id|>'),
    ("llama3_json", '{"name": "f", "parameters": {"a": {"name": 1}}}; {"name": "g", "parameters": {}}<|eot_id|>'),
    ("llama3_json", "So the set is empty.<|eot_id|>"),
    ("mistral", '[TOOL_CALLS][{"name": "add", "arguments": {"a": 1}}, {"name": "g", "arguments": {}}]</s>'),
    ("mistral", '[TOOL_CALLS]add{"a": 1}[TOOL_CALLS]g{}</s>'),
    ("mistral", "It is 4.</s>"),
]


def pairs(calls):
    return [(call.name, dict(call.arguments)) for call in calls]


@pytest.mark.parametrize(("name", "text", "expected"), [
    (*GOOD[0], [("add", {"a": 1, "b": [2]})]),
    (*GOOD[1], [("f", {}), ("g", {"x": "é"})]),
    (*GOOD[2], []),
    (*GOOD[3], [("add", {"a": 1})]),
    (*GOOD[4], [("f", {"a": {"name": 1}}), ("g", {})]),
    (*GOOD[5], []),
    (*GOOD[6], [("add", {"a": 1}), ("g", {})]),
    (*GOOD[7], [("add", {"a": 1}), ("g", {})]),
    (*GOOD[8], []),
    ("mistral", '[TOOL_CALLS]add[CALL_ID]abc123[ARGS]{"a": 1}', [("add", {"a": 1})]),
    ("llama3_json", 'With {"name": 1} it works.', []),
    ("llama3_json", "\\boxed{4}", []),
    ("hermes", '<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>', [("f", {"a": 1})]),
])  # fmt: skip
def test_calls_are_read(name, text, expected):
    calls = make_parser(name, None)(text)
    assert pairs(calls) == expected
    assert not any(call.error for call in calls)


@pytest.mark.parametrize(
    ("name", "text", "error"),
    [
        (
            "hermes",
            '<tool_call>{"name": "f", "arguments": {"a"',
            'the call is not JSON: {"name": "f", "arguments": {"a"',
        ),
        ("hermes", "<tool_call></tool_call>", "the call is not JSON: "),
        ("hermes", "<tool_call>[1]</tool_call>", 'a call is {"name": "...", "arguments": {...}}, got [1]'),
        ("hermes", '<tool_call>{"name": 3}</tool_call>', "a call is "),
        ("hermes", '<tool_call>{"name": "f", "arguments": [1]}</tool_call>', "a call is "),
        ("hermes", '<tool_call>{"name": "f", "arguments": "{"}</tool_call>', "the arguments are not JSON: {"),
        ("llama3_json", '{"name": "f", "parameters": {', "the call is not JSON: "),
        ("llama3_json", "<|python_tag|>search.call(query='x')", "the call is not JSON: search.call"),
        ("mistral", "[TOOL_CALLS]nothing", "the call is not JSON: nothing"),
        ("mistral", "[TOOL_CALLS][1]", "a call is "),
    ],
)
def test_calls_that_cannot_be_read_say_why(name, text, error):
    [call] = make_parser(name, None)(text)
    assert call.error.startswith(error)


def test_good_calls_after_a_bad_one_are_read():
    bad, good = make_parser("hermes", None)('<tool_call>{</tool_call><tool_call>{"name": "f"}</tool_call>')
    assert bad.error and not good.error and good.name == "f"


class Words:
    """What vLLM's parsers ask of a tokenizer."""

    def get_vocab(self):
        return {"<|python_tag|>": 1, "[TOOL_CALLS]": 2, "<tool_call>": 3, "</tool_call>": 4}


def test_vllm_reads_the_same_calls_and_its_other_parsers_can_be_named():
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
    from vllm.tool_parsers import ToolParserManager

    request = ChatCompletionRequest(messages=[], model="m")
    for name, text in GOOD:
        if "]add{" in text:  # theirs reads this form with a tokenizer of Mistral's only
            continue
        theirs = ToolParserManager.get_tool_parser(name)(Words()).extract_tool_calls(text, request).tool_calls
        expected = [(call.function.name, json.loads(call.function.arguments)) for call in theirs]
        assert pairs(make_parser(name, None)(text)) == expected, (name, text)
    [call] = make_parser("pythonic", Words())("[add(a=1, b=2)]")
    assert (call.name, call.arguments) == ("add", {"a": 1, "b": 2})


def test_vllms_parser_that_raises_is_a_call_that_says_why(monkeypatch):
    from vllm.tool_parsers import ToolParserManager

    class Broken:
        def __init__(self, tokenizer): ...

        def extract_tool_calls(self, text, request):
            raise IndexError(f"no end of {text}")

    monkeypatch.setattr(ToolParserManager, "get_tool_parser", lambda name: Broken)
    [call] = make_parser("pythonic", Words())("[add(")
    assert call.error == "the call cannot be read: no end of [add("
