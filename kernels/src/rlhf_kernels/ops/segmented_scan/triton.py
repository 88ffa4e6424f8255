"""Fused `segmented_scan` and `packed_gae`: each chunk of the stream as one step, then each token of it (README)."""

from collections.abc import Iterator, Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from rlhf_kernels.dispatch import on_device

CHUNK, NUM_WARPS = 1024, 4  # tokens, and warps, a program
NUM_PROBES = 512  # bounds that a program reads at a time
# Steps that a program waits for at a time: at least one a thread. Threads that read the same word, at different times,
# might not agree on whether it is there.
NUM_AWAITED = 32 * NUM_WARPS
# States that a device keeps, and the chunks each has words for; before these are HEADER words, a cache line, for the
# count. With no state left one is made for the call.
NUM_STATES, STATE_CHUNKS, HEADER = 64, 4096, 16
EARLY = True  # the launch begins during the end of what is before it: on GPUs from Hopper on, not in compiled graphs
MAX_REGISTERS = 64  # a thread: so 1M tokens, 1,024 programs, are on an H200 all at once


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
    inputs = [None if part is None else part.contiguous() for part in tensors]
    eager = not torch.compiler.is_compiling()
    early = EARLY and eager and values.is_cuda and torch.cuda.get_device_capability(values.device) >= (9, 0)
    options = {"maxnreg": MAX_REGISTERS} if eager and values.is_cuda else {}
    options |= {"launch_pdl": True} if early else {}
    with on_device(values):
        state = _kept_state(values.device, num_chunks) if eager else None
        if state is None:
            state = values.new_zeros(HEADER + 2 * num_chunks, dtype=torch.int64)
        sizes = {"chunk": CHUNK, "num_probes": NUM_PROBES, "num_awaited": NUM_AWAITED, "header": HEADER}
        arguments = [*inputs, *discounts, *results, *[None] * (2 - len(results)), state, values.numel(), num_sequences]
        if num_chunks:
            _kernel[(num_chunks,)](*arguments, early=early, num_warps=NUM_WARPS, **sizes, **options)
    return results


_STREAM_PER_THREAD = 2  # CUDA's handle for the default stream of whichever thread calls
_states: dict[torch.device, tuple[Iterator[Tensor], dict[int, Tensor]]] = {}  # not in use yet, and those of streams


def _kept_state(device: torch.device, num_chunks: int) -> Tensor | None:
    """Return a state that only this stream's calls use, or this call alone if it is recorded; None if none is left.

    Launches that use one state must follow each other. Those on a stream do, and so do the replays of a CUDA graph; but
    a graph may be replayed beside any stream and any other graph, for which reason its states are never used again.
    """
    on_gpu = device.type == "cuda"
    recorded = on_gpu and torch.cuda.is_current_stream_capturing()
    stream = torch.cuda.current_stream(device).cuda_stream if on_gpu else 0
    if num_chunks > STATE_CHUNKS or not NUM_STATES or stream == _STREAM_PER_THREAD:
        return None
    if device not in _states:
        if recorded or (on_gpu and torch.cuda.get_sync_debug_mode()):
            return None  # states made while a graph is recorded would be zeroed at each replay
        zeros = torch.zeros(NUM_STATES, HEADER + 2 * STATE_CHUNKS, dtype=torch.int64, device=device)
        if type(zeros) is not Tensor:  # under a mode that only plays calls through
            return None
        if on_gpu:
            torch.cuda.current_stream(device).synchronize()  # other streams do not wait for this one
        _states.setdefault(device, (iter(zeros.unbind()), {}))  # another thread may have been here
    unused, of_streams = _states[device]
    if recorded:
        return next(unused, None)
    if stream not in of_streams and (state := next(unused, None)) is not None:
        of_streams[stream] = state
    return of_streams.get(stream)


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
def _first_bound(start, bounds_ptr, num_sequences, num_probes):
    """Return the index of the first bound beyond a chunk's first token."""
    stride, index = tl.full((), 1, tl.int64), tl.full((), 0, tl.int64)
    while stride * num_probes <= num_sequences:
        stride *= num_probes
    while stride > 0:
        probe = index + (tl.arange(0, num_probes) + 1) * stride - 1
        bound = tl.load(bounds_ptr + probe, mask=probe <= num_sequences, other=start + 1)
        index += tl.sum((bound <= start).to(tl.int32)) * stride
        stride //= num_probes
    return index


