"""What the actor's loss is told of a shard, the mismatch that is measured and corrected, and tokens that drop out."""

import math
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest
import torch

from experience_testing import ADVANTAGES, COUNTS, MASK, experience_of, of_versions
from rlhf_kernels import packed_policy_loss
from rlhf_train.algorithms.table import make_algorithm
from rlhf_train.algorithms.token_specs import CorrectionSpec, CovarianceSpec
from rlhf_train.batching import MiniBatch
from rlhf_train.learning.columns import RolloutColumns
from rlhf_train.learning.experience import Experience
from rlhf_train.learning.micro_batches import policy_stream, recounted
from rlhf_train.learning.trained_tokens import (
    correct_mismatch,
    drop_nonfinite,
    keep_uncertain,
    leave_truncated_out,
    limit_staleness,
    treat_covariance,
)
from rlhf_train.run.metrics import results

NUMBERS = ("old_logprobs", "ref_logprobs", "teacher_logprobs", "rollout_logprobs", "values", "last_values")
NAN, INF = float("nan"), float("inf")


def test_leave_truncated_out_masks_cut_rollouts_for_the_policy_alone():
    experience = experience_of(torch.zeros(2, 4), torch.zeros(2, 4))
    experience.truncated = torch.tensor([True, False])
    assert results(leave_truncated_out(experience)) == {"samples/truncated_tokens": 3.0}
    assert experience.policy_mask.tolist() == [[False] * 4, MASK[1].tolist()]
    assert torch.equal(experience.loss_mask, MASK)


@pytest.mark.parametrize("number", [NAN, INF, -INF])
@pytest.mark.parametrize(
    ("name", "left_of_the_first"),
    [
        ("rollout_logprobs", [False, True, False, True]),  # the token alone
        ("old_logprobs", [False] * 4),  # no gradient through any token of the rollout would be finite
        ("ref_logprobs", [False] * 4),
        ("teacher_logprobs", [False] * 4),
        ("values", [False] * 4),  # nor the advantage of any token before it
        ("last_values", [False] * 4),
    ],
)
def test_drop_nonfinite_leaves_tokens_out_of_every_mask_and_column_and_counts_them(name, left_of_the_first, number):
    tensors = {key: torch.where(MASK, -1.0, 0.0) for key in NUMBERS}
    tensors[name][0, 2] = number
    experience = experience_of(tensors.pop("old_logprobs"), tensors.pop("rollout_logprobs"), **tensors)
    num_dropped = 3.0 - sum(left_of_the_first)
    assert results(drop_nonfinite(experience)) == {"samples/nonfinite_tokens": num_dropped}
    left = torch.tensor([left_of_the_first, [False, True, False, False]])
    assert torch.equal(experience.loss_mask, left) and torch.equal(experience.policy_mask, left)
    for column in (experience.rollout_logprobs, *experience.columns.values()):
        assert torch.equal(column, torch.where(left, -1.0, 0.0))


def test_a_teachers_distributions_move_between_ranks_and_leave_a_rollout_out_that_has_a_nan():
    numbers = torch.arange(2 * 4 * 6.0).view(2, 4, 6)
    giver, taker = (experience_of(torch.zeros(2, 4), torch.zeros(2, 4)) for _ in range(2))
    giver.set_column("teacher_logprobs", numbers)
    taker.adopt(giver.export(["teacher_logprobs"]))
    assert taker.columns["teacher_logprobs"].equal(torch.where(MASK[..., None], numbers, 0.0))
    taker.columns["teacher_logprobs"][0, 2, 5] = NAN
    drop_nonfinite(taker)
    assert taker.loss_mask.tolist() == [[False] * 4, MASK[1].tolist()]
    assert taker.columns["teacher_logprobs"][0].eq(0.0).all() and taker.columns["teacher_logprobs"].isfinite().all()


def test_drop_nonfinite_looks_at_trained_tokens_only():
    old = torch.where(MASK, -1.0, NAN)
    experience = experience_of(old, torch.where(MASK, -1.0, 0.0))
    assert results(drop_nonfinite(experience)) == {"samples/nonfinite_tokens": 0.0}
    assert torch.equal(experience.loss_mask, MASK)


