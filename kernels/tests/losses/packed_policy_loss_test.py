"""`packed_policy_loss` on the CPU: the plain twin, against which the Triton kernel is tested.

Values and gradients by hand; `tests/invariants/twins_test.py` compares every loss with every reduction with slow twins.
"""

import itertools
import math
from dataclasses import replace
from typing import get_args

import pytest
import torch

from rlhf_kernels import POLICY_METRICS, PolicyObjective, PolicyStream, packed_policy_loss
from rlhf_kernels.objective import PolicyLossName
from rlhf_kernels.ops.packed_policy_loss.reference import (
    is_clipped,
    kl_loss,
    packed_policy_loss_reference,
    policy_ratio,
    sequence_ratio,
)
from rlhf_kernels.ops.packed_policy_loss.terms import MAX_LOG_RATIO, MAX_WEIGHT

LN2 = math.log(2.0)
EVERY_LOSS = pytest.mark.parametrize("name", get_args(PolicyLossName))


def stream_of(advantages, old, bounds=None, mask=None, num_tokens=1, num_sequences=1, dtype=torch.float32, **columns):
    """A stream from lists; one sequence unless `bounds` says otherwise."""
    mask = [True] * len(advantages) if mask is None else mask
    return PolicyStream(
        advantages=torch.tensor(advantages, dtype=dtype),
        loss_mask=torch.tensor(mask, dtype=torch.bool),
        cu_seqlens=torch.tensor([0, len(advantages)] if bounds is None else bounds),
        num_tokens=num_tokens,
        num_sequences=num_sequences,
        old_logprobs=torch.tensor(old, dtype=dtype),
        **{
            name: torch.tensor(column, dtype=dtype) if name != "max_tokens" else column
            for name, column in columns.items()
        },
    )


def loss_and_gradient(logprobs, stream, objective, **options):
    logprobs = torch.tensor(logprobs, requires_grad=True)
    loss, metrics = packed_policy_loss(logprobs, stream, objective, **options)
    loss.backward()
    return loss.item(), logprobs.grad.tolist(), dict(zip(POLICY_METRICS, metrics.tolist(), strict=True))


def test_loss_of_its_own_takes_the_place_of_the_formula_alone():
    def squared(logprobs):
        return 3 * logprobs**2

    # Weights and reduction stay, the mask too, and so does the KL term: k2 = (logprob - reference)^2 / 2.
    columns = {"weights": [2.0, 1.0, 1.0], "ref_logprobs": [0.0, 0.0, 0.0]}
    stream = stream_of([9.0] * 3, [0.0] * 3, mask=[True, True, False], num_tokens=4, **columns)
    objective = PolicyObjective(policy_loss="gspo", kl_coef=0.5, kl_estimator="k2")
    loss, grad, metrics = loss_and_gradient([-1.0, -2.0, -3.0], replace(stream, own_loss=squared), objective)
    assert loss == pytest.approx((2 * 3 + 3 * 4 + 0.5 * (0.5 + 2)) / 4)
    assert grad == pytest.approx([(-2 * 6 - 0.5) / 4, (-12 - 0.5 * 2) / 4, 0.0])
    assert metrics["policy_loss"] == pytest.approx((6 + 12) / 4) and metrics["clipped"] == 0


