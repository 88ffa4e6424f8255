"""A user's reward function: how it is named and found, how it is called, and what it may return.

    def reward_func(queries: list[str], prompts: list[str], labels: list[str]) -> dict

It receives, per sample, prompt and response as one text, the prompt alone, and the reference answer ("" without one). A
call holds samples of several prompts, all samples of a prompt among them.
If it has further parameters with the names of `EXTRAS`, or `**kwargs`, it receives these lists, too. It must have
parameters for the run's extra keys, which are lists of cells of the rows. It may be `async`.
It returns a dictionary with `rewards` (one number per sample) and optionally `scores` (raw scores; the rewards if left
out), `extra_logs` (name -> one number, or one number per sample) and `verdicts` (one of `VerdictKind` per sample).
Numbers may be in lists, tuples, numpy arrays or torch tensors. A reward of None abstains: the sample has no reward and
is not trained. A score of None is the reward, and a logged number of None is left out.
"""

import ast
import inspect
import math
import socket
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from rlhf_data.errors import ConfigError, RewardError, unknown, with_hint
from rlhf_data.records import Verdict, VerdictKind
from rlhf_rollout.rewards.math import provide_utils
from rlhf_rollout.workers.serving import serve_one_at_a_time
from rlhf_rollout.workers.user_code import Target, bound_names, import_target, one_line, parse_target

DEFAULT_FUNCTION = "reward_func"
SAMPLE_ARGUMENTS = ("queries", "prompts", "labels", "query")  # lists that functions or servers receive
EXTRAS = ("responses", "token_ids", "finish_reasons", "group_ids")  # keyword arguments, one entry per sample each
MAX_NUMBER = float(np.finfo(np.float32).max)  # losses are computed in float32
# Rewards that are named by a word: module, function, and whether the function takes what follows a `:` and returns the
# reward function.
BUILTIN = {
    "math": ("rlhf_rollout.rewards.math", DEFAULT_FUNCTION, False),
    "format": ("rlhf_rollout.rewards.form", "format_reward", True),
    "length": ("rlhf_rollout.rewards.form", "length_reward", True),
}
_NEEDS_LABEL = {"math", BUILTIN["math"][0], f"{BUILTIN['math'][0]}:{DEFAULT_FUNCTION}"}
_BUILTIN_MODULES = {module for module, _, _ in BUILTIN.values()}
SUCCESS_THRESHOLD = 1.0  # full credit, where scores lie in [0, 1]

_LARGEST = sys.float_info.max
_ROUNDING = 1e-6  # rounding error of a score: 0.7 + 0.2 + 0.1 is below 1.0

_SKELETON = 'def reward_func(queries, prompts, labels): return {"rewards": [one number per query]}'


@dataclass(frozen=True, slots=True)
class Scored:
    """The result of a reward function: every list has one entry per sample. Numbers may be non-finite.

    None is a reward of which the function abstains, a score equal to the reward, or a number that is not logged.
    """

    rewards: list[float | None]
    scores: list[float | None]
    extra: dict[str, list[float | None]]
    verdicts: list[str | None]
    token_rewards: list[tuple[tuple[int, float], ...]] = field(default_factory=list)  # empty: no sample has any


def parse_reward(reward: str) -> Target:
    """Return the target of `FILE.py`, `FILE.py:function`, `module`, `module:function` or a name in `BUILTIN`.

    Code of the user is not imported. Raises ConfigError for any other form, for a file that does not exist or defines
    no such function, and for an argument that a built-in reward refuses.
    """
    name, colon, argument = reward.partition(":")
    if name in BUILTIN:
        module, function, takes_argument = BUILTIN[name]
        if colon and not takes_argument:
            raise ConfigError(f"the reward `{name}` takes no argument, got `{argument}`", hint=f"give {name} alone")
        target = Target(module, function, argument if takes_argument else None)
        load_function(target)  # checks the argument
        return target
    target = parse_target(reward, "reward", hint="give path/to/file.py or module:function")
    target = Target(target.module, target.name or DEFAULT_FUNCTION)
    if target.is_file:
        _check_defined(target)
    return target


def serve(connection: socket.socket, first: Mapping[str, Any]) -> None:
    """Import the function that the message `first` names, then answer its calls: the program of a reward's process."""
    target = Target(**first["target"])
    extra_keys = first["extra_keys"]

    def load() -> tuple[Callable[[Mapping[str, Any]], Any], Mapping[str, Any]]:
        function = load_function(target, extra_keys)
        return partial(_answer, function), {"extras": accepted_extras(function, extra_keys)}

    serve_one_at_a_time(connection, target, load)


