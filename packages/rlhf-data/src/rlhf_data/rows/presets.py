"""Known data sets by name: how their rows get the keys `input`, `output`, `label`, `chosen` and `rejected`.

| preset | rows in the form of | what they get |
|---|---|---|
| `gsm8k` | openai/gsm8k | `input`; `output`, the solution; `label`, the answer behind `####` |
| `math` | Hendrycks' MATH | `input`; `output`, the solution; `label`, the last boxed answer |
| `hh` | Anthropic/hh-rlhf | `chosen`, `rejected` and the prompt `input` as messages; `output`, the preferred answer |
| `ultrafeedback` | HuggingFaceH4/ultrafeedback_binarized | as `hh`, and `margin`, the difference of the scores |
| `humaneval` | openai/openai_humaneval | `input`; `output`, the solution; `label` with `test` and `entry_point` |
| `apps` | codeparrot/apps | `input`; `output`, the first solution; `label` with `inputs`, `outputs`, `fn_name` |
| `math_shepherd` | peiyi9979/Math-Shepherd | `input`, the parts of problem and solution that end with a step; `label` |
| `prm800k` | OpenAI's PRM800K | as `math_shepherd`, for the labelled path: a chosen step, or the first that ends it |
| `stepwise` | TRL's stepwise supervision: `prompt`, `completions`, `labels` | as `math_shepherd` |

Labels of steps are 1 or 0, or any number from 0 to 1 in `stepwise`. In `prm800k`, a neutral step counts as good, a step
without a rating is a part of the step that follows, and candidates beside the path are left out.

The other keys of a row stay. Without numpy, because options name the presets.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

from rlhf_data.errors import DataError
from rlhf_data.rows.row import Row, kind_of

_MARKER = "####"
_STEP = "ки"  # ends each step of Math-Shepherd's inputs
_BOX = re.compile(r"\\(?:boxed|fbox)\s*(?:\{|([^\s{}$]))")
_TURN = re.compile(r"\n\n(Human|Assistant):")
_ROLES = {"Human": "user", "Assistant": "assistant"}


@dataclass(frozen=True, slots=True)
class Preset:
    """A known data set.

    Attributes:
        values: returns the keys that a row gets. Raises DataError for a row of another form.
        options: values of options that the user does not set.
        has_steps: whether rows are solutions with judged steps.
    """

    values: Callable[[Row], Mapping[str, Any]]
    options: Mapping[str, Any]
    has_steps: bool = False

    def convert(self, row: Row) -> Row:
        """Return the row with its new keys. Raises DataError for a row of another form."""
        return replace(row, values={**row.values, **self.values(row)})

    def gives(self, key: str, row: Row) -> bool:
        """Return whether a row has the preset's form, and gets `key`."""
        try:
            return key in self.values(row)
        except DataError:
            return False


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


def _math_shepherd(row: Row) -> Mapping[str, Any]:
    """The label is the input with + or - in place of each placeholder."""
    if isinstance(row.cell("label"), list):
        hint = "rows with a list of labels need no preset, but ``ProcessEncoder.placeholder``"
        raise DataError(f"{row.origin}: `label` is a list, where Math-Shepherd has a text", hint=hint)
    *parts, rest = row.filled("input").split(_STEP)
    judged = row.filled("label")
    signs = []
    start = 0
    for part in parts:
        start += len(part)
        signs.append(judged[start : start + 1])
        start += 1
    whole = "".join(part + sign for part, sign in zip(parts, signs, strict=True)) + rest
    if not parts or whole.rstrip() != judged.rstrip() or not set(signs) <= {"+", "-"}:
        raise DataError(f"{row.origin}: `label` is not the text of `input` with + or - in place of each `{_STEP}`")
    return {"input": parts, "label": [int(sign == "+") for sign in signs]}


def _prm800k(row: Row) -> Mapping[str, Any]:
    question, judged = (row.cell(key) for key in ("question", "label"))
    problem = question.get("problem") if isinstance(question, Mapping) else None
    steps = judged.get("steps") if isinstance(judged, Mapping) else None
    if not isinstance(problem, str) or not isinstance(steps, list):
        raise DataError(f"{row.origin}: `question` must hold `problem`, a text, and `label` must hold `steps`, a list")
    texts: list[str] = []
    labels: list[int] = []
    unrated = ""
    for step in steps:
        found = _labelled_step(row, step)
        if found is None:
            break
        text = unrated + _step_text(row, found["text"])
        if found["rating"] is None:
            unrated = f"{text}\n"
        else:
            texts.append(text)
            labels.append(int(found["rating"] >= 0))
            unrated = ""
    return {"input": _step_parts(row, problem, texts), "label": labels}


def _labelled_step(row: Row, step: Any) -> Mapping[str, Any] | None:
    """Return the `text` of a path's step and its `rating`: -1, 0, 1 or None. Without a step, the path has ended.

    A labeler who found every candidate wrong could write the step. A path that ends with an error has nothing chosen:
    its first candidate is the one that the model generated.
    """
    candidates = (step.get("completions") or []) if isinstance(step, Mapping) else None
    if not isinstance(candidates, list):
        raise DataError(f"{row.origin}: a step of `label` must be an object with a list `completions`")
    chosen = step.get("chosen_completion")
    human = step.get("human_completion")
    if chosen is None and human is not None:
        return {"text": human.get("text") if isinstance(human, Mapping) else human, "rating": 1}
    if not candidates:
        return None
    number = 0 if chosen is None else chosen
    found = candidates[int(number)] if number in range(len(candidates)) else None
    rating = found.get("rating") if isinstance(found, Mapping) else None
    if not isinstance(found, Mapping) or isinstance(rating, bool) or rating not in (-1, 0, 1, None):
        raise DataError(f"{row.origin}: `chosen_completion` must number a completion with `rating` -1, 0, 1 or null")
    return {"text": found.get("text"), "rating": rating}


def _stepwise(row: Row) -> Mapping[str, Any]:
    steps, labels = (row.cell(key) for key in ("completions", "labels"))
    if not isinstance(steps, list) or not isinstance(labels, list) or len(steps) != len(labels):
        raise DataError(f"{row.origin}: `completions` and `labels` must be lists of the same length")
    numbers = [int(label) if isinstance(label, bool) else label for label in labels]
    return {"input": _step_parts(row, row.filled("prompt"), steps), "label": numbers}


def _step_parts(row: Row, problem: str, steps: list[Any]) -> list[str]:
    """Return the parts of a text that each end with a step, the first with the problem. A line break ends each step but
    the last, and the problem if no white space divides it from the first step."""
    texts = [_step_text(row, step) for step in steps]
    if not texts:
        raise DataError(f"{row.origin}: there must be at least one judged step")
    parts = [*(text.removesuffix("\n") + "\n" for text in texts[:-1]), texts[-1]]
    is_divided = problem[-1:].isspace() or parts[0][0].isspace()
    return [problem + ("" if is_divided else "\n") + parts[0], *parts[1:]]


def _step_text(row: Row, step: Any) -> str:
    if not isinstance(step, str) or not step.strip():
        raise DataError(f"{row.origin}: a step must be text, and not empty, got {kind_of(step)}")
    return row.checked("step", step)


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
        "math_shepherd": Preset(_math_shepherd, _LABEL | {"placeholder_token": _STEP}, has_steps=True),
        "prm800k": Preset(_prm800k, _LABEL, has_steps=True),
        "stepwise": Preset(_stepwise, _LABEL, has_steps=True),
    }
)
