"""Reads the keys and values that neighbours in a decode step share, such as those of their prompt, once for all.

vLLM's prefix cache gives the answers to a prompt the same blocks for it, and its attention reads them once per answer.
Here, one call of attention takes the queries of a group together, over the blocks that all of its sequences begin with.
Another one takes each sequence's own rest, and `rlhf_kernels.merge_attention_` makes one attention of the two. The
grouped call costs time of its own. So there are two sets of CUDA graphs, and each step replays the one that is quicker
for it. A sequence's place in a step is that of its arrival, so that the answers to a prompt are neighbours.
"""

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from rlhf_kernels import merge_attention_
from rlhf_rollout.engines.vllm.patches import leave_out
from rlhf_rollout.engines.vllm.patches.graph_pieces import attends_to_all
from rlhf_rollout.engines.vllm.patches.replayed_steps import NEEDED_TO_TELL
from rlhf_rollout.engines.vllm.patches.runner_names import CUDAGraphMode, async_copy_to_gpu, flash_attn
from rlhf_rollout.host import quick_collection

# Bytes of keys and values of a layer, per GPU and step, that grouped attention must save. With fewer, an H200 takes as
# long for the second call and the merge.
LEAST_BYTES = 160 << 20
LEAST_SHARED = 128  # tokens that neighbours must share to be in a group
GRAPH_STEP = 64  # grouped graphs are for its multiples: most of their work does not depend on how many rows pad them
# FlashAttention's tile has 64 rows or more. As many queries of a group, times the heads that share a key, fill it.
_TILE = 64
# What a layer may not ask of attention: `attend` does not heed it.
_REFUSED = ("alibi_slopes", "softcap", "s_aux", "mask_mod", "dynamic_causal")
# Of a model runner with a KV cache.
NEEDS = (
    *NEEDED_TO_TELL,
    "block_tables.append_block_ids",
    "block_tables.block_tables",
    "block_tables.blocks_per_kv_block",
    "block_tables.kernel_block_sizes",
    "block_tables.num_blocks.np",
    "cache_config.enable_prefix_caching",
    "cudagraph_manager._capture_descs",
    "cudagraph_manager.capture",
    "cudagraph_manager.cudagraph_mode",
    "cudagraph_manager.graphs",
    "device",
    "dtype",
    "max_num_reqs",
    "parallel_config.data_parallel_size",
    "prepare_attn",
)

_logger = logging.getLogger(__name__)


class UnfitError(Exception):
    """Says why an engine does not read shared prefixes once."""


def patch(runner: Any, longest_prompt: int) -> None:
    """Have a model runner capture a second set of graphs, and replay those in steps whose sequences share enough.

    It leaves a runner as it is that has no prefix cache, more than full attention, several KV caches, another kernel
    than FlashAttention 3, or too few sequences and short prompts for a gain, and says so in the log at level INFO.

    Args:
        runner: vLLM's second one, with a KV cache, which has not captured its graphs.
        longest_prompt: tokens of a prompt, at most, as far as is known.
    """
    try:
        builder = _checked_builder(runner, longest_prompt)
    except UnfitError as reason:
        _logger.info("vLLM reads shared prefixes once per sequence: %s", reason)
        return
    SharedPrefixes(runner, builder)


def _checked_builder(runner: Any, longest_prompt: int) -> Any:
    """Return what builds vLLM's plans of attention for a runner; raise UnfitError if the runner does not suit."""
    tables = runner.block_tables
    obstacles = {
        "there is no prefix cache": not runner.cache_config.enable_prefix_caching,
        "graphs hold more than decode steps": runner.cudagraph_manager.cudagraph_mode != CUDAGraphMode.FULL_DECODE_ONLY,
        "several engines share a model": runner.parallel_config.data_parallel_size > 1,
        "the model has more than full attention": not attends_to_all(runner),
        "there are several KV caches": len(tables.block_tables) != 1 or tables.blocks_per_kv_block != [1],
    }
    for reason, is_there in obstacles.items():
        if is_there:
            raise UnfitError(reason)
    [groups] = runner.attn_groups
    builder = groups[0].get_metadata_builder(0)
    spec = groups[0].kv_cache_spec
    if not builder.aot_schedule:  # vLLM plans ahead for this kernel alone
        raise UnfitError("attention is not FlashAttention 3")
    if spec.dtype != runner.dtype:
        raise UnfitError(f"the KV cache is in {spec.dtype}")
    if len(groups) > 1 and any(group.kv_cache_spec != spec for group in groups):
        raise UnfitError("layers have KV caches of different shapes")
    if runner.max_num_reqs * longest_prompt * token_bytes(spec) < LEAST_BYTES:
        raise UnfitError(f"prompts of {longest_prompt} tokens are too short for a gain in {runner.max_num_reqs} slots")
    return builder


