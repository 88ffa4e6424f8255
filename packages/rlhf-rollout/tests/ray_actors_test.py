"""Engines and scorers behind Ray: the driver's view and the trainer's client, on a fake engine and a tiny model."""

import asyncio
import os
import pickle
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import ray

from rlhf_data.errors import ConfigError, DataError, EngineError, RewardError
from rlhf_data.records import FinishReason, Prompt, Rollout, Span, SpanSource, VerdictKind
from rlhf_models.testing import tiny_reward_model_dir
from rlhf_rollout.engines import EngineSpec
from rlhf_rollout.protocols import SamplingParams
from rlhf_rollout.ray_actors import (
    RayEngine,
    RayScorer,
    RemoteEngine,
    RewardModelActor,
    own_gpus,
    plain_errors,
)
from rlhf_rollout.rewards.model import LocalScorer, ModelReward

PROMPT = np.array([4, 5, 6], np.int32)


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    for attempt in range(3):
        try:
            ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, configure_logging=False)
            break
        except Exception:  # Ray gives its node 30 s to start, which a busy machine may not manage
            ray.shutdown()
            if attempt == 2:
                raise
    yield
    ray.shutdown()


async def until_it_raises(call: Callable[[], Awaitable[Any]]) -> None:
    """Repeat a call: a process that was killed may still answer for a moment."""
    async with asyncio.timeout(60):
        while True:
            await call()


def start_engine() -> Any:
    return RemoteEngine.options(num_cpus=0).remote("fake", EngineSpec(model="none"))


def test_temporary_files_go_with_the_session_and_compiled_code_stays(cluster: None, tmp_path: Path) -> None:
    from torch._inductor.runtime.cache_dir_utils import default_cache_dir

    def folders() -> dict[str, str]:
        """Prepare this worker as those of a run; return where it keeps temporary files and what torch compiles."""
        import tempfile

        from rlhf_rollout.ray_actors import prepare_process

        prepare_process()
        from torch._inductor.runtime.cache_dir_utils import cache_dir

        return {"temporary": tempfile.gettempdir(), "compiled": cache_dir()}

    def look(**environ: str) -> dict[str, str]:
        return ray.get(ray.remote(folders).options(num_cpus=0, runtime_env={"env_vars": environ}).remote())

    session = ray._private.worker._global_node.get_session_dir_path()
    found = look()
    assert found["temporary"] == session
    assert found["compiled"] == default_cache_dir()  # of this process, which is not prepared
    mine = str(tmp_path / "mine")
    assert look(TORCHINDUCTOR_CACHE_DIR=mine)["compiled"] == mine


@pytest.fixture(scope="module")
def handle(cluster: None) -> Iterator[Any]:
    """One engine for all tests that leave it running: a process takes longer to start than such a test."""
    handle = start_engine()
    yield handle
    ray.kill(handle)


def run(coroutine: Any) -> Any:
    return asyncio.run(asyncio.wait_for(coroutine, 180))


def test_ray_engine_errors_arrive_as_themselves(handle: Any) -> None:
    with pytest.raises(EngineError, match="outside the model's vocabulary") as caught:
        run(RayEngine(handle).generate(np.array([900], np.int32), SamplingParams()))
    assert type(caught.value) is EngineError


def test_killed_engine_raises_instead_of_hanging(cluster: None) -> None:
    handle = start_engine()
    engine = RayEngine(handle)
    ray.get(handle.ready.remote())
    ray.kill(handle)
    with pytest.raises(EngineError, match="the engine's process is gone"):
        run(until_it_raises(lambda: engine.generate(PROMPT, SamplingParams())))
    with pytest.raises(EngineError, match="the engine's process is gone"):
        run(engine.begin_weight_update(1))


def test_ray_engine_restarts_in_a_new_process_and_only_where_it_was_started(cluster: None) -> None:
    engine = RayEngine(start_engine(), start=start_engine)
    copy = pickle.loads(pickle.dumps(engine))
    run(engine.ready())
    run(engine.begin_weight_update(3))
    run(engine.finish_weight_update())
    engine.restart()
    run(engine.ready())
    assert run(engine.health()).policy_version == 0  # a new process has the weights of its model
    assert len(run(engine.generate(PROMPT, SamplingParams()))) == 1
    with pytest.raises(EngineError, match="the engine's process is gone"):
        run(copy.health())
    with pytest.raises(EngineError, match="did not start the engine"):
        copy.restart()
    ray.kill(engine.handle)


