"""How long a driver waits for an engine in a process of Ray: as long as it writes. By a simulated clock."""

import asyncio
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import ray

from rlhf_data.errors import EngineError
from rlhf_rollout.engines import EngineSpec
from rlhf_rollout.engines.remote_engine import Report
from rlhf_rollout.protocols import Draft, SamplingParams
from rlhf_rollout.ray_actors import RayEngine
from simulated import now, simulated

PROMPT = np.array([4, 5, 6], np.int32)


class WritingActor:
    """Stands for an `EngineActor`: calls last 100 s, and each report has `num_new` more tokens."""

    def __init__(self, num_new: int) -> None:
        self.generate = self.call = SimpleNamespace(remote=lambda *_: asyncio.sleep(100, ["done"]))
        self.written = SimpleNamespace(remote=self.report)
        self.num_new = num_new

    async def report(self, counts: Any, known: Any) -> Any:
        report = Report()
        for _ in counts:
            report.add(Draft([7] * self.num_new, [-1.0] * self.num_new, [(0, 0)]))
        return report


@pytest.mark.parametrize(
    ("num_new", "ends"),
    [
        (1, {"request": ("done", 100), "drains": ("done", 100), "call": ("EngineError", 2)}),
        (0, {"request": ("StalledError", 8), "drains": ("StalledError", 10), "call": ("EngineError", 2)}),
    ],
)
@simulated
async def test_ray_engine_waits_for_requests_as_long_as_they_get_further(monkeypatch, num_new, ends) -> None:
    monkeypatch.setattr(ray, "cancel", lambda reference: None)
    spec = EngineSpec(model="fake", request_timeout_s=8.0, control_timeout_s=2.0)

    async def end(call: Any) -> tuple[str, int]:
        try:
            await call
        except EngineError as error:
            return type(error).__name__, round(now())
        return "done", round(now())

    engine = RayEngine(WritingActor(num_new), spec)
    calls = {
        "request": engine.generate(PROMPT, SamplingParams(max_tokens=200)),
        "drains": engine.begin_weight_update(1),
        "call": engine.sleep(),
    }
    assert dict(zip(calls, await asyncio.gather(*map(end, calls.values())), strict=True)) == ends


@simulated
async def test_pause_puts_deadlines_off_until_the_engine_is_restarted(monkeypatch) -> None:
    for name in ("cancel", "kill"):
        monkeypatch.setattr(ray, name, lambda reference: None)
    actor = WritingActor(num_new=0)
    actor.call = SimpleNamespace(remote=lambda *_: asyncio.sleep(0, 0))
    spec = EngineSpec(model="fake", request_timeout_s=8.0)
    engine = RayEngine(actor, spec, start=lambda: WritingActor(num_new=0))
    await engine.pause("keep")
    assert await engine.generate(PROMPT, SamplingParams(max_tokens=200)) == ["done"]
    engine.restart()
    with pytest.raises(EngineError, match="a request"):
        await engine.generate(PROMPT, SamplingParams(max_tokens=200))
