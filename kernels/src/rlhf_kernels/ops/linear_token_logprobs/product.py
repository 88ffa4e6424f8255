"""Matrix product of hidden states and an LM head that reduces logits while they are in registers (Hopper GPUs).

Forward: each program computes tiles of logits and stores, for each row, the partial sums of the tile; `_merge_kernel`
merges the partial sums of a row. Backward: with the sums known, the same product is computed again and written as the
gradient of the logits.

`head_sums` can also store the exponentials of the logits, for the gradient. They are relative to the logit of the row's
own token, which is known before the product (`reference_sums`). If a tile exceeds that logit by so much that the
exponential would overflow, they are relative to the tile's maximum, and merging rescales them.
"""

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from rlhf_kernels.dispatch import on_device
from rlhf_kernels.ops.linear_token_logprobs.reference import Head
from rlhf_kernels.ops.token_logprobs.triton import LN_2, LOG2_E

# With 8 warps, the float32 sums of a tile take 128 registers per thread, half of what a thread can have.
TILE_ROWS, TILE_COLUMNS, TILE_DEPTH = 128, 256, 64
# Three stages of operands and half a tile of results fill the shared memory of an SM.
OPTIONS = {"num_warps": 8, "num_stages": 3}
GROUP_TILES = 16  # tiles of rows per group: their hidden states stay in the L2 cache while the head streams past
MAX_ROWS = 4096  # rows whose partial sums exist at a time, a multiple of the tile height
MERGED_ROWS, MERGED_PARTS = 8, 256  # rows and partial sums per step of `_merge_kernel`
# Exponentials are at most 2^60. A sum over a vocabulary of them, times a weight, is finite in float32, and a gradient
# divided by it is not subnormal.
MAX_EXPONENT = tl.constexpr(60.0)
# Reference logits: IGNORED makes every exponential of an ignored row 0; LEAST is the lower bound for the other rows.
IGNORED, LEAST = tl.constexpr(3.0e38), tl.constexpr(-1.0e30)

# Rows of `sums`, with x = z / temperature in bits (units of log 2):
# 0 to 3: the reference r, s = sum 2^(x - r), u = sum (x - r) 2^(x - r), x of the token
# 4 to 6: log-prob, entropy, log-sum-exp, in nats


def fits(hidden: Tensor, weight: Tensor) -> bool:
    """Return whether the kernels can take this head: a Hopper GPU, and rows aligned for TMA loads.

    On Hopper they reach the speed of cuBLAS; elsewhere cuBLAS is faster.
    """
    if len(hidden) == 0 or not all(_is_aligned(matrix) for matrix in (hidden, weight)):
        return False
    if not hidden.is_cuda:  # Triton's interpreter cannot multiply bfloat16
        return hidden.dtype != torch.bfloat16
    return hidden.itemsize == 2 and torch.cuda.get_device_capability(hidden.device)[0] == 9


def _is_aligned(matrix: Tensor) -> bool:
    """Return whether rows of the matrix, and of a dense copy of it, start at multiples of 16 bytes."""
    width = matrix.shape[1]
    stride, step = matrix.stride()
    starts = (matrix.data_ptr(), width * matrix.itemsize, stride * matrix.itemsize)
    return step == 1 and stride >= width and not any(start % 16 for start in starts)


@triton.jit
def _row_stride(num_rows):
    """Return the distance between the partial sums of two tiles: a multiple of 16, so that vectors are aligned."""
    return tl.cdiv(num_rows, 16) * 16


