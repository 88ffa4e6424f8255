"""Invariant 4 for a whole update: from the same rollouts, a rank's `TrainWorker` in float32 computes the columns,
metrics and weights that `update_oracle`, which shares no code with it, computes in float64."""

import dataclasses
import itertools
import math
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch

from exact_losses import Recipe
from rlhf_data.records import FinishReason, Rollout, Span, SpanSource, Verdict, VerdictKind
from rlhf_models.testing import tiny_model_dir, tiny_reward_model_dir
from rlhf_train.algorithms import table as tables
from rlhf_train.algorithms.group import relative_rewards
from rlhf_train.algorithms.table import AlgorithmSpec, make_algorithm
from rlhf_train.algorithms.token_specs import (
    CORRECTION_LEVELS,
    CORRECTION_MODES,
    CorrectionSpec,
    DistributionSpec,
    EntropySpec,
)
from rlhf_train.batching import RankPlan, plan_batches
from rlhf_train.learning.columns import RolloutColumns
from rlhf_train.specs import ModelSpec, OptimizerSpec
from tiny_qwen2 import TinyQwen2
from trainer_testing import random_rollouts, run_ranks
from update_cases import CASES, FEATURES, Case
from update_oracle import Oracle, Outcome, Sample

NUM_ROLLOUTS, NUM_MINI_BATCHES, VOCAB_SIZE, MAX_TOKENS, TEMPERATURE, SEED = 24, 2, 272, 24, 0.8, 5
# Float32 against float64. Weights move by about 1e-2 per update and 4e-2 in all.
COLUMN_TOLERANCE = 1e-5
WEIGHT_TOLERANCE = 2e-5
# Smallest change of a weight that leaving a feature out must make, so that the tolerance would notice it.
NOTICED = 20 * WEIGHT_TOLERANCE

# Cases on two ranks, and their ZeRO stages.
TWO_RANKS = {
    "gae": 0, "gae, GSPO": 2, "reinforce, CISPO": 3, "reinforce_baseline": 2, "group_norm": 3,
    "group_norm, GSPO, centred": 0, "dr_grpo": 3, "rloo, REINFORCE, own log-probs": 2,
    "rloo, engine's log-probs, masked": 3, "gae, stale": 2, "group_norm, teacher's distribution": 3,
    "group_norm, uncertain tokens": 0, "online_dpo": 2,
}  # fmt: skip
# Versions of the weights at the start of the last steps, two updates each; tokens are 0 to 3 steps old, and half of the
# rollouts lived through updates. After it: the versions of the parts of the first turn, by rollout number.
STEP_VERSIONS = (0, 2, 4, 6)
VERSIONS = ((6,), (4, 6), (4,), (0, 2, 6))


def spec_of(recipe: Recipe) -> AlgorithmSpec:
    """Return the product's record of a recipe."""
    fields = dataclasses.asdict(recipe)
    if recipe.correction is not None:
        names = ("level", "mode", "low", "high", "drops_masked")
        fields["correction"] = CorrectionSpec(**dict(zip(names, recipe.correction, strict=False)))
    else:
        del fields["correction"]
    if recipe.distribution is not None:
        names = ("top_k", "divergence", "jsd_beta")
        fields["distribution"] = DistributionSpec(**dict(zip(names, recipe.distribution, strict=True)))
    fields["entropy"] = EntropySpec(top_quantile=fields.pop("top_quantile"))
    return make_algorithm(**fields)


def plans_of(rollouts: Sequence[Rollout], num_ranks: int) -> tuple[RankPlan, ...]:
    return plan_batches(
        [rollout.num_tokens for rollout in rollouts],
        [rollout.num_response_tokens for rollout in rollouts],
        num_ranks=num_ranks, num_mini_batches=NUM_MINI_BATCHES, micro_train_batch_size=5,
        micro_rollout_batch_size=7, max_response_tokens=MAX_TOKENS, seed=3,
    )  # fmt: skip


