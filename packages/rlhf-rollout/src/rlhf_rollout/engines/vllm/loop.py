"""The thread that owns a vLLM engine core: it admits requests, steps, and runs control calls between two steps."""

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
from rlhf_data.records import FinishReason, Span, SpanSource
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
    """One `generate` call: a prompt, and the completions that are done by the number of their sample."""

    prompt: list[int]
    sampling: SamplingParams
    future: "Future[list[Completion]]" = field(default_factory=_uncancellable)
    completions: dict[int, Completion] = field(default_factory=dict)
    request_ids: list[str] = field(default_factory=list)


@dataclass(slots=True)
class _Sample:
    """One sequence in flight: the spans that earlier weights wrote, and what the weights in force have written."""

    job: Job
    index: int
    spans: list[Span] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)

    def end_span(self, policy_version: int) -> None:
        """Put what was written since the last span into a span of its own."""
        if self.token_ids or not self.spans:
            logprobs = self.logprobs[: len(self.token_ids)]
            self.spans.append(Span(SpanSource.POLICY, self.token_ids, logprobs, policy_version))
        self.token_ids = []
        self.logprobs = []


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
        holding: whether requests that have not started wait.
        frozen: whether the requests in flight stay where they are.
        refusal: message and hint with which new requests are rejected at once; None while they are accepted.
        policy_version: of the tokens that are drawn from now on.

    Only functions that run through `call` change `holding`, `frozen` and `refusal`.
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
        self._lock = threading.Lock()
        self._ended = False
        self.failure: str | None = None
        self.holding = False
        self.frozen = False
        self.refusal: tuple[str, str] | None = None
        self.policy_version = 0
        started: Future[None] = Future()
        self._thread = threading.Thread(target=self._run, args=(build, started), name="vllm-steps", daemon=True)
        self._thread.start()
        started.result()

    @property
    def num_in_flight(self) -> int:
        """Sequences that are decoded or wait; only for functions that run through `call`."""
        return len(self._samples) + sum(job.sampling.num_samples for job in self._waiting)

    def submit(self, prompt: list[int], sampling: SamplingParams) -> Job:
        """Queue a job and return it; its future resolves when all of its samples are done."""
        job = Job(prompt, sampling)
        self._send(lambda: self._take_job(job))
        return job

    def abort(self, job: Job) -> None:
        """Give a job up."""
        self._send(lambda: self._abort(job))

    def call(self, function: Callable[[Any], Any], *, drain: bool) -> "Future[Any]":
        """Run `function(core)` between two steps and return what it returns.

        With `drain` it runs once the requests in flight have finished, unless they are frozen; requests that come later
        wait for it.
        """
        future = _uncancellable()
        if drain:
            self._send(lambda: self._queue(self._calls, (function, future), future))
        else:
            self._send(lambda: self._perform(function, future))
        return future

    def _send(self, action: Callable[[], None]) -> None:
        """Let the thread run an action; once it has ended, every action only tells its caller why."""
        with self._lock:
            if not self._ended:
                self._inbox.put(action)
                return
        action()

    def close(self) -> None:
        """End the thread; whatever is in flight fails."""
        self._send(lambda: setattr(self, "_closing", True))
        self._thread.join(timeout=60)

    # -- for functions that run through `call` -----------------------------------------------------------------------

    def refuse(self, core: Any, message: str, hint: str) -> None:
        """Reject all requests, started or not, and those that come until `refusal` is None again."""
        self.refusal = (message, hint)
        core.abort_requests(list(self._samples))
        self._reject_all(EngineError(message, hint=hint))

    def settle(self, core: Any) -> None:
        """Let the batch that async scheduling has begun ahead of the last finished request run out."""
        inner = core.engine_core
        for _ in range(_MAX_SETTLING_STEPS):
            if not inner.batch_queue and not inner.scheduler.has_requests():
                return
            core.get_output()

    def freeze(self, core: Any) -> None:
        """Stop stepping and let requests in flight keep what they have written."""
        self.holding = True
        self.frozen = True
        inner = core.engine_core
        inner.pause_scheduler("keep", clear_cache=False)
        # With async scheduling a batch is under way whose tokens the weights in force draw: they belong to this span.
        for _ in range(_MAX_SETTLING_STEPS):
            if not inner.batch_queue:
                break
            self._take_outputs(core.get_output())

    def restart(self, core: Any) -> None:
        """Stop stepping, and queue requests in flight again from their beginning; finished samples stay."""
        self.freeze(core)
        core.abort_requests(list(self._samples))
        jobs = list(dict.fromkeys(sample.job for sample in self._samples.values()))
        self._samples.clear()
        for job in reversed(jobs):
            job.request_ids.clear()
            self._waiting.appendleft(job)

    def unfreeze(self, core: Any) -> None:
        """Step again."""
        if self.frozen:
            core.engine_core.resume_scheduler()
        self.frozen = False

    def advance(self, policy_version: int) -> None:
        """Let what is drawn from now on belong to new weights."""
        for sample in self._samples.values():
            if sample.token_ids:
                sample.end_span(self.policy_version)
        self.policy_version = policy_version

    def forget_prefixes(self, core: Any) -> bool:
        """Drop cached prefixes and return whether that worked; frozen sequences will be prefilled again."""
        return core.reset_prefix_cache(bool(self._samples))

    # -- the thread --------------------------------------------------------------------------------------------------

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
        with self._lock:
            self._ended = True
        while not self._inbox.empty():
            self._inbox.get()()
        if healthy:
            self._core.shutdown()

    def _cycle(self) -> None:
        self._receive(block=not self._has_work())
        if self._closing:
            return
        while self._calls and self._is_still():
            if not self._samples:
                self.settle(self._core)
            self._perform(*self._calls.popleft())
        self._admit()
        if not self._is_still():
            self._take_outputs(self._core.get_output())

    def _is_still(self) -> bool:
        """Whether no request in flight advances."""
        return self.frozen or not self._samples

    def _has_work(self) -> bool:
        return not self._is_still() or bool(self._calls) or (bool(self._waiting) and not self.holding)

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

    def _take_job(self, job: Job) -> None:
        if self.refusal is not None and self.failure is None:
            _reject(job.future, EngineError(self.refusal[0], hint=self.refusal[1]))
        else:
            self._queue(self._waiting, job, job.future)

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
            if index in job.completions:  # of a job that was restarted
                continue
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

    def _take_outputs(self, outputs: Any) -> None:
        samples = self._samples
        for output in outputs.outputs:
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
        sample.end_span(self.policy_version)
        job.completions[sample.index] = Completion(tuple(sample.spans), _FINISH_REASONS[reason])
        if len(job.completions) == job.sampling.num_samples and not job.future.done():
            job.future.set_result([completion for _, completion in sorted(job.completions.items())])

    def _abort(self, job: Job) -> None:
        if job in self._waiting:
            self._waiting.remove(job)
        request_ids = [request_id for request_id in job.request_ids if self._samples.pop(request_id, None) is not None]
        if request_ids and self.failure is None:
            self._core.abort_requests(request_ids)

    def _reject_all(self, error: EngineError) -> None:
        for job in [*(sample.job for sample in self._samples.values()), *self._waiting]:
            _reject(job.future, error)
        self._samples.clear()
        self._waiting.clear()

    def _fail_all(self, reason: str) -> None:
        self._reject_all(EngineError(reason))
        while self._calls:
            _reject(self._calls.popleft()[1], EngineError(reason))


def _reject(future: "Future[Any]", error: BaseException) -> None:
    if not future.done():
        future.set_exception(error)