def token_bytes(spec: Any) -> int:
    """Return the bytes of a token's keys and values in a layer, by vLLM's description of a KV cache."""
    return 2 * spec.num_kv_heads * spec.head_size * spec.dtype.itemsize


class Groups(NamedTuple):
    """Sequences of a step, divided into entries of neighbours that share the blocks they begin with.

    Attributes:
        starts: the first row of each entry, [E] int; entries that share nothing are neighbours in one.
        blocks: how many blocks the sequences of an entry share, [E] int.
        row_blocks: the same for each sequence, [R] int.
        num_saved: blocks that are read less, of all entries.
    """

    starts: np.ndarray
    blocks: np.ndarray
    row_blocks: np.ndarray
    num_saved: int


def groups_of(tables: np.ndarray, most: np.ndarray, *, least: int, largest: int) -> Groups:
    """Divide the sequences of a step into groups of neighbours that share the blocks they begin with.

    Between two neighbours there is a border where they share fewer than `least` blocks, or less than half of what one
    of them shares with its other neighbour: groups that have a part in common do not lose what each has more.

    Args:
        tables: the blocks of each sequence, [R, B] int.
        most: how many of its blocks may be shared, [R] int: those that hold computed tokens alone.
        least: blocks that are worth a group.
        largest: sequences in an entry, at most; a larger group has several.
    """
    num_rows = len(tables)
    width = int(most.max())
    # What each row shares with the one before it; the first one shares nothing.
    shared = np.zeros(num_rows + 1, np.int64)
    if width and num_rows > 1:
        is_same = tables[1:, :width] == tables[:-1, :width]
        number = np.where(is_same.all(1), width, is_same.argmin(1))
        shared[1:-1] = np.minimum(number, np.minimum(most[1:], most[:-1]))
    own, later = shared[:-1], shared[1:]
    earlier = np.concatenate([[0], own[:-1]])
    is_start = (own < least) | (2 * own < np.maximum(earlier, later))
    is_start[0] = True
    firsts = np.flatnonzero(is_start)
    of_group = np.minimum.reduceat(np.where(is_start, width + 1, own), firsts)
    of_group[of_group > width] = 0  # it is alone
    sizes = np.diff(firsts, append=num_rows)
    row_blocks = np.repeat(of_group, sizes)
    places = np.arange(num_rows) - np.repeat(firsts, sizes)
    is_entry = (places % largest == 0) & ((row_blocks > 0) | (places == 0))
    is_entry[1:] &= (row_blocks[1:] > 0) | (row_blocks[:-1] > 0)
    starts = np.flatnonzero(is_entry)
    blocks = row_blocks[starts]
    num_saved = int(row_blocks.sum() - blocks.sum())
    return Groups(starts, blocks, row_blocks, num_saved)


def num_entries(num_rows: int) -> int:
    """Return how many entries a graph for as many sequences has room for. A step with more replays another graph."""
    return num_rows // 4 + 8


class Views(NamedTuple):
    """The part of the tables that a graph reads, in int32 on the GPU.

    Attributes:
        row_blocks: how many blocks each row shares with its group, [R].
        bounds: the first row of each entry, and the number of rows, [E + 1].
        lengths: tokens that the rows of an entry share, [E].
    """

    row_blocks: Tensor
    bounds: Tensor
    lengths: Tensor


class Plan(NamedTuple):
    """What all layers of a step need.

    Attributes:
        views: see there.
        prefix: options of the grouped call.
        rest: options of the call for each sequence's own rest.
    """

    views: Views
    prefix: dict[str, Any]
    rest: dict[str, Any]


