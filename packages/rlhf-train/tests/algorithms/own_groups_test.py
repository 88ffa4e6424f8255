"""A user's functions of rollout groups: what they are given, and planted faults that the check finds."""

from dataclasses import replace

import numpy as np
import pytest

from record_testing import make_prompt, make_rollout
from rlhf_data.errors import ConfigError
from rlhf_data.records import FinishReason, Verdict, VerdictKind
from rlhf_train.algorithms.own_code import OwnCode
from rlhf_train.algorithms.own_groups import Group, keeps_group, step_metrics
from rlhf_train.losses.own_check import check_own_code

HEAD = "import random\nimport numpy as np\ncalls = []\n\n"
KEEP = "def keep_group(group):\n    "
METRICS = "def step_metrics(groups, left_out):\n    "


def code(text):
    name = text.partition("def ")[2].partition("(")[0]
    return OwnCode(name, "/nowhere/mine.py", HEAD + text)


def group():
    prompt = replace(make_prompt(), source="sums", extra={"level": [3]})
    verdicts = [
        Verdict(VerdictKind.OK, 2.0, 1.0, extra={"steps": 4.0}),
        Verdict(VerdictKind.WRONG, -1.0, 0.0),
    ]
    rollouts = [make_rollout(prompt, text, verdict=v) for text, v in zip(("4", "five"), verdicts, strict=True)]
    rollouts[1] = replace(rollouts[1], finish_reason=FinishReason.LENGTH)
    return prompt, Group.of(prompt, rollouts)


def test_group_has_what_is_known_of_a_prompt_and_its_rollouts_and_cannot_be_changed():
    prompt, made = group()
    texts = (made.prompt_id, made.prompt, made.label, made.source, made.responses)
    assert texts == ("p-2+2=", "2+2=", "4", "sums", ("4", "five"))
    assert (made.scores.tolist(), made.rewards.tolist()) == ([1.0, 0.0], [2.0, -1.0])
    assert (made.is_right.tolist(), made.truncated.tolist()) == ([True, False], [False, True])
    assert made.response_tokens.tolist() == [2, 5] and made.prompt_tokens == len(prompt.token_ids)  # <eos> counts
    assert made.logs.keys() == {"steps"} and np.array_equal(made.logs["steps"], [4.0, np.nan], equal_nan=True)
    for change in ("group.scores[0] = 1", "group.logs['steps'][0] = 1", "group.extra['level'] = 1", "group.label = 1"):
        with pytest.raises(ConfigError, match=r"keep_group of /nowhere/mine.py failed for prompt p-2\+2=: "):
            keeps_group(code(f"{KEEP}{change}; return True"), made)
    assert keeps_group(code(f"{KEEP}group.extra['level'].append(4); return group.extra['level'] == [3, 4]"), made)
    assert prompt.extra == {"level": [3]}


def test_metrics_are_numbers_by_name():
    _, made = group()
    body = "return {'kept': len(groups), 'best': groups[0].scores.max(), 'none': not left_out, 'of': np.float32(0.5)}"
    assert step_metrics(code(METRICS + body), [made], []) == {
        "own/kept": 1.0,
        "own/best": 1.0,
        "own/none": 1.0,
        "own/of": 0.5,
    }


def test_metrics_that_no_float_can_hold_are_an_error_of_the_file():
    with pytest.raises(ConfigError, match=r"step_metrics of /nowhere/mine\.py returned an integer that no float can"):
        step_metrics(code(f"{METRICS}return {{'a': 10**400}}"), [group()[1]], [])


@pytest.mark.parametrize(
    ("text", "problem", "hint"),
    [
        (f"{KEEP}return group.nope", "failed for prompt 0 of the check (usual): AttributeError", "mend it there"),
        (f"{KEEP}return group.scores.mean()", "returned float64, not True or False", "a comparison"),
        (
            f"{KEEP}group.scores.sort(); return True",
            "failed for prompt 0 of the check (usual): ValueError: sort array is read",
            "mend",
        ),
        (
            f"{KEEP}return max(group.is_right[1:]) > 0",
            "failed for prompt 1 of the check (one response): ValueError",
            "mend it there",
        ),
        (
            f"{KEEP}return 1 // int(group.scores.std() > 0 or len(group.scores) == 1) > 0",
            "failed for prompt 2 of the check (equal scores): ZeroDivisionError",
            "mend it there",
        ),
        (
            f"{KEEP}return 1 // int(group.response_tokens.sum()) < 1",
            "failed for prompt 3 of the check (empty responses): ZeroDivisionError",
            "mend it there",
        ),
        (
            f"{KEEP}return len(group.scores) == 1 or min(group.scores[~group.truncated]) > 0",
            "failed for prompt 5 of the check (all truncated): ValueError",
            "mend it there",
        ),
        (
            f"{KEEP}return int(group.label) > 3",
            "failed for prompt 4 of the check (no label): TypeError",
            "mend it there",
        ),
        (f"{KEEP}return random.random() < 0.5", "gives another result for the same group", "no random numbers"),
        (f"{KEEP}calls.append(1); return len(calls) % 3 == 0", "gives another result for the same", "keep nothing"),
        (f"{KEEP}return group.scores[0] > 0", "depends on the order of the rollouts", "a place in the arrays"),
        (f"{KEEP}return group.responses[0] < group.responses[-1]", "depends on the order of the rollouts", "place"),
        ("def keep_group(rewards): return True", "takes `rewards`, which it is not given", "take some of group"),
        (f"{METRICS}return [1]", "returned list, not a dictionary", "return {name: number}"),
        (f"{METRICS}return {{'a b': 1}}", "returned `a b` as int", "letters, digits and _"),
        (f"{METRICS}return {{'a': groups[0].scores}}", "returned `a` as ndarray", "return {name: number}"),
        (
            f"{METRICS}return {{'spread': float(np.float64(1) / min(g.scores.std() for g in groups))}}",
            "gives NaN or infinity as `spread`",
            "equal scores",
        ),
        (f"{METRICS}return {{'a': sum(map(len, [left_out])) / len(left_out)}}", "failed: ZeroDivisionError", "mend"),
        (f"{METRICS}return {{'a': random.random()}}", "gives another result for the same groups", "no random"),
        (f"{METRICS}return {{'a': groups[0].scores.max()}}", "depends on the order of the groups", "sums, means"),
        (f"{METRICS}return {{'a': sum(g.scores[0] for g in groups)}}", "the order of the rollouts", "sums, means"),
    ],
)
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_planted_faults_are_found_each_with_a_hint(text, problem, hint):
    [found] = check_own_code(code(text))
    said, _, advice = str(found).partition("\n\nhint: ")
    assert problem in said and hint in advice, str(found)


@pytest.mark.parametrize(
    "text",
    [
        f"{KEEP}return group.scores.std() > 0 and not group.truncated.all()",
        f"{KEEP}return len(set(group.responses)) > 1",
        f"{KEEP}return any(f'It is {{n}}.' == text and n > 50"
        " for n, text in zip(group.response_tokens, group.responses))",
        f"{METRICS}return {{'a': np.mean([g.rewards.max() for g in groups]), 'left': len(left_out)}}",
        "def step_metrics(**parts): return {'all': len(parts['groups']) + len(parts['left_out'])}",
    ],
)
def test_right_code_has_no_findings(text):
    assert check_own_code(code(text)) == []
