"""The generating side as the controller sees it: blocking calls into the service that generates."""

import dataclasses
import itertools
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from datetime import datetime
from pathlib import Path
from typing import Any, Protocol

from rlhf_data.chat.template import template_clock
from rlhf_data.errors import EngineError
from rlhf_data.images.reader import open_image_reader
from rlhf_data.options.progress import duration
from rlhf_data.pretrained import set_chat_template
from rlhf_data.records import RolloutGroup
from rlhf_models.loading import load_tokenizer
from rlhf_rollout.agents import make_workflow
from rlhf_rollout.event_loop import EventLoopThread
from rlhf_rollout.generator import GroupResult
from rlhf_rollout.protocols import RewardFunction
from rlhf_rollout.router import EngineRouter
from rlhf_rollout.supervisor import EngineState, EngineSupervisor, RestartableEngine
from rlhf_train.generation.run_spec import GenerationSpec
from rlhf_train.generation.service import Drawn, GenerationService
from rlhf_train.generation.stream import SampleStream
from rlhf_train.run.observer import Observer
from rlhf_train.run.timeline import Timeline
from rlhf_train.tracing.trace import Trace, Track

# What the file of the timeline shows of an engine that gets no requests.
_STATES = {
    EngineState.STARTING: "starts",
    EngineState.SYNCING: "waits for weights",
    EngineState.SUSPECT: "waits for a health check",
    EngineState.DEAD: "waits for its restart",
    EngineState.LOST: "is given up",
}


class WeightSender(Protocol):
    """Has the trainers' weights."""

    async def send_weights(self, engines: Mapping[int, RestartableEngine]) -> Mapping[int, str]:
        """Send the current weights to engines by number; return why some of them failed."""

    async def weights_sent(self) -> None:
        """Wait until no call of `send_weights` is under way, not even one that was cancelled."""


