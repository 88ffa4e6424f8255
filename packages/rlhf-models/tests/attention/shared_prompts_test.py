"""Prompts that packed sequences share: the layout, attention over it, and models, each against one without."""

import math
from itertools import pairwise
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import AutoModelForCausalLM, MistralConfig, Qwen2Config

from rlhf_data.errors import ConfigError, DataError
from rlhf_models.attention import flash
from rlhf_models.attention import packed as attention
from rlhf_models.attention.packed import PACKED_ATTENTION, check_shares_prompts, packed_attention
from rlhf_models.attention.scored import SCORED_ATTENTION, scored_attention
from rlhf_models.attention.shared_prompts import SharedPrompts, attend, attend_group_by_group
from rlhf_models.batch import TokenBatch
from rlhf_models.critic import Critic
from rlhf_models.loading import load_actor
from rlhf_models.testing import tiny_model_dir

PROMPTS = {"a": [7, 8, 9], "b": [7], "c": [5, 6]}
# Prompt and response of each sequence: groups of three, one and two, not in order; one response is empty.
SEQUENCES = [("a", [10, 11]), ("c", []), ("a", [12]), ("b", [7, 8, 9, 3]), ("c", [4, 4, 4]), ("a", [10, 11])]
TOKENS = [PROMPTS[name] + response for name, response in SEQUENCES]
PROMPT_LENGTHS = [len(PROMPTS[name]) for name, _ in SEQUENCES]


def test_each_prompt_is_stored_once_and_before_all_responses():
    shared = SharedPrompts.of(TOKENS, PROMPT_LENGTHS)
    assert shared.input_ids.tolist() == [[7, 8, 9, 5, 6, 7, 10, 11, 12, 10, 11, 4, 4, 4, 7, 8, 9, 3]]
    assert shared.position_ids.tolist() == [[0, 1, 2, 0, 1, 0, 3, 4, 3, 3, 4, 2, 3, 4, 1, 2, 3, 4]]
    a, c, b = [0, 1, 2], [3, 4], [5]
    places = [[*a, 6, 7], c, [*a, 8], [*b, 14, 15, 16, 17], [*c, 11, 12, 13], [*a, 9, 10]]
    assert shared.copies.stored_at.tolist() == [at for own in places for at in own]
    assert shared.copies.bounds.tolist() == [0, 5, 7, 11, 16, 21, 26] and shared.copies.longest == 5
    assert shared.layout.bounds.tolist() == [0, 3, 5, 6, 8, 9, 11, 11, 14, 18]
    assert shared.layout.prompt_bounds.tolist() == [0, 3, 5, 6]
    assert shared.layout.group_bounds.tolist() == [0, 5, 8, 12]
    assert shared.layout[3:] == (6, 4, 3, 5)


def test_equal_tokens_are_shared_only_as_prompts_of_equal_length():
    shared = SharedPrompts.of([[1, 2, 3], [1, 2, 4]], [1, 2])
    assert shared.input_ids.tolist() == [[1, 1, 2, 2, 3, 4]]


@pytest.mark.parametrize("prompt_lengths", [(0, 1), (3, 3), (-1, 1)])
def test_prompts_of_no_tokens_or_too_many_are_refused(prompt_lengths):
    with pytest.raises(DataError, match="prompts of"):
        TokenBatch.packed([[1, 2], [3, 4, 5]], prompt_lengths=prompt_lengths)


def dense(query, key, value, scale=None):
    """Attention by one mask over all stored tokens: earlier ones of the same segment, and those of its prompt."""
    prompt_of = {6: 0, 7: 0, 8: 0, 9: 0, 10: 0, 11: 1, 12: 1, 13: 1, 14: 2, 15: 2, 16: 2, 17: 2}
    prompts = [{0, 1, 2}, {3, 4}, {5}]
    segments = [*prompts, {6, 7}, {8}, {9, 10}, {11, 12, 13}, {14, 15, 16, 17}]
    mask = torch.zeros(18, 18, dtype=torch.bool)
    for at in range(18):
        own = next(segment for segment in segments if at in segment)
        for seen in range(18):
            mask[at, seen] = (seen in own and seen <= at) or (at in prompt_of and seen in prompts[prompt_of[at]])
    copies = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(copies, 1), value.repeat_interleave(copies, 1)
    scores = query @ key.mT * (query.shape[-1] ** -0.5 if scale is None else scale)
    return (scores.masked_fill(~mask, -math.inf).softmax(-1) @ value).transpose(1, 2)


