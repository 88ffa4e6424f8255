"""A whole run in which generation goes on while the learner works: order of events, evaluations, and resuming."""

import asyncio
import threading
from pathlib import Path

import pytest

from online_fakes import SpreadReward, by_step, held_out
from rlhf_data.errors import ConfigError
from rlhf_train.algorithms.table import make_algorithm
from rlhf_train.generation.run_spec import AsyncSpec
from rlhf_train.learning.worker import TrainWorker
from rlhf_train.online import train_and_save
from rlhf_train.online_job import CheckpointSpec
from rlhf_train.run.checkpoint import Checkpoints

OVERLAP = AsyncSpec(max_staleness=1)


def test_rollouts_of_the_next_step_are_generated_while_a_step_is_trained(make_run):
    run = make_run(SpreadReward(), asynchronous=OVERLAP)
    generate, start = run.world.generate, run.world.start
    training, seen = threading.Event(), threading.Event()

    async def generated(*arguments, **options):
        if run.world.engine_version == 4:  # prompts of the third batch, which were admitted after the first step
            while not training.is_set():
                await asyncio.sleep(0.005)
            seen.set()
        return await generate(*arguments, **options)

    def started(method, *arguments, **options):
        if (method, *arguments[:1]) == (TrainWorker.update, "actor") and len(run.world.rollouts) == 2:
            training.set()
            assert seen.wait(60)
        return start(method, *arguments, **options)

    run.world.generate, run.world.start = generated, started
    train_and_save(run.job, run.controller, run.recorder)
    assert [len(batch) for batch in run.world.rollouts] == [64] * 3
    lines = by_step(run.lines())
    assert all(0 <= line["async/training_idle"] <= 1 and 0 <= line["async/generation_idle"] <= 1 for line in lines)
    assert [line["samples/trained"] for line in lines] == [64] * 3
    assert sum(line["samples/generated"] for line in lines) == 3 * 64
    # At most one step lies between the weights that wrote a rollout and those that train on it.
    for step, batch in enumerate(run.world.rollouts):
        assert all(4 * (step - 1) <= rollout.policy_version <= 4 * step for rollout in batch)


def test_evaluation_goes_on_beside_training_with_one_version_of_the_weights(make_run):
    run = make_run(SpreadReward(), asynchronous=OVERLAP, num_steps=4, eval_steps=1, eval_prompts=held_out())
    generate = run.world.generate
    versions: dict[int, set[int]] = {}
    updates_meanwhile = 0

    async def generated(token_ids, *arguments, **options):
        nonlocal updates_meanwhile
        if len(token_ids) == 1:  # a held-out prompt
            version = run.world.engine_version
            before = run.world.log.count("update actor")
            for _ in range(30):
                await asyncio.sleep(0.01)
                assert run.world.engine_version == version
            updates_meanwhile += run.world.log.count("update actor") - before
            versions.setdefault(version, set()).add(int(token_ids[0]))
        return await generate(token_ids, *arguments, **options)

    run.world.generate = generated
    train_and_save(run.job, run.controller, run.recorder)
    assert versions == {version: {2, 3} for version in (0, 4, 8, 12, 16)}
    assert updates_meanwhile >= 2
    evaluated = [line["step"] for line in run.lines() if "eval/reward" in line and "time/total" not in line]
    assert evaluated == [0, 1, 2, 3, 4]


def test_best_weights_are_saved_before_the_next_update_changes_them(make_run):
    run = make_run(
        SpreadReward(), asynchronous=OVERLAP, eval_steps=1, eval_prompts=held_out(), best_metric="eval/reward"
    )
    scores = iter([0.1, 0.2, 0.3, 0.4])
    run.world.on_save = lambda role, path: Path(path).mkdir(parents=True, exist_ok=True)
    reward = run.controller.rollouts._service.reward
    score = reward.score

    async def rising(prompt, rollouts):
        verdicts = await score(prompt, rollouts)
        if len(prompt.token_ids) == 1 and prompt.token_ids[0] == 2:
            object.__setattr__(verdicts[0], "reward", next(scores))
        return verdicts

    reward.score = rising
    train_and_save(run.job, run.controller, run.recorder)
    log = [
        entry.split()[0] + " " + entry.split()[1] for entry in run.world.log if entry.startswith(("save a", "update a"))
    ]
    # Before training, and after each step; then the final model.
    assert log == ["save actor", "update actor"] * 3 + ["save actor"] * 2


