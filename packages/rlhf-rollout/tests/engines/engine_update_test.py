"""Weight updates and pauses of every engine that runs here: what waits, what fails, and which version drew a token."""

import asyncio
import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engine_testing import MAX_MODEL_LEN, PROMPT, Subject, generate, run, update
from rlhf_data.errors import EngineError, WeightSyncError
from rlhf_rollout.commands.serve import create_app
from rlhf_rollout.engines import EngineSpec, build_engine
from rlhf_rollout.engines.fake import FakeEngine
from rlhf_rollout.protocols import EngineHealth, RolloutEngine, SamplingParams
from rollout_testing import app_server, shared_memory_bucket
from simulated import simulate


def test_weight_update_same_weights_give_the_same_tokens(subject: Subject) -> None:
    before = generate(subject, num_samples=2, max_tokens=16, seed=9)
    run(update(subject, 42))
    after = generate(subject, num_samples=2, max_tokens=16, seed=9)
    for first, second in zip(before, after, strict=True):
        np.testing.assert_array_equal(first.token_ids, second.token_ids)
        np.testing.assert_array_equal(first.logprobs, second.logprobs)


def test_weight_update_not_begun_raises(subject: Subject) -> None:
    with pytest.raises(WeightSyncError, match="no weight update has begun"):
        run(subject.engine.finish_weight_update())


def test_weight_update_begun_twice_starts_over(subject: Subject) -> None:
    async def scenario() -> None:
        await subject.engine.begin_weight_update(44)
        with shared_memory_bucket(dict(list(subject.weights.items())[:1])) as bucket:
            await subject.engine.receive_weights(bucket)
        await update(subject, 45)

    run(scenario())
    assert generate(subject, max_tokens=2)[0].policy_version == 45


def test_weight_update_wrong_checksum_raises(subject: Subject) -> None:
    async def scenario() -> None:
        await subject.engine.begin_weight_update(46)
        with shared_memory_bucket(subject.weights, checksum=True) as bucket:
            await subject.engine.receive_weights(dataclasses.replace(bucket, checksum=(bucket.checksum or 0) ^ 1))

    with pytest.raises(EngineError, match="checksum"):
        run(scenario())
    run(update(subject, 47))


def _without_last(weights: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    return dict(list(weights.items())[:-1])


def _with_extra(weights: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    return weights | {"model.extra.weight": np.zeros(3, np.float32)}


def _with_wrong_shape(weights: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    name = "model.layers.1.mlp.up_proj.weight"
    return weights | {name: weights[name][1:]}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_without_last, "1 did not arrive"),
        (_with_extra, "has no weight 'model.extra.weight'"),
        (_with_wrong_shape, r"up_proj.weight' arrived with shape \(127, 64\); the engine's model has \(128, 64\)"),
    ],
    ids=["missing", "extra", "shape"],
)
def test_weight_update_of_another_model_raises_and_a_good_one_heals(
    subject: Subject, change: Any, message: str
) -> None:
    if not subject.has_model:
        pytest.skip("the fake engine has no model to compare with")
    expected = generate(subject, max_tokens=8, temperature=0.0)[0]
    with pytest.raises(WeightSyncError, match=message):
        run(update(subject, 50, change(dict(subject.weights))))
    with pytest.raises(EngineError, match=r"weights are incomplete(.|\n)*hint: send a complete weight update"):
        generate(subject, max_tokens=2)
    run(update(subject, 51))
    healed = generate(subject, max_tokens=8, temperature=0.0)[0]
    np.testing.assert_array_equal(healed.token_ids, expected.token_ids)
    assert healed.policy_version == 51


def paced(subject: Subject) -> Subject:
    """The subject, or in place of the fake engine, which answers at once, one that takes its time for each token."""
    if subject.kind != "fake":
        return subject
    return dataclasses.replace(
        subject, engine=FakeEngine(EngineSpec(model="", max_model_len=MAX_MODEL_LEN), token_latency_s=0.005)
    )


