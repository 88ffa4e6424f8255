"""The Triton kernels of `linear_sample` in Triton's interpreter, on the CPU, against the twin in float64."""

import os
from pathlib import Path

import pytest

if os.environ.get("TRITON_INTERPRET") != "1":

    def test_triton_linear_sample_interpreted_passes_all_cases(interpret):
        interpret(Path(__file__).resolve(), num_cases=15)

else:
    import torch
    import triton
    import triton.language as tl

    from rlhf_kernels.ops.linear_sample import triton as fused
    from rlhf_kernels.ops.linear_sample.reference import linear_sample_reference, random_words

    pytestmark = pytest.mark.usefixtures("small_blocks")

    @pytest.fixture
    def small_blocks(monkeypatch):
        sizes = {"TILE_ROWS": 16, "TILE_COLUMNS": 128, "TILE_DEPTH": 8, "STACKED_TILES": 2}
        for name, value in {**sizes, "DRAW_GROUPS": 2, "DRAW_DEPTH": 8, "MAX_GROUP_BYTES": 1 << 30}.items():
            monkeypatch.setattr(fused, name, value)

    def make(num_rows, vocab_size, width=16):
        rows = (
            0.5 + torch.rand(num_rows),
            torch.randint(-(2**62), 2**62, (num_rows,)),
            torch.randint(0, 2**40, (num_rows,)),
        )
        return torch.randn(num_rows, width), torch.randn(vocab_size, width), torch.randn(vocab_size), rows

    def check(hidden, weight, bias, rows, tolerance=5e-6):
        """Compare with the twin in float64, which draws the same tokens: its noise is the same."""
        results = fused.linear_sample_triton((hidden, weight, bias), *rows)
        exact = (part if part is None else part.double() for part in (hidden, weight, bias))
        expected = linear_sample_reference(tuple(exact), *rows)
        assert results.token_ids.tolist() == expected.token_ids.tolist()
        for got, want in zip(results[1:], expected[1:], strict=True):
            assert got.dtype == torch.float32
            torch.testing.assert_close(got, want, atol=tolerance, rtol=2e-6, equal_nan=True)
        return results

    @triton.jit
    def _write_words(out_ptr, seed_ptr, position_ptr, first, PURPOSE: tl.constexpr, SIZE: tl.constexpr):  # noqa: N803
        indices = first + tl.arange(0, SIZE)
        words = fused._random_words(tl.load(seed_ptr), tl.load(position_ptr), indices, PURPOSE)
        tl.store(out_ptr + tl.arange(0, SIZE), words.to(tl.int64))

    @pytest.mark.parametrize("seed", [0, 1, -5, 2**62 + 12345])
    def test_triton_random_words_equal_the_twins_bit_for_bit(seed):
        seeds, positions = torch.tensor([seed]), torch.tensor([3 * 2**33 + 7])
        out = torch.zeros(32, dtype=torch.int64)
        _write_words[(1,)](out, seeds, positions, 1000, PURPOSE=1, SIZE=32)
        assert torch.equal(out, random_words(seeds, positions, 1000 + torch.arange(32), 1))

    @pytest.mark.parametrize(("num_rows", "vocab_size"), [(1, 1), (3, 64), (40, 300), (17, 513)])
    def test_triton_linear_sample_equals_the_twin_in_float64(num_rows, vocab_size):
        hidden, weight, bias, rows = make(num_rows, vocab_size)
        rows[0][::3] = 0.0  # greedy
        check(hidden, weight, bias if num_rows > 1 else None, rows)

    def test_triton_linear_sample_in_turns_and_with_strides_equals_the_twin(monkeypatch):
        monkeypatch.setattr(fused, "MAX_GROUP_BYTES", 1)  # one tile of rows at a time
        hidden, weight, bias, rows = make(40, 200, width=32)
        rows = [column.repeat_interleave(2)[::2] for column in rows]
        check(hidden[:, 4:20], weight[:, :16], bias.repeat_interleave(2)[::2], rows)

    def test_triton_linear_sample_of_far_apart_logits_equals_the_twin():
        hidden, weight, bias, rows = make(4, 300)
        bias += torch.tensor([0.0, 1e4, -1e4]).repeat_interleave(100)
        check(hidden, weight, bias, rows, tolerance=4e-3)  # a float32 logit of 1e4 has steps of 1e-3

    def test_triton_linear_sample_never_draws_what_is_forbidden():
        hidden, weight, bias, rows = make(30, 300)
        bias[:] = -torch.inf
        bias[[130, 131, 299]] = 0.0
        rows[0][::3] = 0.0
        token_ids = check(hidden, weight, bias, rows).token_ids
        assert token_ids.unique().tolist() == [130, 131, 299]

    @pytest.mark.parametrize("temperature", [0.0, 1.0])
    def test_triton_linear_sample_rows_without_a_distribution_give_token_0_and_nan(temperature):
        hidden, weight, _, rows = make(5, 150)
        hidden[1, 3] = torch.nan
        hidden[2] = torch.inf * weight[70].sign()
        rows[0][:] = temperature
        results = check(hidden, weight, None, rows)
        assert results.logprobs.isnan().tolist() == [False, True, True, False, False]
        forbidden = check(hidden[:1], weight, torch.full((150,), -torch.inf), [column[:1] for column in rows])
        assert forbidden.token_ids.item() == 0 and forbidden.logprobs.isnan()

    def test_triton_linear_sample_negative_temperature_is_nan_alone():
        hidden, weight, _, rows = make(3, 150)
        rows[0][1] = -1.0
        assert check(hidden, weight, None, rows).logprobs.isnan().tolist() == [False, True, False]

    def test_triton_linear_sample_greedy_rows_take_the_first_of_equal_tokens():
        hidden, weight, bias, rows = make(2, 300)
        bias[:] = 0.0
        bias[[70, 71, 200]] = 1.0
        rows[0][:] = 0.0
        assert check(torch.zeros_like(hidden), weight, bias, rows).token_ids.tolist() == [70, 70]
