"""Rewards for answers that are numbers: the number after the last `####`, compared exactly.

It is the reward function `rlhf_rollout.rewards.math`. LaTeX is compared by math-verify if that is installed.
"""

import re
import threading
from collections.abc import Sequence
from fractions import Fraction
from functools import cache
from importlib.util import find_spec

from rlhf_data.records import VerdictKind

MARKER = "####"

# 300 characters hold every sensible number; the limit keeps exact arithmetic on a model's nonsense cheap.
_MAX_LENGTH = 300
_VERIFY_TIMEOUT_S = 5
# A sign, a fraction or a decimal number, `%`, and behind white space a unit without digits.
_NUMBER = re.compile(r"([-+]?)(?:([0-9]+)/([0-9]+)|([0-9]+\.?[0-9]*|\.[0-9]+))(%?)(?=$|\s)([^0-9]*)")


def extract_answer(text: str) -> str | None:
    """Return the answer after the last `####`, up to the end of its line, as `clean_answer` leaves it.

    None when there is no `####` or nothing after it.
    """
    _, marker, rest = text.rpartition(MARKER)
    if not marker:
        return None
    lines = rest.strip().splitlines()
    if not lines:
        return None
    return clean_answer(lines[0]) or None


def clean_answer(text: str) -> str:
    """Return an answer without thousands separators, `$`, a final period and surrounding white space."""
    text = text.strip()
    # `$` is a currency sign or delimits LaTeX; neither changes the value.
    return re.sub(r"(?<=[0-9]),(?=[0-9]{3})", "", text.replace("$", "")).strip().removesuffix(".").strip()


def parse_number(text: str) -> Fraction | None:
    """Return the exact value of `72`, `-0.5`, `3/4`, `50%` (as 50) or a number followed by its unit; None otherwise."""
    match = _NUMBER.fullmatch(text) if len(text) <= _MAX_LENGTH else None
    if match is None:
        return None
    sign, numerator, denominator, decimal, _, _ = match.groups()
    if denominator is not None and not int(denominator):
        return None
    value = Fraction(decimal) if denominator is None else Fraction(int(numerator), int(denominator))
    return -value if sign == "-" else value


def grade(response: str, label: str) -> VerdictKind:
    """Return ok or wrong by the response's answer after its last `####`; unparsable when there is none to compare.

    It is timeout when comparing two LaTeX expressions takes longer than 5 s. The label is the answer alone, or a
    solution that ends in `#### answer`. Raises ValueError when the label has no answer.
    """
    expected = extract_answer(label) if MARKER in label else clean_answer(label)
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
    verdict = _compare_expressions(answer, expected) if "\\" in answer + expected else None
    if verdict is not None:
        return verdict
    # Words where a number is expected cannot be compared; any other difference makes the answer wrong.
    return VerdictKind.WRONG if number is not None or expected_number is None else VerdictKind.UNPARSABLE


def reward_func(queries: Sequence[str], prompts: Sequence[str], labels: Sequence[str]) -> dict[str, list]:
    """Return reward 1.0 for the right answer after the last `####` of the response and 0.0 otherwise, with verdicts."""
    verdicts = [
        grade(query[len(prompt) :], label) for query, prompt, label in zip(queries, prompts, labels, strict=True)
    ]
    return {
        "rewards": [float(verdict is VerdictKind.OK) for verdict in verdicts],
        "verdicts": [verdict.value for verdict in verdicts],
    }


@cache
def _has_math_verify() -> bool:
    return find_spec("math_verify") is not None


def _compare_expressions(answer: str, expected: str) -> VerdictKind | None:
    """Return ok, wrong or timeout for two LaTeX expressions; None when they cannot be read."""
    if not _has_math_verify() or max(len(answer), len(expected)) > _MAX_LENGTH:
        return None
    from math_verify import parse, verify
    from math_verify.errors import TimeoutException

    # math-verify enforces its time limit with a signal, which works only in the main thread.
    timeout_s = _VERIFY_TIMEOUT_S if threading.current_thread() is threading.main_thread() else None
    options = {"parsing_timeout": timeout_s, "raise_on_error": True}  # else a timeout would look like a wrong answer
    try:
        gold, found = (parse(f"${text}$", **options) for text in (expected, answer))
    except TimeoutException:
        return VerdictKind.TIMEOUT
    except Exception:  # math-verify and sympy raise anything for what they cannot read
        return None
    if not gold or not found:
        return None
    try:
        same = verify(gold, found, timeout_seconds=timeout_s, raise_on_error=True)
    except TimeoutException:
        return VerdictKind.TIMEOUT
    except Exception:
        return VerdictKind.WRONG
    return VerdictKind.OK if same else VerdictKind.WRONG
