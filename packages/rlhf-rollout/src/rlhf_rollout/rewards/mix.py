"""The weighted sum of several rewards, and the reward function of a list of sources."""

import asyncio
import math
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from rlhf_data.errors import ConfigError, RewardError
from rlhf_data.records import Prompt, Rollout, Verdict, VerdictKind
from rlhf_rollout.protocols import RewardFunction
from rlhf_rollout.rewards.code.code_reward import CodeReward, check_code
from rlhf_rollout.rewards.code.sandbox import open_sandbox
from rlhf_rollout.rewards.function import NUM_TRIED, FunctionReward, check_reward_function
from rlhf_rollout.rewards.sources import (
    DEFAULT_CALLS,
    JUDGE_KINDS,
    CallOptions,
    RewardSource,
    metric_names,
    model_paths,
)
from rlhf_rollout.rewards.user_function import is_usable
from rlhf_rollout.workers.user_code import one_line


class MixedReward:
    """A `RewardFunction` that returns the weighted sum of others.

        reward = sum_i w_i reward_i        score = sum_i w_i score_i

    Sources that abstain are no part of the sum, so that each may score the prompts that it knows. The verdict has the
    kind that the first of the others gave, and is `abstained` if there are none. If any source fails there is no sum:
    the verdict then has the kind of the first source that failed. Sources are called concurrently, so `seconds` are
    those of the slowest. With several sources `extra` holds each source's reward as `reward_<name>` and its own extra
    numbers as `<number>_<name>`.

    Args:
        sources: name, weight and reward function of each source.

    Raises:
        ConfigError: there is no source, two have the same name, or a weight is not finite.
    """

    def __init__(self, sources: Sequence[tuple[str, float, RewardFunction]]) -> None:
        names = [name for name, _, _ in sources]
        if not names or len(set(names)) < len(names):
            raise ConfigError(f"a sum of rewards needs sources with different names, got {', '.join(names) or 'none'}")
        for name, weight, _ in sources:
            if not math.isfinite(weight):
                raise ConfigError(f"the weight of reward {name} is {weight}")
        self._names, self._weights, self._rewards = zip(*sources, strict=True)

    async def score(self, prompt: Prompt, rollouts: Sequence[Rollout]) -> list[Verdict]:
        """Return one verdict per rollout, in order. Raises RewardError when a source cannot run at all."""
        calls = [score_each(reward, prompt, rollouts) for reward in self._rewards]
        return [self._sum(verdicts) for verdicts in zip(*await asyncio.gather(*calls), strict=True)]

    def expect(self, group_id: str, pool: str | None) -> None:
        """See `expect_group`."""
        for reward in self._rewards:
            expect_group(reward, group_id, pool)

    async def close(self) -> None:
        """Close every source, also if closing one of them fails, and raise the first failure."""
        closed = await asyncio.gather(*[reward.close() for reward in self._rewards], return_exceptions=True)
        for outcome in closed:
            if isinstance(outcome, BaseException):
                raise outcome

    def _sum(self, verdicts: Sequence[Verdict]) -> Verdict:
        """Return the verdict on one rollout from the verdicts of the sources."""
        extra = self._extra(verdicts)
        named = list(zip(self._names, verdicts, strict=True))
        failed = [(name, verdict) for name, verdict in named if verdict.kind.failed]
        said = failed or [(name, verdict) for name, verdict in named if verdict.detail]
        detail = "; ".join(f"{name}: {verdict.detail}" for name, verdict in said)
        seconds = max(verdict.seconds for verdict in verdicts)
        if failed:
            return Verdict(failed[0][1].kind, detail=detail, extra=extra, seconds=seconds)
        weighted = zip(self._weights, verdicts, strict=True)
        given = [(weight, verdict) for weight, verdict in weighted if verdict.reward is not None]
        if not given:
            return Verdict(VerdictKind.ABSTAINED, detail=detail, extra=extra, seconds=seconds)
        rewards = tuple(verdict.reward for verdict in verdicts)
        reward = sum(weight * verdict.reward for weight, verdict in given)
        score = sum(weight * verdict.score for weight, verdict in given)
        if not is_usable(reward) or not is_usable(score):
            message = f"the weighted sum is {reward} (score {score})"
            return Verdict(VerdictKind.CRASH, detail=message, extra=extra, seconds=seconds)
        weights, scored = zip(*given, strict=True)
        token_rewards = _token_rewards(weights, scored)
        turn_rewards = () if token_rewards else _turn_rewards(weights, scored)
        return Verdict(scored[0].kind, reward, score, detail, extra, seconds, turn_rewards, token_rewards, rewards)

    def _extra(self, verdicts: Sequence[Verdict]) -> dict[str, float]:
        if len(verdicts) == 1:
            return dict(verdicts[0].extra)
        extra = {}
        for name, verdict in zip(self._names, verdicts, strict=True):
            if verdict.reward is not None:
                extra[f"reward_{name}"] = verdict.reward
            extra |= {f"{number}_{name}": value for number, value in verdict.extra.items()}
        return extra


def _turn_rewards(weights: Sequence[float], verdicts: Sequence[Verdict]) -> tuple[float, ...]:
    """Return the weighted sum of the rewards per turn; a reward for the whole rollout counts for its last turn."""
    num_turns = max(len(verdict.turn_rewards) for verdict in verdicts)
    if not num_turns:
        return ()
    rows = [verdict.turn_rewards or (*[0.0] * (num_turns - 1), verdict.reward) for verdict in verdicts]
    sums = []
    for turn in zip(*rows, strict=True):
        sums.append(sum(weight * reward for weight, reward in zip(weights, turn, strict=True)))
    return tuple(sums)


