"""Attention with soft caps and sinks: hand-derived weights, gradients, and packed families beside transformers."""

import math
from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from transformers import Gemma2Config
from transformers.models.gemma2.modeling_gemma2 import eager_attention_forward as gemma2_attention
from transformers.models.gpt_oss.modeling_gpt_oss import eager_attention_forward as gpt_oss_attention

from rlhf_data.errors import ConfigError
from rlhf_models.attention import scored
from rlhf_models.attention.scored import Scores, attend, scored_attention

BOUNDS = (0, 5, 6, 13)
LOWEST = torch.finfo(torch.float32).min


def heads(num_tokens, *, num_heads=4, num_keys=2, size=8, seed=0):
    torch.manual_seed(seed)
    shapes = [(1, count, num_tokens, size) for count in (num_heads, num_keys, num_keys)]
    return [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes]


def block_diagonal(bounds, window):
    """Return the [1, 1, T, T] mask of packed sequences by its definition, token by token."""
    mask = torch.full((1, 1, bounds[-1], bounds[-1]), LOWEST, dtype=torch.float64)
    for start, end in pairwise(bounds):
        for at in range(start, end):
            mask[0, 0, at, max(start, at + 1 - (window or end)) : at + 1] = 0
    return mask


def run(function, tensors, *more):
    """Return the output of a function and the gradients of a weighted sum of it, of all tensors."""
    output = function()
    torch.manual_seed(1)
    return output, torch.autograd.grad((output * torch.randn_like(output)).sum(), [*tensors, *more])


def test_weights_of_two_tokens_with_a_soft_cap_and_a_sink():
    # Scores of the second token: 1 * 3 = 3 and 1 * -1 = -1, capped 2 tanh(3 / 2) and 2 tanh(-1 / 2); the sink is 0.5.
    query, key = torch.tensor([1.0, 1.0]).view(1, 1, 2, 1), torch.tensor([3.0, -1.0]).view(1, 1, 2, 1)
    value = torch.tensor([10.0, 20.0]).view(1, 1, 2, 1)
    scores = Scores(scaling=1.0, soft_cap=2.0, sinks=torch.tensor([0.5]))
    mask = torch.tensor([[0.0, LOWEST], [0.0, 0.0]])
    exps = [math.exp(2 * math.tanh(1.5)), math.exp(2 * math.tanh(-0.5)), math.exp(0.5)]
    expected = [10 * exps[0] / (exps[0] + exps[2]), (10 * exps[0] + 20 * exps[1]) / sum(exps)]
    found = attend(query, key, value, scores, mask).flatten()
    torch.testing.assert_close(found, torch.tensor(expected))


@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("cap", [None, 0.7])
def test_packed_soft_caps_are_gemma_2s_with_a_block_diagonal_mask(cap, window):
    tensors = heads(BOUNDS[-1])
    module = nn.Module()
    module.num_key_value_groups, module.training = 2, False
    bounds = torch.tensor(BOUNDS, dtype=torch.int32)
    mask = block_diagonal(BOUNDS, window)
    plain = lambda: gemma2_attention(module, *tensors, mask, scaling=0.4, softcap=cap)[0]  # noqa: E731
    own = lambda: scored_attention(  # noqa: E731
        module, *tensors, None, scaling=0.4, softcap=cap, sliding_window=window, cu_seq_lens_q=bounds
    )[0]
    for found, expected in zip(flat(run(own, tensors)), flat(run(plain, tensors)), strict=True):
        torch.testing.assert_close(found, expected, atol=1e-6, rtol=0)  # both take the softmax in float32


@pytest.mark.parametrize("window", [None, 3])
def test_packed_sinks_are_those_of_gpt_oss_and_learn(window):
    tensors = heads(BOUNDS[-1])
    module = nn.Module()
    module.num_key_value_groups, module.training = 2, False
    module.sinks = nn.Parameter(torch.tensor([0.5, -1.0, 3.0, 0.0], dtype=torch.float64))
    bounds = torch.tensor(BOUNDS, dtype=torch.int32)
    mask = block_diagonal(BOUNDS, window)
    plain = lambda: gpt_oss_attention(module, *tensors, mask, scaling=0.4)[0]  # noqa: E731
    own = lambda: scored_attention(  # noqa: E731
        module, *tensors, None, scaling=0.4, s_aux=module.sinks, sliding_window=window, cu_seq_lens_q=bounds
    )[0]
    found, expected = flat(run(own, tensors, module.sinks)), flat(run(plain, tensors, module.sinks))
    assert expected[-1].abs().min() > 1e-3
    for mine, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, theirs, atol=1e-6, rtol=0)


def flat(found):
    output, gradients = found
    return [output, *gradients]


def test_batch_that_is_not_packed_takes_the_mask_it_gets():
    query, key, value = heads(4)
    mask = torch.full((1, 1, 4, 4), LOWEST, dtype=torch.float64)
    mask[..., 2] = 0  # all tokens see the third one only
    output, weights = scored_attention(nn.Module(), query, key, value, mask, softcap=5.0)
    assert weights is None and output.shape == (1, 4, 4, 8)
    expected = value[:, :, 2].repeat_interleave(2, dim=1)
    torch.testing.assert_close(output, expected[:, None].expand_as(output))


