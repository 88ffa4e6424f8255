"""The plain torch twins of `segmented_scan` and `packed_gae`: all sequences at once, one token of each a step."""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor


@torch.no_grad()
def segmented_scan_reference(values: Tensor, decays: Tensor, cu_seqlens: Tensor, last: Tensor | None) -> Tensor:
    """Solve as `segmented_scan` does, in float32 or, for float64, in that."""
    solution = torch.zeros_like(values, dtype=torch.promote_types(values.dtype, torch.float32))
    state = _ends(last, cu_seqlens, solution.dtype)
    for sequences, token in _backwards(cu_seqlens):
        state[sequences] = values[token] + decays[token].to(state.dtype) * state[sequences]
        solution[token] = state[sequences]
    return solution


@torch.no_grad()
def packed_gae_reference(
    rewards: Tensor,
    values: Tensor,
    loss_mask: Tensor,
    cu_seqlens: Tensor,
    last_values: Tensor | None,
    turn_starts: Tensor | None,
    discounts: Sequence[float],
) -> tuple[Tensor, Tensor]:
    """Return advantages and returns as `packed_gae` does; `discounts` are its gamma, lambd and turn_gamma."""
    values = values.to(torch.promote_types(values.dtype, torch.float32))
    lambd, gammas = discounts[1], values.new_tensor(discounts[::2])
    returns = torch.zeros_like(values)
    next_value = _ends(last_values, cu_seqlens, values.dtype)
    next_return = next_value.clone()  # the advantage of what comes after the end is 0
    into_turn = torch.zeros_like(next_value, dtype=torch.int64)  # 1: the step there leads into another turn
    for every, position in _backwards(cu_seqlens):
        of, token = every[loss_mask[position]], position[loss_mask[position]]
        later = (1 - lambd) * next_value[of] + lambd * next_return[of]
        returns[token] = rewards[token] + gammas[into_turn[of]] * later
        next_value[of], next_return[of] = values[token], returns[token]
        into_turn[of] = 0 if turn_starts is None else turn_starts[token].long()
    return torch.where(loss_mask, returns - values, 0.0), returns


def _ends(given: Tensor | None, cu_seqlens: Tensor, dtype: torch.dtype) -> Tensor:
    return cu_seqlens.new_zeros(cu_seqlens.numel() - 1, dtype=dtype) if given is None else given.to(dtype, copy=True)


def _backwards(cu_seqlens: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield, from the ends on, the sequences that reach so far back, and the token of each."""
    ends, lengths = cu_seqlens[1:].long(), cu_seqlens.long().diff()
    for distance in range(int(lengths.max()) if lengths.numel() else 0):
        sequences = (lengths > distance).nonzero()[:, 0]
        yield sequences, ends[sequences] - 1 - distance
