"""Which sequences of a decode step are a group, and that grouped attention is that over all keys."""

import logging
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("vllm")

import torch
from vllm.config import CUDAGraphMode
from vllm.v1.kv_cache_interface import FullAttentionSpec
from vllm.v1.worker.gpu.cudagraph_utils import BatchExecutionDescriptor
from vllm.v1.worker.gpu.model_runner import GPUModelRunner

from rlhf_rollout.engines.vllm import patches

shared_prefixes = pytest.importorskip("rlhf_rollout.engines.vllm.patches.shared_prefixes", exc_type=ImportError)
groups_of = shared_prefixes.groups_of

FULL = CUDAGraphMode.FULL
BLOCK, HEADS, KV_HEADS, DIMS = 4, 6, 2, 8


def rows(*tables: list[int]) -> np.ndarray:
    width = max(map(len, tables))
    return np.array([table + [0] * (width - len(table)) for table in tables])


def divided(tables: np.ndarray, most: list[int], **options: int) -> list[list[int]]:
    """Return starts, blocks and row_blocks as lists."""
    found = groups_of(tables, np.array(most), **{"least": 1, "largest": 16} | options)
    assert found.num_saved == found.row_blocks.sum() - found.blocks.sum()
    return [part.tolist() for part in found[:3]]


def test_neighbours_with_the_same_first_blocks_are_a_group() -> None:
    tables = rows([1, 2, 3, 9], [1, 2, 3, 8], [4, 5, 7], [6, 1], [6, 2], [6, 3])
    assert divided(tables, [4, 4, 3, 2, 2, 2]) == [[0, 2, 3], [3, 0, 1], [3, 3, 0, 1, 1, 1]]
    assert divided(tables, [4, 4, 3, 2, 2, 2], least=2) == [[0, 2], [3, 0], [3, 3, 0, 0, 0, 0]]


def test_a_block_that_is_being_written_is_not_shared() -> None:
    tables = rows([1, 2, 3], [1, 2, 3])
    assert divided(tables, [3, 2]) == [[0], [2], [2, 2]]
    assert divided(tables, [0, 0]) == [[0], [0], [0, 0]]
    # What lies behind a sequence's blocks is of another one before it.
    assert divided(rows([1, 2, 7], [1, 5, 7]), [3, 2]) == [[0], [1], [1, 1]]


def test_a_common_beginning_of_all_costs_groups_nothing_that_they_share_more() -> None:
    system = [1, 2]
    one, other = [*system, 3, 4, 5, 6], [*system, 7, 8, 9]
    tables = rows([*one, 20], [*one, 21], [*other, 22], [*other, 23], [*system, 24])
    assert divided(tables, [7, 7, 6, 6, 3]) == [[0, 2, 4], [6, 5, 0], [6, 6, 5, 5, 0]]
    alone = rows([*system, 20], [*system, 21], [*system, 22])
    assert divided(alone, [3, 3, 3]) == [[0], [2], [2, 2, 2]]


def test_a_large_group_has_several_entries_and_one_sequence_none_that_it_shares() -> None:
    tables = np.tile([[1, 2, 3]], (5, 1))
    assert divided(tables, [2] * 5, largest=2) == [[0, 2, 4], [2, 2, 2], [2] * 5]
    assert divided(tables[:1], [2]) == [[0], [0], [0]]


@pytest.mark.parametrize("seed", range(20))
def test_groups_share_what_they_say_and_no_more_than_is_computed(seed) -> None:
    rng = np.random.default_rng(seed)
    tables = np.concatenate([np.tile(rng.integers(1, 3, 12), (number, 1)) for number in rng.integers(1, 7, 12)])
    for row, place in enumerate(rng.integers(0, 13, len(tables))):
        tables[row, place:] = 100 * row + 3 + np.arange(12 - place)
    most = rng.integers(0, 13, len(tables))
    least, largest = rng.integers(1, 4), rng.integers(2, 6)
    found = groups_of(tables, most, least=least, largest=largest)
    bounds = [*found.starts.tolist(), len(tables)]
    assert bounds[0] == 0 and sorted(set(bounds)) == bounds
    for start, stop, number in zip(bounds, bounds[1:], found.blocks.tolist(), strict=False):
        assert (found.row_blocks[start:stop] == number).all()
        if number:
            assert number >= least and stop - start <= largest and (most[start:stop] >= number).all()
            assert (tables[start:stop, :number] == tables[start, :number]).all()


