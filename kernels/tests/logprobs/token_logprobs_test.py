"""`token_logprobs` on the CPU: the plain twin, against which the Triton kernel is tested."""

import logging
import math

import pytest
import torch

from rlhf_kernels import token_logprobs
from rlhf_kernels.dispatch import log_fallback_once
from rlhf_kernels.ops.token_logprobs.reference import token_logprobs_reference


def truth(logits, token_ids, temperature=1.0):
    """The definition, in float64, one row at a time."""
    logprobs, entropies = [], []
    for row, token_id in zip(logits.double(), token_ids.tolist(), strict=True):
        p = torch.exp(row / temperature - torch.logsumexp(row / temperature, dim=0))
        logprobs.append(torch.log(p[token_id]))
        entropies.append(torch.special.entr(p).sum())
    return torch.stack(logprobs), torch.stack(entropies)


def test_token_logprobs_two_tokens_gives_the_hand_derived_values():
    # Odds of 3 to 1: p = (3/4, 1/4); H = 3/4 ln(4/3) + 1/4 ln 4 = ln 4 - 3/4 ln 3.
    logits = torch.tensor([[math.log(3.0), 0.0], [math.log(3.0), 0.0]])
    logprobs, entropy, _ = token_logprobs(logits, torch.tensor([0, 1]))
    torch.testing.assert_close(logprobs, torch.tensor([math.log(0.75), math.log(0.25)]))
    torch.testing.assert_close(entropy, torch.full((2,), math.log(4) - 0.75 * math.log(3)))


