"""A user's own filter of rollout groups, and metrics of a step: functions of `Group` records. Torch-free.

docs/own_losses.md has the contract:

    def keep_group(group): return whether to train on a prompt's rollouts
    def step_metrics(groups, left_out): return {name: number}
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, fields, replace
from numbers import Real
from types import MappingProxyType
from typing import Any

import numpy as np

from rlhf_data.errors import ConfigError
from rlhf_data.records import FinishReason, Prompt, Rollout, VerdictKind
from rlhf_train.algorithms.own_code import OwnCode

KEEP, METRICS = GROUP_FUNCTIONS = ("keep_group", "step_metrics")
_NUM_CHECKED = 24  # groups: a function that draws lots then agrees with itself once in 2^24
_KINDS = ("usual", "one response", "equal scores", "empty responses", "no label", "all truncated")
_PURE = "use no random numbers and keep nothing between calls"
_EDGES = "guard what you divide by: a group may have one rollout, equal scores or no tokens, and a list may be empty"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Group:
    """The rollouts of one prompt as a user's function sees them: those n >= 1 that have a reward. Arrays are read-only.

    Attributes:
        prompt_id, prompt, label, source, extra: as in `rlhf_data.records.Prompt`; `prompt` is its text.
        prompt_tokens: number of tokens of the prompt.
        responses: n texts.
        scores, rewards: [n] float64; rewards are those before normalisation, clipping and length penalties.
        is_right: [n] bool: whether the reward calls the response right.
        truncated: [n] bool: whether the length limit ended it.
        response_tokens: [n] int64: tokens that the policy wrote.
        logs: name to [n] float64: what the reward logs beside its score; NaN for a rollout without such a number.
    """

    prompt_id: str
    prompt: str
    label: str | None
    source: str
    extra: Mapping[str, Any]
    prompt_tokens: int
    responses: tuple[str, ...]
    scores: np.ndarray
    rewards: np.ndarray
    is_right: np.ndarray
    truncated: np.ndarray
    response_tokens: np.ndarray
    logs: Mapping[str, np.ndarray]

    def __post_init__(self) -> None:
        values = [getattr(self, field.name) for field in fields(self)]
        for array in (*values, *self.logs.values()):
            if isinstance(array, np.ndarray):
                array.setflags(write=False)

    @classmethod
    def of(cls, prompt: Prompt, rollouts: Sequence[Rollout]) -> "Group":
        """Return the group of `rollouts`, each of which has a reward."""
        verdicts = [rollout.verdict for rollout in rollouts]
        names = sorted({name for verdict in verdicts for name in verdict.extra})
        logs = {name: np.array([verdict.extra.get(name, math.nan) for verdict in verdicts], float) for name in names}
        return cls(
            prompt_id=prompt.prompt_id,
            prompt=prompt.text,
            label=prompt.label,
            source=prompt.source,
            extra=MappingProxyType(deepcopy(dict(prompt.extra))),
            prompt_tokens=len(prompt.token_ids),
            responses=tuple(rollout.text for rollout in rollouts),
            scores=np.array([verdict.score for verdict in verdicts], float),
            rewards=np.array([verdict.reward for verdict in verdicts], float),
            is_right=np.array([verdict.kind is VerdictKind.OK for verdict in verdicts]),
            truncated=np.array([rollout.finish_reason is FinishReason.LENGTH for rollout in rollouts]),
            response_tokens=np.array([rollout.num_response_tokens for rollout in rollouts], np.int64),
            logs=MappingProxyType(logs),
        )


def keeps_group(code: OwnCode, group: Group) -> bool:
    """Return whether a user's `keep_group` keeps a group. Raises ConfigError if it fails or returns something else."""
    result = code.run({"group": group}, f" for prompt {group.prompt_id}")
    if not isinstance(result, bool | np.bool_):
        hint = "return a comparison, such as group.scores.std() > 0"
        raise code.error(f"returned {type(result).__name__}, not True or False", hint)
    return bool(result)