class SharedPrefixes:
    """Captures the second set of graphs of a model runner, and chooses between the two in each step."""

    def __init__(self, runner: Any, builder: Any) -> None:
        tables = runner.block_tables
        self._runner = runner
        self._num_blocks = tables.num_blocks.np
        [self._block_size] = tables.kernel_block_sizes
        self._block_bytes = self._block_size * token_bytes(builder.kv_cache_spec)
        self._largest = max(_TILE * builder.num_heads_kv // builder.num_heads_q, 16)  # queries of an entry
        most_rows = runner.max_num_reqs
        most_entries = num_entries(most_rows + GRAPH_STEP)
        self._known = np.zeros(tuple(tables.block_tables[0].gpu.shape), np.int32)  # the host's copy
        self._version = 0  # of `_known`, apart from blocks at the ends of sequences, which nothing shares
        self._seen: tuple[int, np.ndarray] = (-1, np.zeros(0, np.int32))  # its version and rows when groups were made
        # This memory stays while the engine sleeps.
        self._tables = torch.zeros(most_rows + 2 * most_entries + 1, dtype=torch.int32, device=runner.device)
        self._most = most_rows, most_entries
        self._sizes: list[int] = []  # of grouped graphs, ascending
        self._graphs: list[dict[Any, Any]] = [{}, {}]  # of calls per sequence, and grouped
        self._plan: tuple[Any, Plan] | None = None  # and the tensor of lengths that it is for
        self._attention = flash_attn.flash_attn_varlen_func
        self._capture = runner.cudagraph_manager.capture
        self._prepare = runner.prepare_attn
        self._append = tables.append_block_ids
        runner.cudagraph_manager.capture = self.capture

    # -- graphs ------------------------------------------------------------------------------------------------------

    def capture(self, *args: Any, **options: Any) -> None:
        """See vLLM. This captures grouped graphs, too, and has steps choose from then on."""
        manager = self._runner.cudagraph_manager
        with quick_collection():
            self._capture(*args, **options)
            plain, own = manager.graphs, manager._capture_descs
            whole = sorted(own[CUDAGraphMode.FULL], key=lambda each: each.num_tokens)
            chosen = [each for each in whole if each.num_tokens % GRAPH_STEP == 0 or each is whole[-1]]
            manager.graphs = {}
            manager._capture_descs = {CUDAGraphMode.FULL: chosen[::-1]}  # the largest first, whose memory others share
            try:
                with self._in_groups():
                    self._capture(*args, **options)
            except UnfitError as reason:
                leave_out("shared_prefixes", str(reason))
                return
            finally:
                grouped = manager.graphs
                manager.graphs = plain
                manager._capture_descs = own
        self._sizes = [each.num_tokens for each in chosen]
        # A step may replay a graph for more rows: those behind its own have no tokens.
        by_size = [grouped[chosen[np.searchsorted(self._sizes, each.num_tokens)]] for each in whole]
        self._graphs = [plain, dict(zip(whole, by_size, strict=True))]
        self._runner.prepare_attn = self.prepare
        self._runner.block_tables.append_block_ids = self.append

    @contextmanager
    def _in_groups(self) -> Iterator[None]:
        flash_attn.flash_attn_varlen_func = self.attend
        try:
            yield
        finally:
            flash_attn.flash_attn_varlen_func = self._attention
            self._plan = None

    def attend(self, **given: Any) -> Tensor:
        """Stand in for vLLM's attention of a decode step, in a graph that is captured.

        Raises:
            UnfitError: attention is more than that of all tokens before.
        """
        if self._plan is None or self._plan[0] is not given["seqused_k"]:  # the first layer
            self._plan = given["seqused_k"], self._planned(given)
        plan = self._plan[1]
        own = {name: given[name] for name in ("q", "k", "v", "softmax_scale", "num_splits", "fa_version")}
        output, lse = self._attention(
            **own,
            **plan.rest,
            out=given["out"],
            cu_seqlens_q=given["cu_seqlens_q"],
            max_seqlen_q=1,
            max_seqlen_k=given["max_seqlen_k"],
            causal=True,
            return_softmax_lse=True,
        )
        others = self._attention(
            **own, **plan.prefix, max_seqlen_k=given["max_seqlen_k"], causal=False, return_softmax_lse=True
        )
        merge_attention_(output, lse, *others, mask=plan.views.row_blocks)
        return output

    def _planned(self, given: dict[str, Any]) -> Plan:
        """Return what all layers of a step need: a graph computes it anew from the tables and lengths of each step."""
        values = {name: given.get(name) for name in _REFUSED}
        refused = [name for name, value in values.items() if torch.is_tensor(value) or value]
        if list(given["window_size"] or (-1, -1)) != [-1, -1]:
            refused.append("window_size")
        if given["causal"] is not True or given["max_seqlen_q"] != 1 or given["fa_version"] != 3 or refused:
            raise UnfitError(f"attention has {', '.join(refused) or 'another version'}")
        queries, table = given["q"], given["block_table"]
        num_rows, num_heads = queries.shape[:2]
        num_kv_heads = given["k"].shape[2]
        views = self._views(num_rows)
        firsts = views.bounds[:-1].clamp(max=num_rows - 1)
        places = torch.arange(table.shape[1], device=table.device) + views.row_blocks[:, None]
        rest = {
            "block_table": table.gather(1, places.clamp_(max=table.shape[1] - 1)),
            "seqused_k": (given["seqused_k"] - self._block_size * views.row_blocks).clamp_(min=0),
        }
        prefix = {
            "block_table": table[firsts],
            "seqused_k": views.lengths,
            "cu_seqlens_q": views.bounds,
            "max_seqlen_q": self._largest,
        }
        for call, bounds, is_causal in ((rest, given["cu_seqlens_q"], True), (prefix, views.bounds, False)):
            call["scheduler_metadata"] = flash_attn.get_scheduler_metadata(
                batch_size=len(bounds) - 1,
                max_seqlen_q=call.get("max_seqlen_q", 1),
                max_seqlen_k=given["max_seqlen_k"],
                num_heads_q=num_heads,
                num_heads_kv=num_kv_heads,
                headdim=queries.shape[2],
                cache_seqlens=call["seqused_k"],
                qkv_dtype=queries.dtype,
                cu_seqlens_q=bounds,
                page_size=self._block_size,
                causal=is_causal,
                num_splits=given["num_splits"],
            )
        return Plan(views, prefix, rest)

    def _views(self, num_rows: int) -> Views:
        most_rows, most_entries = self._most
        row_blocks, bounds, lengths = self._tables.split([most_rows, most_entries + 1, most_entries])
        entries = num_entries(num_rows)
        return Views(row_blocks[:num_rows], bounds[: entries + 1], lengths[:entries])

    # -- steps -------------------------------------------------------------------------------------------------------

    def append(self, row: int, new_blocks: Sequence[Sequence[int]], overwrite: bool) -> None:
        """See vLLM."""
        self._append(row, new_blocks, overwrite)
        [blocks] = new_blocks
        end = int(self._num_blocks[0, row])
        self._known[row, end - len(blocks) : end] = blocks
        self._version += overwrite

    def prepare(self, batch: Any) -> Any:
        """See vLLM. Where all sequences decode, this has the step replay the graph that suits what they share."""
        if batch.num_tokens == batch.num_reqs:
            rows = batch.idx_mapping_np
            version, seen = self._seen
            if version != self._version or not np.array_equal(rows, seen):
                self._seen = self._version, rows.copy()
                self._choose(rows, batch.num_computed_tokens_np // self._block_size)
        return self._prepare(batch)

    def _choose(self, rows: np.ndarray, most: np.ndarray) -> None:
        """Choose the graphs for sequences, given their rows in the tables and how many of their blocks are whole."""
        manager = self._runner.cudagraph_manager
        manager.graphs = self._graphs[0]
        size = int(np.searchsorted(self._sizes, len(rows)))
        if size == len(self._sizes) or int(most.sum()) * self._block_bytes < LEAST_BYTES:
            return
        tables = self._known[rows, : int(most.max())]
        found = groups_of(tables, most, least=-(-LEAST_SHARED // self._block_size), largest=self._largest)
        has_room = len(found.starts) <= num_entries(self._sizes[size])
        if not has_room or found.num_saved * self._block_bytes < LEAST_BYTES:
            return
        manager.graphs = self._graphs[1]
        self._write(found)

    def _write(self, found: Groups) -> None:
        """Write the tables that graphs read."""
        most_rows, most_entries = self._most
        num_rows, number = len(found.row_blocks), len(found.starts)
        written = np.zeros(len(self._tables), np.int32)
        row_blocks, bounds, lengths = np.split(written, [most_rows, most_rows + most_entries + 1])
        row_blocks[:num_rows] = found.row_blocks
        bounds[:number] = found.starts
        bounds[number:] = num_rows
        lengths[:number] = self._block_size * found.blocks
        async_copy_to_gpu(written, out=self._tables)