def dense(query: Any, keys: Any, values: Any, scale: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of queries [N, H, D] over keys [K, G, D] in float64: [N, H, D], and the sums [H, N]."""
    keys, values = (part.double().repeat_interleave(HEADS // KV_HEADS, 1) for part in (keys, values))
    scores = scale * torch.einsum("nhd,khd->hnk", query.double(), keys)
    return torch.einsum("hnk,khd->nhd", scores.softmax(-1), values), scores.logsumexp(-1)


def paged(*, q: Any, k: Any, v: Any, out: Any = None, return_softmax_lse: bool = False, **given: Any) -> Any:
    """FlashAttention over blocks, by `dense`; what it does not write is NaN."""
    assert given["scheduler_metadata"] == (len(given["seqused_k"]), given["max_seqlen_q"], given["causal"])
    out = torch.full_like(q, torch.nan) if out is None else out
    lse = torch.full((HEADS, len(q)), torch.nan)
    bounds = given["cu_seqlens_q"].tolist()
    for number, length in enumerate(given["seqused_k"].tolist()):
        own = slice(bounds[number], bounds[number + 1])
        size = own.stop - own.start
        assert length >= 0 and (size <= given["max_seqlen_q"] or not length)
        if size and length:
            blocks = given["block_table"][number].long()
            keys, values = (part[blocks].flatten(0, 1)[:length] for part in (k, v))
            output, sums = dense(q[own], keys, values, given["softmax_scale"])
            out[own], lse[:, own] = output.float(), sums.float()
    return (out, lse) if return_softmax_lse else out


class Runner(GPUModelRunner):
    """vLLM's, of which there is what the patch reads, on a CPU: each step checks its attention."""

    __module__ = GPUModelRunner.__module__

    def __init__(self, patch: Any, *, num_rows: int, **given: Any) -> None:
        heads = {"block_size": BLOCK, "num_kv_heads": KV_HEADS, "head_size": DIMS, "dtype": torch.float32}
        spec = FullAttentionSpec(**heads)
        builder = SimpleNamespace(aot_schedule=True, num_heads_q=HEADS, num_heads_kv=KV_HEADS, kv_cache_spec=spec)
        group = SimpleNamespace(kv_cache_spec=spec, get_metadata_builder=lambda _: builder)
        width = 16
        self.attn_groups = [[group]]
        self.cache_config = SimpleNamespace(enable_prefix_caching=True)
        self.parallel_config = SimpleNamespace(data_parallel_size=1)
        self.device = "cpu"
        self.dtype = torch.float32
        self.max_model_len = BLOCK * width
        self.max_num_reqs = num_rows
        self.counts = np.zeros((1, num_rows), np.int32)
        self.table = torch.zeros(num_rows, width, dtype=torch.int32)  # of requests, and of a step's rows
        self.input_table = torch.zeros_like(self.table)
        self.lengths = torch.zeros(num_rows, dtype=torch.int32)
        self.bounds = torch.zeros(num_rows + 1, dtype=torch.int32)
        self.block_tables = SimpleNamespace(
            append_block_ids=self.append,
            block_tables=[SimpleNamespace(gpu=self.table)],
            blocks_per_kv_block=[1],
            kernel_block_sizes=[BLOCK],
            num_blocks=SimpleNamespace(np=self.counts),
        )
        sizes = [each for each in (1, 2, 4, 8, 16, 24) if each < num_rows] + [num_rows]
        self.cudagraph_manager = SimpleNamespace(
            cudagraph_mode=CUDAGraphMode.FULL_DECODE_ONLY,
            capture=self.capture,
            graphs={},
            _capture_descs={FULL: [BatchExecutionDescriptor(FULL, size, size, 1) for size in reversed(sizes)]},
        )
        self.__dict__.update(given)
        patch.setattr(shared_prefixes, "NEEDS", shared_prefixes.NEEDS[len(shared_prefixes.NEEDED_TO_TELL) :])
        patch.setattr(shared_prefixes, "attends_to_all", lambda runner: True)
        patch.setattr(shared_prefixes, "GRAPH_STEP", 16)
        patch.setattr(shared_prefixes, "LEAST_BYTES", 2 * BLOCK * shared_prefixes.token_bytes(spec))
        patch.setattr(shared_prefixes, "LEAST_SHARED", BLOCK)
        patch.setattr(shared_prefixes, "async_copy_to_gpu", lambda given, out: out.copy_(torch.from_numpy(given)))
        patch.setattr(shared_prefixes.flash_attn, "flash_attn_varlen_func", paged, raising=False)
        planned = lambda **given: (given["batch_size"], given["max_seqlen_q"], given["causal"])  # noqa: E731
        patch.setattr(shared_prefixes.flash_attn, "get_scheduler_metadata", planned, raising=False)
        torch.manual_seed(0)
        self.keys, self.values = (torch.randn(400, BLOCK, KV_HEADS, DIMS) for _ in range(2))
        self.asked: dict[str, Any] = {"causal": True, "window_size": [-1, -1], "softcap": 0}

    def append(self, row: int, new_blocks: Any, overwrite: bool) -> None:
        start = 0 if overwrite else self.counts[0, row]
        self.counts[0, row] = start + len(new_blocks[0])
        self.table[row, start : self.counts[0, row]] = torch.tensor(new_blocks[0], dtype=torch.int32)

    def capture(self) -> None:
        manager = self.cudagraph_manager
        for each in manager._capture_descs[FULL]:
            kernel = shared_prefixes.flash_attn.flash_attn_varlen_func
            self.attention(each.num_tokens, kernel, torch.zeros(each.num_tokens, HEADS, DIMS))  # vLLM warms up
            manager.graphs[each] = each.num_tokens, kernel

    def attention(self, size: int, kernel: Any, queries: torch.Tensor) -> torch.Tensor:
        """One layer of a graph for `size` rows, of which those behind the queries pad it."""
        padded = torch.zeros(size, HEADS, DIMS)
        padded[: len(queries)] = queries
        if kernel is paged:
            self.asked["scheduler_metadata"] = (size, 1, True)
        return kernel(
            q=padded,
            k=self.keys,
            v=self.values,
            out=torch.full_like(padded, torch.nan),
            cu_seqlens_q=self.bounds[: size + 1],
            max_seqlen_q=1,
            seqused_k=self.lengths[:size],
            max_seqlen_k=self.max_model_len,
            softmax_scale=0.3,
            block_table=self.input_table[:size],
            num_splits=32,
            fa_version=3,
            **self.asked,
        )

    def prepare_attn(self, batch: Any) -> None:
        number = batch.num_reqs
        self.input_table[:number] = self.table[torch.from_numpy(batch.idx_mapping_np)]
        self.lengths.zero_()
        self.lengths[:number] = torch.from_numpy(batch.num_computed_tokens_np) + 1
        self.bounds[: number + 1] = torch.arange(number + 1)
        self.bounds[number + 1 :] = number

    def step(self, order: list[int], computed: list[int], num_later: int = 0) -> bool:
        """Compute a step, and later ones by replays; return whether it was grouped. Its attention must be right."""
        number = len(order)
        batch = SimpleNamespace(
            num_tokens=number,
            num_reqs=number,
            idx_mapping_np=np.array(order, np.int32),
            num_computed_tokens_np=np.array(computed, np.int32),
        )
        self.prepare_attn(batch)
        manager = self.cudagraph_manager
        for _ in range(1 + num_later):
            each = min((found for found in manager.graphs if found.num_tokens >= number), key=lambda f: f.num_tokens)
            queries = torch.randn(number, HEADS, DIMS)
            size, kernel = manager.graphs[each]
            output = self.attention(size, kernel, queries)
            for place, row in enumerate(order):
                length = int(self.lengths[place])
                keys, values = (
                    part[self.table[row].long()].flatten(0, 1)[:length] for part in (self.keys, self.values)
                )
                expected, _ = dense(queries[place : place + 1], keys, values, 0.3)
                torch.testing.assert_close(output[place : place + 1].double(), expected, atol=2e-6, rtol=1e-5)
            self.lengths[:number] += 1
        return kernel is not paged


@pytest.fixture
def runner(monkeypatch) -> Any:
    found = Runner(monkeypatch, num_rows=24)
    patches.patch_graphs(found, (), [], 40)
    found.cudagraph_manager.capture()
    # Two prompts of 20 and 14 tokens with 6 and 3 answers, and one answer to another.
    rng = np.random.default_rng(0)
    fresh = iter(rng.permutation(np.arange(1, 400)).tolist())
    for row in range(10):
        first = [[11, 12, 13, 14, 15], [21, 22, 23], [31]][(row > 5) + (row > 8)]
        found.block_tables.append_block_ids(row, (first,), overwrite=True)
        found.block_tables.append_block_ids(row, ([next(fresh) for _ in range(8)],), overwrite=False)
    return found


COMPUTED = [20, 21, 22, 26, 31, 20, 14, 15, 16, 5]


def test_grouped_attention_is_that_over_all_keys_in_each_replayed_step(runner) -> None:
    assert runner.step(list(range(10)), COMPUTED, num_later=7)
    entries = shared_prefixes.num_entries(16)
    assert len(runner.cudagraph_manager.graphs) == 6 and entries >= 3
    assert {size for size, _ in runner.cudagraph_manager.graphs.values()} == {16, 24}


def test_groups_are_those_of_the_step_when_sequences_end_and_begin(runner) -> None:
    assert runner.step(list(range(10)), COMPUTED)
    kept = [5, 0, 2, 9]
    assert runner.step(kept, [COMPUTED[row] + 1 for row in kept])
    # Another request takes a place that has ended, in the same order of places.
    runner.block_tables.append_block_ids(0, ([301, 302, 303, 304, 305, 306],), overwrite=True)
    assert runner.step(kept, [21, 20, 23, 7]) is False
    assert runner.step([1, 2, 3], [22, 23, 27])


def test_a_step_that_saves_too_little_or_has_too_many_groups_reads_per_sequence(runner, monkeypatch) -> None:
    assert runner.step([9, 0, 6], [5, 20, 14]) is False
    assert runner.step([0, 1, 2], COMPUTED[:3])
    monkeypatch.setattr(shared_prefixes, "num_entries", lambda rows: 1)
    assert runner.step([0, 1, 2, 6, 7], [*COMPUTED[:3], 14, 15]) is False
    monkeypatch.setattr(shared_prefixes, "LEAST_BYTES", 1 << 40)
    assert runner.step([0, 1, 3], [20, 21, 26]) is False


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"cache_config": SimpleNamespace(enable_prefix_caching=False)}, "there is no prefix cache"),
        ({"parallel_config": SimpleNamespace(data_parallel_size=2)}, "several engines share a model"),
        ({"dtype": torch.bfloat16}, "the KV cache is in torch.float32"),
        ({"max_num_reqs": 0}, "prompts of 40 tokens are too short for a gain in 0 slots"),
    ],
)
def test_a_runner_that_does_not_suit_stays_as_it_is(change, said, monkeypatch, caplog) -> None:
    found = Runner(monkeypatch, num_rows=24, **change)
    with caplog.at_level(logging.INFO, "rlhf_rollout"):
        patches.patch_graphs(found, (), [], 40)
    assert said in caplog.text and found.cudagraph_manager.capture == found.capture