def _answer(function: Callable[..., Any], call: Mapping[str, Any]) -> Any:
    """Return the result of a call as a dictionary, or an awaitable of it."""
    result = function(*call["arguments"], **call["extras"])
    num_samples = len(call["arguments"][0])
    if not inspect.isawaitable(result):
        return asdict(read_result(result, num_samples))

    async def awaited() -> dict[str, Any]:
        return asdict(read_result(await result, num_samples))

    return awaited()


def is_builtin(reward: str) -> bool:
    """Return whether a name, or the module of a target, is a reward of this package, which compares no responses."""
    return reward.partition(":")[0] in {*BUILTIN, *_BUILTIN_MODULES}


def needs_label(reward: str) -> bool:
    """Return whether a name or a target is a reward of this package that compares a response with the label."""
    return reward in _NEEDS_LABEL


def load_function(target: Target, extra_keys: Sequence[str] = ()) -> Callable[..., Any]:
    """Import the target and return its function.

    Raises RewardError when there is no such function or it takes other arguments than the three lists and
    `extra_keys`, which built-in rewards do not get, and whatever the import raises.
    """
    if target.is_file:
        provide_utils()
    module = import_target(target)
    function = getattr(module, target.name, None)
    if not callable(function):
        callables = [name for name, value in vars(module).items() if callable(value) and not name.startswith("_")]
        raise RewardError(_no_function(target, callables))
    if target.argument is not None:
        function = function(target.argument)
    _check_parameters(function, target, () if target.module in _BUILTIN_MODULES else extra_keys)
    return function


def accepted_extras(function: Callable[..., Any], extra_keys: Sequence[str] = ()) -> list[str]:
    """Return the names among `EXTRAS` and `extra_keys` that a reward function takes as arguments."""
    known = [*EXTRAS, *extra_keys]
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except ValueError:  # some functions written in C have no signature
        return []
    if any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters):
        return known
    # The first three receive queries, prompts and labels, whatever their names.
    named = [parameter.name for parameter in parameters[3:] if parameter.kind is parameter.POSITIONAL_OR_KEYWORD]
    named += [parameter.name for parameter in parameters if parameter.kind is parameter.KEYWORD_ONLY]
    return [name for name in known if name in named]


def is_usable(number: float) -> bool:
    """Return whether a reward or score is finite, and remains so in float32."""
    return abs(number) <= MAX_NUMBER


def read_result(result: Any, num_samples: int, *, giver: str = "the reward function") -> Scored:
    """Return the result of a reward function, or of another `giver`, as plain lists. Numbers need not be finite.

    Raises RewardError when the result is not a dictionary with `rewards`, a list has another length than `num_samples`,
    an entry is not a number, or a verdict does not exist.
    """
    if not isinstance(result, Mapping):
        raise RewardError(f"{giver} returned {_kind(result)}, not a dictionary", hint=_SKELETON)
    if "rewards" not in result:
        raise RewardError(f"{giver}'s dictionary has no `rewards`: {sorted(map(str, result))}", hint=_SKELETON)
    rewards = _numbers("rewards", result["rewards"], num_samples)
    scores = result.get("scores")
    scores = rewards if scores is None else _numbers("scores", scores, num_samples)
    extra = {}
    logs = result.get("extra_logs")
    if logs is not None and not isinstance(logs, Mapping):
        raise RewardError(f"`extra_logs` must be a dictionary of numbers, got {_kind(logs)}")
    for name, values in (logs or {}).items():
        extra[one_line(str(name))] = _numbers(f"extra_logs[{name!r}]", values, num_samples, spread=True)
    verdicts = result.get("verdicts")
    if verdicts is None:
        verdicts = [None] * num_samples
    elif isinstance(verdicts, str) or not isinstance(verdicts, Sequence) or len(verdicts) != num_samples:
        raise RewardError(f"`verdicts` must be a list of {num_samples} names, got {verdicts!r:.80}")
    known = [kind.value for kind in VerdictKind if kind is not VerdictKind.UNSCORED]
    for verdict in verdicts:
        if verdict is not None and str(verdict) not in known:
            raise RewardError(unknown("verdict", str(verdict), known))
    return Scored(rewards, scores, extra, [None if verdict is None else str(verdict) for verdict in verdicts])


