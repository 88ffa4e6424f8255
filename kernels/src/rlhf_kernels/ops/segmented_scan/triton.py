"""Fused `segmented_scan` and `packed_gae`: one program a sequence, each number read once and written once."""

import contextlib
from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

# A block is rows of one token a lane, scanned each within a warp: as many as a sequence of mean length needs, or these.
COLUMNS = 32
MAX_ROWS = 32
ROWS_A_WARP = 4


@torch.no_grad()
def segmented_scan_triton(values: Tensor, decays: Tensor, cu_seqlens: Tensor, last: Tensor | None) -> Tensor:
    """Solve as `segmented_scan` does, which checks the arguments."""
    solution = torch.empty(values.shape, dtype=torch.float32, device=values.device)
    _launch(_scan_kernel, cu_seqlens, solution, [values, decays, cu_seqlens, last, solution])
    return solution


@torch.no_grad()
def packed_gae_triton(*tensors: Tensor | None, discounts: Sequence[float]) -> tuple[Tensor, Tensor]:
    """Return advantages and returns as `packed_gae` does, which checks the arguments; they are those of the twin."""
    rewards, cu_seqlens = tensors[0], tensors[3]
    advantages, returns = (torch.empty(rewards.shape, dtype=torch.float32, device=rewards.device) for _ in range(2))
    _launch(_gae_kernel, cu_seqlens, returns, [*tensors, *discounts, advantages, returns])
    return advantages, returns


def _launch(kernel: triton.JITFunction, cu_seqlens: Tensor, out: Tensor, arguments: Sequence[Any]) -> None:
    if out.numel():
        num_sequences = cu_seqlens.numel() - 1
        rows = min(MAX_ROWS, triton.next_power_of_2(triton.cdiv(out.numel(), num_sequences * COLUMNS)))
        arguments = [part.contiguous() if isinstance(part, Tensor) else part for part in arguments]
        # Triton launches on the current device, which need not be the tensor's.
        with torch.cuda.device(out.device) if out.is_cuda else contextlib.nullcontext():
            kernel[(num_sequences,)](*arguments, rows=rows, columns=COLUMNS, num_warps=max(1, rows // ROWS_A_WARP))


@triton.jit
def _combine(later_decay, later_value, decay, value):
    """Make x -> later_decay x + later_value and then x -> decay x + value one such step."""
    return later_decay * decay, value + decay * later_value


@triton.jit
def _solve(decay, value, carry, rows: tl.constexpr, columns: tl.constexpr):
    """Solve a block [rows, columns] of consecutive tokens, `carry` being x after it; return x, and x of its start.

    Each row by itself first, within a warp; then the rows as single steps, whose solution each row goes on from.
    """
    decays, solved = tl.associative_scan((decay, value), 1, _combine, reverse=True)
    first = tl.arange(0, columns)[None, :] == 0
    steps = (tl.sum(tl.where(first, decays, 0.0), axis=1), tl.sum(tl.where(first, solved, 0.0), axis=1))
    row_decays, row_solved = tl.associative_scan(steps, 0, _combine, reverse=True)
    row_solved += row_decays * carry
    row = tl.arange(0, rows)
    row_after = tl.sum(tl.where(row[None, :] == row[:, None] + 1, row_solved[None, :], 0.0), axis=1)
    solved += decays * tl.where(row == rows - 1, carry, row_after)[:, None]
    return solved, tl.sum(tl.where(row == 0, row_solved, 0.0), axis=0)


@triton.jit
def _begin(bounds_ptr, last_ptr, rows: tl.constexpr, columns: tl.constexpr):
    """Return a sequence's first token, the one after its last, the value there, and the tokens of its last block."""
    sequence = tl.program_id(0)
    start = tl.load(bounds_ptr + sequence).to(tl.int64)
    end = tl.load(bounds_ptr + sequence + 1).to(tl.int64)
    last = 0.0
    if last_ptr is not None:
        last = tl.load(last_ptr + sequence).to(tl.float32)
    lane = tl.arange(0, rows)[:, None] * columns + tl.arange(0, columns)[None, :]
    return start, end, last, end - rows * columns + lane


@triton.jit
def _scan_kernel(values_ptr, decays_ptr, bounds_ptr, last_ptr, solution_ptr, rows: tl.constexpr, columns: tl.constexpr):
    """One sequence a program, from its end, a block at a time."""
    start, end, carry, token = _begin(bounds_ptr, last_ptr, rows, columns)
    value = tl.load(values_ptr + token, mask=token >= start, other=0.0).to(tl.float32)
    decay = tl.load(decays_ptr + token, mask=token >= start, other=0.0).to(tl.float32)
    for _ in range(tl.cdiv(end - start, rows * columns)):
        # The next block is on its way while this one is solved.
        earlier = token - rows * columns
        next_value = tl.load(values_ptr + earlier, mask=earlier >= start, other=0.0).to(tl.float32)
        next_decay = tl.load(decays_ptr + earlier, mask=earlier >= start, other=0.0).to(tl.float32)
        solved, carry = _solve(decay, value, carry, rows, columns)
        tl.store(solution_ptr + token, solved, mask=token >= start)
        token, value, decay = earlier, next_value, next_decay


@triton.jit
def _gae_kernel(
    rewards_ptr,
    values_ptr,
    mask_ptr,
    bounds_ptr,
    last_ptr,
    turns_ptr,
    gamma,
    lambd,
    turn_gamma,
    advantages_ptr,
    returns_ptr,
    rows: tl.constexpr,
    columns: tl.constexpr,
):
    """One sequence a program, from its end, a block at a time: solves for what comes after each token (README)."""
    start, end, last_value, token = _begin(bounds_ptr, last_ptr, rows, columns)
    carry = gamma * last_value
    for _ in range(tl.cdiv(end - start, rows * columns)):
        inside = token >= start
        after = token + 1
        has_after = inside & (after < end)
        trained_after = tl.load(mask_ptr + after, mask=has_after, other=0) != 0
        reward_after = tl.load(rewards_ptr + after, mask=has_after, other=0.0).to(tl.float32)
        value_after = tl.load(values_ptr + after, mask=has_after, other=0.0).to(tl.float32)
        trained = tl.load(mask_ptr + token, mask=inside, other=0) != 0
        reward = tl.load(rewards_ptr + token, mask=inside, other=0.0).to(tl.float32)
        value = tl.load(values_ptr + token, mask=inside, other=0.0).to(tl.float32)
        discount = gamma
        if turns_ptr is not None:
            discount = tl.where(tl.load(turns_ptr + after, mask=has_after, other=0) != 0, turn_gamma, gamma)
        # A skipped token hands on what it gets, whatever its own numbers.
        step = tl.where(trained_after, discount * ((1.0 - lambd) * value_after + lambd * reward_after), 0.0)
        solved, carry = _solve(tl.where(trained_after, discount * lambd, 1.0), step, carry, rows, columns)
        tl.store(returns_ptr + token, tl.where(trained, reward + solved, 0.0), mask=inside)
        tl.store(advantages_ptr + token, tl.where(trained, reward + solved - value, 0.0), mask=inside)
        token -= rows * columns
