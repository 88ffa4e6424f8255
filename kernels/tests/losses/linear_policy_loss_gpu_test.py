"""The Triton kernels of `linear_policy_loss` on a GPU, at the vocabularies of real models, against the whole logits."""

from dataclasses import replace

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from rlhf_kernels import PolicyObjective, PolicyStream, linear_policy_loss
from rlhf_kernels.ops.linear_policy_loss.reference import linear_policy_loss_reference

VOCAB_SIZES = [32_000, 50_257, 128_256, 151_936, 262_144]
PPO = PolicyObjective(clip_low=0.9, clip_high=9.0, kl_coef=0.1)
WITH_ENTROPY = replace(PPO, entropy_coef=0.01)  # for which each row of logits is read twice
BOTH = pytest.mark.parametrize("objective", [PPO, WITH_ENTROPY], ids=["once", "twice"])


def problem(num_tokens, vocab_size, hidden_size=256, dtype=torch.bfloat16):
    """Arguments of the operator; two sequences of each ten tokens in a hundred untrained."""
    hidden = torch.randn(num_tokens, hidden_size, device="cuda").to(dtype).requires_grad_()
    weight = (torch.randn(vocab_size, hidden_size, device="cuda") / 8).to(dtype).requires_grad_()
    token_ids = torch.randint(0, vocab_size, (num_tokens,), device="cuda")
    near = torch.full((num_tokens,), -float(torch.tensor(vocab_size).log()) - 2.0, device="cuda")
    stream = PolicyStream(
        advantages=torch.randn(num_tokens, device="cuda"),
        loss_mask=torch.rand(num_tokens, device="cuda") < 0.9,
        cu_seqlens=torch.tensor([0, num_tokens // 3, num_tokens], device="cuda"),
        num_tokens=num_tokens,
        num_sequences=2,
        old_logprobs=near,
        ref_logprobs=near + 0.1,
    )
    return hidden, weight, token_ids, stream


def check(arguments, objective, largest_logit=5.0, **options):
    hidden, weight, token_ids, stream = arguments
    outputs = linear_policy_loss(*arguments, objective, temperature=0.9, **options)
    outputs[0].backward()
    leaves = [column.detach().double().requires_grad_() for column in (hidden, weight)]
    wide = replace(stream, advantages=stream.advantages.double(), old_logprobs=stream.old_logprobs.double())
    wide = replace(wide, ref_logprobs=stream.ref_logprobs.double())
    token_ids = token_ids.masked_fill(~stream.loss_mask, -1)
    want = linear_policy_loss_reference(*leaves, token_ids, 0.9, wide, objective)
    want[0].backward()
    # The logits themselves are rounded to the dtype: a log-prob near -12 has lost 2^-9 of logits near 5. In float32
    # they are rounded many times while they are summed.
    rounding = torch.finfo(hidden.dtype).eps
    atol = max(8 * rounding, 4e-6 * largest_logit)
    for out, expected in zip(outputs[2:], want[2:], strict=True):
        torch.testing.assert_close(out.double(), expected, atol=atol, rtol=1e-5)
    for column, leaf in zip((hidden, weight), leaves, strict=True):
        assert (column.grad.double() - leaf.grad).norm() <= max(
            4 * rounding, 1e-5, 1e-6 * largest_logit
        ) * leaf.grad.norm()


@pytest.mark.parametrize("vocab_size", VOCAB_SIZES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@BOTH
def test_linear_policy_loss_full_vocabulary_equals_float64(vocab_size, dtype, objective):
    check(problem(100, vocab_size, dtype=dtype), objective)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@BOTH
def test_linear_policy_loss_bias_that_leaves_tokens_out_equals_a_head_without_them(dtype, objective):
    vocab_size, num_kept = 151_936, 151_665  # of Qwen2.5; its tokenizer has no token for the rest
    hidden, weight, token_ids, stream = problem(100, vocab_size, dtype=dtype)
    token_ids = token_ids % num_kept
    bias = torch.zeros(vocab_size, device="cuda", dtype=dtype)
    bias[num_kept:] = -torch.inf
    options = {"temperature": 0.9, "weight_grad_dtype": torch.float32}
    outputs = linear_policy_loss(hidden, weight, token_ids, stream, objective, bias=bias, **options)
    outputs[0].backward()
    small = weight.detach()[:num_kept].clone().requires_grad_()
    states = hidden.detach().clone().requires_grad_()
    want = linear_policy_loss(states, small, token_ids, stream, objective, **options)
    want[0].backward()
    for out, expected in zip(outputs, want, strict=True):
        torch.testing.assert_close(out, expected, atol=1e-5, rtol=1e-5)
    eps = torch.finfo(dtype).eps
    for got, expected in ((hidden.grad, states.grad), (weight.grad[:num_kept], small.grad)):
        assert (got - expected).norm() <= max(2 * eps, 1e-5) * expected.norm()
    assert not weight.grad[num_kept:].any()


@pytest.mark.parametrize("num_tokens", [1, 63, 2000])
@pytest.mark.parametrize("weight_grad_dtype", [None, torch.float32])
@BOTH
def test_linear_policy_loss_row_counts_and_chunks_equal_float64(num_tokens, weight_grad_dtype, objective, monkeypatch):
    from rlhf_kernels.ops.linear_policy_loss import triton as fused

    monkeypatch.setattr(fused, "CHUNK_BYTES", 64 << 20)
    check(problem(num_tokens, 50_257), objective, weight_grad_dtype=weight_grad_dtype)


@BOTH
def test_linear_policy_loss_chunk_higher_than_the_parts_of_its_sums_equals_float64(objective):
    check(problem(6000, 32_000), objective)


@pytest.mark.parametrize("policy_loss", ["gspo", "cispo", "reinforce"])
def test_linear_policy_loss_other_losses_equal_float64(policy_loss):
    objective = PolicyObjective(policy_loss=policy_loss, clip_high=9.0, clip_low=0.9, reduction="seq_mean_token_mean")
    check(problem(500, 32_000), objective)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_linear_policy_loss_logits_that_rise_through_a_row_equal_float64(dtype):
    # Twice, by more than exponentials relative to what came before can take; tokens are the highest and the lowest.
    hidden, weight, token_ids, stream = problem(100, 32_000, dtype=dtype)
    with torch.no_grad():
        hidden[:, 0] = 1.0
        weight[:, 0] = torch.arange(32_000, device="cuda") // 10_000 * 60.0
    arguments = hidden, weight, token_ids % 2000 + 15_000 * (token_ids % 3), stream
    check(arguments, PolicyObjective(policy_loss="reinforce"), largest_logit=180 / 0.9)


@BOTH
def test_linear_policy_loss_same_input_twice_agrees_bit_for_bit(objective):
    results = []
    for _ in range(2):
        torch.manual_seed(0)
        hidden, weight, token_ids, stream = problem(4000, 151_936)
        outputs = linear_policy_loss(hidden, weight, token_ids, stream, objective)
        outputs[0].backward()
        results.append((*outputs, hidden.grad, weight.grad))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@pytest.mark.parametrize(("vocab_size", "hidden_size"), [(151_936, 1024), (152_064, 3584), (32_000, 8192)])
@BOTH
def test_linear_policy_loss_takes_half_a_gibibyte_besides_the_gradients(objective, vocab_size, hidden_size):
    linear_policy_loss(*problem(128, vocab_size, hidden_size), objective)[0].backward()  # has cuBLAS take its memory
    hidden, weight, token_ids, stream = problem(8192, vocab_size, hidden_size)
    gradients = 2 * (hidden.numel() + weight.numel())
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    linear_policy_loss(hidden, weight, token_ids, stream, objective)[0].backward()
    assert torch.cuda.max_memory_allocated() - before - gradients < 512 << 20


def test_linear_policy_loss_without_gradient_makes_none():
    hidden, weight, token_ids, stream = problem(100, 151_936)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    with torch.no_grad():
        linear_policy_loss(hidden, weight, token_ids, stream, PPO)
    assert torch.cuda.max_memory_allocated() - before < 100 * 151_936 * 2 + (36 << 20)


@pytest.mark.parametrize("wrap", ["compile", "checkpoint"])
def test_linear_policy_loss_compiled_around_or_checkpointed_gives_the_same(wrap):
    hidden, weight, token_ids, stream = problem(200, 32_000)

    def step(states):
        return linear_policy_loss(states * 2, weight, token_ids, stream, PPO)[0] * 3

    step(hidden).backward()
    want, hidden.grad = hidden.grad, None
    out = torch.compile(step)(hidden) if wrap == "compile" else checkpoint(step, hidden, use_reentrant=False)
    out.backward()
    torch.testing.assert_close(hidden.grad, want)
