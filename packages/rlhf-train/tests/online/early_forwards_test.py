"""Forward passes on complete groups while others generate: whose numbers they are, and what they do not depend on."""

import dataclasses
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from online_fakes import BrokenReward, Forgets, LocalRanks, SpreadReward
from rlhf_data.errors import ConfigError
from rlhf_data.records import Episode, FinishReason, Prompt, RolloutGroup, Verdict, VerdictKind
from rlhf_models.testing import tiny_model_dir, tiny_reward_model_dir
from rlhf_train.algorithms.table import make_algorithm
from rlhf_train.batching import RankPlan
from rlhf_train.cluster.placement import PlacementRequest, plan_placement
from rlhf_train.generation.reuse import ReuseSpec
from rlhf_train.generation.run_spec import AsyncSpec, DynamicSampling
from rlhf_train.learning.columns import RolloutColumns
from rlhf_train.learning.forwards import BlockForwards
from rlhf_train.learning.learner import Learner
from rlhf_train.learning.rank_actor import RankActor
from rlhf_train.learning.ranks import RankSet
from rlhf_train.online import train_and_save
from trainer_testing import lone_worker, random_rollouts, tiny_job

pytestmark = pytest.mark.usefixtures("results_stand_for_references")

NUM_GROUPS = 8
TEMPERATURE = 0.7


@pytest.fixture(scope="module")
def groups():
    """Eight groups of four; a rollout of the third has no reward, and the length limit ended others."""
    rollouts = random_rollouts(4 * NUM_GROUPS, vocab_size=512, seed=3)
    made = []
    for number in range(NUM_GROUPS):
        group_id = f"step1/{number:05d}"
        episodes = []
        for index, rollout in enumerate(rollouts[4 * number : 4 * number + 4]):
            name = f"{group_id}/{index}"
            verdict = Verdict(VerdictKind.CRASH, detail="no disk") if number == 2 and index == 1 else rollout.verdict
            reason = FinishReason.LENGTH if index == 3 else FinishReason.STOP
            changes = {"rollout_id": name, "group_id": group_id, "verdict": verdict, "finish_reason": reason}
            episodes.append(Episode(name, group_id, (dataclasses.replace(rollout, **changes),)))
        made.append(RolloutGroup(group_id, Prompt(f"p{number}", np.array([1]), "p"), tuple(episodes)))
    return made


@pytest.fixture(scope="module")
def job(tmp_path_factory):
    folder = tmp_path_factory.mktemp("job")
    job = tiny_job(str(tiny_model_dir(folder / "model")), folder, early_forwards=True)
    reference = dataclasses.replace(job.models["reference"], path=str(tiny_model_dir(folder / "other", seed=1)))
    algorithm = make_algorithm(kl_coef=0.05, bootstrap_truncated=True)
    # Blocks of two groups.
    batch = dataclasses.replace(job.batch, micro_rollout_batch_size=8)
    sampling = dataclasses.replace(job.sampling, temperature=TEMPERATURE)
    critic = dataclasses.replace(job.models["critic"], path=str(tiny_reward_model_dir(folder / "critic", seed=2)))
    models = {**job.models, "reference": reference, "critic": critic}
    return dataclasses.replace(job, models=models, algorithm=algorithm, batch=batch, sampling=sampling)


@pytest.fixture(scope="module")
def worker(job):
    return lone_worker(job.models, job.algorithm, temperature=TEMPERATURE)


def scored_of(groups):
    return [rollout for group in groups for rollout in group.rollouts if rollout.verdict.reward is not None]


def columns_after(job, worker, groups, settled):
    """Return the columns by rollout id, the metrics, and the ranks, after these groups were settled in this order."""
    ranks = LocalRanks(tuple(job.models), worker)
    learner = Learner(job, [ranks])
    for number in settled:
        learner.forwards.settle(groups[number].group_id, groups[number])
    learner.deal(scored_of(groups), 1)
    metrics = learner.fill_columns()
    names = ["old_logprobs", "ref_logprobs", "values", "last_values"]
    return worker.export_columns(names), metrics, ranks


