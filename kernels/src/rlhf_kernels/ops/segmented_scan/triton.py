"""Fused `segmented_scan` and `packed_gae` in one launch: a decoupled look-back scan over chunks of the stream.

Each program reduces its chunk to one step x -> decay x + value and publishes it in global memory, waits for the steps
of the chunks between it and the end of its last sequence, and then solves its own tokens. The README derives it.
"""

from collections.abc import Iterator, Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from rlhf_kernels.dispatch import on_device

CHUNK, NUM_WARPS = 1024, 4  # tokens and warps per program: 8 tokens per thread, in two rows of four
NUM_PROBES = 512  # bounds that a program reads at a time
# Steps that a program waits for at a time: at least one per thread. Two threads that polled the same word could read it
# at different times and disagree on whether it has been published.
NUM_AWAITED = 32 * NUM_WARPS
# States per device, and the number of chunks each has room for. HEADER words, one cache line, come before the chunks
# and hold the launch counter. If all states are taken, a call allocates its own.
NUM_STATES, STATE_CHUNKS, HEADER = 64, 4096, 16
EARLY = True  # programmatic dependent launch: start while the previous kernel ends (from Hopper on, not when compiled)
MAX_REGISTERS = 64  # per thread, so that the 1,024 programs of 1M tokens are resident on an H200 at the same time


@torch.no_grad()
def segmented_scan_triton(values: Tensor, decays: Tensor, cu_seqlens: Tensor, last: Tensor | None) -> Tensor:
    """Solve the recurrence. `segmented_scan` has checked the arguments."""
    return _launch(values, decays, None, cu_seqlens, last, None, discounts=(1.0, 1.0, 1.0))[0]


@torch.no_grad()
def packed_gae_triton(*tensors: Tensor | None, discounts: Sequence[float]) -> tuple[Tensor, Tensor]:
    """Return advantages and returns. `packed_gae` has checked the arguments; `tensors` are those of its twin."""
    returns, advantages = _launch(*tensors, discounts=discounts)
    return advantages, returns


def _launch(*tensors: Tensor | None, discounts: Sequence[float]) -> list[Tensor]:
    values = tensors[0]
    mask = tensors[2]
    num_sequences = tensors[3].numel() - 1
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


_STREAM_PER_THREAD = 2  # CUDA's handle for the per-thread default stream, which stands for several streams
_states: dict[torch.device, tuple[Iterator[Tensor], dict[int, Tensor]]] = {}  # unused states, and the state per stream


def _kept_state(device: torch.device, num_chunks: int) -> Tensor | None:
    """Return a state for this stream, or one for this call alone while a CUDA graph is captured; None if none is left.

    Launches that share a state must not overlap. Launches on one stream follow each other, and so do replays of one
    CUDA graph. But a graph may be replayed beside any stream and any other graph, so a captured call keeps its state.
    """
    on_gpu = device.type == "cuda"
    recorded = on_gpu and torch.cuda.is_current_stream_capturing()
    stream = torch.cuda.current_stream(device).cuda_stream if on_gpu else 0
    if num_chunks > STATE_CHUNKS or not NUM_STATES or stream == _STREAM_PER_THREAD:
        return None
    if device not in _states:
        if recorded or (on_gpu and torch.cuda.get_sync_debug_mode()):
            return None  # the zeroing of states made during capture would be replayed with the graph
        zeros = torch.zeros(NUM_STATES, HEADER + 2 * STATE_CHUNKS, dtype=torch.int64, device=device)
        if type(zeros) is not Tensor:  # a fake tensor: a mode that traces calls without running them
            return None
        if on_gpu:
            torch.cuda.current_stream(device).synchronize()  # other streams must see the zeros, and do not wait
        _states.setdefault(device, (iter(zeros.unbind()), {}))  # setdefault: another thread may have been first
    unused, of_streams = _states[device]
    if recorded:
        return next(unused, None)
    if stream not in of_streams and (state := next(unused, None)) is not None:
        of_streams[stream] = state
    return of_streams.get(stream)


@triton.jit
def _compose(later_decay, later_value, decay, value):
    """Compose two steps x -> decay x + value. A decay of NaN marks the end of a sequence: x from beyond is unused."""
    return later_decay * decay, tl.where(decay == decay, value + decay * later_value, value)


@triton.jit
def _read(pointers, full, inside, whole):
    """Load rows of four numbers; a full row is one vector load, because its mask is uniform.

    Only the last chunk of a stream can have a row that is cut off, whose numbers need a mask each.
    """
    numbers = tl.load(pointers, mask=full)
    if not whole:
        numbers = tl.where(full, numbers, tl.load(pointers, mask=inside))
    return numbers


