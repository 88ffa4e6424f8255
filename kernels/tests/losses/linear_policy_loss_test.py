"""`linear_policy_loss` on the CPU: the plain twin, against which the Triton kernels are tested."""

from dataclasses import replace
from typing import get_args

import pytest
import torch

from rlhf_kernels import PolicyObjective, PolicyStream, linear_policy_loss, packed_policy_loss, token_logprobs
from rlhf_kernels.objective import PolicyLossName
from rlhf_kernels.ops.linear_policy_loss.reference import linear_policy_loss_reference


def problem(dtype=torch.float32):
    """Hidden states, head, token ids and a stream of two sequences."""
    torch.manual_seed(0)
    hidden, weight = torch.randn(6, 4, dtype=dtype), torch.randn(11, 4, dtype=dtype)
    stream = PolicyStream(
        advantages=torch.randn(6),
        loss_mask=torch.tensor([True, True, False, True, True, True]),
        cu_seqlens=torch.tensor([0, 2, 6]),
        num_tokens=9,
        num_sequences=3,
        old_logprobs=-3 * torch.rand(6),
        ref_logprobs=-3 * torch.rand(6),
    )
    return hidden, weight, torch.tensor([0, 10, 3, -100, 4, 5]), stream


@pytest.mark.parametrize("policy_loss", get_args(PolicyLossName))
def test_linear_policy_loss_equals_its_parts_on_whole_logits(policy_loss):
    hidden, weight, token_ids, stream = problem()
    objective = PolicyObjective(policy_loss=policy_loss, kl_coef=0.1, entropy_coef=0.2)
    leaves = [(hidden.clone().requires_grad_(), weight.clone().requires_grad_()) for _ in range(2)]
    loss, metrics, logprobs, entropy = linear_policy_loss(*leaves[0], token_ids, stream, objective, temperature=0.7)
    expected = token_logprobs(leaves[1][0] @ leaves[1][1].t(), token_ids, temperature=0.7)[:2]
    trained = replace(stream, loss_mask=stream.loss_mask & (token_ids >= 0))
    want, want_metrics = packed_policy_loss(expected[0], trained, objective, entropy=expected[1])
    loss.backward()
    want.backward()
    torch.testing.assert_close((loss, metrics), (want, want_metrics))
    torch.testing.assert_close([x.grad for x in leaves[0]], [x.grad for x in leaves[1]])
    used = trained.loss_mask
    torch.testing.assert_close((logprobs[used], entropy[used]), (expected[0][used], expected[1][used]))
    assert not logprobs[~used].any() and not entropy[~used].any()
    assert not logprobs.requires_grad and not metrics.requires_grad


def test_linear_policy_loss_gradient_equals_the_numerical_one_in_float64():
    hidden, weight, token_ids, stream = problem(torch.float64)
    token_ids = token_ids.masked_fill(~stream.loss_mask, -1)
    stream = replace(stream, loss_mask=token_ids >= 0)
    objective = PolicyObjective(kl_coef=0.3, entropy_coef=0.2, clip_low=0.5, clip_high=3.0)
    assert torch.autograd.gradcheck(
        lambda x, w: linear_policy_loss_reference(x, w, token_ids, 0.7, stream, objective)[0],
        (hidden.requires_grad_(), weight.requires_grad_()),
    )


def test_linear_policy_loss_bias_that_leaves_tokens_out_equals_a_head_without_them():
    hidden, weight, token_ids, stream = problem()
    token_ids = token_ids.clamp(max=5)
    kept = torch.tensor([i in (0, 3, 4, 5, 8) for i in range(11)])
    places = torch.where(token_ids < 0, token_ids, (kept.cumsum(0) - 1)[token_ids.clamp(min=0)])
    bias = torch.zeros(11).masked_fill(~kept, -torch.inf)
    leaves = [(hidden.clone().requires_grad_(), part.clone().requires_grad_()) for part in (weight, weight[kept])]
    objective = PolicyObjective(kl_coef=0.1, entropy_coef=0.2)
    got = linear_policy_loss(*leaves[0], token_ids, stream, objective, bias=bias)
    want = linear_policy_loss(*leaves[1], places, stream, objective)
    for outputs in (got, want):
        outputs[0].backward()
    torch.testing.assert_close(got, want)
    torch.testing.assert_close(leaves[0][0].grad, leaves[1][0].grad)
    torch.testing.assert_close(leaves[0][1].grad[kept], leaves[1][1].grad)
    assert not leaves[0][1].grad[~kept].any()


def test_linear_policy_loss_bfloat16_computes_in_float32():
    hidden, weight, token_ids, stream = problem(torch.bfloat16)
    loss = linear_policy_loss(hidden, weight, token_ids, stream, PolicyObjective())[0]
    exact = linear_policy_loss(hidden.float(), weight.float(), token_ids, stream, PolicyObjective())[0]
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss, exact)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden": torch.zeros(6)}, r"hidden \[N, H\], weight \[V, H\]"),
        ({"weight": torch.zeros(11, 5)}, r"got \[6, 4\] and \[11, 5\]"),
        ({"weight": torch.zeros(0, 4)}, "V and H above 0"),
        ({"weight": torch.zeros(11, 4).half()}, "share one of bfloat16, float16 and float32"),
        ({"token_ids": torch.zeros(6)}, r"token_ids must be \[6\] on cpu in int32, int64"),
        ({"token_ids": torch.full((6,), 11)}, "token id 11 is outside the vocabulary of 11"),
        ({"temperature": 0.0}, "temperature is 0.0"),
        ({"bias": torch.zeros(10)}, r"bias \[V\], .* and \[10\]"),
        ({"bias": torch.zeros(11).half()}, r"got torch.float32, torch.float32, torch.float16"),
        ({"bias": torch.zeros(11, requires_grad=True)}, "bias of linear_policy_loss is a constant"),
        (
            {"objective": PolicyObjective(kl_coef=0.1), "stream": replace(problem()[3], ref_logprobs=None)},
            "without ref_logprobs it must be 0",
        ),
    ],
)
def test_linear_policy_loss_wrong_argument_says_what_is_allowed(changes, message):
    hidden, weight, token_ids, stream = problem()
    arguments = {"hidden": hidden, "weight": weight, "token_ids": token_ids, "stream": stream}
    with pytest.raises(ValueError, match=message):
        linear_policy_loss(**(arguments | {"objective": PolicyObjective()} | changes))


def test_linear_policy_loss_refuses_a_loss_of_its_own_which_its_kernels_do_not_know():
    hidden, weight, token_ids, stream = problem()
    with pytest.raises(ValueError, match="linear_policy_loss knows no `own_loss`"):
        linear_policy_loss(hidden, weight, token_ids, replace(stream, own_loss=torch.neg), PolicyObjective())
