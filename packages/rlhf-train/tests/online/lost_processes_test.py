"""A run whose engine or training process dies: it goes on, or says why it cannot."""

import dataclasses
import os
import signal
import time
from types import SimpleNamespace

import pytest
from ray.exceptions import RayTaskError

from online_fakes import Listener, SpreadReward, World
from rlhf_data.errors import EngineError
from rlhf_train import online as online_run
from rlhf_train import processes
from rlhf_train.cluster.placement import PlacementRequest, plan_placement
from rlhf_train.cluster.ray_session import DeviceMemoryError, LostProcessError
from rlhf_train.online import LostTrainerError, run_online
from rlhf_train.online_job import CheckpointSpec
from rlhf_train.run.checkpoint import Checkpoints
from rlhf_train.run.interrupts import Interrupted
from trainer_testing import tiny_job

LOST = LostProcessError("a process of the run is gone: SIGKILL")


def test_engine_that_dies_in_generation_costs_no_rollout(make_run, monkeypatch):
    run = make_run(SpreadReward())
    run.controller.start()
    asked = 0
    whole = World.generate

    async def dies_at_the_fifth_request(world, *arguments, **options):
        nonlocal asked
        asked += 1
        world.dead = world.dead or asked == 5
        return await whole(world, *arguments, **options)

    monkeypatch.setattr(World, "generate", dies_at_the_fifth_request)
    assert run.step(1)
    [line] = run.lines()
    assert (line["samples/generated"], line["samples/failed"], line["samples/trained"]) == (64, 0, 64)
    # The engine is restarted once, and gets the weights before it answers again.
    assert run.world.log[:3] == ["send 0 to 1", "restart", "send 0 to 1"]
    assert run.listener.warnings[0].startswith("engine 0 failed: the engine is gone")
    assert run.listener.warnings[1] == "engine 0 is back, with weights of version 0"


def test_engine_that_dies_in_a_sync_gets_the_new_weights_after_its_restart(make_run):
    run = make_run(SpreadReward())
    run.controller.start()
    run.controller.generate(1)
    run.world.dead = True
    run.controller.learner.policy_version = 4
    run.controller.sync_weights()
    assert run.world.log == ["send 0 to 1", "send 4 to 1", "restart", "send 4 to 1"]
    assert (run.world.engine_version, run.controller.rollouts.policy_version) == (4, 4)


def test_engine_that_never_comes_back_ends_the_run_with_a_checkpoint_and_its_models(make_run, monkeypatch):
    run = make_run(SpreadReward(), checkpoints=CheckpointSpec(folder=""))
    monkeypatch.setattr(World, "restart", lambda world: world.log.append("restart"))
    report_step = type(run.controller.report).step

    def then_die(report, *words):
        report_step(report, *words)
        run.world.dead = True

    monkeypatch.setattr(type(run.controller.report), "step", then_die)
    monkeypatch.setattr("rlhf_rollout.supervisor.NUM_CHECKS", 1)
    monkeypatch.setattr(World, "ready", World.health)
    with pytest.raises(EngineError, match="no engine is left; engine 0 failed 4 times in a row: the engine is gone"):
        online_run.train_and_save(run.job, run.controller, run.recorder)
    assert run.world.log.count("restart") == 3
    assert [checkpoint.step for checkpoint in Checkpoints(run.recorder.path("checkpoints")).all()] == [1]
    assert run.world.log[-1] == f"save actor {run.recorder.path('final model')}"


@pytest.mark.parametrize("can_save", [True, False])
def test_error_that_nobody_foresaw_ends_the_run_with_a_checkpoint_and_its_models(make_run, can_save):
    """A rank raises what PyTorch or a driver raises."""
    run = make_run(SpreadReward(), checkpoints=CheckpointSpec(folder=""))

    def run_model(role):
        if len(run.world.rollouts) == 2:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
        return {}

    def save(role, path):
        if not can_save:
            raise RuntimeError("CUDA error: this device is of no use any more")

    run.world.on_run_model = run_model
    run.world.on_save = save
    with pytest.raises(RuntimeError, match="an illegal memory access"):
        online_run.train_and_save(run.job, run.controller, run.recorder)
    assert [checkpoint.step for checkpoint in Checkpoints(run.recorder.path("checkpoints")).all()] == [1]
    assert run.world.log[-1] == f"save actor {run.recorder.path('final model')}"
    warnings = [] if can_save else ["not everything was saved: CUDA error: this device is of no use any more"]
    assert run.listener.warnings == warnings


