"""The training side's traffic: what is dealt to which rank, which columns go where, and who sends weights to whom."""

import asyncio
import dataclasses
import threading

import pytest

from online_fakes import LoggedRanks
from rlhf_data.errors import ConfigError
from rlhf_train.algorithms.token_specs import CorrectionSpec, EntropySpec
from rlhf_train.cluster.places import Place, PlacementPlan, ProcessPlan
from rlhf_train.generation.run_spec import AsyncSpec
from rlhf_train.learning.learner import Learner
from rlhf_train.learning.worker import TrainWorker
from rlhf_train.run.metrics import Mean, Sum
from trainer_testing import random_rollouts, tiny_job

pytestmark = pytest.mark.usefixtures("results_stand_for_references")


@pytest.fixture
def job(tmp_path):
    return tiny_job("model", tmp_path)


def test_columns_go_between_models_in_processes_apart(job):
    log: list = []
    job = dataclasses.replace(job, algorithm=dataclasses.replace(job.algorithm, bootstrap_truncated=True))
    actor, critic, reference = (
        LoggedRanks(log, "actor", count=2),
        LoggedRanks(log, "critic", count=3),
        LoggedRanks(log, "reference"),
    )
    learner = Learner(job, [actor, critic, reference])
    learner.fill_columns()
    # All models are started before any is waited for.
    assert log == [
        (("actor",), "actor"),
        (("reference",), "reference"),
        (("critic",), "critic"),
        (("reference",), ["ref_logprobs"]),
        (("actor",), "part 0"),
        (("critic",), ["values", "last_values"]),
        (("actor",), "part 0", "part 1", "part 2"),
    ]
    log.clear()
    learner.assign_advantages()
    assert log == [
        (("actor",), learner.kl_coef),
        (("actor",), ["returns", "trained"]),
        (("critic",), "part 0", "part 1"),
    ]


def test_teachers_logprobs_go_to_the_actor(job):
    log: list = []
    learner = Learner(job, [LoggedRanks(log, "actor", "critic", "reference"), LoggedRanks(log, "teacher", count=2)])
    learner.fill_columns()
    assert [entry for entry in log if entry[0] == ("teacher",) or entry[1:] == ("part 0", "part 1")] == [
        (("teacher",), "teacher"),
        (("teacher",), ["teacher_logprobs"]),
        (("actor", "critic", "reference"), "part 0", "part 1"),
    ]


def test_models_in_the_same_processes_exchange_nothing(job):
    log: list = []
    learner = Learner(job, [LoggedRanks(log, "actor", "critic", "reference")])
    learner.fill_columns()
    learner.assign_advantages()
    assert log == [(("actor", "critic", "reference"), part) for part in ("actor", "reference", "critic", 0.01)]


def test_weight_of_the_entropy_bonus_adapts_step_by_step_and_is_restored(job):
    algorithm = dataclasses.replace(job.algorithm, entropy=EntropySpec(target=0.5, coef_step=0.01))
    job = dataclasses.replace(job, algorithm=algorithm, num_frozen_steps=1)
    ranks = LoggedRanks([], "actor", "critic", "reference")
    learner, given = Learner(job, [ranks]), []
    start = ranks.start
    entropies = iter((0.1, 0.4, 0.3, 0.6, 0.2))  # the actor is frozen in the first step

    def measured(method, *arguments, **options):
        if method is TrainWorker.run_model:
            return [{"policy/entropy": Mean(next(entropies), 1.0)} if arguments == ("actor",) else {}]
        if method is TrainWorker.update and arguments == ("actor",):
            given.append(options["entropy_coef"])
        return start(method, *arguments, **options)

    ranks.start = measured
    for step in range(1, 6):
        learner.fill_columns()
        metrics, _ = learner.update(step)
        assert metrics.get("entropy/coef") == (given[-1] if step > 1 else None)
    assert given == pytest.approx([0.0, 0.01, 0.0, 0.01])
    resumed = Learner(job, [ranks])
    resumed.restore(learner.state())
    assert resumed.entropy_coef == learner.entropy_coef == pytest.approx(0.02)
    older = learner.state()
    del older["entropy_coef"]
    restored = Learner(job, [ranks])
    restored.restore(older)
    assert (restored.entropy_coef, restored.kl_coef) == (0.0, learner.kl_coef)


def test_columns_without_a_use_are_not_made(job):
    log: list = []
    plain = dataclasses.replace(job.algorithm, old_logprobs="rollout")
    learner = Learner(
        dataclasses.replace(job, algorithm=plain), [LoggedRanks(log, "actor"), LoggedRanks(log, "critic")]
    )
    learner.fill_columns()
    assert log == [(("critic",), "critic"), (("critic",), ["values"]), (("actor",), "part 0")]
    corrected = dataclasses.replace(plain, correction=CorrectionSpec(level="token", mode="mask"))
    job = dataclasses.replace(job, algorithm=corrected)  # compares the engine's log-probs with the actor's
    log.clear()
    Learner(job, [LoggedRanks(log, "actor"), LoggedRanks(log, "critic")]).fill_columns()
    assert log[:2] == [(("actor",), "actor"), (("critic",), "critic")]


