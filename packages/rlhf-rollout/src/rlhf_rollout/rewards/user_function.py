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
import importlib
import importlib.util
import inspect
import math
import os
import re
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from rlhf_data.errors import ConfigError, RewardError, missing_file, unknown, with_hint
from rlhf_data.records import Verdict, VerdictKind
from rlhf_rollout.rewards.openrlhf_names import provide_utils

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
_BUILTIN_MODULES = {module for module, _, _ in BUILTIN.values()}
SUCCESS_THRESHOLD = 1.0  # full credit, where scores lie in [0, 1]

_MAX_LINE = 1000
_MAX_DETAIL = 500  # of an error, before its place in the file
_LARGEST = sys.float_info.max
_ROUNDING = 1e-6  # of a score: 0.7 + 0.2 + 0.1 is below 1.0

_IN_FILE = re.compile(r"(?P<path>.+\.py)(?::(?P<function>\w+))?", re.DOTALL)

_SKELETON = 'def reward_func(queries, prompts, labels): return {"rewards": [one number per query]}'


@dataclass(frozen=True, slots=True)
class RewardTarget:
    """Where a reward function is.

    Attributes:
        module: its name, or the absolute path of a Python file.
        function: the function's name.
        argument: for a function that returns the reward function, its argument; else None.
    """

    module: str
    function: str = DEFAULT_FUNCTION
    argument: str | None = None


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


def parse_reward(reward: str) -> RewardTarget:
    """Return the target of `FILE.py`, `FILE.py:function`, `module`, `module:function` or a name in `BUILTIN`.

    Code of the user is not imported. Raises ConfigError for any other form, for a file that does not exist or defines
    no such function, and for an argument that a built-in reward refuses.
    """
    name, colon, argument = reward.partition(":")
    if name in BUILTIN:
        module, function, takes_argument = BUILTIN[name]
        if colon and not takes_argument:
            raise ConfigError(f"the reward `{name}` takes no argument, got `{argument}`", hint=f"give {name} alone")
        target = RewardTarget(module, function, argument if takes_argument else None)
        load_function(target)  # checks the argument
        return target
    in_file = _IN_FILE.fullmatch(reward)
    if in_file:
        path = Path(in_file["path"]).expanduser()
        if not path.is_file():
            raise ConfigError(missing_file("reward file", path))
        target = RewardTarget(str(path.absolute()), in_file["function"] or DEFAULT_FUNCTION)
        _check_defined(target)
        return target
    module, colon, function = reward.partition(":")
    function = function if colon else DEFAULT_FUNCTION
    if not all(part.isidentifier() for part in [*module.split("."), function]):
        message = f"reward `{reward}` is neither a Python file nor a module"
        raise ConfigError(message, hint="give path/to/file.py or module:function")
    return RewardTarget(module, function)


def is_builtin(reward: str) -> bool:
    """Return whether a name, or the module of a target, is a reward of this package, which compares no responses."""
    return reward.partition(":")[0] in {*BUILTIN, *_BUILTIN_MODULES}


def load_function(target: RewardTarget, extra_keys: Sequence[str] = ()) -> Callable[..., Any]:
    """Import the target and return its function.

    Raises RewardError when there is no such function or it takes other arguments than the three lists and
    `extra_keys`, which built-in rewards do not get, and whatever the import raises.
    """
    module = import_target(target.module)
    function = getattr(module, target.function, None)
    if not callable(function):
        callables = [name for name, value in vars(module).items() if callable(value) and not name.startswith("_")]
        raise RewardError(_no_function(target, callables))
    if target.argument is not None:
        function = function(target.argument)
    _check_parameters(function, target, () if target.module in _BUILTIN_MODULES else extra_keys)
    return function


def import_target(module: str) -> Any:
    """Import a module by its name or the path of its file, and return it. A file can import others from its folder."""
    if not module.endswith(".py"):
        return importlib.import_module(module)
    provide_utils()
    path = Path(module)
    # Behind the standard library, so that a file of the folder cannot take the place of one of its modules.
    library = os.path.dirname(os.__file__)
    places = [index for index, entry in enumerate(sys.path) if entry in (library, f"{library}/lib-dynload")]
    sys.path.insert(max(places, default=-1) + 1, str(path.parent))
    # The file must not replace a module that is imported under the same name.
    name = path.stem if path.stem.isidentifier() and path.stem not in sys.modules else f"rlhf_reward_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    loaded = importlib.util.module_from_spec(spec)
    sys.modules[name] = loaded
    spec.loader.exec_module(loaded)
    return loaded


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


def one_line(text: str) -> str:
    """Return a text from outside as one line of at most 1,000 characters, in which unprintable ones are escaped."""
    plain = " ".join(text[: 4 * _MAX_LINE].split())
    return "".join(char if char.isprintable() else ascii(char)[1:-1] for char in plain)[:_MAX_LINE]


def explain(error: BaseException, target: RewardTarget) -> str:
    """Return a user's error as one line of some 500 characters, with the last line of their file in its traceback."""
    text = one_line(f"{type(error).__name__}: {error}")[:_MAX_DETAIL]
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename == target.module]
    return f"{text} ({os.path.basename(target.module)}:{frames[-1].lineno})" if frames else text


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


def _check_defined(target: RewardTarget) -> None:
    """Raise ConfigError when the file's source defines no such function; `import *` may define it, so it passes."""
    path = Path(target.module)
    names = bound_names(path, "reward file")
    if target.function not in names and "*" not in names:
        body = ast.parse(path.read_bytes()).body
        defined = [node.name for node in body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
        raise ConfigError(_no_function(target, defined))


def bound_names(path: Path, what: str) -> set[str]:
    """Return the names that a Python file binds, "*" among them if it imports all of a module.

    Raises ConfigError when it is not Python; `what` names the file in the message.
    """
    try:
        body = ast.parse(path.read_bytes(), str(path)).body
    except (SyntaxError, ValueError) as error:
        message = f"{what} {path} is not Python: {error}"
        raise ConfigError(message, hint=f"`python {path}` shows the place") from None
    return set(_bound_names(body))


def _bound_names(body: list[ast.stmt]) -> Iterator[str]:
    for part in (part for node in body for part in ast.walk(node)):
        if isinstance(part, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield part.name
        elif isinstance(part, ast.Name):
            yield part.id
        elif isinstance(part, ast.alias):
            yield part.asname or part.name


def _check_parameters(function: Callable[..., Any], target: RewardTarget, extra_keys: Sequence[str]) -> None:
    """Raise RewardError when the function cannot take three arguments and `extra_keys`: every call would fail."""
    accepted = accepted_extras(function, extra_keys)
    if lacking := [name for name in extra_keys if name not in accepted]:
        message = f"{target.module}: {target.function} takes no keyword argument {', '.join(lacking)}"
        given = ", ".join(["queries", "prompts", "labels", *extra_keys])
        hint = f"write def {target.function}({given}), or **kwargs; or leave it out of ``extra_keys``"
        raise RewardError(f"{message}, which is one of the extra keys", hint=hint)
    try:
        signature = inspect.signature(function)
    except ValueError:  # some functions written in C have no signature
        return
    try:
        signature.bind([], [], [], **{name: [] for name in accepted})
    except TypeError as error:
        message = f"{target.module}: {target.function}{signature} does not take (queries, prompts, labels): {error}"
        raise RewardError(message, hint=_SKELETON) from None


def _no_function(target: RewardTarget, defined: Sequence[str]) -> str:
    message = f"{target.module} has no function `{target.function}`"
    message += f"; it has {', '.join(sorted(defined))}" if defined else ""
    is_default = target.function == DEFAULT_FUNCTION
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