def test_staleness_counts_updates_and_steps_of_trained_tokens_only():
    def staleness() -> dict[str, float]:
        # Steps began with versions 0, 3, 4 and 6: three updates, one and two.
        return results(limit_staleness(experience, (0, 3, 4, 6)))

    names = ("policy/staleness", "policy/staleness_max", "async/staleness_steps", "async/staleness_steps_max")
    experience = experience_of(torch.zeros(2, 4), torch.zeros(2, 4))
    experience.policy_versions[0, 3] = 0
    # Version 6 less 3, 3 and 0 in the first rollout, less 3 in the second; two steps after 3, three after 0.
    expected = dict(zip(names, (15 / 4, 6.0, 9 / 4, 3.0), strict=True))
    assert staleness() == expected | {"async/mixed_version_rollouts": 1 / 2}
    experience.loss_mask[0, 3] = False
    expected = dict(zip(names, (3.0, 3.0, 2.0, 2.0), strict=True))
    assert staleness() == expected | {"async/mixed_version_rollouts": 0.0}
    experience.policy_versions[MASK] = 6  # the weights that this step trains
    assert staleness() == dict.fromkeys((*names, "async/mixed_version_rollouts"), 0.0)
    experience.loss_mask[:] = False
    assert staleness() == dict.fromkeys(names[1::2], 0.0)
    none = Experience(RolloutColumns.of([], []))
    assert results(limit_staleness(none, (0,))) == dict.fromkeys(names[1::2], 0.0)


@pytest.mark.parametrize(
    ("limit", "kept", "num_left_out"),
    [
        (None, [[2, 2, 2], [2]], None),
        (3, [[2, 2, 2], [2]], 0.0),
        (2, [[2, 2], [2]], 1.0),  # version 0 is three steps old
        (1, [[2], []], 3.0),
        (0, [[], []], 4.0),
    ],
)
def test_stale_tokens_leave_the_policys_mask_alone(limit, kept, num_left_out):
    experience = experience_of(torch.zeros(2, 4), torch.where(MASK, -2.0, 0.0))
    experience.policy_versions[0] = torch.tensor([-1, 0, 3, 4])
    before = experience.rollout_logprobs.clone()
    metrics = results(limit_staleness(experience, (0, 3, 4, 6), limit))
    assert experience.policy_mask.sum(dim=1).tolist() == [len(row) for row in kept]
    assert experience.policy_mask[0, 3].item() == (limit != 0)
    assert torch.equal(experience.loss_mask, MASK) and torch.equal(experience.rollout_logprobs, before)
    assert metrics.get("samples/stale_tokens") == num_left_out
    assert metrics["async/staleness_steps_max"] == 3.0  # they are measured all the same


def test_tokens_that_are_older_than_every_kept_step_count_as_old_as_the_first():
    experience = experience_of(torch.zeros(2, 4), torch.zeros(2, 4))
    metrics = results(limit_staleness(experience, (8, 10)))
    assert (metrics["async/staleness_steps"], metrics["policy/staleness"]) == (2.0, 7.0)


@contextmanager
def one_rank() -> Iterator[None]:
    """Let this process be the only rank, for the time of a `with` block."""
    if torch.distributed.is_initialized():  # DeepSpeed's group of one rank, which earlier tests leave
        assert torch.distributed.get_world_size() == 1
        yield
        return
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        torch.distributed.destroy_process_group()


def mismatched() -> Experience:
    # Weights trainer / engine: 2, 1/4, 1 and 8.
    rollout = torch.where(MASK, -2.0, 0.0)
    ratios = torch.tensor([[1.0, 2.0, 0.25, 1.0], [1.0, 8.0, 1.0, 1.0]])
    return experience_of(rollout + ratios.log(), rollout)


