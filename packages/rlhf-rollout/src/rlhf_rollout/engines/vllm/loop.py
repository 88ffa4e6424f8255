"""The thread that owns a vLLM engine core: it starts requests, steps the core, and runs control calls between steps."""

import queue
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from itertools import count
from types import MappingProxyType
from typing import Any

import numpy as np

from rlhf_data.errors import EngineError
from rlhf_data.records import FinishReason
from rlhf_rollout.engines.requests import Progress, rest_of, sample_seeds
from rlhf_rollout.engines.stopping import Decode, StopWatch
from rlhf_rollout.engines.vllm.internals import core_request, sampler_params
from rlhf_rollout.engines.vllm.speculation import count_drafts
from rlhf_rollout.protocols import Completion, Draft, SamplingParams

_MAX_SETTLING_STEPS = 8  # async scheduling is one or two batches ahead


def uncancellable() -> "Future[Any]":
    """Return a future that its waiters cannot cancel, so that the stepping thread can always set its result."""
    future: Future[Any] = Future()
    future.set_running_or_notify_cancel()
    return future


@dataclass(slots=True, eq=False)
class Job:
    """One `generate` call.

    Attributes:
        prompt: token ids.
        sampling: how its samples are drawn.
        drafts: its samples.
        decode: returns the text of tokens; for `sampling.stop`.
        features: of the images of the prompt; see `images.features`.
        future: resolves to the completions, in the order of the samples.
        request_ids: ids of its sequences in vLLM.
    """

    prompt: list[int]
    sampling: SamplingParams
    drafts: Sequence[Draft]
    decode: Decode | None = None
    features: list[Any] | None = None
    future: "Future[list[Completion]]" = field(default_factory=uncancellable)
    request_ids: list[str] = field(default_factory=list)


@dataclass(slots=True)
class Sample:
    """One sequence in flight.

    Attributes:
        job: the call that it belongs to.
        draft: what is written.
        num_skipped: experts, from the prompt's first token on, that the draft has already and vLLM tells again.
        watch: finds the texts that end it; None if there are none.
    """

    job: Job
    draft: Draft
    num_skipped: int
    watch: StopWatch | None = None

    def add(self, token_ids: list[int]) -> bool:
        """Add new tokens, up to the one that completes a text of `stop`; return whether there is one."""
        for number, token_id in enumerate(token_ids if self.watch is not None else (), 1):
            if self.watch.completes(token_id):
                self.draft.token_ids.fromlist(token_ids[:number])
                return True
        self.draft.token_ids.fromlist(token_ids)
        return False

    def add_routes(self, routes: np.ndarray) -> None:
        """Add experts, which vLLM tells of the prompt with the first token, and then of the token before."""
        skipped = min(self.num_skipped, len(routes))
        self.num_skipped -= skipped
        self.draft.routes.append(routes[skipped:])