@triton.jit
def _bound(bounds_ptr, index, num_sequences, start):
    """Return a bound, counted from a chunk's first token; it is not beyond that if there is no such bound."""
    return tl.load(bounds_ptr + index, mask=index <= num_sequences, other=0) - start


@triton.jit
def _advantage_step(reward, value, trained, discount, lambd):
    """Return each token's step; a skipped one hands on what it gets, whatever its own numbers."""
    earned = discount * ((1.0 - lambd) * value + lambd * reward)
    return tl.where(trained, discount * lambd, 1.0), tl.where(trained, earned, 0.0)


@triton.jit
def _end_sequences(
    decay, value, reward, token, start, index, end, next_end, bounds_ptr, last_ptr, num_sequences, gamma
):
    """Let the last tokens of sequences take in what comes after, their rewards, too; also return where the sequence of
    the chunk's last token ends."""
    previous = tl.full((), 0, tl.int64)
    while (end <= token.numel) & (index <= num_sequences):
        ends = (token == end.to(tl.int32) - 1) & (end > previous)  # equal bounds are those of empty sequences
        last = 0.0 if last_ptr is None else gamma * tl.load(last_ptr + index - 1).to(tl.float32)
        value, reward = tl.where(ends, value + decay * last, value), tl.where(ends, reward + last, reward)
        decay = tl.where(ends, float("nan"), decay)
        index += 1
        # This load is not waited for before there is an end that needs it.
        previous, end, next_end = end, next_end, _bound(bounds_ptr, index + 1, num_sequences, start)
    return decay, value, reward, tl.where(previous == token.numel, previous, end)


@triton.jit
def _pack(high, low):
    """Make two numbers of 32 bits a word."""
    low_bits = low.to(tl.int32, bitcast=True).to(tl.int64) & 0xFFFFFFFF
    return (high.to(tl.int32, bitcast=True).to(tl.int64) << 32) | low_bits


@triton.jit
def _unpack(word, dtype: tl.constexpr):
    """Return both, `dtype` and float32."""
    return (word >> 32).to(tl.int32).to(dtype, bitcast=True), word.to(tl.int32).to(tl.float32, bitcast=True)


