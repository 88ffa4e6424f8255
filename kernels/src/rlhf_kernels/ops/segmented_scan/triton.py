"""Fused `segmented_scan` and `packed_gae`: each chunk of the stream as one step, then each token of it (README)."""

import contextlib
from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

CHUNK, NUM_WARPS = 1024, 4  # tokens, and warps, a program
NUM_PROBES, NUM_STEPS = 256, 32  # bounds, and steps of chunks, that a program reads at a time
OVERLAP = True  # the second launch begins during the first: on GPUs from Hopper on, and not in compiled graphs


@torch.no_grad()
def segmented_scan_triton(values: Tensor, decays: Tensor, cu_seqlens: Tensor, last: Tensor | None) -> Tensor:
    """Solve as `segmented_scan` does, which checks the arguments."""
    return _launch(values, decays, None, cu_seqlens, last, None, discounts=(1.0, 1.0, 1.0))[0]


@torch.no_grad()
def packed_gae_triton(*tensors: Tensor | None, discounts: Sequence[float]) -> tuple[Tensor, Tensor]:
    """Return advantages and returns as `packed_gae` does, which checks the arguments; they are those of the twin."""
    returns, advantages = _launch(*tensors, discounts=discounts)
    return advantages, returns


def _launch(*tensors: Tensor | None, discounts: Sequence[float]) -> list[Tensor]:
    values, mask, num_sequences = tensors[0], tensors[2], tensors[3].numel() - 1
    num_chunks = triton.cdiv(values.numel(), CHUNK)
    results = [values.new_empty(values.shape, dtype=torch.float32) for _ in range(1 if mask is None else 2)]
    steps = values.new_empty(2, num_chunks, dtype=torch.float32)
    inputs = [None if part is None else part.contiguous() for part in tensors]
    arguments = [*inputs, *discounts, *results, *[None] * (2 - len(results)), steps, values.numel(), num_sequences]
    overlap = OVERLAP and num_chunks > 1 and values.is_cuda and not torch.compiler.is_compiling()
    overlap = overlap and torch.version.hip is None and torch.cuda.get_device_capability(values.device) >= (9, 0)
    sizes = {"chunk": CHUNK, "num_probes": NUM_PROBES, "num_steps": NUM_STEPS, "num_warps": NUM_WARPS}
    # Triton launches on the current device, which need not be the tensor's.
    with torch.cuda.device(values.device) if values.is_cuda else contextlib.nullcontext():
        if num_chunks > 1:
            _kernel[(num_chunks,)](*arguments, solve=False, overlap=overlap, **sizes)
        if num_chunks:
            options = {"launch_pdl": True} if overlap else {}
            _kernel[(num_chunks,)](*arguments, solve=True, overlap=overlap, **sizes, **options)
    return results


@triton.jit
def _compose(later_decay, later_value, decay, value):
    """Make two steps x -> decay x + value one. Where a decay is NaN, as at a sequence's end, x does not matter."""
    return later_decay * decay, tl.where(decay == decay, value + decay * later_value, value)


@triton.jit
def _read(pointers, full, inside, whole):
    """Load rows of four, all numbers of a full one together."""
    numbers = tl.load(pointers, mask=full)
    if not whole:
        numbers = tl.where(full, numbers, tl.load(pointers, mask=inside))
    return numbers


@triton.jit
def _write(pointers, numbers, inside, whole):
    if whole:
        tl.store(pointers, numbers)
    else:
        tl.store(pointers, numbers, mask=inside)


@triton.jit
def _end_sequences(decay, value, reward, token, start, bounds_ptr, last_ptr, num_sequences, gamma, every, num_probes):
    """Let the last tokens of sequences, of every one or the first, take in what comes after; their rewards, too."""
    stride, index = tl.full((), 1, tl.int64), tl.full((), 0, tl.int64)
    while stride * num_probes <= num_sequences:
        stride *= num_probes
    while stride > 0:  # to the first bound beyond the chunk's first token
        probe = index + (tl.arange(0, num_probes) + 1) * stride - 1
        bound = tl.load(bounds_ptr + probe, mask=probe <= num_sequences, other=start + 1)
        index += tl.sum((bound <= start).to(tl.int32)) * stride
        stride //= num_probes
    previous, final = tl.full((), 0, tl.int64), num_sequences if every else index
    end = tl.load(bounds_ptr + index, mask=index <= num_sequences, other=0) - start
    while (end <= token.numel) & (index <= final):
        ends = (token == end.to(tl.int32) - 1) & (end > previous)  # equal bounds are those of empty sequences
        last = 0.0 if last_ptr is None else gamma * tl.load(last_ptr + index - 1).to(tl.float32)
        value, reward = tl.where(ends, value + decay * last, value), tl.where(ends, reward + last, reward)
        decay = tl.where(ends, float("nan"), decay)
        index += 1
        previous, end = end, tl.load(bounds_ptr + index, mask=index <= num_sequences, other=0) - start
    return decay, value, reward


