"""`logprob_kl` on the CPU: the plain twin, against which the Triton form is tested."""

import math

import pytest
import torch

from rlhf_kernels import logprob_kl
from rlhf_kernels.ops.logprob_kl.reference import logprob_kl_reference

IDS = torch.tensor([0])


def logits_head(*logits):
    """A hidden state and a head whose logits are the ones given."""
    return torch.ones(1, 1), torch.tensor(logits)[:, None]


@pytest.mark.parametrize("full_kl", [False, True])
def test_logprob_kl_two_tokens_gives_the_hand_derived_values(full_kl):
    # p = (3/4, 1/4), q = (1/2, 1/2), token 0: d = ln 3/2; KL = 3/4 ln 3/2 + 1/4 ln 1/2.
    results = logprob_kl(*logits_head(math.log(3.0), 0.0), *logits_head(5.0, 5.0), IDS, full_kl=full_kl)
    d = math.log(1.5)
    assert results.logprobs.item() == pytest.approx(math.log(0.75))
    assert results.ref_logprobs.item() == pytest.approx(math.log(0.5))
    assert results.entropy.item() == pytest.approx(math.log(4) - 0.75 * math.log(3))
    assert [results.k1.item(), results.k2.item()] == pytest.approx([d, d * d / 2])
    assert results.k3.item() == pytest.approx(math.exp(-d) - 1 + d)
    if full_kl:
        assert results.kl.item() == pytest.approx(0.75 * math.log(1.5) + 0.25 * math.log(0.5))
    else:
        assert results.kl is None


def test_logprob_kl_of_equal_models_is_exactly_zero():
    hidden, weight, token_ids = torch.randn(9, 8), torch.randn(33, 8), torch.randint(0, 33, (9,))
    results = logprob_kl(hidden, weight, hidden.clone(), weight.clone(), token_ids, temperature=0.7, full_kl=True)
    for values in (results.k1, results.k2, results.k3, results.kl):
        assert torch.equal(values, torch.zeros(9))


def test_logprob_kl_mean_of_the_estimates_over_the_policys_own_tokens_is_the_kl():
    torch.manual_seed(0)
    hidden, weight, ref_weight = torch.randn(1, 8), torch.randn(33, 8) / 3, torch.randn(33, 8) / 3
    every = torch.arange(33)
    results = logprob_kl(hidden.expand(33, 8), weight, hidden.expand(33, 8), ref_weight, every, full_kl=True)
    probs = results.logprobs.exp()
    torch.testing.assert_close((probs * results.k1).sum(), results.kl[0])
    torch.testing.assert_close((probs * results.k3).sum(), results.kl[0])


def test_logprob_kl_forbidden_tokens_count_only_where_the_policy_allows_them():
    allowed, forbidden = 0.0, float("-inf")
    policy, both = logits_head(allowed, allowed, forbidden), logits_head(allowed, allowed, forbidden)
    assert logprob_kl(*policy, *both, IDS, full_kl=True).kl.item() == 0.0
    wider = logits_head(allowed, allowed, allowed)
    assert logprob_kl(*policy, *wider, IDS, full_kl=True).kl.item() == pytest.approx(math.log(1.5))
    assert logprob_kl(*wider, *policy, IDS, full_kl=True).kl.item() == float("inf")


def test_logprob_kl_gradients_equal_numerical_ones_in_float64():
    torch.manual_seed(0)
    policy = [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in ((3, 4), (5, 4), (5,))]
    reference = torch.randn(3, 2).double(), torch.randn(5, 2).double(), None
    token_ids = torch.tensor([4, -100, 2])
    assert torch.autograd.gradcheck(lambda *head: logprob_kl_reference(head, reference, token_ids, 0.7), policy)


@pytest.mark.parametrize("full_kl", [False, True])
def test_logprob_kl_reference_gets_no_gradient_and_an_ignored_row_none_at_all(full_kl):
    tensors = [torch.randn(shape).requires_grad_() for shape in ((3, 4), (5, 4), (3, 2), (5, 2))]
    with torch.no_grad():
        tensors[0][1], tensors[2][1] = float("nan"), float("nan")
    results = logprob_kl(*tensors, torch.tensor([0, -1, 4]), full_kl=full_kl)
    sum(values.sum() for values in results if values is not None).backward()
    assert {values[1].item() for values in results if values is not None} == {0.0}
    assert tensors[2].grad is None and tensors[3].grad is None and not results.ref_logprobs.requires_grad
    assert torch.equal(tensors[0].grad[1], torch.zeros(4))
    assert tensors[0].grad.isfinite().all() and tensors[1].grad.isfinite().all()


@pytest.mark.parametrize("full_kl", [False, True])
@pytest.mark.parametrize(
    ("shapes", "message"),
    [
        (((1, 3), (2, 3), (1, 4), (2, 3)), r"got \[1, 4\] and \[2, 3\]"),
        (((1, 3), (2, 3), (2, 3), (2, 3)), "1 x 2 on cpu, 2 x 2 on cpu"),
        (((1, 3), (2, 3), (1, 3), (4, 3)), "1 x 2 on cpu, 1 x 4 on cpu"),
        (((2, 3), (2, 3), (2, 3), (2, 3)), r"token_ids must be \[2\]"),
        (((1, 3), (1, 3), (1, 3), (1, 3)), "token id 1 is outside the vocabulary of 1"),
    ],
)
def test_logprob_kl_wrong_argument_says_what_is_allowed(shapes, message, full_kl):
    with pytest.raises(ValueError, match=message):
        logprob_kl(*(torch.zeros(shape) for shape in shapes), torch.tensor([1]), full_kl=full_kl)