@pytest.mark.parametrize(
    ("share", "low", "high", "num_clipped", "candidates"),
    [
        (0.9, 0.5, 5.0, 2, {(0, 1), (0, 3)}),  # fewer than 0.9 x 4 are within the bounds
        (0.3, 0.5, 5.0, 1, {(0, 1), (0, 3)}),
        (0.01, -2.0, -0.5, 1, {(0, 2)}),  # at least one
        (0.9, 0.5, 3.0, 1, {(0, 3)}),
        (0.9, 6.0, 20.0, 0, set()),
    ],
)
def test_tokens_of_high_covariance_are_left_out_of_the_policy_loss_and_held_to_the_old_policy(
    share, low, high, num_clipped, candidates
):
    # The means are -3 and 1; (-2)(-2) = 4, (1)(-1) = -1, (1)(1) = 1, and (0)(2) = 0.
    old = torch.tensor([[NAN, -5.0, -2.0, -2.0], [NAN, -3.0, NAN, NAN]])
    advantages = torch.tensor([[NAN, -1.0, 0.0, 2.0], [NAN, 3.0, NAN, NAN]])
    experience = experience_of(old, torch.zeros(2, 4), advantages=advantages)
    with one_rank():
        device = torch.device("cpu")
        metrics = treat_covariance(
            experience, CovarianceSpec(clip_cov=(share, low, high), kl_cov=(share, 0.5)), device, counts=True
        )
    # Of covariances 4, 1, 0 and -1, the largest.
    held = {0.9: [[0, 0.5, 0, 0.5], [0, 0.5, 0, 0]]}.get(share, [[0, 0.5, 0, 0], [0] * 4])
    assert experience.columns["penalties"].tolist() == held
    num_held = float(np.count_nonzero(held))
    assert results(metrics) == {"samples/clipped_tokens": float(num_clipped), "samples/held_tokens": num_held}
    left_out = {tuple(place) for place in ((experience.columns["weights"] == 0.0) & MASK).nonzero().tolist()}
    assert len(left_out) == num_clipped and left_out <= candidates
    assert torch.equal(experience.policy_mask, MASK)


def test_tokens_of_high_entropy_are_kept_with_their_weights_and_the_others_get_none():
    entropy = torch.tensor([[9.0, 0.5, 2.0, 1.0], [9.0, 3.0, 9.0, 9.0]])
    experience = experience_of(torch.zeros(2, 4), torch.zeros(2, 4), entropy=entropy, weights=torch.full((2, 4), 0.5))
    with one_rank():
        metrics = keep_uncertain(experience, 0.5, torch.device("cpu"), counts=True)
    # Of 3, 2, 1 and 0.5 those at or above the median, 1.5.
    assert experience.columns["weights"].tolist() == [[0.0, 0.0, 0.5, 0.0], [0.0, 0.5, 0.0, 0.0]]
    assert results(metrics) == {"samples/low_entropy_tokens": 2.0, "policy/top_entropy": 2.5}
    assert torch.equal(experience.policy_mask, MASK)


def test_mismatch_is_measured_without_a_correction():
    experience = mismatched()
    metrics = results(correct_mismatch(experience, make_algorithm()))
    log2 = math.log(2)
    assert metrics == pytest.approx(
        {
            "mismatch/logprob_gap_mean": (1 + 2 + 0 + 3) * log2 / 4,
            "mismatch/logprob_gap_max": 3 * log2,
            # k3 of engine || trainer: w - 1 - log w for each
            "mismatch/kl": ((1 - log2) + (-0.75 + 2 * log2) + 0 + (7 - 3 * log2)) / 4,
            "mismatch/out_of_bounds": 2 / 4,  # 1/4 and 8 are beyond 0.5 and 2
        },
        rel=1e-5,
    )
    assert torch.equal(experience.policy_mask, MASK) and "weights" not in experience.columns


@pytest.mark.parametrize(
    ("fields", "kept", "weights", "share"),
    [
        # By hand: k3 = w - 1 - log w is 0.307, 0.636, 0 and 4.921, and its mean over the first rollout is 0.314.
        ({"reject": "mean_k3", "reject_high": 0.5}, [3, 1], [1, 1, 1, 0], 1 / 4),
        ({"reject": "max_k3", "reject_low": 0.7, "reject_high": 9}, [3, 1], [0, 0, 0, 1], 3 / 4),
        ({"reject": "token_k3", "reject_high": 0.5, "drops_masked": True}, [2, 0], None, 2 / 4),
        ({"reject": "token_k3", "reject_high": 0.5, "level": "token", "high": 4.0}, [3, 1], [2, 0, 1, 0], 2 / 4),
        (
            {"reject": "max_k3", "reject_high": 1, "level": "token", "mode": "mask", "low": 0.5},
            [3, 1],
            [2, 0, 1, 0],
            1 / 4,
        ),
        ({"reject": "geometric", "reject_low": 0.9, "reject_high": 9, "level": "token"}, [3, 1], [0, 0, 0, 2], 3 / 4),
    ],
)
def test_rejection_leaves_out_what_is_far_apart_beside_the_weights_or_without(fields, kept, weights, share):
    experience = mismatched()
    metrics = results(correct_mismatch(experience, make_algorithm(correction=CorrectionSpec(**fields))))
    assert torch.equal(experience.loss_mask, MASK)
    assert experience.policy_mask.sum(dim=1).tolist() == kept
    found = experience.columns["weights"][MASK].tolist() if "weights" in experience.columns else None
    assert found == (weights and pytest.approx(weights, rel=1e-5))
    assert metrics["mismatch/rejected"] == pytest.approx(share)