def verdict_of(scored: Scored, index: int, success_threshold: float = SUCCESS_THRESHOLD) -> Verdict:
    """Return the verdict of one sample.

    It is what the scorer says or else, by its score, ok from `success_threshold` on and wrong below.

    A reward or score that is not finite, or beyond the range of float32, gives the verdict `crash`. Such an extra log
    is left out and named in `detail`. Without a reward the verdict is `abstained`, unless the scorer says that
    it failed.
    """
    reward, score, kind = scored.rewards[index], scored.scores[index], scored.verdicts[index]
    score = reward if score is None else score
    extra = {name: values[index] for name, values in scored.extra.items() if values[index] is not None}
    lost = [f"{name} is {value}" for name, value in extra.items() if not is_usable(value)]
    detail = f"left out of the logs: {', '.join(lost)}" if lost else ""
    extra = {name: value for name, value in extra.items() if is_usable(value)}
    if kind is not None and VerdictKind(kind).failed:
        return Verdict(VerdictKind(kind), detail=detail or "reported by the scorer", extra=extra)
    if reward is None or kind == VerdictKind.ABSTAINED:
        return Verdict(VerdictKind.ABSTAINED, detail=detail or "the scorer abstained", extra=extra)
    for name, value in (("reward", reward), ("score", score)):
        if not is_usable(value):
            why = ", more than float32 can hold" if np.isfinite(value) else ""
            return Verdict(VerdictKind.CRASH, detail=f"the {name} is {value}{why}", extra=extra)
    if kind is None:
        kind = kind_of(score, success_threshold)
    token_rewards = scored.token_rewards[index] if scored.token_rewards else ()
    return Verdict(VerdictKind(kind), reward, score, detail, extra, token_rewards=token_rewards)


def kind_of(score: float, success_threshold: float) -> VerdictKind:
    """Return ok for a score from `success_threshold` on, and wrong for a lower one."""
    return VerdictKind.OK if score >= success_threshold - _ROUNDING else VerdictKind.WRONG


def _check_defined(target: Target) -> None:
    """Raise ConfigError when the file's source defines no such function; `import *` may define it, so it passes."""
    path = Path(target.module)
    names = bound_names(path, "reward file")
    if target.name not in names and "*" not in names:
        body = ast.parse(path.read_bytes()).body
        defined = [node.name for node in body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
        raise ConfigError(_no_function(target, defined))


def _check_parameters(function: Callable[..., Any], target: Target, extra_keys: Sequence[str]) -> None:
    """Raise RewardError when the function cannot take three arguments and `extra_keys`: every call would fail."""
    accepted = accepted_extras(function, extra_keys)
    if lacking := [name for name in extra_keys if name not in accepted]:
        message = f"{target.module}: {target.name} takes no keyword argument {', '.join(lacking)}"
        given = ", ".join(["queries", "prompts", "labels", *extra_keys])
        hint = f"write def {target.name}({given}), or **kwargs; or leave it out of ``extra_keys``"
        raise RewardError(f"{message}, which is one of the extra keys", hint=hint)
    try:
        signature = inspect.signature(function)
    except ValueError:  # some functions written in C have no signature
        return
    try:
        signature.bind([], [], [], **{name: [] for name in accepted})
    except TypeError as error:
        message = f"{target.module}: {target.name}{signature} does not take (queries, prompts, labels): {error}"
        raise RewardError(message, hint=_SKELETON) from None


def _no_function(target: Target, defined: Sequence[str]) -> str:
    message = f"{target.module} has no function `{target.name}`"
    message += f"; it has {', '.join(sorted(defined))}" if defined else ""
    is_default = target.name == DEFAULT_FUNCTION
    return with_hint(message, _SKELETON if is_default else f"name one with {target.module}:NAME")


def _numbers(name: str, values: Any, num_samples: int, *, spread: bool = False) -> list[float | None]:
    """Return `num_samples` floats, or None where a sample has none.

    With `spread`, or for one sample, a single number stands for all of them.
    """
    if hasattr(values, "tolist"):  # a torch tensor or a numpy array or number, without importing either
        values = (values.detach() if hasattr(values, "detach") else values).tolist()
    if _is_number(values):
        if not spread and num_samples != 1:
            raise RewardError(f"`{name}` is one number for {num_samples} samples", hint=_SKELETON)
        return [_float(values)] * num_samples
    if not isinstance(values, list | tuple):
        raise RewardError(f"`{name}` must be a list of numbers, got {_kind(values)}", hint="return one per query")
    if len(values) != num_samples:
        raise RewardError(f"`{name}` has {len(values)} numbers for {num_samples} samples", hint="return one per query")
    numbers = []
    for value in values:
        if hasattr(value, "tolist"):
            value = value.tolist()
        if isinstance(value, list) and len(value) == 1:  # a column of shape [N, 1]
            value = value[0]
        if value is not None and not _is_number(value):
            hint = (
                "give float(...) of it" if isinstance(value, str) else "return a number per query, or None to abstain"
            )
            raise RewardError(f"`{name}` must hold numbers, got {_kind(value)}", hint=hint)
        numbers.append(None if value is None else _float(value))
    return numbers


def _float(number: float) -> float:
    """Return a float; infinity for an integer that is too large for one."""
    if isinstance(number, int) and abs(number) > _LARGEST:
        return math.inf if number > 0 else -math.inf
    return float(number)


def _is_number(value: Any) -> bool:
    return isinstance(value, bool | int | float)


def _kind(value: Any) -> str:
    return "None" if value is None else f"a value of type {type(value).__name__}"