def test_packed_policy_loss_ppo_clips_what_the_advantage_favours():
    # Ratios 2, 2, 1/2, 1/4 within [0.8, 1.2]: -1.2, +2, -1/2, +0.8; the first and the last are flat.
    stream = stream_of([1.0, -1.0, 1.0, -1.0], [-LN2, -LN2, LN2, 2 * LN2])
    loss, grad, metrics = loss_and_gradient([0.0] * 4, stream, PolicyObjective())
    assert loss == pytest.approx(-1.2 + 2.0 - 0.5 + 0.8)
    assert grad == pytest.approx([0.0, 2.0, -0.5, 0.0])
    assert metrics["clipped"] == 2 and metrics["tokens"] == 4
    assert metrics["ratio"] == pytest.approx(4.75)
    # r - 1 - ln r for each ratio r: 1.44; in the other direction, at 1 / r, it would be 2.31.
    assert metrics["kl_to_old"] == pytest.approx(2 * (2 - 1 - LN2) + (0.5 - 1 + LN2) + (0.25 - 1 + 2 * LN2))


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "gradient"),
    [
        (1.0, 2.0, -2.0, -2.0),  # on policy: -A, and d(-r A)/d logprob = -r A
        (1.1, 2.0, -2.2, -2.2),  # inside the range
        (1.5, 2.0, -2.6, 0.0),  # above it, favoured: held at 1.3 A
        (0.5, 2.0, -1.0, -1.0),  # below it, not favoured: free, so that it can come back
        (0.5, -2.0, 1.6, 0.0),  # below it, favoured: held at 0.8 A
        (1.5, -2.0, 3.0, 3.0),  # above it, not favoured: free
        (5.0, -2.0, 6.0, 0.0),  # free it were 10; the dual clip holds it at 3 |A|
        (5.0, 2.0, -2.6, 0.0),  # of positive advantages the dual clip says nothing
        (1.0, 0.0, 0.0, 0.0),
    ],
)
def test_packed_policy_loss_ppo_matches_hand_values(ratio, advantage, loss, gradient):
    objective = PolicyObjective(clip_low=0.2, clip_high=0.3, dual_clip=3.0)
    value, grad, metrics = loss_and_gradient([math.log(ratio)], stream_of([advantage], [0.0]), objective)
    assert value == pytest.approx(loss)
    assert grad == [pytest.approx(gradient)]
    assert metrics["clipped"] == (gradient == 0.0 and advantage != 0.0)


@pytest.mark.parametrize(
    ("ratios", "advantage", "loss", "gradient"),
    [
        ((2.0, 0.5), 3.0, -3.0, -1.5),  # s = 1: -A, though both tokens are far out; -s A / n
        ((1.21, 1.0), 3.0, -3.3, -1.65),  # s = 1.1, within the range
        ((2.25, 1.0), 3.0, -3.6, 0.0),  # s = 1.5: held at 1.2 A
        ((0.25, 1.0), 3.0, -1.5, -0.75),  # s = 0.5, not favoured: free
        ((0.25, 1.0), -3.0, 2.4, 0.0),  # s = 0.5, favoured: held at 0.8 A
    ],
)
def test_packed_policy_loss_gspo_matches_hand_values(ratios, advantage, loss, gradient):
    # The third token is not trained, and counts in no mean.
    stream = stream_of([advantage] * 3, [0.0, 0.0, 5.0], mask=[True, True, False])
    objective = PolicyObjective(policy_loss="gspo", reduction="seq_mean_token_mean")
    value, grad, _ = loss_and_gradient([*map(math.log, ratios), 0.0], stream, objective)
    assert value == pytest.approx(loss)
    assert grad == pytest.approx([gradient, gradient, 0.0])


def test_packed_policy_loss_sequence_ratio_of_equal_policies_and_of_nothing_is_exactly_one():
    logprobs, bounds = torch.randn(10), torch.tensor([0, 5, 10])
    mask = torch.tensor([True] * 5 + [False] * 5)
    assert torch.equal(sequence_ratio(logprobs, logprobs, mask, bounds), torch.ones(10))
    assert torch.equal(sequence_ratio(torch.full((10,), 7.0), logprobs, mask, bounds)[5:], torch.ones(5))


@pytest.mark.parametrize(
    ("ratio", "advantage", "weight"),
    [(1.1, 2.0, 1.1), (1.5, 2.0, 1.2), (1.5, -2.0, 1.2), (0.5, 2.0, 0.8), (0.5, -2.0, 0.8)],
)
def test_packed_policy_loss_cispo_keeps_the_gradient_under_a_clipped_weight(ratio, advantage, weight):
    logprob = math.log(ratio)
    objective = PolicyObjective(policy_loss="cispo")
    loss, grad, metrics = loss_and_gradient([logprob], stream_of([advantage], [0.0]), objective)
    assert loss == pytest.approx(-weight * advantage * logprob)
    assert grad == pytest.approx([-weight * advantage])
    assert metrics["clipped"] == (weight != ratio)


