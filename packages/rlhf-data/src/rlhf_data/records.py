"""Records that cross a process: frozen, validated where they are made, picklable, made of numpy arrays.

A rollout is made only of token spans; text is a view of it and never its source.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import pairwise, takewhile
from typing import Any

import numpy as np

from rlhf_data.errors import DataError

_TURN_REWARD_TOLERANCE = 1e-6  # relative to the sum of magnitudes: weighted sums are rounded


class SpanSource(StrEnum):
    """Who wrote the tokens of a span."""

    PROMPT = "prompt"
    POLICY = "policy"
    ENVIRONMENT = "environment"


class FinishReason(StrEnum):
    """Why a rollout ended: at a stop token, at the length limit, or because it was given up."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"


class VerdictKind(StrEnum):
    """The outcome of scoring.

    UNSCORED means that the run has no scorer. The others say whose fault a bad outcome is. WRONG and UNPARSABLE are the
    policy's: the rollout is trained with its reward, whatever the policy wrote. TIMEOUT and CRASH are failures of the
    scorer or agent, which the policy must not cause: such a rollout has no reward and is not trained, or has a fixed
    one. ABSTAINED is the scorer's choice to give no reward; nobody is at fault, and the rollout is not trained.
    """

    OK = "ok"
    WRONG = "wrong"
    UNPARSABLE = "unparsable"
    UNSCORED = "unscored"
    TIMEOUT = "timeout"
    CRASH = "crash"
    ABSTAINED = "abstained"

    @property
    def failed(self) -> bool:
        """Whether the scorer or agent failed, not the policy, so that there is no score."""
        return self in (VerdictKind.TIMEOUT, VerdictKind.CRASH)


def freeze_arrays(record: Any, **dtypes: type) -> None:
    """Give fields of a frozen record the dtypes named and make them read-only. Raises DataError unless they are 1-D."""
    for name, dtype in dtypes.items():
        # A view: the caller's own array stays writeable.
        array = np.ascontiguousarray(getattr(record, name), dtype=dtype).view()
        if array.ndim != 1:
            raise DataError(f"{type(record).__name__}.{name} must be one-dimensional, got shape {array.shape}")
        array.flags.writeable = False
        object.__setattr__(record, name, array)


def freeze_routes(record: Any) -> None:
    """Make `record.routes` read-only, of the smallest unsigned type; None stays None.

    Raises DataError unless they are numbers of experts, [R, layers, top_k].
    """
    if record.routes is None:
        return
    routes = np.asarray(record.routes)
    if routes.ndim != 3 or not np.issubdtype(routes.dtype, np.integer) or routes.min(initial=0) < 0:
        what = f"shape {routes.shape} and type {routes.dtype}"
        raise DataError(f"{type(record).__name__}.routes must be numbers of experts [R, layers, top_k], got {what}")
    routes = np.ascontiguousarray(routes, np.min_scalar_type(routes.max(initial=0))).view()
    routes.flags.writeable = False
    object.__setattr__(record, "routes", routes)


def check_json(record: Any, *names: str) -> None:
    """Raise DataError unless fields of a record are JSON values: checkpoints and records of rollouts have them as such.

    Mappings of any kind are objects, and tuples are lists. NaN and infinite numbers are none.
    """
    for name in names:
        value = getattr(record, name)
        try:
            if value is not None and not isinstance(value, str):
                json.dumps(value, default=_object, allow_nan=False)
        except (TypeError, ValueError, RecursionError) as error:
            message = f"{type(record).__name__}.{name} is no JSON value: {error}"
            hint = "give texts, finite numbers of Python, True, False, None, lists and dicts"
            raise DataError(message, hint=hint) from error


def _object(value: Any) -> dict[Any, Any]:
    if not isinstance(value, Mapping):
        raise TypeError(f"it has a {type(value).__name__}")
    return dict(value)


