"""A run's parts together, with engines of this process and ranks that answer what a test tells them to."""

import dataclasses
import json
import math
import time
from pathlib import Path

import pytest

from online_fakes import BrokenReward, CrashingReward, SpreadReward, by_step, held_out, tiny_batch
from rlhf_data.errors import CheckpointError, ConfigError, EngineError, RewardError, RlhfError
from rlhf_train.algorithms.table import make_algorithm
from rlhf_train.online import train_and_save
from rlhf_train.run.checkpoint import Checkpoints, CheckpointSpec
from trainer_testing import tiny_job


def test_online_job_plan_without_a_place_for_a_model_is_refused(tmp_path):
    job = tiny_job("model", tmp_path)
    two = {role: job.models[role] for role in ("actor", "reference")}
    with pytest.raises(ConfigError, match="places for actor, critic, reference, the models are actor, reference"):
        dataclasses.replace(job, models=two, algorithm=make_algorithm("group_norm"))


def test_step_generates_learns_and_sends_weights_in_this_order(make_run):
    run = make_run(SpreadReward())
    run.controller.start()
    assert run.step(1)
    assert run.world.log == [
        "send 0 to 1", "load_rollouts", "run_model actor", "run_model reference", "run_model critic",
        "assign_advantages", "update critic", "update actor", "send 4 to 1",
    ]  # fmt: skip
    [line] = run.lines()
    # 64 rollouts of five tokens in four updates; rewards are 1 for the first of four samples of every second prompt.
    assert (line["samples/generated"], line["samples/trained"], line["rollout/reward"]) == (64, 64, 1 / 8)
    assert (line["policy/loss"], line["sync/size_bytes"], line["rollout/kept_groups"]) == (0.5, 11, 1.0)
    assert line["throughput/response_tokens"] * line["time/step"] == pytest.approx(64 * 5)


def test_observer_is_told_how_many_groups_are_done(make_run):
    run = make_run(SpreadReward(), eval_prompts=held_out())
    num_held_out = len(run.job.eval_prompts)
    run.controller.start()
    assert run.listener.done == [(done, num_held_out) for done in range(1, num_held_out + 1)]
    run.listener.done.clear()
    run.controller.generate(1)
    assert run.listener.done == [(done, 16) for done in range(1, 17)]


def test_groups_that_an_engine_failed_are_said_with_the_reason_and_wrote_no_tokens(make_run):
    run = make_run(SpreadReward())
    run.world.failing = 1
    assert run.step(1)
    assert len(run.listener.warnings) == 1
    assert "step1: 8 of 16 rollout groups failed" in run.listener.warnings[0]
    assert "on fire" in run.listener.warnings[0]
    [line] = run.lines()
    assert (line["samples/generated"], line["samples/failed"], line["samples/trained"]) == (64, 32, 32)
    # Eight groups of four wrote five tokens each; what the failed ones would have written does not count.
    assert line["throughput/response_tokens"] * line["time/step"] == pytest.approx(8 * 4 * 5)


def test_step_in_which_every_group_fails_ends_the_run_with_the_engines_words(make_run):
    run = make_run(SpreadReward(), eval_prompts=held_out())
    run.world.failing = 2
    with pytest.raises(EngineError, match="on fire"):
        run.controller.generate(1)
    rollouts = run.controller.rollouts
    rollouts.start_evaluation(1)
    with pytest.raises(EngineError, match=r"every rollout group failed; the last: .*on fire"):
        rollouts.finish_evaluation()


@pytest.mark.parametrize("role", ["actor", "critic"])
def test_rollout_that_no_rank_trained_is_missed(make_run, role):
    run = make_run(SpreadReward(), batch=dataclasses.replace(tiny_batch(16), max_epochs=2))
    run.world.lost = {role: 1}
    with pytest.raises(RlhfError, match=r"64 requested, 63\.5 trained"):
        run.step(1)


def test_rollouts_without_a_reward_are_counted_as_failed_and_the_others_make_fewer_updates(make_run):
    run = make_run(BrokenReward(), batch=tiny_batch(16))
    run.controller.start()
    assert run.step(1)
    [line] = run.lines()
    assert (line["samples/generated"], line["samples/failed"], line["samples/trained"]) == (64, 48, 16)
    assert [len(rollouts) for rollouts in run.world.rollouts] == [16]
    # One update of sixteen rollouts in place of four.
    assert run.world.log[-1] == "send 1 to 1" and run.controller.learner.policy_version == 1


