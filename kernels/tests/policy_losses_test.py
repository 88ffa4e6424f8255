"""The losses that the twin of `packed_policy_loss` is made of: values and gradients by hand, masks, odd sequences."""

import itertools
import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from rlhf_kernels import PolicyObjective, PolicyStream
from rlhf_kernels.ops.packed_policy_loss.reference import (
    cispo_loss,
    clipped_policy_loss,
    is_clipped,
    kl_loss,
    packed_policy_loss_reference,
    policy_ratio,
    reinforce_loss,
    sequence_ratio,
)
from rlhf_kernels.ops.packed_policy_loss.terms import MAX_LOG_RATIO, MAX_WEIGHT

RANGE = {"clip_low": 0.2, "clip_high": 0.2}


def row(*numbers: float) -> Tensor:
    return torch.tensor(numbers, dtype=torch.float64)


def log_of(*ratios: float) -> Tensor:
    return row(*ratios).log().requires_grad_()


def clipped(ratio: float, advantage: float, **options: float) -> tuple[float, float]:
    """The clipped loss and its gradient by the log-prob."""
    logprobs = log_of(ratio)
    loss = clipped_policy_loss(policy_ratio(logprobs, row(0)), row(advantage), **RANGE, **options)
    loss.sum().backward()
    return loss.item(), logprobs.grad.item()


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "gradient"),
    [
        (1.0, 2.0, -2.0, -2.0),  # on policy: -A, and d(-r A)/d logprob = -r A
        (1.1, 2.0, -2.2, -2.2),  # inside the range
        (1.5, 2.0, -2.4, 0.0),  # above it, favoured: held at 1.2 A
        (0.5, 2.0, -1.0, -1.0),  # below it, not favoured: free, so that it can come back
        (0.5, -2.0, 1.6, 0.0),  # below it, favoured: held at 0.8 A
        (1.5, -2.0, 3.0, 3.0),  # above it, not favoured: free
        (1.0, 0.0, 0.0, 0.0),
    ],
)
def test_clipped_policy_loss_matches_hand_values(ratio, advantage, loss, gradient):
    assert clipped(ratio, advantage) == pytest.approx((loss, gradient), abs=1e-12)


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "gradient"),
    [
        (5.0, -2.0, 6.0, 0.0),  # free it were 10; at most 3 |A|, and flat there
        (2.0, -2.0, 4.0, 4.0),  # below 3 |A|: free
        (0.5, -2.0, 1.6, 0.0),  # held by the lower bound as without it
        (5.0, 2.0, -2.4, 0.0),  # of positive advantages it says nothing
        (0.5, 2.0, -1.0, -1.0),
    ],
)
def test_dual_clip_bounds_the_loss_of_negative_advantages_only(ratio, advantage, loss, gradient):
    assert clipped(ratio, advantage, dual_clip=3.0) == pytest.approx((loss, gradient))


def test_clipped_policy_loss_uneven_range_uses_each_bound():
    loss = clipped_policy_loss(row(1.25, 0.75), row(1.0, -1.0), clip_low=0.1, clip_high=0.28)
    assert loss.tolist() == pytest.approx([-1.25, 0.9])


@pytest.mark.parametrize("dual_clip", [None, 3.0])
def test_is_clipped_agrees_with_where_the_gradient_vanishes(dual_clip):
    for ratio, advantage in [(1.5, 1.0), (0.5, 1.0), (0.5, -1.0), (1.5, -1.0), (4.0, -1.0), (1.0, 1.0)]:
        flat = is_clipped(row(ratio), row(advantage), **RANGE, dual_clip=dual_clip)
        assert bool(flat) == (clipped(ratio, advantage, dual_clip=dual_clip)[1] == 0.0)


