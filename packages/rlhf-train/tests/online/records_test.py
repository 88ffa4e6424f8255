"""The trainer's plain data and tensors: specs, jobs, schedules, metrics, experience, ledgers."""

import dataclasses
import json
import pickle
from typing import get_args

import pytest
import torch

from record_testing import make_group, short_rollout
from rlhf_data.errors import ConfigError, RlhfError
from rlhf_data.records import FinishReason, Prompt, Rollout, Span, SpanSource, Verdict, VerdictKind
from rlhf_kernels import PolicyObjective
from rlhf_kernels.objective import PolicyLossName
from rlhf_rollout.engines import EngineSpec
from rlhf_rollout.host import local_gpus
from rlhf_rollout.protocols import SamplingParams
from rlhf_train.algorithms.table import POLICY_LOSSES, AlgorithmSpec, make_algorithm
from rlhf_train.algorithms.token_specs import CorrectionSpec
from rlhf_train.batching import BatchSizes
from rlhf_train.cluster.placement import PlacementRequest, plan_placement
from rlhf_train.engine.protocol import learning_rate_at
from rlhf_train.generation.run_spec import DynamicSampling, RewardSpec
from rlhf_train.generation.summaries import scored, summarize
from rlhf_train.learning.columns import RolloutColumns
from rlhf_train.learning.experience import Experience
from rlhf_train.run.ledger import Ledger
from rlhf_train.run.metrics import Max, Mean, Sum, merge_metrics, on_host, results
from rlhf_train.specs import OptimizerSpec
from trainer_testing import random_rollouts, tiny_job

TOKEN = CorrectionSpec(level="token")
SINGLES = BatchSizes(
    rollout_batch_size=8, n_samples_per_prompt=1, train_batch_size=8, micro_train_batch_size=4,
    micro_rollout_batch_size=4,
)  # fmt: skip


@pytest.mark.parametrize(
    ("estimator", "title", "baseline", "reduction", "whiten", "uses_critic"),
    [
        ("gae", "PPO", "none", "token_mean", True, True),
        ("reinforce", "REINFORCE++", "none", "token_mean", True, False),
        ("reinforce_baseline", "REINFORCE++-baseline", "group_mean", "token_mean", True, False),
        ("group_norm", "GRPO", "group_mean_std", "seq_mean_token_mean", False, False),
        ("dr_grpo", "Dr. GRPO", "group_mean", "seq_mean_token_sum_norm", False, False),
        ("rloo", "RLOO", "leave_one_out", "seq_mean_token_sum", False, False),
        ("lite_ppo", "Lite PPO", "group_mean_batch_std", "token_mean", False, False),
        ("maxrl", "MaxRL", "group_mean_ratio", "seq_mean_token_sum", False, False),
        ("opo", "OPO", "group_mean_by_length", "seq_mean_token_sum", False, False),
        ("remax", "ReMax", "greedy", "seq_mean_token_sum", False, False),
        ("max_at_k", "max@k", "group_max", "seq_mean_token_sum", False, False),
        ("online_dpo", "online DPO", "best_and_worst", "seq_mean_token_sum", False, False),
    ],
)
def test_algorithm_of_an_estimator_has_what_its_paper_says(estimator, title, baseline, reduction, whiten, uses_critic):
    spec = make_algorithm(estimator)
    row = spec.row
    assert (row.name, row.title, row.baseline) == (estimator, title, baseline)
    assert (spec.objective.reduction, row.whiten, row.uses_critic) == (reduction, whiten, uses_critic)
    assert (row.uses_group, row.divides_by_std) == (
        baseline not in ("none", "greedy"),
        whiten or baseline.endswith("_std"),
    )


def test_policy_loss_rows_are_those_of_the_operator():
    assert list(POLICY_LOSSES) == list(get_args(PolicyLossName)) == [row.name for row in POLICY_LOSSES.values()]
    assert [name for name, row in POLICY_LOSSES.items() if row.dual_clip] == ["ppo"]
    assert [name for name, row in POLICY_LOSSES.items() if not row.uses_ratio] == ["reinforce"]