@pytest.mark.parametrize(
    ("num_ranks", "cause", "asks"),
    [
        (1, RuntimeError("CUDA error"), True),
        (2, RuntimeError("CUDA error"), False),
        (2, DeviceMemoryError("too little memory"), False),
        (2, EngineError("foreseen"), True),
    ],
)
def test_ranks_that_may_wait_for_one_that_failed_are_asked_for_nothing(make_run, num_ranks, cause, asks):
    run = make_run(SpreadReward(), checkpoints=CheckpointSpec(folder=""))
    [placed] = run.job.plan.trainers
    plan = dataclasses.replace(run.job.plan, trainers=(dataclasses.replace(placed, places=placed.places * num_ranks),))
    # As `wait` raises them: errors of this project as they are.
    error = cause if isinstance(cause, EngineError) else RayTaskError("work", "", cause).as_instanceof_cause()

    def run_model(role):
        if len(run.world.rollouts) == 2:
            raise error
        return {}

    run.world.on_run_model = run_model
    with pytest.raises(type(cause)) as caught:
        online_run.train_and_save(dataclasses.replace(run.job, plan=plan), run.controller, run.recorder)
    assert caught.value is error
    assert run.world.log[-1].startswith("save actor") == asks
    assert [checkpoint.step for checkpoint in Checkpoints(run.recorder.path("checkpoints")).all()] == [1] * asks


class Attempts:
    """Stands for the attempts to run the processes of a job: each raises or returns what a test says."""

    def __init__(self, monkeypatch, *outcomes):
        self.outcomes = list(outcomes)
        self.seen = []
        self.now = 0.0
        monkeypatch.setattr(online_run, "run_processes", self.run)
        monkeypatch.setattr(online_run, "ray_cluster", lambda plan, address: online_run.ExitStack())
        monkeypatch.setattr(online_run.time, "monotonic", lambda: self.now)

    def run(self, job, checkpoint, observer, timeline, interrupts, watch):
        assert not interrupts.is_held
        interrupts.hold()
        self.seen.append((job.checkpoints.resume, checkpoint and checkpoint.step))
        self.now += 600.0
        outcome = self.outcomes.pop(0)
        if isinstance(outcome, Exception):
            raise outcome
        return outcome


@pytest.fixture
def job(tmp_path):
    return tiny_job("model", tmp_path)


@pytest.fixture
def saved_job(job, monkeypatch):
    """A job whose run has a checkpoint of step 7."""
    checkpoints = Checkpoints(job.checkpoints.home(job.save_path))
    checkpoints.begin(7)
    checkpoints.commit(7, {"step": 7}, [], None)
    monkeypatch.setattr(online_run, "check_save_path", lambda *_, **__: None)
    return job


def test_lost_trainer_continues_from_the_newest_checkpoint(saved_job, monkeypatch):
    attempts = Attempts(monkeypatch, LostTrainerError(LOST), "summary")
    listener = Listener()
    assert run_online(saved_job, listener) == "summary"
    assert attempts.seen == [(False, None), (True, 7)]
    assert listener.warnings == [f"{LOST}\nall processes start again and continue after step 7"]


def test_seconds_up_to_the_checkpoint_of_a_lost_trainer_count_once(saved_job, monkeypatch):
    """The state that is continued has them, as in a run that another process continues."""
    attempts = Attempts(monkeypatch, LostTrainerError(LOST), "summary")
    run = attempts.run
    elapsed_s = []

    def timed(job, checkpoint, observer, timeline, *others):
        elapsed_s.append(timeline.elapsed_s)
        with timeline.phase("train"):
            time.sleep(0.3)
            return run(job, checkpoint, observer, timeline, *others)

    monkeypatch.setattr(online_run, "run_processes", timed)
    run_online(saved_job, Listener())
    assert len(elapsed_s) == 2 and elapsed_s[1] < 0.3


@pytest.mark.parametrize(("minutes", "num_attempts"), [(10, 2), (59, 2), (61, 3)])
def test_lost_trainer_continues_once_in_an_hour(saved_job, monkeypatch, minutes, num_attempts):
    attempts = Attempts(monkeypatch, *[LostTrainerError(LOST)] * 2, "summary")
    run = attempts.run

    def slow(*arguments):
        attempts.now += minutes * 60.0 - 600.0
        return run(*arguments)

    monkeypatch.setattr(online_run, "run_processes", slow)
    if num_attempts == 3:
        assert run_online(saved_job, Listener()) == "summary"
    else:
        with pytest.raises(LostProcessError, match="SIGKILL"):
            run_online(saved_job, Listener())
    assert len(attempts.seen) == num_attempts