def test_policy_ratio_of_equal_logprobs_is_exactly_one_and_of_far_ones_is_held_without_gradient():
    logprobs = torch.randn(7)
    assert torch.equal(policy_ratio(logprobs, logprobs), torch.ones(7))
    far = torch.tensor([200.0], requires_grad=True)
    ratio = policy_ratio(far, torch.zeros(1))
    ratio.backward()
    assert ratio.item() == pytest.approx(math.exp(MAX_LOG_RATIO), rel=1e-5) and far.grad.item() == 0.0


def test_sequence_ratio_is_the_geometric_mean_over_trained_tokens():
    # 2 and 8 are trained: sqrt(2 x 8) = 4, in every place; the third token does not count, the fourth is another's.
    logprobs, mask = log_of(2.0, 8.0, 99.0, 3.0), torch.tensor([True, True, False, True])
    ratio = sequence_ratio(logprobs, torch.zeros(4), mask, torch.tensor([0, 3, 3, 4]))
    assert ratio.tolist() == pytest.approx([4.0, 4.0, 4.0, 3.0])
    # Each place has the gradient of its own token alone, s_i.
    ratio[0].backward()
    assert logprobs.grad.tolist() == pytest.approx([4.0, 0.0, 0.0, 0.0])


def test_sequence_ratio_of_equal_policies_and_of_nothing_is_exactly_one():
    logprobs, bounds = torch.randn(10), torch.tensor([0, 5, 10])
    mask = torch.tensor([True] * 5 + [False] * 5)
    assert torch.equal(sequence_ratio(logprobs, logprobs, mask, bounds), torch.ones(10))
    assert torch.equal(sequence_ratio(torch.full((10,), 7.0), logprobs, mask, bounds)[5:], torch.ones(5))


def stream_of(old: Tensor, advantages: Tensor, mask: Tensor, bounds: Tensor, **counts: int) -> PolicyStream:
    """A stream whose counts are its own, unless given."""
    own = torch.stack([part.any() for part in mask.split(bounds.diff().tolist())]).sum() if len(mask) else 0
    counts = {"num_tokens": int(mask.sum()), "num_sequences": int(own), "max_tokens": 9} | counts
    return PolicyStream(advantages=advantages, loss_mask=mask, cu_seqlens=bounds, old_logprobs=old, **counts)


def learned(logprobs: Tensor, stream: PolicyStream, objective: PolicyObjective) -> tuple[float, Tensor]:
    logprobs = logprobs.detach().clone().requires_grad_()
    loss, _ = packed_policy_loss_reference(logprobs, None, stream, objective)
    loss.backward()
    return loss.item(), logprobs.grad


@pytest.mark.parametrize(
    ("ratios", "advantage", "loss", "gradient"),
    [
        ((2.0, 0.5), 3.0, -3.0, (-1.5, -1.5)),  # s = 1: -A, though both tokens are far out; -s A / n
        ((1.21, 1.0), 3.0, -3.3, (-1.65, -1.65)),  # s = 1.1, within the range
        ((2.25, 1.0), 3.0, -3.6, (0.0, 0.0)),  # s = 1.5: held at 1.2 A
        ((0.25, 1.0), 3.0, -1.5, (-0.75, -0.75)),  # s = 0.5, not favoured: free
        ((0.25, 1.0), -3.0, 2.4, (0.0, 0.0)),  # s = 0.5, favoured: held at 0.8 A
    ],
)
def test_gspo_loss_of_a_sequence_matches_hand_values(ratios, advantage, loss, gradient):
    stream = stream_of(row(0, 0), row(advantage, advantage), torch.ones(2).bool(), torch.tensor([0, 2]))
    objective = PolicyObjective(policy_loss="gspo", reduction="seq_mean_token_mean")
    value, grad = learned(log_of(*ratios), stream, objective)
    assert value == pytest.approx(loss)
    assert grad.tolist() == pytest.approx(gradient)