@triton.jit
def _after_chunk(steps_ptr, index, num_steps: tl.constexpr):
    """Return x after a chunk: what the chunks from there to the end of the sequence make of it."""
    num_chunks, lane, decay, value = tl.num_programs(0), tl.arange(0, num_steps), 1.0, 0.0
    while (decay == decay) & (index + 1 < num_chunks):
        index += num_steps
        later = index - lane
        step = tl.load(steps_ptr + later, mask=later < num_chunks, other=1.0)
        steps = step, tl.load(steps_ptr + num_chunks + later, mask=later < num_chunks, other=0.0)
        decays, values = tl.associative_scan(steps, 0, _compose)
        later_decay = tl.sum(tl.where(lane == num_steps - 1, decays, 0.0))
        later_value = tl.sum(tl.where(lane == num_steps - 1, values, 0.0))
        decay, value = _compose(later_decay, later_value, decay, value)
    return value


@triton.jit
def _kernel(
    first_ptr,
    second_ptr,
    mask_ptr,
    bounds_ptr,
    last_ptr,
    turns_ptr,
    gamma,
    lambd,
    turn_gamma,
    result_ptr,
    advantages_ptr,
    steps_ptr,
    size,
    num_sequences,
    solve: tl.constexpr,
    overlap: tl.constexpr,
    chunk: tl.constexpr,
    num_probes: tl.constexpr,
    num_steps: tl.constexpr,
):
    """One chunk a program: its step, or its solution. Without a mask the numbers are values and decays."""
    index, num_chunks, lane = tl.program_id(0), tl.num_programs(0), tl.arange(0, chunk)
    if solve:
        index = num_chunks - 1 - index  # what was read last may still be in the cache
    elif overlap:
        tl.extra.cuda.gdc_launch_dependents()
    start = index.to(tl.int64) * chunk
    # Rows of four tokens, a thread's, in their order; but the last row first, as scans backwards cost far more.
    row = chunk - 4 - tl.arange(0, chunk // 4)[:, None] * 4
    token = row + tl.arange(0, 4)[None, :]
    left = tl.minimum(size - start, chunk).to(tl.int32)
    full, inside, whole = row + 4 <= left, token < left, left == chunk
    first = _read(first_ptr + start + token, full, inside, whole).to(tl.float32)
    second = _read(second_ptr + start + token, full, inside, whole).to(tl.float32)
    value, decay = tl.where(second == second, first, second), second
    if mask_ptr is not None:
        trained = _read(mask_ptr + start + token, full, inside, whole) != 0
        discount = gamma
        if turns_ptr is not None:
            discount = tl.where(_read(turns_ptr + start + token, full, inside, whole) != 0, turn_gamma, gamma)
        # A skipped token hands on what it gets, whatever its own numbers.
        value = tl.where(trained, discount * ((1.0 - lambd) * second + lambd * first), 0.0)
        decay = tl.where(trained, discount * lambd, 1.0)
    decay, value, first = _end_sequences(
        decay, value, first, token, start, bounds_ptr, last_ptr, num_sequences, gamma, solve, num_probes
    )
    decays, values = tl.associative_scan((tl.ravel(tl.flip(decay, 1)), tl.ravel(tl.flip(value, 1))), 0, _compose)
    if not solve:
        tl.store(steps_ptr + index, tl.sum(tl.where(lane == chunk - 1, decays, 0.0)))
        tl.store(steps_ptr + num_chunks + index, tl.sum(tl.where(lane == chunk - 1, values, 0.0)))
    else:
        if overlap:
            tl.extra.cuda.gdc_wait()
        carry = _after_chunk(steps_ptr, index, num_steps)
        x = _compose(0.0, carry, decays, values)[1]
        if mask_ptr is None:
            _write(result_ptr + start + token, tl.flip(tl.reshape(x, token.shape), 1), inside, whole)
        else:
            after = tl.where(lane == 0, carry, tl.gather(x, tl.maximum(lane - 1, 0), 0))
            after = tl.flip(tl.reshape(after, token.shape), 1)
            result = first + tl.where(decay == decay, after, 0.0)
            _write(result_ptr + start + token, tl.where(trained, result, 0.0), inside, whole)
            _write(advantages_ptr + start + token, tl.where(trained, result - second, 0.0), inside, whole)