class Rollouts:
    """Has prompts answered by the engines and scored by the reward, and hands out batches of rollout groups.

    Generation, rewards and the supervision of engines share an event loop on a thread of its own. With staleness
    allowed, they go on while the learner works. The methods block, so that the controller stays plain sequential code.

    Args:
        job: the run.
        engines: the generation engines, in the order of the plan.
        trainers: have the weights that the engines get.
        reward: scores the rollouts. `close` closes it.
        stream: admits prompts and holds complete groups.
        timeline: counts the seconds of generation, rewards and evaluation.
        observer: is warned about groups that failed.
        agent_log: file for what an agent prints; None for standard error.
        clock: the time that the chat template writes; None for now.
        settled: see `GenerationService`; called by the thread that waits for a batch.

    Raises:
        RewardError: the agent cannot be imported.
    """

    def __init__(
        self,
        job: GenerationSpec,
        engines: Sequence[RestartableEngine],
        trainers: WeightSender,
        reward: RewardFunction,
        stream: SampleStream,
        timeline: Timeline,
        observer: Observer,
        agent_log: Path | None = None,
        clock: datetime | None = None,
        settled: Callable[[str, RolloutGroup | None], None] | None = None,
    ) -> None:
        self._job = job
        self._reward = reward
        self._stream = stream
        self._timeline = timeline
        self._observer = observer
        self._trainers = trainers
        self._is_reward_idle = False  # the agent gives all rewards; warned of once
        self._updates: Counter[str] = Counter()  # those of the supervisor, up to the last batch
        self._evaluation: Future[list[GroupResult]] | None = None
        self._watching: Future[None] | None = None
        # One loop for the whole run: reward clients keep connections that belong to the loop they were opened in.
        self._loop = EventLoopThread("generation")
        router = EngineRouter()
        tokenizer_path = job.engine.tokenizer or job.engine.model
        tokenizer = load_tokenizer(tokenizer_path)
        set_chat_template(tokenizer, variables=job.agent and job.agent.chat_template_kwargs)
        template_clock(tokenizer, clock)
        self._workflow = make_workflow(
            job.agent,
            router,
            tokenizer,
            tokenizer_path=tokenizer_path,
            gives_reward=not job.reward.sources and not job.algorithm.uses_teacher,
            log_path=agent_log,
            reader=open_image_reader(job.engine.model) if job.agent and job.engine.images else None,
        )
        self._supervisor = EngineSupervisor(
            engines,
            router,
            trainers.send_weights,
            lambda text: self._loop.report(lambda: observer.warning(text)),
            at_update=job.asynchronous.at_update if job.asynchronous else "drain",
        )
        listeners = [] if settled is None else [lambda *of_group: self._loop.report(lambda: settled(*of_group))]
        self._trace = timeline.trace
        greedy = {"greedy_baseline": job.algorithm.row.baseline == "greedy"}
        self._service = GenerationService(job, self._workflow, reward, stream, self._progress, *listeners, **greedy)
        if self._trace.is_on:
            self._show_in(self._trace, engines, router)
        self._loop.run(self._workflow.start())

    def next_batch(self, step: int) -> Drawn:
        """Wait for the next batch, and return it with what else happened since the one before.

        Raises EngineError when every group failed, RewardError when the reward cannot run.
        """
        self._watch()
        with self._timeline.phase("generate"):
            drawn = self._run(self._service.next_batch())
            # Most rewards are computed while other groups still generate, so they cost no time of their own. Only the
            # seconds after the last generation are the reward's.
            self._timeline.move("generate", "reward", drawn.reward_wait_s)
        num_samples = self._job.sampling.num_samples
        if drawn.num_failed:
            num_failed = drawn.num_failed // num_samples
            text = f"step{step}: {num_failed} of {num_failed + len(drawn.groups)} rollout groups failed in an engine"
            self._observer.warning(f"{text}; the last: {drawn.failure}")
        if self._job.agent and self._job.reward.sources and not drawn.has_scored and not self._is_reward_idle:
            self._is_reward_idle = True
            self._observer.warning(
                "the agent gives rewards of its own, so the reward that the flags name has scored nothing"
                "; let the agent return none where that reward is to score"
            )
        for text in drawn.notices:
            self._observer.notice(text)
        self._rest()
        return dataclasses.replace(drawn, overlap={**drawn.overlap, **self._interrupted()}) if drawn.overlap else drawn

    def release(self, policy_version: int) -> None:
        """Record that the learner is done with the last batch, if it has one, and that the engines have its weights."""
        self._loop.call(lambda: self._service.release(policy_version))

    @property
    def num_outstanding(self) -> int:
        """Number of episodes that were in flight or waited for a later batch when the last batch was taken."""
        return self._loop.call(lambda: self._service.num_outstanding)

    def start_evaluation(self, step: int) -> None:
        """Have the held-out prompts answered beside everything else; see `finish_evaluation`."""
        self._watch()
        finished = itertools.count(1)
        total = len(self._job.eval_prompts)

        def settle(result: GroupResult) -> None:
            self._progress(next(finished), total)

        self._evaluation = self._loop.start(self._service.answer_held_out(step, settle))

    def finish_evaluation(self) -> list[RolloutGroup]:
        """Wait for the scored groups of the held-out prompts. Raises like `next_batch`."""
        assert self._evaluation is not None, "no evaluation was started"
        evaluation, self._evaluation = self._evaluation, None
        results = self._loop.wait(evaluation)
        self._rest()
        self._check()
        groups = [result.group for result in results if result.group is not None]
        if failures := [result for result in results if result.group is None]:
            text = f"{len(failures)} of {len(results)} rollout groups failed in an engine"
            prefix = failures[-1].group_id.partition("/")[0]
            self._observer.warning(f"{prefix}: {text}; the last: {failures[-1].failure}")
        if not groups:
            raise EngineError(f"every rollout group failed; the last: {failures[-1].failure}")
        return groups

    def pending(self) -> str:
        """Return what rollout groups in flight wait for, in words; "" without one. For `Watch`."""
        waiting = self._service.waiting
        if not waiting:
            return ""
        oldest, (what, since) = min(waiting.items(), key=lambda item: item[1][1])
        text = f"{len(waiting)} rollout groups in flight; the oldest, {oldest}, waits for {what}"
        return f"{text} since {duration(time.monotonic() - since)}; {self._workflow.router.describe()}"

    @property
    def policy_version(self) -> int | None:
        """Version of the weights that the engines have; None before the first weight sync."""
        return self._supervisor.policy_version

    def synchronize(self, policy_version: int) -> None:
        """Bring the engines to the trainers' weights, which have this version.

        Engines that are dead are restarted first if no other one lives. Raises EngineError when no engine can be used.
        """
        self._run(self._supervisor.synchronize(policy_version))

    def sleep(self) -> None:
        """Have all engines release their device memory, and with it their weights: `synchronize` comes next."""
        self._loop.run(self._supervisor.sleep())
        self._show_memory("asleep")

    def wake_up(self) -> None:
        """Have all engines take their device memory back."""
        self._loop.run(self._supervisor.wake_up())
        self._show_memory(None)

    def _show_memory(self, state: str | None) -> None:
        for number in range(len(self._supervisor.states)):
            self._trace.state(Track(f"engine {number}", "memory"), state)

    def state(self) -> dict[str, Any]:
        """Return the place in the order of prompts, and what is queued and in flight, for `restore`."""
        return self._loop.call(self._service.state)

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue with the prompts of another process.

        Raises CheckpointError for another number of prompts or another seed.
        """
        self._loop.call(lambda: self._service.restore(state))

    def close(self) -> None:
        """End generation, the agent, the reward and the event loop."""
        self._loop.run(self._service.close())
        self._loop.run(self._workflow.close())
        self._loop.run(self._reward.close())
        self._loop.close()

    def _show_in(self, trace: Trace, engines: Sequence[RestartableEngine], router: EngineRouter) -> None:
        """Have the file of the timeline show rollout groups, and what engines do and wait for."""
        self._service.show_in(trace)
        numbers = {id(engine): number for number, engine in enumerate(engines)}

        def load(engine: object, num_running: int) -> None:
            process = f"engine {numbers[id(engine)]}"
            trace.count(Track(process, "completions in flight"), num_running)
            trace.busy(Track(process, "requests"), "generates" if num_running else None)

        def state(number: int, found: EngineState) -> None:
            track = Track(f"engine {number}", "state")
            trace.state(track, None if found is EngineState.READY else _STATES[found])

        router.on_load = load
        self._supervisor.on_state = state
        for number, found in enumerate(self._supervisor.states):
            state(number, found)

    def _interrupted(self) -> dict[str, float]:
        """Return what updates of the weights did to responses since the last call, as shares of those of a step."""
        updates = self._supervisor.updates.copy()
        found = {name: updates[name] - self._updates[name] for name in ("drained", "kept", "restarted", "cut")}
        self._updates = updates
        return {f"async/{name}": count / self._job.batch.num_rollouts for name, count in found.items()}

    def _progress(self, done: int, total: int) -> None:
        self._loop.report(lambda: self._observer.progress(done, total))

    def _run(self, coroutine: Any) -> Any:
        """Run a coroutine that needs engines. Raises the error that ended the supervision of the engines."""
        try:
            return self._loop.run(coroutine)
        finally:
            self._check()

    def _check(self) -> None:
        if self._supervisor.error is not None:
            raise self._supervisor.error

    def _watch(self) -> None:
        """Supervise the engines from here on."""
        if self._watching is None:
            self._watching = self._loop.start(self._supervisor.watch())

    def _rest(self) -> None:
        """End the supervision of engines that have nothing to do, and may be put to sleep."""
        if self._job.max_staleness or self._evaluation is not None or self._watching is None:
            return
        watching, self._watching = self._watching, None
        watching.cancel()
        # An engine that gets weights at this moment could not fall asleep.
        self._loop.run(self._trainers.weights_sent())