@dataclass(frozen=True, slots=True)
class Prompt:
    """What the policy is asked.

    Attributes:
        prompt_id: unique in its data set.
        token_ids: [P] int32, P >= 1; exactly what the engine receives.
        text: the rendered prompt, for rewards and people.
        label: the reference answer, as the reward function receives it.
        source: the data source it came from.
        messages: what the chat template has rendered as `text`; None for a prompt that it has not.
        extra: further cells of the row by their keys, as JSON values, for reward functions and agents.
        images: the paths of the images whose tokens the prompt has, in order.
    """

    prompt_id: str
    token_ids: np.ndarray
    text: str
    label: str | None = None
    source: str = "default"
    messages: tuple[Mapping[str, str], ...] | None = None
    extra: Mapping[str, Any] = field(default_factory=dict)
    images: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        freeze_arrays(self, token_ids=np.int32)
        check_json(self, "label", "messages", "extra")
        if not len(self.token_ids):
            raise DataError(f"prompt {self.prompt_id!r} has no tokens")


@dataclass(frozen=True, slots=True)
class Span:
    """Consecutive tokens from one source.

    Attributes:
        source: who wrote them.
        token_ids: [n] int32.
        logprobs: [n] float32, nats, under the distribution they were sampled from; for policy spans only.
        policy_version: version of the weights that sampled them, counted in updates; for policy spans only.
    """

    source: SpanSource
    token_ids: np.ndarray
    logprobs: np.ndarray | None = None
    policy_version: int | None = None

    def __post_init__(self) -> None:
        freeze_arrays(self, token_ids=np.int32)
        if (self.source is SpanSource.POLICY) != (self.logprobs is not None and self.policy_version is not None):
            message = f"a {self.source} span carries log-probs and a policy version exactly when it is the policy's"
            raise DataError(message)
        if self.logprobs is not None:
            freeze_arrays(self, logprobs=np.float32)
            if len(self.logprobs) != len(self.token_ids):
                raise DataError(f"{len(self.logprobs)} log-probs for {len(self.token_ids)} tokens")


@dataclass(frozen=True, slots=True)
class Verdict:
    """The result of scoring a rollout.

    Attributes:
        kind: the outcome.
        reward: what the policy learns from. A failed verdict may have none, and that of a scorer that abstained has
            none; such a rollout is not trained.
        score: the raw score; equal to the reward unless the scorer returned both.
        detail: one line for people, such as the text of an exception.
        extra: further numbers to log.
        seconds: how long scoring took, failed attempts included.
        turn_rewards: the reward of each turn, in order; with `earned_elsewhere` their sum is `reward`. Empty when the
            reward is for the rollout as a whole.
        token_rewards: (position, reward) pairs in the order of positions, the part of `reward` that single tokens
            earned, such as the last tokens of reasoning steps. Positions are those in the rollout's `token_ids`. The
            rest of `reward` is for the rollout as a whole. Not together with `turn_rewards`.
        source_rewards: the reward of each source whose weighted sum is `reward`, without its weight, in the order of
            the sources; None for one that abstained. Empty when the reward is no such sum.
        earned_elsewhere: the parts of `reward` that turns in other rollouts of the episode earned, before this
            rollout's first turn and later. Zeros without `turn_rewards`.
    """

    kind: VerdictKind
    reward: float | None = None
    score: float | None = None
    detail: str = ""
    extra: Mapping[str, float] = field(default_factory=dict)
    # Two verdicts that differ only in how long they took are equal.
    seconds: float = field(default=0.0, compare=False)
    turn_rewards: tuple[float, ...] = ()
    token_rewards: tuple[tuple[int, float], ...] = ()
    source_rewards: tuple[float | None, ...] = ()
    earned_elsewhere: tuple[float, float] = (0.0, 0.0)

    def __post_init__(self) -> None:
        has_abstained = self.kind is VerdictKind.ABSTAINED
        if self.reward is None and not (has_abstained or self.kind.failed):
            raise DataError(f"a verdict `{self.kind}` without a reward")
        if self.reward is not None and has_abstained:
            raise DataError(f"a verdict `{self.kind}` has the reward {self.reward}; it must have none")
        if self.reward is not None and not np.isfinite(self.reward):
            raise DataError(f"the reward is {self.reward}")
        if self.score is None:
            object.__setattr__(self, "score", self.reward)
        if not 0 <= self.seconds < np.inf:
            raise DataError(f"scoring took {self.seconds} seconds; it must be at least 0 and finite")
        check_json(self, "extra")
        if self.turn_rewards:
            self._check_turn_rewards()
        if self.token_rewards:
            self._check_token_rewards()

    def _check_token_rewards(self) -> None:
        object.__setattr__(self, "token_rewards", tuple((int(at), float(value)) for at, value in self.token_rewards))
        positions = [at for at, _ in self.token_rewards]
        if self.reward is None or self.turn_rewards:
            raise DataError("rewards of tokens need a reward that they are a part of, and no rewards of turns")
        if positions[0] < 0 or any(later <= at for at, later in pairwise(positions)):
            raise DataError(f"the positions of rewarded tokens are {positions}; they must be ascending, from 0")
        if not np.isfinite([value for _, value in self.token_rewards]).all():
            raise DataError(f"the rewards of tokens are {self.token_rewards}; they must be finite")

    def _check_turn_rewards(self) -> None:
        object.__setattr__(self, "turn_rewards", tuple(float(reward) for reward in self.turn_rewards))
        parts = (*self.turn_rewards, *self.earned_elsewhere)
        total = sum(parts)
        size = sum(abs(reward) for reward in parts)
        fits = self.reward is not None and abs(total - self.reward) <= _TURN_REWARD_TOLERANCE * max(size, 1.0)
        if not (fits and np.isfinite(size)):
            message = f"the rewards of {len(self.turn_rewards)} turns add up to {total}, the reward is {self.reward}"
            raise DataError(message, hint="the reward of a rollout is the sum of the rewards of its turns")


