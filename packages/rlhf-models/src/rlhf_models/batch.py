"""Token sequences as tensors, right-padded or packed end to end. B sequences, T positions, S packed sequences."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rlhf_data.errors import DataError


@dataclass(frozen=True)
class TokenBatch:
    """What a model reads. Made by `padded` or `packed`; both layouts hold every sequence from its first position on.

    Attributes:
        input_ids: [B, T] int64; packed: B = 1 and T the number of all tokens.
        position_ids: [B, T] int64, from 0 in each sequence.
        lengths: tokens of each sequence, in order; on the host, so that nothing waits for the device.
        padding_mask: [B, T] bool, True for real tokens; None when packed.
        cu_seqlens: [S + 1] int32, where each packed sequence begins, and T; None when padded.
    """

    input_ids: Tensor
    position_ids: Tensor
    lengths: tuple[int, ...]
    padding_mask: Tensor | None = None
    cu_seqlens: Tensor | None = None

    @classmethod
    def padded(cls, sequences: Sequence[Any], pad_id: int, device: torch.device | str = "cpu") -> "TokenBatch":
        """Lay one sequence a row, filled up with `pad_id` on the right. Raises DataError for an empty sequence."""
        lengths = _lengths(sequences)
        input_ids = _padded_rows(sequences, np.int64, pad_id)
        columns = np.arange(input_ids.shape[1])
        mask = columns[None, :] < np.asarray(lengths)[:, None]
        return cls(
            input_ids=to_device(torch.from_numpy(input_ids), device),
            # Counting on through the padding keeps the layout plainly causal: no mask need be built for it.
            position_ids=to_device(torch.from_numpy(np.tile(columns, (len(lengths), 1))), device),
            lengths=lengths,
            padding_mask=to_device(torch.from_numpy(mask), device),
        )

    @classmethod
    def packed(cls, sequences: Sequence[Any], device: torch.device | str = "cpu") -> "TokenBatch":
        """Lay all sequences end to end in one row. Raises DataError for an empty sequence."""
        lengths = _lengths(sequences)
        position_ids = np.concatenate([np.arange(length) for length in lengths])
        cu_seqlens = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
        return cls(
            input_ids=to_device(torch.from_numpy(_packed_row(sequences, np.int64)), device),
            position_ids=to_device(torch.from_numpy(position_ids[None]), device),
            lengths=lengths,
            cu_seqlens=to_device(torch.from_numpy(cu_seqlens), device),
        )

    @property
    def is_packed(self) -> bool:
        """Whether the sequences lie end to end."""
        return self.cu_seqlens is not None

    @property
    def target_mask(self) -> Tensor:
        """[B, T] bool: the tokens a model predicts: all but padding and the first of each sequence."""
        later = self.position_ids > 0
        return later if self.padding_mask is None else later & self.padding_mask

    @property
    def host_target_mask(self) -> Tensor:
        """`target_mask` on the CPU, made from the lengths: the device is not waited for."""
        return self.lay_out([np.arange(length) > 0 for length in self.lengths], torch.bool, device="cpu")

    @property
    def last_index(self) -> Tensor:
        """[S] int64: where each sequence's last token lies in the flattened batch."""
        lengths = torch.tensor(self.lengths)
        starts = lengths.cumsum(0) - lengths if self.is_packed else torch.arange(len(lengths)) * self.input_ids.shape[1]
        return to_device(starts + lengths - 1, self.input_ids.device)

    def lay_out(self, sequences: Sequence[Any], dtype: torch.dtype, device: torch.device | str | None = None) -> Tensor:
        """Return per-token arrays, one of each sequence's length, in this batch's layout, [B, T].

        Padding holds 0; without a `device` the result is on the batch's. Raises DataError for other lengths.
        """
        if (lengths := tuple(len(sequence) for sequence in sequences)) != self.lengths:
            raise DataError(f"arrays of lengths {lengths} for sequences of {self.lengths} tokens")
        arrange = _packed_row if self.is_packed else _padded_rows
        rows = arrange(sequences, torch.empty(0, dtype=dtype).numpy().dtype)
        return to_device(torch.from_numpy(rows), self.input_ids.device if device is None else device)

    def split(self, values: Tensor) -> list[Tensor]:
        """Return the part of `values` [B, T] of each sequence, without padding; views, in order."""
        if self.is_packed:
            return list(values[0].split(self.lengths))
        return [row[:length] for row, length in zip(values, self.lengths, strict=True)]


def to_device(tensor: Tensor, device: torch.device | str) -> Tensor:
    """Return a tensor of the CPU on a device; from pinned memory, so that nothing waits for what is queued there."""
    if torch.device(device).type == "cuda" and not tensor.is_cuda:
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)


def _lengths(sequences: Sequence[Any]) -> tuple[int, ...]:
    lengths = tuple(len(sequence) for sequence in sequences)
    if not lengths or min(lengths) < 1:
        raise DataError(f"a batch needs sequences of at least one token each; got lengths {lengths}")
    return lengths


def _packed_row(sequences: Sequence[Any], dtype: Any) -> np.ndarray:
    return np.concatenate([np.asarray(sequence, dtype) for sequence in sequences])[None]


def _padded_rows(sequences: Sequence[Any], dtype: Any, fill: int = 0) -> np.ndarray:
    rows = np.full((len(sequences), max(map(len, sequences))), fill, dtype)
    for row, sequence in zip(rows, sequences, strict=True):
        row[: len(sequence)] = sequence
    return rows