def test_engine_that_is_hung_in_its_start_misses_the_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray, "cancel", lambda reference: None)
    handle = HungHandle()
    handle.ready = handle
    with pytest.raises(EngineError, match="the start of an engine's process took longer"):
        run(RayEngine(handle, EngineSpec(model="x", start_timeout_s=0.05)).ready())


@pytest.mark.parametrize("leave", ["cancel", "deadline"])
def test_ray_engine_call_that_its_caller_leaves_is_given_up_in_the_actor(handle: Any, leave: str) -> None:
    engine = RayEngine(handle)

    async def scenario() -> None:
        await engine.begin_weight_update(4)
        task = asyncio.create_task(
            engine.generate(PROMPT, SamplingParams(), timeout_s=1.0 if leave == "deadline" else None)
        )
        while (await engine.health()).num_in_flight == 0 and not task.done():
            await asyncio.sleep(0.05)
        if leave == "cancel":
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        else:
            with pytest.raises(EngineError, match=r"process took longer than 1 s without [a-z ]+\s+hint: "):
                await task
        # The update still holds requests back: only one that was given up is not in flight.
        while (await engine.health()).num_in_flight:
            await asyncio.sleep(0.05)
        await engine.finish_weight_update()

    run(scenario())


def test_control_calls_do_not_wait_behind_requests(handle: Any) -> None:
    # More requests than the actor runs at once, all of them held by a pause: the rest queues in the actor.
    engine = RayEngine(handle)

    async def scenario() -> int:
        await engine.pause("drain")
        tasks = [asyncio.create_task(engine.generate(PROMPT, SamplingParams(max_tokens=2))) for _ in range(1100)]
        while (await engine.health()).num_in_flight < 1000:
            await asyncio.sleep(0.1)
        await engine.health()  # would wait for ever behind requests, which go on only after `resume`
        await engine.pause("keep")
        assert not any(task.done() for task in tasks)
        await engine.begin_weight_update(6)
        await engine.finish_weight_update()
        await engine.resume()
        return len(await asyncio.gather(*tasks))

    assert run(scenario()) == 1100


class HungHandle:
    """An actor that never answers."""

    def __init__(self) -> None:
        self.call = self

    def remote(self, *arguments: Any) -> Any:
        return asyncio.get_running_loop().create_future()


