"""`packed_policy_loss` on the CPU: the plain twin, against which the Triton kernel is tested."""

import math
from dataclasses import replace

import pytest
import torch

from rlhf_kernels import POLICY_METRICS, PolicyObjective, PolicyStream, packed_policy_loss
from rlhf_kernels.ops.packed_policy_loss.reference import packed_policy_loss_reference

LN2 = math.log(2.0)


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


def test_packed_policy_loss_dual_clip_bounds_the_loss_of_a_negative_advantage():
    loss, grad, metrics = loss_and_gradient([0.0], stream_of([-1.0], [-LN2]), PolicyObjective(dual_clip=1.5))
    assert (loss, grad, metrics["clipped"]) == (1.5, [0.0], 1.0)


def test_packed_policy_loss_gspo_takes_the_geometric_mean_of_each_sequence():
    # Sequence ratios: sqrt(4 * 1) = 2 and 1 (its trained token agrees); clip up to 10 leaves both.
    stream = stream_of([1.0, 1.0, 3.0, 9.0], [-2 * LN2, 0.0, 0.0, 5.0], [0, 2, 4], [True, True, True, False])
    objective = PolicyObjective(policy_loss="gspo", clip_high=9.0, reduction="seq_mean_token_mean")
    loss, grad, _ = loss_and_gradient([0.0] * 4, replace(stream, num_sequences=2), objective)
    assert loss == pytest.approx(-(2.0 + 3.0) / 2)
    assert grad == pytest.approx([-0.5, -0.5, -1.5, 0.0])


def test_packed_policy_loss_cispo_keeps_the_gradient_under_a_clipped_weight():
    loss, grad, metrics = loss_and_gradient([0.5], stream_of([2.0], [0.5 - LN2]), PolicyObjective(policy_loss="cispo"))
    assert loss == pytest.approx(-1.2 * 2.0 * 0.5)
    assert grad == pytest.approx([-2.4])
    assert metrics["clipped"] == 1


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


def test_packed_policy_loss_nan_outside_the_mask_changes_nothing():
    nan = float("nan")
    stream = stream_of([1.0, nan], [0.0, nan], mask=[True, False], ref_logprobs=[0.0, nan], weights=[2.0, nan])
    loss, grad, metrics = loss_and_gradient([0.0, nan], stream, PolicyObjective(kl_coef=0.1, kl_estimator="k3"))
    assert (loss, grad) == (-2.0, [-2.0, 0.0])
    assert all(math.isfinite(value) for value in metrics.values())


def test_packed_policy_loss_without_old_logprobs_has_a_ratio_of_one():
    stream = replace(stream_of([1.5], [0.0]), old_logprobs=None)
    loss, grad, metrics = loss_and_gradient([-3.0], stream, PolicyObjective())
    assert (loss, grad, metrics["ratio"], metrics["kl_to_old"]) == (-1.5, [-1.5], 1.0, 0.0)


@pytest.mark.parametrize("bounds", [[0], [0, 0]])
def test_packed_policy_loss_no_tokens_gives_zero_and_a_gradient(bounds):
    logprobs = torch.zeros(0, requires_grad=True)
    loss, metrics = packed_policy_loss(logprobs, stream_of([], [], bounds), PolicyObjective(policy_loss="gspo"))
    loss.backward()
    assert loss.item() == 0.0 and not metrics.any() and logprobs.grad.shape == (0,)


def test_packed_policy_loss_share_of_two_micro_batches_adds_up():
    torch.manual_seed(0)
    columns = {name: torch.randn(7).tolist() for name in ("advantages", "old", "ref_logprobs")}
    objective = PolicyObjective(reduction="seq_mean_token_mean", kl_coef=0.3)
    whole = stream_of(**columns, bounds=[0, 3, 7], num_sequences=2)
    logprobs = torch.randn(7).tolist()
    loss, grad, _ = loss_and_gradient(logprobs, whole, objective)
    parts = [
        loss_and_gradient(
            logprobs[cut], stream_of(**{k: v[cut] for k, v in columns.items()}, num_sequences=2), objective
        )
        for cut in (slice(3), slice(3, 7))
    ]
    assert loss == pytest.approx(parts[0][0] + parts[1][0])
    assert grad == pytest.approx(parts[0][1] + parts[1][1])


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
        ({"policy_loss": "dpo"}, "policy_loss is 'dpo'; allowed: ppo, gspo, cispo, reinforce"),
        ({"reduction": "mean"}, "reduction is 'mean'"),
        ({"clip_low": 1.0}, r"clip_low is 1.0; allowed: in \[0, 1\)"),
        ({"clip_high": -0.1}, "clip_high is -0.1"),
        ({"dual_clip": 1.0}, "dual_clip is 1.0; allowed: > 1"),
        ({"dual_clip": 3.0, "policy_loss": "gspo"}, "None unless policy_loss is ppo"),
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