def test_run_with_waiting_groups_continues_from_its_checkpoint(make_run, tmp_path):
    saving = CheckpointSpec(folder=str(tmp_path / "checkpoints"), every=2)
    options = {"asynchronous": AsyncSpec(max_staleness=2), "num_steps": 5, "checkpoints": saving}
    first = make_run(SpreadReward(), save_path=str(tmp_path / "first"), **options)
    first.controller.start()
    for step in (1, 2, 3):
        first.step(step)
    first.controller.checkpointer.close()
    [checkpoint] = Checkpoints(tmp_path / "checkpoints").all()
    second = make_run(SpreadReward(), save_path=str(tmp_path / "second"), **options)
    second.controller.first_step = second.controller.checkpointer.restore(checkpoint) + 1
    train_and_save(second.job, second.controller, second.recorder)
    trained = [rollout.rollout_id for batch in [*first.world.rollouts[:2], *second.world.rollouts] for rollout in batch]
    assert len(trained) == len(set(trained)) == 5 * 64
    prompts = [int(name.partition("/")[2].partition("/")[0]) for name in trained]
    assert len(prompts) == 5 * 64
    counts = second.controller.ledger.run
    assert (counts.requested, counts.trained, counts.failed) == (5 * 64, 5 * 64, 0)


def test_evaluation_that_a_signal_cut_off_is_repeated(make_run, tmp_path):
    saving = CheckpointSpec(folder=str(tmp_path / "checkpoints"))
    options = {"asynchronous": OVERLAP, "num_steps": 3, "eval_steps": 1, "eval_prompts": held_out()}
    first = make_run(SpreadReward(), save_path=str(tmp_path / "first"), checkpoints=saving, **options)
    generate = first.world.generate

    async def generated(token_ids, *arguments, **others):
        if len(token_ids) == 1 and first.world.engine_version == 4:
            await asyncio.sleep(60)
        return await generate(token_ids, *arguments, **others)

    first.world.generate = generated
    first.controller.start()
    first.step(1)
    first.controller.evaluate(1)
    first.controller.checkpoint(1)  # remembers that the evaluation goes on
    first.controller.checkpointer.save()
    first.controller.checkpointer.close()
    second = make_run(SpreadReward(), save_path=str(tmp_path / "second"), checkpoints=saving, **options)
    [checkpoint] = Checkpoints(tmp_path / "checkpoints").all()
    second.controller.first_step = second.controller.checkpointer.restore(checkpoint) + 1
    train_and_save(second.job, second.controller, second.recorder)
    assert [line["step"] for line in second.lines() if "eval/reward" in line and "time/total" not in line] == [1, 2, 3]


@pytest.mark.parametrize("sleeper", [{"enable_sleep": True}, {"trainer_sleep": True, "zero_stage": 2}])
def test_nothing_may_sleep_while_both_sides_work(make_run, sleeper):
    with pytest.raises(ConfigError, match=r"``asynchronous`` has .* lets them sleep in turn"):
        make_run(SpreadReward(), asynchronous=OVERLAP, **sleeper)
    make_run(SpreadReward(), asynchronous=AsyncSpec(max_staleness=0), **sleeper)


def answer_held_out_prompts_late(run):
    generate = run.world.generate

    async def generated(token_ids, *arguments, **options):
        if len(token_ids) == 1:
            await asyncio.sleep(0.3)
        return await generate(token_ids, *arguments, **options)

    run.world.generate = generated


def test_evaluation_goes_on_over_steps_that_keep_the_weights_and_is_neither_lost_nor_mixed_with_the_next(make_run):
    """The actor is frozen for two steps, so that no weight sync waits for the evaluations of these steps."""
    run = make_run(
        SpreadReward(),
        asynchronous=OVERLAP,
        num_steps=4,
        num_frozen_steps=2,
        eval_steps=1,
        eval_prompts=held_out(),
        algorithm=make_algorithm(),
    )
    answer_held_out_prompts_late(run)
    train_and_save(run.job, run.controller, run.recorder)
    evaluated = [line["step"] for line in run.lines() if "eval/reward" in line and "time/total" not in line]
    assert evaluated == [0, 1, 2, 3, 4]


def test_checkpoint_waits_for_an_evaluation_of_an_earlier_step(make_run, tmp_path):
    saving = CheckpointSpec(folder=str(tmp_path / "checkpoints"), every=2)
    options = {"asynchronous": OVERLAP, "num_steps": 5, "num_frozen_steps": 4, "eval_steps": 3, "checkpoints": saving}
    run = make_run(SpreadReward(), eval_prompts=held_out(), **options)
    answer_held_out_prompts_late(run)
    train_and_save(run.job, run.controller, run.recorder)
    states = {checkpoint.step: checkpoint.state() for checkpoint in Checkpoints(tmp_path / "checkpoints").all()}
    assert states.keys() == {2, 4}
    assert states[4]["evaluator"]["running"] is None
