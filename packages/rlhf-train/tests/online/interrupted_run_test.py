"""SIGINT and SIGTERM in every phase of a run: it saves its state at once, and goes on from there as if nothing had
happened."""

import dataclasses
import os
import signal

import pytest

from online_fakes import SpreadReward, held_out
from rlhf_train.algorithms.table import make_algorithm
from rlhf_train.generation.scoring import RewardShaper
from rlhf_train.loop import train
from rlhf_train.online import train_and_save
from rlhf_train.online_job import CheckpointSpec
from rlhf_train.run.checkpoint import Checkpoints
from rlhf_train.run.interrupts import Interrupted

NUM_STEPS = 4
# Phase to the last step whose updates are saved, and whether that step is evaluated and recorded.
PHASES = {
    "generate": (1, True),
    "run_model reference": (1, True),
    "update critic": (2, False),
    "update actor": (2, False),
    "send": (2, False),
    "evaluate": (2, False),
    "save_state": (2, True),
    "save actor": (NUM_STEPS, True),
}


def signal_in(run, phase, number):
    """Send this process a signal, and another one while it saves, the first time `phase` comes up in step 2 or at the
    end."""
    world = run.world
    start, generate, send = world.start, world.generate, world.send
    sent = []

    def strike(name):
        num_updates = sum(entry == "update actor" for entry in world.log)
        in_step = (num_updates == 1) if PHASES[phase][0] == 1 or phase.startswith("update") else num_updates >= 2
        is_first = name == phase and in_step and not sent
        if is_first or (name == "save_state" and len(sent) == 1):
            sent.append(name)
            os.kill(os.getpid(), number)

    def started(method, *arguments, **options):
        words = [method.__name__, *[part for part in arguments[:1] if isinstance(part, str)]]
        strike(words[0] if words[:1] == ["save_state"] else " ".join(words))
        return start(method, *arguments, **options)

    async def generated(token_ids, *arguments, **options):
        strike("generate" if len(token_ids) == 2 else "evaluate")
        return await generate(token_ids, *arguments, **options)

    def was_sent(*arguments):
        strike("send")
        return send(*arguments)

    world.start, world.generate, world.send = started, generated, was_sent


def numbers(run):
    return [
        {name: value for name, value in line.items() if not name.startswith(("time/", "throughput/"))}
        for line in run.lines()
    ]


@pytest.fixture
def make_part(make_run, tmp_path):
    """Return a function that makes a run, or a part of one, with its own folder and the checkpoints of all parts."""

    def make(name, every=0):
        run = make_run(
            SpreadReward(),
            save_path=str(tmp_path / name),
            checkpoints=CheckpointSpec(folder=str(tmp_path / "checkpoints"), every=every),
            num_steps=NUM_STEPS,
            eval_steps=2,
            eval_prompts=held_out(),
            algorithm=make_algorithm(kl_target=0.5, kl_horizon=64),
        )
        normalized = dataclasses.replace(run.job.reward, running_reward_norm=True)
        run.controller.learner._shaper = RewardShaper(normalized, max_tokens=12)
        run.world.kl = 1.5
        return run

    return make


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("phase", PHASES)
def test_interrupted_run_saves_at_once_and_goes_on_as_if_nothing_had_happened(make_part, tmp_path, phase, number):
    step, is_recorded = PHASES[phase]
    whole = make_part("whole")
    train(whole.controller)
    assert whole.listener.last_words is None
    first = make_part("first", every=2 if phase == "save_state" else 0)
    signal_in(first, phase, number)
    with pytest.raises(Interrupted) as caught, first.controller.interrupts:
        train_and_save(first.job, first.controller, first.recorder)
    assert caught.value.signal_number == number
    # The signal of "save_state" arrives when the checkpoint of this step is being made.
    assert first.listener.last_words == ([] if phase == "save_state" else ["the run saves a checkpoint, then ends"])
    checkpoint = Checkpoints(tmp_path / "checkpoints").newest_whole(pytest.fail)
    assert (checkpoint.step, checkpoint.state()["is_recorded"]) == (step, is_recorded)
    assert sum(entry == "update actor" for entry in first.world.log) == step  # it has not gone on after the signal
    second = make_part("second")
    second.controller.first_step = second.controller.checkpointer.restore(checkpoint) + 1
    second.world.engine_version = second.controller.learner.policy_version
    train(second.controller)
    assert numbers(first) + numbers(second) == numbers(whole)
    assert second.controller.ledger.run == whole.controller.ledger.run
    for name in ("kl_coef", "entropy_coef", "policy_version"):
        assert getattr(second.controller.learner, name) == getattr(whole.controller.learner, name)
    asked = [[rollout.token_ids.tolist() for rollout in batch] for batch in whole.world.rollouts]
    assert [[rollout.token_ids.tolist() for rollout in batch] for batch in second.world.rollouts] == asked[step:]


def test_step_that_was_interrupted_keeps_the_seconds_and_tokens_from_before(make_part, tmp_path):
    first = make_part("first")
    first.world.delay_s = 0.01
    signal_in(first, "evaluate", signal.SIGTERM)
    with pytest.raises(Interrupted), first.controller.interrupts:
        train_and_save(first.job, first.controller, first.recorder)
    second = make_part("second")
    checkpoint = Checkpoints(tmp_path / "checkpoints").newest_whole(pytest.fail)
    second.controller.first_step = second.controller.checkpointer.restore(checkpoint) + 1
    second.controller.start()
    [line] = [line for line in second.lines() if "time/step" in line]
    assert line["step"] == 2
    assert line["time/generate"] >= 0.16  # sixteen prompts, one after the other
    trained = line["time/step"] - line["time/evaluate"]
    assert line["throughput/response_tokens"] * trained == pytest.approx(64 * 5)
    parts = sum(value for name, value in line.items() if name.startswith("time/") and name != "time/step")
    assert parts == pytest.approx(line["time/step"], abs=1e-6)
