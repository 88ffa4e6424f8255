"""A core of vLLM whose steps are scripted, and the stepping thread around it."""

import threading
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from rlhf_rollout.protocols import SamplingParams

if TYPE_CHECKING:
    from rlhf_rollout.engines.vllm.loop import Job, StepLoop


class ScriptedCore:
    """Gives every request the tokens 1, 2, 3 ... and ends it at max_tokens; `allowed` permits steps one by one.

    A step gives each request `num_tokens` of them, or those that are left.
    """

    def __init__(self) -> None:
        from vllm.v1.engine import FinishReason

        self.allowed = threading.Semaphore(0)
        self.entered = threading.Semaphore(0)
        self.num_tokens = 1
        self.running: dict[str, tuple[Any, int]] = {}
        self.added: list[Any] = []
        self.aborted: list[str] = []
        self.batches: list[list[str]] = []
        self.failure: Exception | None = None
        self.refusal: Exception | None = None
        self.down = False
        self.shutdown_s = 0.0
        self.paused: tuple[str, bool] | None = None
        self.finished_early: set[str] = set()
        self.routes: Callable[[Any, int], np.ndarray | None] = lambda request, token: None
        self.end_reason = FinishReason.LENGTH
        self.engine_core = SimpleNamespace(
            batch_queue=None,
            scheduler=SimpleNamespace(has_requests=lambda: bool(self.running)),
            pause_scheduler=lambda mode, clear_cache: setattr(self, "paused", (mode, clear_cache)),
            resume_scheduler=lambda: setattr(self, "paused", None),
        )

    def add_request(self, request: Any) -> None:
        if self.refusal is not None:
            raise self.refusal
        self.added.append(request)
        self.running[request.request_id] = (request, 0)

    def abort_requests(self, request_ids: list[str]) -> None:
        self.aborted += request_ids
        for request_id in request_ids:
            self.running.pop(request_id, None)

    def get_output(self) -> Any:
        self.entered.release()
        self.allowed.acquire()
        if self.failure is not None:
            raise self.failure
        self.batches.append(sorted(self.running))
        outputs = []
        for request_id, (request, step) in list(self.running.items()):
            token = min(step + self.num_tokens, request.sampling_params.max_tokens)
            new = list(range(step + 1, token + 1))
            done = token == request.sampling_params.max_tokens or request_id in self.finished_early
            self.running[request_id] = (request, token)
            if done:
                del self.running[request_id]
            outputs.append(
                SimpleNamespace(
                    request_id=request_id,
                    new_token_ids=new,
                    new_logprobs=[-0.5 * each for each in new],
                    routed_experts=self.routes(request, token),
                    finish_reason=self.end_reason if done else None,
                    prefill_stats=SimpleNamespace(num_cached_tokens=token) if step == 0 else None,
                )
            )
        return SimpleNamespace(outputs=outputs)

    def shutdown(self) -> None:
        time.sleep(self.shutdown_s)
        self.down = True


@pytest.fixture
def core() -> ScriptedCore:
    return ScriptedCore()


@pytest.fixture
def loop(core: ScriptedCore) -> Iterator["StepLoop"]:
    from rlhf_rollout.engines.vllm.loop import StepLoop

    loop = StepLoop(lambda: core, end_token_ids=(99,), seed=0, seed_every_row=True)
    yield loop
    for _ in range(100):
        core.allowed.release()
    loop.close()


def submit(loop: "StepLoop", **sampling: Any) -> "Job":
    return loop.submit([5, 6], SamplingParams(**sampling))


def barrier(loop: "StepLoop") -> None:
    """Return once the thread has taken in what was sent before; requests among it may still wait to be started."""
    loop.call(lambda core: None, drain=False).result(60)


def wait_for_step(core: ScriptedCore) -> None:
    """Return once another step has begun, with every request started that was sent before it."""
    assert core.entered.acquire(timeout=60)
