"""The controller's accounts, with engines of this process and no trainers."""

import dataclasses
import json
import math

import numpy as np
import pytest

from rlhf_data.errors import ConfigError, EngineError, RewardError, RlhfError
from rlhf_data.records import FinishReason, Verdict, VerdictKind
from rlhf_data.sampler import EpochSampler
from rlhf_models.testing import tiny_model_dir
from rlhf_rollout.protocols import Completion
from rlhf_train.algorithms import make_algorithm
from rlhf_train.online.cluster import Processes
from rlhf_train.online.controller import PlacedRun
from rlhf_train.online.generation import make_reward
from rlhf_train.online.job import DynamicSampling
from rlhf_train.online.rewards import RewardShaper
from rlhf_train.run.best_model import BestModel
from rlhf_train.run.metrics import Sum
from rlhf_train.run.observer import Observer
from rlhf_train.run.recorder import Recorder
from trainer_testing import tiny_job


def test_online_job_plan_without_a_place_for_a_model_is_refused(tmp_path):
    job = tiny_job("model", tmp_path)
    with pytest.raises(ConfigError, match="places for actor, critic, reference, the models are actor, reference"):
        dataclasses.replace(
            job,
            models={role: job.models[role] for role in ("actor", "reference")},
            algorithm=make_algorithm("group_norm"),
        )


class HalfEngine:
    """Answers every second prompt with five tokens, and fails on the others."""

    def __init__(self, failing: int) -> None:
        self.failing = failing

    async def generate(self, token_ids, sampling, *, timeout_s=None):
        if token_ids[0] % 2 < self.failing:
            raise EngineError("the GPU is on fire")
        return [Completion.single(np.arange(5), np.full(5, -1.0), FinishReason.STOP, 0)] * sampling.num_samples


class Listener(Observer):
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
        reward = make_reward(job, [], recorder.folder / "reward.log")
        runs.append(
            PlacedRun(
                job,
                Processes([], [], []),
                reward,
                RewardShaper(job.reward, max_tokens=job.sampling.max_tokens),
                recorder,
                listener,
                0.0,
            )
        )
        runs[-1]._generation.engines = [HalfEngine(failing)]
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
    with pytest.raises(RewardError, match=r"3 steps in a row: no rollout has a reward.*no disk"):
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


class SpreadReward:
    """Tells the samples of even prompts apart, gives all samples of odd ones the same."""

    async def score(self, prompt, rollouts):
        first = 1.0 if prompt.token_ids[0] % 2 == 0 else 0.0
        rewards = [first, *[0.0] * (len(rollouts) - 1)]
        return [Verdict(VerdictKind.OK if reward else VerdictKind.WRONG, reward) for reward in rewards]

    async def close(self):
        pass


@pytest.fixture
def dynamic_run(make_run):
    """Half of the sixteen prompts are worth training; a step wants eight groups and may draw `max_batches` times it."""

    def make(**dynamic) -> tuple[PlacedRun, Listener]:
        run, listener = make_run(failing=0)
        batch = dataclasses.replace(run._job.batch, rollout_batch_size=8)
        run._job = dataclasses.replace(run._job, batch=batch, dynamic_sampling=DynamicSampling(**dynamic))
        run._sampler = EpochSampler(16, 8, seed=3)
        run._generation._reward = SpreadReward()
        return run, listener

    return make


def test_dynamic_sampling_refills_until_the_batch_is_full_and_counts_what_it_drew(dynamic_run):
    run, listener = dynamic_run(max_batches=10)
    groups = run.generate(1)
    assert len(groups) == 8
    assert all(group.prompt.token_ids[0] % 2 == 0 for group in groups)
    drawn, ledger = run._sampler.num_seen, run._ledger
    assert 8 < drawn <= 16
    assert (ledger.num_generated, ledger.num_filtered, ledger.num_reward_failed) == (4 * drawn, 4 * (drawn - 8), 0)
    assert run.can_learn(groups) and not listener.warnings
    run._ledger = dataclasses.replace(ledger, num_trained=32)
    run.record(1)
    [line] = map(json.loads, run._recorder.path("metrics").read_text().splitlines())
    assert line["samples/filtered"] == 4 * (drawn - 8)
    assert line["rollout/kept_groups"] == pytest.approx(8 / drawn)
    assert len(run._recorder.path("rollouts").read_text().splitlines()) == 4 * drawn


def test_dynamic_sampling_goes_on_with_what_it_has_at_its_cap(dynamic_run):
    run, listener = dynamic_run(max_batches=1)
    groups = run.generate(1)
    assert 0 < len(groups) < 8
    assert run.can_learn(groups)
    assert f"only {len(groups)} of 8 rollout groups are worth training" in listener.warnings[0]


def test_dynamic_sampling_that_keeps_nothing_teaches_nothing_and_accounts_for_all(dynamic_run):
    run, listener = dynamic_run(max_batches=2, reward_range=(0.9, 1.0))  # group means are 0 and 1/4
    groups = run.generate(1)
    assert groups == [] and not run.can_learn(groups)
    run.record(1)
    [line] = map(json.loads, run._recorder.path("metrics").read_text().splitlines())
    assert (line["samples/generated"], line["samples/filtered"], line["samples/trained"]) == (64, 64, 0)
    assert "nothing is learned from this step: all 64 scored rollouts" in listener.warnings[0]


