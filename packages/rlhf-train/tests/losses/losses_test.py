"""The value loss and the means over tokens and sequences: values one can check by hand."""

import pytest
import torch

from rlhf_train.batching import Denominators
from rlhf_train.losses.aggregate import sequence_mean, token_mean
from rlhf_train.losses.value import clipped_value_loss


@pytest.mark.parametrize(
    ("returns", "value_clip", "loss", "gradient"),
    [
        # V = 1 and old = 0. Within half of the old value, V is 0.5. The larger error counts, which is flat if clipped.
        (2.0, 0.5, (0.5 - 2) ** 2 / 2, 0.0),
        (0.0, 0.5, 1 / 2, 1.0),
        (3.0, None, (1 - 3) ** 2 / 2, 1.0 - 3),
    ],
)
def test_clipped_value_loss_matches_hand_values(returns, value_clip, loss, gradient):
    values = torch.tensor([[1.0]], requires_grad=True)
    found = clipped_value_loss(values, torch.zeros(1, 1), torch.tensor([[returns]]), value_clip=value_clip)
    found.sum().backward()
    assert (found.item(), values.grad.item()) == (loss, gradient)


LOSS = torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0], [7.0, 8.0, 9.0]])
MASK = torch.tensor([[True, True, False], [True, False, False], [False, False, False]])
COUNTS = Denominators(num_tokens=3, num_sequences=2, max_tokens=5)


def test_token_mean_matches_hand_values_and_ignores_what_is_not_trained_even_nan():
    losses = LOSS.masked_fill(~MASK, float("nan")).requires_grad_()
    loss = token_mean(losses, MASK, COUNTS)
    loss.backward()
    assert loss.item() == pytest.approx((1 + 2 + 4) / 3)
    torch.testing.assert_close(losses.grad, MASK / 3)
    shares = [token_mean(LOSS[i : i + 1], MASK[i : i + 1], COUNTS) for i in range(3)]
    assert sum(shares).item() == pytest.approx(loss.item(), abs=1e-6)


def test_token_mean_of_nothing_is_zero_with_a_gradient_of_zero_even_of_nan():
    losses = torch.tensor([[float("nan"), 1.0]], requires_grad=True)
    loss = token_mean(losses, torch.tensor([[False, False]]), Denominators(0, 0, 0))
    loss.backward()
    assert (loss.item(), losses.grad.tolist()) == (0.0, [[0.0, 0.0]])


def test_mean_over_one_token_or_one_sequence_is_its_loss():
    one = Denominators(num_tokens=1, num_sequences=1, max_tokens=1)
    assert token_mean(LOSS[:1, :1], MASK[:1, :1], one).item() == 1.0
    assert sequence_mean(torch.tensor([5.0]), one).item() == 5.0


def test_tensors_of_other_shapes_are_refused():
    with pytest.raises(ValueError, match="shapes differ"):
        token_mean(LOSS, MASK[:2], COUNTS)
    with pytest.raises(ValueError, match="shapes differ"):
        clipped_value_loss(LOSS, LOSS, LOSS[:1], value_clip=None)