@pytest.mark.parametrize(
    ("limit", "left_out"),
    [(None, []), (0.1, [0]), (0.25, [0]), (0.31, [])],  # the means of old - current are 0.3, 0, -1 and 0.3
)
def test_packed_policy_loss_off_policy_mask_leaves_failures_out_that_became_unlikely(limit, left_out):
    # Four sequences: a failure that became unlikely, two that did not, and a success that did.
    stream = stream_of([-1.0, -1.0, -1.0, -1.0, 1.0], [-0.8, -0.8, -1.0, -2.0, -0.7], bounds=[0, 2, 3, 4, 5])
    objective = PolicyObjective(policy_loss="reinforce", mask_off_policy=limit)
    _, grad, metrics = loss_and_gradient([-1.5, -0.7, -1.0, -1.0, -1.0], stream, objective)
    sequences = [0, 0, 1, 2, 3]
    assert grad == [0.0 if s in left_out else (-1.0 if s == 3 else 1.0) for s in sequences]
    assert metrics["tokens"] == 5


def test_packed_policy_loss_reinforce_matches_hand_values():
    stream = stream_of([3.0, -0.5], [0.0, 0.0])
    loss, grad, _ = loss_and_gradient([-1.0, -2.0], stream, PolicyObjective(policy_loss="reinforce"))
    assert loss == pytest.approx(3.0 - 1.0)  # -A log p
    assert grad == [-3.0, 0.5]


def test_packed_policy_loss_ratio_of_equal_logprobs_is_exactly_one_and_of_far_ones_is_held_without_gradient():
    logprobs = torch.randn(7)
    assert torch.equal(policy_ratio(logprobs, logprobs), torch.ones(7))
    far = torch.tensor([200.0], requires_grad=True)
    ratio = policy_ratio(far, torch.zeros(1))
    ratio.backward()
    assert ratio.item() == pytest.approx(math.exp(MAX_LOG_RATIO), rel=1e-5) and far.grad.item() == 0.0


@pytest.mark.parametrize(
    ("name", "sign"), itertools.product(sorted({*get_args(PolicyLossName)} - {"reinforce"}), (1, -1))
)
def test_packed_policy_loss_of_extreme_ratios_stays_finite(name, sign):
    stream = stream_of([-1.0, -1.0], [0.0, 0.0], num_tokens=2)
    loss, grad, _ = loss_and_gradient([sign * 500.0] * 2, stream, PolicyObjective(policy_loss=name))
    assert abs(loss) <= math.exp(MAX_LOG_RATIO) * 1.001
    assert all(map(math.isfinite, grad))


@EVERY_LOSS
def test_packed_policy_loss_gives_its_constants_no_gradient(name):
    names = ("old_logprobs", "advantages", "ref_logprobs", "weights")
    logprobs, *columns = torch.randn(5, 4).requires_grad_().unbind()
    constants = dict(zip(names, columns, strict=True))
    objective = PolicyObjective(policy_loss=name, kl_coef=0.5, kl_unbiased_gradient=True)
    loss, _ = packed_policy_loss_reference(
        logprobs, None, replace(stream_of([0.0] * 4, [0.0] * 4), **constants), objective
    )
    grads = torch.autograd.grad(loss, (logprobs, *columns), allow_unused=True)
    assert grads[0].any() and grads[1:] == (None,) * 4


def test_packed_policy_loss_kl_to_old_is_the_exact_divergence_from_the_policy_that_drew_the_tokens():
    # Every token as often as the old policy draws it, so that the mean over tokens is the expectation.
    old, new = (torch.tensor(p, dtype=torch.float64) for p in ([0.5, 0.25, 0.25], [62 / 64, 1 / 64, 1 / 64]))
    exact, other_way = (float((p * (p / q).log()).sum()) for p, q in ((old, new), (new, old)))
    assert (exact, other_way) == pytest.approx((1.0556, 0.5541), abs=1e-4)
    drawn = torch.tensor([0, 0, 1, 2])
    stream = replace(stream_of([0.0] * 4, [0.0] * 4), old_logprobs=old.log()[drawn].float())
    _, _, metrics = loss_and_gradient(new.log()[drawn].tolist(), stream, PolicyObjective())
    assert metrics["kl_to_old"] / metrics["tokens"] == pytest.approx(exact, rel=1e-6)
    assert metrics["kl_bounded"] == 0