@pytest.mark.parametrize(("use_kl_loss", "loss", "reward"), [(True, 0.3, 0.0), (False, 0.0, 0.3)])
def test_kl_coefficient_weighs_the_loss_or_the_reward(use_kl_loss, loss, reward):
    spec = make_algorithm(kl_coef=0.3, use_kl_loss=use_kl_loss)
    assert (spec.objective.kl_coef, spec.kl_reward_coef) == (loss, reward)
    assert (spec.kl_coef, spec.use_kl_loss, spec.uses_reference) == (0.3, use_kl_loss, True)
    assert not make_algorithm(kl_coef=0).uses_reference


def test_kl_in_the_loss_and_in_the_reward_at_once_is_refused():
    with pytest.raises(ConfigError, match=r"in the loss and in the reward \(0.3 and 0.01\); only one may be above 0"):
        AlgorithmSpec(objective=PolicyObjective(kl_coef=0.3), kl_reward_coef=0.01)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"estimator": "gea"}, "did you mean `gae`"),
        ({"policy_loss": "gsp"}, "did you mean `gspo`"),
        ({"reduction": "token-mean"}, "did you mean `token_mean`"),
        ({"old_logprobs": "recomputed"}, "did you mean `recompute`"),
        ({"kl_estimator": "k4"}, "allowed: k1, k2, k3"),
        ({"gamma": 1.5}, "``gamma`` is 1.5; it must be at least 0 and at most 1"),
        ({"lambd": -0.5}, "``lambd`` is -0.5"),
        ({"clip_low": 1.0}, r"clip_low is 1.0; allowed: in \[0, 1\)"),
        ({"kl_coef": -0.1}, "``kl_reward_coef`` is -0.1; it must be at least 0"),
        ({"kl_coef": -0.1, "use_kl_loss": True}, "kl_coef is -0.1; allowed: >= 0"),
        ({"kl_target": 0.0}, "``kl_target`` is 0.0; it must be above 0"),
        ({"kl_horizon": 0}, "``kl_horizon`` is 0; it must be at least 1"),
        ({"value_clip": 0.0}, "``value_clip`` is 0.0"),
        ({"teacher_coef": -1.0}, "``teacher_coef`` is -1.0; it must be at least 0"),
    ],
)
def test_algorithm_spec_bad_numbers_are_refused(options, message):
    with pytest.raises(ConfigError, match=message):
        make_algorithm(**options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"level": "tokens"}, "did you mean `token`"),
        ({"mode": "masks"}, "did you mean `mask`"),
        ({"low": -0.1}, "``CorrectionSpec.low/high`` is -0.1 2: "),
        ({"low": 2.0}, "0 <= low < high"),
        ({"reject": "mean_k4"}, "did you mean `mean_k[23]`"),
        ({"reject": "mean_k3"}, "``CorrectionSpec.reject_low/reject_high`` is 0 inf: 0 <= low < high < inf is needed"),
    ],
)
def test_correction_spec_bad_options_are_refused(options, message):
    with pytest.raises(ConfigError, match=message):
        CorrectionSpec(**options)


def test_loss_reduction_is_the_given_one_else_the_losses_else_the_estimators():
    assert make_algorithm("dr_grpo").objective.reduction == "seq_mean_token_sum_norm"
    assert make_algorithm("dr_grpo", policy_loss="cispo").objective.reduction == "token_mean"
    assert (
        make_algorithm(policy_loss="cispo", reduction="seq_mean_token_sum").objective.reduction == "seq_mean_token_sum"
    )


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_frozen_steps": 3}, "frozen for 3 of 3 steps"),
        ({"engine": EngineSpec(model="model", adapter_rank=4)}, "adapters of rank 4, and the actor trains none"),
        ({"algorithm": make_algorithm("group_norm")}, "GRPO has no critic"),
        ({"algorithm": make_algorithm(kl_coef=0)}, "if and only if ``kl_coef`` is above 0"),
        ({"algorithm": make_algorithm(teacher_coef=1.0)}, "a teacher is needed if and only if teacher_coef is above 0"),
        ({"reward": RewardSpec(sources=())}, "a run learns from rewards, an agent or a teacher, and has none of them"),
        (
            {"algorithm": make_algorithm(old_logprobs="skip", use_kl_loss=True)},
            "needs one update per step, and there are 2",
        ),
        ({"batch": SINGLES, "dynamic_sampling": DynamicSampling()}, "a group has one sample"),
        (
            {"sampling": SamplingParams(temperature=0.0)},
            "``temperature`` is 0; it must be above 0 for training",
        ),
    ],
)
def test_online_job_that_cannot_work_is_refused(tmp_path, changes, message):
    with pytest.raises(ConfigError, match=message):
        tiny_job("model", tmp_path, **changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_frozen_steps": 1}, r"``num_frozen_steps=1`` trains the critic only, and GRPO \(group_norm\) has none"),
        ({"save_critic": True}, "``save_critic`` needs a critic, and GRPO has none"),
        ({"batch": SINGLES}, r"GRPO \(group_norm\) compares the samples of one prompt"),
    ],
)
def test_online_job_without_a_critic_or_a_group_refuses_what_needs_one(tmp_path, changes, message):
    job = tiny_job("model", tmp_path)
    models = {role: job.models[role] for role in ("actor", "reference")}
    request = PlacementRequest(ranks={"actor": 1, "reference": 1}, colocate_all_models=True)
    plan = plan_placement(request, [local_gpus()])
    changes = {"algorithm": make_algorithm("group_norm"), "models": models, "plan": plan, **changes}
    with pytest.raises(ConfigError, match=message):
        dataclasses.replace(job, **changes)