async def paused_amid(engine: RolloutEngine, mode: Any, sampling: SamplingParams) -> tuple[asyncio.Task[Any], int]:
    """Pause while a request is written. Return its task, and how many sequences the pause has found."""
    while True:
        task = asyncio.create_task(engine.generate(PROMPT, sampling))
        # A request counts as in flight before it is decoded, and one that is not decoded yet waits for `resume`.
        await asyncio.sleep(0.05)
        if num_found := await engine.pause(mode):
            return task, num_found
        await engine.resume()  # on a busy machine, the request may not have come, or may have ended
        await task


def test_pause_by_drain_finishes_what_runs_and_holds_newcomers_until_resume(subject: Subject) -> None:
    subject = paced(subject)

    async def scenario() -> None:
        length = MAX_MODEL_LEN - len(PROMPT)
        whole = SamplingParams(max_tokens=length, min_tokens=length)
        running, num_found = await paused_amid(subject.engine, "drain", whole)
        assert num_found == 1
        health = await subject.engine.health()
        assert (health.num_in_flight, health.is_paused) == (0, True)
        assert len((await asyncio.wait_for(running, 60))[0].token_ids) == length
        waiting = asyncio.create_task(subject.engine.generate(PROMPT, SamplingParams(max_tokens=2)))
        while (await subject.engine.health()).num_in_flight != 1:
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.1)
        assert not waiting.done()
        await subject.engine.resume()
        await waiting
        assert not (await subject.engine.health()).is_paused

    run(scenario())


def test_pause_lasts_through_a_weight_update_until_resume(subject: Subject) -> None:
    async def scenario() -> Any:
        await subject.engine.pause("drain")
        task = asyncio.create_task(subject.engine.generate(PROMPT, SamplingParams(max_tokens=2)))
        await update(subject, 70)
        await asyncio.sleep(0.1)
        assert not task.done()
        await subject.engine.begin_weight_update(71)
        await subject.engine.resume()  # the update that has begun still holds requests back
        await asyncio.sleep(0.1)
        assert not task.done()
        with shared_memory_bucket(subject.weights) as bucket:
            await subject.engine.receive_weights(bucket)
        await subject.engine.finish_weight_update()
        return await task

    assert run(scenario())[0].policy_version == 71


def test_pause_by_a_mode_that_there_is_not_raises(subject: Subject) -> None:
    with pytest.raises(EngineError, match=r"unknown pause mode `drian`(.|\n)*hint: did you mean `drain`"):
        run(subject.engine.pause("drian"))
    if subject.kind == "process":
        for mode in ("keep", "restart"):
            with pytest.raises(EngineError, match=rf"cannot pause with mode {mode}\s+hint: use one of: drain"):
                run(subject.engine.pause(mode))
    assert not run(subject.engine.health()).is_paused


@pytest.mark.parametrize("mode", ["keep", "restart"])
def test_pause_request_that_lives_through_an_update(subject: Subject, mode: Any) -> None:
    if subject.kind == "process":
        pytest.skip("it drains only")
    subject = paced(subject)
    engine = subject.engine

    async def scenario() -> Any:
        await update(subject, 80)
        # Sixty tokens, with a pause after some of them.
        sampling = SamplingParams(num_samples=2, max_tokens=60, min_tokens=60, seed=4)
        task, num_found = await paused_amid(engine, mode, sampling)
        assert num_found == 2
        assert not task.done()
        await update(subject, 81)
        await asyncio.sleep(0.05)
        assert not task.done()
        # A `resume` amid an update takes effect at its end: until then no weights are complete.
        await engine.begin_weight_update(82)
        await engine.resume()
        await asyncio.sleep(0.05)
        assert not task.done()
        with shared_memory_bucket(subject.weights) as bucket:
            await engine.receive_weights(bucket)
        await engine.finish_weight_update()
        return await task

    expected = [80, 82]
    for _ in range(10):
        completions = run(scenario())
        assert [len(part) for one in completions for part in (one.token_ids, one.logprobs)] == [60] * 4
        versions = [[span.policy_version for span in completion.spans] for completion in completions]
        assert all(found in (expected, [82]) for found in versions)
        if versions == [expected] * 2:
            break
    else:
        pytest.fail("each pause came before the first token, which only a busy machine explains")
    run(update(subject, 83))