def test_dropout_drops_weights_of_packed_sequences():
    query, key, value = heads(6)
    bounds = torch.tensor([0, 6], dtype=torch.int32)
    torch.manual_seed(0)
    dropped, _ = scored_attention(nn.Module(), query, key, value, None, cu_seq_lens_q=bounds, dropout=0.5)
    whole, _ = scored_attention(nn.Module(), query, key, value, None, cu_seq_lens_q=bounds)
    first = dropped[0, 0] / whole[0, 0]  # the first token sees itself with weight 1: dropped, or doubled
    assert {round(ratio.item(), 3) for ratio in first.flatten()} == {0.0, 2.0}


def test_layer_whose_config_has_a_window_must_pass_it_on():
    layer = nn.Module()
    layer.layer_idx, layer.config = 0, Gemma2Config(num_hidden_layers=2, sliding_window=3)
    bounds = torch.tensor(BOUNDS, dtype=torch.int32)
    with pytest.raises(ConfigError, match="sliding window in a mask"):
        scored_attention(layer, *heads(BOUNDS[-1]), None, cu_seq_lens_q=bounds)
    scored_attention(layer, *heads(BOUNDS[-1]), None, cu_seq_lens_q=bounds, sliding_window=3)
    layer.layer_idx = 1  # a layer without a window
    scored_attention(layer, *heads(BOUNDS[-1]), None, cu_seq_lens_q=bounds)


@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize(("num_heads", "num_keys"), [(4, 2), (6, 2), (3, 3)])
@pytest.mark.parametrize(("cap", "has_sinks"), [(0.7, False), (None, True), (0.7, True), (None, False)])
def test_flex_attention_is_given_what_each_sequence_computes_by_itself(
    monkeypatch, cap, has_sinks, num_heads, num_keys, window
):
    """With torch's own code of it, which runs on a CPU, in place of the compiled kernel."""
    monkeypatch.setattr(scored, "_compiled_flex", lambda: flex_attention)
    tensors = [tensor.detach() for tensor in heads(BOUNDS[-1], num_heads=num_heads, num_keys=num_keys, size=16)]
    sinks = torch.linspace(-2, 3, num_heads, dtype=torch.float64) if has_sinks else None
    options = {"scaling": 0.4, "softcap": cap, "sliding_window": window, "s_aux": sinks}
    bounds = torch.tensor(BOUNDS, dtype=torch.int32)

    def attend_packed(has_kernel):
        monkeypatch.setattr(scored, "_has_kernel", lambda *_: has_kernel)
        return scored_attention(nn.Module(), *tensors, None, cu_seq_lens_q=bounds, **options)[0]

    found, expected = (attend_packed(has_kernel) for has_kernel in (True, False))
    torch.testing.assert_close(found, expected, atol=1e-6, rtol=0)


@pytest.mark.parametrize("window", [None, 1, 50, 200, 1000])
@pytest.mark.parametrize("ends", [(100, 300, 301, 520), (512,), (130, 1024), (1, 128, 256, 257, 640), (5,)])
def test_mask_of_blocks_is_that_of_torch_from_all_pairs_of_tokens(ends, window):
    bounds = torch.tensor([0, *ends], dtype=torch.int32)
    dense = block_diagonal(bounds.tolist(), window)[0, 0] == 0
    expected = create_block_mask(lambda b, h, at, seen: dense[at, seen], None, None, *dense.shape, device="cpu")
    mask = scored._block_mask(bounds, ends[-1], window)
    assert mask.seq_lengths == expected.seq_lengths
    tokens = torch.arange(ends[-1])
    assert torch.equal(mask.mask_mod(0, 0, tokens[:, None], tokens), dense)
    for part in ("kv", "q", "full_kv", "full_q"):
        counts = getattr(expected, f"{part}_num_blocks")
        assert torch.equal(getattr(mask, f"{part}_num_blocks"), counts)
        for row, count in enumerate(counts[0, 0]):  # what lies behind the count is not read
            listed = [getattr(each, f"{part}_indices")[0, 0, row, :count] for each in (mask, expected)]
            assert torch.equal(*listed)
    assert scored._block_mask(bounds, ends[-1], window) is mask  # of all layers of a pass


def test_mask_of_very_long_packs_has_no_entry_per_pair_of_tokens():
    bounds = torch.tensor([0, 1 << 17, 1 << 18], dtype=torch.int32)  # with one, 64 GiB
    mask = scored._block_mask(bounds, 1 << 18, None)
    assert mask.full_kv_num_blocks[0, 0].tolist() == [*range(1024)] * 2


@pytest.mark.parametrize(
    ("is_cuda", "size", "value_size", "dropout", "takes"),
    [
        (True, 64, 64, 0.0, True),
        (True, 16, 128, 0.0, True),
        (False, 64, 64, 0.0, False),
        (True, 8, 64, 0.0, False),
        (True, 64, 96, 0.0, False),
        (True, 192, 128, 0.0, False),
        (True, 64, 64, 0.1, False),
    ],
)
def test_kernel_takes_heads_of_powers_of_two_from_16_on_without_dropout(is_cuda, size, value_size, dropout, takes):
    query, value = (SimpleNamespace(is_cuda=is_cuda, shape=(1, 2, 3, width)) for width in (size, value_size))
    assert scored._has_kernel(query, value, dropout) is takes