@pytest.mark.parametrize("method", ["pause", "resume", "health", "sleep", "wake_up", "begin_weight_update"])
def test_ray_engine_control_call_that_hangs_ends_at_its_deadline(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    cancelled: list[Any] = []
    monkeypatch.setattr(ray, "cancel", cancelled.append)

    spec = EngineSpec(model="x", request_timeout_s=0.05, control_timeout_s=0.05, health_timeout_s=0.05)
    arguments = {"pause": ["drain"], "begin_weight_update": [1]}.get(method, [])

    async def scenario() -> None:
        await getattr(RayEngine(HungHandle(), spec), method)(*arguments)

    with pytest.raises(EngineError, match=r"process took longer than 0\.\d+ s[ a-z]*\s+hint: the engine hangs"):
        run(scenario())
    assert len(cancelled) == 1


def test_engine_that_does_not_start_tells_why(cluster: None, tmp_path: Path) -> None:
    spec = EngineSpec(model=str(tmp_path / "none"))
    handle = RemoteEngine.options(num_cpus=0).remote("transformers", spec)
    engine = RayEngine(handle)
    with pytest.raises(ConfigError, match=r"^there is no model folder"), plain_errors(EngineError):
        ray.get(handle.ready.remote())
    with pytest.raises(ConfigError, match=r"^there is no model folder"):
        run(engine.generate(PROMPT, SamplingParams()))


def test_ray_scorer_gives_the_scores_of_its_model_and_its_errors(cluster: None, tmp_path: Path) -> None:
    folder = str(tiny_reward_model_dir(tmp_path, mean=1.0, std=2.0))
    sequences = [np.arange(3, 9, dtype=np.int32), np.array([7], np.int32)]
    handle = ray.remote(RewardModelActor).options(num_cpus=0).remote(folder, normalize=True)
    scorer = RayScorer(handle)
    assert ray.get(handle.ready.remote()) > 0
    assert ray.get(handle.has_moments.remote())
    assert run(scorer.score(sequences)) == run(LocalScorer(folder, normalize=True).score(sequences))
    with pytest.raises(DataError, match="got the token id 512"):
        run(scorer.score([np.array([512], np.int32)]))
    ray.kill(handle)
    with pytest.raises(RewardError, match="the reward model's process is gone"):
        run(until_it_raises(lambda: scorer.score(sequences)))


def test_hung_reward_model_process_is_a_timeout_and_its_call_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    cancelled: list[Any] = []
    monkeypatch.setattr(ray, "cancel", cancelled.append)
    killed: list[Any] = []
    monkeypatch.setattr(ray, "kill", lambda handle, **options: killed.append(options))
    spans = (Span(SpanSource.PROMPT, [5]), Span(SpanSource.POLICY, [6], [-1.0], 0))
    rollouts = [Rollout(f"r{index}", "g", spans, FinishReason.STOP) for index in range(2)]
    reward = ModelReward([RayScorer(HungHandle())], timeout_s=0.05)
    verdicts = run(reward.score(Prompt("p", [5], "five"), rollouts))
    assert [verdict.kind for verdict in verdicts] == [VerdictKind.TIMEOUT] * 2
    assert len(cancelled) == 1 and not killed
    # The second call in a row without an answer: the process is killed, and Ray may restart it.
    run(reward.score(Prompt("p", [5], "five"), rollouts))
    assert (len(cancelled), killed) == (2, [{"no_restart": False}])


class FragileScorer:
    """A reward model's process that ends when it is told to."""

    async def call(self, method: str, token_ids: list[Any]) -> list[float]:
        if not token_ids:
            os._exit(1)
        return [float(len(ids)) for ids in token_ids]


def test_ray_scorer_survives_more_deaths_than_its_actor_has_restarts_if_it_answers_between_them(cluster: None) -> None:
    starts = []

    def start() -> Any:
        actor = ray.remote(max_restarts=0 if starts else 1, max_task_retries=0)(FragileScorer)
        starts.append(actor.options(num_cpus=0).remote())
        return starts[-1]

    scorer = RayScorer(start(), start)

    async def answers() -> list[float]:
        while True:  # one call may fail before another actor takes the place
            try:
                return await scorer.score([np.zeros(7, np.int32)])
            except RewardError:
                await asyncio.sleep(0.05)

    for _ in range(3):
        assert run(answers()) == [7.0]
        with pytest.raises(RewardError, match="the reward model's process is gone"):
            run(scorer.score([]))
    assert run(answers()) == [7.0]
    assert len(starts) == 3
    ray.kill(scorer.handle)


def test_ray_scorer_that_never_answered_is_not_started_again(cluster: None) -> None:
    actor = ray.remote(max_restarts=0)(FragileScorer).options(num_cpus=0)
    replacements = [actor.remote()]  # a second one would be an IndexError
    scorer = RayScorer(actor.remote(), replacements.pop)
    assert run(scorer.score([np.zeros(7, np.int32)])) == [7.0]
    for _ in range(3):
        with pytest.raises(RewardError, match="the reward model's process is gone"):
            run(scorer.score([]))
    assert not replacements


@pytest.mark.parametrize(
    ("assigned", "expected"),
    [(["10", "2", "3"], ["2", "3", "10"]), (["GPU-b", "GPU-a"], ["GPU-a", "GPU-b"]), ([], [])],
)
def test_gpus_that_ray_assigned_in_no_order_have_one(monkeypatch, assigned, expected):
    context = SimpleNamespace(get_accelerator_ids=lambda: {"GPU": assigned})
    monkeypatch.setattr(ray, "get_runtime_context", lambda: context)
    assert own_gpus() == expected
