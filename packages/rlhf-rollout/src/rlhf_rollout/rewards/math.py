"""Rewards for mathematical answers: after the last `####`, in the last box, or after "the answer is".

It is the reward function `rlhf_rollout.rewards.math`. Numbers are compared exactly, other expressions by math-verify if
that is installed.
"""

import re
import sys
import threading
from collections.abc import Sequence
from fractions import Fraction
from functools import cache
from importlib.util import find_spec
from math import comb, prod

from rlhf_data.records import VerdictKind
from rlhf_rollout.workers.user_code import provide

MARKER = "####"

# 300 characters hold every sensible number; the limit keeps exact arithmetic on a model's nonsense cheap.
_MAX_LENGTH = 300
_VERIFY_TIMEOUT_S = 5
# A sign, a fraction or a decimal number, an exponent, `%`, and behind white space a unit without digits.
_NUMBER = re.compile(
    r"([-+]?)(?:([0-9]+)/([0-9]+)|((?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][-+]?[0-9]{1,3})?))(%?)(?=$|\s)([^0-9]*)"
)
_BOX = "\\boxed{"
_STATED = re.compile(r"\banswer\s+is\b:?", re.IGNORECASE)
_SENTENCE_END = re.compile(r"\.(?:\s|$)")
# What may follow an answer in its sentence: "4, so I am done", "4 because 2 + 2 = 4".
_REMARK = re.compile(r"[,;](?=\s+[A-Za-z]{2})|\s(?=(?:because|since|as|so|which)\b)")
_THOUSANDS = re.compile(r"(?<![0-9,])[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])")
_LIST = re.compile(r"(?:\\left)?(?:[(\[]|\\\{).*(?:[)\]]|\\\})", re.DOTALL)  # a tuple, an interval or a set
# What math-verify compares: more than words, which it would take for products of letters.
_EXPRESSION = re.compile(r"[0-9\\(\[{^+*/=]")
_WORD = re.compile(r"[^\W\d_]{2,}")
# A number to a power to a power, or one with a huge exponent, factorial or binomial. Python cannot be interrupted while
# it computes them, and the time limit of math-verify holds in the main thread alone.
_HUGE = re.compile(
    r"(?:\^|\*\*)[\s{(]*[0-9]+[\s)}]*(?:\^|\*\*)|\^\s*[{(][^{}()]{0,40}[0-9]\s*\^|(?:\^|\*\*)\s*[{(]?\s*-?[0-9]{5,}"
    r"|[0-9]{4,}\s*!|![\s)}\]]*!|binom\s*\{?[^{}]{0,40}[0-9]{5}|\\exp\W{0,9}exp"
)
_COMMAND = re.compile(r"\\[A-Za-z]+")
_POWER = re.compile(r"[)}\]]\s*(?:\^|\*\*)\s*[{(]?\s*-?([0-9]+)")  # the exponent of something in brackets
_MAX_TERMS = 900  # terms of an expanded power of a sum
_MAX_DEPTH = 20  # nested brackets; the time of parsing grows with them


def extract_answer(text: str) -> str | None:
    r"""Return the answer of a response, as `clean_answer` leaves it; None when there is none.

    It is what follows the last `####` on its line; without `####`, the last `\boxed{...}`; without either, what follows
    the last "answer is" up to the end of the sentence.
    """
    _, marker, rest = text.rpartition(MARKER)
    if marker:
        lines = rest.strip().splitlines()
        return _in_box(lines[0]) if lines else None
    if _BOX in text:
        return _in_box(text)
    stated = list(_STATED.finditer(text))
    lines = text[stated[-1].end() :].strip().splitlines() if stated else []
    return clean_answer(_without_remark(_SENTENCE_END.split(lines[0])[0])) or None if lines else None


def _without_remark(text: str) -> str:
    """Return a sentence's answer without the words behind it, if what stands before them is a number or LaTeX."""
    remark = _REMARK.search(text)
    head = text[: remark.start()] if remark else text
    return head if "\\" in head or parse_number(clean_answer(head)) is not None else text


def _in_box(text: str) -> str | None:
    return clean_answer(last_boxed(text) or text) or None


def last_boxed(text: str) -> str | None:
    r"""Return what the last `\boxed{...}` of a text holds, with balanced braces; None if none is closed."""
    start = text.rfind(_BOX)
    depth = 0
    for place in range(start + len(_BOX) - 1, len(text)) if start >= 0 else ():
        depth += {"{": 1, "}": -1}.get(text[place], 0)
        if not depth:
            return text[start + len(_BOX) : place]
    return None


def clean_answer(text: str) -> str:
    """Return an answer without thousands separators, `$`, Markdown's `**` around it, and a final period.

    The commas of a tuple, an interval or a set separate its elements.
    """
    # `$` is a currency sign or delimits LaTeX; neither changes the value.
    text = text.replace("$", "").strip().strip("*").strip().removesuffix(".").strip("*").strip()
    return text if _LIST.fullmatch(text) else _THOUSANDS.sub(lambda found: found[0].replace(",", ""), text)


