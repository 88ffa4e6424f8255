"""Losses of pairs, single verdicts, teachers and judged steps: values by hand, slow float64 twins, bad input."""

import math

import pytest
import torch

from rlhf_train.batching import Denominators
from rlhf_train.losses.aggregate import sequence_mean
from rlhf_train.losses.preference import (
    MIN_NLL,
    distillation_loss,
    dpo_loss,
    ipo_loss,
    kto_loss,
    orpo_loss,
    process_reward_loss,
    reward_model_loss,
    simpo_loss,
)

LN2 = math.log(2)


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


def one(value: float) -> torch.Tensor:
    return torch.tensor([value], dtype=torch.float64, requires_grad=True)


def random_pairs(seed: int = 0, scale: float = 3.0) -> list[tuple[float, float]]:
    generator = torch.Generator().manual_seed(seed)
    return (scale * torch.randn(16, 2, generator=generator, dtype=torch.float64)).tolist()


# Each loss with the plain arithmetic of its formula, in float64, a pair at a time.
TWINS = {
    "reward": (reward_model_loss, lambda c, r: -math.log(sigmoid(c - r))),
    "reward with margin": (
        lambda c, r: reward_model_loss(c, r, torch.full_like(c, 0.7).detach()),
        lambda c, r: -math.log(sigmoid(c - r - 0.7)),
    ),
    "logexp": (reward_model_loss, lambda c, r: math.log(1 + math.exp(r - c))),
    "dpo": (lambda c, r: dpo_loss(c, r, beta=0.3), lambda c, r: -math.log(sigmoid(0.3 * (c - r)))),
    "cdpo": (
        lambda c, r: dpo_loss(c, r, beta=0.3, label_smoothing=0.1),
        lambda c, r: -0.9 * math.log(sigmoid(0.3 * (c - r))) - 0.1 * math.log(1 - sigmoid(0.3 * (c - r))),
    ),
    "ipo": (lambda c, r: ipo_loss(c, r, beta=0.25), lambda c, r: ((c - r) - 2.0) ** 2),  # 1 / (2 x 0.25) = 2
    "simpo": (
        lambda c, r: simpo_loss(c, r, beta=2.0, gamma=0.5),
        lambda c, r: -math.log(sigmoid(2.0 * (c - r) - 0.5)),
    ),
    "orpo": (
        lambda c, r: orpo_loss(-c.abs(), -r.abs()),
        lambda c, r: (
            -math.log(
                sigmoid(
                    math.log(math.exp(-abs(c)) / (1 - math.exp(-abs(c))))
                    - math.log(math.exp(-abs(r)) / (1 - math.exp(-abs(r))))
                )
            )
        ),
    ),
}


@pytest.mark.parametrize("name", TWINS)
def test_pair_loss_equals_its_float64_twin_in_value_and_gradient(name):
    loss, twin = TWINS[name]
    for chosen, rejected in random_pairs():
        c, r = one(chosen), one(rejected)
        value = loss(c, r)
        value.sum().backward()
        assert value.shape == (1,)
        assert value.item() == pytest.approx(twin(chosen, rejected), rel=1e-9, abs=1e-12)
        step = 1e-6
        slopes = [
            (twin(chosen + step, rejected) - twin(chosen - step, rejected)) / (2 * step),
            (twin(chosen, rejected + step) - twin(chosen, rejected - step)) / (2 * step),
        ]
        assert [c.grad.item(), r.grad.item()] == pytest.approx(slopes, rel=1e-4, abs=1e-7)


@pytest.mark.parametrize(
    ("loss", "tie"),
    [
        (reward_model_loss, LN2),  # -log sigmoid(0)
        (lambda c, r: reward_model_loss(c, r, torch.tensor([1.0])), math.log(1 + math.e)),  # -log sigmoid(-1)
        (lambda c, r: dpo_loss(c, r, beta=0.1), LN2),
        (lambda c, r: dpo_loss(c, r, beta=0.1, label_smoothing=0.4), LN2),  # both ways round alike
        (lambda c, r: ipo_loss(c, r, beta=0.1), 25.0),  # (0 - 1 / 0.2)^2
        (lambda c, r: simpo_loss(c, r, beta=2.0, gamma=1.0), math.log(1 + math.e)),
        (orpo_loss, LN2),
    ],
)
def test_pair_loss_of_a_tie_by_hand(loss, tie):
    value = torch.tensor([-1.5])
    assert loss(value, value).item() == pytest.approx(tie, rel=1e-6)


def test_dpo_gradient_by_hand_is_beta_times_what_is_wrong():
    # d/dz of -log sigmoid(beta z) = -beta sigmoid(-beta z): at z = 0 and beta = 0.5, -0.25, of rejected 0.25.
    chosen, rejected = one(3.0), one(3.0)
    dpo_loss(chosen, rejected, beta=0.5).sum().backward()
    assert (chosen.grad.item(), rejected.grad.item()) == pytest.approx((-0.25, 0.25))