def test_lost_trainer_without_a_checkpoint_ends_the_run_and_names_the_option(job, monkeypatch):
    Attempts(monkeypatch, LostTrainerError(LOST))
    listener = Listener()
    with pytest.raises(LostProcessError, match="SIGKILL"):
        run_online(job, listener)
    assert "``CheckpointSpec.every=N``" in listener.warnings[0]


def test_signal_that_has_ended_a_trainer_in_an_update_ends_the_run_as_one_that_is_interrupted(job, monkeypatch):
    """As one to all processes: the trainer ends at once, this process after the update that it waits for."""
    attempts = Attempts(monkeypatch, LostTrainerError(LOST))
    run = attempts.run

    def struck(*arguments):
        try:
            return run(*arguments)
        finally:
            os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(online_run, "run_processes", struck)
    listener = Listener()
    with pytest.raises(Interrupted) as caught:
        run_online(job, listener)
    assert caught.value.signal_number == signal.SIGTERM
    assert listener.warnings == [] and len(attempts.seen) == 1


def test_process_that_is_lost_in_the_start_ends_the_run(saved_job, monkeypatch):
    attempts = Attempts(monkeypatch, LOST)
    with pytest.raises(LostProcessError, match="SIGKILL"):
        run_online(saved_job, Listener())
    assert len(attempts.seen) == 1


def test_models_of_live_ranks_are_saved_when_others_have_died(make_run, monkeypatch):
    run = make_run(SpreadReward(), save_critic=True)
    monkeypatch.setattr(run.controller.learner, "live_roles", lambda: {"actor", "reference"})
    online_run.save_what_is_left(run.job, run.controller, run.recorder, models=True)
    assert run.world.log == [f"save actor {run.recorder.path('final model')}"]
    run.world.log.clear()
    monkeypatch.setattr(run.controller.learner, "live_roles", lambda: {"critic"})
    online_run.save_what_is_left(dataclasses.replace(run.job), run.controller, run.recorder, models=True)
    assert run.world.log == []


def test_interrupted_run_whose_trainers_have_ended_says_that_it_saves_no_checkpoint(make_run, monkeypatch):
    run = make_run(SpreadReward(), checkpoints=CheckpointSpec(folder=""))
    monkeypatch.setattr(run.controller.learner, "live_roles", lambda: {"critic"})
    online_run.save_what_is_left(run.job, run.controller, run.recorder, models=False)
    [warning] = run.listener.warnings
    assert warning.startswith("no checkpoint is saved now,") and warning.endswith(": actor, reference")
    assert run.world.log == [] and not Checkpoints(run.recorder.path("checkpoints")).all()


@pytest.fixture
def plan(monkeypatch):
    """A plan whose placement group, `group`, is there at once."""
    monkeypatch.setattr(processes, "check_resources", lambda *_: None)
    monkeypatch.setattr(processes, "placement_group", lambda *_, **__: SimpleNamespace(wait=lambda _: True))
    return plan_placement(PlacementRequest(ranks={"actor": 1}), [])


def test_placement_group_is_removed_when_its_block_has_ended(plan, monkeypatch):
    """The group of a restarted run would else find the nodes taken."""
    removed = []

    def remove(group):
        time.sleep(0.1)
        removed.append(group)

    monkeypatch.setattr(processes, "remove_placement_group", remove)
    with processes.placed_bundles(plan) as reserved:
        pass
    assert len(removed) == 1 and removed[0] is reserved.group


@pytest.mark.parametrize("reason", ["within 0.01 s", "no route"])
def test_cluster_that_does_not_remove_a_placement_group_hides_no_error(plan, monkeypatch, caplog, reason):
    def remove(group):
        if reason == "no route":
            raise ConnectionError(reason)
        time.sleep(5.0)

    monkeypatch.setattr(processes, "REMOVAL_TIMEOUT_S", 0.01 if "within" in reason else 60.0)
    monkeypatch.setattr(processes, "remove_placement_group", remove)
    before = time.monotonic()
    with pytest.raises(EngineError, match="its own"), processes.placed_bundles(plan):
        raise EngineError("its own")
    assert time.monotonic() - before < 4.0
    assert "the Ray cluster has not taken the run's nodes back" in caplog.text and reason in caplog.text
