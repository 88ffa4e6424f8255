"""Rewards for the form of a response: whether it matches a regular expression, and how many tokens it has.

Their names are `format:EXPRESSION` and `length:LIMIT`.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from rlhf_data.errors import ConfigError


def _after_thought(text: str) -> str | None:
    """Return what follows the thought that a text begins with; None without one, and with further tags of thoughts."""
    parts = re.split("(</?think>)", text)
    has_one = len(parts) == 5 and (parts[1], parts[3]) == ("<think>", "</think>") and not parts[0].strip()
    return parts[4] if has_one else None


def _is_thought_and_answer(text: str) -> bool:
    parts = re.split("(</?answer>)", _after_thought(text) or "")
    outside = parts[0] + parts[-1]
    return len(parts) == 5 and (parts[1], parts[3]) == ("<answer>", "</answer>") and not outside.strip()


def _has_box(text: str) -> bool:
    _, box, rest = text.partition("\\boxed{")
    return bool(box) and rest.rfind("}") > 0


# Each takes time in proportion to the text. A policy must not gain by responses that take long to look at.
PRESETS: Mapping[str, Callable[[str], bool]] = MappingProxyType(
    {
        "think": lambda text: bool((_after_thought(text) or "").strip()),
        "think_answer": _is_thought_and_answer,
        "boxed": _has_box,
    }
)
_OPENING = "<think>"  # some chat templates end a prompt with it
_LENGTH = re.compile(r"(max|target)=([1-9][0-9]{0,8})")


def format_reward(expression: str) -> Callable[..., dict[str, Any]]:
    r"""Return a reward function: 1.0 and ok for a response that matches as a whole, else 0.0 and wrong.

    Args:
        expression: a regular expression, in which `.` matches line breaks, too; or a name in `PRESETS`, for which an
            opening <think> at the end of the prompt counts as the beginning of the response. "think" is one thought
            and text behind it, "think_answer" one thought and one answer in its tags, and "boxed" a \boxed{...}
            somewhere.

    Raises:
        ConfigError: it is no regular expression.
    """
    try:
        matches = PRESETS.get(expression) or re.compile(expression, re.DOTALL).fullmatch
    except (re.error, OverflowError, RecursionError) as error:
        message = f"format:{expression} is no regular expression: {error}"
        raise ConfigError(message, hint="write \\ before a sign that stands for itself, as in \\(") from None
    if not expression:
        names = ", ".join(f"format:{name}" for name in PRESETS)
        raise ConfigError("format: has no expression", hint=f"give one, or one of {names}")

    def reward_func(
        queries: Sequence[str], prompts: Sequence[str], labels: Sequence[str], *, responses: Sequence[str] | None = None
    ) -> dict[str, Any]:
        if responses is None:
            responses = [query.removeprefix(prompt) for query, prompt in zip(queries, prompts, strict=True)]
        matched = []
        for prompt, response in zip(prompts, responses, strict=True):
            is_open = expression in PRESETS and prompt.rstrip().endswith(_OPENING)
            matched.append(bool(matches(_OPENING + response if is_open else response)))
        return {"rewards": [float(is_match) for is_match in matched], "verdicts": _words(matched)}

    return reward_func


def length_reward(limit: str) -> Callable[..., dict[str, Any]]:
    """Return a reward function of n, the number of tokens of a response with its stop token.

        max=N       1 and ok if n <= N, else 0 and wrong
        target=N    max(0, 1 - |n - N| / N)

    Raises ConfigError for any other `limit`.
    """
    parts = _LENGTH.fullmatch(limit)
    if parts is None:
        raise ConfigError(f"length:{limit} names no length in tokens", hint="give length:max=200 or length:target=200")
    number = int(parts[2])

    def reward_func(
        queries: Sequence[str], prompts: Sequence[str], labels: Sequence[str], *, token_ids: Sequence[Sequence[int]]
    ) -> dict[str, Any]:
        lengths = [len(ids) for ids in token_ids]
        if parts[1] == "target":
            return {"rewards": [max(0.0, 1.0 - abs(length - number) / number) for length in lengths]}
        fits = [length <= number for length in lengths]
        return {"rewards": [float(fit) for fit in fits], "verdicts": _words(fits)}

    return reward_func


def _words(outcomes: Sequence[bool]) -> list[str]:
    return ["ok" if outcome else "wrong" for outcome in outcomes]
