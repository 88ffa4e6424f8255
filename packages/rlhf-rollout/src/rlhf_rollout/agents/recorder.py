"""Records an episode as token spans while an agent asks the policy for one answer after another."""

import asyncio
import dataclasses
import functools
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from rlhf_data.bounds import bounded, check_bounds
from rlhf_data.errors import DataError, EngineError
from rlhf_data.records import Episode, FinishReason, Prompt, Rollout, Span, SpanSource, Verdict
from rlhf_rollout.agents.interface import BudgetSpentError
from rlhf_rollout.engines.stopping import texts_of
from rlhf_rollout.protocols import Completion, SamplingParams
from rlhf_rollout.router import EngineRouter

if TYPE_CHECKING:
    from rlhf_data.images.reader import ImageReader

# `min_tokens` is not among them: an engine takes end tokens out of the distribution until then, and a trainer does not.
_OVERRIDES = ("max_tokens", "stop_token_ids", "stop")
_NO_TOKENS = np.empty(0, np.int32)
_LOGGER = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeLimits:
    """Limits of one episode. An episode that reaches one of them ends there and keeps its rewards.

    Attributes:
        max_turns: answers of the policy.
        max_length: tokens of a conversation, prompt and environment included.
        max_seconds: wall clock from the begin of the episode to the last request.

    Raises:
        ConfigError: a limit is not positive.
    """

    max_turns: int = bounded(16, ge=1)
    max_length: int = bounded(4096, ge=1)
    max_seconds: float = bounded(float("inf"), gt=0)

    def __post_init__(self) -> None:
        check_bounds(self)


@dataclass(slots=True, eq=False)
class _Branch:
    """A conversation of which no token was rewritten: it becomes one rollout.

    `ends` holds the number of tokens up to the end of each answer, `requests` the number of its request in the episode.
    `routes` and `images` are those of the rollout, see `Rollout`.
    """

    spans: list[Span] = field(default_factory=list)
    ends: list[int] = field(default_factory=list)
    requests: list[int] = field(default_factory=list)
    finish_reason: FinishReason = FinishReason.STOP
    routes: np.ndarray | None = None
    images: tuple[str, ...] = ()

    @property
    def size(self) -> int:
        """The number of its tokens."""
        return self.ends[-1] if self.ends else 0

    def token_ids(self) -> np.ndarray:
        """Return its tokens, [size] int32."""
        return np.concatenate([_NO_TOKENS, *(span.token_ids for span in self.spans)])

    def add_routes(self, routes: np.ndarray | None) -> None:
        """Add what the engine says of the tokens so far. What is known already stays: earlier answers came from it."""
        if routes is None:
            return
        added = routes[0 if self.routes is None else len(self.routes) :]
        self.routes = added if self.routes is None else np.concatenate([self.routes, added])


@dataclass(frozen=True, slots=True)
class Sampled:
    """An answer that is not recorded yet.

    Attributes:
        token_ids: [n] int32, the whole conversation before it.
        completion: the answer.
        images: the paths of the images whose tokens it has, in order.
        request: the number of its request in the episode.
        is_truncated: a limit of the run has cut the answer; a lower `max_tokens` of the agent's own is none.
    """

    token_ids: np.ndarray
    completion: Completion
    images: tuple[str, ...]
    request: int
    is_truncated: bool