@pytest.mark.parametrize(
    ("correction", "kept", "weights", "outside", "mean"),
    [
        (CorrectionSpec(level="token", mode="truncate", low=0.5, high=4), [3, 1], [2, 0.5, 1, 4], 2 / 4, 7.5 / 4),
        (CorrectionSpec(level="token", mode="mask", low=0.5, high=4), [3, 1], [2, 0, 1, 0], 2 / 4, 3 / 2),
        (CorrectionSpec(level="sequence", mode="mask", low=0.5, high=4), [3, 1], [0.5, 0.5, 0.5, 0], 1 / 4, 0.5),
        (
            CorrectionSpec(level="token", mode="mask", low=0.5, high=4, drops_masked=True),
            [2, 0],
            [2, 0.25, 1, 8],
            2 / 4,
            3 / 2,
        ),
        # (2 x 1/4 x 1)^(1/3) = 0.794
        (
            CorrectionSpec(level="geometric", mode="truncate", low=0.9, high=8),
            [3, 1],
            [0.9, 0.9, 0.9, 8],
            3 / 4,
            (2.7 + 8) / 4,
        ),
    ],
)
def test_mismatch_correction_sets_weights_and_shrinks_the_policys_mask_only(correction, kept, weights, outside, mean):
    experience = mismatched()
    metrics = results(correct_mismatch(experience, make_algorithm(correction=correction)))
    assert torch.equal(experience.loss_mask, MASK)
    assert experience.policy_mask.sum(dim=1).tolist() == kept
    assert experience.columns["weights"][MASK].tolist() == pytest.approx(weights, rel=1e-5)
    assert metrics["mismatch/out_of_bounds"] == pytest.approx(outside)
    assert metrics["mismatch/weight"] == pytest.approx(mean, rel=1e-5)


@pytest.mark.parametrize(
    ("policy_loss", "old_logprobs", "weights"),
    [
        ("ppo", "recompute", [2, 0, 1, 0]),
        ("ppo", "rollout", [1, 0, 1, 0]),
        ("gspo", "rollout", [1, 0, 1, 0]),
        ("cispo", "rollout", [1, 0, 1, 0]),
        ("reinforce", "rollout", [2, 0, 1, 0]),
    ],
)
@pytest.mark.parametrize("drops_masked", [False, True])
def test_ratio_to_the_engine_is_not_weighed_a_second_time(policy_loss, old_logprobs, weights, drops_masked):
    experience = mismatched()
    correction = CorrectionSpec(level="token", mode="mask", low=0.5, high=4, drops_masked=drops_masked)
    spec = make_algorithm(policy_loss=policy_loss, old_logprobs=old_logprobs, correction=correction)
    metrics = results(correct_mismatch(experience, spec))
    assert metrics["mismatch/out_of_bounds"] == 2 / 4
    assert experience.policy_mask.sum(dim=1).tolist() == ([2, 0] if drops_masked else [3, 1])
    if drops_masked and not spec.weighs:
        assert "weights" not in experience.columns
        return
    expected = [2, 0.25, 1, 8] if drops_masked else weights
    assert experience.columns["weights"][MASK].tolist() == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize(
    ("reduction", "drops_masked", "divisors"),
    [
        # Weights by rollout are 2, 1/4, 1 and 8, of which 1/4 and 8 are masked. Advantages are 1, 2, 3 and -4.
        ("token_mean", False, [4, 4]),  # all trained tokens, as in eq. 1 of INTELLECT-3 (arXiv:2512.16144)
        ("token_mean", True, [2, 2]),
        ("seq_mean_token_mean", False, [2 * 3, 2]),  # two rollouts, whose own tokens are three and one
        ("seq_mean_token_mean", True, [1 * 2, 1]),  # the second has no token left
        ("seq_mean_token_sum", False, [2, 2]),
        ("seq_mean_token_sum", True, [1, 1]),
    ],
)
def test_masked_tokens_count_in_what_the_loss_is_divided_by_unless_they_are_dropped(reduction, drops_masked, divisors):
    experience = mismatched()
    experience.set_column("advantages", ADVANTAGES)
    correction = CorrectionSpec(level="token", mode="mask", low=0.5, high=4, drops_masked=drops_masked)
    spec = make_algorithm(estimator="reinforce", kl_coef=0, reduction=reduction, correction=correction)
    correct_mismatch(experience, spec)
    with one_rank():
        (batch,) = recounted([MiniBatch(((0, 1),), COUNTS)], experience.policy_mask, "cpu")
    stream = policy_stream(experience, [0, 1], spec, batch.denominators, "cpu")
    logprobs = experience.columns["old_logprobs"].clone().requires_grad_()  # on policy: each ratio is 1
    loss, _ = packed_policy_loss(logprobs[experience.policy_mask], stream, spec.objective)
    loss.backward()
    first, second = divisors
    assert loss.item() == pytest.approx(-(2 * 1 + 1 * 3) / first)
    # Each kept token adds -weight x advantage x ratio; the derivative of a ratio of 1 by the log-prob is 1.
    expected = [[0, -2 * 1 / first, 0, -1 * 3 / first], [0, 0 / second, 0, 0]]
    assert torch.allclose(logprobs.grad, torch.tensor(expected))