def tensors(dtype=torch.float64):
    torch.manual_seed(0)
    return [torch.randn(1, heads, 18, 8, dtype=dtype).requires_grad_() for heads in (4, 2, 2)]


@pytest.mark.parametrize("scale", [None, 0.7])
def test_attention_group_by_group_equals_one_mask_with_gradients(scale):
    shared = SharedPrompts.of(TOKENS, PROMPT_LENGTHS)
    inputs, others = tensors(), tensors()
    output = attend_group_by_group(*inputs, shared.layout, scale=scale)
    expected = dense(*others, scale)
    torch.testing.assert_close(output, expected, atol=1e-12, rtol=0)
    weights = torch.randn_like(expected)
    (output * weights).sum().backward()
    (expected * weights).sum().backward()
    for own, other in zip(inputs, others, strict=True):
        torch.testing.assert_close(own.grad, other.grad, atol=1e-12, rtol=0)


def segments_of(cu_query, cu_key, lengths):
    """The queries and keys of each call of the kernel; nothing may be longer than what it was told."""
    for (q0, q1), (k0, k1) in zip(pairwise(cu_query.tolist()), pairwise(cu_key.tolist()), strict=True):
        assert q1 - q0 <= lengths[0] and k1 - k0 <= lengths[1]
        yield slice(q0, q1), slice(k0, k1)