@triton.jit
def _store(out, row, column, tile, ROWS: tl.constexpr, COLUMNS: tl.constexpr):  # noqa: N803
    """Store a tile in two halves: staging a half takes half the shared memory."""
    halves = tl.permute(tl.reshape(tile.to(out.dtype), (ROWS, 2, COLUMNS // 2)), (0, 2, 1))
    left, right = tl.split(halves)
    out.store([row, column], left)
    out.store([row, column + COLUMNS // 2], right)


# Triton compiles a kernel again where an integer or an address becomes a multiple of 16 or ceases to be one, so that it
# can load vectors. Arguments that change with the number of rows are left out: no vector is loaded by them.
@triton.jit(do_not_specialize=["sums_stride", "beside_stride", "num_rows"])
def _product_kernel(
    hidden, weight, out, bias_ptr, ids_ptr, marks_ptr, sums_ptr, beside_ptr, marks_stride, sums_stride, beside_stride,
    num_rows, width, depth, vocab_start, inv_temperature, GRADIENT: tl.constexpr, WRITES: tl.constexpr,  # noqa: N803
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, GROUP: tl.constexpr,  # noqa: N803
    PROGRAMS: tl.constexpr,  # noqa: N803
):  # fmt: skip
    """Compute tiles of hidden @ weight.T, and store partial sums (and exponentials if WRITES) or, if GRADIENT, the
    gradient of the logits. A program takes every PROGRAMS-th tile."""
    tiles_high = tl.cdiv(num_rows, ROWS)
    tiles_wide = tl.cdiv(width, COLUMNS)
    # `flatten` joins this loop with the one over the depth: the next tile's operands are loaded while this tile's sums
    # are computed and stored.
    for tile in tl.range(tl.program_id(0), tiles_high * tiles_wide, PROGRAMS, flatten=True):
        # Go down the tile rows of a group, then to the next tile column: programs that run at the same time share a
        # block of the head, and the hidden states of the group are read again from the L2 cache.
        first = tile // (GROUP * tiles_wide) * GROUP
        group = min(tiles_high - first, GROUP)
        place = tile % (GROUP * tiles_wide)
        row = (first + place % group) * ROWS
        column = place // group * COLUMNS
        z = tl.zeros((ROWS, COLUMNS), tl.float32)
        for k in range(0, depth, DEPTH):  # no masks: TMA loads give zeros beyond the edges of a matrix
            z = tl.dot(hidden.load([row, k]), weight.load([column, k]).T, z)

        rows = row + tl.arange(0, ROWS)
        columns = column + tl.arange(0, COLUMNS)
        valid = rows < num_rows
        # Looking for a row's own token costs a comparison per element; the marks skip tiles without one.
        has_tokens = tl.load(marks_ptr + row // ROWS * marks_stride + column // COLUMNS) != 0
        # Ids are compared in 32 bits, to save registers. The bound keeps a larger id from wrapping to a valid one.
        token_id = tl.minimum(tl.load(ids_ptr + rows, mask=valid, other=-1), 2147483647).to(tl.int32)
        own_column = tl.where(token_id < 0, -1, token_id - vocab_start)
        if bias_ptr is not None:
            z += tl.load(bias_ptr + columns, mask=columns < width, other=0.0).to(tl.float32)[None, :]
        z *= inv_temperature * LOG2_E  # divided by the temperature, and in bits, from here on
        reference = tl.load(sums_ptr + rows, mask=valid, other=0.0)
        if GRADIENT:
            # The formula of `_gradient_kernel` in `token_logprobs`; `level` collects what is the same for a row.
            s = tl.load(sums_ptr + sums_stride + rows, mask=valid, other=1.0)
            u = tl.load(sums_ptr + 2 * sums_stride + rows, mask=valid, other=0.0)
            by = beside_ptr + rows
            by_logprob = tl.load(by, mask=token_id >= 0, other=0.0) * inv_temperature
            by_entropy = tl.load(by + beside_stride, mask=token_id >= 0, other=0.0) * inv_temperature * LN_2
            by_logsumexp = tl.load(by + 2 * beside_stride, mask=token_id >= 0, other=0.0) * inv_temperature
            level = by_logsumexp - by_logprob + by_entropy * u / s
            c = tl.maximum(z - reference[:, None], -1e4, propagate_nan=tl.PropagateNan.ALL)
            gradient = tl.exp2(c - tl.log2(s)[:, None]) * (level[:, None] - by_entropy[:, None] * c)
            if has_tokens:
                gradient += tl.where(columns[None, :] == own_column[:, None], by_logprob[:, None], 0.0)
            _store(out, row, column, gradient, ROWS, COLUMNS)
        else:
            if column + COLUMNS > width:  # the zeros that TMA loads give there would count as logits
                z = tl.where((columns < width)[None, :], z, float("-inf"))
            if has_tokens:
                own = tl.sum(tl.where(columns[None, :] == own_column[:, None], z, 0.0), axis=1)
                is_here = (own_column >= column) & (own_column < tl.minimum(column + COLUMNS, width))
                # One tile holds a row's token, so one program writes its logit.
                tl.store(sums_ptr + 3 * sums_stride + rows, own, mask=is_here)
            highest = tl.max(z, axis=1)
            # Rarely true: the token's logit would have to be 60 bits below the tile's maximum.
            reference = tl.where(highest - reference > MAX_EXPONENT, highest, reference)
            c = z - reference[:, None]
            e = tl.exp2(c)
            # Partial sums go to memory and not into atomics, so that they are merged in a fixed order.
            parts = beside_ptr + column // COLUMNS * _row_stride(num_rows) + rows
            tl.store(parts, reference, mask=valid)
            tl.store(parts + beside_stride, tl.sum(e, axis=1), mask=valid)
            # -inf * 0 would be NaN, hence the lower bound of -1e4, whose exponential is 0.
            tl.store(parts + 2 * beside_stride, tl.sum(tl.maximum(c, -1e4) * e, axis=1), mask=valid)
            if WRITES:
                _store(out, row, column, e, ROWS, COLUMNS)


@triton.jit(do_not_specialize=["sums_stride"])
def _reference_kernel(
    hidden_ptr, weight_ptr, bias_ptr, ids_ptr, marks_ptr, sums_ptr, hidden_stride, weight_stride, marks_stride,
    sums_stride, vocab_size, depth, inv_temperature,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr  # noqa: N803
):  # fmt: skip
    """Compute the approximate logit of one row's token per program, and mark the tile that holds the token.

    The dot product sums in another order than the matrix product, so the result only serves as the reference of the
    row's exponentials. The exact logit comes from the matrix product; its place holds NaN until then.
    """
    row = tl.program_id(0).to(tl.int64)
    token_id = tl.load(ids_ptr + row).to(tl.int64)
    x = 0.0
    if (token_id >= 0) & (token_id < vocab_size):
        terms = tl.zeros([DEPTH], tl.float32)
        for start in range(0, depth, DEPTH):
            k = start + tl.arange(0, DEPTH)
            h = tl.load(hidden_ptr + row * hidden_stride + k, mask=k < depth, other=0.0).to(tl.float32)
            w = tl.load(weight_ptr + token_id * weight_stride + k, mask=k < depth, other=0.0).to(tl.float32)
            terms += h * w
        x = tl.sum(terms, axis=0)
        if bias_ptr is not None:
            x += tl.load(bias_ptr + token_id).to(tl.float32)
        x = tl.maximum(x * inv_temperature * LOG2_E, LEAST)
        tl.store(marks_ptr + row // ROWS * marks_stride + token_id // COLUMNS, 1)
    tl.store(sums_ptr + row, tl.where(token_id < 0, IGNORED, x))
    tl.store(sums_ptr + 3 * sums_stride + row, float("nan"))


@triton.jit(do_not_specialize=["sums_stride", "num_rows"])
def _merge_kernel(
    parts_ptr, ids_ptr, sums_ptr, out_ptr, sums_stride, out_stride, num_rows, vocab_size, num_parts,
    WRITES: tl.constexpr, COLUMNS: tl.constexpr, ROWS: tl.constexpr, PARTS: tl.constexpr  # noqa: N803
):  # fmt: skip
    """Merge the partial sums of a few rows per program into their sums and results.

    Exponentials that were stored relative to a tile's maximum are rescaled to the row's reference. The exponential of
    the token itself becomes e - s: divided by the sum s this is p - 1, the gradient of -log-prob there.
    """
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    valid = rows < num_rows
    stride = _row_stride(num_rows)
    plane = num_parts * stride
    # Rows up to the stride are read, so that vectors are loaded; what lies beyond `num_rows` is not stored anywhere.
    readable = rows[None, :] < stride
    part = tl.arange(0, PARTS)[:, None]
    # First pass: the highest reference of the row's parts, to which the second pass rescales their sums. They are equal
    # unless a tile used its own maximum.
    highest = tl.full([ROWS], -3.4e38, tl.float32)
    lowest = tl.full([ROWS], 3.4e38, tl.float32)
    for start in range(0, num_parts, PARTS):
        present = (start + part < num_parts) & readable
        at = parts_ptr + (start + part) * stride + rows[None, :]
        highest = tl.maximum(highest, tl.max(tl.load(at, mask=present, other=-3.4e38), axis=0))
        lowest = tl.minimum(lowest, tl.min(tl.load(at, mask=present, other=3.4e38), axis=0))
    s = tl.zeros([ROWS], tl.float32)
    u = tl.zeros([ROWS], tl.float32)
    for start in range(0, num_parts, PARTS):
        present = (start + part < num_parts) & readable
        at = parts_ptr + (start + part) * stride + rows[None, :]
        shift = tl.load(at, mask=present, other=0.0) - highest[None, :]
        factor = tl.exp2(shift)
        # Relative to `highest`, every exponent of the part changes by `shift`, and every exponential by `factor`.
        part_s = tl.load(at + plane, mask=present, other=0.0)
        part_u = tl.load(at + 2 * plane, mask=present, other=0.0)
        s += tl.sum(part_s * factor, axis=0)
        u += tl.sum((part_u + shift * part_s) * factor, axis=0)

    token_id = tl.load(ids_ptr + rows, mask=valid, other=-1).to(tl.int64)
    ignored = token_id < 0
    s = tl.where(ignored, 1.0, s)
    u = tl.where(ignored, 0.0, u)
    own = tl.load(sums_ptr + 3 * sums_stride + rows, mask=valid, other=0.0)
    log_sum = tl.log2(s)
    tl.store(sums_ptr + rows, highest, mask=valid)
    tl.store(sums_ptr + sums_stride + rows, s, mask=valid)
    tl.store(sums_ptr + 2 * sums_stride + rows, u, mask=valid)
    # Subtract the reference before log s: their sum would lose digits where logits are large.
    tl.store(sums_ptr + 4 * sums_stride + rows, tl.where(ignored, 0.0, (own - highest - log_sum) * LN_2), mask=valid)
    tl.store(sums_ptr + 5 * sums_stride + rows, tl.where(ignored, 0.0, (log_sum - u / s) * LN_2), mask=valid)
    tl.store(sums_ptr + 6 * sums_stride + rows, tl.where(ignored, 0.0, (highest + log_sum) * LN_2), mask=valid)
    if WRITES:
        out = out_ptr + rows.to(tl.int64) * out_stride
        # Hardly ever: some exponentials are relative to their tile's maximum, and the whole row is rescaled in memory.
        if tl.max(tl.where(valid & (highest > lowest), 1, 0), axis=0) > 0:
            for index in range(num_parts):
                factor = tl.exp2(tl.load(parts_ptr + index * stride + rows, mask=valid, other=0.0) - highest)
                columns = index * COLUMNS + tl.arange(0, COLUMNS)
                there = valid[:, None] & (columns < vocab_size)[None, :]
                e = tl.load(out[:, None] + columns[None, :], mask=there, other=0.0).to(tl.float32) * factor[:, None]
                tl.store(out[:, None] + columns[None, :], e.to(out_ptr.dtype.element_ty), mask=there)
            tl.debug_barrier()  # the token's element is written again below, after all other writes
        rest = tl.exp2(own - highest) - s
        tl.store(out + token_id, rest.to(out_ptr.dtype.element_ty), mask=valid & ~ignored & (token_id < vocab_size))


def reference_sums(head: Head, token_ids: Tensor, sums: Tensor, temperature: float) -> Tensor:
    """Fill in the references that `head_sums` needs. Return marks [tiles of rows, tiles of columns] int8 of the tiles
    that hold the token of one of their rows."""
    hidden, weight, bias = head
    tiles = triton.cdiv(len(hidden), TILE_ROWS), triton.cdiv(len(weight), TILE_COLUMNS)
    marks = torch.zeros(tiles, dtype=torch.int8, device=hidden.device)
    strides = hidden.stride(0), weight.stride(0), tiles[1], sums.stride(0)
    with on_device(hidden):
        _reference_kernel[(len(hidden),)](
            hidden, weight, bias, token_ids, marks, sums, *strides, len(weight), hidden.shape[1], 1.0 / temperature,
            ROWS=TILE_ROWS, COLUMNS=TILE_COLUMNS, DEPTH=512,
        )  # fmt: skip
    return marks


def head_sums(
    head: Head, token_ids: Tensor, marks: Tensor, sums: Tensor, temperature: float, exponentials: Tensor | None = None
) -> None:
    """Fill in `sums` [7, N] and, if given, `exponentials` [N, V] of the logits, with the row's sum subtracted at the
    token.

    Divided by the row's sum, the exponentials are the gradient of -log-prob times the temperature. To write them, the
    hidden states of ignored rows must be finite.
    """
    hidden, weight, bias = head
    # Launch by blocks of rows: partial sums of all rows at once would take 12 bytes per row and tile column.
    height = min(MAX_ROWS, len(hidden))
    num_parts = marks.shape[1]
    plane = num_parts * triton.cdiv(height, 16) * 16  # see `_row_stride`
    space = torch.empty(3 * plane, dtype=torch.float32, device=hidden.device)
    for start in range(0, len(hidden), height):
        some = slice(start, min(start + height, len(hidden)))
        rows, ids, some_sums = hidden[some], token_ids[some], sums[:, some]
        out = exponentials if exponentials is None else exponentials[some]
        plane = num_parts * triton.cdiv(len(rows), 16) * 16
        beside = marks[start // TILE_ROWS :], some_sums, space, plane
        with on_device(hidden):
            _product((rows, weight, bias), ids, *beside, out, temperature)
            _merge_kernel[(triton.cdiv(len(rows), MERGED_ROWS),)](
                space, ids, some_sums, out, sums.stride(0), 0 if out is None else out.stride(0), len(rows), len(weight),
                num_parts, WRITES=out is not None, COLUMNS=TILE_COLUMNS, ROWS=MERGED_ROWS, PARTS=MERGED_PARTS,
            )  # fmt: skip


def head_gradient(
    head: Head,
    token_ids: Tensor,
    marks: Tensor,
    sums: Tensor,
    grads: Tensor,
    out: Tensor,
    temperature: float,
    vocab_start: int,
) -> None:
    """Write the gradient of a block of logits to `out`, from the gradients `grads` [3, N] of the results.

    The block starts at a multiple of the tile size in its rows and, at `vocab_start`, in its columns.
    """
    marks = marks[:, vocab_start // TILE_COLUMNS :]
    with on_device(out):
        _product(head, token_ids, marks, sums, grads, grads.stride(0), out, temperature, vocab_start, gradient=True)


def _product(
    head: Head,
    token_ids: Tensor,
    marks: Tensor,
    sums: Tensor,
    beside: Tensor,
    beside_stride: int,
    out: Tensor | None,
    temperature: float,
    vocab_start: int = 0,
    gradient: bool = False,
) -> None:
    """Launch the product with at most one program per SM; each program takes several tiles."""
    hidden, weight, bias = head
    tiles = triton.cdiv(len(hidden), TILE_ROWS) * triton.cdiv(len(weight), TILE_COLUMNS)
    programs = num_sms(hidden.device)
    target = None if out is None else TensorDescriptor.from_tensor(out, [TILE_ROWS, TILE_COLUMNS // 2])
    _product_kernel[(min(tiles, programs),)](
        TensorDescriptor.from_tensor(hidden, [TILE_ROWS, TILE_DEPTH]),
        TensorDescriptor.from_tensor(weight, [TILE_COLUMNS, TILE_DEPTH]),
        target, bias, token_ids, marks, sums, beside, marks.stride(0), sums.stride(0), beside_stride,
        len(hidden), len(weight), hidden.shape[1], vocab_start, 1.0 / temperature,
        GRADIENT=gradient, WRITES=target is not None, ROWS=TILE_ROWS, COLUMNS=TILE_COLUMNS, DEPTH=TILE_DEPTH,
        GROUP=GROUP_TILES, PROGRAMS=programs, **OPTIONS,
    )  # fmt: skip


@functools.cache
def num_sms(device: torch.device) -> int:
    """Return the number of multiprocessors; 2 where Triton is interpreted."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 2