def test_numbers_are_those_of_each_rollout_in_float64(job, worker, groups):
    columns, _, _ = columns_after(job, worker, groups, range(NUM_GROUPS))
    models = {
        name: AutoModelForCausalLM.from_pretrained(job.models[role].path, dtype=torch.float64).eval()
        for name, role in (("old_logprobs", "actor"), ("ref_logprobs", "reference"))
    }
    critic = AutoModelForSequenceClassification.from_pretrained(job.models["critic"].path, dtype=torch.float64).eval()
    rollouts = scored_of(groups)
    names = {rollout.rollout_id for rollout in rollouts}
    assert all(by_id.keys() == names for by_id in columns.values())
    for rollout in rollouts:
        ids = torch.tensor(np.concatenate([span.token_ids for span in rollout.spans]).astype(np.int64))
        is_policy = np.concatenate([[span.source.value == "policy"] * len(span.token_ids) for span in rollout.spans])
        for name, model in models.items():
            with torch.no_grad():
                logits = model(ids[None]).logits[0, :-1] / TEMPERATURE
            expected = logits.log_softmax(-1)[torch.arange(len(ids) - 1), ids[1:]].numpy()
            found = columns[name][rollout.rollout_id]
            assert np.abs(np.where(is_policy[1:], expected, 0.0) - found[1:]).max() < 2e-5, name
        with torch.no_grad():
            after = critic.score(critic.model(ids[None]).last_hidden_state)[0, :, 0].numpy()
        assert np.abs(after).min() > 1e-5
        values = np.where(is_policy, np.concatenate([[0.0], after[:-1]]), 0.0)
        assert np.abs(values - columns["values"][rollout.rollout_id]).max() < 2e-5
        last = np.zeros(len(ids))
        last[np.flatnonzero(is_policy)[-1]] = after[-1] * (rollout.finish_reason is FinishReason.LENGTH)
        assert np.abs(last - columns["last_values"][rollout.rollout_id]).max() < 2e-5


def test_neither_the_order_of_completion_nor_the_time_changes_a_number(job, worker, groups):
    orders = [[], range(NUM_GROUPS), [7, 0, 5, 2, 3, 6, 1, 4], [6, 1, 4]]
    runs = [columns_after(job, worker, groups, order) for order in orders]
    plans = [{ids: plan for _, ids, plan in ranks.blocks} for *_, ranks in runs]
    for (columns, metrics, ranks), own in zip(runs, plans, strict=True):
        assert len(ranks.blocks) == len(own) == 4  # none twice
        assert own == plans[0]
        assert metrics["policy/entropy"] == runs[0][1]["policy/entropy"]
        for name, by_id in columns.items():
            assert all(np.array_equal(values, runs[0][0][name][key]) for key, values in by_id.items()), name
    shares = [metrics["throughput/early_forward_share"] for _, metrics, _ in runs]
    assert shares == [0.0, 1.0, 1.0, 0.0]  # 6, 1 and 4 complete no block
    seconds = [metrics["throughput/early_forward_seconds"] for _, metrics, _ in runs]
    assert [value > 0 for value in seconds] == [False, True, True, False]


def test_numbers_and_metrics_are_those_of_passes_over_the_whole_batch(job, worker, groups):
    columns, metrics, _ = columns_after(job, worker, groups, [0, 1, 7])
    assert metrics["throughput/early_forward_share"] == 8 / 31
    ranks = LocalRanks(tuple(job.models), worker)
    learner = Learner(dataclasses.replace(job, early_forwards=False), [ranks])
    learner.deal(scored_of(groups), 1)
    expected = learner.fill_columns()
    assert not ranks.blocks
    assert metrics["policy/entropy"] == pytest.approx(expected["policy/entropy"], rel=1e-6)
    assert {name for name in metrics if not name.startswith("throughput/")} == set(expected)
    for name, by_id in worker.export_columns(list(columns)).items():
        assert max(np.abs(values - columns[name][key]).max() for key, values in by_id.items()) < 1e-5, name


def test_block_is_sent_when_its_last_group_is_settled_and_holds_those_that_are_trained(job, worker, groups):
    ranks = LocalRanks(tuple(job.models), worker)
    forwards = BlockForwards(job, [ranks])
    names = [group.group_id for group in groups]
    forwards.settle(names[1], groups[1])
    forwards.settle(names[4], None)
    assert not ranks.blocks
    forwards.settle(names[5], None)  # nothing is left of this block
    assert not ranks.blocks
    forwards.settle(names[0], None)
    forwards.settle(names[3], groups[3])
    forwards.settle(names[2], groups[2])
    sent = [sorted(ids) for _, ids, _ in ranks.blocks]
    assert sent == [[f"{names[1]}/{i}" for i in range(4)], [f"{names[n]}/{i}" for n, i in
                    ((2, 0), (2, 2), (2, 3), (3, 0), (3, 1), (3, 2), (3, 3))]]  # fmt: skip
    # What is trained decides: of the first block nothing is, of the second one half, and the last was never settled.
    rollouts = scored_of([groups[3], groups[6]])
    worker.load_rollouts(RolloutColumns.of(rollouts, [0.0] * len(rollouts)), RankPlan((), (), ()))
    forwards.want(rollouts)
    assert [sorted(ids) for _, ids, _ in ranks.blocks[2:]] == [
        [f"{names[3]}/{i}" for i in range(4)],
        [f"{names[6]}/{i}" for i in range(4)],
    ]
    metrics = forwards.fill_columns()
    assert metrics["throughput/early_forward_share"] == metrics["throughput/early_forward_seconds"] == 0.0
    # Nothing of one step is left in the next.
    forwards.settle("step2/00001", groups[1])
    assert len(ranks.blocks) == 4
    # A step from which nothing was learned wanted nothing.
    forwards.settle("step3/00000", groups[0])
    assert len(ranks.blocks) == 4
    forwards.settle("step3/00001", groups[1])
    assert len(ranks.blocks) == 5