def test_batch_sizes_that_do_not_divide_are_refused():
    with pytest.raises(ConfigError, match=r"``train_batch_size`` is 24, which does not divide the 32"):
        BatchSizes(
            rollout_batch_size=8, n_samples_per_prompt=4, train_batch_size=24, micro_train_batch_size=4,
            micro_rollout_batch_size=4,
        )  # fmt: skip


@pytest.mark.parametrize("name", [field.name for field in dataclasses.fields(BatchSizes)])
def test_batch_size_of_none_is_refused(name):
    with pytest.raises(ConfigError, match=f"``{name}`` is 0; it must be at least 1"):
        dataclasses.replace(SINGLES, **{name: 0})


def test_largest_pass_is_that_of_the_larger_micro_batch_or_of_the_limit():
    for sizes, largest in (
        (SINGLES, 4 * 10),
        (dataclasses.replace(SINGLES, micro_train_batch_size=6), 6 * 10),
        (dataclasses.replace(SINGLES, micro_rollout_batch_size=9), 8 * 10),  # of all eight rollouts
        (dataclasses.replace(SINGLES, micro_batch_tokens=30), 30),
    ):
        assert sizes.most_pass_tokens(10) == largest


def test_batch_sizes_count_updates_over_epochs():
    sizes = BatchSizes(
        rollout_batch_size=8, n_samples_per_prompt=4, train_batch_size=16, micro_train_batch_size=4,
        micro_rollout_batch_size=4, max_epochs=3,
    )  # fmt: skip
    assert (sizes.num_rollouts, sizes.num_updates) == (32, 6)


@pytest.mark.parametrize(
    ("scheduler", "step", "rate"),
    [
        ("constant", 0, 1 / 3),  # warm-up over 2 steps: 1/3, 2/3, then 1
        ("constant", 1, 2 / 3),
        ("constant", 2, 1.0),
        ("constant", 99, 1.0),
        ("linear", 6, 0.5),  # half way from step 2 to step 10
        ("linear", 99, 0.0),
        ("cosine_with_min_lr", 6, 0.55),  # half way down from 1 to 0.1
        ("cosine_with_min_lr", 10, 0.1),
    ],
)
def test_learning_rate_at_matches_hand_values(scheduler, step, rate):
    spec = OptimizerSpec(learning_rate=1.0, scheduler=scheduler, warmup_steps=2, total_steps=10, min_lr_ratio=0.1)
    assert learning_rate_at(spec, step) == pytest.approx(rate)


def test_metrics_combine_by_their_kind():
    merged = merge_metrics([{"a": Mean(2, 1), "b": Sum(1), "c": Max(1)}, {"a": Mean(4, 3), "b": Sum(2), "c": Max(5)}])
    assert results(merged) == {"a": 1.5, "b": 3, "c": 5}


def test_metrics_nothing_counted_is_left_out_and_mixed_kinds_are_refused():
    assert results({"a": Mean(0, 0)}) == {}
    with pytest.raises(TypeError, match="a is both"):
        merge_metrics([{"a": Mean(0, 1)}, {"a": Sum(1)}])