def step_metrics(code: OwnCode, groups: Sequence[Group], left_out: Sequence[Group]) -> dict[str, float]:
    """Return the metrics of a user's `step_metrics`, as `own/NAME`. Raises like `keeps_group`.

    Args:
        code: the function.
        groups: those that are trained on.
        left_out: the others of the step.
    """
    result = code.run({"groups": tuple(groups), "left_out": tuple(left_out)})
    hint = "return {name: number}, with names of letters, digits and _"
    if not isinstance(result, Mapping):
        raise code.error(f"returned {type(result).__name__}, not a dictionary", hint)
    for name, value in result.items():
        if not str(name).isidentifier() or not isinstance(value, Real | np.bool_):
            raise code.error(f"returned `{name}` as {type(value).__name__}", hint)
    try:
        return {f"own/{name}": float(value) for name, value in result.items()}
    except OverflowError:
        raise code.error("returned an integer that no float can hold", hint) from None


def check_group_function(code: OwnCode) -> list[ConfigError]:
    """Return what is wrong with a function of groups, an error with a hint for each finding, on random groups."""
    groups = [_random_group(number) for number in range(_NUM_CHECKED)]
    try:
        look = _look_at_filter if code.function == KEEP else _look_at_metrics
        return [code.error(*found) for found in look(code, groups)]
    except ConfigError as error:  # a call has failed
        return [error]


def _look_at_filter(code: OwnCode, groups: Sequence[Group]) -> Iterator[tuple[str, str]]:
    kept = [keeps_group(code, group) for group in groups]
    if kept != [keeps_group(code, group) for group in reversed(groups)][::-1]:
        yield "gives another result for the same group", _PURE
    elif kept != [keeps_group(code, _turned(group)) for group in groups]:
        yield "depends on the order of the rollouts", "compare all of them: a place in the arrays means nothing"


def _look_at_metrics(code: OwnCode, groups: Sequence[Group]) -> Iterator[tuple[str, str]]:
    half = len(groups) // 2
    parts = groups[:half], groups[half:]
    found = step_metrics(code, *parts)
    for name, value in (found | step_metrics(code, groups, ())).items():
        if not math.isfinite(value):
            yield f"gives NaN or infinity as `{name.removeprefix('own/')}`", _EDGES
            return
    if found != step_metrics(code, *parts):
        yield "gives another result for the same groups", _PURE
        return
    for what, others in (
        ("groups", [part[::-1] for part in parts]),
        ("rollouts", [list(map(_turned, part)) for part in parts]),
    ):
        other = step_metrics(code, *others)
        if found.keys() != other.keys() or not all(math.isclose(found[n], other[n], abs_tol=1e-9) for n in found):
            yield f"depends on the order of the {what}", "use sums, means or sorted values"


def _random_group(number: int) -> Group:
    """Return a group of one of `_KINDS`; `number` says which, and is the seed."""
    kind = _KINDS[number % len(_KINDS)]
    random = np.random.default_rng(number)
    size = 1 if kind == "one response" else 6
    scores = np.full(size, 0.5) if kind == "equal scores" else random.normal(size=size)
    lengths = np.zeros(size, np.int64) if kind == "empty responses" else random.integers(1, 99, size)
    return Group(
        prompt_id=f"{number} of the check ({kind})",
        prompt=f"What is {number} + 1?",
        label=None if kind == "no label" else str(number + 1),
        source="default",
        extra=MappingProxyType({}),
        prompt_tokens=7,
        responses=tuple("" if length == 0 else f"It is {length}." for length in lengths),
        scores=scores,
        rewards=2.0 * scores,
        is_right=scores > 0.5,
        truncated=np.full(size, True) if kind == "all truncated" else random.random(size) < 0.3,
        response_tokens=lengths,
        logs=MappingProxyType({}),
    )


def _turned(group: Group) -> Group:
    """Return the group with its rollouts in another order."""
    names = ("scores", "rewards", "is_right", "truncated", "response_tokens")
    turned = {name: np.roll(getattr(group, name), 2)[::-1] for name in names}
    responses = group.responses[-2:] + group.responses[:-2] if len(group.responses) > 1 else group.responses
    return replace(group, responses=responses[::-1], **turned)