def test_weight_update_that_fails_lets_no_request_wait_for_ever(subject: Subject) -> None:
    async def scenario() -> None:
        await subject.engine.begin_weight_update(90)
        task = asyncio.create_task(subject.engine.generate(PROMPT, SamplingParams(max_tokens=2)))
        await asyncio.sleep(0.05)
        weights = _with_extra(dict(subject.weights))
        with shared_memory_bucket(weights) as bucket, pytest.raises(WeightSyncError, match="has no weight"):
            await subject.engine.receive_weights(bucket)
        with pytest.raises(EngineError, match=r"weights are incomplete(.|\n)*hint: send a complete weight update"):
            await asyncio.wait_for(task, 60)

    if not subject.has_model:
        pytest.skip("the fake engine has no model to compare with")
    run(scenario())
    run(update(subject, 91))


def test_sleep_during_a_weight_update_is_refused_and_the_update_goes_on(subject: Subject) -> None:
    async def scenario() -> Any:
        await subject.engine.begin_weight_update(93)
        with pytest.raises(EngineError, match=r"cannot sleep during a weight update\s+hint: finish the update first"):
            await subject.engine.sleep()
        with shared_memory_bucket(subject.weights) as bucket:
            await subject.engine.receive_weights(bucket)
        await subject.engine.finish_weight_update()
        assert not (await subject.engine.health()).is_asleep
        return await subject.engine.generate(PROMPT, SamplingParams(max_tokens=2))

    assert run(scenario())[0].policy_version == 93


def test_engine_that_dropped_its_weights_refuses_requests_until_an_update(subject: Subject) -> None:
    if subject.kind == "served":
        pytest.skip("a server keeps its weights")

    async def scenario() -> Any:
        await subject.engine.sleep(keep_weights=False)
        await subject.engine.wake_up()
        refused = r"incomplete: they were dropped when it fell asleep\s+hint: send a complete weight update"
        with pytest.raises(EngineError, match=refused):
            await subject.engine.generate(PROMPT, SamplingParams(max_tokens=2))
        await update(subject, 94)
        return await subject.engine.generate(PROMPT, SamplingParams(max_tokens=2))

    assert run(scenario())[0].policy_version == 94


def test_health_tells_the_version_and_the_sleep(subject: Subject) -> None:
    run(update(subject, 92))
    assert run(subject.engine.health()) == EngineHealth(
        policy_version=92, num_in_flight=0, is_paused=False, is_asleep=False
    )
    run(subject.engine.sleep())
    assert run(subject.engine.health()).is_asleep
    run(subject.engine.wake_up())
    assert not run(subject.engine.health()).is_asleep


def test_weight_update_given_up_while_it_drains_lets_requests_through() -> None:
    engine = FakeEngine(latency_s=0.5)

    async def scenario() -> Any:
        running = asyncio.create_task(engine.generate(PROMPT, SamplingParams(max_tokens=2)))
        await asyncio.sleep(0.01)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(engine.begin_weight_update(9), 0.05)
        with pytest.raises(WeightSyncError, match="no weight update has begun"):
            await engine.finish_weight_update()
        return await asyncio.gather(running, engine.generate(PROMPT, SamplingParams(max_tokens=2)))

    assert [completions[0].policy_version for completions in simulate(scenario())] == [0, 0]


@pytest.mark.parametrize("is_updating", [False, True])
def test_pause_given_up_while_it_drains_holds_no_request_back(is_updating: bool) -> None:
    engine = FakeEngine(latency_s=0.5)

    async def scenario() -> Any:
        running = asyncio.create_task(engine.generate(PROMPT, SamplingParams(max_tokens=2)))
        await asyncio.sleep(0.01)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(engine.pause("drain"), 0.05)
        if is_updating:  # whose end lets requests through
            await engine.begin_weight_update(5)
            await engine.finish_weight_update()
        assert not (await engine.health()).is_paused
        return await asyncio.gather(running, engine.generate(PROMPT, SamplingParams(max_tokens=2), timeout_s=60))

    assert len(simulate(scenario())) == 2


