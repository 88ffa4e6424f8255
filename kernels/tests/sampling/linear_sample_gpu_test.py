"""The Triton kernels of `linear_sample` on a GPU, at the sizes of real models, against float64."""

import pytest
import torch

from rlhf_kernels import linear_sample
from rlhf_kernels.ops.linear_sample.reference import linear_sample_reference
from rlhf_kernels.ops.linear_token_logprobs import product


def make(num_rows, vocab_size, width, dtype=torch.bfloat16):
    torch.manual_seed(0)
    hidden = torch.randn(num_rows, width, device="cuda").to(dtype)
    weight = (2 * torch.randn(vocab_size, width, device="cuda") / width**0.5).to(dtype)
    temperature = 0.5 + torch.rand(num_rows, device="cuda")
    temperature[::5] = 0.0
    seeds = torch.randint(-(2**62), 2**62, (num_rows,), device="cuda")
    return hidden, weight, temperature, seeds, torch.arange(num_rows, device="cuda")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(
    ("num_rows", "vocab_size", "width"),
    [(512, 151_936, 896), (1000, 49_152, 576), (1, 32_000, 256), (130, 50_257, 128), (256, 128_256, 2048)],
)
def test_tokens_and_logprobs_equal_float64(num_rows, vocab_size, width, dtype):
    hidden, weight, *rows = make(num_rows, vocab_size, width, dtype)
    assert product.fits(hidden, weight) == (dtype != torch.float32 and torch.cuda.get_device_capability()[0] == 9)
    bias = torch.zeros(vocab_size, dtype=dtype, device="cuda")
    bias[1000:2000] = -torch.inf
    results = linear_sample(hidden, weight, *rows, bias=bias)
    some = torch.randperm(num_rows, device="cuda")[:64]
    exact = hidden[some].double(), weight.double(), bias.double()
    expected = linear_sample_reference(exact, *(column[some] for column in rows))
    # Rounding decides between two tokens that are equally good by chance.
    assert (results.token_ids[some] == expected.token_ids).double().mean() > 0.98
    scale = torch.where(rows[0] == 0, 1.0, rows[0])[some, None]
    x = (exact[0] @ exact[1].T + exact[2]) / scale
    own = x.gather(1, results.token_ids[some, None])[:, 0]
    # Float32 products may be in TF32, and those of the twin are rounded to the dtype.
    torch.testing.assert_close(results.logsumexp[some].double(), x.logsumexp(1), atol=1e-4, rtol=1e-5)
    torch.testing.assert_close(results.logprobs[some].double(), own - x.logsumexp(1), atol=1e-4, rtol=1e-5)
    assert not ((results.token_ids >= 1000) & (results.token_ids < 2000)).any()


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_ten_million_draws_have_the_distribution_of_the_softmax(temperature, require_drawn_from):
    num_rows, num_calls = 1_000_000, 10
    hidden, weight, *_ = make(1, 317, 64)
    hidden = hidden.expand(num_rows, -1).contiguous()
    scale = torch.full((num_rows,), temperature, device="cuda")
    positions = torch.arange(num_rows, device="cuda")
    drawn = [
        linear_sample(hidden, weight, scale, torch.full_like(positions, seed), positions).token_ids.cpu()
        for seed in range(num_calls)
    ]
    logits = (weight.double() @ hidden[0].double()).cpu().numpy()
    require_drawn_from(torch.cat(drawn), logits / temperature)


def test_a_draw_depends_neither_on_other_rows_nor_on_the_size_of_tiles(monkeypatch):
    from rlhf_kernels.ops.linear_sample import triton as fused

    hidden, weight, *rows = make(700, 32_000, 256)
    together = linear_sample(hidden, weight, *rows)
    order = torch.randperm(700, device="cuda")[:77]
    some = linear_sample(hidden[order], weight, *(column[order] for column in rows))
    assert torch.equal(some.token_ids, together.token_ids[order])
    monkeypatch.setattr(fused, "TILE_COLUMNS", 128)
    monkeypatch.setattr(fused, "MAX_GROUP_BYTES", 1)
    again = linear_sample(hidden, weight, *rows)
    assert (again.token_ids == together.token_ids).double().mean() > 0.99
    torch.testing.assert_close(again.logsumexp, together.logsumexp, atol=1e-5, rtol=1e-6)


def test_draws_are_recorded_in_a_cuda_graph():
    hidden, weight, *rows = make(64, 32_000, 256)
    expected = linear_sample(hidden, weight, *rows)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        recorded = linear_sample(hidden, weight, *rows)
    for part in recorded:
        part.zero_()
    graph.replay()
    assert all(torch.equal(got, want) for got, want in zip(recorded, expected, strict=True))
