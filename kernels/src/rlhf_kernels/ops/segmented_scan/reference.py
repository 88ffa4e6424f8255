"""The plain torch twins of `segmented_scan` and `packed_gae`.

Both walk backwards through all sequences at once: step d handles the token of each sequence that is d tokens before its
end. Sequences are sorted by length, so that the sequences of a step are always a prefix of those of the step before.
"""

from collections.abc import Sequence

import torch
from torch import Tensor


@torch.no_grad()
def segmented_scan_reference(values: Tensor, decays: Tensor, cu_seqlens: Tensor, last: Tensor | None) -> Tensor:
    """Solve as `segmented_scan` does, in float32, or in float64 for float64 input."""
    values = values.to(torch.promote_types(values.dtype, torch.float32))
    tokens, counts, order = _backwards(torch.ones_like(values, dtype=torch.bool), cu_seqlens)
    state = _ends(last, cu_seqlens, values.dtype)[order]
    solved = [values[:0]]
    for value, decay in zip(values[tokens].split(counts), decays[tokens].to(values).split(counts), strict=True):
        # Sequences that have ended drop out at the end of `state`, because the shortest come last.
        state = value + decay * state[: len(value)]
        solved.append(state)
    return torch.empty_like(values).index_copy(0, tokens, torch.cat(solved))


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
    """Return advantages and returns as `packed_gae` does. `discounts` holds its gamma, lambd and turn_gamma."""
    values = values.to(torch.promote_types(values.dtype, torch.float32))
    gamma, lambd, turn_gamma = discounts
    tokens, counts, order = _backwards(loss_mask, cu_seqlens)
    next_value = _ends(last_values, cu_seqlens, values.dtype)[order]
    next_return = next_value  # the advantage after the end is 0, so the return equals the value there
    solved = [values[:0]]
    gammas = torch.full_like(next_value, gamma)
    if turn_starts is None:
        turn_starts = torch.zeros_like(loss_mask)
    discounts_to = torch.where(turn_starts[tokens], turn_gamma, gammas.new_tensor(gamma))  # of the step to a token
    columns = (rewards[tokens].to(values), values[tokens], discounts_to)
    for reward, value, next_gammas in zip(*(column.split(counts) for column in columns), strict=True):
        # From the definitions of delta, A and R: R_t = r_t + g_t ((1 - lambd) V_t' + lambd R_t').
        size = len(value)
        later = (1 - lambd) * next_value[:size] + lambd * next_return[:size]
        next_value = value
        next_return = reward + gammas[:size] * later
        gammas = next_gammas
        solved.append(next_return)
    returns = torch.zeros_like(values).index_copy(0, tokens, torch.cat(solved))
    return torch.where(loss_mask, returns - values, 0.0), returns


def _ends(given: Tensor | None, cu_seqlens: Tensor, dtype: torch.dtype) -> Tensor:
    return cu_seqlens.new_zeros(cu_seqlens.numel() - 1, dtype=dtype) if given is None else given.to(dtype)


def _backwards(mask: Tensor, cu_seqlens: Tensor) -> tuple[Tensor, list[int], Tensor]:
    """Sort the tokens of a mask by their distance from the end of their sequence.

    Returns:
        The sorted token indices, the number of tokens at each distance, and the order of the sequences within a
        distance: longest first, so that no sequence joins after the first step.
    """
    sequences = torch.arange(cu_seqlens.numel() - 1, device=mask.device)
    sequence_of = sequences.repeat_interleave(cu_seqlens.diff())[mask]
    lengths = torch.bincount(sequence_of, minlength=len(sequences))
    order = lengths.argsort(descending=True, stable=True)
    distances = lengths.cumsum(0)[sequence_of] - torch.arange(1, len(sequence_of) + 1, device=mask.device)
    # Sort by distance first, and within a distance by the order of the sequences.
    solved_as = (distances * len(sequences) + order.argsort()[sequence_of]).argsort()
    return mask.nonzero()[solved_as, 0], torch.bincount(distances).tolist(), order