def test_second_pause_given_up_leaves_the_first_one_in_force() -> None:
    engine = FakeEngine(token_latency_s=1.0)

    async def scenario() -> None:
        running = asyncio.create_task(engine.generate(PROMPT, SamplingParams(max_tokens=9, min_tokens=9)))
        await asyncio.sleep(2.5)
        assert await engine.pause("keep") == 1
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(engine.pause("drain"), 5)
        assert (await engine.health()).is_paused
        await engine.resume()
        assert len((await running)[0].token_ids) == 9

    simulate(scenario())


@pytest.mark.parametrize("other_mode", ["keep", "drain"])
def test_pause_given_up_leaves_one_that_came_meanwhile_in_force(other_mode: str) -> None:
    engine = FakeEngine(token_latency_s=1.0)

    async def scenario() -> None:
        running = asyncio.create_task(engine.generate(PROMPT, SamplingParams(max_tokens=9, min_tokens=9)))
        await asyncio.sleep(2.5)
        given_up = asyncio.create_task(asyncio.wait_for(engine.pause("drain"), 4))
        await asyncio.sleep(1)
        other = asyncio.create_task(engine.pause(other_mode))
        with pytest.raises(TimeoutError):
            await given_up
        await other
        assert (await engine.health()).is_paused
        later = asyncio.create_task(engine.generate(PROMPT, SamplingParams(max_tokens=1)))
        await asyncio.sleep(60)
        assert not later.done()
        await engine.resume()
        await asyncio.gather(running, later)

    simulate(scenario())


def test_fake_engine_closed_while_paused_fails_what_it_held() -> None:
    engine = FakeEngine(token_latency_s=0.005)

    async def scenario() -> None:
        running = asyncio.create_task(engine.generate(PROMPT, SamplingParams(max_tokens=60, min_tokens=60)))
        await asyncio.sleep(0.05)
        await engine.pause("keep")
        waiting = asyncio.create_task(engine.generate(PROMPT, SamplingParams(max_tokens=2)))
        await asyncio.sleep(0.01)
        await engine.close()
        for task in (running, waiting):
            with pytest.raises(EngineError, match="the engine was closed"):
                await asyncio.wait_for(task, 60)

    run(scenario())


def test_weights_of_a_model_take_effect_behind_a_server(model_dir: Path, tmp_path: Path) -> None:
    """The served model gets the weights of another one, and then answers as that one does where it was loaded."""
    from safetensors.numpy import load_file

    from rlhf_models.testing import tiny_model_dir

    other = tiny_model_dir(tmp_path / "other", seed=5, eos_token_id=None)
    weights = load_file(other / "model.safetensors")

    async def answers(engine: RolloutEngine) -> Any:
        [completion] = await engine.generate(PROMPT, SamplingParams(max_tokens=8, temperature=0.0))
        return completion.token_ids.tolist(), completion.logprobs.tolist()

    local = run(answers(build_engine("transformers", EngineSpec(model=str(other)))))
    served = build_engine("transformers", EngineSpec(model=str(model_dir)))
    with app_server(create_app(served, {})) as url:
        subject = Subject("served", build_engine("http", EngineSpec(model="m", base_url=url)), weights, 512)
        before = run(answers(subject.engine))
        run(update(subject, 1))
        assert run(answers(subject.engine)) == local != before
        with pytest.raises(WeightSyncError, match="1 did not arrive"):
            run(update(subject, 2, _without_last(dict(weights))))
        with pytest.raises(EngineError, match="weights are incomplete"):
            run(answers(subject.engine))


def test_close_refuses_further_requests(subject: Subject) -> None:
    """The last test of these engines."""
    run(subject.engine.close())
    with pytest.raises(EngineError, match="closed"):
        generate(subject)
    with pytest.raises(EngineError, match="closed"):
        run(subject.engine.health())