def test_metrics_that_are_not_a_number_are_logged_as_such():
    nan = float("nan")
    numbers = results({"loss": Mean(nan, 1), "norm": Max(nan), "tokens": Sum(nan)})
    assert numbers.keys() == {"loss", "norm", "tokens"} and all(number != number for number in numbers.values())


def test_metrics_max_keeps_what_is_not_a_number_from_either_side():
    nan, one = {"a": Max(float("nan"))}, {"a": Max(1)}
    merged = [merge_metrics(parts)["a"].result() for parts in ([nan, one], [one, nan])]
    assert all(number != number for number in merged)


def experience_of(*parts):
    """The experience of rollouts, rewards and what tokens earned, as the ranks get it."""
    return Experience(pickle.loads(pickle.dumps(RolloutColumns.of(*parts))))


def test_experience_keeps_the_version_of_each_token_and_the_rewards_of_turns():
    spans = (
        Span(SpanSource.PROMPT, [1]),
        Span(SpanSource.POLICY, [2, 3], [-1.0, -1.0], policy_version=4),
        Span(SpanSource.POLICY, [4], [-1.0], policy_version=5),  # the same turn, after an update of the weights
        Span(SpanSource.ENVIRONMENT, [5]),
        Span(SpanSource.POLICY, [6], [-1.0], policy_version=5),
    )
    verdict = Verdict(VerdictKind.OK, 1.5, turn_rewards=(2.0, -0.5))
    by_turn = Rollout("a", "g", spans, FinishReason.STOP, verdict=verdict)
    whole = Rollout("b", "g", spans[:2], FinishReason.STOP, verdict=Verdict(VerdictKind.OK, 1.0))
    experience = experience_of([by_turn, whole], [1.0, 0.5])
    assert experience.policy_versions.tolist() == [[-1, 4, 4, 5, -1, 5], [-1, 4, 4, -1, -1, -1]]
    assert experience.token_rewards.tolist() == [[0, 0, 0, 2.0, 0, -0.5], [0] * 6]
    assert experience.rewards.tolist() == [1.0, 0.5]
    with pytest.raises(ValueError, match="1 rewards for 2 rollouts"):
        experience_of([by_turn, whole], [1.0])


def test_experience_places_rewards_of_steps_as_they_are_or_as_compared_with_others():
    spans = (Span(SpanSource.PROMPT, [1]), Span(SpanSource.POLICY, [2, 3, 4], [-1.0] * 3, policy_version=4))
    verdict = Verdict(VerdictKind.OK, 1.5, token_rewards=((1, 0.5), (3, 0.25)))
    rollouts = [
        Rollout("a", "g", spans, FinishReason.STOP, verdict=verdict),
        Rollout("b", "g", spans, FinishReason.STOP),
    ]
    plain = experience_of(rollouts, [1.5, 0.0])
    assert plain.token_rewards.tolist() == [[0, 0.5, 0, 0.25], [0] * 4]
    compared = experience_of(rollouts, [1.5, 0.0], [[(1, 2.0), (3, -1.0)], []])
    assert compared.token_rewards.tolist() == [[0, 2.0, 0, -1.0], [0] * 4]


def test_experience_columns_travel_by_rollout_id_in_any_order():
    rollouts = random_rollouts(6, vocab_size=50)
    source = experience_of(rollouts, [0.0] * 6)
    source.set_column("values", torch.randn(source.loss_mask.shape))
    target = experience_of(rollouts[::-1], [0.0] * 6)
    exported = pickle.loads(pickle.dumps(source.export(["values"])))
    target.adopt({"values": {}}, exported)
    for row, rollout in enumerate(rollouts):
        length = rollout.num_tokens
        assert torch.equal(source.columns["values"][row, :length], target.columns["values"][5 - row, :length])


def test_experience_column_is_zero_where_nothing_is_trained_and_names_are_closed():
    experience = experience_of(random_rollouts(3, vocab_size=50), [0.0] * 3)
    experience.set_column("values", torch.ones(experience.loss_mask.shape))
    assert torch.equal(experience.columns["values"] != 0, experience.loss_mask)
    with pytest.raises(AssertionError, match="vlaues"):
        experience.set_column("vlaues", torch.ones(1))
    with pytest.raises(KeyError, match="rollout0"):
        experience.adopt({"values": {}})


