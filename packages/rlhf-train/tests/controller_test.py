"""The controller's accounts, with engines of this process and no trainers."""

import dataclasses
import json

import numpy as np
import pytest

from rlhf_data.errors import ConfigError, EngineError, RewardError, RlhfError
from rlhf_data.records import FinishReason
from rlhf_models.testing import tiny_model_dir
from rlhf_rollout.protocols import Completion
from rlhf_train.algorithms import AlgorithmSpec
from rlhf_train.online.controller import PlacedRun
from rlhf_train.online.observer import SilentObserver
from rlhf_train.online.recorder import Recorder
from rlhf_train.testing import tiny_job


def test_online_job_plan_without_a_place_for_a_model_is_refused(tmp_path):
    job = tiny_job("model", tmp_path)
    with pytest.raises(ConfigError, match="places for actor, critic, reference, the models are actor, reference"):
        dataclasses.replace(
            job,
            models={role: job.models[role] for role in ("actor", "reference")},
            algorithm=AlgorithmSpec(estimator="group_norm"),
        )


class HalfEngine:
    """Answers every second prompt with five tokens, and fails on the others."""

    def __init__(self, failing: int) -> None:
        self.failing = failing

    async def generate(self, token_ids, sampling):
        if token_ids[0] % 2 < self.failing:
            raise EngineError("the GPU is on fire")
        return [Completion(np.arange(5), np.full(5, -1.0), FinishReason.STOP, 0)] * sampling.num_samples


class Listener(SilentObserver):
    """Keeps the warnings, and what samples were shown."""

    def __init__(self) -> None:
        self.warnings: list[str] = []
        self.titles: list[str] = []

    def samples(self, title: str, samples: object) -> None:
        self.titles.append(title)

    def warning(self, text: str) -> None:
        self.warnings.append(text)


@pytest.fixture
def make_run(tmp_path):
    job = tiny_job(str(tiny_model_dir(tmp_path / "model")), tmp_path, eval_prompts=())
    prompts = tuple(
        dataclasses.replace(prompt, token_ids=np.array([index, 1])) for index, prompt in enumerate(job.prompts)
    )
    # All sixteen prompts a step, eight of them even.
    batch = dataclasses.replace(job.batch, rollout_batch_size=16)
    job = dataclasses.replace(job, prompts=prompts, batch=batch)
    recorder, listener, runs = Recorder(job.save_path, ""), Listener(), []

    def make(failing: int) -> tuple[PlacedRun, Listener]:
        runs.append(PlacedRun(job, [], [], recorder, listener, 0.0))
        runs[-1]._engines = [HalfEngine(failing)]
        return runs[-1], listener

    yield make
    for run in runs:
        run.close()
    recorder.close()


def test_groups_that_an_engine_failed_are_said_with_the_reason_and_wrote_no_tokens(make_run):
    run, listener = make_run(failing=1)
    with run._timeline.phase("sync"):
        pass
    groups = run.generate(1)
    assert len(groups) == 8
    assert len(listener.warnings) == 1
    assert "step1: 8 of 16 rollout groups failed" in listener.warnings[0] and "on fire" in listener.warnings[0]
    run._ledger = dataclasses.replace(run._ledger, num_trained=32)
    run.record(1)
    [line] = map(json.loads, run._recorder.path("metrics").read_text().splitlines())
    assert (line["samples/generated"], line["samples/failed"], line["samples/trained"]) == (64, 32, 32)
    # Eight groups of four wrote five tokens each; what the failed ones would have written does not count.
    assert line["throughput/response_tokens"] * line["time/step"] == pytest.approx(8 * 4 * 5)
    assert "time/sync" not in line


def test_step_in_which_every_group_fails_ends_the_run_with_the_engines_words(make_run):
    run, _ = make_run(failing=2)
    with pytest.raises(EngineError, match="on fire"):
        run.generate(1)


def test_rollout_that_no_rank_trained_is_missed(make_run):
    run, _ = make_run(failing=0)
    run.generate(1)
    run._ledger = dataclasses.replace(run._ledger, num_trained=63.5)
    with pytest.raises(RlhfError, match=r"64 generated, 63\.5 trained"):
        run.record(1)


def test_steps_without_rewards_teach_nothing_and_the_third_in_a_row_ends_the_run(make_run, tmp_path):
    (tmp_path / "vowels.py").write_text("def reward_func(queries, prompts, labels):\n    raise OSError('no disk')\n")
    run, listener = make_run(failing=0)
    for _ in range(2):
        assert not run.can_learn(run.generate(1))
        run.record(1)
    assert len(listener.warnings) == 2
    assert "no disk" in listener.warnings[0]
    lines = [json.loads(line) for line in run._recorder.path("metrics").read_text().splitlines()]
    assert [(line["samples/generated"], line["samples/failed"], line["samples/trained"]) for line in lines] == [
        (64, 64, 0),
        (64, 64, 0),
    ]
    groups = run.generate(1)
    with pytest.raises(RewardError, match="3 steps in a row: 0 rollouts have a reward"):
        run.can_learn(groups)


def test_first_and_last_samples_are_shown_when_there_are_no_held_out_prompts(make_run):
    run, listener = make_run(failing=0)
    for step in (1, 2, 3):
        run.generate(step)
    assert listener.titles == ["Samples of step 1", "Samples of step 3"]


def test_metrics_that_are_not_finite_are_null_in_the_file(make_run):
    run, _ = make_run(failing=0)
    run._recorder.metrics(1, {"policy/loss": float("nan"), "value/loss": 1.0})
    assert json.loads(run._recorder.path("metrics").read_text()) == {"step": 1, "policy/loss": None, "value/loss": 1.0}
