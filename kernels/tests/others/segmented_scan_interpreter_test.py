"""The Triton kernels of `segmented_scan` in Triton's interpreter, on the CPU, against float64."""

import os
from itertools import accumulate
from pathlib import Path
from types import SimpleNamespace

import pytest

if os.environ.get("TRITON_INTERPRET") != "1":

    def test_triton_segmented_scan_interpreted_passes_all_cases(interpret):
        interpret(Path(__file__).resolve(), num_cases=52)

else:
    import torch

    from rlhf_kernels.ops.segmented_scan import triton as fused
    from rlhf_kernels.ops.segmented_scan.reference import packed_gae_reference, segmented_scan_reference

    # In chunks of 256, some of several chunks and with ends at their borders and beside.
    LENGTHS = [(1,), (63, 100), (5, 0, 31, 32, 33, 1, 0), (255, 256, 257), (500, 1, 775)]
    # In chunks of 16: sequences over many of them, ends at their borders and beside, empty ones there, many in one.
    BORDERS = [(16, 16), (0, 0, 16, 0, 0, 1, 15, 0), (150,), (15, 17, 33, 31), (1,) * 40, (48, 0, 0, 2, 1, 0, 45, 100)]

    def bounds(lengths, dtype=torch.int32):
        return torch.tensor([0, *accumulate(lengths)], dtype=dtype)

    def check_scan(values, decays, cu_seqlens, last):
        wide = [None if part is None else part.double() for part in (values, decays, last)]
        expected = segmented_scan_reference(wide[0], wide[1], cu_seqlens, wide[2])
        solved = fused.segmented_scan_triton(values, decays, cu_seqlens, last)
        assert solved.dtype == torch.float32
        torch.testing.assert_close(solved.double(), expected, atol=3e-6, rtol=1e-6)

    @pytest.fixture
    def medium(monkeypatch):
        """Chunks of 256 tokens: the interpreter works through full chunks only."""
        monkeypatch.setattr(fused, "CHUNK", 256)

    @pytest.fixture
    def small(monkeypatch):
        """Chunks of 16 tokens; four of their steps, and four bounds, at a time."""
        for name, number in {"CHUNK": 16, "NUM_AWAITED": 4, "NUM_PROBES": 4}.items():
            monkeypatch.setattr(fused, name, number)

    @pytest.mark.parametrize("lengths", LENGTHS)
    def test_triton_segmented_scan_equals_float64(lengths, medium):
        size = sum(lengths)
        check_scan(torch.randn(size), torch.rand(size), bounds(lengths), None)
        check_scan(torch.randn(size), torch.rand(size), bounds(lengths, torch.int64), torch.randn(len(lengths)))

    @pytest.mark.parametrize("lengths", LENGTHS[1:3] + BORDERS)
    def test_triton_segmented_scan_in_small_chunks_equals_float64(lengths, small):
        values, decays = torch.randn(sum(lengths)), 1 - 0.05 * torch.rand(sum(lengths))
        check_scan(values, decays, bounds(lengths), torch.randn(len(lengths)))
        check_scan(values, decays, bounds(lengths, torch.int64), None)

    @pytest.mark.parametrize("number", [float("nan"), float("inf")])
    def test_triton_segmented_scan_numbers_of_one_sequence_reach_no_other(number, small):
        # The second and the fourth are spoilt, one by its values, the other by what comes after it.
        lengths = (14, 20, 14, 50, 1, 29)
        cu_seqlens, size = bounds(lengths), sum(lengths)
        values, decays, last = torch.randn(size), torch.rand(size), torch.randn(len(lengths))
        sequence = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
        clean = fused.segmented_scan_triton(values, decays, cu_seqlens, last)
        last[3] = number
        spoilt = fused.segmented_scan_triton(values.where(sequence != 1, number), decays, cu_seqlens, last)
        touched = (sequence == 1) | (sequence == 3)
        assert torch.equal(spoilt[~touched], clean[~touched])
        assert not spoilt[touched].isfinite().any()

    def test_triton_segmented_scan_decay_that_is_no_number_spoils_what_comes_before_in_its_sequence(small):
        values, decays = torch.ones(60), torch.full((60,), 0.5)
        decays[[20, 45]] = float("nan")
        solved = fused.segmented_scan_triton(values, decays, bounds((10, 30, 20)), None)
        expected = segmented_scan_reference(values, decays, bounds((10, 30, 20)), None)
        assert torch.equal(solved.isnan(), expected.isnan())

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
    def test_triton_segmented_scan_half_numbers_equal_float64_of_the_same(dtype):
        check_scan(*(torch.rand(100).to(dtype) for _ in range(2)), bounds((63, 37)), torch.randn(2).to(dtype))

    def test_triton_segmented_scan_strided_numbers_equal_float64():
        wide = torch.rand(4, 100)
        check_scan(wide.T[:, 0], wide.T[:, 1], bounds((40, 60)), wide.T[:2, 2])

    def test_triton_segmented_scan_long_products_keep_their_digits():
        # Decays of 1 add up 1,500 numbers; then every hundredth cuts, and others between grow what came before.
        values, decays = torch.rand(1500), torch.ones(1500)
        for _ in range(2):
            solved = fused.segmented_scan_triton(values, decays, bounds((1500,)), None)
            expected = segmented_scan_reference(values.double(), decays.double(), bounds((1500,)), None)
            torch.testing.assert_close(solved.double(), expected, atol=0, rtol=2e-6)
            decays[::100], decays[50::100] = 0.0, 1e4

    def check_gae(lengths, turns):
        size = sum(lengths)
        rewards, values, mask = torch.randn(size), torch.randn(size), torch.rand(size) < 0.6
        rewards[~mask], values[~mask] = float("nan"), float("inf")
        starts = mask & (torch.rand(size) < 0.1) if turns else None
        last = torch.randn(len(lengths)) if turns else None
        discounts = (0.99, 0.95, 0.5)
        results = fused.packed_gae_triton(rewards, values, mask, bounds(lengths), last, starts, discounts=discounts)
        wide = (rewards.double(), values.double(), mask, bounds(lengths), last, starts)
        for got, want in zip(results, packed_gae_reference(*wide, discounts=discounts), strict=True):
            assert got.dtype == torch.float32
            torch.testing.assert_close(got.double(), want, atol=1e-5, rtol=1e-6)

    @pytest.mark.parametrize("lengths", LENGTHS)
    @pytest.mark.parametrize("turns", [False, True])
    def test_triton_packed_gae_equals_float64(lengths, turns, medium):
        check_gae(lengths, turns)

    @pytest.mark.parametrize("lengths", LENGTHS[1:3] + BORDERS)
    @pytest.mark.parametrize("turns", [False, True])
    def test_triton_packed_gae_in_small_chunks_equals_float64(lengths, turns, small):
        check_gae(lengths, turns)

    def test_triton_packed_gae_numbers_of_one_sequence_reach_no_other(small):
        lengths = (14, 20, 14, 50)
        rewards, values, mask = torch.randn(98), torch.randn(98), torch.rand(98) < 0.6
        mask[[33, 97]] = True
        tensors = (values, mask, bounds(lengths), torch.randn(4), None)
        clean = fused.packed_gae_triton(rewards, *tensors, discounts=(0.99, 0.95, 1.0))
        rewards[33] = rewards[97] = float("nan")
        for got, want in zip(
            fused.packed_gae_triton(rewards, *tensors, discounts=(0.99, 0.95, 1.0)), clean, strict=True
        ):
            assert torch.equal(got[:14], want[:14]) and torch.equal(got[34:48], want[34:48])
            assert got[14:34][mask[14:34]].isnan().all() and got[48:][mask[48:]].isnan().all()

    def some_calls():
        """Of more chunks and fewer, each leaving its words to the next."""
        for lengths in [(100,), (16, 16), (15, 17, 33, 31), (100,), (30, 60), (19,) * 5]:
            check_scan(torch.randn(sum(lengths)), torch.rand(sum(lengths)), bounds(lengths), None)

    def test_triton_state_is_right_from_call_to_call_also_where_tags_wrap(small, monkeypatch):
        monkeypatch.setattr(fused, "_states", {})
        check_scan(torch.ones(1), torch.ones(1), bounds((1,)), None)
        ((_, states),) = fused._states.values()
        (state,) = states.values()
        for count in (6, 2**31 + 3):
            state[0] = (count - 6) << 32
            some_calls()
            assert state[0] == ((count << 32) + 2**63) % 2**64 - 2**63
            words = state[fused.HEADER : fused.HEADER + 2 * 6]  # of the last call, of 6 chunks
            assert (words >> 32 == state[0] >> 32).all()

    @pytest.mark.parametrize("constant", ["NUM_STATES", "STATE_CHUNKS"])
    def test_triton_without_a_state_makes_one_a_call(constant, small, monkeypatch):
        monkeypatch.setattr(fused, "_states", {})
        monkeypatch.setattr(fused, constant, 0)
        some_calls()
        assert not fused._states

    def test_triton_states_are_one_a_stream_and_one_a_recorded_call(monkeypatch):
        device, stream, recorded = torch.device("cuda", 0), SimpleNamespace(cuda_stream=0), True
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device: stream)
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: recorded)
        monkeypatch.setattr(fused, "_states", {})
        assert fused._kept_state(device, 2) is None
        fused._states[device] = iter(torch.arange(4)), {}
        given = [fused._kept_state(device, 2) for _ in range(2)]
        recorded = False
        given += [fused._kept_state(device, 2) for _ in range(2)]
        stream.cuda_stream = 2  # of each thread another
        assert fused._kept_state(device, 2) is None
        stream.cuda_stream = 7
        given += [fused._kept_state(device, 2)]
        assert given == [0, 1, 2, 2, 3]
        stream.cuda_stream = 8
        assert fused._kept_state(device, 2) is None and fused._kept_state(device, fused.STATE_CHUNKS + 1) is None
        stream.cuda_stream = 0
        assert fused._kept_state(device, 2) == 2

    def test_triton_no_tokens_give_nothing():
        empty = torch.zeros(0)
        assert fused.segmented_scan_triton(empty, empty, bounds((0,)), None).shape == (0,)
        results = fused.packed_gae_triton(empty, empty, empty.bool(), bounds(()), None, None, discounts=(1.0, 1.0, 1.0))
        assert [result.shape for result in results] == [(0,), (0,)]
