"""Reward by a reward model: the tokens of rollouts go to scorers, in batches. Here too: a scorer in this process."""

import asyncio
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Protocol

import numpy as np

from rlhf_data.errors import ConfigError, RewardError, RlhfError
from rlhf_data.records import Prompt, Rollout, Verdict, VerdictKind
from rlhf_rollout.rewards.batcher import Batcher
from rlhf_rollout.rewards.outcomes import Failure, judge
from rlhf_rollout.rewards.user_function import Scored


class Scorer(Protocol):
    """Gives token sequences a score; `score` may be called many times at once."""

    async def score(self, token_ids: list[np.ndarray]) -> list[float]:
        """Return one score a sequence [L] int32, in order. Raises when it cannot."""


class ModelReward:
    """A `RewardFunction` over a reward model: token in, so that it reads what the policy wrote and not a text of it.

    Prompt and response go as one sequence, batched across concurrent `score` calls, to the replica with the fewest
    sequences under way, one that has just failed last. A score above 0 is the verdict ok, another wrong. A batch that
    fails is tried once more on another replica, if there is one, then its sequences one by one, so that only the
    culprit is charged: its verdict is crash.

    Args:
        scorers: replicas of one model, which stay the caller's to close.
        batch_size: sequences of a call.
        max_wait_s: what a sequence waits for others at most.

    Raises:
        ConfigError: no scorer, or a batch size below 1.
    """

    def __init__(self, scorers: Sequence[Scorer], *, batch_size: int = 64, max_wait_s: float = 0.005) -> None:
        if not scorers:
            raise ConfigError("a reward model needs at least one scorer")
        self._scorers = list(scorers)
        self._num_under_way = [0] * len(self._scorers)
        self._num_failures = [0] * len(self._scorers)  # in a row
        self._batcher = Batcher(partial(judge, ask=self._ask), max_batch=batch_size, max_wait_s=max_wait_s)

    async def score(self, prompt: Prompt, rollouts: Sequence[Rollout]) -> list[Verdict]:
        """Return one verdict a rollout, in order."""
        return list(await asyncio.gather(*(self._batcher.submit(rollout.token_ids) for rollout in rollouts)))

    async def close(self) -> None:
        """Give up what is under way."""
        await self._batcher.close()

    async def _ask(self, token_ids: Sequence[np.ndarray], _: Failure | None) -> Scored | Failure:
        """Return the scores of one scorer, or else of another one, or why the last gave none."""
        indices = range(len(self._scorers))
        for _ in self._scorers[:2]:
            index = min(indices, key=lambda index: (self._num_failures[index], self._num_under_way[index]))
            self._num_under_way[index] += len(token_ids)
            try:
                scores = await self._scorers[index].score(list(token_ids))
                if len(scores) != len(token_ids):
                    raise RewardError(f"the reward model gave {len(scores)} scores for {len(token_ids)} sequences")
            except Exception as error:  # of any scorer: what fails is a verdict
                self._num_failures[index] += 1
                first_line = str(error).strip().partition("\n")[0]
                failure = Failure(VerdictKind.CRASH, f"{type(error).__name__}: {first_line}")
                indices = [other for other in indices if other != index]
            else:
                self._num_failures[index] = 0
                rewards = [float(score) for score in scores]
                return Scored(rewards, rewards, {}, [None] * len(rewards))
            finally:
                self._num_under_way[index] -= len(token_ids)
        return failure


class LocalScorer:
    """A `Scorer` over a reward model in this process, on a thread of its own.

    Args:
        path: a folder or hub name, see `rlhf_models.load_reward_model`.
        dtype: "float32" or "bfloat16".
        attn_implementation: "auto", or a name that transformers knows.
        device: where it runs.
        batch_size: sequences a pass at most.
        normalize: shift and scale scores by the moments that the model's config holds, if any.

    Raises:
        ConfigError: the model cannot be loaded, or the extra `models` is not installed.
    """

    def __init__(
        self,
        path: str,
        *,
        dtype: str = "float32",
        attn_implementation: str = "auto",
        device: str = "cpu",
        batch_size: int = 64,
        normalize: bool = False,
    ) -> None:
        try:
            from rlhf_models.loading import load_reward_model
        except ImportError as error:
            raise ConfigError("reward models need rlhf-models", hint="install rlhf-rollout[models]") from error
        model = load_reward_model(path, dtype=dtype, attn_implementation=attn_implementation, normalize=normalize)
        self._path = path
        self._model = model.to(device)
        self._batch_size = batch_size
        self._thread = ThreadPoolExecutor(1, "reward-model")

    @property
    def has_moments(self) -> bool:
        """Whether scores are normalised by moments that are stored with the model."""
        return self._model.moments is not None

    async def score(self, token_ids: list[np.ndarray]) -> list[float]:
        """See `Scorer`. Raises DataError for a token that the model has no embedding of, else RewardError."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, self._score, token_ids)

    def close(self) -> None:
        """End the thread."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _score(self, token_ids: list[np.ndarray]) -> list[float]:
        from rlhf_models.reward import score_sequences

        try:
            return score_sequences(self._model, token_ids, batch_size=self._batch_size)
        except RlhfError:
            raise
        except RuntimeError as error:  # of torch, out of memory among them
            first_line = str(error).strip().partition("\n")[0]
            raise RewardError(f"the reward model {self._path} failed: {type(error).__name__}: {first_line}") from error
