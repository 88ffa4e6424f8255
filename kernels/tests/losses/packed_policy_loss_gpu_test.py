"""The Triton kernel of `packed_policy_loss` on a GPU, at full size, against the twin in float64."""

from dataclasses import replace

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from rlhf_kernels import PolicyObjective, PolicyStream, packed_policy_loss
from rlhf_kernels.ops.packed_policy_loss.reference import packed_policy_loss_reference

OBJECTIVES = {
    "ppo": PolicyObjective(dual_clip=3.0, kl_coef=0.1, kl_estimator="k3", entropy_coef=0.01),
    "gspo": PolicyObjective(policy_loss="gspo", reduction="seq_mean_token_mean", clip_low=3e-2, clip_high=4e-2),
    "cispo": PolicyObjective(policy_loss="cispo", kl_coef=0.1, kl_unbiased_gradient=True),
    "sapo": PolicyObjective(policy_loss="sapo", reduction="seq_mean_token_mean"),
    "dppo_kl": PolicyObjective(policy_loss="dppo_kl", clip_low=0.05, clip_high=0.05),
    "gmpo": PolicyObjective(policy_loss="gmpo", clip_low=0.1, clip_high=0.2),
    "off-policy mask": PolicyObjective(mask_off_policy=0.001),
    "vespo": PolicyObjective(policy_loss="vespo", reduction="seq_mean_token_sum"),
    "kimi": PolicyObjective(policy_loss="kimi", log_ratio_coef=0.1),
    "reinforce": PolicyObjective(policy_loss="reinforce", reduction="seq_mean_token_sum"),
}


def problem(num_tokens):
    """Log-probs, entropy, and a stream of sequences of 100 to 8000 tokens."""
    lengths = torch.randint(100, 8001, (num_tokens // 100 + 1,)).cumsum(0)
    bounds = torch.cat([torch.zeros(1, dtype=torch.int64), lengths[lengths < num_tokens], torch.tensor([num_tokens])])
    logprobs = -3 * torch.rand(num_tokens, device="cuda")
    old, ref = (logprobs + 0.2 * torch.randn_like(logprobs) for _ in range(2))
    stream = PolicyStream(
        advantages=torch.randn_like(logprobs),
        loss_mask=torch.rand_like(logprobs) < 0.9,
        cu_seqlens=bounds.to("cuda", torch.int32),
        num_tokens=num_tokens,
        num_sequences=len(bounds) - 1,
        old_logprobs=old,
        ref_logprobs=ref,
        weights=2 * torch.rand_like(logprobs),
        penalties=torch.rand_like(logprobs),
    )
    return logprobs.requires_grad_(), torch.rand_like(logprobs).requires_grad_(), stream


@pytest.mark.parametrize("num_tokens", [1, 63, 100, 2000, 1_000_003])
@pytest.mark.parametrize("name", OBJECTIVES)
def test_packed_policy_loss_full_stream_equals_float64(name, num_tokens):
    objective = OBJECTIVES[name]
    logprobs, entropy, stream = problem(num_tokens)
    loss, metrics = packed_policy_loss(logprobs, stream, objective, entropy=entropy)
    loss.backward()
    columns = ("advantages", "old_logprobs", "ref_logprobs", "weights")
    wide = replace(stream, **{column: getattr(stream, column).double() for column in columns})
    leaves = [column.detach().double().requires_grad_() for column in (logprobs, entropy)]
    want, want_metrics = packed_policy_loss_reference(*leaves, wide, objective)
    want.backward()
    torch.testing.assert_close(loss.double(), want, atol=1e-6, rtol=1e-4)
    torch.testing.assert_close(metrics.double(), want_metrics, atol=1e-4, rtol=1e-4)
    error = (logprobs.grad.double() - leaves[0].grad).norm()
    assert error <= 1e-5 * leaves[0].grad.norm()


@pytest.mark.parametrize("name", OBJECTIVES)
def test_packed_policy_loss_same_input_twice_agrees_bit_for_bit(name):
    logprobs, entropy, stream = problem(300_000)
    first, second = (packed_policy_loss(logprobs, stream, OBJECTIVES[name], entropy=entropy) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_packed_policy_loss_waits_for_nothing():
    logprobs, entropy, stream = problem(2000)
    packed_policy_loss(logprobs, stream, OBJECTIVES["ppo"], entropy=entropy)[0].backward()
    torch.cuda.set_sync_debug_mode("error")
    try:
        packed_policy_loss(logprobs, stream, OBJECTIVES["ppo"], entropy=entropy)[0].backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("wrap", ["compile", "checkpoint"])
def test_packed_policy_loss_compiled_around_or_checkpointed_gives_the_same(wrap):
    logprobs, entropy, stream = problem(2000)

    def step(scores):
        return packed_policy_loss(scores * 2, stream, OBJECTIVES["ppo"], entropy=entropy)[0] * 3

    step(logprobs).backward()
    want, logprobs.grad = logprobs.grad, None
    out = torch.compile(step)(logprobs) if wrap == "compile" else checkpoint(step, logprobs, use_reentrant=False)
    out.backward()
    torch.testing.assert_close(logprobs.grad, want)
