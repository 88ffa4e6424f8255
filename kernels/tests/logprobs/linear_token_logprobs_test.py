"""`linear_token_logprobs` on the CPU: the plain twin, against which the Triton form is tested."""

import math

import pytest
import torch

from rlhf_kernels import linear_token_logprobs, token_logprobs
from rlhf_kernels.ops.linear_token_logprobs.reference import linear_token_logprobs_reference

IDS = torch.tensor([0])


def test_linear_token_logprobs_two_tokens_gives_the_hand_derived_values():
    # Logits 2 (0, ln 3) + (ln 2, -ln 2) = (ln 2, ln 9/2), at temperature 1 odds of 4 to 9: p = (4, 9) / 13.
    results = linear_token_logprobs(
        torch.tensor([[2.0]]),
        torch.tensor([[0.0], [math.log(3.0)]]),
        IDS,
        bias=torch.tensor([math.log(2.0), -math.log(2.0)]),
    )
    entropy = -(4 / 13 * math.log(4 / 13) + 9 / 13 * math.log(9 / 13))
    expected = torch.tensor([math.log(4 / 13), entropy, math.log(6.5)])
    torch.testing.assert_close(torch.cat(results), expected)


@pytest.mark.parametrize(("num_rows", "vocab_size"), [(0, 7), (1, 1), (1, 37), (63, 5)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_linear_token_logprobs_equals_token_logprobs_of_the_logits(num_rows, vocab_size, dtype):
    torch.manual_seed(0)
    hidden, weight = torch.randn(num_rows, 12).to(dtype), torch.randn(vocab_size, 12).to(dtype)
    bias, token_ids = torch.randn(vocab_size).to(dtype), torch.randint(0, vocab_size, (num_rows,))
    results = linear_token_logprobs(hidden, weight, token_ids, temperature=0.7, bias=bias)
    expected = token_logprobs(torch.nn.functional.linear(hidden, weight, bias), token_ids, temperature=0.7)
    for values, want in zip(results, expected, strict=True):
        assert values.dtype == torch.float32 and torch.equal(values, want)


def test_linear_token_logprobs_gradients_equal_numerical_ones_in_float64():
    torch.manual_seed(0)
    tensors = [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in ((3, 4), (5, 4), (5,))]
    token_ids = torch.tensor([4, -100, 2])
    assert torch.autograd.gradcheck(lambda *head: linear_token_logprobs_reference(head, token_ids, 0.7), tensors)


def test_linear_token_logprobs_ignored_row_gives_zeros_whatever_its_hidden_state():
    hidden, weight = torch.randn(3, 4), torch.randn(5, 4, requires_grad=True)
    hidden[1] = float("nan")
    hidden.requires_grad_()
    results = linear_token_logprobs(hidden, weight, torch.tensor([0, -1, 4]))
    sum(values.sum() for values in results).backward()
    assert [values[1].item() for values in results] == [0.0, 0.0, 0.0]
    assert torch.equal(hidden.grad[1], torch.zeros(4))
    assert hidden.grad.isfinite().all() and weight.grad.isfinite().all()


@pytest.mark.parametrize(
    ("hidden", "weight", "token_ids", "options", "message"),
    [
        (torch.zeros(3), torch.zeros(2, 3), IDS, {}, r"got \[3\] and \[2, 3\]"),
        (torch.zeros(1, 3), torch.zeros(2, 4), IDS, {}, r"got \[1, 3\] and \[2, 4\]"),
        (torch.zeros(1, 3), torch.zeros(0, 3), IDS, {}, "above 0"),
        (torch.zeros(1, 3), torch.zeros(2, 3), IDS, {"bias": torch.zeros(3)}, r"and \[3\]"),
        (torch.zeros(1, 3), torch.zeros(2, 3).half(), IDS, {}, "got torch.float32, torch.float16"),
        (torch.zeros(1, 3).double(), torch.zeros(2, 3).double(), IDS, {}, "got torch.float64"),
        (torch.zeros(1, 3), torch.zeros(2, 3, device="meta"), IDS, {}, "one device; got cpu, meta"),
        (torch.zeros(2, 3), torch.zeros(2, 3), IDS, {}, r"token_ids must be \[2\]"),
        (torch.zeros(1, 3), torch.zeros(2, 3), torch.tensor([2]), {}, "token id 2 is outside the vocabulary of 2"),
        (torch.zeros(1, 3), torch.zeros(2, 3), IDS, {"temperature": 0.0}, "temperature is 0.0"),
    ],
)
def test_linear_token_logprobs_wrong_argument_says_what_is_allowed(hidden, weight, token_ids, options, message):
    with pytest.raises(ValueError, match=message):
        linear_token_logprobs(hidden, weight, token_ids, **options)