def test_steps_without_rewards_teach_nothing_and_the_third_in_a_row_ends_the_run_with_its_models_saved(make_run):
    run = make_run(CrashingReward(), num_steps=9, ema_beta=0.5, save_critic=True)
    with pytest.raises(RewardError, match=r"3 step\(s\) in a row: no rollout has a reward.*no disk"):
        train_and_save(run.job, run.controller, run.recorder)
    assert len(run.listener.warnings) == 2 and "no disk" in run.listener.warnings[0]
    counts = [(line["samples/generated"], line["samples/failed"], line["samples/trained"]) for line in run.lines()]
    assert counts == [(64, 64, 0)] * 2
    paths = {name: run.recorder.path(name) for name in ("final model", "averaged model", "critic")}
    checkpoint = run.recorder.path("checkpoints") / ".step-2.partial"
    assert run.world.log[:2] == ["send 0 to 1", f"save_state {checkpoint}"]
    assert run.world.log[2:] == [
        f"save actor {paths['final model']}",
        f"save_average {paths['averaged model']}",
        f"save critic {paths['critic']}",
    ]


@pytest.mark.parametrize("num_steps", [1, 2])
def test_run_of_fewer_steps_without_a_reward_in_any_ends_with_the_failure(make_run, num_steps):
    run = make_run(CrashingReward(), num_steps=num_steps)
    for step in range(1, num_steps):
        assert not run.step(step)
    with pytest.raises(RewardError, match=rf"{num_steps} step\(s\) in a row: no rollout has a reward.*no disk"):
        run.step(num_steps)


def test_engine_that_fails_for_good_ends_the_run_with_its_models_saved(make_run):
    run = make_run(SpreadReward())
    run.world.failing = 2
    with pytest.raises(EngineError):
        train_and_save(run.job, run.controller, run.recorder)
    assert run.world.log == ["send 0 to 1", f"save actor {run.recorder.path('final model')}"]


def test_barren_steps_count_only_in_a_row(make_run):
    run = make_run(CrashingReward(), num_steps=9)
    for step in (1, 2):
        assert not run.step(step)
    run.controller.rollouts._service.reward = SpreadReward()
    assert run.step(3)
    run.controller.rollouts._service.reward = CrashingReward()
    for step in (4, 5):
        assert not run.step(step)
    with pytest.raises(RewardError):
        run.step(6)


def test_run_ends_with_its_models_and_a_summary(make_run):
    run = make_run(SpreadReward(), num_steps=2)
    summary = train_and_save(run.job, run.controller, run.recorder)
    assert run.world.log[-1] == f"save actor {run.recorder.path('final model')}"
    assert summary.metrics["memory/trainer_peak_bytes"] == 7.0
    assert "final model" not in summary.artifacts and summary.artifacts["metrics"] == "metrics.jsonl"


def test_first_and_last_samples_are_shown_when_there_are_no_held_out_prompts(make_run):
    run = make_run(SpreadReward())
    for step in (1, 2, 3):
        run.step(step)
    assert run.listener.titles == ["Samples of step 1", "Samples of step 3"]


def test_engines_that_slept_get_the_weights_of_a_frozen_actor_again(make_run):
    run = make_run(SpreadReward(), num_frozen_steps=1, algorithm=make_algorithm("gae", kl_coef=0.01), enable_sleep=True)
    run.controller.start()
    assert run.step(1)
    assert [call for call in run.world.log if call.startswith("send")] == ["send 0 to 1", "send 0 to 1"]


def test_frozen_actor_is_not_updated_and_its_weights_keep_their_version(make_run):
    algorithm = make_algorithm(kl_target=0.5, kl_horizon=64)
    run = make_run(SpreadReward(), num_frozen_steps=1, algorithm=algorithm)
    run.controller.start()
    run.step(1)
    done = [entry for entry in run.world.log if entry.startswith(("update", "send"))]
    assert done == ["send 0 to 1", "update critic"]
    assert run.controller.learner.kl_coef == 0.01  # the KL of a policy that has not moved tells nothing
    run.step(2)
    assert run.world.log[-3:] == ["update critic", "update actor", "send 4 to 1"]
    assert [line["samples/trained"] for line in run.lines()] == [64, 64]