@triton.jit
def _write(pointers, numbers, inside, whole):
    """Store rows of four numbers, in whole chunks without a mask, which would split the vector stores."""
    if whole:
        tl.store(pointers, numbers)
    else:
        tl.store(pointers, numbers, mask=inside)


@triton.jit
def _first_bound(start, bounds_ptr, num_sequences, num_probes):
    """Return the index of the first bound beyond a chunk's first token, with `num_probes` probes at a time."""
    stride = tl.full((), 1, tl.int64)
    index = tl.full((), 0, tl.int64)
    # Each round divides the interval by `num_probes`: 512 probes find one of 262,144 bounds in two rounds of loads; a
    # binary search would wait for 18 loads, one after the other.
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
    """Return a bound relative to a chunk's first token; 0 or less if there is no such bound."""
    return tl.load(bounds_ptr + index, mask=index <= num_sequences, other=0) - start


@triton.jit
def _advantage_step(reward, value, trained, discount, lambd):
    """Return the decay and value of each token's step. A skipped token passes on x unchanged, even if it holds NaN."""
    earned = discount * ((1.0 - lambd) * value + lambd * reward)
    return tl.where(trained, discount * lambd, 1.0), tl.where(trained, earned, 0.0)


@triton.jit
def _end_sequences(
    decay, value, reward, token, start, index, end, next_end, bounds_ptr, last_ptr, num_sequences, gamma
):
    """Add the values after the ends of sequences to their last tokens, and mark these tokens with a decay of NaN.

    Also return where the sequence of the chunk's last token ends.
    """
    previous = tl.full((), 0, tl.int64)
    while (end <= token.numel) & (index <= num_sequences):
        ends = (token == end.to(tl.int32) - 1) & (end > previous)  # equal bounds belong to empty sequences
        last = 0.0 if last_ptr is None else gamma * tl.load(last_ptr + index - 1).to(tl.float32)
        value = tl.where(ends, value + decay * last, value)
        reward = tl.where(ends, reward + last, reward)
        decay = tl.where(ends, float("nan"), decay)
        index += 1
        # Read one bound ahead, so that the loop does not wait for the load.
        previous = end
        end = next_end
        next_end = _bound(bounds_ptr, index + 1, num_sequences, start)
    return decay, value, reward, tl.where(previous == token.numel, previous, end)


@triton.jit
def _pack(high, low):
    """Pack two 32-bit numbers into one 64-bit word, so that both are published by one atomic write."""
    low_bits = low.to(tl.int32, bitcast=True).to(tl.int64) & 0xFFFFFFFF
    return (high.to(tl.int32, bitcast=True).to(tl.int64) << 32) | low_bits


@triton.jit
def _unpack(word, dtype: tl.constexpr):
    """Return both numbers of a word: the high one as `dtype`, the low one as float32."""
    return (word >> 32).to(tl.int32).to(dtype, bitcast=True), word.to(tl.int32).to(tl.float32, bitcast=True)


