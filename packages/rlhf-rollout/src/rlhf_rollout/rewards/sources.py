"""Sources of rewards as plain data: functions, servers, reward models and judges, each with a weight."""

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import PurePath
from typing import Literal, get_args

from rlhf_data.bounds import bounded, check_bounds
from rlhf_data.errors import ConfigError, check_name
from rlhf_data.own_code import is_trusted, trusted
from rlhf_data.safety import without_secrets
from rlhf_rollout.rewards.user_function import BUILTIN, SUCCESS_THRESHOLD, needs_label
from rlhf_rollout.workers.guarded import DEFAULT_WORKER, WorkerOptions

RewardKind = Literal["function", "code", "server", "model", "judge", "pairwise"]
JUDGE_KINDS = ("judge", "pairwise")


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardSource:
    """One source of rewards.

    Attributes:
        kind: "function", "code", "server", "model", "judge" or, for a judge that compares responses, "pairwise".
        targets: a function as in `parse_reward`; "code"; the URLs of equivalent servers, which are asked in turn; a
            model's folder or hub name; the file of a judge's rubric.
        weight: factor of its rewards in the sum of all sources.
    """

    kind: RewardKind
    targets: tuple[str, ...]
    weight: float = 1.0

    def __post_init__(self) -> None:
        check_name("kind of reward", self.kind, get_args(RewardKind))
        if not self.targets or (self.kind != "server" and len(self.targets) > 1):
            raise ConfigError(f"a reward {self.kind} needs one target, got {', '.join(self.targets) or 'none'}")

    @property
    def name(self) -> str:
        """Short name for messages and metrics: a file's stem, a host, a folder, or the word for a built-in."""
        word = self.targets[0].partition(":")[0]
        if self.kind == "function" and word in BUILTIN:
            return word
        if self.kind in JUDGE_KINDS:
            return PurePath(self.targets[0]).stem
        target = without_secrets(self.targets[0]).rstrip("/")
        if self.kind == "server":
            return re.split("[/?]", target.partition("://")[2])[0] or target
        return target.rpartition("/")[2].removesuffix(".py")

    @property
    def needs_label(self) -> bool:
        """Whether it cannot score without a label. A user's function, a server or a judge may do without."""
        return self.kind == "code" or (self.kind == "function" and needs_label(self.targets[0]))


