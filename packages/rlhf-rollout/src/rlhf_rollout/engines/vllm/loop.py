"""The thread that owns a vLLM engine core: it admits requests, steps, and runs what must not run beside a step."""

import queue
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import numpy as np
from vllm.sampling_params import SamplingParams as VllmSamplingParams
from vllm.v1.engine import EngineCoreRequest
from vllm.v1.engine import FinishReason as VllmFinishReason

from rlhf_data.errors import EngineError
from rlhf_data.records import FinishReason
from rlhf_rollout.engines.requests import sample_seeds
from rlhf_rollout.protocols import Completion, SamplingParams

_FINISH_REASONS = {
    VllmFinishReason.STOP: FinishReason.STOP,
    VllmFinishReason.LENGTH: FinishReason.LENGTH,
    VllmFinishReason.ABORT: FinishReason.ABORT,
}
_MAX_SETTLING_STEPS = 8


def _uncancellable() -> "Future[Any]":
    """Return a future that a waiter that gives up does not cancel: the thread alone decides its fate."""
    future: Future[Any] = Future()
    future.set_running_or_notify_cancel()
    return future


@dataclass(slots=True, eq=False)
class Job:
    """One `generate` call: a prompt, and the completions of it that there are by the number of their sample."""

    prompt: list[int]
    sampling: SamplingParams
    future: "Future[list[Completion]]" = field(default_factory=_uncancellable)
    completions: dict[int, Completion] = field(default_factory=dict)
    request_ids: list[str] = field(default_factory=list)


@dataclass(slots=True)
class _Sample:
    """One sequence in flight."""

    job: Job
    index: int
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)


