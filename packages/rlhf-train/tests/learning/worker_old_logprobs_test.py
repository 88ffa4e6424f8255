"""Where old log-probs may come from, and what happens to those that are no numbers: proofs on a worker's weights."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from rlhf_data.records import FinishReason, Rollout, Span, SpanSource
from rlhf_models.testing import tiny_model_dir, tiny_reward_model_dir
from rlhf_train.algorithms.group import relative_rewards
from rlhf_train.algorithms.table import POLICY_LOSSES, AlgorithmSpec, make_algorithm
from rlhf_train.algorithms.token_specs import CorrectionSpec
from rlhf_train.specs import ModelSpec, OptimizerSpec
from trainer_testing import lone_worker, random_rollouts, shard_of

VOCAB_SIZE, NUM_ROLLOUTS = 512, 12
# As in tests/support/split_cases.py: an epsilon above rounding, and the largest difference of a weight.
OPTIMIZER = OptimizerSpec(learning_rate=1e-2, eps=1e-4, scheduler="constant")
TOLERANCE = 2e-5
KL_LOSS = {"kl_coef": 0.05, "use_kl_loss": True, "kl_estimator": "k3", "kl_unbiased_gradient": True}
PPO_WITH_BOOTSTRAP = make_algorithm(bootstrap_truncated=True, gamma=0.9, lambd=0.9, kl_coef=0.05)
PLACES = ((0, -1), (4, 0), (7, -1))  # rollout and response token whose number is none; two are the last ones

Weights = dict[str, np.ndarray]


def trained(
    start: dict[str, str],
    spec: AlgorithmSpec,
    rollouts: Sequence[Rollout],
    *,
    num_mini_batches: int = 1,
    max_epochs: int = 1,
    step_versions: Sequence[int] = (0,),
    spoil: Callable[[Any], None] = lambda experience: None,
) -> tuple[Weights, dict[str, float], Any]:
    """Run one step on one rank; return the weights, the metrics and the experience.

    Args:
        start: paths of the models.
        spec, rollouts: what is trained, and on what.
        num_mini_batches, max_epochs: their product is the number of updates.
        step_versions: of the weights at the start of the last steps; the rollouts are of version 0.
        spoil: called with the experience once all models have been run.
    """
    from rlhf_train.run.metrics import merge_metrics, results

    roles = ["actor", *(["critic"] if spec.row.uses_critic else [])]
    models = {role: ModelSpec(path=start[role], zero_stage=0, optimizer=OPTIMIZER) for role in roles}
    if spec.uses_reference:
        models["reference"] = ModelSpec(path=start["reference"])
    worker = lone_worker(models, spec)
    rewards = relative_rewards(
        np.array([rollout.verdict.reward for rollout in rollouts]), [r.group_id for r in rollouts], spec.row.baseline
    )
    _, columns, plan = shard_of(rollouts, 4, num_mini_batches=num_mini_batches, rewards=rewards.tolist())
    worker.load_rollouts(columns, plan, step_versions)
    metrics = [worker.run_model(role) for role in models if role != "actor" or spec.runs_actor]
    spoil(worker._experience)
    metrics.append(worker.assign_advantages(spec.kl_coef))
    metrics += [worker.update(role, max_epochs=max_epochs, seed=0, kl_coef=spec.kl_coef) for role in reversed(roles)]
    weights = {
        f"{role}.{name}": tensor.numpy() for role in roles for name, tensor in worker.engines[role].state_dict().items()
    }
    return weights, results(merge_metrics(metrics)), worker._experience


def place_of(rollout: Rollout, index: int) -> int:
    return int(np.flatnonzero(rollout.loss_mask)[index])


def with_environment_token(rollout: Rollout, place: int) -> Rollout:
    """Return `rollout` with the token at `place` written by the environment instead."""
    spans, start = [], 0
    for span in rollout.spans:
        at, end = place - start, start + len(span.token_ids)
        if start <= place < end:
            for part in (slice(0, at), slice(at + 1, None)):
                half = dataclasses.replace(span, token_ids=span.token_ids[part], logprobs=span.logprobs[part])
                spans += [half, Span(SpanSource.ENVIRONMENT, span.token_ids[at : at + 1])]
            spans.pop()
        else:
            spans.append(span)
        start = end
    return dataclasses.replace(rollout, spans=tuple(spans))


def with_no_policy_tokens(rollout: Rollout) -> Rollout:
    """Return `rollout` with all tokens after the prompt written by the environment."""
    first, *rest = rollout.spans
    return dataclasses.replace(rollout, spans=(first, *(Span(SpanSource.ENVIRONMENT, span.token_ids) for span in rest)))


def all_cases(paths: dict[str, str]) -> dict[str, Any]:
    """Run every case in this process, because another one takes longer to import than to work."""
    outcomes: dict[Any, Any] = {}
    rollouts = random_rollouts(NUM_ROLLOUTS, vocab_size=VOCAB_SIZE)
    for loss in POLICY_LOSSES:
        spec = make_algorithm("group_norm", policy_loss=loss, **KL_LOSS)
        skip = dataclasses.replace(spec, old_logprobs="skip")
        outcomes[loss, "recompute"], metrics, _ = trained(paths, spec, rollouts)
        outcomes[loss, "skip"], skipped, _ = trained(paths, skip, rollouts)
        outcomes[loss, "metrics"] = metrics, skipped
    spec = make_algorithm("group_norm", old_logprobs="rollout", **KL_LOSS)
    nowhere = CorrectionSpec(level="token", mode="mask", low=1e6, high=2e6, drops_masked=True)
    outcomes["before"], *_ = trained(paths, spec, rollouts, max_epochs=0)
    for name, one, versions in (
        ("all", spec, (0, 2)),
        ("one version, stale", dataclasses.replace(spec, mask_stale=0), (0, 2)),
        ("all masked", dataclasses.replace(spec, correction=nowhere), (0, 2)),
    ):
        outcomes[name] = trained(paths, one, rollouts, num_mini_batches=2, max_epochs=2, step_versions=versions)[:2]
    outcomes["all tokens"] = sum(rollout.num_response_tokens for rollout in rollouts)
    for row in (0, 7):
        rollouts[row] = dataclasses.replace(rollouts[row], finish_reason=FinishReason.LENGTH)
    places = {rollouts[row].rollout_id: place_of(rollouts[row], index) for row, index in PLACES}

    def spoil(column: str, number: float) -> Callable[[Any], None]:
        def write(experience: Any) -> None:
            target = experience.rollout_logprobs if column == "rollout_logprobs" else experience.columns[column]
            for row, rollout_id in enumerate(experience.rollout_ids):
                if rollout_id in places:
                    target[row, places[rollout_id]] = number

        return write

    environments = [
        with_environment_token(rollout, places[rollout.rollout_id]) if rollout.rollout_id in places else rollout
        for rollout in rollouts
    ]
    outcomes["finite"], *_ = trained(paths, PPO_WITH_BOOTSTRAP, rollouts)
    outcomes["tokens"], *_ = trained(paths, PPO_WITH_BOOTSTRAP, environments)
    silent = [with_no_policy_tokens(r) if r.rollout_id in places else r for r in rollouts]
    outcomes["rollouts"], *_ = trained(paths, PPO_WITH_BOOTSTRAP, silent)
    outcomes["num_tokens"] = sum(r.num_response_tokens for r in rollouts if r.rollout_id in places)
    for column, number in SPOILED:
        outcomes[column, str(number)] = trained(paths, PPO_WITH_BOOTSTRAP, rollouts, spoil=spoil(column, number))[:2]
    return outcomes


SPOILED = [
    ("old_logprobs", float("nan")),
    ("old_logprobs", float("-inf")),
    ("ref_logprobs", float("inf")),
    ("rollout_logprobs", float("nan")),
    ("values", float("nan")),
    ("values", float("-inf")),
    ("last_values", float("nan")),
]


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory) -> dict[Any, Any]:
    folder = tmp_path_factory.mktemp("models")
    paths = {
        "actor": str(tiny_model_dir(folder / "actor", vocab_size=VOCAB_SIZE)),
        "reference": str(tiny_model_dir(folder / "reference", vocab_size=VOCAB_SIZE, seed=1)),
        "critic": str(tiny_reward_model_dir(folder / "critic", vocab_size=VOCAB_SIZE)),
    }
    return all_cases(paths)


def largest_difference(one: Weights, other: Weights) -> float:
    assert one.keys() == other.keys()
    return max(float(np.abs(one[name] - other[name]).max()) for name in one)


@pytest.mark.parametrize("loss", POLICY_LOSSES)
def test_skipped_old_logprobs_of_the_only_step_give_the_update_of_recomputed_ones(outcomes, loss):
    assert largest_difference(outcomes[loss, "recompute"], outcomes[loss, "skip"]) == 0.0
    recomputed, skipped = outcomes[loss, "metrics"]
    assert recomputed["policy/ratio"] == skipped["policy/ratio"] == 1.0
    for name in ("policy/loss", "kl/loss", "policy/grad_norm", "mismatch/logprob_gap_mean", "kl/reference"):
        assert recomputed[name] == pytest.approx(skipped[name], rel=1e-6), name


@pytest.mark.parametrize("name", ["one version, stale", "all masked"])
def test_update_of_tokens_that_are_all_left_out_moves_no_weight(outcomes, name):
    weights, metrics = outcomes[name]
    assert largest_difference(outcomes["all"][0], outcomes["before"]) > 100 * TOLERANCE
    assert largest_difference(weights, outcomes["before"]) == 0.0
    assert metrics["policy/grad_norm"] == metrics["policy/loss"] == 0.0
    if name == "one version, stale":
        assert metrics["samples/stale_tokens"] == outcomes["all tokens"]


@pytest.mark.parametrize(("column", "number"), SPOILED)
def test_what_has_a_logprob_or_value_that_is_no_number_trains_as_if_the_environment_had_written_it(
    outcomes, column, number
):
    weights, metrics = outcomes[column, str(number)]
    is_engines = column == "rollout_logprobs"
    assert metrics["samples/nonfinite_tokens"] == (len(PLACES) if is_engines else outcomes["num_tokens"])
    assert largest_difference(weights, outcomes["tokens" if is_engines else "rollouts"]) < TOLERANCE
    assert largest_difference(weights, outcomes["finite"]) > 100 * TOLERANCE