class StepLoop:
    """Runs a core on its own thread. `submit`, `abort`, `call` and `close` may be called from any thread.

    Args:
        build: makes the core, vLLM's in-process client. It runs on the thread, because CUDA's current device belongs
            to a thread.
        end_token_ids: tokens that end every completion.
        seed: seed of the generator that gives seeds to requests without one, with `seed_every_row`.
        seed_every_row: give every sampled row a seed, and keep greedy rows, which have none, in batches of their own.
            vLLM's CPU sampler ignores seeds unless every row of a batch has one.
        gather_s: seconds that an idle engine waits after each request for another one. Requests that are sent together
            then start in one batch, which makes runs repeatable.
        adapters: those of requests, see `adapter_requests`; a request gets none whose adapter is not among them.
        drafts: whether vLLM drafts tokens, which are then counted.

    Attributes:
        failure: why the engine can no longer generate; None while it is healthy.
        holding: whether requests that have not started must wait.
        frozen: whether the requests in flight stand still.
        refusal: message and hint with which new requests are rejected at once; None while they are accepted.
        policy_version: version of the weights in force, which draw the next tokens.
        progress: advances with each step that writes something.

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
        adapters: Mapping[str | None, Any] = MappingProxyType({}),
        drafts: bool = False,
    ) -> None:
        self._end_token_ids = end_token_ids
        self._seed_every_row = seed_every_row
        self._gather_s = gather_s
        self._adapters = adapters
        self._drafts = drafts
        self._rng = np.random.default_rng(seed)
        self._inbox: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._waiting: deque[Job] = deque()
        self._samples: dict[str, Sample] = {}
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
        self.progress = Progress()
        started: Future[None] = Future()
        self._thread = threading.Thread(target=self._run, args=(build, started), name="vllm-steps", daemon=True)
        self._thread.start()
        started.result()

    @property
    def num_running(self) -> int:
        """Sequences that have started. Only functions that run through `call` may read it."""
        return len(self._samples)

    @property
    def num_in_flight(self) -> int:
        """Sequences that have started or wait. Only functions that run through `call` may read it."""
        return len(self._samples) + sum(job.sampling.num_samples for job in self._waiting)

    def submit(
        self,
        prompt: list[int],
        sampling: SamplingParams,
        decode: Decode | None = None,
        drafts: Sequence[Draft] | None = None,
        features: list[Any] | None = None,
    ) -> Job:
        """Queue a job and return it; its future resolves when all of its samples are done.

        `decode` returns the text of tokens, and is needed for `sampling.stop`. `drafts` are the samples, which it goes
        on with; None for new ones. `features` are those of the prompt's images.
        """
        job = Job(prompt, sampling, drafts or [Draft() for _ in range(sampling.num_samples)], decode, features)
        self._send(lambda: self._take_job(job))
        return job

    def abort(self, job: Job) -> None:
        """Drop a job; its future does not resolve."""
        self._send(lambda: self._abort(job))

    def call(self, function: Callable[[Any], Any], *, drain: bool) -> "Future[Any]":
        """Run `function(core)` between two steps and return its result as a future.

        With `drain` it runs after the requests in flight have finished, or at once if they are frozen. Requests that
        arrive in the meantime start after it.
        """
        future = uncancellable()
        if drain:
            self._send(lambda: self._queue(self._calls, (function, future), future))
        else:
            self._send(lambda: self._perform(function, future))
        return future

    def _send(self, action: Callable[[], None]) -> None:
        """Let the thread run an action. After the thread has ended it runs here and rejects its future."""
        # Under the lock, so that no action is put into the inbox after the thread has emptied it for the last time.
        with self._lock:
            if not self._ended:
                self._inbox.put(action)
                return
        action()

    def close(self) -> None:
        """End the thread. Requests in flight fail."""
        self._send(lambda: setattr(self, "_closing", True))
        self._thread.join(timeout=60)

    # -- for functions that run through `call` -----------------------------------------------------------------------

    def refuse(self, core: Any, message: str, hint: str) -> None:
        """Reject all requests, started or not, and all that arrive until `refusal` is None again."""
        self.refusal = (message, hint)
        core.abort_requests(list(self._samples))
        self._reject_all(EngineError(message, hint=hint))

    def settle(self, core: Any) -> None:
        """Step until vLLM is idle: async scheduling may have begun a batch before the last request ended."""
        inner = core.engine_core
        for _ in range(_MAX_SETTLING_STEPS):
            if not inner.batch_queue and not inner.scheduler.has_requests():
                return
            core.get_output()

    def freeze(self, core: Any) -> None:
        """Stop stepping. Requests in flight keep what they have written."""
        self.holding = True
        self.frozen = True
        inner = core.engine_core
        inner.pause_scheduler("keep", clear_cache=False)
        # With async scheduling a batch may be in flight. The weights in force draw its tokens, so take them in now.
        for _ in range(_MAX_SETTLING_STEPS):
            if not inner.batch_queue:
                break
            self._take_outputs(core.get_output())

    def restart(self, core: Any) -> None:
        """Stop stepping and queue the requests in flight again, with what they have written behind their prompts."""
        self.freeze(core)
        core.abort_requests(list(self._samples))
        jobs = list(dict.fromkeys(sample.job for sample in self._samples.values()))
        self._samples.clear()
        # In front of the requests that have never started, and in their old order.
        for job in reversed(jobs):
            job.request_ids.clear()
            self._waiting.appendleft(job)

    def unfreeze(self, core: Any) -> None:
        """Step again and start the requests that wait."""
        if self.frozen:
            core.engine_core.resume_scheduler()
        self.frozen = False
        self.holding = False

    def advance(self, policy_version: int) -> None:
        """Count the tokens drawn from here on as those of `policy_version`."""
        for sample in self._samples.values():
            sample.draft.go_on(policy_version)
        self.policy_version = policy_version

    # -- the thread --------------------------------------------------------------------------------------------------

    def _run(self, build: Callable[[], Any], started: "Future[None]") -> None:
        try:
            self._core = build()
            if self._drafts:
                count_drafts(self._core, self._samples)
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
        # Callers that sent an action just before the end still get an answer.
        while not self._inbox.empty():
            self._inbox.get()()
        if healthy:  # a core that has failed may hang here
            self._core.shutdown()
        del self._core  # whoever still has the engine does not keep its memory

    def _cycle(self) -> None:
        self._receive(block=not self._has_work())
        if self._closing:
            return
        while self._calls and self._is_still():
            if not self._samples:
                self.settle(self._core)  # a control call may change weights, so no batch may be in flight
            self._perform(*self._calls.popleft())
        self._admit()
        if not self._is_still():
            self._take_outputs(self._core.get_output())

    def _is_still(self) -> bool:
        """Return whether no request in flight advances."""
        return self.frozen or not self._samples

    def _has_work(self) -> bool:
        return not self._is_still() or bool(self._calls) or (bool(self._waiting) and not self.holding)

    def _receive(self, *, block: bool) -> None:
        """Run the actions that have arrived. With `block` wait for the first, and `gather_s` for more requests."""
        if block:
            self._inbox.get()()
            while self._waiting or not self._inbox.empty():
                try:
                    self._inbox.get(timeout=self._gather_s)()
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
        # Calls come first: requests that arrive after a call that drains must not delay it.
        while self._waiting and not self.holding and not self._calls:
            job = self._waiting[0]
            greedy = job.sampling.temperature == 0
            if self._seed_every_row and self._samples and greedy != self._greedy_batch:
                return
            self._greedy_batch = greedy
            self._waiting.popleft()
            try:
                self._start(job)
            except Exception as error:  # some samples of the job may have been added already
                self._abort(job)
                _reject(job.future, EngineError(f"vLLM does not take the request: {error}"))

    def _start(self, job: Job) -> None:
        sampling = job.sampling
        num_samples = sampling.num_samples
        seeds: list[int | None] = [None] * num_samples
        if sampling.seed is not None:
            seeds = list(sample_seeds(sampling.seed, num_samples))
        elif self._seed_every_row and sampling.temperature > 0:
            seeds = self._rng.integers(1 << 62, size=num_samples).tolist()
        adapter = self._adapters.get(sampling.adapter)
        shared = None
        for draft, seed in zip(job.drafts, seeds, strict=True):
            if draft.finish_reason is not None:  # the job was restarted, or another engine began it
                continue
            num_written = len(draft.token_ids)
            is_shared = seed is None and not num_written  # whole samples without a seed share these
            if is_shared and shared is not None:
                rest, params = shared
            else:
                rest = rest_of(sampling, num_written, seed)
                stops = [*self._end_token_ids, *sampling.stop_token_ids]
                params = sampler_params(rest, seed=rest.seed, stop_token_ids=stops)
            if is_shared:
                shared = rest, params
            request_id = str(next(self._numbers))
            job.request_ids.append(request_id)
            draft.go_on(self.policy_version)
            watch = StopWatch(rest, job.decode, draft.token_ids) if job.decode is not None else None
            self._samples[request_id] = Sample(job, draft, sum(map(len, draft.routes)), watch)
            # Samples share the list: see the patch `shared_hashes`.
            token_ids = job.prompt + draft.token_ids.tolist() if num_written else job.prompt
            self._core.add_request(core_request(request_id, token_ids, params, job.features, adapter))

    def _take_outputs(self, outputs: Any) -> None:
        samples = self._samples
        stopped = []
        if outputs.outputs:
            self.progress.advance()
        for output in outputs.outputs:
            sample = samples.get(output.request_id)
            if sample is None:  # aborted, but its step was already in flight
                continue
            draft = sample.draft
            if output.prefill_stats is not None and not draft.token_ids:
                draft.num_cached_tokens = output.prefill_stats.num_cached_tokens
            has_stopped = sample.add(output.new_token_ids)
            if output.routed_experts is not None:
                sample.add_routes(output.routed_experts)
            if (chosen := output.new_logprobs) is not None:
                # A list, by the patch `list_logprobs`; vLLM's own are arrays with a column per rank.
                draft.logprobs.fromlist(chosen if isinstance(chosen, list) else chosen.logprobs[:, 0].tolist())
            if has_stopped:
                del draft.logprobs[len(draft.token_ids) :]  # log-probs of tokens behind the text
            if has_stopped and output.finish_reason is None:
                stopped.append(output.request_id)
            if has_stopped or output.finish_reason is not None:
                del samples[output.request_id]
                self._finish(sample, FinishReason.STOP if has_stopped else str(output.finish_reason))
        if stopped:  # vLLM decodes no text, so it would go on with them
            self._core.abort_requests(stopped)

    def _finish(self, sample: Sample, reason: str) -> None:
        job = sample.job
        if reason not in tuple(FinishReason):
            self._abort(job)
            _reject(job.future, EngineError(f"vLLM ended a request for the reason {reason}"))
            return
        sample.draft.finish_reason = FinishReason(reason)
        if all(draft.finish_reason for draft in job.drafts) and not job.future.done():
            job.future.set_result([draft.completion(len(job.prompt)) for draft in job.drafts])

    def _abort(self, job: Job) -> None:
        if job in self._waiting:
            self._waiting.remove(job)
        request_ids = [request_id for request_id in job.request_ids if self._samples.pop(request_id, None) is not None]
        if request_ids:
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