def test_gspo_gradient_is_that_of_the_sequence_ratio_written_out():
    # The paper's objective, s_i = exp(mean of log ratios), through autograd: no trick with constants.
    torch.manual_seed(0)
    logprobs, old = torch.randn(2, 2, 4).double() * 0.1
    advantages = torch.tensor([[1.5], [-0.5]]).double().expand(2, 4)
    mask = torch.tensor([[True, True, True, False], [False, True, False, True]])
    stream = stream_of(old.flatten(), advantages.flatten(), mask.flatten(), torch.tensor([0, 4, 8]))
    objective = PolicyObjective(policy_loss="gspo", reduction="seq_mean_token_mean", clip_low=0.9, clip_high=9.0)
    _, grad = learned(logprobs.flatten(), stream, objective)
    slow = logprobs.clone().requires_grad_()
    ratio = torch.exp(((slow - old) * mask).sum(dim=1) / mask.sum(dim=1))
    (-(ratio * advantages[:, 0]).mean()).backward()
    assert torch.allclose(grad, slow.grad.flatten())


@pytest.mark.parametrize(
    ("ratio", "advantage", "weight"),
    [(1.1, 2.0, 1.1), (1.5, 2.0, 1.2), (1.5, -2.0, 1.2), (0.5, 2.0, 0.8), (0.5, -2.0, 0.8)],
)
def test_cispo_gradient_is_never_cut_off_only_its_weight_is_bounded(ratio, advantage, weight):
    logprobs = log_of(ratio)
    value = cispo_loss(logprobs, policy_ratio(logprobs, row(0)), row(advantage), **RANGE)
    value.sum().backward()
    assert value.item() == pytest.approx(-weight * advantage * math.log(ratio))
    assert logprobs.grad.item() == pytest.approx(-weight * advantage)


def test_reinforce_loss_matches_hand_values():
    logprobs = row(-1.0, -2.0).requires_grad_()
    value = reinforce_loss(logprobs, row(3.0, -0.5))
    value.sum().backward()
    assert value.tolist() == [3.0, -1.0]  # -A log p
    assert logprobs.grad.tolist() == [-3.0, 0.5]


LOSSES = ("ppo", "gspo", "cispo", "reinforce")
REDUCTIONS = ("token_mean", "seq_mean_token_mean", "seq_mean_token_sum", "seq_mean_token_sum_norm")
EVERY_LOSS = pytest.mark.parametrize("name", LOSSES)
LENGTHS = (6, 3, 2, 4)


def random_batch() -> tuple[list[Tensor], ...]:
    """Four sequences: of several trained tokens, of one, of none, and with a hole."""
    generator = torch.Generator().manual_seed(0)
    columns = (torch.randn(15, generator=generator, dtype=torch.float64) * 0.3 for _ in range(3))
    mask = torch.tensor([0, 1, 1, 1, 1, 1, 0, 0, 1, 0, 0, 1, 1, 0, 1]).bool()
    return tuple(list(column.split(LENGTHS)) for column in (*columns, mask))


def of_batch(batch: tuple[list[Tensor], ...], name: str, reduction: str = "token_mean") -> tuple[float, list[Tensor]]:
    """Return the loss of (logprobs, old, advantages, mask), each a list of sequences, and its gradient, as one."""
    lengths = [len(part) for part in batch[0]]
    bounds = torch.tensor([0, *itertools.accumulate(lengths)])
    logprobs, old, advantages, mask = (torch.cat(parts) for parts in batch)
    objective = PolicyObjective(policy_loss=name, reduction=reduction)
    loss, grad = learned(logprobs, stream_of(old, advantages, mask, bounds), objective)
    return loss, list(grad.split(lengths))


@EVERY_LOSS
def test_policy_loss_pushes_up_what_was_good_and_down_what_was_bad(name):
    logprobs, advantages = torch.full((6,), -1.0).double(), row(2, 2, 2, -2, -2, -2)
    stream = stream_of(logprobs, advantages, torch.ones(6).bool(), torch.tensor([0, 3, 6]))
    # On policy every loss has the same gradient: -A, over the six tokens.
    assert torch.allclose(learned(logprobs, stream, PolicyObjective(policy_loss=name))[1], -advantages / 6)