def test_packed_policy_loss_bounds_k3_at_ten_nats_and_counts_the_tokens():
    # Old log-probs 3, 0 and 30 below the current ones: e^3 - 1 - 3 = 16.1, 0, and a ratio clamped at e^20.
    # Reference log-probs 0, 3 and 1 above them: 0, e^3 - 1 - 3, and e - 2.
    stream = stream_of([0.0] * 3, [-3.0, 0.0, -30.0], ref_logprobs=[0.0, 3.0, 1.0])
    objective = PolicyObjective(kl_coef=1.0, kl_estimator="k3")
    loss, grad, metrics = loss_and_gradient([0.0] * 3, stream, objective)
    assert metrics["kl_to_old"] == 20.0 and metrics["kl_bounded"] == 3
    assert loss == metrics["kl_loss"] == pytest.approx(10.0 + math.e - 2)
    assert grad == pytest.approx([0.0, 0.0, 1 - math.e])
    # The unbiased gradient does not come from the value: min(r, 10) d.
    _, grad, _ = loss_and_gradient([0.0] * 3, stream, replace(objective, kl_unbiased_gradient=True))
    assert grad == pytest.approx([0.0, -3.0, -10.0])
    # k1 and k2 have no such bound, only that of d.
    _, _, metrics = loss_and_gradient([0.0] * 3, stream, replace(objective, kl_estimator="k2"))
    assert metrics["kl_bounded"] == 2 and metrics["kl_loss"] == pytest.approx(4.5 + 0.5)


@pytest.mark.parametrize(
    ("reduction", "expected"),
    [
        ("token_mean", -(1 + 2 + 6) / 10),
        ("seq_mean_token_mean", -(1.5 + 6) / 4),
        ("seq_mean_token_sum", -9 / 4),
        ("seq_mean_token_sum_norm", -9 / 20),
    ],
)
def test_packed_policy_loss_each_reduction_divides_by_global_counts(reduction, expected):
    stream = stream_of([1.0, 2.0, 99.0, 6.0], [0.0] * 4, [0, 3, 4], [True, True, False, True], 10, 4, max_tokens=5)
    loss, grad, _ = loss_and_gradient([0.0] * 4, stream, PolicyObjective(reduction=reduction))
    assert loss == pytest.approx(expected)
    assert grad[2] == 0.0


@pytest.mark.parametrize(
    ("estimator", "unbiased", "value", "slope"),
    [
        ("k1", False, LN2, 1.0),
        ("k2", False, LN2**2 / 2, LN2),
        ("k3", False, 0.5 - 1 + LN2, 0.5),
        ("k1", True, LN2, 4 * LN2),
        ("k2", True, LN2**2 / 2, 4 * LN2),
        ("k3", True, 0.5 - 1 + LN2, 4 * LN2),
    ],
)
def test_packed_policy_loss_kl_values_and_slopes_at_twice_the_reference(estimator, unbiased, value, slope):
    # exp(logprob - old) = 4 weighs the unbiased gradient; with an advantage of 0 the KL is alone.
    stream = stream_of([0.0], [-2 * LN2], ref_logprobs=[-LN2])
    objective = PolicyObjective(kl_coef=0.5, kl_estimator=estimator, kl_unbiased_gradient=unbiased)
    loss, grad, metrics = loss_and_gradient([0.0], stream, objective)
    assert loss == pytest.approx(0.5 * value)
    assert grad == pytest.approx([0.5 * slope])
    assert metrics["kl_loss"] == pytest.approx(value)


def test_packed_policy_loss_weights_scale_the_policy_term_alone():
    stream = stream_of([1.0] * 3, [0.0] * 3, [0, 2, 3], weights=[4.0, 1.0, 0.5], ref_logprobs=[-LN2] * 3)
    loss, grad, metrics = loss_and_gradient([0.0] * 3, stream, PolicyObjective(kl_coef=0.5, kl_estimator="k1"))
    assert grad == pytest.approx([0.5 - w for w in (4.0, 1.0, 0.5)])
    assert metrics["policy_loss"] == pytest.approx(-5.5) and metrics["kl_loss"] == pytest.approx(3 * LN2)
    assert loss == pytest.approx(-5.5 + 0.5 * 3 * LN2)


