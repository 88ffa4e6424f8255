"""Hours in seconds: an event loop whose clock jumps to the next timer, and engines that die, hang and start again."""

import asyncio
import copy
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

import numpy as np

from rlhf_data.errors import EngineError
from rlhf_rollout.engines.fake import FakeEngine
from rlhf_rollout.engines.remote_engine import Report
from rlhf_rollout.protocols import Completion, Draft, EngineHealth, PauseMode, SamplingParams


class SimulatedLoop(asyncio.SelectorEventLoop):
    """An event loop whose clock starts at 0 and moves only while all tasks wait. Nothing may run on other threads."""

    def __init__(self) -> None:
        super().__init__()
        self._now_s = 0.0
        real_select = self._selector.select

        def select(timeout: float | None = None) -> Any:
            assert timeout is not None, "every task waits for something that never comes"
            self._now_s += max(timeout, 0.0)
            return real_select(0)

        self._selector.select = select

    def time(self) -> float:
        return self._now_s


def simulate(coroutine: Coroutine[Any, Any, Any]) -> Any:
    """Return the result of a coroutine that runs by a simulated clock."""
    with asyncio.Runner(loop_factory=SimulatedLoop) as runner:
        return runner.run(coroutine)


def simulated(test: Any) -> Any:
    """Have a test that is a coroutine function run by a simulated clock."""
    test.run_by = simulate
    return test


def now() -> float:
    """Return the time of the running loop, seconds."""
    return asyncio.get_running_loop().time()


class MortalEngine:
    """A fake engine as if in another process, for `EngineSupervisor`.

    Args:
        make: makes the engine, and another one at each restart.
        start_s: seconds that a restart takes.
        report_s: seconds after which what is in flight is reported, as by `RayEngine`; None for each token.

    Attributes:
        engine: the present one.
        hanging: names of methods that never answer.
        num_restarts: how often it was restarted.
        num_bad_starts: starts of a process that fail.
    """

    def __init__(
        self, make: Callable[[], FakeEngine] = FakeEngine, start_s: float = 5.0, report_s: float | None = None
    ) -> None:
        self._make = make
        self._report_s = report_s
        self._start_s = start_s
        self._death = asyncio.Event()
        self.engine = make()
        self.hanging: set[str] = set()
        self.num_restarts = 0
        self.num_bad_starts = 0

    def kill(self) -> None:
        """End the process: what is in flight fails at once."""
        self._death.set()

    def restart(self) -> None:
        self.kill()
        self._death = asyncio.Event()
        self.engine = self._make()
        self.hanging = set()
        self.num_restarts += 1

    async def ready(self) -> None:
        await asyncio.sleep(self._start_s)
        if self.num_bad_starts:
            self.num_bad_starts -= 1
            self.kill()
            raise EngineError("no memory")

    async def _call(self, method: str, *arguments: Any, **options: Any) -> Any:
        gone = self._death  # of this process: a restart makes another one
        death = asyncio.ensure_future(gone.wait())
        never = asyncio.get_running_loop().create_future()
        call = never if method in self.hanging else getattr(self.engine, method)(*arguments, **options)
        calling = asyncio.ensure_future(call)
        try:
            if not gone.is_set():
                await asyncio.wait([death, calling], return_when=asyncio.FIRST_COMPLETED)
            if gone.is_set():
                raise EngineError("the process is gone")
            return calling.result()
        finally:
            death.cancel()
            calling.cancel()
            await asyncio.wait([death, calling])

    async def generate(
        self,
        token_ids: np.ndarray,
        sampling: SamplingParams,
        *,
        timeout_s: float | None = None,
        drafts: Sequence[Draft] | None = None,
    ) -> list[Completion]:
        if self._report_s is None or drafts is None:
            return await self._call("generate", token_ids, sampling, timeout_s=timeout_s, drafts=drafts)
        written = copy.deepcopy(drafts)
        reporting = asyncio.create_task(self._report(written, drafts))
        try:
            return await self._call("generate", token_ids, sampling, timeout_s=timeout_s, drafts=written)
        finally:
            reporting.cancel()

    async def _report(self, written: Sequence[Draft], known: Sequence[Draft]) -> None:
        while True:
            await asyncio.sleep(self._report_s)
            report = Report()
            for there, here in zip(written, known, strict=True):
                report.add(there.after(len(here.token_ids), len(here.routes)))
            report.give_to(known)

    async def pause(self, mode: PauseMode) -> int:
        return await self._call("pause", mode)

    async def resume(self) -> None:
        await self._call("resume")

    async def health(self) -> EngineHealth:
        if "health" in self.hanging:
            await asyncio.sleep(30.0)
            raise EngineError("a health check took longer than 30 s")
        return await self._call("health")

    async def begin_weight_update(self, policy_version: int) -> None:
        await self._call("begin_weight_update", policy_version)

    async def finish_weight_update(self) -> None:
        await self._call("finish_weight_update")

    async def sleep(self, keep_weights: bool = True) -> None:
        await self._call("sleep", keep_weights)

    async def wake_up(self) -> None:
        await self._call("wake_up")