def test_adaptive_kl_coefficient_follows_the_kl_of_its_own_batch(make_run):
    run = make_run(SpreadReward(), algorithm=make_algorithm(kl_coef=0.1, kl_target=0.5, kl_horizon=640))
    run.controller.start()
    run.world.kl = 5.0  # ten times the target: the error is held at 0.2
    run.step(1)
    # 64 rollouts of a horizon of 640: 0.1 exp(0.2 x 64 / 640)
    run.world.kl = 0.45  # 10 % below: the error is -0.1
    run.step(2)
    run.step(3)
    coefs = [0.1, 0.1 * math.exp(0.02), 0.1 * math.exp(0.01)]
    assert run.world.kl_coefs == pytest.approx(coefs)
    assert [line["kl/coef"] for line in run.lines()] == pytest.approx(coefs)


def test_engine_that_missed_a_sync_has_its_rollouts_left_out_and_counted(make_run):
    run = make_run(SpreadReward())
    run.controller.start()
    run.step(1)
    run.world.engine_version = 0
    assert not run.step(2)
    assert "64 rollouts are too old for the batch" in run.listener.warnings[0]
    assert [(line["samples/trained"], line["samples/stale"]) for line in run.lines()] == [(64, 0), (0, 64)]


def test_evaluations_come_first_last_and_between_and_keep_the_best_weights(make_run):
    run = make_run(SpreadReward(), num_steps=5, eval_steps=2, best_metric="eval/reward", eval_prompts=held_out())
    best = run.recorder.path("best model")
    run.world.on_save = lambda role, path: Path(path).mkdir(parents=True)
    summary = train_and_save(run.job, run.controller, run.recorder)
    evaluations = [line for line in run.lines() if "eval/reward" in line]
    assert [line["step"] for line in evaluations] == [0, 2, 4, 5]
    assert json.loads((best / "state.json").read_text())["step"] == 0  # the fake policy never changes
    assert run.listener.titles == ["Held-out samples before training", "Held-out samples after training"]
    assert summary.metrics["eval/reward_before"] == summary.metrics["eval/reward_after"] == 0.5
    lines = by_step(run.lines())
    assert [line["step"] for line in lines if "time/evaluate" in line] == [2, 4, 5]
    assert not any(name.startswith("time/") for line in evaluations for name in line)


def test_evaluation_without_the_metric_of_the_best_model_is_warned_of(make_run):
    run = make_run(CrashingReward(), eval_prompts=held_out(), best_metric="eval/reward")
    run.controller.evaluate(0)
    assert "has no eval/reward" in run.listener.warnings[0]
    assert not run.recorder.path("best model").exists()


def test_parts_of_a_run_add_up_to_its_wall_clock(make_run):
    run = make_run(SpreadReward(), num_steps=2, eval_prompts=held_out(), save_critic=True, ema_beta=0.5)
    run.world.delay_s = 0.02
    timeline, finish = run.controller.timeline, run.controller.report.finish
    elapsed = []

    def finish_between():
        elapsed.append(timeline.elapsed_s)
        summary = finish()
        elapsed.append(timeline.elapsed_s)
        return summary

    run.controller.report.finish = finish_between
    summary = train_and_save(run.job, run.controller, run.recorder)
    lines = run.lines()
    final = {name: value for name, value in lines[-1].items() if name.startswith("time/")}
    assert final == {name: value for name, value in summary.metrics.items() if name.startswith("time/")}
    total = final.pop("time/total")
    assert elapsed[0] < total < elapsed[1]  # what follows is the writing of the last line
    assert sum(final.values()) == pytest.approx(total, abs=1e-9)
    assert set(final) == {
        f"time/{part}" for part in ("startup", "first_evaluation", "steps", "final_save", "remainder")
    }
    assert final["time/steps"] == pytest.approx(sum(line["time/step"] for line in by_step(lines)), abs=1e-9)
    # Two held-out prompts; an actor, its average and a critic. What is left asks for the memory and writes a line.
    assert final["time/first_evaluation"] >= 0.04
    assert final["time/final_save"] >= 0.06
    assert final["time/remainder"] >= 0


def test_first_sync_is_a_part_of_the_startup(make_run):
    run = make_run(SpreadReward())
    send = run.world.send

    def slow(*arguments):
        time.sleep(0.1)
        return send(*arguments)

    run.world.send = slow
    run.controller.start()
    summary = run.controller.report.finish()
    assert summary.metrics["time/startup"] >= 0.1
    assert summary.metrics["time/first_evaluation"] < 0.1
    assert summary.metrics["time/steps"] == 0.0


