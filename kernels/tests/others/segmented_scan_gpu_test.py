"""The Triton kernels of `segmented_scan` on a GPU, on streams as rollouts give them, against float64."""

from itertools import accumulate

import pytest
import torch

from rlhf_kernels import packed_gae, segmented_scan
from rlhf_kernels.ops.segmented_scan.reference import packed_gae_reference, segmented_scan_reference


def stream(shape):
    """Bounds of one token, of a few odd lengths, of single tokens, or of about 1M tokens, 100 to 8,000 each or 40."""
    lengths = {
        "one": [1],
        "odd": [1, 63, 0, 100, 2000],
        "rollouts": torch.randint(100, 8001, (250,)).tolist(),
        "short": [40] * 25_000,
        "single tokens": [1, 0, 1, 1] * 2000,
        "long": [131_072, 5],
    }[shape]
    return torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device="cuda")


def numbers(bounds, dtype=torch.float32):
    size = int(bounds[-1])
    draw = torch.randn(2, size, device="cuda").to(dtype)
    mask = torch.rand(size, device="cuda") < 0.7
    return draw[0], draw[1], mask, torch.randn(len(bounds) - 1, device="cuda")


@pytest.mark.parametrize("shape", ["one", "odd", "rollouts", "short", "single tokens", "long"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_segmented_scan_equals_float64(shape, dtype):
    bounds = stream(shape)
    values, decays, _, last = numbers(bounds, dtype)
    decays = decays.sigmoid()
    solved = segmented_scan(values, decays, bounds, last=last)
    expected = segmented_scan_reference(values.double(), decays.double(), bounds, last)
    torch.testing.assert_close(solved.double(), expected, atol=1e-5, rtol=1e-5)
    assert torch.equal(solved, segmented_scan(values, decays, bounds, last=last))


@pytest.mark.parametrize("shape", ["one", "odd", "rollouts", "short", "single tokens", "long"])
@pytest.mark.parametrize("turns", [False, True])
def test_packed_gae_equals_float64(shape, turns):
    bounds = stream(shape)
    rewards, values, mask, last = numbers(bounds)
    rewards[~mask] = float("nan")
    starts = mask & (torch.rand(mask.shape, device="cuda") < 0.01) if turns else None
    results = packed_gae(
        rewards, values, mask, bounds, gamma=1.0, lambd=0.95, last_values=last, turn_starts=starts, turn_gamma=0.5
    )
    wide = (rewards.double(), values.double(), mask, bounds, last, starts)
    for got, want in zip(results, packed_gae_reference(*wide, discounts=(1.0, 0.95, 0.5)), strict=True):
        torch.testing.assert_close(got.double(), want, atol=2e-5, rtol=1e-5)


WAYS = {"kept": {}, "kept, not early": {"EARLY": False}, "made": {"NUM_STATES": 0}}


@pytest.fixture(params=list(WAYS))
def way(request, monkeypatch):
    """Each way to have chunks wait for each other."""
    states = {}
    for name, constant in {"_states": states, **WAYS[request.param]}.items():
        monkeypatch.setattr(f"rlhf_kernels.ops.segmented_scan.triton.{name}", constant)
    yield
    assert bool(states) == (request.param != "made")


def test_segmented_scan_of_a_million_tokens_in_one_sequence_equals_float64(way):
    size = 1_000_003
    bounds = torch.tensor([0, size], device="cuda")
    # Views that do not start at a multiple of 16 bytes; the last token still counts at the first.
    values, decays = torch.rand(size + 1, device="cuda")[1:], 1 - 1e-5 * torch.rand(size + 1, device="cuda")[1:]
    solved = segmented_scan(values, decays, bounds, last=torch.ones(1, device="cuda"))
    numbers, factors, x = values.tolist(), decays.tolist(), 1.0
    for token in reversed(range(size)):
        numbers[token] = x = numbers[token] + factors[token] * x
    expected = torch.tensor(numbers, dtype=torch.float64, device="cuda")
    # Products of decays so near to 1 come out 1e-4 too small over 200k tokens in float32; one chunk is 5e-3 of the sum.
    torch.testing.assert_close(solved.double(), expected, atol=0, rtol=3e-4)


@pytest.mark.parametrize("shape", ["rollouts", "single tokens"])
def test_segmented_scan_replayed_beside_other_streams_stays_the_same(shape, way):
    """Two graphs, and calls on two streams, of more chunks and of fewer: none may see the others' steps."""
    bounds, few = stream(shape), stream("odd")
    values, decays, _, last = numbers(bounds)
    decays, size = decays.sigmoid(), int(few[-1])

    def calls():
        return segmented_scan(values, decays, bounds, last=last), segmented_scan(values[:size], decays[:size], few)

    want, graphs = calls(), []
    for _ in range(2):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            solved = calls()
        graphs.append((graph, solved))
    streams = [torch.cuda.Stream() for _ in range(4)]
    for repeat in range(50):
        values.neg_()  # steps left by the call before are wrong
        last.neg_()
        torch.cuda.synchronize()
        got = []
        for index, other in enumerate(streams):
            with torch.cuda.stream(other):
                if index < 2:
                    graphs[index][0].replay()
                else:
                    got.append(calls())
        torch.cuda.synchronize()
        for solved in [*got, *(solved for _, solved in graphs)]:
            for part, expected in zip(solved, want, strict=True):
                assert torch.equal(part, expected if repeat % 2 else -expected)


def test_segmented_scan_numbers_of_one_sequence_reach_no_other():
    bounds = stream("rollouts")
    values, decays, _, last = numbers(bounds)
    decays = decays.sigmoid()
    clean = segmented_scan(values, decays, bounds, last=last)
    start, end = bounds[100:102].tolist()
    values[start:end] = float("nan")
    spoilt = segmented_scan(values, decays, bounds, last=last)
    assert spoilt[start:end].isnan().all()
    spoilt[start:end] = clean[start:end]
    assert torch.equal(spoilt, clean)


def test_packed_gae_inside_a_compiled_function_is_the_same():
    bounds = stream("odd")
    rewards, values, mask, last = numbers(bounds)

    def advantages(rewards, values):
        return packed_gae(rewards * 2, values, mask, bounds, gamma=0.99, lambd=0.95, last_values=last)[0] + 1

    compiled = torch.compile(advantages)
    for _ in range(2):
        torch.testing.assert_close(compiled(rewards, values), advantages(rewards, values))


def test_segmented_scan_beyond_int32_tokens():
    size = 2**31 + 7
    if torch.cuda.mem_get_info()[0] < 40 << 30:
        pytest.skip("needs 40 GiB of free device memory")
    bounds = torch.tensor([0, size - 5, size], device="cuda")
    ones = torch.ones(size, device="cuda", dtype=torch.bfloat16)
    assert segmented_scan(ones, ones, bounds)[-6:].tolist() == [1.0, 5.0, 4.0, 3.0, 2.0, 1.0]