@dataclass(slots=True, eq=False, repr=False)
class EpisodeRecorder:
    """Sends the requests of one episode to the router and keeps what comes back, token by token.

    A request that continues what the policy has seen and written extends that rollout: the new tokens before the answer
    become an environment span. A request that rewrites the history, or that continues it a second time, begins another
    rollout of the episode. Its whole history is then its prompt, so that no token is trained twice.

    Attributes:
        router: answers the requests.
        prompt: what the episode is about.
        sampling: how every answer is sampled, unless the agent asks otherwise; `num_samples` must be 1.
        name: id of the episode; also the engine's key for the conversation.
        group_id: id of the episode's group.
        limits: see `EpisodeLimits`.
        decode: returns the text of token ids [n].
        vocab_size: ids that an agent gives must lie below it.
        reader: of images; None for text alone.
        num_turns: requests that were answered or are under way, whether or not their answers are recorded.
        error: the error of the engine that ends the episode; None without one.
    """

    router: EngineRouter
    prompt: Prompt
    sampling: SamplingParams
    _: KW_ONLY
    name: str
    group_id: str
    limits: EpisodeLimits
    decode: Callable[[Sequence[int]], str]
    vocab_size: int = 2**31
    reader: "ImageReader | None" = None
    num_turns: int = field(default=0, init=False)
    error: EngineError | None = field(default=None, init=False)
    _branches: list[_Branch] = field(default_factory=list, init=False)
    _started: float = field(default_factory=time.monotonic, init=False)
    _is_cut: bool = field(default=False, init=False)

    @property
    def token_ids(self) -> np.ndarray:
        """[n] int32, the conversation that was continued last; the prompt before the first answer."""
        return self._branches[-1].token_ids() if self._branches else self.prompt.token_ids

    @property
    def images(self) -> tuple[str, ...]:
        """The paths of the images of this conversation."""
        return self._branches[-1].images if self._branches else self.prompt.images

    @property
    def num_answers(self) -> int:
        """Answers that are recorded."""
        return sum(len(branch.ends) for branch in self._branches)

    async def with_images(self, token_ids: Sequence[int] | np.ndarray) -> tuple[Any, tuple[str, ...]]:
        """Return the tokens of a conversation of which an agent gave all, and the paths of its images.

        What begins with a recorded conversation or the prompt has their images, and no others. Anything else may have
        one token for each image of the prompt, and then gets all of their tokens. Raises as `extended`.
        """
        if self.reader is None:
            return token_ids, ()
        given = _integers(token_ids)
        asked = self.prompt.token_ids
        found = [(asked, self.prompt.images), *((branch.token_ids(), branch.images) for branch in self._branches)]
        known = [(len(own), images) for own, images in found if np.array_equal(given[: len(own)], own)]
        # Of those with the same tokens, whose images may differ, the latest.
        size, images = max(reversed(known), key=lambda one: one[0], default=(0, ()))
        paths = () if size or self.reader.image_id not in given else self.prompt.images
        return await self.extended(given[:size].tolist(), images, given[size:].tolist(), paths)

    def check_reads_images(self) -> None:
        """Raise DataError if the run reads text only."""
        if self.reader is None:
            hint = "make the models read images: name the key of the prompts' images with ``image_key``"
            raise DataError("an agent gave an image, and this run reads text only", hint=hint)

    async def extended(
        self, before: Sequence[int], images: Sequence[str], added: Sequence[int], paths: Sequence[str] = ()
    ) -> tuple[list[int], tuple[str, ...]]:
        """Return the tokens of a conversation with more after it, and the paths of all of its images.

        Args:
            before: its tokens, with all tokens of its `images`.
            images: their paths.
            added: tokens, of which the chat template wrote those that stand for the images at `paths`.
            paths: of images that have not been read yet.

        Raises:
            DataError: images that cannot be read, or another number of them than of places.
        """
        if self.reader is None:
            return [*before, *added], ()
        origin = f"episode {self.name}"
        self.reader.check_number(len(images) + len(paths), origin)
        sizes = await asyncio.to_thread(self.reader.image_sizes, paths, origin) if paths else []
        return [*before, *self.reader.expand_prompt(added, paths, origin, sizes)], (*images, *paths)

    async def generate(
        self,
        token_ids: Sequence[int] | np.ndarray,
        overrides: Mapping[str, Any] | None = None,
        images: tuple[str, ...] = (),
    ) -> Completion:
        """Return the policy's answer to a conversation and record both. See `sample` for arguments and errors."""
        sampled = await self.sample(token_ids, overrides, images)
        self.add(sampled)
        return sampled.completion

    async def sample(
        self,
        token_ids: Sequence[int] | np.ndarray,
        overrides: Mapping[str, Any] | None = None,
        images: tuple[str, ...] = (),
    ) -> Sampled:
        """Return the policy's answer to a conversation. It is no part of the episode until `add` gets it.

        Args:
            token_ids: the whole conversation.
            overrides: sampling of this answer that differs: `max_tokens`, which may be lower than the run's,
                `stop_token_ids` or `stop`.
            images: the paths of the images whose tokens the conversation has, in order.

        Raises:
            BudgetSpentError: the episode has reached one of its limits.
            DataError: no tokens, tokens outside the vocabulary, or an override of anything else, which would change
                the distribution that is trained.
            ConfigError: a `max_tokens` below 1, or a `stop` that holds no text.
            EngineError: the engines have failed; see `error`.
        """
        token_ids = _integers(token_ids)
        sampling = self._sampling_for(len(token_ids), overrides or {})
        # An engine that gets such a token fails, which would cost the run more than this episode.
        added = token_ids[self._branch_of(token_ids, images).size :]
        for given in (added, np.array(sampling.stop_token_ids, object)):
            strange = given[(given < 0) | (given >= self.vocab_size)]
            if len(strange):
                message = f"an agent used the token id {strange[0]}, and the vocabulary has {self.vocab_size} tokens"
                raise DataError(message, hint="tokenize with the run's own tokenizer")
        token_ids = token_ids.astype(np.int32, copy=False)
        self.num_turns += 1
        request = self.num_turns
        more = {"images": images} if images else {}
        try:
            [completion] = await self.router.generate(
                token_ids, sampling, conversation=self.name, group_id=self.group_id, **more
            )
        except EngineError as error:
            self.error = error
            raise
        is_own_limit = sampling.max_tokens < min(self.sampling.max_tokens, self.limits.max_length - len(token_ids))
        is_truncated = completion.finish_reason is FinishReason.LENGTH and not is_own_limit
        return Sampled(token_ids, completion, images, request, is_truncated)

    def add(self, sampled: Sampled) -> None:
        """Record a conversation and its answer, once."""
        # Looked for only now: another answer may have continued the same conversation meanwhile.
        branch = self._branch_of(sampled.token_ids, sampled.images)
        completion = sampled.completion
        added = sampled.token_ids[branch.size :]
        if len(added):
            source = SpanSource.ENVIRONMENT if branch.spans else SpanSource.PROMPT
            branch.spans.append(Span(source, added.copy()))  # which does not keep the whole conversation
        if branch not in self._branches:
            self._branches.append(branch)
        branch.spans += completion.spans
        branch.add_routes(completion.routes)
        branch.images = sampled.images
        branch.ends.append(len(sampled.token_ids) + len(completion.token_ids))
        branch.requests.append(sampled.request)
        branch.finish_reason = FinishReason.LENGTH if sampled.is_truncated else FinishReason.STOP

    def episode(self, turn_rewards: Sequence[float], verdict: Verdict | None, *, is_cut: bool = False) -> Episode:
        """Return what was recorded.

        Args:
            turn_rewards: the reward of each answer in the order of the requests; none for a reward as a whole.
            verdict: the episode's, which every rollout gets; None when another reward scores the rollouts. The reward
                of an answer stays in the rollout that holds the answer.
            is_cut: the episode was ended by a limit of its own, not by the policy.
        """
        if not self._branches:
            asked = Span(SpanSource.PROMPT, self.prompt.token_ids)
            self._branches.append(_Branch([asked], images=self.prompt.images))
        rollouts = []
        for number, branch in enumerate(self._branches):
            name = self.name if len(self._branches) == 1 else f"{self.name}.{number}"
            is_last = number == len(self._branches) - 1
            reason = FinishReason.LENGTH if is_last and (is_cut or self._is_cut) else branch.finish_reason
            text = self.decode([token for span in branch.spans[1:] for token in span.token_ids.tolist()])
            known = {"routes": branch.routes, "images": branch.images}
            rollout = Rollout(name, self.group_id, tuple(branch.spans), reason, text, **known)
            if verdict is not None:
                rollout = dataclasses.replace(
                    rollout, verdict=self._verdict_for(rollout, branch, verdict, turn_rewards)
                )
            rollouts.append(rollout)
        return Episode(self.name, self.group_id, tuple(rollouts))

    def _verdict_for(
        self, rollout: Rollout, branch: _Branch, verdict: Verdict, turn_rewards: Sequence[float]
    ) -> Verdict:
        """Return the verdict with the rollout's rewards by turn, if there is one reward per answer of the episode."""
        requests = sorted(request for other in self._branches for request in other.requests)
        if verdict.reward is None or not requests or len(turn_rewards) != len(requests):
            return verdict
        earned = dict(zip(requests, turn_rewards, strict=True))
        own = [earned.pop(request) for request in branch.requests]
        before = sum(reward for request, reward in earned.items() if request < branch.requests[0])
        # Answers without a token of the environment between them are one turn.
        sums = np.zeros(len(rollout.turn_ends))
        np.add.at(sums, np.searchsorted(rollout.turn_ends, np.array(branch.ends) - 1), own)
        elsewhere = (before, sum(earned.values()) - before)
        return dataclasses.replace(verdict, turn_rewards=tuple(sums.tolist()), earned_elsewhere=elsewhere)

    def _sampling_for(self, num_tokens: int, overrides: Mapping[str, Any]) -> SamplingParams:
        limits = self.limits
        room = limits.max_length - num_tokens
        is_late = time.monotonic() - self._started > limits.max_seconds
        if room < 1 or self.num_turns >= limits.max_turns or is_late:
            self._is_cut = True
            raise BudgetSpentError
        if not num_tokens:
            raise DataError("an agent asked for an answer to a conversation without tokens")
        for name, value in overrides.items():
            if name not in _OVERRIDES and value != getattr(self.sampling, name, None):
                hint = f"an agent may set {', '.join(_OVERRIDES)}"
                raise DataError(f"an agent asked for {name} = {value!r}, and the policy learns as sampled", hint=hint)
        chosen = {name: value for name, value in overrides.items() if name in _OVERRIDES and value is not None}
        longest = self.sampling.max_tokens
        asked = int(chosen.get("max_tokens", longest))
        if asked > longest:
            _say_that_answers_are_no_longer(longest)
        wanted = min(asked, longest, room)
        seed = self.sampling.seed
        return dataclasses.replace(
            self.sampling,
            max_tokens=wanted,
            min_tokens=min(self.sampling.min_tokens, wanted),
            stop_token_ids=tuple(map(int, chosen.get("stop_token_ids", self.sampling.stop_token_ids))),
            stop=texts_of(chosen.get("stop", self.sampling.stop)),
            seed=None if seed is None else (seed + self.num_turns) % 2**31,
        )

    def _branch_of(self, token_ids: np.ndarray, images: tuple[str, ...]) -> _Branch:
        """Return the rollout that the conversation continues, or an empty one."""
        best = _Branch()
        for branch in self._branches:
            # Images of one size have the same tokens.
            is_longer = best.size < branch.size and images[: len(branch.images)] == branch.images
            if is_longer and np.array_equal(token_ids[: branch.size], branch.token_ids()):
                best = branch
        return best


def _integers(values: Sequence[int] | np.ndarray) -> np.ndarray:
    """Return integers as a vector, of Python's own ones where they are too large for numpy's.

    Raises TypeError or ValueError for anything else.
    """
    found = np.array(values)
    return found if found.dtype.kind == "i" and found.ndim == 1 else np.array([int(value) for value in values], object)


@functools.cache  # once
def _say_that_answers_are_no_longer(longest: int) -> None:
    _LOGGER.warning("agents ask for answers longer than those of the run, which have at most %d tokens", longest)