def test_dynamic_sampling_that_keeps_nothing_three_times_in_a_row_ends_the_run_well(dynamic_run):
    run, listener = dynamic_run(max_batches=1, reward_range=(0.9, 1.0))
    for exhausted in (False, False, True):
        assert not run.can_learn(run.generate(1))
        assert run.is_exhausted is exhausted
        run.record(1)
    assert "the run ends here" in listener.warnings[-1]


class Ranks:
    """A process group that answers what a test tells it to."""

    roles = ("actor", "critic", "reference")

    def __init__(self, **answers) -> None:
        self.answers = answers
        self.calls: list[tuple] = []

    def start(self, method, *args, **kwargs):
        self.calls.append((*args, kwargs))
        return [self.answers[args[1]]]


@pytest.fixture
def ranked_run(make_run, monkeypatch):
    monkeypatch.setattr("rlhf_train.online.controller.wait", lambda references: references)

    def make(actor_passes=64, critic_passes=64, **changes) -> tuple[PlacedRun, Ranks]:
        run, _ = make_run(failing=0)
        run._job = dataclasses.replace(run._job, **changes)
        run._kl_coef = run._job.algorithm.kl_coef
        answers = {
            "actor": {"policy/rollout_passes": Sum(actor_passes)},
            "critic": {"value/rollout_passes": Sum(critic_passes)},
        }
        ranks = Ranks(**answers)
        run._group_of = dict.fromkeys(ranks.roles, ranks)
        return run, ranks

    return make


def test_frozen_actor_is_not_updated_and_its_weights_keep_their_version(ranked_run):
    run, ranks = ranked_run(num_frozen_steps=1, algorithm=make_algorithm(kl_target=0.5, kl_horizon=64))
    run.generate(1)
    run._metrics["kl/reference"] = 0.0
    run.update(1)
    assert [call[1] for call in ranks.calls] == ["critic"]
    assert run._kl_coef == 0.01  # the KL of a policy that has not moved tells nothing
    assert run._policy_version == 0 and run._ledger.num_trained == 64
    run._synced_version = 0
    run.sync_weights()  # would ask the ranks' group for handles that it does not have
    run.update(2)
    assert [call[1] for call in ranks.calls] == ["critic", "critic", "actor"]
    assert run._policy_version == run._job.batch.num_updates


def test_rollouts_that_only_the_critic_missed_are_missed(ranked_run):
    run, _ = ranked_run(critic_passes=60)
    run.generate(1)
    run.update(1)
    with pytest.raises(RlhfError, match="64 generated, 60 trained"):
        run.record(1)


def test_adaptive_kl_coefficient_follows_the_kl_of_its_own_batch(ranked_run):
    spec = make_algorithm(kl_coef=0.1, kl_target=0.5, kl_horizon=640)
    run, ranks = ranked_run(algorithm=spec)
    run.generate(1)
    run._metrics["kl/reference"] = 5.0  # ten times the target: the error is held at 0.2
    run.update(1)
    assert ranks.calls[-1][-1]["kl_coef"] == 0.1 == run._metrics["kl/coef"]
    # 64 rollouts of a horizon of 640: 0.1 exp(0.2 x 64 / 640)
    assert run._kl_coef == pytest.approx(0.1 * math.exp(0.02))
    run._metrics["kl/reference"] = 0.45  # 10 % below: the error is -0.1
    run.update(2)
    assert run._kl_coef == pytest.approx(0.1 * math.exp(0.02 - 0.01))


def test_reward_that_fails_under_dynamic_sampling_ends_the_run_with_its_own_words(dynamic_run):
    class Broken(SpreadReward):
        async def score(self, prompt, rollouts):
            scored = await super().score(prompt, rollouts)
            return [scored[-1], *[Verdict(VerdictKind.TIMEOUT, detail="server down")] * (len(rollouts) - 1)]

    run, listener = dynamic_run(max_batches=1)
    run._generation._reward = Broken()
    for _ in range(2):
        assert not run.can_learn(run.generate(1))
        assert (run._ledger.num_filtered, run._ledger.num_reward_failed) == (8, 24)
        run.record(1)
    assert "server down" in listener.warnings[0]
    groups = run.generate(1)
    with pytest.raises(RewardError, match=r"3 steps in a row: .*server down"):
        run.can_learn(groups)


def test_step_with_fewer_rollouts_takes_fewer_optimizer_steps_of_the_usual_size(ranked_run):
    run, _ = ranked_run(actor_passes=20, critic_passes=20)
    run.generate(1)
    run.update(1)
    assert run._job.batch.train_batch_size == 16
    assert run._policy_version == 2  # 16 rollouts and 4


def test_evaluation_without_the_metric_of_the_best_model_is_warned_of(make_run):
    run, listener = make_run(failing=0)
    run._job = dataclasses.replace(run._job, eval_prompts=run._job.prompts[:2])
    run._best = BestModel("eval/reward", run._recorder.path("best model"))

    class Silent(SpreadReward):
        async def score(self, prompt, rollouts):
            return [Verdict(VerdictKind.CRASH)] * len(rollouts)

    run._generation._reward = Silent()
    run.evaluate(0)
    assert "has no eval/reward" in listener.warnings[0]
    assert not run._recorder.path("best model").exists()
