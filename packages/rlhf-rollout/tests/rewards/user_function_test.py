"""How a reward function is named, and what it may return."""

import json
import math
import os
import sys

import numpy as np
import pytest

from rlhf_data.errors import ConfigError, RewardError
from rlhf_data.records import Verdict, VerdictKind
from rlhf_rollout.rewards.user_function import (
    Scored,
    load_function,
    parse_reward,
    read_result,
    verdict_of,
)
from rlhf_rollout.workers.user_code import Target, explain


class Tensor:
    """What this code knows of a torch tensor."""

    def __init__(self, values, *, requires_grad=False):
        self.values, self.requires_grad = values, requires_grad

    def detach(self):
        return Tensor(self.values)

    def tolist(self):
        if self.requires_grad:
            raise RuntimeError("tolist of a tensor that requires grad")
        return self.values


def test_explain_gives_one_line_with_the_last_place_in_the_users_file(tmp_path):
    path = tmp_path / "reward.py"
    inner = "def inner(text):\n    raise ValueError(text)\n"
    path.write_text(inner + "def reward_func(queries, prompts, labels):\n    inner(queries)\n")
    target = Target(str(path), "reward_func")

    def explained(text, target=target):
        try:
            load_function(Target(str(path), "reward_func"))(text, [], [])
        except ValueError as error:
            return explain(error, target)

    assert explained("no\n  answer\a") == "ValueError: no answer\\x07 (reward.py:2)"
    assert explained("x" * 3000) == f"ValueError: {'x' * 488} (reward.py:2)"  # 500 characters before the place
    assert explained("no", Target("another_module")) == "ValueError: no"


def test_parse_reward_file_and_function(tmp_path):
    path = tmp_path / "my reward.py"
    path.write_text("def reward_func(queries, prompts, labels): ...\nother = reward_func\n")
    assert parse_reward(str(path)) == Target(str(path), "reward_func")
    assert parse_reward(f"{path}:other") == Target(str(path), "other")


def test_parse_reward_relative_path_is_made_absolute(tmp_path, monkeypatch):
    (tmp_path / "r.py").write_text("from elsewhere import *\n")
    monkeypatch.chdir(tmp_path)
    assert parse_reward("r.py").module == str(tmp_path / "r.py")


def test_parse_reward_module():
    assert parse_reward("a.b") == Target("a.b", "reward_func")
    assert parse_reward("a.b:grade") == Target("a.b", "grade")


@pytest.mark.parametrize(
    ("reward", "says"),
    [
        ("math:x", "the reward `math` takes no argument, got `x`"),
        ("format", "format: has no expression\n\nhint: give one, or one of format:think, format:think_answer"),
        ("format:(", r"format:\( is no regular expression: missing \)"),
        ("length:", "length: names no length in tokens\n\nhint: give length:max=200"),
        ("length:max=0", "length:max=0 names no length"),
        ("length:min=3", "length:min=3 names no length"),
    ],
)
def test_parse_reward_refuses_what_a_built_in_reward_cannot_use(reward, says):
    with pytest.raises(ConfigError, match=says):
        parse_reward(reward)


@pytest.mark.parametrize("reward", ["", "http://host:5000/get_reward", "a-b", "a.b:c:d", "dir/reward", "a.b:"])
def test_parse_reward_of_no_known_form_is_refused(reward):
    with pytest.raises(ConfigError, match=r"is neither a Python file nor a module\n\nhint: "):
        parse_reward(reward)


def test_parse_reward_missing_file_suggests_the_nearest(tmp_path):
    (tmp_path / "reward.py").write_text("")
    with pytest.raises(ConfigError, match=r"does not exist\n\nhint: did you mean .*reward\.py"):
        parse_reward(str(tmp_path / "rewards.py"))


def test_parse_reward_file_without_the_function_lists_what_it_has(tmp_path):
    path = tmp_path / "reward.py"
    path.write_text("def reward_fn(queries, prompts, labels): ...\n")
    with pytest.raises(ConfigError) as caught:
        parse_reward(str(path))
    assert str(caught.value) == (
        f"{path} has no function `reward_func`; it has reward_fn\n\n"
        'hint: def reward_func(queries, prompts, labels): return {"rewards": [one number per query]}'
    )
    with pytest.raises(ConfigError, match="has no function `grade`"):
        parse_reward(f"{path}:grade")


def test_parse_reward_file_that_is_not_python_names_the_line(tmp_path):
    path = tmp_path / "reward.py"
    path.write_text("x = 1\ndef reward_func(:\n")
    with pytest.raises(ConfigError, match=r"is not Python: .*line 2"):
        parse_reward(str(path))