def rollout(kind: VerdictKind, reward: float | None, index: int) -> Rollout:
    reason = FinishReason.LENGTH if index == 3 else FinishReason.STOP
    verdict = Verdict(kind, reward, extra={"format": 1.0} if reward is not None else {})
    return short_rollout(f"r{index}", tokens=index, reason=reason, verdict=verdict)


def test_summarize_counts_failures_against_accuracy_but_not_against_the_mean_reward():
    rollouts = (
        rollout(VerdictKind.OK, 1.0, 1),
        rollout(VerdictKind.WRONG, 0.0, 2),
        rollout(VerdictKind.TIMEOUT, None, 3),
    )
    groups = [make_group("g", Prompt("p", [1], "1"), rollouts)]
    numbers = summarize(groups, "rollout")
    assert numbers["rollout/accuracy"] == pytest.approx(1 / 3)
    assert numbers["rollout/reward"] == 0.5
    assert numbers["rollout/response_tokens"] == 2.0
    assert numbers["rollout/truncated"] == pytest.approx(1 / 3)
    assert numbers["rollout/verdict_timeout"] == 1.0
    assert numbers["rollout/format"] == 1.0
    assert len(scored(groups)) == 2
    assert summarize([], "rollout") == {}


def test_summarize_keeps_its_own_numbers_apart_from_a_users_of_the_same_name():
    verdict = Verdict(VerdictKind.WRONG, 0.0, extra={"accuracy": 0.9})
    numbers = summarize([make_group("g", Prompt("p", [1], "1"), [short_rollout(verdict=verdict)])], "eval")
    assert (numbers["eval/accuracy"], numbers["eval/extra_accuracy"]) == (0.0, 0.9)


def test_ledger_balances_the_run_and_reports_the_step():
    ledger = Ledger()
    ledger.add(requested=10, failed=1, filtered=2)
    ledger.check(outstanding=7)
    ledger.add(trained=6.0, stale=1)
    ledger.check(outstanding=0)
    counts = {"generated": 10, "trained": 6, "filtered": 2, "failed": 1, "stale": 1}
    assert ledger.close_step() == {f"samples/{name}": count for name, count in counts.items()}
    ledger.add(requested=4, failed=4)
    assert ledger.run.requested == 14 and ledger.step.requested == 4
    resumed = Ledger()
    resumed.restore(json.loads(json.dumps(ledger.state())))
    assert (resumed.run, resumed.step) == (ledger.run, ledger.step)
    assert ledger.close_step() == {f"samples/{name}": 4 * (name in ("generated", "failed")) for name in counts}
    ledger.check(outstanding=0)


@pytest.mark.parametrize("name", ["requested", "trained", "filtered", "failed", "stale"])
def test_ledger_misses_a_rollout_of_an_earlier_step(name):
    ledger = Ledger()
    ledger.add(requested=5, trained=1, filtered=1, failed=1, stale=2)
    ledger.add(**{name: 0.5 if name == "trained" else 1})
    ledger.close_step()
    ledger.add(requested=2, trained=2)
    with pytest.raises(RlhfError, match=r"rollouts were lost or counted twice: [78] requested"):
        ledger.check(outstanding=0)


def test_ledger_misses_rollouts_that_are_not_outstanding():
    ledger = Ledger()
    ledger.add(requested=3)
    ledger.check(outstanding=3)
    with pytest.raises(RlhfError, match="2 outstanding"):
        ledger.check(outstanding=2)


def test_metrics_of_tensors_are_merged_as_they_are_and_made_numbers_on_the_host():
    one, two = torch.tensor(1.5), torch.tensor(2)
    merged = merge_metrics([{"a": Mean(one, two), "b": Sum(one), "c": Max(3.0)}, {"a": Mean(0.5, 2), "b": Sum(two)}])
    assert isinstance(merged["b"].value, torch.Tensor)
    assert on_host(merged) == {"a": Mean(2.0, 4.0), "b": Sum(3.5), "c": Max(3.0)}
    assert not any(isinstance(metric.value, torch.Tensor) for name, metric in on_host(merged).items() if name != "a")