def scores_of(query, key, is_causal, scale):
    """[H, q, k] in float64, with grouped heads."""
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    key = key.double().repeat_interleave(query.shape[1] // key.shape[1], 1)
    scores = torch.einsum("qhd,khd->hqk", query.double(), key) * scale
    later = torch.ones(scores.shape[1:], dtype=torch.bool).triu(1)
    return scores.masked_fill(later, -math.inf) if is_causal else scores


def flash_forward(query, key, value, cu_q, cu_k, max_q, max_k, dropout, is_causal, debug, *, scale):
    """What torch's kernel computes: the output, and the logarithms of the denominators."""
    assert dropout == 0 and not debug
    output = torch.full_like(query, math.nan)
    lse = torch.full((query.shape[1], query.shape[0]), math.nan)
    for q, k in segments_of(cu_q, cu_k, (max_q, max_k)):
        scores = scores_of(query[q], key[k], is_causal, scale)
        values = value[k].double().repeat_interleave(query.shape[1] // key.shape[1], 1)
        output[q] = torch.einsum("hqk,khd->qhd", scores.softmax(-1), values).to(output)
        lse[:, q] = scores.logsumexp(-1).float()
    return output, lse, None, None, None


def flash_backward(gradient, query, key, value, output, lse, cu_q, cu_k, max_q, max_k, dropout, is_causal, *_, scale):
    """What torch's kernel computes from the output and the denominators that it is given (FlashAttention-2, eq. 13)."""
    assert gradient.is_contiguous() and lse.is_contiguous()
    copies = query.shape[1] // key.shape[1]
    factor = query.shape[-1] ** -0.5 if scale is None else scale
    of_query, of_key, of_value = (torch.zeros_like(tensor) for tensor in (query, key, value))
    for q, k in segments_of(cu_q, cu_k, (max_q, max_k)):
        share = (scores_of(query[q], key[k], is_causal, scale) - lse[:, q, None].double()).exp()
        keys, values = (tensor[k].double().repeat_interleave(copies, 1) for tensor in (key, value))
        of_share = torch.einsum("qhd,khd->hqk", gradient[q].double(), values)
        row = (gradient[q].double() * output[q].double()).sum(-1).T[..., None]
        of_scores = share * (of_share - row) * factor
        of_query[q] = torch.einsum("hqk,khd->qhd", of_scores, keys).to(of_query)
        grouped = torch.einsum("hqk,qhd->khd", of_scores, query[q].double())
        of_key[k] = grouped.unflatten(1, (-1, copies)).sum(2).to(of_key)
        grouped = torch.einsum("hqk,qhd->khd", share, gradient[q].double())
        of_value[k] = grouped.unflatten(1, (-1, copies)).sum(2).to(of_value)
    return of_query, of_key, of_value


class Flash4:
    """FlashAttention 4's functions under their names and with their parameters."""

    @staticmethod
    def _flash_attn_fwd(
        q, k, v, *, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, softmax_scale, causal, return_lse
    ):
        assert return_lse
        lengths = (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
        return flash_forward(q, k, v, *lengths, 0.0, causal, False, scale=softmax_scale)[:2]

    @staticmethod
    def _flash_attn_bwd(
        q, k, v, out, dout, lse, *, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, softmax_scale, causal,
        deterministic,
    ):  # fmt: skip
        assert deterministic == torch.are_deterministic_algorithms_enabled()
        lengths = (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
        return flash_backward(dout, q, k, v, out, lse, *lengths, 0.0, causal, scale=softmax_scale)


@pytest.fixture(params=[2, 4])
def version(request, monkeypatch):
    """A version of FlashAttention, with twins in the place of its kernels. No kernel of the other one can be called."""
    twins = {"_flash_attention_forward": flash_forward, "_flash_attention_backward": flash_backward}
    monkeypatch.setattr(flash, "torch", FakeTorch(twins if request.param == 2 else {}))
    monkeypatch.setattr(flash, "_flash_4", lambda: Flash4 if request.param == 4 else None)
    return request.param


@pytest.mark.parametrize("scale", [None, 0.7])
def test_two_calls_of_the_kernel_make_one_attention_with_gradients(version, scale):
    layout = SharedPrompts.of(TOKENS, PROMPT_LENGTHS).layout
    inputs = tensors(torch.float32)
    others = [tensor.detach().double().requires_grad_() for tensor in inputs]
    rows = [tensor[0].transpose(0, 1) for tensor in inputs]
    output = attend(*rows, layout, scale=scale, version=version)
    expected = dense(*others, scale)
    torch.testing.assert_close(output[None].double(), expected, atol=1e-6, rtol=1e-6)
    weights = torch.randn_like(expected)
    (output * weights[0]).sum().backward()
    (expected * weights).sum().backward()
    for own, other in zip(inputs, others, strict=True):
        torch.testing.assert_close(own.grad.double(), other.grad, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("version", [4], indirect=True)  # version 2 is called as torch's varlen_attn
def test_sequences_with_prompts_of_their_own_are_one_call_with_gradients(version, monkeypatch):
    monkeypatch.setattr(attention, "varlen_unavailable_reason", lambda *args: None)
    inputs = tensors(torch.float32)
    others = [tensor.detach().double().requires_grad_() for tensor in inputs]
    bounds = torch.tensor([0, 7, 8, 18], dtype=torch.int32)
    weights = torch.randn(1, 18, 4, 8, dtype=torch.float64)
    for longest in (10, None):
        output, _ = packed_attention(
            torch.nn.Module(), *inputs, None, cu_seq_lens_q=bounds, max_length_q=longest, version=4, scaling=0.7
        )
        expected = by_sequence(*others, scale=0.7)
        torch.testing.assert_close(output.double(), expected, atol=1e-6, rtol=1e-6)
        grads = torch.autograd.grad((output * weights.float()).sum(), inputs)
        for own, other in zip(grads, torch.autograd.grad((expected * weights).sum(), others), strict=True):
            torch.testing.assert_close(own.double(), other, atol=1e-5, rtol=1e-5)


def by_sequence(query, key, value, scale):
    """Causal attention of sequences of 7, 1 and 10 tokens."""
    parts = zip(*(tensor.split([7, 1, 10], dim=2) for tensor in (query, key, value)), strict=True)
    options = {"is_causal": True, "scale": scale, "enable_gqa": True}
    return torch.cat([scaled_dot_product_attention(*part, **options) for part in parts], dim=2).transpose(1, 2)


class FakeTorch:
    """torch, with other functions in place of its kernels of attention."""

    def __init__(self, kernels):
        self.ops = SimpleNamespace(aten=SimpleNamespace(**kernels))

    def __getattr__(self, name):
        return getattr(torch, name)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny_model_dir(tmp_path_factory.mktemp("model"), initializer_range=0.2, num_attention_heads=4)


def sequences():
    draw = np.random.default_rng(0)
    prompts = [draw.integers(0, 500, length) for length in (7, 1, 4)]
    lengths = [(0, 5), (1, 9), (0, 3), (2, 0), (0, 1), (2, 6), (0, 4)]
    rows = [np.concatenate([prompts[number], draw.integers(0, 500, length)]) for number, length in lengths]
    return rows, [len(prompts[number]) for number, _ in lengths]


def test_log_probs_and_gradients_are_those_of_each_sequence_alone(folder):
    rows, prompt_lengths = sequences()
    actor = load_actor(str(folder), packing=True, dtype="float32").train()
    batch = TokenBatch.packed(rows, prompt_lengths=prompt_lengths)
    assert batch.shared.input_ids.shape[1] == 12 + 28 < batch.input_ids.shape[1]
    output = actor(batch)
    plain = AutoModelForCausalLM.from_pretrained(folder)
    weights = torch.linspace(-1, 1, batch.input_ids.shape[1]).split(batch.lengths)
    loss = 0.0
    for row, own, weight in zip(rows, batch.split(output.logprobs), weights, strict=True):
        tokens = torch.as_tensor(row)
        expected = plain(input_ids=tokens[None]).logits[0, :-1].log_softmax(-1)[range(len(row) - 1), tokens[1:]]
        torch.testing.assert_close(own[1:], expected, atol=2e-5, rtol=0)
        assert own[0] == 0
        loss = loss + (expected * weight[1:]).sum()
    loss.backward()
    (output.logprobs * torch.cat(weights)).sum().backward()
    gradients = dict(plain.named_parameters())
    for name, weight in actor.model.named_parameters():
        torch.testing.assert_close(weight.grad, gradients[name].grad, atol=5e-5, rtol=1e-3)


def test_a_log_prob_is_the_same_whatever_else_shares_its_prompt(folder):
    rows, prompt_lengths = sequences()
    actor = load_actor(str(folder), packing=True, dtype="float32")
    together = TokenBatch.packed(rows, prompt_lengths=prompt_lengths)
    own = together.split(actor(together).logprobs)
    for row, length, logprobs in zip(rows, prompt_lengths, own, strict=True):
        alone = actor(TokenBatch.packed([row], prompt_lengths=[length])).logprobs[0]
        torch.testing.assert_close(logprobs, alone, atol=2e-6, rtol=0)


def test_values_and_gradients_of_a_critic_are_those_without_sharing(folder):
    rows, prompt_lengths = sequences()
    results = []
    for lengths in (None, prompt_lengths):
        critic = Critic(load_actor(str(folder), packing=True, dtype="float32").model.base_model)
        torch.manual_seed(0)
        torch.nn.init.normal_(critic.value_head.weight)
        batch = TokenBatch.packed(rows, prompt_lengths=lengths)
        values = critic(batch)
        (values * torch.linspace(-1, 1, values.shape[1])).sum().backward()
        after = critic(batch, after_token=True)
        results.append([values, after, *(weight.grad for weight in critic.parameters() if weight.grad is not None)])
    assert results[0][0].abs().max() > 1
    for expected, own in zip(*results, strict=True):
        torch.testing.assert_close(own, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(("attention", "options"), [(packed_attention, {}), (scored_attention, {"softcap": 2.0})])
def test_a_window_sees_the_last_tokens_of_the_prompt(attention, options):
    shared = SharedPrompts.of(TOKENS, PROMPT_LENGTHS)
    stored = tensors()
    found, _ = attention(torch.nn.Module(), *stored, None, sliding_window=3, **options, **shared.arguments())
    gradients = torch.autograd.grad(found.square().sum(), stored)
    expected = torch.empty_like(found)
    each = tensors()
    for at in shared.copies.stored_at.split([len(row) for row in TOKENS]):  # a sequence alone, by hand
        query, key, value = (tensor[:, :, at] for tensor in each)
        key, value = (tensor.repeat_interleave(query.shape[1] // key.shape[1], 1) for tensor in (key, value))
        scores = query @ key.mT * query.shape[-1] ** -0.5
        scores = 2.0 * torch.tanh(scores / 2.0) if options else scores
        seen = torch.ones(len(at), len(at), dtype=torch.bool).tril() & torch.ones(len(at), len(at)).triu(-2).bool()
        expected[:, at] = (scores.masked_fill(~seen, -torch.inf).softmax(-1) @ value).transpose(1, 2)
    for one, other in zip(
        [found, *gradients], [expected, *torch.autograd.grad(expected.square().sum(), each)], strict=True
    ):
        torch.testing.assert_close(one, other, atol=1e-6, rtol=0)  # one of them takes the softmax in float32


def test_dropout_or_another_attention_cannot_share():
    shared = SharedPrompts.of(TOKENS, PROMPT_LENGTHS)
    inputs = [tensor.detach() for tensor in tensors()]
    with pytest.raises(ConfigError, match=r"cannot share prompts[\s\S]*hint: drop ``share_prompts``"):
        packed_attention(torch.nn.Module(), *inputs, None, dropout=0.1, **shared.arguments())
    with pytest.raises(ConfigError, match=r"not by sdpa[\s\S]*hint: leave ``attn_implementation`` at auto"):
        check_shares_prompts(Qwen2Config(), "sdpa")
    for name in (PACKED_ATTENTION, SCORED_ATTENTION):
        check_shares_prompts(MistralConfig(sliding_window=4096), name)
