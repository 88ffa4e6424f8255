"""A run goes on after an update that one engine failed, and the engine gets the newest weights; misfits end the run."""

import asyncio
import contextlib
import dataclasses
import errno

import numpy as np
import pytest
import torch

from rlhf_data.errors import EngineError, WeightSyncError
from rlhf_rollout.engines.fake import FakeEngine
from rlhf_rollout.protocols import SamplingParams
from rlhf_rollout.router import EngineRouter
from rlhf_rollout.supervisor import EngineSupervisor
from rlhf_rollout.weights.source import WeightSource
from weight_recorder import crc

SAMPLING = SamplingParams(max_tokens=4)
BROKEN = 1  # number of the engine that fails


def descriptor_is_missing(monkeypatch, bucket):
    def full(*_):
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(np, "memmap", full)
    return bucket


def bytes_are_wrong(monkeypatch, bucket):
    return dataclasses.replace(bucket, checksum=bucket.checksum ^ 1)


def descriptor_is_missing_once(monkeypatch, bucket):
    outcomes = iter([OSError(errno.EMFILE, "Too many open files")])
    read = np.memmap

    def open_(*arguments):
        for error in outcomes:
            raise error
        return read(*arguments)

    monkeypatch.setattr(np, "memmap", open_)
    return bucket


@pytest.fixture(autouse=True)
def no_pause(monkeypatch):
    monkeypatch.setattr("rlhf_rollout.weights.bucket._PAUSE_S", 0.0)


class Engine(FakeEngine):
    """An engine in a process of its own, as far as the supervisor sees; `fault` is what befalls its next update."""

    def __init__(self):
        super().__init__()
        self.fault = None
        self.num_restarts = 0

    def kill(self):
        pass

    def restart(self):
        num_restarts = self.num_restarts + 1
        self.__init__()
        self.num_restarts = num_restarts

    async def ready(self):
        pass

    def _fail(self, at):
        if self.fault is not None and self.fault[0] == at:
            raise self.fault[1]

    async def begin_weight_update(self, policy_version):
        self._fail("begin")
        await super().begin_weight_update(policy_version)

    async def receive_weights(self, bucket):
        self._fail("receive")
        with pytest.MonkeyPatch.context() as patch:
            if self.fault is not None and self.fault[0] == "change":
                bucket = self.fault[1](patch, bucket)
            await super().receive_weights(bucket)

    async def finish_weight_update(self):
        self._fail("finish")
        await super().finish_weight_update()


def weights_of(version):
    return {"embed": torch.full((32, 3), float(version)), "head": torch.arange(64) + version}


async def run_with(fault, num_steps=4):
    """Run steps of answers and updates; `fault` befalls the second update of one engine of three."""
    engines = [Engine() for _ in range(3)]
    router = EngineRouter()
    said = []
    source = WeightSource("shared_memory", bucket_bytes=512, checksum=True)
    version = 0

    async def send(targets):
        numbers = list(targets)
        # The source runs the engines' calls in an event loop of its own.
        sent = asyncio.to_thread(source.send, iter(weights_of(version).items()), list(targets.values()), version)
        return {numbers[index]: reason for index, reason in (await sent).failures.items()}

    supervisor = EngineSupervisor(engines, router, send, said.append, interval_s=0.05)
    versions = []
    for version in range(1, num_steps + 1):
        if version == 2:
            engines[BROKEN].fault = fault
        await supervisor.synchronize(version)
        watching = asyncio.create_task(supervisor.watch())
        try:
            for _ in range(500):
                if set(map(str, supervisor.states)) == {"ready"}:
                    break
                await asyncio.sleep(0.01)
            answers = await asyncio.gather(*[router.generate(np.array([5]), SAMPLING) for _ in range(12)])
        finally:
            watching.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await watching
        versions.append({completion.policy_version for [completion] in answers})
        for engine in engines:
            assert engine.weight_checksums == {name: crc(tensor) for name, tensor in weights_of(version).items()}
    return versions, engines, said


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        (("begin", EngineError("the network failed")), "the network failed"),
        (("receive", EngineError("node 7 cannot read weights: timed out")), "timed out"),
        (("receive", RuntimeError("the process has no memory")), "RuntimeError: the process has no memory"),
        (("finish", EngineError("vLLM could not put the new weights in force")), "in force"),
        (("change", descriptor_is_missing), "Too many open files"),
        (("change", bytes_are_wrong), "has checksum"),
    ],
    ids=["begin", "receive", "no RlhfError", "finish", "no descriptor", "checksum"],
)
def test_run_goes_on_after_an_update_that_did_not_reach_one_engine(fault, reason):
    versions, engines, said = asyncio.run(run_with(fault))
    assert versions == [{1}, {2}, {3}, {4}]
    assert [engine.num_restarts for engine in engines] == [0, 1, 0]
    assert [engine.policy_version for engine in engines] == [4, 4, 4]
    failed, back = said
    assert f"engine {BROKEN} failed: " in failed and reason in failed and "restarted (1 of 3)" in failed
    assert back == f"engine {BROKEN} is back, with weights of version 2"


def test_engine_goes_on_after_weights_that_arrive_at_the_second_try():
    versions, engines, said = asyncio.run(run_with(("change", descriptor_is_missing_once)))
    assert versions == [{1}, {2}, {3}, {4}]
    assert [engine.num_restarts for engine in engines] == [0, 0, 0]
    assert [engine.policy_version for engine in engines] == [4, 4, 4]
    assert said == []


def test_run_ends_when_weights_do_not_fit():
    with pytest.raises(WeightSyncError, match="another shape"):
        asyncio.run(run_with(("receive", WeightSyncError("a weight has another shape"))))