def run_worker(
    rank: int, num_ranks: int, master: Any, cases: dict[str, Case], paths: dict[str, str], batches: dict[str, Any]
) -> dict[str, Any]:
    """Run one update of each case on this rank; return columns by rollout, weights and metrics."""
    from rlhf_train.learning.worker import TrainWorker
    from rlhf_train.run.metrics import merge_metrics, results

    outcomes = {}
    for name, case in cases.items():
        recipe, spec, rollouts = case.recipe, spec_of(case.recipe), batches[case.recipe.old_logprobs]
        trained = ["actor", *(["critic"] if recipe.estimator == "gae" else [])]
        roles = [*trained, *(["reference"] if recipe.kl_coef else []), *(["teacher"] if recipe.teacher_coef else [])]
        optimizer = OptimizerSpec(**dataclasses.asdict(case.adam))
        models = {
            role: ModelSpec(
                path=paths[role],
                packing=case.packing,
                zero_stage=TWO_RANKS[name] if num_ranks > 1 else 0,
                optimizer=optimizer if role in trained else None,
            )
            for role in roles
        }
        worker = TrainWorker(
            models, spec, temperature=TEMPERATURE, rank=rank, num_ranks=num_ranks, master=master, device="cpu", seed=0
        )
        rewards = relative_rewards(
            np.array([reward_of(rollout, recipe) for rollout in rollouts]),
            [rollout.group_id for rollout in rollouts],
            spec.row.baseline,
            divide_by_std=spec.whiten_std,
            weights=np.array([rollout.loss_mask.sum() for rollout in rollouts]) if recipe.estimator == "opo" else None,
            greedy=np.array(list(map(greedy_reward_of, rollouts))),
        )
        plan = plans_of(rollouts, num_ranks)[rank]
        shard = [rollouts[row] for row in plan.rows]
        worker.load_rollouts(RolloutColumns.of(shard, [float(rewards[row]) for row in plan.rows]), plan, STEP_VERSIONS)
        metrics = [worker.run_model(role) for role in roles if role != "actor" or spec.runs_actor]
        metrics.append(worker.assign_advantages(recipe.kl_coef))
        metrics += [
            worker.update(role, max_epochs=case.max_epochs, seed=SEED, kl_coef=recipe.kl_coef)
            for role in reversed(trained)
        ]
        left_out = ("trained", "last_values", "trainer_logprobs")  # the last is the record's, worker_token_values_test
        left_out += ("teacher_logprobs",) if recipe.distribution else ()  # which are distributions
        names = [name for name in worker._experience.columns if name not in left_out]
        outcomes[name] = {
            "columns": worker.export_columns(names),
            "weights": {
                role: {key: value.numpy().copy() for key, value in worker.engines[role].state_dict().items()}
                for role in trained
            },
            "metrics": results(merge_metrics(metrics)),
        }
    return outcomes


def with_versions(rollout: Rollout, versions: Sequence[int]) -> Rollout:
    """Return `rollout` with its first turn drawn by the first of `versions`, then by the next ones, in equal parts."""
    prompt, turn, *rest = rollout.spans
    bounds = np.linspace(0, len(turn.token_ids), len(versions) + 1).round().astype(int)
    parts = [
        Span(SpanSource.POLICY, turn.token_ids[start:end], turn.logprobs[start:end], version)
        for start, end, version in zip(bounds[:-1], bounds[1:], versions, strict=True)
    ]
    rest = [dataclasses.replace(s, policy_version=versions[-1]) if s.logprobs is not None else s for s in rest]
    return dataclasses.replace(rollout, spans=(prompt, *parts, *rest))


def reward_of(rollout: Rollout, recipe: Recipe) -> float:
    """Return a rollout's reward. MaxRL takes none below 0."""
    return abs(rollout.verdict.reward) if recipe.estimator == "maxrl" else rollout.verdict.reward


def sample_of(rollout: Rollout, recipe: Recipe) -> Sample:
    return Sample(
        tokens=rollout.token_ids.tolist(),
        is_policy=rollout.loss_mask.tolist(),
        rollout_logprobs=rollout.rollout_logprobs.tolist(),
        versions=[
            -1 if span.policy_version is None else span.policy_version for span in rollout.spans for _ in span.token_ids
        ],
        reward=reward_of(rollout, recipe),
        group=rollout.group_id,
        truncated=rollout.finish_reason is FinishReason.LENGTH,
        greedy=greedy_reward_of(rollout),
    )


def greedy_reward_of(rollout: Rollout) -> float:
    """Return a number that differs by group, in place of the reward of a greedy response."""
    return len(rollout.group_id) * 0.1 + int(rollout.group_id[-1]) * 0.25