def test_packed_policy_loss_entropy_bonus_lowers_the_loss_and_gives_its_gradient():
    entropy = torch.tensor([2.0, 3.0], requires_grad=True)
    stream = stream_of([0.0, 0.0], [0.0, 0.0], num_tokens=4)
    loss, metrics = packed_policy_loss(torch.zeros(2), stream, PolicyObjective(entropy_coef=0.1), entropy=entropy)
    loss.backward()
    assert loss.item() == pytest.approx(-0.1 * 5 / 4)
    torch.testing.assert_close(entropy.grad, torch.full((2,), -0.1 / 4))
    assert metrics[POLICY_METRICS.index("entropy_bonus")].item() == pytest.approx(5 / 4)


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_packed_policy_loss_unbiased_kl_of_extremes_is_finite_and_its_weight_bounded(estimator):
    logprobs = torch.tensor([300.0, -300.0, 0.0], requires_grad=True)
    old, reference = torch.tensor([0.0, 0.0, -9.0]), torch.tensor([0.0, 0.0, -0.5])
    loss = kl_loss(logprobs, old, reference, estimator, unbiased_gradient=True)
    loss.sum().backward()
    assert loss.isfinite().all() and logprobs.grad.isfinite().all()
    assert logprobs.grad[2].item() == pytest.approx(0.5 * MAX_WEIGHT)


@pytest.mark.parametrize(
    ("ratio", "advantage", "dual_clip", "expected"),
    [
        # The range is [0.75, 1.25]; its ends belong to it.
        (1.25, 1.0, None, False),
        (1.26, 1.0, None, True),
        (1.26, 0.0, None, False),
        (1.26, -1.0, None, False),
        (0.75, -1.0, None, False),
        (0.74, -1.0, None, True),
        (0.74, 0.0, None, False),
        (0.74, 0.5, None, False),
        # The dual clip is for negative advantages only.
        (3.0, -1.0, 3.0, False),
        (3.01, -1.0, 3.0, True),
        (3.01, 0.0, 3.0, False),
        (2.99, -0.5, 3.0, False),
    ],
)
def test_is_clipped_only_beyond_the_end_that_the_advantage_favours(ratio, advantage, dual_clip, expected):
    found = is_clipped(
        torch.tensor([ratio]), torch.tensor([advantage]), clip_low=0.25, clip_high=0.25, dual_clip=dual_clip
    )
    assert found.tolist() == [expected]


def test_is_clipped_dual_clip_does_not_concern_a_small_positive_advantage():
    found = is_clipped(torch.tensor([4.0]), torch.tensor([0.5]), clip_low=0.25, clip_high=9.0, dual_clip=3.0)
    assert found.tolist() == [False]


@EVERY_LOSS
@pytest.mark.parametrize("poison", [math.nan, math.inf, 1e30])
def test_packed_policy_loss_does_not_see_what_is_not_trained(name, poison):
    objective = PolicyObjective(policy_loss=name, kl_coef=0.1, kl_estimator="k3")
    results = []
    for other in (0.5, poison):
        columns = {key: [1.5, other, 0.25] for key in ("advantages", "old", "ref_logprobs", "weights")}
        stream = stream_of(**columns, mask=[True, False, True])
        results.append(loss_and_gradient([0.75, other, 0.5], stream, objective))
    assert results[0] == results[1] and results[0][1][1] == 0.0


def test_packed_policy_loss_without_old_logprobs_has_a_ratio_of_one():
    stream = replace(stream_of([1.5], [0.0]), old_logprobs=None)
    loss, grad, metrics = loss_and_gradient([-3.0], stream, PolicyObjective())
    assert (loss, grad, metrics["ratio"], metrics["kl_to_old"]) == (-1.5, [-1.5], 1.0, 0.0)


@EVERY_LOSS
@pytest.mark.parametrize(("num_tokens", "bounds"), [(0, [0]), (0, [0, 0]), (2, [0, 2])])
def test_packed_policy_loss_of_nothing_that_is_trained_is_zero_with_a_gradient(name, num_tokens, bounds):
    logprobs = torch.zeros(num_tokens, requires_grad=True)
    stream = stream_of([1.0] * num_tokens, [0.0] * num_tokens, bounds, mask=[False] * num_tokens)
    loss, metrics = packed_policy_loss(logprobs, stream, PolicyObjective(policy_loss=name))
    loss.backward()
    assert loss.item() == 0.0 and not metrics.any()
    assert logprobs.grad.shape == (num_tokens,) and not logprobs.grad.any()