@EVERY_LOSS
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_policy_loss_does_not_know_the_order_of_sequences(name, reduction):
    batch, order = random_batch(), [2, 0, 3, 1]
    loss, grads = of_batch(batch, name, reduction)
    other_loss, other_grads = of_batch(tuple([parts[i] for i in order] for parts in batch), name, reduction)
    assert other_loss == pytest.approx(loss, rel=1e-12)
    for got, i in zip(other_grads, order, strict=True):
        assert torch.allclose(got, grads[i], rtol=1e-12)


@EVERY_LOSS
@pytest.mark.parametrize("poison", [float("nan"), float("inf"), 1e30])
def test_policy_loss_does_not_see_what_is_not_trained(name, poison):
    logprobs, old, advantages, mask = random_batch()
    loss, grads = of_batch((logprobs, old, advantages, mask), name)
    poisoned = (
        [x.masked_fill(~m, poison) for x, m in zip(column, mask, strict=True)] for column in (logprobs, old, advantages)
    )
    other_loss, other_grads = of_batch((*poisoned, mask), name)
    assert other_loss == loss and torch.equal(torch.cat(other_grads), torch.cat(grads))


@EVERY_LOSS
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_policy_loss_of_one_token_and_of_none(name, reduction):
    batch = tuple(parts[1:3] for parts in random_batch())
    loss, grads = of_batch(batch, name, reduction)
    token = of_batch(tuple([parts[0][2:]] for parts in batch), name)[0]
    assert loss == pytest.approx(token / (9 if reduction == "seq_mean_token_sum_norm" else 1))
    assert torch.equal(torch.cat(grads) != 0, torch.cat(batch[3]))
    nothing, grads = of_batch(tuple(parts[1:] for parts in batch), name, reduction)
    assert nothing == 0.0 and not torch.cat(grads).any()


@EVERY_LOSS
def test_policy_loss_gives_its_constants_no_gradient(name):
    logprobs, old, advantages, reference, weights = torch.randn(5, 4).double().requires_grad_().unbind()
    constants = {"old_logprobs": old, "advantages": advantages, "ref_logprobs": reference, "weights": weights}
    stream = stream_of(old, advantages, torch.ones(4).bool(), torch.tensor([0, 4]))
    objective = PolicyObjective(policy_loss=name, kl_coef=0.5, kl_unbiased_gradient=True)
    loss, _ = packed_policy_loss_reference(logprobs, None, replace(stream, **constants), objective)
    inputs = (logprobs, *constants.values())
    grads = torch.autograd.grad(loss, inputs, allow_unused=True)
    assert grads[0].any() and grads[1:] == (None,) * 4


@EVERY_LOSS
def test_policy_loss_of_equal_rewards_is_without_gradient(name):
    logprobs, old, advantages, mask = random_batch()
    loss, grads = of_batch((logprobs, old, [torch.zeros_like(x) for x in advantages], mask), name)
    assert loss == 0.0 and not torch.cat(grads).any()


@pytest.mark.parametrize(("name", "sign"), itertools.product(("ppo", "gspo", "cispo"), (1, -1)))
def test_policy_loss_of_extreme_ratios_stays_finite(name, sign):
    stream = stream_of(torch.zeros(2), torch.full((2,), -1.0), torch.ones(2).bool(), torch.tensor([0, 2]))
    loss, grad = learned(torch.full((2,), sign * 500.0), stream, PolicyObjective(policy_loss=name))
    assert math.isfinite(loss) and abs(loss) <= math.exp(MAX_LOG_RATIO) * 1.001
    assert grad.isfinite().all()


ESTIMATORS = pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
# A policy over four tokens, as logits, so that its gradient is free; an older one, and the reference.
LOGITS = torch.tensor([0.9, -0.3, 0.2, -1.1]).double()
OLD = torch.log_softmax(torch.tensor([0.5, 0.1, -0.4, -0.7]).double(), 0)
REFERENCE = torch.log_softmax(torch.tensor([-0.6, 0.8, 0.3, 0.1]).double(), 0)


