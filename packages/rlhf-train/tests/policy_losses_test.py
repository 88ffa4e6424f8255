"""Dual clip, GSPO, CISPO and the plain gradient: values and gradients by hand, masks, order and degenerate rollouts."""

import itertools
import math

import pytest
import torch
from torch import Tensor

from rlhf_train.algorithms import POLICY_LOSSES, REDUCTIONS, AlgorithmSpec
from rlhf_train.batching import Denominators
from rlhf_train.losses.aggregate import aggregate
from rlhf_train.losses.policy import (
    MAX_LOG_RATIO,
    cispo_loss,
    clipped_policy_loss,
    gspo_loss,
    reinforce_loss,
    sequence_ratio,
)
from rlhf_train.online.terms import policy_loss


def row(*numbers: float) -> Tensor:
    return torch.tensor([numbers], dtype=torch.float64)


def log_of(*ratios: float) -> Tensor:
    return row(*ratios).log().requires_grad_()


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
    logprobs = log_of(ratio)
    value = clipped_policy_loss(logprobs, row(0), row(advantage), clip_low=0.2, clip_high=0.2, dual_clip=3.0)
    value.sum().backward()
    assert (value.item(), logprobs.grad.item()) == pytest.approx((loss, gradient))


def test_sequence_ratio_is_the_geometric_mean_over_trained_tokens():
    # 2 and 8 are trained: sqrt(2 x 8) = 4, in every place; the third token does not count.
    logprobs, mask = log_of(2.0, 8.0, 99.0), torch.tensor([[True, True, False]])
    ratio = sequence_ratio(logprobs, row(0, 0, 0), mask)
    assert ratio.tolist()[0] == pytest.approx([4.0, 4.0, 4.0])
    # Each place has the gradient of its own token alone, s_i.
    ratio[0, 0].backward()
    assert logprobs.grad.tolist()[0] == pytest.approx([4.0, 0.0, 0.0])


def test_sequence_ratio_of_equal_policies_and_of_nothing_is_exactly_one():
    logprobs = torch.randn(3, 5)
    mask = torch.tensor([[True] * 5, [False] * 5, [True] + [False] * 4])
    assert torch.equal(sequence_ratio(logprobs, logprobs, mask), torch.ones(3, 5))
    far = torch.full((1, 5), 7.0)
    assert torch.equal(sequence_ratio(far, torch.zeros(1, 5), mask[1:2]), torch.ones(1, 5))


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
def test_gspo_loss_of_a_rollout_matches_hand_values(ratios, advantage, loss, gradient):
    logprobs, mask = log_of(*ratios), torch.ones(1, 2, dtype=torch.bool)
    tokens = gspo_loss(logprobs, row(0, 0), row(advantage, advantage), mask, clip_low=0.2, clip_high=0.2)
    value = aggregate(tokens, mask, "seq_mean_token_mean", Denominators(2, 1, 9))
    value.backward()
    assert value.item() == pytest.approx(loss)
    assert logprobs.grad.tolist()[0] == pytest.approx(gradient)


def test_gspo_gradient_is_that_of_the_sequence_ratio_written_out():
    # The paper's objective, s_i = exp(mean of log ratios), through autograd: no trick with constants.
    logprobs, old = torch.randn(2, 4).double() * 0.1, torch.randn(2, 4).double() * 0.1
    advantages = torch.tensor([[1.5], [-0.5]]).double().expand(2, 4)
    mask = torch.tensor([[True, True, True, False], [False, True, False, True]])
    fast, slow = logprobs.clone().requires_grad_(), logprobs.clone().requires_grad_()
    tokens = gspo_loss(fast, old, advantages, mask, clip_low=0.9, clip_high=9.0)
    aggregate(tokens, mask, "seq_mean_token_mean", Denominators(5, 2, 9)).backward()
    ratio = torch.exp(((slow - old) * mask).sum(dim=1) / mask.sum(dim=1))
    (-(ratio * advantages[:, 0]).mean()).backward()
    assert torch.allclose(fast.grad, slow.grad)


@pytest.mark.parametrize(
    ("ratio", "advantage", "weight"),
    [(1.1, 2.0, 1.1), (1.5, 2.0, 1.2), (1.5, -2.0, 1.2), (0.5, 2.0, 0.8), (0.5, -2.0, 0.8)],
)
def test_cispo_gradient_is_never_cut_off_only_its_weight_is_bounded(ratio, advantage, weight):
    logprobs = log_of(ratio)
    value = cispo_loss(logprobs, row(0), row(advantage), clip_low=0.2, clip_high=0.2)
    value.sum().backward()
    assert value.item() == pytest.approx(-weight * advantage * math.log(ratio))
    assert logprobs.grad.item() == pytest.approx(-weight * advantage)


def test_reinforce_loss_matches_hand_values():
    logprobs = row(-1.0, -2.0).requires_grad_()
    value = reinforce_loss(logprobs, row(3.0, -0.5))
    value.sum().backward()
    assert value.tolist() == [[3.0, -1.0]]  # -A log p
    assert logprobs.grad.tolist() == [[-3.0, 0.5]]


