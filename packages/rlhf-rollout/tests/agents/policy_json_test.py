"""JSON that a policy wrote: every text is a value that can be sent on, or a ValueError, whoever reads it."""

import json
import time

import numpy as np
import pytest

from rlhf_rollout.agents.dialects.dialect import read_call
from rlhf_rollout.agents.environments import find_action, fit_action
from rlhf_rollout.agents.tools.tool_calls import make_parser
from rlhf_rollout.policy_json import read_json, read_json_start


class Box:
    """What is asked of Gymnasium's spaces, which are not installed everywhere; its `contains` raises for text."""

    shape = (2,)

    def __init__(self, dtype):
        self.dtype = dtype

    def contains(self, value):
        return value.shape == self.shape and bool((np.abs(value) <= 9).all())


class Choice:
    """A space of whole numbers, whose `contains` raises TypeError for what has no order."""

    shape = ()

    def contains(self, value):
        return not isinstance(value, str) and 0 <= value < 4


HALF_OF_A_PAIR = '{"a": "\\ud83d"}'
BAD = [
    "",
    "nothing",
    "[1",
    "[1] 2",
    "[" * 65 + "]" * 65,
    '{"a":' * 65 + "1" + "}" * 65,
    '[{"a":' * 33 + "1" + "}]" * 33,
    "[" * 1200 + "]" * 1200,
    "[" * 100_000,
    '{"a": NaN}',
    "[-Infinity]",
    "1e999",
    HALF_OF_A_PAIR,
    "9" * 5000,
]


@pytest.mark.parametrize("text", BAD, ids=range(len(BAD)))
def test_text_that_is_no_plain_value_is_an_error(text):
    with pytest.raises(ValueError, match=r"."):
        read_json(text)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        (' \n{"a": [1, -2.5e3, true, null, "é"]}\n', {"a": [1, -2500.0, True, None, "é"]}),
        ('"\\ud83d\\ude00"', "\N{GRINNING FACE}"),
        ('"' + "[" * 1000 + '"', "[" * 1000),
        (json.dumps([[]] * 1000), [[]] * 1000),
    ],
)
def test_plain_values_are_read(text, value):
    assert read_json(text) == value


def test_sixty_four_levels_are_read():
    value = read_json("[" * 64 + "]" * 64)
    for _ in range(63):
        [value] = value
    assert value == []


def test_start_of_a_text_is_read_up_to_its_end():
    assert read_json_start(' {"a": 1}; more') == ({"a": 1}, 9)


@pytest.mark.parametrize("value", ["[" * 1200 + "]" * 1200, "NaN", '"\\ud83d"'], ids=["deep", "nan", "half"])
@pytest.mark.parametrize(
    ("name", "form"),
    [
        ("hermes", '<tool_call>{"name": "f", "arguments": {"a": VALUE}}</tool_call>'),
        ("llama3_json", '{"name": "f", "parameters": {"a": VALUE}}'),
        ("mistral", '[TOOL_CALLS]f{"a": VALUE}'),
    ],
)
def test_tool_call_with_such_a_value_is_one_that_cannot_be_read(name, form, value):
    [call] = make_parser(name, None)(form.replace("VALUE", value))
    assert call.error.startswith("the call is not JSON: ")


def test_arguments_in_a_string_are_read_in_the_same_way():
    text = json.dumps({"name": "f", "arguments": "[" * 1200 + "]" * 1200})
    [call] = make_parser("hermes", None)(f"<tool_call>{text}</tool_call>")
    assert call.error.startswith("the arguments are not JSON: [[[")


def test_call_that_a_client_sends_back_keeps_arguments_that_are_none():
    deep = "[" * 1200 + "]" * 1200
    assert read_call("c", {"name": "f", "arguments": deep})["function"]["arguments"] == deep
    assert read_call("c", {"name": "f", "arguments": '{"a": 1}'})["function"]["arguments"] == {"a": 1}


@pytest.mark.parametrize("action", ["[" * 1200, "[" * 1200 + "]" * 1200, '{"a": 1}', "[1, 2", "1e999", "null"])
@pytest.mark.parametrize("space", [Box(np.float32), Box(np.int64), Choice()], ids=["floats", "integers", "choice"])
def test_action_of_any_other_form_is_a_value_error(action, space):
    with pytest.raises(ValueError, match=r"."):
        fit_action(action, space)


def test_whole_number_that_the_space_cannot_hold_is_a_value_error():
    with pytest.raises(ValueError, match="is not in"):
        fit_action(f"[{10**30}, 0]", Box(np.int64))


def test_action_is_the_last_one_marked():
    assert find_action("<action>1</action> x <action> 2 </action> y <action>3") == "2"
    assert find_action("</action> <action>3") == "</action> <action>3"
    assert find_action("<action>a</action></action>") == "a"


def test_actions_are_found_in_linear_time():
    started = time.process_time()
    find_action("<action>" * 200_000)
    assert time.process_time() - started < 1.0
