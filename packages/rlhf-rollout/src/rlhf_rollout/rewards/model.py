"""Rewards from reward models: scorers receive rollouts' tokens in batches. Includes a scorer in this process."""

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import Any, Protocol

from rlhf_data.errors import ConfigError, RewardError, RlhfError, first_line, installs
from rlhf_data.images.reader import open_image_reader
from rlhf_data.records import Prompt, Rollout, Verdict, VerdictKind
from rlhf_rollout.http.batcher import Batcher
from rlhf_rollout.rewards.outcomes import Failure, judge
from rlhf_rollout.rewards.sources import DEFAULT_CALLS, CallOptions
from rlhf_rollout.rewards.user_function import Scored

_FIRST_TOKENS = 512  # of the sequences of a first pass, whose scores nobody reads
MODEL_TIMEOUT_S = 1800.0  # as long as an engine's request: a call may wait for all calls before it


class Scorer(Protocol):
    """Scores token sequences; `score` may be called concurrently."""

    async def score(self, samples: list[Any]) -> list[float]:
        """Return one score per sample, in order. May raise anything on failure.

        A sample is a sequence of tokens [L] int32, or a pair of one and the paths of its images.
        """


class ModelReward:
    """A `RewardFunction` that asks a reward model, which reads the tokens that the policy wrote and not their text.

    Prompt and response form one sequence. Sequences of concurrent `score` calls are batched; those that come while all
    replicas are busy form the next batch. A batch goes to the replica with the fewest sequences in flight; replicas
    whose last calls failed come last. A batch that fails is sent
    once more to another replica, if there is one, and then sequence by sequence, so that only the sequences at fault
    get the verdict crash. A batch without scores at the deadline is the fault of the replica and of no sequence: all
    get the verdict timeout unless another replica answers.

    Args:
        scorers: replicas of one model. The caller closes them.
        calls: its `batch_size` are sequences per call, and its `success_threshold` is that of the verdicts.
        timeout_s: deadline of one call, in which it may wait for other calls of the same replica.
        by_turn: score a rollout after each of its turns. Each score is the reward of the turn's last token, their sum
            the rollout's reward, and the last one its score. A turn that cannot be scored fails the rollout.

    Raises:
        ConfigError: there is no scorer, or the deadline is not positive.
    """

    def __init__(
        self,
        scorers: Sequence[Scorer],
        calls: CallOptions = DEFAULT_CALLS,
        *,
        timeout_s: float = MODEL_TIMEOUT_S,
        by_turn: bool = False,
    ) -> None:
        if not scorers:
            raise ConfigError("a reward model needs at least one scorer")
        if timeout_s <= 0:
            raise ConfigError(f"timeout_s of a reward model is {timeout_s}; it must be positive")
        self._timeout_s = timeout_s
        self._by_turn = by_turn
        self._scorers = list(scorers)
        self._num_under_way = [0] * len(self._scorers)
        self._num_failures = [0] * len(self._scorers)  # since the last success of each
        judging = partial(judge, ask=self._ask, success_threshold=calls.success_threshold)
        # A replica scores one batch after the other, and a large batch in little more time than a single sequence.
        self._batcher = Batcher(judging, max_batch=calls.batch_size, max_running=len(self._scorers))

    async def score(self, prompt: Prompt, rollouts: Sequence[Rollout]) -> list[Verdict]:
        """Return one verdict per rollout, in order."""
        return list(await asyncio.gather(*(self._verdict(rollout) for rollout in rollouts)))

    async def _verdict(self, rollout: Rollout) -> Verdict:
        ends = rollout.turn_ends.tolist() if self._by_turn else []
        if not ends:
            return await self._batcher.submit(self._asked(rollout))
        verdicts = await asyncio.gather(*(self._batcher.submit(rollout.token_ids[: end + 1]) for end in ends))
        if failed := [verdict for verdict in verdicts if verdict.kind.failed]:
            return failed[0]
        rewards = [verdict.reward for verdict in verdicts]
        return replace(verdicts[-1], reward=sum(rewards), token_rewards=tuple(zip(ends, rewards, strict=True)))

    async def close(self) -> None:
        """Cancel what is in flight."""
        await self._batcher.close()

    def _asked(self, rollout: Rollout) -> Any:
        """Return what the scorer is sent."""
        return (rollout.token_ids, rollout.images) if rollout.images else rollout.token_ids

    def _scored(self, answers: Sequence[Any]) -> Scored:
        """Return the result of a call from the scorer's answers."""
        rewards = [float(score) for score in answers]
        return Scored(rewards, rewards, {}, [None] * len(rewards))

    async def _ask(self, token_ids: Sequence[Any], _: Failure | None) -> Scored | Failure:
        """Return the scores of one replica, or after a failure those of another one, or the last failure."""
        indices = range(len(self._scorers))
        for _ in self._scorers[:2]:
            index = min(indices, key=lambda index: (self._num_failures[index], self._num_under_way[index]))
            self._num_under_way[index] += len(token_ids)
            try:
                async with asyncio.timeout(self._timeout_s) as timer:
                    scores = await self._scorers[index].score(list(token_ids))
                if len(scores) != len(token_ids):
                    raise RewardError(f"the reward model gave {len(scores)} scores for {len(token_ids)} sequences")
            except Exception as error:  # a scorer may raise anything; the failure becomes a verdict
                self._num_failures[index] += 1
                failure = Failure(VerdictKind.CRASH, first_line(error))
                if timer.expired():
                    failure = self._late(len(token_ids))
                indices = [other for other in indices if other != index]
            else:
                self._num_failures[index] = 0
                return self._scored(scores)
            finally:
                self._num_under_way[index] -= len(token_ids)
        return failure

    def _late(self, num_sequences: int) -> Failure:
        message = f"the reward model gave no scores for {num_sequences} sequences within {self._timeout_s:g} s"
        hint = "its process hangs, or is overloaded: lower ``CallOptions.batch_size``, or give it more replicas"
        return Failure(VerdictKind.TIMEOUT, f"{message}; {hint}", of_sample=False)


