"""The number after `####`: extraction, exact equality, LaTeX, and answers that are none."""

import time

import pytest

from rlhf_data.records import VerdictKind
from rlhf_rollout.rewards.math import clean_answer, extract_answer, grade, parse_number, reward_func

OK, WRONG, UNPARSABLE = VerdictKind.OK, VerdictKind.WRONG, VerdictKind.UNPARSABLE


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("So 40 + 32.\n#### 72", "72"),
        ("#### 1\n#### 2", "2"),
        ("#### $1,234,567.50.\n", "1234567.50"),
        ("####72\nQ: 5 + 5?", "72"),
        ("####\n\n72 ", "72"),
        ("the answer is 72", "72"),
        ("So the answer is: 72 apples. It was hard.", "72 apples"),
        ("The answer is 1. No, the final answer is\n3.5.\n", "3.5"),
        ("the answer is", None),
        ("The answer is **42**.", "42"),
        ("**The answer is:** $1,234$", "1234"),
        ("**The answer is 42.**", "42"),
        ("#### **42**", "42"),
        ("#### ** .5 **", ".5"),
        ("The answer is 2**3", "2**3"),
        (r"so \boxed{4}", "4"),
        (r"\boxed{1} and \boxed{\frac{1}{2}}.", r"\frac{1}{2}"),
        (r"\boxed{4 and the answer is 5", r"\boxed{4 and the answer is 5"),
        (r"\boxed{4}" + "\n#### 5", "5"),
        (r"#### \boxed{4}", "4"),
        ("72", None),
        ("####", None),
        ("#### \n", None),
        ("#### .", None),
        ("", None),
    ],
)
def test_extract_answer_takes_the_line_after_the_last_marker(text, answer):
    assert extract_answer(text) == answer


def test_clean_answer_removes_only_thousands_commas():
    assert clean_answer(" $12,345. ") == "12345"
    assert clean_answer("(1,2)") == "(1,2)"


@pytest.mark.parametrize(
    ("text", "numerator", "denominator"),
    [
        ("72", 72, 1),
        ("-3", -3, 1),
        ("+3", 3, 1),
        ("0.10", 1, 10),
        (".5", 1, 2),
        ("5.", 5, 1),
        ("3/4", 3, 4),
        ("-6/8", -3, 4),
        ("50%", 50, 1),
        ("1.0e3", 1000, 1),
        ("-2E-2 m", -1, 50),
        ("72 clips", 72, 1),
        ("0.1000000000000000055511151231257827", 1000000000000000055511151231257827, 10**34),
    ],
)
def test_parse_number_is_exact(text, numerator, denominator):
    value = parse_number(text)
    assert (value.numerator * denominator, value.denominator > 0) == (numerator * value.denominator, True)


@pytest.mark.parametrize(
    "text", ["", "x", "1/0", "1e5000", "e5", "7 8", "7x", "1.2.3", "--1", "٣", "9" * 301, "nan", "inf"]
)
def test_parse_number_refuses_what_is_not_one_number(text):
    assert parse_number(text) is None


@pytest.mark.parametrize(
    ("response", "label", "verdict"),
    [
        ("#### 72", "72", OK),
        ("#### 72.0", "72", OK),
        ("#### $1,000", "1000", OK),
        ("#### 0.5", "1/2", OK),
        ("#### 72", "Natalia sold 48+24.\n#### 72", OK),
        ("#### 0.3333333333333333", "1/3", WRONG),
        ("#### 71", "72", WRONG),
        ("#### -72", "72", WRONG),
        ("#### five", "5", UNPARSABLE),
        ("#### 7 or 8", "7", UNPARSABLE),
        ("72", "72", UNPARSABLE),
        ("####", "72", UNPARSABLE),
        ("#### Paris", "Paris", OK),
        ("#### sirap", "paris", WRONG),
        ("#### 5", "Paris", WRONG),
        ("#### 1.0e3", "1000", OK),
        (r"so it is \boxed{4}", "4", OK),
        ("The answer is 4.", "4", OK),
        ("#### 4", r"thus \boxed{4}", OK),
        ("#### 7 8", "7", WRONG),
    ],
)
def test_grade_tells_right_wrong_and_no_answer_apart(response, label, verdict):
    assert grade(response, label) is verdict


@pytest.mark.parametrize(
    ("response", "label", "verdict"),
    [
        (r"#### \frac{1}{2}", "0.5", OK),
        (r"#### $\frac{2}{4}$", r"\frac{1}{2}", OK),
        (r"#### \boxed{72}", "72", OK),
        (r"#### \sqrt{8}", r"2\sqrt{2}", OK),
        (r"#### \sqrt{2}", "2", WRONG),
        (r"#### \text{C}", "C", OK),
        ("#### (1,2)", "(1, 2)", OK),
        ("#### (2,1)", "(1, 2)", WRONG),
        ("#### x=4", "4", OK),
        ("#### 2+3x", "3x + 2", OK),
        ("#### abc", "cba", WRONG),
        (r"#### 9^{9^{9^{9}}}", r"\sqrt{2}", WRONG),
        ("#### 9^9^9^9", "x^2", WRONG),
        ("#### 9999999^{9999999}", "(1, 2)", WRONG),
        ("#### 2**2**2**2**9", "(1, 2)", WRONG),
        ("#### 99999999!", "x + 1", WRONG),
    ],
)
def test_grade_latex_is_compared_as_expressions(response, label, verdict):
    pytest.importorskip("math_verify")
    assert grade(response, label) is verdict


@pytest.mark.parametrize(("slow", "verdict"), [("label", "timeout"), ("answer", "wrong"), ("verify", "wrong")])
def test_grade_answer_that_takes_too_long_is_wrong_and_a_label_that_does_a_timeout(monkeypatch, slow, verdict):
    pytest.importorskip("math_verify")
    from math_verify import parser

    monkeypatch.setattr("rlhf_rollout.rewards.math._VERIFY_TIMEOUT_S", 1)
    extract = parser.extract_target_from_pred
    slowly = {"label": r"2\sqrt{2}", "answer": r"\sqrt{8}"}.get(slow)

    def slow_extract(text, *args, **options):
        if slowly is not None and slowly in text:
            time.sleep(60)
        return extract(text, *args, **options)

    # What parsing and comparing call within their time limit.
    monkeypatch.setattr("math_verify.parser.extract_target_from_pred", slow_extract)
    if slow == "verify":
        monkeypatch.setattr("math_verify.grader.sympy_expr_eq", lambda *_, **__: time.sleep(60))
    given = reward_func([r"#### \sqrt{8}", "#### 4"], ["", ""], [r"2\sqrt{2}", "4"])
    assert given["verdicts"] == [verdict, "ok"]


def test_grade_latex_without_math_verify_is_unparsable(monkeypatch):
    monkeypatch.setattr("rlhf_rollout.rewards.math._has_math_verify", lambda: False)
    assert grade(r"#### \frac{1}{2}", "0.5") is UNPARSABLE


@pytest.mark.parametrize("label", ["", " ", "####", "work\n####  "])
def test_grade_label_without_answer_raises(label):
    with pytest.raises(ValueError, match="has no answer"):
        grade("#### 1", label)


def test_reward_func_scores_the_response_and_not_the_prompt():
    prompts = ["Answer like #### 2. What is 1+1? "] * 3
    responses = ["#### 2", "#### 3", "two"]
    queries = [prompt + response for prompt, response in zip(prompts, responses, strict=True)]
    assert reward_func(queries, prompts, ["2"] * 3) == {
        "rewards": [1.0, 0.0, 0.0],
        "verdicts": ["ok", "wrong", "unparsable"],
    }