def run_oracle(case: Case, paths: dict[str, str], batches: dict[str, Any]) -> Outcome:
    rollouts = batches[case.recipe.old_logprobs]
    [plan] = plans_of(rollouts, 1)
    members = [
        [plan.rows[row] for micro_batch in batch.micro_batches for row in micro_batch] for batch in plan.mini_batches
    ]
    samples = [sample_of(rollout, case.recipe) for rollout in rollouts]
    oracle = Oracle(
        case.recipe,
        case.adam,
        paths,
        samples,
        temperature=TEMPERATURE,
        max_tokens=MAX_TOKENS,
        step_versions=STEP_VERSIONS,
    )
    return oracle.run(members, max_epochs=case.max_epochs, seed=SEED)


@pytest.fixture(scope="module")
def paths(tmp_path_factory) -> dict[str, str]:
    folder, size = tmp_path_factory.mktemp("models"), {"hidden_size": 32, "intermediate_size": 48}
    return {
        "actor": str(tiny_model_dir(folder / "actor", vocab_size=VOCAB_SIZE, **size)),
        "reference": str(tiny_model_dir(folder / "reference", vocab_size=VOCAB_SIZE, seed=1, **size)),
        "teacher": str(tiny_model_dir(folder / "teacher", vocab_size=VOCAB_SIZE, seed=2, **size)),
        "critic": str(tiny_reward_model_dir(folder / "critic", vocab_size=VOCAB_SIZE, **size)),
    }


@pytest.fixture(scope="module")
def batches(paths) -> dict[str, list[Rollout]]:
    """Rollouts whose engine is a little off the model, by where old log-probs come from: a third truncated, one without
    a response, two equal groups, several versions; two tokens of the engine are NaN, unless no log-probs are old."""
    rng, actor = np.random.default_rng(0), TinyQwen2(paths["actor"])
    rollouts = []
    for row, rollout in enumerate(random_rollouts(NUM_ROLLOUTS, vocab_size=VOCAB_SIZE)):
        with torch.no_grad():
            logprobs = actor.logprobs(torch.from_numpy(rollout.token_ids[None].astype(np.int64)), TEMPERATURE)[0][0]
        spans, start = [], 0
        for span in rollout.spans:
            end = start + len(span.token_ids)
            if span.source is SpanSource.POLICY:
                span = dataclasses.replace(span, logprobs=logprobs[start:end].numpy() + rng.normal(0, 0.1, end - start))
            spans.append(span)
            start = end
        if row == 2:
            spans = [spans[0], Span(SpanSource.POLICY, [], [], policy_version=0)]
        verdict = Verdict(VerdictKind.OK, 1.0) if rollout.group_id == "group3" else rollout.verdict
        reason = FinishReason.LENGTH if row % 3 == 0 else FinishReason.STOP
        rollouts.append(dataclasses.replace(rollout, spans=tuple(spans), finish_reason=reason, verdict=verdict))
    broken = list(rollouts)
    for row, place in ((3, -1), (6, 0)):
        span = broken[row].spans[1]
        logprobs = span.logprobs.copy()
        assert len(logprobs) > 1
        logprobs[place] = math.nan
        spans = (broken[row].spans[0], dataclasses.replace(span, logprobs=logprobs), *broken[row].spans[2:])
        broken[row] = dataclasses.replace(broken[row], spans=spans)
    broken = [with_versions(rollout, VERSIONS[row % len(VERSIONS)]) for row, rollout in enumerate(broken)]
    return {"recompute": broken, "rollout": broken, "skip": rollouts}


@pytest.fixture(scope="module")
def outcomes(paths, batches) -> tuple[dict[str, Outcome], list[dict[str, Any]], list[dict[str, Any]]]:
    """The oracle's, computed here, and those of one rank and of two, computed meanwhile in processes of their own."""
    with ThreadPoolExecutor(2) as pool:
        alone = pool.submit(run_ranks, run_worker, 1, CASES, paths, batches)
        pair = pool.submit(run_ranks, run_worker, 2, {name: CASES[name] for name in TWO_RANKS}, paths, batches)
        oracles = {name: run_oracle(case, paths, batches) for name, case in CASES.items()}
        return oracles, alone.result(), pair.result()


@pytest.fixture(scope="module")
def oracles(outcomes) -> dict[str, Outcome]:
    return outcomes[0]


@pytest.fixture(scope="module")
def on_one_rank(outcomes) -> dict[str, Any]:
    return outcomes[1][0]


@pytest.fixture(scope="module")
def on_two_ranks(outcomes) -> list[dict[str, Any]]:
    return outcomes[2]