def test_other_kernels_and_layers_have_no_groups(monkeypatch, caplog) -> None:
    found = Runner(monkeypatch, num_rows=24)
    patches.patch_graphs(found, ("shared_prefixes",), [], 40)
    assert found.cudagraph_manager.capture == found.capture and not caplog.text
    found.attn_groups[0][0].get_metadata_builder(0).aot_schedule = False
    with caplog.at_level(logging.INFO, "rlhf_rollout"):
        patches.patch_graphs(found, (), [], 40)
    assert "attention is not FlashAttention 3" in caplog.text
    assert found.cudagraph_manager.capture == found.capture


@pytest.mark.parametrize(
    "asked", [{"softcap": 30.0}, {"window_size": [63, 0]}, {"causal": False}, {"s_aux": torch.zeros(6)}]
)
def test_attention_of_another_kind_is_found_before_it_is_captured(asked, monkeypatch, caplog) -> None:
    found = Runner(monkeypatch, num_rows=8)
    patches.patch_graphs(found, (), [], 40)
    found.asked |= asked
    monkeypatch.setattr(found, "attention", lambda *given: Runner.attention(found, *given) if given[1] != paged else 0)
    kept = found.cudagraph_manager._capture_descs
    found.cudagraph_manager.capture()
    assert "does without the speed-up shared_prefixes" in caplog.text
    assert {kernel for _, kernel in found.cudagraph_manager.graphs.values()} == {paged}
    assert found.cudagraph_manager._capture_descs is kept and "prepare_attn" not in vars(found)
    assert shared_prefixes.flash_attn.flash_attn_varlen_func is paged