def _token_rewards(weights: Sequence[float], verdicts: Sequence[Verdict]) -> tuple[tuple[int, float], ...]:
    """Return the weighted sum of the rewards of tokens. Beside these, the rewards of turns count for the whole."""
    sums: Counter[int] = Counter()
    for weight, verdict in zip(weights, verdicts, strict=True):
        for position, reward in verdict.token_rewards:
            sums[position] += weight * reward
    return tuple(sorted(sums.items()))


class ScoredFailures:
    """A `RewardFunction` that gives the failed verdicts of another one a reward, so that their rollouts are trained.

    The verdicts keep their kind, so they are counted as failures.

    Args:
        reward: the other reward.
        value: reward and score of a rollout whose scorer failed.
    """

    def __init__(self, reward: RewardFunction, value: float) -> None:
        self._reward = reward
        self._value = value

    async def score(self, prompt: Prompt, rollouts: Sequence[Rollout]) -> list[Verdict]:
        """Return one verdict per rollout, in order."""
        verdicts = await score_each(self._reward, prompt, rollouts)
        given = {"reward": self._value, "score": self._value}
        return [replace(verdict, **given) if verdict.kind.failed else verdict for verdict in verdicts]

    def expect(self, group_id: str, pool: str | None) -> None:
        """See `expect_group`."""
        expect_group(self._reward, group_id, pool)

    async def close(self) -> None:
        """Close the other reward."""
        await self._reward.close()


def expect_group(reward: RewardFunction | None, group_id: str, pool: str | None) -> None:
    """Tell a reward that a group is being generated, if it gathers groups into calls as `FunctionReward` does.

    A call holds groups of the same `pool`. None says that the group will not come, if it has not yet.
    """
    expect = getattr(reward, "expect", None)
    if expect is not None:
        expect(group_id, pool)


async def score_each(reward: RewardFunction, prompt: Prompt, rollouts: Sequence[Rollout]) -> list[Verdict]:
    """Return one verdict per rollout; an exception, or a wrong number of verdicts, becomes `crash` for all of them.

    Raises RewardError when the reward cannot run at all.
    """
    started = time.monotonic()

    def crash(detail: str) -> list[Verdict]:
        return [Verdict(VerdictKind.CRASH, detail=detail, seconds=time.monotonic() - started)] * len(rollouts)

    try:
        verdicts = await reward.score(prompt, rollouts)
    except RewardError:
        raise
    except Exception as error:  # a user's implementation may raise anything
        return crash(one_line(f"{type(error).__name__}: {error}"))
    if len(verdicts) != len(rollouts):
        return crash(f"{len(verdicts)} verdicts for {len(rollouts)} rollouts")
    return list(verdicts)


def build_reward(
    sources: Sequence[RewardSource],
    calls: CallOptions = DEFAULT_CALLS,
    *,
    log_path: str | Path | None = None,
    models: Sequence[RewardFunction] = (),
) -> RewardFunction:
    """Return the reward function of the sources: their weighted sum, or a single source of weight 1 itself.

    Args:
        sources: at least one.
        calls: how they are called.
        log_path: file for what functions print; None for this process's standard error.
        models: the reward functions of the sources of kind "model", in order. The caller builds them, because it knows
            on which devices they run.

    Raises:
        ConfigError: there is no source, a source cannot work, or the number of models is wrong.
    """
    if len(models) != (num_models := len(model_paths(sources))):
        raise ConfigError(f"got {len(models)} reward models for {num_models} sources of the kind model")
    remaining = iter(models)
    rewards: list[RewardFunction] = []
    for source in sources:
        if source.kind == "function":
            rewards.append(FunctionReward(source.targets[0], calls, log_path=log_path))
        elif source.kind == "code":
            rewards.append(CodeReward(open_sandbox(calls.code_sandbox), calls))
        elif source.kind == "server":
            from rlhf_rollout.rewards.remote import RemoteReward  # imports httpx

            rewards.append(RemoteReward(source.targets, calls))
        elif source.kind in JUDGE_KINDS:
            from rlhf_rollout.rewards.judge import JUDGES  # imports httpx

            rewards.append(JUDGES[source.kind][0](source.targets[0], calls))
        else:
            rewards.append(next(remaining))
    weights = [source.weight for source in sources]
    if weights == [1]:
        reward = rewards[0]
    else:
        reward = MixedReward(list(zip(metric_names(sources), weights, rewards, strict=True)))
    return reward if calls.failed_reward is None else ScoredFailures(reward, calls.failed_reward)


def check_reward(
    source: RewardSource, prompts: Sequence[Prompt] = (), calls: CallOptions = DEFAULT_CALLS
) -> str | None:
    """Try a source before anything expensive starts.

    See `check_reward_function`, `remote.check_reward_server` and `judge.check_judge`. A reward model is not tried,
    since that means loading it. Returns the reason of a failed trial, None without one.
    """
    if source.kind == "function":
        return check_reward_function(source.targets[0], prompts, calls)
    if source.kind == "code":
        return check_code(prompts[:NUM_TRIED], calls.code_sandbox)
    if source.kind == "server":
        from rlhf_rollout.rewards.remote import check_reward_server  # imports httpx

        return check_reward_server(source.targets, prompts, calls)
    if source.kind in JUDGE_KINDS:
        from rlhf_rollout.rewards.judge import check_judge  # imports httpx

        return check_judge(source, prompts, calls)
    return None