@dataclass(frozen=True, slots=True)
class Rollout:
    """One finished sample of the policy: token spans in order, the first one the prompt.

    Attributes:
        rollout_id: unique in a run.
        group_id: shared by the samples of one prompt.
        spans: the tokens, in order.
        finish_reason: why it ended.
        text: the decoded response.
        verdict: the result of scoring; None before it.
        routes: [R, layers, top_k] of the smallest unsigned type: the experts that the engine sent the first R tokens
            through, R <= L, by layers of the model. Layers without experts have zeros. None if the engine did not say.
        images: the paths of the images whose tokens it has, in order.
    """

    rollout_id: str
    group_id: str
    spans: tuple[Span, ...]
    finish_reason: FinishReason
    text: str = ""
    verdict: Verdict | None = None
    routes: np.ndarray | None = None
    images: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        freeze_routes(self)
        if not self.spans or self.spans[0].source is not SpanSource.PROMPT:
            raise DataError(f"rollout {self.rollout_id!r} does not begin with its prompt")
        num_rewards = len(self.verdict.turn_rewards) if self.verdict else 0
        if num_rewards and num_rewards != len(self.turn_ends):
            message = f"rollout {self.rollout_id!r} has {len(self.turn_ends)} turns and {num_rewards} turn rewards"
            raise DataError(message, hint="give one reward per turn, or none")
        strays = [at for at, _ in self.verdict.token_rewards if not at < self.num_tokens] if self.verdict else []
        if strays:
            raise DataError(f"rollout {self.rollout_id!r} has {self.num_tokens} tokens and a reward at {strays[0]}")
        if self.num_routed > self.num_tokens:
            message = f"rollout {self.rollout_id!r} has {self.num_tokens} tokens and routes of {self.num_routed}"
            raise DataError(message)

    @property
    def token_ids(self) -> np.ndarray:
        """[L] int32: all tokens."""
        return np.concatenate([span.token_ids for span in self.spans])

    @property
    def tokens_before_policy(self) -> np.ndarray:
        """[n] int32: the tokens before the first of the policy; all of them if it wrote none."""
        spans = takewhile(lambda span: span.source is not SpanSource.POLICY, self.spans)
        return np.concatenate([span.token_ids for span in spans])

    @property
    def loss_mask(self) -> np.ndarray:
        """[L] bool: True for the tokens the policy wrote, the only ones that are trained."""
        is_trained = [span.source is SpanSource.POLICY for span in self.spans]
        return np.repeat(is_trained, [len(span.token_ids) for span in self.spans])

    @property
    def rollout_logprobs(self) -> np.ndarray:
        """[L] float32, nats: the engine's log-prob of each policy token, 0.0 elsewhere."""
        return self._per_token([0.0 if span.logprobs is None else span.logprobs for span in self.spans], np.float32)

    @property
    def policy_versions(self) -> np.ndarray:
        """[L] int32: the version that wrote each policy token, -1 elsewhere."""
        versions = [-1 if span.policy_version is None else span.policy_version for span in self.spans]
        return self._per_token(versions, np.int32)

    def _per_token(self, values: Sequence[Any], dtype: type) -> np.ndarray:
        """Return [L] of a dtype from one number, or one array, per span."""
        parts = zip(values, self.spans, strict=True)
        return np.concatenate([np.broadcast_to(value, len(span.token_ids)) for value, span in parts], dtype=dtype)

    @property
    def num_tokens(self) -> int:
        """L, prompt included."""
        return sum(len(span.token_ids) for span in self.spans)

    @property
    def num_routed(self) -> int:
        """R, the tokens whose experts are known."""
        return 0 if self.routes is None else len(self.routes)

    @property
    def num_response_tokens(self) -> int:
        """The number of tokens the policy wrote."""
        return sum(len(span.token_ids) for span in self.spans if span.source is SpanSource.POLICY)

    @property
    def turn_ends(self) -> np.ndarray:
        """[K] int64: the position in `token_ids` of the last token of each turn (consecutive policy tokens)."""
        mask = self.loss_mask
        return np.flatnonzero(mask & ~np.append(mask[1:], False))

    @property
    def earned(self) -> list[tuple[int, float]]:
        """What single tokens earned: pairs of a position in `token_ids` and a reward, of turns or of steps."""
        if self.verdict is None:
            return []
        ends = self.turn_ends.tolist() if self.verdict.turn_rewards else ()
        return [*zip(ends, self.verdict.turn_rewards, strict=True), *self.verdict.token_rewards]

    @property
    def policy_version(self) -> int | None:
        """The oldest policy version that wrote a token of this rollout; None if the policy wrote none."""
        versions = [span.policy_version for span in self.spans if span.policy_version is not None]
        return min(versions, default=None)


