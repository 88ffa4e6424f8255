"""Known data sets by name: how their rows get the keys `input`, `output`, `label`, `chosen` and `rejected`.

| preset | rows in the form of | what they get |
|---|---|---|
| `gsm8k` | openai/gsm8k | `input`; `output`, the solution; `label`, the answer behind `####` |
| `math` | Hendrycks' MATH | `input`; `output`, the solution; `label`, the last boxed answer |
| `hh` | Anthropic/hh-rlhf | `chosen`, `rejected` and the prompt `input` as messages; `output`, the preferred answer |
| `ultrafeedback` | HuggingFaceH4/ultrafeedback_binarized | as `hh`, and `margin`, the difference of the scores |
| `humaneval` | openai/openai_humaneval | `input`; `output`, the solution; `label` with `test` and `entry_point` |
| `apps` | codeparrot/apps | `input`; `output`, the first solution; `label` with `inputs`, `outputs`, `fn_name` |

The other keys of a row stay. Without numpy, because options name the presets.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

from rlhf_data.errors import DataError
from rlhf_data.rows import Row, kind_of

_MARKER = "####"
_BOX = re.compile(r"\\(?:boxed|fbox)\s*(?:\{|([^\s{}$]))")
_TURN = re.compile(r"\n\n(Human|Assistant):")
_ROLES = {"Human": "user", "Assistant": "assistant"}


@dataclass(frozen=True, slots=True)
class Preset:
    """A known data set.

    Attributes:
        values: returns the keys that a row gets. Raises DataError for a row of another form.
        options: values of options that the user does not set.
    """

    values: Callable[[Row], Mapping[str, Any]]
    options: Mapping[str, Any]

    def convert(self, row: Row) -> Row:
        """Return the row with its new keys. Raises DataError for a row of another form."""
        return replace(row, values={**row.values, **self.values(row)})


def boxed(text: str) -> str | None:
    r"""Return what the last `\boxed{...}` or `\fbox{...}` of a solution holds; None if there is none that ends."""
    boxes = list(_BOX.finditer(text))
    if not boxes:
        return None
    found = boxes[-1]
    if found[1]:  # as in `\boxed 5`
        return found[1]
    depth = 1
    for brace in re.finditer(r"\\.|[{}]", text[found.end() :], re.DOTALL):  # an escaped brace is a character
        depth += {"{": 1, "}": -1}.get(brace[0], 0)
        if not depth:
            return text[found.end() :][: brace.start()].strip() or None
    return None


def _gsm8k(row: Row) -> Mapping[str, Any]:
    solution = row.filled("answer")
    answer = solution.rpartition(_MARKER)[2].strip().replace(",", "") if _MARKER in solution else ""
    if not answer:
        raise DataError(f"{row.origin}: `answer` does not end in `{_MARKER}` and a number")
    return {"input": row.filled("question"), "output": solution, "label": answer}


def _math(row: Row) -> Mapping[str, Any]:
    solution = row.filled("solution")
    answer = boxed(solution)
    if answer is None:
        raise DataError(f"{row.origin}: `solution` has no answer in \\boxed{{}}")
    return {"input": row.filled("problem"), "output": solution, "label": answer}


def _hh(row: Row) -> Mapping[str, Any]:
    return _pair(*(_dialogue(row, key) for key in ("chosen", "rejected")))


def _dialogue(row: Row, key: str) -> list[dict[str, str]]:
    """Return a transcript as messages. Turns of one speaker that follow each other become one message."""
    before, *turns = _TURN.split(row.filled(key))
    messages: list[dict[str, str]] = []
    for name, text in zip(turns[::2], turns[1::2], strict=True):
        role, content = _ROLES[name], text.strip()
        if messages and messages[-1]["role"] == role:
            messages[-1]["content"] = f"{messages[-1]['content']}\n\n{content}".strip()
        else:
            messages.append({"role": role, "content": content})
    if before.strip() or len(messages) < 2 or messages[-1]["role"] != "assistant" or not messages[-1]["content"]:
        message = f"{row.origin}: `{key}` is no transcript that begins with `Human:` and ends with an answer"
        raise DataError(message, hint="turns begin with an empty line and `Human:` or `Assistant:`")
    return messages


def _ultrafeedback(row: Row) -> Mapping[str, Any]:
    for key in ("chosen", "rejected"):
        messages = row.cell(key)
        if not isinstance(messages, list) or len(messages) < 2 or not isinstance(messages[-1], Mapping):
            raise DataError(f"{row.origin}: `{key}` must be a list of at least two messages, got {kind_of(messages)}")
    scores = [row.values.get(key) for key in ("score_chosen", "score_rejected")]
    if any(isinstance(score, bool) or not isinstance(score, int | float | None) for score in scores):
        raise DataError(f"{row.origin}: `score_chosen` and `score_rejected` must be numbers, got {scores}")
    margin = {} if None in scores else {"margin": scores[0] - scores[1]}
    return {**_pair(row.cell("chosen"), row.cell("rejected")), **margin}


def _pair(chosen: list[Any], rejected: list[Any]) -> dict[str, Any]:
    return {"input": chosen[:-1], "output": chosen[-1].get("content"), "chosen": chosen, "rejected": rejected}


def _humaneval(row: Row) -> Mapping[str, Any]:
    label = {key: row.filled(key) for key in ("test", "entry_point")}
    return {"input": row.filled("prompt"), "output": row.filled("canonical_solution"), "label": label}


def _apps(row: Row) -> Mapping[str, Any]:
    tests = row.decoded("input_output")
    sides = [tests.get(key) for key in ("inputs", "outputs")] if isinstance(tests, dict) else []
    if not sides or not all(isinstance(side, list) for side in sides) or not 0 < len(sides[0]) == len(sides[1]):
        raise DataError(f"{row.origin}: `input_output` must hold `inputs` and `outputs`, lists of the same length")
    starter = row.values.get("starter_code") or ""
    solutions = row.decoded("solutions") if row.values.get("solutions") else []
    if not isinstance(solutions, list):
        raise DataError(f"{row.origin}: `solutions` must be a list, got {kind_of(solutions)}")
    return {
        "input": row.filled("question") + (f"\n\n{starter}" if starter.strip() else ""),
        "label": {key: tests[key] for key in ("inputs", "outputs", "fn_name") if key in tests},
        **({"output": solutions[0]} if solutions else {}),
    }


_LABEL = {"label_key": "label"}
_PAIR = {"apply_chat_template": True, "chosen_key": "chosen"}

PRESETS: Mapping[str, Preset] = MappingProxyType(
    {
        "gsm8k": Preset(_gsm8k, _LABEL),
        "math": Preset(_math, _LABEL),
        "hh": Preset(_hh, _PAIR),
        "ultrafeedback": Preset(_ultrafeedback, _PAIR),
        "humaneval": Preset(_humaneval, _LABEL),
        "apps": Preset(_apps, _LABEL),
    }
)