def test_load_function_module_without_it_is_refused():
    with pytest.raises(RewardError, match=r"rlhf_rollout\.rewards\.math has no function `grad`; it has .*grade"):
        load_function(Target("rlhf_rollout.rewards.math", "grad"))


@pytest.mark.parametrize("name", ["json.py", "my-reward.py"])
def test_load_function_file_of_any_name_takes_no_modules_place(tmp_path, monkeypatch, name):
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(sys, "modules", dict(sys.modules))
    path = tmp_path / name
    path.write_text("def reward_func(queries, prompts, labels):\n    return {'rewards': [4.0]}\n")
    assert load_function(Target(str(path), "reward_func"))([], [], []) == {"rewards": [4.0]}
    assert sys.modules["json"] is json
    own = sys.path.index(str(tmp_path))  # so that it can import its neighbours, none of which replaces `json`
    assert sys.path.index(os.path.dirname(os.__file__)) < own < len(sys.path) - 1


def test_load_function_that_takes_other_arguments_is_refused(tmp_path):
    path = tmp_path / "narrow.py"
    path.write_text("def reward_func(queries, prompts):\n    return {}\ndef wide(*args, scale=1.0):\n    return {}\n")
    with pytest.raises(RewardError, match=r"reward_func\(queries, prompts\) does not take .*\n\nhint: def reward_func"):
        load_function(Target(str(path), "reward_func"))
    assert load_function(Target(str(path), "wide"))([], [], []) == {}


@pytest.mark.parametrize(
    "values",
    [
        [1, 0.5],
        (1, 0.5),
        np.array([1, 0.5], np.float32),
        [np.float32(1), np.float64(0.5)],
        Tensor([1.0, 0.5]),
        Tensor([1.0, 0.5], requires_grad=True),
        Tensor([[1.0], [0.5]]),
        [Tensor(1.0), 0.5],
        [True, 0.5],
    ],
)
def test_read_result_takes_lists_arrays_and_tensors(values):
    scored = read_result({"rewards": values}, 2)
    assert scored == Scored([1.0, 0.5], [1.0, 0.5], {}, [None, None])


def test_read_result_scores_extra_logs_and_verdicts():
    result = {
        "rewards": [1, -1],
        "scores": np.array([0.9, 0.1]),
        "extra_logs": {"length": [3, 4], "mean": 0.5, "tensor_mean": Tensor(2.0)},
        "verdicts": [VerdictKind.OK, "unparsable"],
    }
    assert read_result(result, 2) == Scored(
        [1.0, -1.0],
        [0.9, 0.1],
        {"length": [3.0, 4.0], "mean": [0.5, 0.5], "tensor_mean": [2.0, 2.0]},
        ["ok", "unparsable"],
    )


def test_read_result_one_number_for_one_sample():
    assert read_result({"rewards": Tensor(0.25)}, 1).rewards == [0.25]


@pytest.mark.parametrize(
    ("result", "says"),
    [
        (None, "returned None, not a dictionary"),
        ({"reward": [1, 2]}, "has no `rewards`: ['reward']"),
        ({"rewards": [1.0]}, "`rewards` has 1 numbers for 2 samples"),
        ({"rewards": [1.0, 2.0, 3.0]}, "`rewards` has 3 numbers for 2 samples"),
        ({"rewards": 1.0}, "`rewards` is one number for 2 samples"),
        ({"rewards": "ab"}, "be a list of numbers, got a value of type str\n\nhint: return one per query"),
        ({"rewards": None}, "`rewards` must be a list of numbers, got None"),
        ({"rewards": [1.0, "2"]}, "must hold numbers, got a value of type str\n\nhint: give float(...) of it"),
        (
            {"rewards": [[1.0, 2.0], [3.0, 4.0]]},
            "got a value of type list\n\nhint: return a number per query, or",
        ),
        ({"rewards": [1, 2], "scores": [1]}, "`scores` has 1 numbers for 2 samples"),
        ({"rewards": [1, 2], "extra_logs": [1]}, "`extra_logs` must be a dictionary"),
        ({"rewards": [1, 2], "extra_logs": {"a": [1]}}, "`extra_logs['a']` has 1 numbers for 2 samples"),
        ({"rewards": [1, 2], "verdicts": ["ok"]}, "`verdicts` must be a list of 2 names"),
        ({"rewards": [1, 2], "verdicts": "ok"}, "`verdicts` must be a list of 2 names"),
        ({"rewards": [1, 2], "verdicts": ["ok", "rong"]}, "unknown verdict `rong`; known: abstained, crash, ok,"),
    ],
)
def test_read_result_of_another_shape_is_refused(result, says):
    with pytest.raises(RewardError) as caught:
        read_result(result, 2)
    assert says in str(caught.value)