@pytest.mark.parametrize(
    ("changes", "num_ranks", "size"),
    [
        ({"micro_rollout_batch_size": 8}, 1, 2),
        ({"micro_rollout_batch_size": 11}, 1, 2),
        ({"micro_rollout_batch_size": 3}, 1, 1),
        ({"micro_rollout_batch_size": 16}, 2, 4),
        ({"micro_rollout_batch_size": 16}, 3, 2),  # 8 // 3
        ({"micro_rollout_batch_size": 16}, 9, 1),
        ({"micro_rollout_batch_size": 1, "micro_batch_tokens": 64 * 13}, 1, 3),  # 13 of the longest, in fours
        ({"micro_batch_tokens": 32}, 1, 1),
    ],
)
def test_blocks_fill_a_pass_and_leave_some_for_each_rank(job, groups, changes, num_ranks, size):
    job = dataclasses.replace(job, batch=dataclasses.replace(job.batch, **changes))
    sent = []
    ranks = RankSet(("actor",), range(1))
    ranks.start_on = lambda rank, method, *arguments: sent.append(arguments) or (None, None)
    # Models are in sets of different sizes, and have the same blocks.
    other = RankSet(("reference", "critic"), range(num_ranks))
    other.start_on = lambda *arguments: (None, None)
    forwards = BlockForwards(job, [ranks, other])
    for group in groups[: size - 1]:
        forwards.settle(group.group_id, group)
    assert not sent
    forwards.settle(groups[size - 1].group_id, groups[size - 1])
    [(roles, names, columns, plan)] = sent
    assert (roles, names) == (["actor"], ["old_logprobs"])
    assert len(columns.rollout_ids) == len(scored_of(groups[:size]))
    assert columns.lengths.tolist() == sorted(columns.lengths, reverse=True) or "micro_batch_tokens" in changes
    # The same bound as that of the update, from lengths that nothing has yet.
    expected = {64 * 13: 12 * 32, 32: 32}.get(changes.get("micro_batch_tokens"))
    rows = max(8, changes.get("micro_rollout_batch_size", 8))
    assert plan.max_pass_tokens == (expected or 12 * rows)


def test_update_and_blocks_decide_by_the_same_bound_how_to_compute_logprobs(job, worker, groups):
    ranks = LocalRanks(tuple(job.models), worker)
    learner = Learner(job, [ranks])
    learner.deal(scored_of(groups), 1)
    assert {plan.max_pass_tokens for *_, plan in ranks.blocks} == {worker._plan.max_pass_tokens} == {12 * 8}


def test_ranks_get_blocks_of_about_as_many_tokens(job, worker, groups):
    ranks = LocalRanks(tuple(job.models), worker, count=2)
    job = dataclasses.replace(job, batch=dataclasses.replace(job.batch, micro_rollout_batch_size=1))
    forwards = BlockForwards(job, [ranks])
    for step in (1, 2):  # counted anew in each step
        tokens = [0, 0]
        for group in groups:
            least = tokens.index(min(tokens))
            forwards.settle(group.group_id, group)
            rank, *_ = ranks.blocks[-1]
            assert rank == least
            tokens[rank] += sum(r.num_tokens for r in scored_of([group]))
        assert len(ranks.blocks) == step * NUM_GROUPS
        forwards.want(scored_of(groups))


