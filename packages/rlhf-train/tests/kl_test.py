"""The KL loss, whose gradient is held to autograd of the exact divergence, and the coefficient that adapts."""

import math

import pytest
import torch
from torch import Tensor

from rlhf_train.algorithms import KL_ESTIMATORS
from rlhf_train.kl import MAX_WEIGHT, adapted_kl_coef, kl_estimate, kl_loss

ESTIMATORS = pytest.mark.parametrize("estimator", KL_ESTIMATORS)
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
        tokens = kl_loss(logprobs[None], sampler[None], REFERENCE[None], estimator, **options)[0]
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


@ESTIMATORS
@pytest.mark.parametrize("unbiased", [False, True])
def test_kl_loss_value_is_the_estimate_either_way(estimator, unbiased):
    logprobs, old, reference = torch.randn(3, 2, 5).unbind()
    loss = kl_loss(logprobs, old, reference, estimator, unbiased_gradient=unbiased)
    assert torch.allclose(loss, kl_estimate(logprobs, reference, estimator), atol=1e-6)
    assert torch.equal(kl_loss(old, old, old, estimator, unbiased_gradient=unbiased), torch.zeros(2, 5))


@ESTIMATORS
def test_kl_loss_pulls_towards_the_reference(estimator):
    # d = 0.5 and w = exp(0.2): w d, whatever the estimator.
    logprobs = torch.tensor([[0.0]], requires_grad=True)
    old, reference = torch.tensor([[-0.2]], requires_grad=True), torch.tensor([[-0.5]], requires_grad=True)
    kl_loss(logprobs, old, reference, estimator, unbiased_gradient=True).sum().backward()
    assert logprobs.grad.item() == pytest.approx(0.5 * math.exp(0.2))
    assert old.grad is None and reference.grad is None


def test_kl_loss_weight_is_bounded():
    logprobs = torch.tensor([[0.0]], requires_grad=True)
    kl_loss(logprobs, torch.tensor([[-9.0]]), torch.tensor([[-0.5]]), "k1", unbiased_gradient=True).sum().backward()
    assert logprobs.grad.item() == pytest.approx(0.5 * MAX_WEIGHT)


@ESTIMATORS
def test_kl_loss_of_extremes_is_finite(estimator):
    logprobs = torch.tensor([[300.0, -300.0]], requires_grad=True)
    loss = kl_loss(logprobs, torch.zeros(1, 2), torch.zeros(1, 2), estimator, unbiased_gradient=True)
    loss.sum().backward()
    assert loss.isfinite().all() and logprobs.grad.isfinite().all()


def test_kl_loss_of_other_shapes_is_refused():
    two, three = torch.zeros(1, 2), torch.zeros(1, 3)
    for old, reference in ((three, two), (two, three)):
        with pytest.raises(ValueError, match="shapes differ"):
            kl_loss(two, old, reference, "k1", unbiased_gradient=True)


@pytest.mark.parametrize(
    ("kl", "expected"),
    [
        (2.2, 0.1 * math.exp(0.01)),  # a tenth too much: 0.1 x 100 / 1000
        (1.8, 0.1 * math.exp(-0.01)),
        (2.0, 0.1),
        (99.0, 0.1 * math.exp(0.02)),  # never more than a fifth
        (-5.0, 0.1 * math.exp(-0.02)),  # k1 may be negative
        (math.nan, 0.1),
        (math.inf, 0.1),
    ],
)
def test_adapted_kl_coef_matches_hand_values(kl, expected):
    adapted = adapted_kl_coef(0.1, kl, target=2.0, horizon=1000, num_rollouts=100)
    assert adapted == pytest.approx(expected, rel=1e-12)


def test_adapted_kl_coef_of_batches_beyond_the_horizon_stays_above_zero_and_can_grow_again():
    coef = 0.1
    for _ in range(3):
        coef = adapted_kl_coef(coef, 0.0, target=2.0, horizon=10_000, num_rollouts=65_536)
    assert 0.0 < coef < 0.1
    assert adapted_kl_coef(coef, 100.0, target=2.0, horizon=10_000, num_rollouts=65_536) > 3 * coef
    # One batch counts as much as its parts, one after the other.
    whole = adapted_kl_coef(0.1, 3.0, target=2.0, horizon=1000, num_rollouts=400)
    parts = 0.1
    for _ in range(4):
        parts = adapted_kl_coef(parts, 3.0, target=2.0, horizon=1000, num_rollouts=100)
    assert parts == pytest.approx(whole, rel=1e-12)