class StepLoop:
    """Runs a core on a thread of its own; `submit`, `abort`, `call` and `close` may be called from any thread.

    Args:
        build: makes the core, vLLM's in-process client, on the thread: CUDA's current device is a property of a thread.
        end_token_ids: end every completion.
        seed: of requests without one, where each row needs one.
        seed_every_row: vLLM's CPU sampler heeds seeds only when every row of the batch has one, and a greedy row has
            none; then every request gets a seed, and greedy and sampled requests do not share a batch.
        gather_s: an idle engine waits this long after each request for the next of its wave, so that a wave starts in
            one batch, the same in every run.

    Attributes:
        failure: why the engine can no longer generate; None while it is healthy.
        holding: whether requests that have come wait; only functions that run through `call` change it.
        policy_version: of the completions that end from now on.
    """

    def __init__(
        self,
        build: Callable[[], Any],
        *,
        end_token_ids: tuple[int, ...],
        seed: int,
        seed_every_row: bool,
        gather_s: float = 0.0,
    ) -> None:
        self._end_token_ids = end_token_ids
        self._seed_every_row = seed_every_row
        self._gather_s = gather_s
        self._rng = np.random.default_rng(seed)
        self._inbox: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._waiting: deque[Job] = deque()
        self._samples: dict[str, _Sample] = {}
        self._calls: deque[tuple[Callable[[Any], Any], Future[Any]]] = deque()
        self._numbers = count()
        self._greedy_batch = False
        self._closing = False
        self.failure: str | None = None
        self.holding = False
        self.policy_version = 0
        started: Future[None] = Future()
        self._thread = threading.Thread(target=self._run, args=(build, started), name="vllm-steps", daemon=True)
        self._thread.start()
        started.result()

    @property
    def num_in_flight(self) -> int:
        """Sequences that are being decoded or wait to be."""
        return len(self._samples) + sum(job.sampling.num_samples for job in self._waiting)

    def submit(self, prompt: list[int], sampling: SamplingParams) -> Job:
        """Queue a job and return it; its future resolves when all of its samples are done."""
        job = Job(prompt, sampling)
        self._inbox.put(lambda: self._queue(self._waiting, job, job.future))
        return job

    def abort(self, job: Job) -> None:
        """Give a job up."""
        self._inbox.put(lambda: self._abort(job))

    def call(self, function: Callable[[Any], Any], *, drain: bool) -> "Future[Any]":
        """Run `function(core)` between two steps; with `drain` once the requests in flight have finished, while those
        that come later wait."""
        future = _uncancellable()
        if drain:
            self._inbox.put(lambda: self._queue(self._calls, (function, future), future))
        else:
            self._inbox.put(lambda: self._perform(function, future))
        return future

    def close(self) -> None:
        """End the thread; whatever is in flight fails."""
        if self._thread.is_alive():
            self._inbox.put(lambda: setattr(self, "_closing", True))
            self._thread.join(timeout=60)

    def fail_waiting(self, reason: str) -> None:
        """Reject the requests that have not started; only for functions that run through `call`."""
        while self._waiting:
            _reject(self._waiting.popleft().future, EngineError(reason))

    def _run(self, build: Callable[[], Any], started: "Future[None]") -> None:
        try:
            self._core = build()
        except BaseException as error:
            started.set_exception(error)
            return
        started.set_result(None)
        while not self._closing:
            try:
                self._cycle()
            except BaseException as error:
                self.failure = f"the engine failed and takes no more requests: {type(error).__name__}: {error}"
                self._fail_all(self.failure)
        healthy = self.failure is None
        self.failure = self.failure or "the engine was closed"
        self._fail_all(self.failure)
        while not self._inbox.empty():
            self._inbox.get()()
        if healthy:
            self._core.shutdown()

    def _cycle(self) -> None:
        self._receive(block=not self._samples and not self._can_admit())
        if self._closing:
            return
        while self._calls and not self._samples:
            _settle(self._core)
            self._perform(*self._calls.popleft())
        self._admit()
        if self._samples:
            self._step()

    def _can_admit(self) -> bool:
        return bool(self._calls) or (bool(self._waiting) and not self.holding)

    def _receive(self, *, block: bool) -> None:
        """Take in what has come; when idle, wait for it, and a moment longer for its companions."""
        if block:
            self._inbox.get()()
            until = time.monotonic() + self._gather_s
            while self._waiting and (left := until - time.monotonic()) > 0:
                try:
                    self._inbox.get(timeout=left)()
                    until = time.monotonic() + self._gather_s
                except queue.Empty:
                    return
        while not self._inbox.empty():
            self._inbox.get()()

    def _queue(self, line: deque[Any], item: Any, future: "Future[Any]") -> None:
        if self.failure is None:
            line.append(item)
        else:
            _reject(future, EngineError(self.failure))

    def _perform(self, function: Callable[[Any], Any], future: "Future[Any]") -> None:
        try:
            if self.failure is not None:
                raise EngineError(self.failure)
            result = function(self._core)
        except BaseException as error:
            _reject(future, error)
        else:
            future.set_result(result)

    def _admit(self) -> None:
        while self._waiting and not self.holding and not self._calls:
            job = self._waiting[0]
            greedy = job.sampling.temperature == 0
            if self._seed_every_row and self._samples and greedy != self._greedy_batch:
                return
            self._greedy_batch = greedy
            self._waiting.popleft()
            try:
                self._start(job)
            except Exception as error:
                self._abort(job)
                _reject(job.future, EngineError(f"vLLM does not take the request: {error}"))

    def _start(self, job: Job) -> None:
        sampling, num_samples = job.sampling, job.sampling.num_samples
        seeds: list[int | None] = [None] * num_samples
        if sampling.seed is not None:
            seeds = list(sample_seeds(sampling.seed, num_samples))
        elif self._seed_every_row and sampling.temperature > 0:
            seeds = self._rng.integers(1 << 62, size=num_samples).tolist()
        params = None
        for index, seed in enumerate(seeds):
            if params is None or seed is not None:
                params = self._params(sampling, seed)
            request_id = str(next(self._numbers))
            job.request_ids.append(request_id)
            self._samples[request_id] = _Sample(job, index)
            self._core.add_request(
                EngineCoreRequest(
                    request_id=request_id,
                    prompt_token_ids=job.prompt,
                    mm_features=None,
                    sampling_params=params,
                    pooling_params=None,
                    arrival_time=time.time(),
                    lora_request=None,
                    cache_salt=None,
                    data_parallel_rank=None,
                )
            )

    def _params(self, sampling: SamplingParams, seed: int | None) -> VllmSamplingParams:
        return VllmSamplingParams(
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            seed=seed,
            max_tokens=sampling.max_tokens,
            min_tokens=sampling.min_tokens,
            stop_token_ids=[*self._end_token_ids, *sampling.stop_token_ids],
            logprobs=0,
            detokenize=False,
        )

    def _step(self) -> None:
        samples = self._samples
        for output in self._core.get_output().outputs:
            sample = samples.get(output.request_id)
            if sample is None:
                continue
            sample.token_ids += output.new_token_ids
            if output.new_logprobs is not None:
                sample.logprobs += output.new_logprobs.logprobs[:, 0].tolist()
            if output.finish_reason is not None:
                del samples[output.request_id]
                self._finish(sample, output.finish_reason)

    def _finish(self, sample: _Sample, reason: VllmFinishReason) -> None:
        job = sample.job
        if reason not in _FINISH_REASONS:
            self._abort(job)
            _reject(job.future, EngineError(f"vLLM gave a request up: {reason}"))
            return
        logprobs = sample.logprobs[: len(sample.token_ids)]
        job.completions[sample.index] = Completion(
            sample.token_ids, logprobs, _FINISH_REASONS[reason], self.policy_version
        )
        if len(job.completions) == job.sampling.num_samples and not job.future.done():
            job.future.set_result([completion for _, completion in sorted(job.completions.items())])

    def _abort(self, job: Job) -> None:
        if job in self._waiting:
            self._waiting.remove(job)
        request_ids = [request_id for request_id in job.request_ids if self._samples.pop(request_id, None) is not None]
        if request_ids and self.failure is None:
            self._core.abort_requests(request_ids)

    def _fail_all(self, reason: str) -> None:
        for job in [*(sample.job for sample in self._samples.values()), *self._waiting]:
            _reject(job.future, EngineError(reason))
        self._samples.clear()
        self._waiting.clear()
        while self._calls:
            _reject(self._calls.popleft()[1], EngineError(reason))


def _reject(future: "Future[Any]", error: BaseException) -> None:
    if not future.done():
        future.set_exception(error)


def _settle(core: Any) -> None:
    """Let the batch that async scheduling has begun ahead of the last finished request run out."""
    inner = core.engine_core
    for _ in range(_MAX_SETTLING_STEPS):
        if not inner.batch_queue and not inner.scheduler.has_requests():
            return
        core.get_output()
