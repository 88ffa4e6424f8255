"""`merge_attention_` on the CPU: the attention over all keys, from that over two parts of them."""

import math

import pytest
import torch

from rlhf_kernels import merge_attention_


def attention(query, key, value):
    """[N, H, D] and [H, N], in float64."""
    scores = torch.einsum("nhd,khd->hnk", query.double(), key.double())
    return torch.einsum("hnk,khd->nhd", scores.softmax(-1), value.double()), scores.logsumexp(-1)


@pytest.mark.parametrize("scale", [0.1, 30.0])
def test_merged_attention_is_that_over_all_keys(scale):
    torch.manual_seed(0)
    query, key, value = (torch.randn(rows, 3, 8) for rows in (5, 11, 11))
    query *= scale  # at 30, one of the two sums is lost in the other
    expected, expected_lse = attention(query, key, value)
    output, lse = (part.float() for part in attention(query, key[:4], value[:4]))
    other, other_lse = (part.float() for part in attention(query, key[4:], value[4:]))
    kept = other.clone(), other_lse.clone()
    assert merge_attention_(output, lse, other, other_lse) is None
    torch.testing.assert_close(output.double(), expected, atol=2e-6, rtol=1e-5)
    torch.testing.assert_close(lse.double(), expected_lse, atol=1e-5, rtol=1e-6)
    assert torch.equal(other, kept[0]) and torch.equal(other_lse, kept[1])


def test_views_are_changed_where_they_are():
    output = torch.zeros(3, 2, 2, dtype=torch.bfloat16)
    lse = torch.zeros(2, 3)
    other = torch.full((2, 2, 2), 4.0, dtype=torch.bfloat16)
    # Sums of 1 and of 3: a quarter of 0 and three quarters of 4.
    merge_attention_(output[1:], lse[:, 1:], other, torch.full((2, 2), math.log(3)))
    assert output.tolist() == [[[0.0, 0.0]] * 2, [[3.0, 3.0]] * 2, [[3.0, 3.0]] * 2]
    torch.testing.assert_close(lse, torch.tensor([[0.0, math.log(4), math.log(4)]] * 2))


def test_keys_without_weight_change_nothing():
    output, lse = torch.randn(2, 1, 4), torch.randn(1, 2)
    expected = output.clone(), lse.clone()
    merge_attention_(output, lse, torch.randn(2, 1, 4), torch.full((1, 2), -math.inf))
    assert torch.equal(output, expected[0]) and torch.equal(lse, expected[1])


def test_masked_queries_stay_whatever_the_others_are():
    output, lse, other, other_lse = torch.randn(3, 1, 4), torch.randn(1, 3), torch.randn(3, 1, 4), torch.randn(1, 3)
    other[1] = other_lse[:, 1] = math.nan
    expected, expected_lse = output.clone(), lse.clone()
    merge_attention_(expected[::2], expected_lse[:, ::2].contiguous(), other[::2], other_lse[:, ::2].contiguous())
    kept = lse[:, 1].clone()
    merge_attention_(output, lse, other, other_lse, mask=torch.tensor([1, 0, 7], dtype=torch.int32))
    assert torch.equal(output, expected) and torch.equal(lse[:, 1], kept)


OUTPUT, LSE = torch.zeros(4, 2, 8), torch.zeros(2, 4)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((OUTPUT, LSE, OUTPUT[:3], LSE), r"two outputs \[N, H, D\]; got \[4, 2, 8\], \[3, 2, 8\]"),
        ((OUTPUT[0], LSE, OUTPUT[0], LSE), r"got \[2, 8\]"),
        ((OUTPUT[:0], LSE[:, :0], OUTPUT[:0], LSE[:, :0]), r"got \[0, 2, 8\]"),
        (
            (OUTPUT, LSE, OUTPUT.bfloat16(), LSE),
            "one float dtype on one device; got torch.float32 on cpu and torch.bfloat16 on cpu",
        ),
        ((OUTPUT.double(), LSE, OUTPUT.double(), LSE), "one float dtype"),
        ((OUTPUT, LSE, OUTPUT.to("meta"), LSE), "on meta"),
        ((OUTPUT, LSE.T, OUTPUT, LSE), r"lse must be \[2, 4\] float32 on cpu; got \[4, 2\]"),
        ((OUTPUT, LSE, OUTPUT, LSE.double()), r"other_lse must be \[2, 4\] float32 on cpu; got \[2, 4\] torch.float64"),
        ((OUTPUT.mT.contiguous().mT, LSE, OUTPUT, LSE), "contiguous in D"),
        ((OUTPUT, LSE, OUTPUT, torch.zeros(4, 2).T), "contiguous in N"),
    ],
)
def test_what_cannot_be_merged_is_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        merge_attention_(*arguments)


def test_a_mask_of_other_shape_or_dtype_is_refused():
    for mask in (torch.ones(3, dtype=torch.int32), torch.ones(4, dtype=torch.bool)):
        with pytest.raises(ValueError, match=r"mask must be \[4\] int32 on cpu, contiguous; got"):
            merge_attention_(OUTPUT, LSE, OUTPUT, LSE, mask=mask)
