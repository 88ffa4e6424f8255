"""A reward model whose processes divide its weights, as at ZeRO stage 3, and score together."""

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from rlhf_data.errors import DataError, EngineError, RewardError, RlhfError, first_line
from rlhf_rollout.host import collection_paused, free_port
from rlhf_rollout.ray_actors import end_actors, node_address, plain_errors, prepare_process
from rlhf_train.specs import ModelSpec

if TYPE_CHECKING:
    from rlhf_models.reward import InputLimits

_MAX_LATE = 2  # calls in a row that may pass their deadline before the processes are ended
_MAX_STARTS = 3  # of processes, without an answer in between
_DEATH_S = 5.0  # within which Ray notices that a process has died
_WHAT = "a process of the reward model"

Passes = Sequence[Sequence[np.ndarray]]  # the sequences of each forward pass, [L] int32 each


class _ProcessGoneError(RewardError):
    """A process has died in a call."""


class RewardRank:
    """One process of a divided reward model: `ray.remote(RewardRank)`. Its GPU has a part of each weight.

    Args:
        path: a folder or hub name, see `rlhf_models.load_reward_model`.
        dtype: "float32" or "bfloat16".
        attn_implementation: "auto", or a name that transformers knows.
        max_length: tokens of the longest sequence of the run; see `rlhf_models.attention.frequencies.pin_frequencies`.
        device: "cuda" or "cpu".
        normalize: shift and scale scores by the moments that the model's config holds, if any.
        offload: keep the weights in host memory, pinned, between calls. Without effect on a CPU.
        gpus: see `prepare_process`.
    """

    def __init__(
        self,
        path: str,
        *,
        dtype: str,
        attn_implementation: str = "auto",
        max_length: int | None = None,
        device: str = "cpu",
        normalize: bool = False,
        offload: bool = False,
        gpus: Sequence[str] = (),
    ) -> None:
        prepare_process(gpus)
        self._spec = ModelSpec(
            path=path,
            dtype=dtype,
            attn_implementation=attn_implementation,
            zero_stage=3,
            offload=offload,
            max_length=max_length,
        )
        self._device, self._normalize = device, normalize
        self._error: RlhfError | None = EngineError(f"the reward model {path} is not loaded")
        self._seconds = 0.0

    def master_address(self) -> tuple[str, int]:
        """Return the host and port where the processes meet."""
        return node_address(), free_port()

    @collection_paused()
    def load(self, rank: int, num_ranks: int, master: tuple[str, int]) -> None:
        """Join the other processes and load this one's part of the weights. Collective. `ready` raises its error."""
        import torch

        from rlhf_models.loading import load_reward_model
        from rlhf_models.reward import InputLimits
        from rlhf_train.engine.deepspeed import place_frozen
        from rlhf_train.engine.process_group import init_process_group

        started = time.perf_counter()
        try:
            init_process_group(rank=rank, world_size=num_ranks, master=master, device=self._device)
            model = load_reward_model(self._spec.path, normalize=self._normalize, **self._spec.load_options)
            self._limits = InputLimits.of(model.model)
            self._model = place_frozen(model, self._spec, torch.device(self._device))
            self._error = None
        except RlhfError as error:
            self._error = error
        except Exception as error:
            hint = "if memory is short: more processes (``reward_ranks``), or ``ModelSpec.offload``"
            message = f"the reward model {self._spec.path} cannot be loaded: {first_line(error)}"
            self._error = EngineError(message, hint=hint)
        self._seconds = time.perf_counter() - started

    def ready(self) -> float:
        """Return how many seconds `load` took. Raises the error that it met."""
        if self._error is not None:
            raise self._error
        return self._seconds

    def limits(self) -> "InputLimits":
        """Return what the model can read. Raises as `ready`."""
        self.ready()
        return self._limits

    def score(self, passes: Passes) -> list[list[float]]:
        """Return the scores of each pass. Collective.

        All processes have the same number of passes, some of which may be without sequences. Raises RewardError when a
        pass fails; the other processes may then wait for this one.
        """
        import torch

        from rlhf_models.batch import TokenBatch
        from rlhf_models.host_states import awake

        self.ready()
        nothing = [np.zeros(1, np.int32)]
        scores = []
        try:
            # Not in inference mode: what DeepSpeed gathers in it could not be written again outside of it.
            with torch.no_grad(), awake(self._model):
                for sequences in passes:
                    found = self._model(TokenBatch.padded(sequences or nothing, 0, torch.device(self._device)))
                    scores.append(found.tolist()[: len(sequences)])
        except RuntimeError as error:  # torch raises it, also when memory runs out
            raise RewardError(f"the reward model {self._spec.path} failed: {first_line(error)}") from error
        return scores