def test_every_set_is_dealt_every_rollout_once_with_its_own_number_of_ranks(job):
    log: list = []
    actor, critic = LoggedRanks(log, "actor", "reference", count=2), LoggedRanks(log, "critic", count=3)
    rollouts = random_rollouts(32, vocab_size=64)
    learner = Learner(job, [actor, critic])
    for learner.policy_version in (2, 2, 6):  # two updates, none, and four
        actor.shards.clear()
        critic.shards.clear()
        learner.deal(rollouts, step=2)
    earned = {rollout.rollout_id: rollout.verdict.reward for rollout in rollouts}
    for ranks in (actor, critic):
        assert len(ranks.shards) == len(ranks.handles)
        dealt: dict[str, float] = {}
        for columns, plan, versions in ranks.shards:
            assert (versions, len(plan.mini_batches)) == ((0, 2, 6), 2)
            assert tuple(rollouts[row].rollout_id for row in plan.rows) == columns.rollout_ids
            dealt |= zip(columns.rollout_ids, columns.rewards.tolist(), strict=True)
        assert dealt == pytest.approx(earned)


def test_fill_of_packed_passes_is_a_metric_where_a_limit_of_tokens_would_change_it(job):
    rollouts = random_rollouts(32, vocab_size=64)
    tokens = sum(rollout.num_tokens for rollout in rollouts)

    def fill(size=4, limit=None, **layout):
        batch = dataclasses.replace(job.batch, micro_train_batch_size=size, micro_batch_tokens=limit)
        models = {role: dataclasses.replace(spec, **layout) for role, spec in job.models.items()}
        changed = dataclasses.replace(job, batch=batch, models=models)
        metrics = Learner(changed, [LoggedRanks([], "critic", count=3), LoggedRanks([], "actor")]).deal(
            rollouts, step=1
        )
        return metrics.get("throughput/pass_fill")

    num_passes = 2 * (16 // 4)  # two updates of sixteen rollouts
    assert fill(packing=True) == pytest.approx(tokens / (num_passes * 4 * job.engine.max_model_len))
    assert fill(packing=True, size=16) is None
    assert fill(packing=True, limit=4096) is None
    assert fill(packing=True, share_prompts=True) is None
    assert fill(packing=False) is None


@pytest.mark.parametrize("size", ["sequence_parallel_size", "tensor_parallel_size"])
def test_ranks_that_divide_sequences_or_weights_are_dealt_the_same_rollouts_and_their_columns_go_once(job, size):
    models = {role: dataclasses.replace(spec, packing=True, **{size: 2}) for role, spec in job.models.items()}
    [placed] = job.plan.trainers
    trainers = (dataclasses.replace(placed, places=(Place(),) * 2),)
    job = dataclasses.replace(job, models=models, plan=dataclasses.replace(job.plan, trainers=trainers))
    for role in ("critic", "reference"):
        with pytest.raises(ConfigError, match="all models must divide sequences and weights over as many processes"):
            dataclasses.replace(job, models=models | {role: dataclasses.replace(models[role], **{size: 1})})
    log: list = []
    actor, critic = LoggedRanks(log, "actor", "reference", count=4), LoggedRanks(log, "critic", count=2)
    rollouts = random_rollouts(32, vocab_size=64)
    learner = Learner(job, [actor, critic])
    learner.deal(rollouts, step=1)
    plans = [plan.rows for _, plan, _ in actor.shards]
    assert plans[0] == plans[1] and plans[2] == plans[3]
    assert sorted(plans[0] + plans[2]) == list(range(32))
    assert [sorted(plan.rows) for _, plan, _ in critic.shards] == [list(range(32))] * 2
    log.clear()
    learner.assign_advantages()
    assert log[1:] == [(("actor", "reference"), ["returns", "trained"]), (("critic",), "part 0", "part 2")]


@pytest.mark.parametrize(("mask_stale", "num_kept"), [(None, 128), (3, 128), (200, 202)])
def test_versions_of_the_last_steps_are_kept_and_restored(job, mask_stale, num_kept):
    job = dataclasses.replace(job, algorithm=dataclasses.replace(job.algorithm, mask_stale=mask_stale))
    ranks = LoggedRanks([], "actor", "critic", "reference")
    learner = Learner(job, [ranks])
    for learner.policy_version in range(0, 600, 2):
        learner.deal(random_rollouts(32, vocab_size=64), step=1)
    assert ranks.shards[-1][2] == tuple(range(600 - 2 * num_kept, 600, 2))
    resumed = Learner(job, [ranks])
    resumed.restore(learner.state())
    assert resumed.state() == learner.state()
    for one in (learner, resumed):
        one.policy_version = 600
        one.deal(random_rollouts(32, vocab_size=64), step=1)
    assert ranks.shards[-1][2] == ranks.shards[-2][2] == tuple(range(602 - 2 * num_kept, 602, 2))


@pytest.mark.parametrize(("asynchronous", "names"), [(None, {"b"}), (AsyncSpec(max_staleness=1), {"async/a", "b"})])
def test_metrics_of_asynchronous_training_are_left_out_of_other_runs(job, monkeypatch, asynchronous, names):
    job = dataclasses.replace(job, plan=dataclasses.replace(job.plan, colocated=False), asynchronous=asynchronous)
    ranks = LoggedRanks([], "actor", "critic", "reference")
    monkeypatch.setattr(ranks, "call", lambda *_: [{"async/a": Sum(1.0), "b": Sum(2.0)}])
    assert Learner(job, [ranks]).assign_advantages().keys() == names


def test_order_of_a_deal_differs_by_step_and_seed_and_repeats(job):
    def rows(seed: int, step: int) -> tuple:
        ranks = LoggedRanks([], "actor", "critic", "reference")
        Learner(dataclasses.replace(job, seed=seed), [ranks]).deal(random_rollouts(32, vocab_size=64), step)
        return ranks.shards[0][1].rows

    assert rows(1, 1) == rows(1, 1) != rows(1, 2)
    assert rows(1, 1) != rows(5, 1)


@pytest.mark.parametrize(("max_epochs", "version"), [(1, 2), (3, 3)])
def test_updates_start_side_by_side_and_count_as_the_sum_of_their_ranks(job, max_epochs, version):
    log: list = []
    job = dataclasses.replace(job, batch=dataclasses.replace(job.batch, max_epochs=max_epochs))
    learner = Learner(job, [LoggedRanks(log, "actor", count=8), LoggedRanks(log, "critic", count=9)])
    metrics, num_trained = learner.update(1)
    assert [entry[1] for entry in log] == ["critic", "actor"]
    # Eight and nine ranks had three rollouts each, or one in each of three epochs.
    assert num_trained == 24 / max_epochs
    assert metrics == {"kl/coef": 0.01}
    assert learner.policy_version == version  # 24 rollouts in updates of 16, or 8 in one update per epoch


@pytest.mark.parametrize(
    ("transfer", "targets"),
    [
        ("shared_memory", [{0: "a", 1: "b", 2: "c"}, {}]),
        # Two engines on the first rank's GPU; the third is on both, and both ranks send to it.
        ("ipc", [{0: "a", 1: "b", 2: "c"}, {2: "c"}]),
    ],
)
def test_weights_go_to_the_engines_of_the_same_device_or_all_from_the_first_rank(job, transfer, targets):
    plan = PlacementPlan(
        "cuda", (2,), (ProcessPlan("actor", ("actor", "critic", "reference"), (Place(0, (0,)), Place(0, (1,)))),),
        ProcessPlan("engines", (), (Place(0, (0,)), Place(0, (0,)), Place(0, (0, 1)))), colocated=True,
    )  # fmt: skip
    engine = dataclasses.replace(job.engine, weight_transfer=transfer)
    ranks = LoggedRanks([], "actor", "critic", "reference", count=2)
    learner = Learner(dataclasses.replace(job, plan=plan, engine=engine), [ranks])
    learner.policy_version = 4
    engines = {0: "a", 1: "b", 2: "c"}
    # The larger size of the two ranks, and the failures of both.
    assert asyncio.run(learner.send_weights(engines)) == {2: "full"}
    assert learner.weights_bytes == 1001
    assert ranks.shards == [(engines, 4) for engines in targets]
    ranks.shards.clear()
    asyncio.run(learner.send_weights({2: "c"}))  # one engine that was restarted
    assert ranks.shards == [({number: name for number, name in mine.items() if number == 2}, 4) for mine in targets]


def test_engines_get_no_weights_in_the_middle_of_an_update_of_them(job):
    class Ranks(LoggedRanks):
        def start(self, method, *arguments, **options):
            sending.start()
            sending.join(0.3)  # which does not end before the update
            return super().start(method, *arguments, **options)

    log: list = []
    learner = Learner(job, [Ranks(log, "actor", "reference", count=2)])
    sending = threading.Thread(target=lambda: asyncio.run(learner.send_weights({0: "a"})))
    learner.update(1)
    sending.join(60)
    assert [entry[1] for entry in log] == ["actor", "send_weights"]


def test_sleep_and_peak_memory_are_of_all_sets(job):
    log: list = []
    learner = Learner(job, [LoggedRanks(log, "actor", "reference", count=2), LoggedRanks(log, "critic", count=3)])
    learner.sleep()
    learner.wake_up()
    assert log == [(("actor", "reference"),), (("critic",),)] * 2
    assert learner.peak_memory_bytes() == 21