def scored(reward=1.0, score=1.0, extra=None, verdict=None):
    return Scored([reward], [score], {name: [value] for name, value in (extra or {}).items()}, [verdict])


@pytest.mark.parametrize(
    ("score", "said", "threshold", "kind"),
    [
        (1.0, None, 1.0, VerdictKind.OK),
        (0.7 + 0.2 + 0.1, None, 1.0, VerdictKind.OK),  # 0.9999999999999999
        (0.99, None, 1.0, VerdictKind.WRONG),
        (0.333, None, 0.3, VerdictKind.OK),
        (0.0, None, 0.0, VerdictKind.OK),
        (-1.0, None, -0.5, VerdictKind.WRONG),
        (0.0, "unparsable", -1.0, VerdictKind.UNPARSABLE),
        (0.0, "ok", 1.0, VerdictKind.OK),
        (1.0, "wrong", 1.0, VerdictKind.WRONG),
    ],
)
def test_verdict_of_follows_the_function_else_the_threshold_of_the_score(score, said, threshold, kind):
    verdict = verdict_of(scored(reward=-0.5, score=score, verdict=said), 0, threshold)
    assert (verdict.kind, verdict.reward, verdict.score) == (kind, -0.5, score)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_verdict_of_reward_or_score_not_finite_is_a_crash_that_says_so(value):
    verdict = verdict_of(scored(reward=value), 0)
    assert (verdict.kind, verdict.reward, verdict.detail) == (VerdictKind.CRASH, None, f"the reward is {value}")
    assert verdict_of(scored(score=value), 0).detail == f"the score is {value}"


def test_verdict_of_extra_log_not_finite_is_left_out_by_name():
    verdict = verdict_of(scored(extra={"a": 1.0, "b": math.nan}), 0)
    assert (dict(verdict.extra), verdict.kind) == ({"a": 1.0}, VerdictKind.OK)
    assert verdict.detail == "left out of the logs: b is nan"


@pytest.mark.parametrize("said", ["crash", "timeout"])
def test_verdict_of_failure_said_by_the_function_has_no_reward(said):
    verdict = verdict_of(scored(verdict=said), 0)
    assert (verdict.kind, verdict.reward) == (VerdictKind(said), None)


@pytest.mark.parametrize("rewards", [[0.5, None], (0.5, None), np.array([0.5, None]), [[0.5], [None]]])
def test_read_result_none_abstains_and_leaves_out_what_has_no_number(rewards):
    result = {"rewards": rewards, "scores": [None, 2.0], "extra_logs": {"length": [None, 3]}, "verdicts": ["ok", "ok"]}
    given, abstained = (verdict_of(read_result(result, 2), index) for index in range(2))
    assert (given.kind, given.reward, given.score, dict(given.extra)) == (VerdictKind.OK, 0.5, 0.5, {})
    assert (abstained.kind, abstained.reward, abstained.score) == (VerdictKind.ABSTAINED, None, None)
    assert (dict(abstained.extra), abstained.detail) == ({"length": 3.0}, "the scorer abstained")


def test_read_result_scores_follow_rewards_that_abstain():
    verdicts = [verdict_of(read_result({"rewards": [None, 1]}, 2), index) for index in range(2)]
    assert [(verdict.kind.value, verdict.reward) for verdict in verdicts] == [("abstained", None), ("ok", 1.0)]


def test_verdict_of_failure_without_a_number_remains_a_failure():
    assert verdict_of(scored(reward=None, score=None, verdict="crash"), 0).kind is VerdictKind.CRASH
    assert verdict_of(scored(verdict="abstained"), 0) == Verdict(VerdictKind.ABSTAINED, detail="the scorer abstained")


def test_reward_file_for_openrlhf_finds_its_functions_for_mathematical_answers(tmp_path, monkeypatch):
    for name in ("openrlhf", "openrlhf.utils"):  # as in a process that has not loaded another reward file
        monkeypatch.delitem(sys.modules, name, raising=False)
    file = tmp_path / "theirs.py"
    file.write_text(
        "import openrlhf.utils as theirs\n"
        "from openrlhf.utils import extract_boxed_answer\n"
        "def reward_func(queries, prompts, labels):\n"
        "    found = [extract_boxed_answer(query) for query in queries]\n"
        "    return {'rewards': [float(theirs.grade_answer(a, label)) for a, label in zip(found, labels)]}\n"
    )
    function = load_function(parse_reward(str(file)))
    queries = [r"so \boxed{4}", r"\boxed{\frac{1}{2}}", r"\boxed{5}", "4", r"\boxed{}"]
    assert function(queries, [""] * 5, ["4", "0.5", "4", "4", "4"])["rewards"] == [1.0, 1.0, 0.0, 0.0, 0.0]