def test_saving_the_best_model_is_a_phase_of_its_step(make_run):
    run = make_run(SpreadReward(), num_steps=2, best_metric="eval/reward", eval_prompts=held_out())

    def save(role, path):
        phases.append(list(run.controller.timeline._open))
        time.sleep(0.3)
        Path(path).mkdir(parents=True)

    phases = []
    run.world.on_save = save
    controller = run.controller
    controller.generate(1)
    assert controller.can_learn()
    controller.make_experience(1)
    controller.assign_advantages()
    controller.update(1)
    controller.evaluate(2)
    controller.record(1)
    [line] = by_step(run.lines())
    assert line["time/save"] >= 0.3
    assert {names[-1] for names in phases} == {"save"}
    # Neither answering held-out prompts nor saving is time in which rollouts are made.
    counted = line["time/step"] - line["time/evaluate"] - line["time/save"]
    assert line["throughput/response_tokens"] * counted == pytest.approx(64 * 5)


def test_phases_of_a_run_add_up_to_its_wall_clock(make_run):
    run = make_run(
        SpreadReward(), eval_prompts=held_out(), eval_steps=1, zero_stage=2, enable_sleep=True, trainer_sleep=True
    )
    run.world.delay_s = 0.01
    moments = [time.perf_counter()]
    run.controller.start()
    moments.append(time.perf_counter())
    for step in (1, 2, 3):
        run.step(step)
        run.controller.evaluate(step)
    moments.append(time.perf_counter())
    run.controller.record(4)
    moments.append(time.perf_counter())
    lines = by_step(run.lines())
    # The first step begins within the start, and the last one ends within its record.
    assert moments[2] - moments[1] <= sum(line["time/step"] for line in lines) <= moments[3] - moments[0]
    for line in lines:
        phases = {name: value for name, value in line.items() if name.startswith("time/") and name != "time/step"}
        assert sum(phases.values()) == pytest.approx(line["time/step"], abs=1e-9)
    named = {"generate", "reward", "load", "experience", "train", "sync", "write", "offload", "wake", "sleep", "reload"}
    assert named | {"evaluate"} <= {name.removeprefix("time/") for line in lines for name in line}
    # 16 prompts of 10 ms one after the other, a call per rank set for dealing, three models, two updates.
    first = lines[0]
    assert first["time/generate"] >= 0.16 and first["time/load"] >= 0.01 and first["time/train"] >= 0.02
    assert first["time/experience"] >= 0.04 and first["time/offload"] >= 0.01
    assert min(line["time/other"] / line["time/step"] for line in lines) < 0.25


def test_checkpoint_of_other_prompts_is_refused(make_run, tmp_path):
    saving = CheckpointSpec(folder=str(tmp_path / "checkpoints"), every=1)
    first = make_run(SpreadReward(), save_path=str(tmp_path / "first"), checkpoints=saving)
    first.step(1)
    first.controller.checkpointer.close()
    prompts = first.job.prompts[:-1]
    second = make_run(SpreadReward(), save_path=str(tmp_path / "second"), checkpoints=saving, prompts=prompts)
    with pytest.raises(CheckpointError, match="the saved order has num_items"):
        second.controller.checkpointer.restore(Checkpoints(tmp_path / "checkpoints").newest_whole(pytest.fail))


def test_checkpoint_that_cannot_be_written_is_a_warning_and_training_goes_on(make_run, tmp_path):
    (tmp_path / "file").write_text("")
    saving = CheckpointSpec(folder=str(tmp_path / "file"), every=1)
    run = make_run(SpreadReward(), checkpoints=saving)
    assert run.step(1) and run.step(2)
    run.controller.checkpointer.close()
    assert len(run.listener.warnings) == 2
    assert all("a checkpoint was not saved: " in warning for warning in run.listener.warnings)


def test_without_state_and_model_there_is_no_checkpoint(make_run, tmp_path):
    saving = CheckpointSpec(folder=str(tmp_path / "checkpoints"), full=False)
    run = make_run(SpreadReward(), checkpoints=saving)
    run.step(1)
    run.controller.checkpointer.save()
    run.controller.checkpointer.close()
    assert not (tmp_path / "checkpoints").exists()