@triton.jit
def _publish(words_ptr, tag, decays, values, chunk: tl.constexpr):
    """Write the last of these steps, and that it is of the launch with this tag."""
    # It is one thread's, which need not hand it to the others first.
    row, lane = tl.arange(0, chunk // 4), tl.arange(0, chunk)
    decay = tl.sum(tl.reshape(tl.where(lane == chunk - 1, decays, 0.0), chunk // 4, 4), 1)
    value = tl.sum(tl.reshape(tl.where(lane == chunk - 1, values, 0.0), chunk // 4, 4), 1)
    word_ptr, tags, is_last = words_ptr + 0 * row, tag + 0 * row, row == chunk // 4 - 1
    tl.atomic_xchg(word_ptr, _pack(tags, decay), mask=is_last, sem="relaxed")
    tl.atomic_xchg(word_ptr + 1, _pack(tags, value), mask=is_last, sem="relaxed")


@triton.jit
def _await_after_chunk(words_ptr, tag, index, num_later, num_awaited: tl.constexpr):
    """Return x after a chunk, as soon as the `num_later` chunks from there to the end of the sequence are published."""
    lane, decay, value = tl.arange(0, num_awaited), 1.0, 0.0
    num_before = tl.zeros_like(num_later)
    while num_before < num_later:
        distance = num_before + num_awaited - lane
        needed = distance <= num_later
        word_ptr = words_ptr + 2 * (index + distance)
        decays, values = tl.zeros((num_awaited,), tl.float32), tl.zeros((num_awaited,), tl.float32)
        num_missing = tl.full((), 1, tl.int32)
        while num_missing > 0:
            # Words on their own, whose order does not matter: each says whether it is there.
            decay_tags, decays = _unpack(tl.load(word_ptr, mask=needed, other=0, volatile=True), tl.int32)
            value_tags, values = _unpack(tl.load(word_ptr + 1, mask=needed, other=0, volatile=True), tl.int32)
            num_missing = tl.sum((needed & ((decay_tags != tag) | (value_tags != tag))).to(tl.int32))
        decays, values = tl.associative_scan((tl.where(needed, decays, 1.0), values), 0, _compose)
        last = tl.sum(tl.where(lane == num_awaited - 1, _pack(decays, values), 0))
        later_decay, later_value = _unpack(last, tl.float32)
        decay, value = _compose(later_decay, later_value, decay, value)
        num_before += num_awaited
    return value


@triton.jit
def _kernel(
    first_ptr, second_ptr, mask_ptr, bounds_ptr, last_ptr, turns_ptr, gamma, lambd, turn_gamma,
    result_ptr, advantages_ptr, state_ptr, size, num_sequences,
    early: tl.constexpr, chunk: tl.constexpr, num_probes: tl.constexpr, num_awaited: tl.constexpr, header: tl.constexpr
):  # fmt: skip
    """One chunk a program: its step, and then its solution. Without a mask the numbers are values and decays."""
    index, num_chunks, lane = tl.program_id(0), tl.num_programs(0), tl.arange(0, chunk)
    # Graphs that torch.compile makes hand float64 over.
    gamma, lambd = tl.full((), gamma, tl.float32), tl.full((), lambd, tl.float32)
    turn_gamma = tl.full((), turn_gamma, tl.float32)
    if early:
        tl.extra.cuda.gdc_wait()
    index = num_chunks - 1 - index  # the last chunk first: programs wait only for those that began before them
    start = index.to(tl.int64) * chunk
    # Rows of four tokens, a thread's, in their order; but the last row first, as scans backwards cost far more.
    row = chunk - 4 - tl.arange(0, chunk // 4)[:, None] * 4
    token = row + tl.arange(0, 4)[None, :]
    left = tl.minimum(size - start, chunk).to(tl.int32)
    full, inside, whole = row + 4 <= left, token < left, left == chunk
    first = _read(first_ptr + start + token, full, inside, whole)
    second = _read(second_ptr + start + token, full, inside, whole)
    if mask_ptr is not None:
        trained = _read(mask_ptr + start + token, full, inside, whole)
        if turns_ptr is not None:
            turns = _read(turns_ptr + start + token, full, inside, whole)
    # While these numbers are on their way, the tag is, and bounds are looked up.
    tag = (tl.load(state_ptr, volatile=True) >> 32).to(tl.int32) + 1
    bound = _first_bound(start, bounds_ptr, num_sequences, num_probes)
    end = _bound(bounds_ptr, bound, num_sequences, start)
    next_end = _bound(bounds_ptr, bound + 1, num_sequences, start)
    first, second = first.to(tl.float32), second.to(tl.float32)
    value, decay = tl.where(second == second, first, second), second
    if mask_ptr is not None:
        discount = gamma
        if turns_ptr is not None:
            discount = tl.where(turns != 0, turn_gamma, gamma)
        trained = trained != 0
        decay, value = _advantage_step(first, second, trained, discount, lambd)
    decay, value, first, end = _end_sequences(
        decay, value, first, token, start, bound, end, next_end, bounds_ptr, last_ptr, num_sequences, gamma
    )
    decays, values = tl.associative_scan((tl.ravel(tl.flip(decay, 1)), tl.ravel(tl.flip(value, 1))), 0, _compose)
    _publish(state_ptr + header + 2 * index, tag, decays, values, chunk)
    # All programs of a launch add 2**32 together, hence what the tag is made of changes with the last of them, after
    # all threads of all programs have read it.
    tl.debug_barrier()
    tl.atomic_add(state_ptr, tl.where(index == num_chunks - 1, (1 << 32) - index.to(tl.int64), 1), sem="relaxed")
    num_later = tl.minimum(tl.maximum((end - 1) // chunk, 0), num_chunks - 1 - index).to(tl.int32)
    carry = _await_after_chunk(state_ptr + header, tag, index, num_later, num_awaited)
    x = _compose(0.0, carry, decays, values)[1]
    if mask_ptr is None:
        _write(result_ptr + start + token, tl.flip(tl.reshape(x, token.shape), 1), inside, whole)
    else:
        after = tl.where(lane == 0, carry, tl.gather(x, tl.maximum(lane - 1, 0), 0))
        after = tl.flip(tl.reshape(after, token.shape), 1)
        result = first + tl.where(decay == decay, after, 0.0)
        _write(result_ptr + start + token, tl.where(trained, result, 0.0), inside, whole)
        _write(advantages_ptr + start + token, tl.where(trained, result - second, 0.0), inside, whole)