def check_columns(columns: dict[str, Any], oracle: Outcome, rollouts: Sequence[Rollout]) -> None:
    """Check the columns of all rollouts, however they are shared out among ranks."""
    assert set(columns) == set(oracle.columns)
    for name, rows in columns.items():
        assert set(rows) == {rollout.rollout_id for rollout in rollouts}
        for row, rollout in enumerate(rollouts):
            expected = oracle.columns[name][row, : rollout.num_tokens]
            assert rows[rollout.rollout_id] == pytest.approx(expected, abs=COLUMN_TOLERANCE), (name, row)


def largest_difference(weights: dict[str, Any], oracle: Outcome) -> dict[str, float]:
    """Return, per role, how far any weight is from the oracle's."""
    differences = {}
    for role, expected in oracle.weights.items():
        ours = {named_by_folder(name): value for name, value in weights[role].items() if "inv_freq" not in name}
        assert set(ours) == set(expected)
        differences[role] = max(float(np.abs(ours[name] - expected[name]).max()) for name in expected)
    return differences


def named_by_folder(name: str) -> str:
    """Return the name that a worker's weight has in the model folder."""
    return {"value_head.weight": "score.weight"}.get(name, name.replace("model.model.", "model."))


def test_cases_have_every_row_of_every_table():
    recipes = [case.recipe for case in CASES.values()]
    specs = [spec_of(recipe) for recipe in recipes]
    assert {spec.estimator for spec in specs} == set(tables.ALGORITHMS)
    assert {spec.objective.policy_loss for spec in specs} == set(tables.POLICY_LOSSES)
    assert {spec.objective.reduction for spec in specs} == set(tables.REDUCTIONS)
    assert {spec.old_logprobs for spec in specs} == set(tables.OLD_LOGPROBS)
    assert {(r.kl_estimator, r.use_kl_loss) for r in recipes if r.kl_coef} == set(
        itertools.product(tables.KL_ESTIMATORS, (False, True))
    )
    corrections = {recipe.correction[:2] for recipe in recipes if recipe.correction}
    assert corrections == set(itertools.product(CORRECTION_LEVELS[1:], CORRECTION_MODES))


@pytest.mark.parametrize("name", CASES)
def test_columns_equal_the_oracle(on_one_rank, oracles, batches, name):
    check_columns(on_one_rank[name]["columns"], oracles[name], batches[CASES[name].recipe.old_logprobs])


@pytest.mark.parametrize("name", CASES)
def test_weights_equal_the_oracle(on_one_rank, oracles, paths, name):
    for role, difference in largest_difference(on_one_rank[name]["weights"], oracles[name]).items():
        assert difference < WEIGHT_TOLERANCE, role
        before = TinyQwen2(paths[role]).weights
        moves = {
            key: np.abs(weight - before[key].detach().numpy()) for key, weight in oracles[name].weights[role].items()
        }
        assert max(move.max() for move in moves.values()) > NOTICED
        assert all(move.max() > 0 for move in moves.values())


@pytest.mark.parametrize("name", CASES)
def test_metrics_equal_the_oracle(on_one_rank, oracles, name):
    metrics, expected = on_one_rank[name]["metrics"], oracles[name].metrics
    assert {"policy/loss", "policy/grad_norm", "value/return"} <= set(expected)
    assert {key: metrics[key] for key in expected} == pytest.approx(expected, rel=1e-4, abs=1e-6)


@pytest.mark.parametrize("name", TWO_RANKS)
def test_two_ranks_equal_the_oracle(on_two_ranks, oracles, batches, name):
    one, other = (outcome[name]["columns"] for outcome in on_two_ranks)
    assert all(len(rows) < NUM_ROLLOUTS for rank in (one, other) for rows in rank.values())
    together = {column: one[column] | other[column] for column in one}
    check_columns(together, oracles[name], batches[CASES[name].recipe.old_logprobs])
    for outcome in on_two_ranks:
        differences = largest_difference(outcome[name]["weights"], oracles[name])
        assert differences and max(differences.values()) < WEIGHT_TOLERANCE, differences


@pytest.mark.parametrize("feature", FEATURES)
def test_leaving_a_feature_out_is_noticed(oracles, paths, batches, feature):
    name, changes = FEATURES[feature]
    case = CASES[name]
    without = run_oracle(dataclasses.replace(case, recipe=dataclasses.replace(case.recipe, **changes)), paths, batches)
    assert max(largest_difference(without.weights, oracles[name]).values()) > NOTICED