def gradient_of(loss_of_logprobs) -> Tensor:
    logits = LOGITS.clone().requires_grad_()
    loss_of_logprobs(torch.log_softmax(logits, 0)).backward()
    return logits.grad


def expected_gradient(sampler: Tensor, estimator: str, **options: bool) -> Tensor:
    """The mean, over tokens that `sampler` draws, of the gradient of the KL loss of each."""

    def mean_loss(logprobs: Tensor) -> Tensor:
        tokens = kl_loss(logprobs, sampler, REFERENCE, estimator, **options)
        return (sampler.exp().detach() * tokens).sum()

    return gradient_of(mean_loss)


def exact_gradient() -> Tensor:
    return gradient_of(lambda logprobs: (logprobs.exp() * (logprobs - REFERENCE)).sum())


def reverse_gradient() -> Tensor:
    return gradient_of(lambda logprobs: (REFERENCE.exp() * (REFERENCE - logprobs)).sum())


@ESTIMATORS
@pytest.mark.parametrize("sampler", [torch.log_softmax(LOGITS, 0), OLD], ids=["on policy", "old policy"])
def test_unbiased_gradient_is_in_expectation_that_of_the_divergence(estimator, sampler):
    assert torch.allclose(expected_gradient(sampler, estimator, unbiased_gradient=True), exact_gradient(), atol=1e-14)


def test_default_gradients_on_policy_are_zero_the_divergences_and_the_reverse_ones():
    own = torch.log_softmax(LOGITS, 0)
    assert exact_gradient().abs().max() > 0.1 and not torch.allclose(exact_gradient(), reverse_gradient(), atol=0.05)
    assert torch.allclose(expected_gradient(own, "k1"), torch.zeros(4).double(), atol=1e-14)
    assert torch.allclose(expected_gradient(own, "k2"), exact_gradient(), atol=1e-14)
    assert torch.allclose(expected_gradient(own, "k3"), reverse_gradient(), atol=1e-14)


@pytest.mark.parametrize("unbiased", [False, True])
@pytest.mark.parametrize(("estimator", "value"), [("k1", 0.5), ("k2", 0.125), ("k3", math.exp(-0.5) - 0.5)])
def test_kl_loss_value_is_the_estimate_either_way(estimator, value, unbiased):
    # d = 0.5: k1 = d, k2 = d^2 / 2, k3 = e^-d - 1 + d
    assert kl_loss(row(0), row(3), row(-0.5), estimator, unbiased_gradient=unbiased).item() == pytest.approx(value)
    old = torch.randn(5)
    assert torch.equal(kl_loss(old, old, old, estimator, unbiased_gradient=unbiased), torch.zeros(5))


@ESTIMATORS
def test_kl_loss_pulls_towards_the_reference(estimator):
    # d = 0.5 and w = exp(0.2): w d, whatever the estimator.
    logprobs = row(0).requires_grad_()
    kl_loss(logprobs, row(-0.2), row(-0.5), estimator, unbiased_gradient=True).backward()
    assert logprobs.grad.item() == pytest.approx(0.5 * math.exp(0.2))


def test_kl_loss_weight_is_bounded():
    logprobs = row(0).requires_grad_()
    kl_loss(logprobs, row(-9), row(-0.5), "k1", unbiased_gradient=True).backward()
    assert logprobs.grad.item() == pytest.approx(0.5 * MAX_WEIGHT)


@ESTIMATORS
def test_kl_loss_of_extremes_is_finite(estimator):
    logprobs = row(300, -300).requires_grad_()
    loss = kl_loss(logprobs, row(0, 0), row(0, 0), estimator, unbiased_gradient=True)
    loss.sum().backward()
    assert loss.isfinite().all() and logprobs.grad.isfinite().all()


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
