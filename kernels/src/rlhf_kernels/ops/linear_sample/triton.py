"""Fused `linear_sample`: the product with the head reduces groups of logits while they are in registers.

`_groups_kernel` stores the highest logit and the sum of exponentials of each group of GROUP_SIZE tokens. `_draw_kernel`
draws a group of each row, computes the logits of that group again, and draws a token of it.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from rlhf_kernels.dispatch import on_device
from rlhf_kernels.ops.linear_sample.reference import GROUP_SIZE, OF_GROUPS, OF_TOKENS, SampledTokens
from rlhf_kernels.ops.linear_token_logprobs.product import num_sms
from rlhf_kernels.ops.linear_token_logprobs.reference import Head
from rlhf_kernels.ops.token_logprobs.triton import LN_2, LOG2_E

TILE_ROWS, TILE_COLUMNS, TILE_DEPTH = 128, 256, 64
OPTIONS = {"num_warps": 8, "num_stages": 3}
STACKED_TILES = 16  # tiles of rows that run through the head together: their hidden states stay in the L2 cache
DRAW_GROUPS, DRAW_DEPTH = 512, 128  # groups and hidden dimensions per step of `_draw_kernel`
DRAW_WARPS = 4
MAX_GROUP_BYTES = 128 << 20  # of what the first kernel leaves to the second; more rows are taken in turns

LEAST = tl.constexpr(-1.0e30)  # the lower bound of a group's reference, so that -inf minus it is not NaN
_FOR_GROUPS, _FOR_TOKENS = tl.constexpr(OF_GROUPS), tl.constexpr(OF_TOKENS)


@triton.jit
def _inverse(temperature):
    """Return 1 / temperature: 1 for temperature 0, NaN for a negative one."""
    inverse = tl.where(temperature > 0, 1.0 / temperature, float("nan"))
    return tl.where(temperature == 0, 1.0, inverse)


@triton.jit(do_not_specialize=["num_rows"])
def _groups_kernel(
    hidden, weight, bias_ptr, temperature_ptr, highest_ptr, sums_ptr, num_rows, width, depth, num_groups,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, STACK: tl.constexpr,  # noqa: N803
    SPAN: tl.constexpr, PROGRAMS: tl.constexpr,  # noqa: N803
):  # fmt: skip
    """Compute tiles of the logits, and store what is left of each group of SPAN columns. A program takes every
    PROGRAMS-th tile."""
    tiles_high = tl.cdiv(num_rows, ROWS)
    tiles_wide = tl.cdiv(width, COLUMNS)
    # `flatten` lets the next tile's operands be loaded while this tile is reduced.
    for tile in tl.range(tl.program_id(0), tiles_high * tiles_wide, PROGRAMS, flatten=True):
        # Down the tile rows first: programs that run at the same time share a block of the head.
        first = tile // (STACK * tiles_wide) * STACK
        height = min(tiles_high - first, STACK)
        place = tile % (STACK * tiles_wide)
        row = (first + place % height) * ROWS
        column = place // height * COLUMNS
        z = tl.zeros((ROWS, COLUMNS), tl.float32)
        for k in range(0, depth, DEPTH):  # no masks: TMA loads give zeros beyond the edges of a matrix
            z = tl.dot(hidden.load([row, k]), weight.load([column, k]).T, z)

        rows = row + tl.arange(0, ROWS)
        columns = column + tl.arange(0, COLUMNS)
        valid = rows < num_rows
        if bias_ptr is not None:
            z += tl.load(bias_ptr + columns, mask=columns < width, other=0.0).to(tl.float32)[None, :]
        temperature = tl.load(temperature_ptr + rows, mask=valid, other=1.0)
        z *= (_inverse(temperature) * LOG2_E)[:, None]  # in bits from here on
        if column + COLUMNS > width:
            z = tl.where((columns < width)[None, :], z, float("-inf"))
        x = tl.reshape(z, (ROWS, COLUMNS // SPAN, SPAN))
        highest = tl.maximum(tl.max(x, axis=2), LEAST)
        total = tl.sum(tl.exp2(x - highest[:, :, None]), axis=2)
        groups = column // SPAN + tl.arange(0, COLUMNS // SPAN)
        at = rows.to(tl.int64)[:, None] * num_groups + groups[None, :]
        stored = valid[:, None] & (groups < num_groups)[None, :]
        tl.store(highest_ptr + at, highest, mask=stored)
        tl.store(sums_ptr + at, total, mask=stored)


@triton.jit
def _random_words(seed, position, indices, PURPOSE: tl.constexpr):  # noqa: N803
    """Return 32 random bits per index as uint32, as `random_words` of the twin does."""
    low = (position & 0xFFFFFFFF).to(tl.uint32)
    high = ((position >> 32) & 0xFFFFFFFF).to(tl.uint32)
    zeros = indices.to(tl.uint32) * 0
    words, _, _, _ = tl.philox(seed, indices.to(tl.uint32), zeros + low, zeros + high, zeros + PURPOSE)
    return words


@triton.jit
def _noise(seed, position, indices, PURPOSE: tl.constexpr):  # noqa: N803
    """Return Gumbel noise per index in bits, less a constant: -log2 of an exponentially distributed number.

    The number is -log(1 - u). Small ones decide a draw, so that near 0 it is summed up as a series.
    """
    words = _random_words(seed, position, indices, PURPOSE)
    u = (words.to(tl.float32) + 0.5) * 2.3283064365386963e-10  # 2^-32
    rest = ((words ^ 0xFFFFFFFF).to(tl.float32) + 0.5) * 2.3283064365386963e-10  # 1 - u, and never 0
    series = u * (1 + u * (1 / 2 + u * (1 / 3 + u * (1 / 4 + u * (1 / 5 + u * (1 / 6))))))
    return -tl.log2(tl.where(u < 0.0625, series, -tl.log(rest)))


@triton.jit
def _draw_kernel(
    hidden_ptr, weight_ptr, bias_ptr, temperature_ptr, seeds_ptr, positions_ptr, highest_ptr, sums_ptr, ids_ptr,
    logprobs_ptr, logsumexp_ptr, hidden_stride, weight_stride, vocab_size, depth, num_groups,
    SPAN: tl.constexpr, GROUPS: tl.constexpr, DEPTH: tl.constexpr,  # noqa: N803
):  # fmt: skip
    """Draw a group and a token of it for one row per program."""
    row = tl.program_id(0).to(tl.int64)
    temperature = tl.load(temperature_ptr + row)
    is_greedy = temperature == 0
    seed = tl.load(seeds_ptr + row)
    position = tl.load(positions_ptr + row)

    # Each lane keeps the best of its own groups, and their sum; the lanes are merged after the loop.
    highest = tl.full([GROUPS], LEAST, tl.float32)
    total = tl.zeros([GROUPS], tl.float32)
    best = tl.full([GROUPS], float("-inf"), tl.float32)
    best_group = tl.zeros([GROUPS], tl.int32)
    for start in range(0, num_groups, GROUPS):
        group = start + tl.arange(0, GROUPS)
        present = group < num_groups
        level = tl.load(highest_ptr + row * num_groups + group, mask=present, other=LEAST)
        part = tl.load(sums_ptr + row * num_groups + group, mask=present, other=0.0)
        top = tl.maximum(highest, level)
        total = total * tl.exp2(highest - top) + part * tl.exp2(level - top)
        highest = top
        key = level + tl.log2(part) + _noise(seed, position, group, _FOR_GROUPS)
        key = tl.where(present, tl.where(is_greedy, level, key), float("-inf"))
        is_better = key > best
        best = tl.where(is_better, key, best)
        best_group = tl.where(is_better, group, best_group)
    top = tl.max(highest, axis=0)
    log_sum = tl.log2(tl.sum(total * tl.exp2(highest - top), axis=0))
    group = tl.min(tl.where(best == tl.max(best, axis=0), best_group, num_groups - 1), axis=0)

    columns = group * SPAN + tl.arange(0, SPAN)
    valid = columns < vocab_size
    places = weight_ptr + columns.to(tl.int64)[:, None] * weight_stride
    terms = tl.zeros([SPAN, DEPTH], tl.float32)
    for start in range(0, depth, DEPTH):
        k = start + tl.arange(0, DEPTH)
        h = tl.load(hidden_ptr + row * hidden_stride + k, mask=k < depth, other=0.0).to(tl.float32)
        w = tl.load(places + k[None, :], mask=valid[:, None] & (k < depth)[None, :], other=0.0).to(tl.float32)
        terms += w * h[None, :]
    x = tl.sum(terms, axis=1)
    if bias_ptr is not None:
        x += tl.load(bias_ptr + columns, mask=valid, other=0.0).to(tl.float32)
    x = tl.where(valid, x * (_inverse(temperature) * LOG2_E), float("-inf"))
    key = tl.where(is_greedy, x, x + _noise(seed, position, columns, _FOR_TOKENS))
    token = tl.min(tl.where(key == tl.max(key, axis=0), columns, vocab_size - 1), axis=0)
    own = tl.sum(tl.where(columns == token, x, 0.0), axis=0)
    # Subtract the reference before the logarithm: their sum would lose digits where logits are large.
    logprob = (own - top - log_sum) * LN_2
    tl.store(ids_ptr + row, tl.where(logprob == logprob, token, 0).to(tl.int64))
    tl.store(logprobs_ptr + row, logprob)
    tl.store(logsumexp_ptr + row, (top + log_sum) * LN_2)


def linear_sample_triton(head: Head, temperature: Tensor, seeds: Tensor, positions: Tensor) -> SampledTokens:
    """Return tokens, log-probs and log-sum-exps. `linear_sample` has checked the arguments."""
    hidden, weight, bias = head
    num_rows = len(hidden)
    num_groups = triton.cdiv(len(weight), GROUP_SIZE)
    bias = None if bias is None else bias.contiguous()
    columns = [column.contiguous() for column in (temperature, seeds, positions)]
    token_ids = torch.empty(num_rows, dtype=torch.int64, device=hidden.device)
    logprobs, logsumexp = torch.empty((2, num_rows), dtype=torch.float32, device=hidden.device)
    height = min(num_rows, max(1, MAX_GROUP_BYTES // (8 * num_groups * TILE_ROWS)) * TILE_ROWS)
    # For each row and group the highest logit, at least LEAST, and the sum of exponentials relative to it; in bits.
    space = torch.empty((2, height, num_groups), dtype=torch.float32, device=hidden.device)
    for start in range(0, num_rows, max(1, height)):
        some = slice(start, start + height)
        rows = hidden[some]
        some_columns = [column[some] for column in columns]
        with on_device(hidden):
            _group_sums(rows, weight, bias, some_columns[0], space)
            _draw_kernel[(len(rows),)](
                rows, weight, bias, *some_columns, *space, token_ids[some], logprobs[some], logsumexp[some],
                rows.stride(0), weight.stride(0), len(weight), weight.shape[1], num_groups,
                SPAN=GROUP_SIZE, GROUPS=DRAW_GROUPS, DEPTH=DRAW_DEPTH, num_warps=DRAW_WARPS,
            )  # fmt: skip
    return SampledTokens(token_ids, logprobs, logsumexp)


def _group_sums(hidden: Tensor, weight: Tensor, bias: Tensor | None, temperature: Tensor, space: Tensor) -> None:
    """Launch the product with at most one program per SM; each program takes several tiles."""
    tiles = triton.cdiv(len(hidden), TILE_ROWS) * triton.cdiv(len(weight), TILE_COLUMNS)
    programs = num_sms(hidden.device)
    _groups_kernel[(min(tiles, programs),)](
        TensorDescriptor.from_tensor(hidden, [TILE_ROWS, TILE_DEPTH]),
        TensorDescriptor.from_tensor(weight, [TILE_COLUMNS, TILE_DEPTH]),
        bias, temperature, *space, len(hidden), len(weight), hidden.shape[1], space.shape[2],
        ROWS=TILE_ROWS, COLUMNS=TILE_COLUMNS, DEPTH=TILE_DEPTH, STACK=STACKED_TILES, SPAN=GROUP_SIZE,
        PROGRAMS=programs, **OPTIONS,
    )  # fmt: skip
