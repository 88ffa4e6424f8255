"""The built-in rule reward: the number after `####` is the answer, or it is not."""

import re
from collections.abc import Sequence
from typing import Any

_ANSWER = re.compile(r"####\s*(-?\d[\d,]*(?:\.\d+)?)")


def reward_func(queries: Sequence[str], prompts: Sequence[str], labels: Sequence[str]) -> dict[str, Any]:
    """Return 1.0 for each response whose number after the last `####` equals its label, else 0.0.

    Args:
        queries: prompt and response, one text each.
        prompts: the prompts alone.
        labels: the right numbers; of a worked solution, the one after its last `####`.

    Returns:
        `rewards` and `scores`, equal; `extra_logs` with the share of responses that give a number at all; `verdicts`.
    """
    answers = [last_answer(query[len(prompt) :]) for query, prompt in zip(queries, prompts, strict=True)]
    rewards = [float(answer == right_answer(label)) for answer, label in zip(answers, labels, strict=True)]
    verdicts = [
        "unparsable" if answer is None else "ok" if reward else "wrong"
        for answer, reward in zip(answers, rewards, strict=True)
    ]
    formatted = [float(answer is not None) for answer in answers]
    return {"rewards": rewards, "scores": rewards, "extra_logs": {"formatted": formatted}, "verdicts": verdicts}


def last_answer(text: str) -> float | None:
    """Return the number after the last `####`, or None when there is none."""
    found = _ANSWER.findall(text)
    return number(found[-1]) if found else None


def right_answer(label: str) -> float:
    """Return the number that a label gives. Raises ValueError when it is none."""
    answer = last_answer(label)
    return number(label) if answer is None else answer


def number(text: str) -> float:
    """Return a number that may have thousands separators."""
    return float(text.replace(",", ""))