@triton.jit
def _publish(words_ptr, tag, decays, values, chunk: tl.constexpr):
    """Publish the chunk's step, the last of these composed ones, tagged with the launch it belongs to."""
    # One thread holds the step and writes it itself, which saves a broadcast to the others. An atomic exchange writes
    # the word at once and past the L1 cache, which other multiprocessors do not see.
    row = tl.arange(0, chunk // 4)
    lane = tl.arange(0, chunk)
    decay = tl.sum(tl.reshape(tl.where(lane == chunk - 1, decays, 0.0), chunk // 4, 4), 1)
    value = tl.sum(tl.reshape(tl.where(lane == chunk - 1, values, 0.0), chunk // 4, 4), 1)
    word_ptr = words_ptr + 0 * row
    tags = tag + 0 * row
    is_last = row == chunk // 4 - 1
    tl.atomic_xchg(word_ptr, _pack(tags, decay), mask=is_last, sem="relaxed")
    tl.atomic_xchg(word_ptr + 1, _pack(tags, value), mask=is_last, sem="relaxed")


@triton.jit
def _await_after_chunk(words_ptr, tag, index, num_later, num_awaited: tl.constexpr):
    """Wait until the `num_later` chunks up to the end of the sequence are published. Return x after this chunk."""
    lane = tl.arange(0, num_awaited)
    decay = 1.0
    value = 0.0
    num_before = tl.zeros_like(num_later)
    while num_before < num_later:
        distance = num_before + num_awaited - lane
        needed = distance <= num_later
        word_ptr = words_ptr + 2 * (index + distance)
        decays = tl.zeros((num_awaited,), tl.float32)
        values = tl.zeros((num_awaited,), tl.float32)
        num_missing = tl.full((), 1, tl.int32)
        while num_missing > 0:
            # No memory ordering is needed between words: the tag in each word says whether it has been published.
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
    """Solve one chunk per program. Without a mask, `first` and `second` are values and decays; with a mask, they are
    rewards and values of GAE."""
    index = tl.program_id(0)
    num_chunks = tl.num_programs(0)
    lane = tl.arange(0, chunk)
    # Graphs made by torch.compile pass float64 scalars.
    gamma = tl.full((), gamma, tl.float32)
    lambd = tl.full((), lambd, tl.float32)
    turn_gamma = tl.full((), turn_gamma, tl.float32)
    if early:
        tl.extra.cuda.gdc_wait()  # the previous kernel may still be writing the inputs or the counter
    index = num_chunks - 1 - index  # last chunk first: programs wait only for programs that started before them
    start = index.to(tl.int64) * chunk
    # Each thread holds a row of four tokens. Rows are in reverse order, because Triton's reverse scans cost far more.
    row = chunk - 4 - tl.arange(0, chunk // 4)[:, None] * 4
    token = row + tl.arange(0, 4)[None, :]
    left = tl.minimum(size - start, chunk).to(tl.int32)
    full = row + 4 <= left
    inside = token < left
    whole = left == chunk
    first = _read(first_ptr + start + token, full, inside, whole)
    second = _read(second_ptr + start + token, full, inside, whole)
    if mask_ptr is not None:
        trained = _read(mask_ptr + start + token, full, inside, whole)
        if turns_ptr is not None:
            turns = _read(turns_ptr + start + token, full, inside, whole)
    # Read the tag and look up the bounds while the loads above are in flight.
    tag = (tl.load(state_ptr, volatile=True) >> 32).to(tl.int32) + 1
    bound = _first_bound(start, bounds_ptr, num_sequences, num_probes)
    end = _bound(bounds_ptr, bound, num_sequences, start)
    next_end = _bound(bounds_ptr, bound + 1, num_sequences, start)
    first = first.to(tl.float32)
    second = second.to(tl.float32)
    # A decay of NaN marks the end of a sequence, so a NaN among the inputs must also be in the value to have an effect.
    value = tl.where(second == second, first, second)
    decay = second
    if mask_ptr is not None:
        discount = gamma
        if turns_ptr is not None:
            discount = tl.where(turns != 0, turn_gamma, gamma)
        trained = trained != 0
        decay, value = _advantage_step(first, second, trained, discount, lambd)
    decay, value, first, end = _end_sequences(
        decay, value, first, token, start, bound, end, next_end, bounds_ptr, last_ptr, num_sequences, gamma
    )
    # Flipped, the four tokens of a thread run backwards too, like the threads. The last composed step is the chunk's.
    decays, values = tl.associative_scan((tl.ravel(tl.flip(decay, 1)), tl.ravel(tl.flip(value, 1))), 0, _compose)
    _publish(state_ptr + header + 2 * index, tag, decays, values, chunk)
    # The programs of a launch together add 2**32 to the counter, so the tag (its high word) changes only with the last
    # of them, after all threads of all programs have read it.
    tl.debug_barrier()
    tl.atomic_add(state_ptr, tl.where(index == num_chunks - 1, (1 << 32) - index.to(tl.int64), 1), sem="relaxed")
    # `end` lies in the chunk up to which this chunk's last sequence reaches; chunks beyond it have no influence.
    num_later = tl.minimum(tl.maximum((end - 1) // chunk, 0), num_chunks - 1 - index).to(tl.int32)
    carry = _await_after_chunk(state_ptr + header, tag, index, num_later, num_awaited)
    x = _compose(0.0, carry, decays, values)[1]
    if mask_ptr is None:
        _write(result_ptr + start + token, tl.flip(tl.reshape(x, token.shape), 1), inside, whole)
    else:
        # GAE needs the solution at the next token: in the scan's order that is the lane before.
        after = tl.where(lane == 0, carry, tl.gather(x, tl.maximum(lane - 1, 0), 0))
        after = tl.flip(tl.reshape(after, token.shape), 1)
        result = first + tl.where(decay == decay, after, 0.0)
        _write(result_ptr + start + token, tl.where(trained, result, 0.0), inside, whole)
        _write(advantages_ptr + start + token, tl.where(trained, result - second, 0.0), inside, whole)