def test_run_sends_blocks_before_generation_ends_and_only_those_that_are_trained(make_run):
    run = make_run(SpreadReward(), early_forwards=True, dynamic_sampling=DynamicSampling())
    train_and_save(run.job, run.controller, run.recorder)
    # Sixteen prompts of four rollouts, in blocks of four prompts. Those of odd prompts are left out.
    assert len(run.world.rollouts) == 3
    ids = [rollout_id for block in run.world.blocks for rollout_id in block]
    assert sorted(ids) == sorted(rollout.rollout_id for dealt in run.world.rollouts for rollout in dealt)
    assert not any(entry.startswith("run_model") for entry in run.world.log)
    start = run.world.log.index("load_rollouts")
    assert run.world.log[:start].count("run_block actor critic reference") >= 4
    assert run.world.log[start + 1 : start + 3] == ["adopt_columns", "assign_advantages"]
    lines = [line for line in run.lines() if "time/step" in line]
    assert all(0.5 <= line["throughput/early_forward_share"] <= 1.0 for line in lines)


def test_answers_of_earlier_steps_are_in_the_blocks_that_are_sent_before_generation_ends(make_run):
    run = make_run(Forgets(), early_forwards=True, reuse=ReuseSpec(reuse_solved=99))
    train_and_save(run.job, run.controller, run.recorder)
    ids = [rollout_id for block in run.world.blocks for rollout_id in block]
    assert sorted(ids) == sorted(rollout.rollout_id for dealt in run.world.rollouts for rollout in dealt)
    assert sum(rollout_id.endswith("/reused") for rollout_id in ids) == 2 * 16  # each prompt in the steps 2 and 3


def test_failed_rewards_and_groups_enter_no_block(make_run):
    run = make_run(BrokenReward(), early_forwards=True)
    run.world.failing = 1
    assert run.step(1)
    ids = [rollout_id for block in run.world.blocks for rollout_id in block]
    assert len(ids) == len(set(ids)) == 8  # one of four samples of every second prompt
    assert sorted(ids) == sorted(rollout.rollout_id for rollout in run.world.rollouts[0])


def test_step_from_which_nothing_is_learned_leaves_no_groups_and_no_blocks_behind(make_run):
    run = make_run(SpreadReward(), early_forwards=True)
    forwards = run.controller.learner.forwards
    run.controller.start()
    assert run.step(1)
    run.world.engine_version = 0  # the groups are complete, and too old to be trained
    run.controller.generate(2)
    assert len(run.world.blocks) == 8 and len(forwards._settled) == len(forwards._blocks) == 4
    assert not run.controller.can_learn()
    assert not forwards._settled and not forwards._blocks
    run.world.engine_version = run.controller.learner.policy_version
    assert run.step(3)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"asynchronous": AsyncSpec(max_staleness=1)}, "``asynchronous`` changes"),
        ({"trainer_sleep": True}, "``trainer_sleep``"),
        ({"enable_sleep": True}, "``enable_sleep``"),
        ({"reference": {"offload": True}}, "``ModelSpec.offload``"),
        ({"reference": {"zero_stage": 3}}, "``zero_stage=3``"),
        ({"actor": {"sequence_parallel_size": 2, "packing": True}}, "``sequence_parallel_size``"),
        ({"actor": {"tensor_parallel_size": 2}}, "``tensor_parallel_size``"),
        ({"actor": {"expert_parallel_size": 2}}, "``expert_parallel_size``"),
    ],
)
def test_what_cannot_run_early_is_refused(job, changes, message):
    models = dict(job.models)
    fields = {}
    for name, value in changes.items():
        if name in models:
            models[name] = dataclasses.replace(models[name], **value)
        elif name == "enable_sleep":
            fields["engine"] = dataclasses.replace(job.engine, enable_sleep=value)
        else:
            fields[name] = value
    if "actor" in changes:
        fields["plan"] = plan_placement(PlacementRequest(ranks=dict.fromkeys(models, 2), colocate_all_models=True), [0])
        models = {role: dataclasses.replace(spec, **changes["actor"]) for role, spec in models.items()}
    with pytest.raises(ConfigError, match=message):
        dataclasses.replace(job, models=models, **fields)
    dataclasses.replace(job, early_forwards=False, models=models, **fields)


def test_call_of_one_rank_gives_two_references():
    calls = []

    def remote(*arguments):
        calls.append(arguments)
        return "columns", "report"

    method = SimpleNamespace(options=lambda **options: calls.append(options) or SimpleNamespace(remote=remote))
    ranks = RankSet(("actor",), [None, SimpleNamespace(run_block=method)])
    assert ranks.start_on(1, RankActor.run_block, 1, 2) == ("columns", "report")
    assert calls == [{"num_returns": 2}, (1, 2)]