def parse_number(text: str) -> Fraction | None:
    """Return the exact value of `72`, `-0.5`, `3/4`, `1e3`, `50%` (as 50) or a number and its unit; None otherwise."""
    match = _NUMBER.fullmatch(text) if len(text) <= _MAX_LENGTH else None
    if match is None:
        return None
    sign, numerator, denominator, decimal, _, _ = match.groups()
    if denominator is not None and not int(denominator):
        return None
    value = Fraction(decimal) if denominator is None else Fraction(int(numerator), int(denominator))
    return -value if sign == "-" else value


def grade(response: str, label: str) -> VerdictKind:
    """Return ok or wrong by the response's answer (`extract_answer`); unparsable when there is none to compare.

    An answer that `is_huge`, or cannot be evaluated within 5 s in the main thread, is wrong. Without a reward, it would
    let a policy avoid low ones. The verdict is timeout when the label cannot be evaluated. The label is the answer
    alone, or a solution that ends in `#### answer` or a box. Raises ValueError when the label has no answer.
    """
    expected = extract_answer(label) if MARKER in label or _BOX in label else clean_answer(label)
    if not expected:
        raise ValueError(f"the label {label[:80]!r} has no answer")
    answer = extract_answer(response)
    if answer is None:
        return VerdictKind.UNPARSABLE
    if answer == expected:
        return VerdictKind.OK
    number, expected_number = parse_number(answer), parse_number(expected)
    if number is not None and expected_number is not None:
        return VerdictKind.OK if number == expected_number else VerdictKind.WRONG
    if _are_expressions(answer, expected):
        verdict = _compare_expressions(answer, expected)
        if verdict is not None:
            return verdict
    # Words where a number is expected cannot be compared; any other difference makes the answer wrong.
    return VerdictKind.WRONG if number is not None or expected_number is None else VerdictKind.UNPARSABLE


def reward_func(queries: Sequence[str], prompts: Sequence[str], labels: Sequence[str]) -> dict[str, list]:
    """Return reward 1.0 for the right answer (`grade`) and 0.0 otherwise, with verdicts."""
    samples = zip(queries, prompts, labels, strict=True)
    verdicts = [grade(query[len(prompt) :], label) for query, prompt, label in samples]
    return {
        "rewards": [float(verdict is VerdictKind.OK) for verdict in verdicts],
        "verdicts": [verdict.value for verdict in verdicts],
    }


@cache
def _has_math_verify() -> bool:
    return find_spec("math_verify") is not None


def _are_expressions(*texts: str) -> bool:
    """Return whether math-verify may compare texts: one is LaTeX, or one has a digit or an operator and none a word."""
    together = " ".join(texts)
    return "\\" in together or (_EXPRESSION.search(together) is not None and _WORD.search(together) is None)


def is_huge(text: str) -> bool:
    """Return whether evaluating an expression may take seconds or more, by the sizes that are written in it."""
    if _HUGE.search(text):
        return True
    depth = deepest = 0
    for char in text:
        depth += {"(": 1, "[": 1, "{": 1, ")": -1, "]": -1, "}": -1}.get(char, 0)
        deepest = max(deepest, depth)
    num_letters = len(set(filter(str.isalpha, _COMMAND.sub("", text))))
    degree = prod(int(power) for power in _POWER.findall(text) if int(power))
    # (a + b + ... + 1)^d with k letters has C(d + k, k) terms.
    return deepest > _MAX_DEPTH or (num_letters > 0 and comb(degree + num_letters, num_letters) > _MAX_TERMS)


def _compare_expressions(answer: str, expected: str) -> VerdictKind | None:
    """Return ok, wrong or timeout for two expressions; None when they cannot be read."""
    if not _has_math_verify() or max(len(answer), len(expected)) > _MAX_LENGTH:
        return None
    if is_huge(expected):
        return VerdictKind.TIMEOUT
    if is_huge(answer):
        return VerdictKind.WRONG
    from math_verify import parse, verify
    from math_verify.errors import TimeoutException

    # math-verify enforces its time limit with a signal, which works only in the main thread.
    timeout_s = _VERIFY_TIMEOUT_S if threading.current_thread() is threading.main_thread() else None
    options = {"parsing_timeout": timeout_s, "raise_on_error": True}  # else a timeout would look like a wrong answer
    read = []
    for text, verdict in ((expected, VerdictKind.TIMEOUT), (answer, VerdictKind.WRONG)):
        try:
            read.append(parse(f"${text}$", **options))
        except TimeoutException:
            return verdict
        except Exception:  # math-verify and sympy raise anything for what they cannot read
            return None
    if not all(read):
        return None
    try:
        same = verify(*read, timeout_seconds=timeout_s, raise_on_error=True)
    except (TimeoutException, Exception):  # the first is no Exception
        return VerdictKind.WRONG
    return VerdictKind.OK if same else VerdictKind.WRONG


def provide_utils() -> None:
    """Let `from openrlhf.utils import extract_boxed_answer, grade_answer` work where OpenRLHF is not installed."""
    loaded = sys.modules.get("openrlhf")
    spec = find_spec("openrlhf") if loaded is None else loaded.__spec__
    if spec is None:
        provide("openrlhf.utils", extract_boxed_answer=last_boxed, grade_answer=grade_answer)


def grade_answer(given_answer: str | None, ground_truth: str) -> bool:
    """Return whether an answer is right, as `grade` decides; None is not."""
    if given_answer is None or not str(given_answer).strip():
        return False
    return grade(f"{MARKER} {given_answer}", str(ground_truth)) is VerdictKind.OK