@dataclass(eq=False)
class _Request:
    """Sequences of one call of `score`, and the future of their scores."""

    token_ids: Sequence[np.ndarray]
    answer: asyncio.Future[list[float]] = field(default_factory=lambda: asyncio.get_running_loop().create_future())


class DividedScorer:
    """A `Scorer` of the processes of one divided reward model, which run every pass together.

    Each pass gathers all weights, so one call scores whatever waits, up to its limit. When one process has died, a pass
    has failed, or calls have passed their deadline twice in a row, all processes end. The next call starts new ones, up
    to `_MAX_STARTS` times without an answer. The requests after a failed call are scored one by one.

    Args:
        starts: for each process, what starts its `RewardRank` and returns Ray's handle of it.
        batch_size: sequences per process and pass at most.
        on_cpu: each sequence has a pass of its own, as in `score_sequences`.
    """

    def __init__(self, starts: Sequence[Callable[[], Any]], *, batch_size: int, on_cpu: bool = False) -> None:
        self._starts = list(starts)
        self._batch_size = 1 if on_cpu else batch_size
        self._most_at_once = batch_size * len(self._starts)
        self._waiting: list[_Request] = []
        self._runner: asyncio.Task[None] | None = None
        self._limits: InputLimits | None = None
        self._num_late = 0  # calls to these processes since their last answer
        self._num_starts = 0  # since the last answer
        self._num_alone = 0  # of the next requests, which do not share a call
        self.handles: list[Any] = []
        self._begin()

    async def score(self, token_ids: list[np.ndarray]) -> list[float]:
        """Return one score per sequence, in order.

        Raises DataError for an empty sequence and as `check_sequences`, RewardError for failures.
        """
        await self._check(token_ids)
        request = _Request(token_ids)
        self._waiting.append(request)
        if self._runner is None or self._runner.done():
            self._runner = asyncio.create_task(self._answer_all())
        handles = self.handles
        try:
            return await request.answer
        except asyncio.CancelledError:
            self._num_late += handles is self.handles
            if self._num_late >= _MAX_LATE:
                self._end(handles)
            raise

    async def _check(self, token_ids: Sequence[np.ndarray]) -> None:
        from rlhf_models.reward import check_sequences

        if self._limits is None:
            handles = self._live()
            try:
                with plain_errors(RewardError, _WHAT):
                    self._limits = await handles[0].limits.remote()
            except RewardError:
                self._end(handles)
                raise
        if any(len(sequence) == 0 for sequence in token_ids):
            raise DataError("the reward model got an empty sequence")
        check_sequences(token_ids, self._limits, "the reward model")

    async def _answer_all(self) -> None:
        while requests := self._next():
            sequences = [sequence for request in requests for sequence in request.token_ids]
            try:
                scores = await self._ask_again_after_death(sequences)
            except Exception as error:  # it is the answer to all of them
                self._num_alone = sum(len(request.token_ids) for request in requests)
                for request in requests:
                    if not request.answer.done():
                        request.answer.set_exception(error)
                continue
            self._num_late = 0
            for request in requests:
                own, scores = scores[: len(request.token_ids)], scores[len(request.token_ids) :]
                if not request.answer.done():
                    request.answer.set_result(own)

    def _next(self) -> list[_Request]:
        """Take the requests of the next call: those that wait longest, as many as fit."""
        self._waiting = [request for request in self._waiting if not request.answer.done()]
        taken, count = 0, 0
        for request in self._waiting:
            count += len(request.token_ids)
            if taken and (count > self._most_at_once or self._num_alone):
                break
            taken += 1
        self._num_alone = max(self._num_alone - 1, 0)
        requests, self._waiting = self._waiting[:taken], self._waiting[taken:]
        return requests

    async def _ask_again_after_death(self, sequences: Sequence[np.ndarray]) -> list[float]:
        """Return what `_ask` returns. A call in which a process dies is made once more, with new processes."""
        try:
            return await self._ask(sequences)
        except _ProcessGoneError:
            if self._num_late:  # they were ended for being late
                raise
            return await self._ask(sequences)

    async def _ask(self, sequences: Sequence[np.ndarray]) -> list[float]:
        """Return the scores of one call to all processes."""
        handles = self._live()
        # Neighbours in length go to different processes, whose passes then have similar shapes.
        order = sorted(range(len(sequences)), key=lambda row: len(sequences[row]))
        shares = [order[rank :: len(handles)] for rank in range(len(handles))]
        batches = _even_batches([[len(sequences[row]) for row in share] for share in shares], self._batch_size)
        rows = [
            [[share[index] for index in batch] for batch in own] for share, own in zip(shares, batches, strict=True)
        ]
        try:
            calls = [
                asyncio.create_task(_answer(handle.score.remote([[sequences[row] for row in batch] for batch in own])))
                for handle, own in zip(handles, rows, strict=True)
            ]
            answers = await _all_answers(calls)
        except BaseException:
            self._end(handles)
            raise
        scores = [0.0] * len(sequences)
        for own, found in zip(rows, answers, strict=True):
            for batch, values in zip(own, found, strict=True):
                for row, value in zip(batch, values, strict=True):
                    scores[row] = value
        self._num_starts = 0
        return scores

    def _begin(self) -> None:
        self._num_starts += 1
        self._num_late = 0
        self.handles = [start() for start in self._starts]
        master = self.handles[0].master_address.remote()
        for rank, handle in enumerate(self.handles):
            handle.load.remote(rank, len(self.handles), master)

    def _live(self) -> list[Any]:
        """Return the processes, new ones if the last ones have ended. Raises RewardError if too many never answered."""
        if not self.handles:
            if self._num_starts >= _MAX_STARTS:
                message = f"the reward model's processes have ended {_MAX_STARTS} times in a row without an answer"
                raise RewardError(message, hint="their logs in Ray's session folder tell why; often memory ran out")
            self._begin()
        return self.handles

    def _end(self, handles: Sequence[Any]) -> None:
        """End the processes, once for all that notice their failure."""
        if not handles or handles is not self.handles:
            return
        self.handles = []
        end_actors(handles)


async def _answer(reference: Any) -> Any:
    with plain_errors(_ProcessGoneError, _WHAT):
        return await reference


async def _all_answers(calls: Sequence[asyncio.Task[Any]]) -> list[Any]:
    """Return the results of all calls. Raises `_ProcessGoneError` also when a process fails for another one's death."""
    try:
        return await asyncio.gather(*calls)
    except RewardError:
        # The peers of a process that has died may fail before Ray tells of its death.
        await asyncio.wait(calls, timeout=_DEATH_S)
        ended = [call.exception() for call in calls if call.done()]
        if gone := next((error for error in ended if isinstance(error, _ProcessGoneError)), None):
            raise gone from None
        raise


def _even_batches(lengths: Sequence[Sequence[int]], batch_size: int) -> list[list[list[int]]]:
    """Return each process's passes over sequences of these lengths, as many for each: some have none."""
    from rlhf_models.reward import length_batches

    batches = [list(length_batches(own, batch_size)) for own in lengths]
    most = max(map(len, batches))
    return [[*own, *([[]] * (most - len(own)))] for own in batches]