# One rollout that lived through an update, and one of the new weights. By token: the version that drew it, and its
# log-probs in nats by the engine and by the trainer.
MIXED = {"a": ((3, -1.0, -1.5), (3, -0.5, -0.25), (4, -2.0, -2.01), (4, -0.75, -0.75)), "b": ((4, -1.25, -1.2),)}


@pytest.mark.parametrize("mode", ["truncate", "mask"])
@pytest.mark.parametrize("level", ["token", "sequence", "geometric"])
def test_corrections_of_mixed_versions_compare_each_token_with_the_version_that_drew_it(level, mode):
    rollouts = []
    for name, tokens in MIXED.items():
        versions, logprobs, _ = zip(*tokens, strict=True)
        rollouts.append(of_versions(name, *versions, logprobs=logprobs))
    experience = Experience(RolloutColumns.of(rollouts, [1.0, 1.0]))
    trainer = torch.zeros(2, 5)
    for row, tokens in enumerate(MIXED.values()):
        trainer[row, 1 : 1 + len(tokens)] = torch.tensor([mine for *_, mine in tokens])
    experience.set_column("old_logprobs", trainer)
    assert experience.policy_versions.tolist() == [[-1, 3, 3, 4, 4], [-1, 4, -1, -1, -1]]
    correction = CorrectionSpec(level=level, mode=mode, low=0.9, high=1.1)
    metrics = results(correct_mismatch(experience, make_algorithm(correction=correction)))

    weights, gaps = [], []
    for tokens in MIXED.values():
        own = [mine - engine for _, engine, mine in tokens]  # in float64
        mean = sum(own) / (len(own) if level == "geometric" else 1)
        weights += [math.exp(gap if level == "token" else mean) for gap in own]
        gaps += own
    inside = [0.9 <= weight <= 1.1 for weight in weights]
    bounded = [min(max(weight, 0.9), 1.1) for weight in weights]
    if mode == "mask":
        bounded = [weight if is_inside else 0.0 for weight, is_inside in zip(weights, inside, strict=True)]
    mask = experience.loss_mask
    assert experience.columns["weights"][mask].tolist() == pytest.approx(bounded, rel=1e-6)
    assert experience.policy_mask[mask].tolist() == [True] * 5
    assert mask.sum() == 5 and not experience.policy_mask[~mask].any()
    assert metrics["mismatch/kl"] == pytest.approx(sum(math.expm1(gap) - gap for gap in gaps) / 5, rel=1e-4)
    assert metrics["mismatch/out_of_bounds"] == pytest.approx(1 - sum(inside) / 5)
    # Version 3's two tokens are off by half and a quarter of a nat, version 4's hardly: the levels tell them apart.
    assert inside == {
        "token": [False, False, True, True, True], "sequence": [False] * 4 + [True],
        "geometric": [True] * 5,
    }[level]  # fmt: skip