SPECS = {name: AlgorithmSpec(policy_loss=name, kl_coef=0) for name in POLICY_LOSSES}
EVERY_LOSS = pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)


def shares(spec: AlgorithmSpec, reduction: str, *tensors: Tensor) -> tuple[float, Tensor]:
    """Return the reduced loss of (logprobs, old, advantages, mask) and its gradient."""
    logprobs, old, advantages, mask = tensors
    logprobs = logprobs.clone().requires_grad_()
    counts = Denominators(int(mask.sum()), int(mask.any(dim=1).sum()), 9)
    loss = aggregate(policy_loss(logprobs, old, advantages, mask, spec), mask, reduction, counts)
    loss.backward()
    return loss.item(), logprobs.grad


def random_batch() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Four rollouts: of several tokens, of one, of none, and with a hole."""
    generator = torch.Generator().manual_seed(0)
    logprobs, old, advantages = (torch.randn(4, 6, generator=generator, dtype=torch.float64) * 0.3 for _ in range(3))
    mask = torch.tensor([[0, 1, 1, 1, 1, 1], [0, 0, 1, 0, 0, 0], [0] * 6, [0, 1, 1, 0, 0, 1]]).bool()
    return logprobs, old, advantages, mask


@EVERY_LOSS
def test_policy_loss_pushes_up_what_was_good_and_down_what_was_bad(spec):
    logprobs = torch.full((2, 3), -1.0).double()
    advantages = torch.tensor([[2.0], [-2.0]]).double().expand(2, 3)
    _, gradient = shares(spec, "token_mean", logprobs, logprobs, advantages, torch.ones(2, 3).bool())
    # On policy every loss has the same gradient: -A, over the six tokens.
    assert torch.allclose(gradient, -advantages / 6)


@EVERY_LOSS
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_policy_loss_does_not_know_the_order_of_rollouts(spec, reduction):
    tensors, order = random_batch(), [2, 0, 3, 1]
    loss, gradient = shares(spec, reduction, *tensors)
    other_loss, other_gradient = shares(spec, reduction, *(tensor[order] for tensor in tensors))
    assert other_loss == pytest.approx(loss, rel=1e-12)
    assert torch.allclose(other_gradient, gradient[order], rtol=1e-12)


@EVERY_LOSS
@pytest.mark.parametrize("poison", [float("nan"), float("inf"), 1e30])
def test_policy_loss_does_not_see_what_is_not_trained(spec, poison):
    logprobs, old, advantages, mask = random_batch()
    expected = shares(spec, "token_mean", logprobs, old, advantages, mask)
    poisoned = (tensor.masked_fill(~mask, poison) for tensor in (old, advantages))
    loss, gradient = shares(spec, "token_mean", logprobs, *poisoned, mask)
    assert loss == pytest.approx(expected[0])
    assert torch.allclose(gradient[mask], expected[1][mask])


@EVERY_LOSS
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_policy_loss_of_one_token_and_of_none(spec, reduction):
    logprobs, old, advantages, mask = (tensor[1:3] for tensor in random_batch())
    loss, gradient = shares(spec, reduction, logprobs, old, advantages, mask)
    token = policy_loss(logprobs[:1, 2:3], old[:1, 2:3], advantages[:1, 2:3], mask[:1, 2:3], spec).item()
    assert loss == pytest.approx(token / (9 if reduction == "seq_mean_token_sum_norm" else 1))
    assert torch.equal(gradient != 0, mask)
    nothing = shares(spec, reduction, logprobs[1:], old[1:], advantages[1:], mask[1:])
    assert nothing[0] == 0.0 and (nothing[1] == 0).all()


@EVERY_LOSS
def test_policy_loss_of_equal_rewards_is_without_gradient(spec):
    logprobs, old, advantages, mask = random_batch()
    loss, gradient = shares(spec, "token_mean", logprobs, old, torch.zeros_like(advantages), mask)
    assert loss == 0.0 and (gradient == 0).all()


@pytest.mark.parametrize(("name", "sign"), itertools.product(("ppo", "gspo", "cispo"), (1, -1)))
def test_policy_loss_of_extreme_ratios_stays_finite(name, sign):
    logprobs, mask = torch.full((1, 2), sign * 500.0), torch.ones(1, 2).bool()
    loss, gradient = shares(SPECS[name], "token_mean", logprobs, torch.zeros(1, 2), torch.full((1, 2), -1.0), mask)
    assert math.isfinite(loss) and abs(loss) <= math.exp(MAX_LOG_RATIO) * 1.001
    assert gradient.isfinite().all()


def test_policy_losses_of_other_shapes_are_refused():
    two, three, mask = torch.zeros(1, 2), torch.zeros(1, 3), torch.ones(1, 2).bool()
    for call in (
        lambda: gspo_loss(two, two, three, mask, clip_low=0.2, clip_high=0.2),
        lambda: cispo_loss(two, three, two, clip_low=0.2, clip_high=0.2),
        lambda: reinforce_loss(two, three),
    ):
        with pytest.raises(ValueError, match="shapes differ"):
            call()