class ProcessReward(ModelReward):
    """A `RewardFunction` that asks a process reward model, which judges each step of a response.

    The probability that a step is good is the reward of the step's last token, and their sum the rollout's reward. The
    score is the smallest of them: a solution is as good as its worst step. A response without steps gets 0 for both.
    Takes the arguments of `ModelReward`; the scorers are `LocalScorer`s with a `step_separator`.
    """

    def _asked(self, rollout: Rollout) -> Any:
        return rollout.token_ids, rollout.loss_mask

    def _scored(self, answers: Sequence[Any]) -> Scored:
        judged = [[probability for _, probability in steps] for steps in answers]
        return Scored(
            rewards=[float(sum(own)) for own in judged],
            scores=[min(own, default=0.0) for own in judged],
            extra={"steps": [float(len(own)) for own in judged]},
            verdicts=[None] * len(judged),
            token_rewards=[tuple(steps) for steps in answers],
        )


class LocalScorer:
    """A `Scorer` with a reward model in this process, which runs on its own thread.

    Args:
        path: a folder or hub name, see `rlhf_models.load_reward_model`.
        dtype: "float32" or "bfloat16".
        attn_implementation: "auto", or a name that transformers knows.
        max_length: tokens of the longest sequence of the run, which decides the frequencies of LongRoPE. None is the
            model's own context.
        device: torch's name of the device.
        batch_size: sequences per forward pass at most.
        normalize: shift and scale scores by the moments that the model's config holds, if any.
        images: read the images of samples, for models of `rlhf_data.images.reader.IMAGE_FAMILIES`.
        step_separator: the text that ends a step, for a process reward model, which judges each step; None for a model
            with a scalar head.
        offload: keep the weights in host memory, pinned, between calls. Without effect on a CPU.
        compiles: compile the layers where passes are packed (bfloat16 on a GPU). The start then takes seconds longer.

    Raises:
        ConfigError: the model cannot be loaded, or the extra `models` is not installed.
    """

    def __init__(
        self,
        path: str,
        *,
        dtype: str = "float32",
        attn_implementation: str = "auto",
        max_length: int | None = None,
        device: str = "cpu",
        batch_size: int = 64,
        normalize: bool = False,
        images: bool = False,
        step_separator: str | None = None,
        offload: bool = False,
        compiles: bool = False,
    ) -> None:
        try:
            from rlhf_models.fast.compiled import compile_layers, compile_unavailable_reason
            from rlhf_models.host_states import RestingModel, awake
            from rlhf_models.loading import load_config, load_reward_model
            from rlhf_models.process_reward import StepJudge
            from rlhf_models.reward import InputLimits, has_packed_kernel, score_sequences
        except ImportError as error:
            raise ConfigError("reward models need rlhf-models", hint=installs("rlhf-rollout[models]")) from error
        options = {"dtype": dtype, "attn_implementation": attn_implementation, "max_length": max_length}
        self._path = path
        packs = False
        self.has_moments = False  # whether scores are normalised by moments that are stored with the model
        if step_separator is None:
            reader = open_image_reader(path) if images else None
            options |= {"images": "frozen" if images else ""}
            is_plain = attn_implementation == "auto" and not images
            packs = is_plain and has_packed_kernel(load_config(path), dtype, device)
            model: Any = load_reward_model(path, normalize=normalize, packing=packs, **options).to(device)
            self.has_moments = model.moments is not None
            passes = {"batch_size": batch_size, "reader": reader, "packing": packs}
            self._run: Callable[..., list[Any]] = partial(score_sequences, model, **passes)
        else:
            self._run = judge = StepJudge(path, step_separator, device=device, batch_size=batch_size, **options)
            model = judge.model
        self._thread = ThreadPoolExecutor(1, "reward-model")
        # Asked before the weights rest, because none can be compiled for the CPU.
        if packs and compiles and compile_unavailable_reason(model.model, model.value_head.weight.device) is None:
            self._thread.submit(compile_layers, model.model).result()
        rests = offload and device != "cpu"
        self._awake = partial(awake, RestingModel(model, model.parameters()) if rests else model)
        if packs:  # the first passes compile kernels and start libraries, which takes seconds
            longest = int(min(max_length or _FIRST_TOKENS, _FIRST_TOKENS, InputLimits.of(model.model).context))
            # Kernels for numbers of tokens that 16 divides are not those for other numbers.
            for lengths in ([longest] * 4, [longest - 1, 1, 1]):
                self._thread.submit(self._score, [[0] * length for length in lengths]).result()

    async def score(self, samples: list[Any]) -> list[Any]:
        """Return one answer per sample: scores as `Scorer`, or with a `step_separator` what `StepJudge` returns.

        Raises DataError for a token id outside of the vocabulary, RewardError for other failures.
        """
        return await asyncio.get_running_loop().run_in_executor(self._thread, self._score, samples)

    def close(self) -> None:
        """End the thread."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _score(self, samples: list[Any]) -> list[Any]:
        try:
            with self._awake():
                return self._run(samples)
        except RlhfError:
            raise
        except RuntimeError as error:  # torch raises it, also when memory runs out
            raise RewardError(f"the reward model {self._path} failed: {first_line(error)}") from error