@dataclass(frozen=True, slots=True, kw_only=True)
class JudgeOptions:
    """Where the judges are.

    Attributes:
        url: address of an OpenAI-compatible API, without `/chat/completions`.
        model: name of the model.
        num_calls: questions that are asked at the same time, per source.
    """

    url: str = ""
    model: str = ""
    num_calls: int = bounded(16, ge=1)

    def __post_init__(self) -> None:
        check_bounds(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class CallOptions:
    """How sources are called.

    Attributes:
        timeout_s: time limit of one call of a function or a server, of all tests of a program, and of one question to a
            judge, in seconds.
        num_workers: processes per function, and programs, which run at the same time.
        batch_size: rollouts per call of a function, a server or a reward model, at most.
        step_prompts: prompts that are scored together, per step or in all; None if nobody knows.
        num_samples: rollouts per prompt.
        worker: how the processes of functions run.
        failed_reward: reward and score of rollouts whose scorer failed; None leaves them without, so that they are
            masked in training.
        success_threshold: lowest score of a rollout that counts as right, where the scorer does not say it.
        code_sandbox: URL of a SandboxFusion server for the programs of `code`; None for bubblewrap.
        code_partial: the reward of `code` is the share of tests that pass.
        judge: where the judges are.
    """

    timeout_s: float = bounded(30.0, gt=0)
    num_workers: int = bounded(1, ge=1)
    batch_size: int = bounded(64, ge=1)
    step_prompts: int | None = None
    num_samples: int = 1
    worker: WorkerOptions = DEFAULT_WORKER
    failed_reward: float | None = None
    success_threshold: float = SUCCESS_THRESHOLD
    code_sandbox: str | None = None
    code_partial: bool = False
    judge: JudgeOptions = JudgeOptions()

    def __post_init__(self) -> None:
        check_bounds(self)

    @property
    def function_shape(self) -> tuple[int, int]:
        """Prompts per full call of a function, and rollouts per prompt: the calls divide the prompts of a step evenly.

        The rollouts of a prompt stay together, so a call holds at least one prompt.
        """
        num_prompts = max(self.batch_size // self.num_samples, 1)
        if self.step_prompts is not None:
            num_calls = math.ceil(self.step_prompts / num_prompts)
            num_prompts = math.ceil(self.step_prompts / num_calls)
        return num_prompts, self.num_samples


DEFAULT_CALLS = CallOptions()


def parse_sources(
    rewards: str | None, models: str | None = None, weights: str | None = None
) -> tuple[RewardSource, ...]:
    """Return the sources that comma-separated lists name; None is an empty list.

    Args:
        rewards: functions (`FILE.py`, `FILE.py:function`, `module:function`, names of built-in rewards), `code`,
            rubrics of judges (`judge:FILE`, `pairwise:FILE`) and URLs. All URLs together are one source, at the place
            of the first URL.
        models: reward models; they come after the others.
        weights: finite numbers, one per source, in that order; None for 1 each.

    Raises:
        ConfigError: a name is empty or given twice, or there is not one weight per source.
    """
    sources: list[RewardSource] = []
    targets = list(_names(rewards or ""))
    urls = tuple(target for target in targets if _is_url(target))
    for target in targets:
        word, _, rest = target.partition(":")
        if target == "code":
            sources.append(RewardSource(kind="code", targets=("code",)))
        elif word in JUDGE_KINDS:
            sources.append(RewardSource(kind=word, targets=(rest,)))
        elif not _is_url(target):
            sources.append(RewardSource(kind="function", targets=(target,)))
        elif target == urls[0]:
            sources.append(RewardSource(kind="server", targets=urls))
    sources += [RewardSource(kind="model", targets=(model,)) for model in _names(models or "")]
    if weights is None:
        return tuple(sources)
    numbers = _weights(weights)
    if len(numbers) != len(sources):
        names = ", ".join(source.name for source in sources) or "none"
        hint = "give one weight per reward, in the same order; all URLs together are one reward"
        raise ConfigError(f"{len(numbers)} weights for {len(sources)} rewards: {names}", hint=hint)
    return tuple(replace(source, weight=weight) for source, weight in zip(sources, numbers, strict=True))


def _weights(text: str) -> list[float]:
    try:
        weights = [float(weight) for weight in text.split(",")]
    except ValueError:
        weights = [math.nan]
    if not all(map(math.isfinite, weights)):
        message = f"``parse_sources.weights`` is {text}; it must be numbers, separated by commas"
        raise ConfigError(message, hint="such as 1,0.5")
    return weights


def metric_names(sources: Sequence[RewardSource]) -> tuple[str, ...]:
    """Return a metric name per source: all are different and contain only word characters, `.` and `-`."""
    names: list[str] = []
    for source in sources:
        name = plain = re.sub(r"[^\w.-]", "_", source.name)
        for number in range(2, len(sources) + 1):
            if name in names:
                name = f"{plain}_{number}"
        names.append(name)
    return tuple(names)


def model_paths(sources: Sequence[RewardSource]) -> tuple[str, ...]:
    """Return the folders or hub names of the reward models among the sources, in order."""
    return tuple(source.targets[0] for source in sources if source.kind == "model")


def _names(text: str) -> Iterator[str]:
    """Yield the names in a comma-separated list."""
    seen: set[str] = set()
    for name in text.split(",") if text.strip() else ():
        name = trusted(name.strip(), is_trusted(text))
        if not name:
            raise ConfigError(f"`{text}` names nothing between two commas", hint="drop one of the commas")
        if name in seen:
            raise ConfigError(f"`{text}` names {name} twice", hint="name it once; a weight says how much it counts")
        seen.add(name)
        yield name


def _is_url(target: str) -> bool:
    return "://" in target and target.partition(":")[0] not in (*BUILTIN, *JUDGE_KINDS)