@dataclass(frozen=True, slots=True)
class Episode:
    """One attempt at a prompt.

    Attributes:
        episode_id: unique in a run.
        group_id: shared by the episodes of one prompt.
        rollouts: at least one. A conversation that only grows is one rollout; one whose history was rewritten, or that
            branched, is several.
    """

    episode_id: str
    group_id: str
    rollouts: tuple[Rollout, ...]

    def __post_init__(self) -> None:
        if not self.rollouts:
            raise DataError(f"episode {self.episode_id!r} has no rollout")
        _check_group(self.group_id, {rollout.rollout_id: rollout.group_id for rollout in self.rollouts}, "rollouts")

    @property
    def verdict(self) -> Verdict | None:
        """The verdict of the last rollout, with which the episode ended; None until it is scored."""
        return self.rollouts[-1].verdict


@dataclass(frozen=True, slots=True)
class RolloutGroup:
    """All episodes of one prompt.

    Attributes:
        group_id: also stored in each of its episodes and rollouts, so that nothing depends on their positions.
        prompt: what was asked.
        episodes: the attempts.
    """

    group_id: str
    prompt: Prompt
    episodes: tuple[Episode, ...]

    def __post_init__(self) -> None:
        _check_group(self.group_id, {episode.episode_id: episode.group_id for episode in self.episodes}, "episodes")

    @property
    def rollouts(self) -> tuple[Rollout, ...]:
        """The rollouts of all episodes, in order."""
        return tuple(rollout for episode in self.episodes for rollout in episode.rollouts)


def _check_group(group_id: str, members: Mapping[str, str], what: str) -> None:
    """Raise DataError unless all members, group ids by their own ids, belong to the group."""
    strays = [name for name, own_group_id in members.items() if own_group_id != group_id]
    if strays:
        raise DataError(f"{what} {strays} do not belong to group {group_id!r}")
