"""Reverse linear recurrences over the sequences of a packed stream: discounted sums and GAE."""

import torch
from torch import Tensor

from rlhf_kernels.dispatch import FLOATS, log_fallback_once, takes_triton
from rlhf_kernels.ops.segmented_scan.reference import packed_gae_reference, segmented_scan_reference


def segmented_scan(values: Tensor, decays: Tensor, cu_seqlens: Tensor, *, last: Tensor | None = None) -> Tensor:
    """Solve a linear recurrence backwards through each packed sequence. Return x [N] float32, without gradient.

        x_t = values_t + decays_t x_{t+1}        x after the last token of sequence s is last_s

    For discounted sums, pass rewards as values and gamma as decays. To skip a token, pass value 0 and decay 1.

    Args:
        values: [N] bfloat16, float16 or float32, sequence after sequence.
        decays: [N] bfloat16, float16 or float32.
        cu_seqlens: [S + 1] int32 or int64, ascending from 0 to N: sequence s is tokens cu_seqlens[s] to
            cu_seqlens[s + 1] - 1. Not checked on CUDA, where it would stall the stream.
        last: [S] floats; None means 0.0 for all sequences.

    Raises:
        ValueError: a wrong shape, dtype, device or, on the CPU, bound.
    """
    _check("segmented_scan", cu_seqlens, {"values": values, "decays": decays}, {}, last)
    if _takes_triton("segmented_scan", values):
        from rlhf_kernels.ops.segmented_scan.triton import segmented_scan_triton

        return segmented_scan_triton(values, decays, cu_seqlens, last)
    return segmented_scan_reference(values, decays, cu_seqlens, last)


def packed_gae(
    rewards: Tensor,
    values: Tensor,
    loss_mask: Tensor,
    cu_seqlens: Tensor,
    *,
    gamma: float,
    lambd: float,
    last_values: Tensor | None = None,
    turn_starts: Tensor | None = None,
    turn_gamma: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """Return generalized advantage estimates and returns of a packed stream, without gradient.

        delta_t = r_t + gamma V_{t'} - V_t
        A_t     = delta_t + gamma lambd A_{t'}        t' = the next trained token of the sequence
        R_t     = A_t + V_t

    After the last trained token of a sequence, A is 0 and V is the sequence's last value. Tokens where the mask is
    False are skipped, as if the trained tokens were adjacent. With zero values and lambd = 1, A and R are both the
    discounted sum of rewards from t on. Where t' starts a turn, the step from t to t' is discounted by turn_gamma in
    place of gamma: 0 makes each turn an episode of its own, 1 discounts only within turns.

    Args:
        rewards: [N] bfloat16, float16 or float32, one per token.
        values: [N] bfloat16, float16 or float32, in reward units. V_t is the value of the state before token t.
        loss_mask: [N] bool, True = trained.
        cu_seqlens: [S + 1] int32 or int64, as in `segmented_scan`.
        gamma: discount per token.
        lambd: 0 relies on the values (more bias), 1 on the rewards (more variance).
        last_values: [S] floats, the value after each sequence's last token: 0.0 for a sequence that ended by itself.
            None means 0.0 for all sequences.
        turn_starts: [N] bool, True at the first trained token of each turn. None treats a sequence as one turn.
        turn_gamma: discount of a step into another turn. Unused without `turn_starts`.

    Returns:
        ([N], [N]): advantages and returns, float32, 0.0 where the mask is False.

    Raises:
        ValueError: a wrong shape, dtype, device or, on the CPU, bound.

    Source: Schulman et al. 2016, arXiv:1506.02438, eq. 11 and 16; values after a truncation: Pardo et al. 2018,
    arXiv:1712.00378.
    """
    masks = {"loss_mask": loss_mask} | ({} if turn_starts is None else {"turn_starts": turn_starts})
    _check("packed_gae", cu_seqlens, {"rewards": rewards, "values": values}, masks, last_values)
    discounts = (float(gamma), float(lambd), float(turn_gamma))
    tensors = (rewards, values, loss_mask, cu_seqlens, last_values, turn_starts)
    if _takes_triton("packed_gae", values):
        from rlhf_kernels.ops.segmented_scan.triton import packed_gae_triton

        return packed_gae_triton(*tensors, discounts=discounts)
    return packed_gae_reference(*tensors, discounts=discounts)


def _takes_triton(operator: str, values: Tensor) -> bool:
    taken = takes_triton(operator, values)
    if taken and torch.version.hip is not None:
        log_fallback_once(operator, "its programs wait for each other, which is tested on NVIDIA GPUs only")
        return False
    return taken


def _check(
    operator: str, cu_seqlens: Tensor, floats: dict[str, Tensor], masks: dict[str, Tensor], ends: Tensor | None
) -> None:
    """Check columns of one number per token (`floats`, `masks`) and of one per sequence (`ends`)."""
    tokens = floats | masks
    first = next(iter(floats.values()))
    given = tokens | {"cu_seqlens": cu_seqlens} | ({} if ends is None else {"last values": ends})
    shapes = ", ".join(f"{name} {list(tensor.shape)}" for name, tensor in given.items())
    if any(tensor.shape != first.shape or tensor.ndim != 1 for tensor in tokens.values()):
        raise ValueError(f"{operator} takes one number per token, [N] each; got {shapes}")
    if cu_seqlens.ndim != 1 or not len(cu_seqlens) or (ends is not None and ends.shape != (len(cu_seqlens) - 1,)):
        raise ValueError(f"{operator} takes cu_seqlens [S + 1] and last values [S]; got {shapes}")
    for name, tensor in given.items():
        allowed = FLOATS
        if name in masks:
            allowed = (torch.bool,)
        elif tensor is cu_seqlens:
            allowed = (torch.int32, torch.int64)
        if tensor.dtype not in allowed:
            raise ValueError(f"{operator} takes {name} in {' or '.join(map(str, allowed))}; got {tensor.dtype}")
        if tensor.device != first.device:
            raise ValueError(f"{operator} takes tensors of one device; {name} is on {tensor.device}")
    bounds = cu_seqlens.tolist() if first.device.type == "cpu" else [0, len(first)]
    if bounds[0] != 0 or bounds[-1] != len(first) or bounds != sorted(bounds):
        got = bounds if len(bounds) < 10 else f"{len(bounds)} bounds from {bounds[0]} to {bounds[-1]}"
        raise ValueError(f"cu_seqlens must rise from 0 to {len(first)}, the number of tokens; got {got}")