@pytest.mark.parametrize("policy_loss", ["ppo", "reinforce"])
@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_packed_policy_loss_gradient_equals_the_numerical_one_in_float64(policy_loss, estimator):
    torch.manual_seed(0)
    logprobs, entropy = torch.randn(2, 9, dtype=torch.float64).requires_grad_()
    columns = {name: (torch.randn(9) / 2).tolist() for name in ("old", "ref_logprobs", "weights")}
    stream = stream_of(torch.randn(9).tolist(), **columns, bounds=[0, 4, 9], dtype=torch.float64)
    objective = PolicyObjective(policy_loss=policy_loss, kl_coef=0.3, kl_estimator=estimator, entropy_coef=0.2)
    objective = replace(objective, reduction="seq_mean_token_mean", dual_clip=3.0 if policy_loss == "ppo" else None)
    assert torch.autograd.gradcheck(
        lambda x, h: packed_policy_loss_reference(x, h, stream, objective)[0], (logprobs, entropy)
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"policy_loss": "dpo"}, "policy_loss is 'dpo'; allowed: ppo, gspo, cispo, reinforce, sapo"),
        ({"reduction": "mean"}, "reduction is 'mean'"),
        ({"clip_low": 1.0}, r"clip_low is 1.0; allowed: in \[0, 1\)"),
        ({"clip_high": -0.1}, "clip_high is -0.1"),
        ({"dual_clip": 1.0}, "dual_clip is 1.0; allowed: > 1"),
        ({"dual_clip": 3.0, "policy_loss": "gspo"}, "None unless policy_loss is ppo"),
        ({"sapo_tau": (1.0, 0.0)}, r"sapo_tau is \(1.0, 0.0\); allowed: two numbers > 0"),
        ({"log_ratio_coef": -1.0}, "log_ratio_coef is -1.0"),
        ({"mask_off_policy": -0.1}, "mask_off_policy is -0.1; allowed: >= 0, or None"),
        ({"kl_coef": float("nan")}, "kl_coef is nan"),
        ({"entropy_coef": -1.0}, "entropy_coef is -1.0"),
    ],
)
def test_policy_objective_wrong_value_says_what_is_allowed(options, message):
    with pytest.raises(ValueError, match=message):
        PolicyObjective(**options)


@pytest.mark.parametrize(
    ("changes", "objective", "message"),
    [
        ({"advantages": torch.zeros(3)}, {}, r"advantages must be \[2\] on cpu in .*; got \[3\]"),
        ({"loss_mask": torch.ones(2)}, {}, "loss_mask must be .* in bool; got .* torch.float32"),
        ({"old_logprobs": torch.zeros(2, device="meta")}, {}, "old_logprobs must be .* on cpu"),
        ({"ref_logprobs": torch.zeros(2).double()}, {}, "ref_logprobs must be .* torch.float64"),
        ({"cu_seqlens": torch.tensor([0.0, 2.0])}, {}, "cu_seqlens must be .* int32 or int64"),
        ({"cu_seqlens": torch.tensor(2)}, {}, "cu_seqlens must be"),
        ({"cu_seqlens": torch.tensor([0, 1])}, {}, "rise from 0 to 2; got"),
        ({"cu_seqlens": torch.tensor([1, 2])}, {}, "rise from 0 to 2"),
        ({"cu_seqlens": torch.tensor([0, 2, 1, 2])}, {}, "rise from 0 to 2"),
        ({}, {"kl_coef": 0.1}, "kl_coef is 0.1; without ref_logprobs"),
        ({}, {"entropy_coef": 0.1}, "entropy_coef is 0.1; without entropy"),
    ],
)
def test_packed_policy_loss_wrong_stream_says_what_is_allowed(changes, objective, message):
    stream = replace(stream_of([1.0, 1.0], [0.0, 0.0]), **changes)
    with pytest.raises(ValueError, match=message):
        packed_policy_loss(torch.zeros(2), stream, PolicyObjective(**objective))


@pytest.mark.parametrize("logprobs", [torch.zeros(2, 1), torch.zeros(2).double()])
def test_packed_policy_loss_wrong_logprobs_say_what_is_allowed(logprobs):
    with pytest.raises(ValueError, match=r"takes logprobs \[N\]"):
        packed_policy_loss(logprobs, stream_of([1.0, 1.0], [0.0, 0.0]), PolicyObjective())
