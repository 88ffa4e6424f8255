"""Losses of pairs, single verdicts, teachers and judged steps at extreme values, and bad input."""

import math
from functools import partial

import pytest
import torch
from torch.distributions import Categorical, kl_divergence

from rlhf_train.batching import Denominators
from rlhf_train.losses import preference
from rlhf_train.losses.aggregate import sequence_mean
from rlhf_train.losses.preference import (
    MIN_NLL,
    apo_down_loss,
    apo_zero_loss,
    bco_pair_loss,
    discopop_loss,
    distillation_loss,
    dpo_loss,
    exo_pair_loss,
    hinge_loss,
    ipo_loss,
    kto_loss,
    nca_pair_loss,
    orpo_loss,
    process_reward_loss,
    reward_model_loss,
    robust_loss,
    simpo_loss,
    sppo_hard_loss,
)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_pair_losses_of_huge_differences_neither_overflow_nor_lose_their_gradient(dtype):
    chosen = torch.tensor([-3e4, 3e4], dtype=dtype, requires_grad=True)
    rejected = torch.zeros(2, dtype=dtype)
    for loss in (reward_model_loss(chosen, rejected), dpo_loss(chosen, rejected, beta=1.0, label_smoothing=0.1)):
        (gradient,) = torch.autograd.grad(loss.sum(), chosen)
        assert loss.isfinite().all()
        assert gradient.isfinite().all()
        assert gradient[0] < -0.7  # the wrong one is still pushed


@pytest.mark.parametrize(
    ("loss", "expected"),  # of differences of -3e4 and of 3e4
    [
        (partial(discopop_loss, beta=1.0, tau=0.05), (3e4, 0.0)),
        (partial(exo_pair_loss, beta=1.0, label_smoothing=0.1), (-math.log(0.1), -math.log(0.9))),
        (partial(robust_loss, beta=1.0, label_smoothing=0.1), (0.9 / 0.8 * 3e4, -0.1 / 0.8 * 3e4)),
        (partial(nca_pair_loss, beta=1.0), (3e4 + math.log(2) / 2, 1.5e4 + math.log(2) / 2)),
    ],
)
def test_pair_losses_of_huge_ratios_are_the_limits_of_their_formulas(loss, expected):
    chosen = torch.tensor([-3e4, 3e4], requires_grad=True)
    found = loss(chosen, torch.zeros(2))
    assert found.tolist() == pytest.approx(expected, rel=1e-6)
    assert torch.autograd.grad(found.sum(), chosen)[0].isfinite().all()


def test_orpo_of_certain_answers_is_finite_and_still():
    certain = torch.zeros(1, requires_grad=True)
    loss = orpo_loss(certain, torch.tensor([-1.0]))
    loss.sum().backward()
    assert loss.isfinite().all()
    assert certain.grad.item() == 0.0
    assert orpo_loss(torch.tensor([-MIN_NLL]), torch.tensor([-1.0])).item() == pytest.approx(loss.item())


def test_kto_loss_far_from_the_reference_keeps_its_digits_for_both_kinds_of_answers():
    # 1 - sigmoid(40) is 0 in float32; sigmoid(-40) = e^-40.
    loss = kto_loss(torch.tensor([40.0, -40.0]), torch.tensor([True, False]), torch.tensor(0.0), beta=1.0)
    assert loss.tolist() == pytest.approx([math.exp(-40)] * 2, rel=1e-4, abs=0)


def test_sequence_mean_shares_add_up_to_the_mean_of_the_whole():
    whole = Denominators(num_tokens=9, num_sequences=3, max_tokens=4)
    parts = [sequence_mean(torch.tensor(part), whole).item() for part in ([1.0, 2.0], [6.0])]
    assert sum(parts) == pytest.approx(3.0)
    assert sequence_mean(torch.tensor([]), Denominators(0, 0, 0)).item() == 0.0


@pytest.mark.parametrize("rows", [100, 3])
@pytest.mark.parametrize(
    ("divergence", "beta"), [("forward_kl", 0.5), ("reverse_kl", 0.5), ("jsd", 0.5), ("jsd", 0.1), ("jsd", 0.9)]
)
def test_divergences_equal_those_of_torch_distributions_in_float64(divergence, beta, rows, monkeypatch):
    monkeypatch.setattr(preference, "MAX_BLOCK", 11 * rows)
    logits, teacher_logits = 3 * torch.randn(2, 7, 11, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    inputs = [logits.float().requires_grad_(), logits.clone().requires_grad_()]
    found = distillation_loss(inputs[0], teacher_logits.float(), divergence=divergence, jsd_beta=beta)
    student, teacher = Categorical(logits=inputs[1]), Categorical(logits=teacher_logits)
    if divergence == "forward_kl":
        expected = kl_divergence(teacher, student) + teacher.entropy()
    elif divergence == "reverse_kl":
        expected = kl_divergence(student, teacher)
    else:
        mean = Categorical(probs=beta * teacher.probs + (1 - beta) * student.probs)
        expected = beta * kl_divergence(teacher, mean) + (1 - beta) * kl_divergence(student, mean)
    assert found.dtype == torch.float32 and found.tolist() == pytest.approx(expected.tolist(), rel=1e-5)
    weights = torch.arange(1.0, 8.0)  # each row has a gradient of its own
    (found * weights).sum().backward()
    (expected * weights).sum().backward()
    assert torch.allclose(inputs[0].grad.double(), inputs[1].grad, atol=1e-6)


@pytest.mark.parametrize(
    "loss",
    [
        reward_model_loss,
        lambda a, b: reward_model_loss(a, a, b),
        lambda a, b: dpo_loss(a, b, beta=1.0),
        *(
            partial(loss, beta=1.0)
            for loss in (
                *(ipo_loss, hinge_loss, nca_pair_loss, bco_pair_loss),
                *(sppo_hard_loss, apo_zero_loss, apo_down_loss),
            )
        ),
        partial(robust_loss, beta=1.0, label_smoothing=0.1),
        partial(exo_pair_loss, beta=1.0, label_smoothing=0.1),
        partial(discopop_loss, beta=1.0, tau=0.1),
        lambda a, b: simpo_loss(a, b, beta=1.0, gamma=0.0),
        orpo_loss,
        lambda a, b: kto_loss(a, b > 0, torch.tensor(0.0), beta=1.0),
        distillation_loss,
        process_reward_loss,
    ],
)
def test_losses_of_different_shapes_are_refused(loss):
    with pytest.raises(ValueError, match="shapes differ"):
        loss(torch.zeros(2), torch.zeros(3))