def test_cdpo_gradient_vanishes_where_the_pair_is_as_sure_as_the_labels():
    # At sigmoid(beta z) = 1 - e = 0.9, so beta z = ln 9, the smoothed loss is least.
    chosen = one(math.log(9.0))
    dpo_loss(chosen, one(0.0), beta=1.0, label_smoothing=0.1).sum().backward()
    assert chosen.grad.item() == pytest.approx(0.0, abs=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_pair_losses_of_huge_differences_neither_overflow_nor_lose_their_gradient(dtype):
    chosen = torch.tensor([-3e4, 3e4], dtype=dtype, requires_grad=True)
    rejected = torch.zeros(2, dtype=dtype)
    for loss in (reward_model_loss(chosen, rejected), dpo_loss(chosen, rejected, beta=1.0, label_smoothing=0.1)):
        (gradient,) = torch.autograd.grad(loss.sum(), chosen)
        assert loss.isfinite().all()
        assert gradient.isfinite().all()
        assert gradient[0] < -0.7  # the wrong one is still pushed


def test_orpo_of_certain_answers_is_finite_and_still():
    certain = torch.zeros(1, requires_grad=True)
    loss = orpo_loss(certain, torch.tensor([-1.0]))
    loss.sum().backward()
    assert loss.isfinite().all()
    assert certain.grad.item() == 0.0
    assert orpo_loss(torch.tensor([-MIN_NLL]), torch.tensor([-1.0])).item() == pytest.approx(loss.item())


def test_kto_loss_and_gradient_by_hand():
    # beta = 0.5, kl = 1: desirable ratio 3: 2 (1 - sigmoid(1)); undesirable ratio -1: 3 (1 - sigmoid(1)).
    ratios = torch.tensor([3.0, -1.0], dtype=torch.float64, requires_grad=True)
    kl = torch.tensor(1.0, requires_grad=True)
    options = {"beta": 0.5, "desirable_loss_weight": 2.0, "undesirable_loss_weight": 3.0}
    loss = kto_loss(ratios, torch.tensor([True, False]), kl, **options)
    loss.sum().backward()
    rest = 1 - sigmoid(1.0)
    assert loss.tolist() == pytest.approx([2 * rest, 3 * rest], rel=1e-6)
    # d/dratio: -+ w beta sigmoid (1 - sigmoid)
    slope = 0.5 * sigmoid(1.0) * rest
    assert ratios.grad.tolist() == pytest.approx([-2 * slope, 3 * slope], rel=1e-6)
    assert kl.grad is None


def test_kto_loss_far_from_the_reference_keeps_its_digits_for_both_kinds_of_answers():
    # 1 - sigmoid(40) is 0 in float32; sigmoid(-40) = e^-40.
    loss = kto_loss(torch.tensor([40.0, -40.0]), torch.tensor([True, False]), torch.tensor(0.0), beta=1.0)
    assert loss.tolist() == pytest.approx([math.exp(-40)] * 2, rel=1e-4, abs=0)


def test_distillation_loss_by_hand_and_least_where_both_agree():
    # Teacher (1/2, 1/2), student (3/4, 1/4): -(ln 3/4 + ln 1/4) / 2.
    teacher, student = torch.zeros(1, 2), torch.tensor([[math.log(3.0), 0.0]])
    assert distillation_loss(student, teacher).item() == pytest.approx(-(math.log(0.75) + math.log(0.25)) / 2)
    agreeing = torch.zeros(1, 2, requires_grad=True)
    loss = distillation_loss(agreeing, teacher)
    loss.sum().backward()
    assert loss.item() == pytest.approx(LN2)
    assert agreeing.grad.abs().max() < 1e-7


def test_distillation_loss_gradient_is_the_difference_of_the_distributions_and_stops_at_the_teacher():
    generator = torch.Generator().manual_seed(0)
    student = torch.randn(5, 7, generator=generator, dtype=torch.float64).requires_grad_()
    teacher = torch.randn(5, 7, generator=generator, dtype=torch.float64).requires_grad_()
    distillation_loss(student, teacher).sum().backward()
    # d/dlogits of cross-entropy = softmax(student) - softmax(teacher).
    torch.testing.assert_close(student.grad, (student.softmax(-1) - teacher.softmax(-1)).detach(), atol=1e-6, rtol=1e-5)
    assert teacher.grad is None


def test_process_reward_loss_of_hard_and_soft_labels_by_hand():
    # Odds 3 : 1 for good. Hard good: -ln 3/4; hard bad: -ln 1/4; soft 0.5: their mean.
    logits = torch.tensor([[math.log(3.0), 0.0]]).expand(3, 2)
    targets = torch.tensor([[1.0, 0.0], [0.0, 1.0], [0.5, 0.5]])
    good, bad = -math.log(0.75), -math.log(0.25)
    assert process_reward_loss(logits, targets).tolist() == pytest.approx([good, bad, (good + bad) / 2], rel=1e-6)


def test_sequence_mean_shares_add_up_to_the_mean_of_the_whole():
    whole = Denominators(num_tokens=9, num_sequences=3, max_tokens=4)
    parts = [sequence_mean(torch.tensor(part), whole).item() for part in ([1.0, 2.0], [6.0])]
    assert sum(parts) == pytest.approx(3.0)
    assert sequence_mean(torch.tensor([]), Denominators(0, 0, 0)).item() == 0.0


@pytest.mark.parametrize(
    "loss",
    [
        reward_model_loss,
        lambda a, b: reward_model_loss(a, a, b),
        lambda a, b: dpo_loss(a, b, beta=1.0),
        lambda a, b: ipo_loss(a, b, beta=1.0),
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