@pytest.mark.parametrize("vocab_size", [1, 2, 37, 1000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_token_logprobs_random_logits_equal_float64(vocab_size, dtype):
    torch.manual_seed(0)
    logits = (5 * torch.randn(9, vocab_size)).to(dtype)
    token_ids = torch.randint(0, vocab_size, (9,))
    logprobs, entropy, _ = token_logprobs(logits, token_ids, temperature=0.7)
    expected = truth(logits, token_ids, 0.7)
    assert logprobs.dtype == entropy.dtype == torch.float32
    torch.testing.assert_close(logprobs.double(), expected[0], atol=1e-5, rtol=1e-6)
    torch.testing.assert_close(entropy.double(), expected[1], atol=1e-5, rtol=1e-6)
    logsumexp = torch.logsumexp(logits.double() / 0.7, dim=1)
    torch.testing.assert_close(token_logprobs(logits, token_ids, temperature=0.7).logsumexp.double(), logsumexp)


def test_token_logprobs_both_gradients_equal_numerical_ones_in_float64():
    torch.manual_seed(0)
    logits = torch.randn(3, 5, dtype=torch.float64, requires_grad=True)
    token_ids = torch.tensor([4, 0, 2])
    assert torch.autograd.gradcheck(lambda x: token_logprobs_reference(x, token_ids, 0.7), (logits,))


def test_token_logprobs_logsumexp_gradient_is_the_probability_over_the_temperature():
    # Odds of 9 to 1 at temperature 2: p = (3/4, 1/4), lse = ln(3 + 1), and d lse / d logit = p / 2.
    logits = torch.tensor([[math.log(9.0), 0.0]], requires_grad=True)
    logsumexp = token_logprobs(logits, torch.tensor([0]), temperature=2.0).logsumexp
    logsumexp.sum().backward()
    torch.testing.assert_close(logsumexp.detach(), torch.tensor([math.log(4.0)]))
    torch.testing.assert_close(logits.grad, torch.tensor([[0.375, 0.125]]))


def test_token_logprobs_negative_token_id_gives_zeros_and_no_gradient():
    logits = torch.tensor([[1.0, 2.0], [float("nan"), 2.0], [1.0, 2.0]], requires_grad=True)
    logprobs, entropy, _ = token_logprobs(logits, torch.tensor([0, -100, 1]))
    assert logprobs[1] == entropy[1] == 0.0
    (logprobs[[0, 2]].sum() + entropy[[0, 2]].sum()).backward()
    assert logits.grad[[0, 2]].abs().sum() > 0
    assert torch.equal(logits.grad[1], torch.zeros(2))


def test_token_logprobs_huge_logits_lose_no_digits():
    # A shift changes nothing: log softmax(10000 + (0, 1))_0 = -ln(1 + e).
    logprobs, entropy, _ = token_logprobs(torch.tensor([[1e4, 1e4 + 1]]), torch.tensor([0]))
    expected = truth(torch.tensor([[0.0, 1.0]]), torch.tensor([0]))
    torch.testing.assert_close(logprobs.double(), expected[0], atol=1e-6, rtol=0)
    torch.testing.assert_close(entropy.double(), expected[1], atol=1e-6, rtol=0)


def test_token_logprobs_forbidden_tokens_leave_value_and_gradient_finite():
    logits = torch.tensor([[0.0, float("-inf"), 0.0, -200.0]], requires_grad=True)
    logprobs, entropy, _ = token_logprobs(logits, torch.tensor([0]))
    torch.testing.assert_close(logprobs, torch.tensor([-math.log(2.0)]))
    torch.testing.assert_close(entropy, torch.tensor([math.log(2.0)]))
    (logprobs + entropy).sum().backward()
    torch.testing.assert_close(logits.grad, torch.tensor([[0.5, 0.0, -0.5, 0.0]]))


def test_token_logprobs_no_rows_gives_no_values_and_a_gradient():
    logits = torch.zeros(0, 7, requires_grad=True)
    logprobs, entropy, _ = token_logprobs(logits, torch.zeros(0, dtype=torch.int64))
    (logprobs.sum() + entropy.sum()).backward()
    assert logprobs.shape == entropy.shape == (0,)
    assert logits.grad.shape == (0, 7)


@pytest.mark.parametrize(
    ("logits", "token_ids", "temperature", "message"),
    [
        (torch.zeros(3), torch.zeros(3, dtype=torch.int64), 1.0, r"\[N, V\]"),
        (torch.zeros(3, 2), torch.zeros(2, dtype=torch.int64), 1.0, r"must be \[3\], one per row.*got \[2\]"),
        (torch.zeros(3, 0), torch.zeros(3, dtype=torch.int64), 1.0, "at least one token"),
        (torch.zeros(1, 2).double(), torch.zeros(1, dtype=torch.int64), 1.0, "got torch.float64"),
        (torch.zeros(1, 2), torch.zeros(1), 1.0, r"got \[1\] in torch.float32"),
        (torch.zeros(1, 2), torch.zeros(1, dtype=torch.int64), 0.0, "temperature is 0.0"),
        (torch.zeros(1, 2), torch.zeros(1, dtype=torch.int64), float("inf"), "temperature is inf"),
        (torch.zeros(1, 2), torch.tensor([2]), 1.0, "token id 2 is outside the vocabulary of 2"),
        (torch.zeros(1, 2), torch.zeros(1, dtype=torch.int64, device="meta"), 1.0, "one device"),
    ],
)
def test_token_logprobs_wrong_argument_says_what_is_allowed(logits, token_ids, temperature, message):
    with pytest.raises(ValueError, match=message):
        token_logprobs(logits, token_ids, temperature=temperature)


def test_token_logprobs_inplace_backward_refuses_a_leaf_that_wants_a_gradient():
    leaf, token_ids = torch.zeros(1, 2, requires_grad=True), torch.tensor([1])
    with pytest.raises(ValueError, match="overwrite a leaf"):
        token_logprobs(leaf, token_ids, inplace_backward=True)
    token_logprobs(leaf * 1, token_ids, inplace_backward=True).logprobs.sum().backward()
    torch.testing.assert_close(leaf.grad, torch.tensor([[-0.5, 0.5]]))
    token_logprobs(leaf.detach(), token_ids, inplace_backward=True)


def test_token_logprobs_columns_of_a_part_without_a_group_are_refused():
    with pytest.raises(ValueError, match="vocab_start is 8 without a group"):
        token_logprobs(torch.zeros(1, 2), torch.tensor([1]), vocab_start=8)


def test_token_logprobs_reference_id_beyond_the_vocabulary_is_nan():
    # The kernel cannot raise without stalling the stream; the twin shows the same.
    logprobs, entropy, _ = token_logprobs_reference(torch.zeros(1, 2), torch.tensor([2]), 1.0)
    assert logprobs.isnan().all()
    torch.testing.assert_close(entropy, torch.tensor([math.log(2.0)]))


def test_log_fallback_once_same_reason_is_logged_once(caplog):
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            log_fallback_once("an operator", "a reason that only this test gives")
    assert [record.getMessage() for record in caplog.records] == [
        "an operator runs as plain torch: a reason that only this test gives"
    ]
