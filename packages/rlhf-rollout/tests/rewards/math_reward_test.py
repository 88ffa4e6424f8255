"""The number after `####`: extraction, exact equality, LaTeX, and answers that are none."""

import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from rlhf_data.records import VerdictKind
from rlhf_rollout.rewards.math import clean_answer, extract_answer, grade, is_huge, parse_number, reward_func

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
        ("The answer is 4, so done", "4"),
        ("the answer is 1,234; we are done.", "1234"),
        ("The answer is 4 because 2 + 2 = 4", "4"),
        (r"The answer is $\frac{1}{2}$, which is less than 1.", r"\frac{1}{2}"),
        ("The answer is Paris, as everybody knows", "Paris, as everybody knows"),
        ("The answer is Washington, DC.", "Washington, DC"),
        ("The answer is 1, 2", "1, 2"),
        ("The answer is (1, 2).", "(1, 2)"),
        (r"\boxed{(1,234)}", "(1,234)"),
        (r"\boxed{1,234}", "1234"),
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
    assert clean_answer("1,234,567 m") == "1234567 m"
    assert clean_answer("(1,234) + 2") == "(1234) + 2"
    for text in ("(1,234)", "[1,200]", r"\{1,200\}", r"\left(1,234\right)", "1,2345", "1,2,345"):
        assert clean_answer(text) == text


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
        (r"\boxed{(1,234)}", "(1, 234)", OK),
        ("#### (1, 234)", "(1,234)", OK),
        ("#### (1,234)", "1234", WRONG),
        (r"#### \{1,200\}", r"\{1, 200\}", OK),
        (r"\boxed{\binom{5}{2}}", "10", OK),
        (r"#### (x+1)^{2}", "x^2+2x+1", OK),
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


# Each takes seconds to hours to evaluate, and no signal ends it outside the main thread.
@pytest.mark.parametrize(
    "answer",
    [
        r"\binom{9999999}{4999999}",
        r"\dbinom{99999}{3}",
        r"(x+1)^{9999}",
        r"(x+y+z)^{300}",
        r"(((x+1)^{20}+1)^{20}+1)^{20}",
        r"\exp(\exp(\exp(99)))",
        "(99!)!",
        "(" * 90 + "1" + ")" * 90,
        "9^9^9^9",
    ],
)
def test_answer_that_is_huge_is_wrong_without_being_evaluated_also_in_a_thread(answer, monkeypatch):
    pytest.importorskip("math_verify")
    monkeypatch.setattr("math_verify.parse", lambda *_, **__: pytest.fail("evaluated"))
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(grade, f"#### {answer}", "x+2").result() is WRONG
    assert grade("#### x+2", answer) is VerdictKind.TIMEOUT  # nobody can tell whether it is right


@pytest.mark.parametrize(
    "text",
    [
        *(r"\binom{100}{50}", "999!", "2^{1000}", "x^{2024}", r"(x+1)^{20}", "(x+y)^{40}", r"\frac{x^2}{y^{2}}"),
        *(r"\left(\frac{1}{2}\right)^{2024}", "e^{x^2}", "e^{-2x^{2}}", "x^2y^2", "(a+b)(a-b)", "2**10", r"\exp(2)"),
        "(" * 20 + "1" + ")" * 20,
    ],
)
def test_expressions_of_ordinary_size_are_evaluated(text):
    assert not is_huge(text)


def test_power_of_an_expression_is_compared():
    pytest.importorskip("math_verify")
    assert grade("#### e^{x^{2}}", "e^{x^2}") is OK
    assert grade("#### 4", "e^{x^2}") is WRONG


@pytest.mark.parametrize(
    "text",
    [
        *("the answer is " * 20000, "the answer is 4, " * 20000, "1,111" * 40000),
        *("(" * 200000, r"\boxed{" * 30000, ", so" * 50000),
    ],
    ids=range(6),
)
def test_time_of_parsing_grows_with_the_length_alone(text):
    began = time.process_time()
    grade(text, "4")
    grade(f"#### {text}", "4")
    grade(f"The answer is {text}", "4")
    assert time.process_time() - began < 2


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


def test_power_of_a_sum_may_have_900_terms_and_a_power_of_0_hides_no_other():
    assert not is_huge("(x+1)^{899}")  # 900 terms
    assert is_huge("(x+1)^{900}")
    assert is_huge("(x+1)^{0} + (x+y+z+1)^{99}")


def test_latex_in_which_nothing_can_be_read_is_no_answer():
    pytest.importorskip("math_verify")
    assert grade(r"#### \text{}", "5") is UNPARSABLE
