"""The Triton form of `logprob_kl` on a GPU, at the vocabularies of real models, against float64."""

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from rlhf_kernels import logprob_kl
from rlhf_kernels.ops.logprob_kl.reference import logprob_kl_reference

HIDDEN_SIZE = 256
VOCAB_SIZES = [32_000, 50_257, 128_256, 151_936, 262_144]


def make(num_rows, vocab_size, dtype=torch.bfloat16):
    """Return hidden states and heads of a policy and of its reference near it, and token ids, some of them ignored."""
    hidden = torch.randn(num_rows, HIDDEN_SIZE, device="cuda") / HIDDEN_SIZE**0.5
    weight = 2 * torch.randn(vocab_size, HIDDEN_SIZE, device="cuda")
    ref_hidden, ref_weight = (tensor + 0.1 * tensor.std() * torch.randn_like(tensor) for tensor in (hidden, weight))
    token_ids = torch.randint(0, vocab_size, (num_rows,), device="cuda")
    token_ids[5::11] = -100
    policy = [hidden.to(dtype).requires_grad_(), weight.to(dtype).requires_grad_()]
    return policy, [ref_hidden.to(dtype), ref_weight.to(dtype)], token_ids


def total(*results):
    """Return a sum of the results with random weights."""
    weights = torch.randn(
        len(results), len(results[0]), device="cuda", generator=torch.Generator("cuda").manual_seed(1)
    )
    return sum((w.to(values.dtype) * values).sum() for w, values in zip(weights, results, strict=True))


@pytest.mark.parametrize("vocab_size", VOCAB_SIZES)
@pytest.mark.parametrize(("num_rows", "dtype"), [(1, torch.bfloat16), (63, torch.float32), (2000, torch.bfloat16)])
def test_logprob_kl_full_vocabulary_is_as_near_to_float64_as_its_twin(num_rows, vocab_size, dtype, require_as_near):
    if torch.cuda.mem_get_info()[0] < 130 * num_rows * vocab_size + (4 << 30):
        pytest.skip("needs more free device memory for the float64 logits")
    policy, reference, token_ids = make(num_rows, vocab_size, dtype)
    exact, plain = ([tensor.detach().to(kind).requires_grad_() for tensor in policy] for kind in (torch.float64, dtype))
    results = logprob_kl(*policy, *reference, token_ids, temperature=0.7, full_kl=True)
    results = results.logprobs, results.entropy, results.ref_logprobs, results.kl
    truth, twin = (
        logprob_kl_reference((*head, None), (*(part.to(head[0].dtype) for part in reference), None), token_ids, 0.7)
        for head in (exact, plain)
    )
    require_as_near(results, twin, truth)
    for part in (results, twin, truth):
        total(*part).backward()
    require_as_near(*([tensor.grad for tensor in part] for part in (policy, plain, exact)))


def test_logprob_kl_of_equal_models_is_exactly_zero():
    policy, _, token_ids = make(2000, 151_936)
    results = logprob_kl(*policy, *policy, token_ids, full_kl=True)
    assert all(torch.equal(values, torch.zeros_like(values)) for values in (results.k1, results.k3, results.kl))


def test_logprob_kl_same_input_twice_agrees_bit_for_bit():
    policy, reference, token_ids = make(2000, 151_936)
    runs = []
    for _ in range(2):
        results = logprob_kl(*policy, *reference, token_ids, full_kl=True)
        runs.append([*results, *torch.autograd.grad(total(results.k3, results.kl), policy)])
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))


@pytest.mark.parametrize("around", ["compile", "checkpoint"])
def test_logprob_kl_inside_another_mechanism_gives_the_same(around):
    def loss(hidden, weight):
        results = logprob_kl(hidden.tanh(), weight, *reference, token_ids, full_kl=True)
        return total(results.k2, results.kl)

    policy, reference, token_ids = make(100, 50_257)
    plain = torch.autograd.grad(loss(*policy), policy)
    value = torch.compile(loss)(*policy) if around == "compile" else checkpoint(loss, *policy, use_reentrant=False)
    for gradient, want in zip(torch.autograd.grad(value, policy), plain, strict=True):
        assert (gradient - want).float().norm() <= 1e-2 * want.float().norm()


def test_logprob_kl_holds_no_more_than_half_a_gibibyte_besides_the_gradients():
    policy, reference, token_ids = make(8192, 151_936)  # whole logits: 2.3 GiB each
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    logprob_kl(*policy, *reference, token_ids, full_kl=True).kl.sum().backward()
    gradients = sum(tensor.grad.nbytes for tensor in policy)
    assert torch.cuda.max_memory_allocated() - before - gradients < 1 << 29
