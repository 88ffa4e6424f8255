"""Token sequences as tensors, right-padded or packed end to end.

Shape letters: B rows, T positions per row, S sequences.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rlhf_data.errors import DataError
from rlhf_models.attention.shared_prompts import SharedPrompts


@dataclass(frozen=True)
class TokenBatch:
    """Input of a model. Build it with `padded` or `packed`.

    Attributes:
        input_ids: [B, T] int64. Packed: B = 1 and T is the number of tokens of all sequences.
        position_ids: [B, T] int64, starting at 0 in each sequence.
        lengths: tokens per sequence, in order. Kept on the host, so that reading them does not wait for the device.
        padding_mask: [B, T] bool, True for real tokens. None if packed.
        cu_seqlens: [S + 1] int32, the start of each packed sequence, then T. None if padded.
        shared: how the tokens are stored if packed sequences with the same prompt share it; None if each has a copy.
        routes: [B, T, layers, top_k] int16, the experts that tokens go through, for models with `replay_routes`; -1
            where the router chooses. None if it chooses for all of them.
        images: what a model reads of the images of the sequences, in order, by the names of its arguments; None for
            text alone.
        shown: for each image or tile that the sequences show, in order, its index in `images`; None if each is shown
            once, in their order. See `ImageReader.shown_arrays`.
    """

    input_ids: Tensor
    position_ids: Tensor
    lengths: tuple[int, ...]
    padding_mask: Tensor | None = None
    cu_seqlens: Tensor | None = None
    shared: SharedPrompts | None = None
    routes: Tensor | None = None
    images: Mapping[str, Tensor] | None = None
    shown: tuple[int, ...] | None = None

    @classmethod
    def padded(cls, sequences: Sequence[Any], pad_id: int, device: torch.device | str = "cpu") -> "TokenBatch":
        """Put one sequence into each row, padded on the right with `pad_id`. Raises DataError for an empty sequence."""
        lengths = _lengths(sequences)
        input_ids = _padded_rows(sequences, np.int64, pad_id)
        columns = np.arange(input_ids.shape[1])
        mask = columns[None, :] < np.asarray(lengths)[:, None]
        return cls(
            input_ids=to_device(torch.from_numpy(input_ids), device),
            # Positions count on through the padding, which keeps the layout causal: transformers needs no mask for it.
            position_ids=to_device(torch.from_numpy(np.tile(columns, (len(lengths), 1))), device),
            lengths=lengths,
            padding_mask=to_device(torch.from_numpy(mask), device),
        )

    @classmethod
    def packed(
        cls,
        sequences: Sequence[Any],
        device: torch.device | str = "cpu",
        *,
        prompt_lengths: Sequence[int] | None = None,
    ) -> "TokenBatch":
        """Put all sequences end to end into one row.

        With `prompt_lengths`, sequences that begin with the same so many tokens share them in a model's layers.

        Raises:
            DataError: an empty sequence, or a prompt of no tokens or of more than its sequence.
        """
        lengths = _lengths(sequences)
        if prompt_lengths is not None and not all(0 < own <= n for own, n in zip(prompt_lengths, lengths, strict=True)):
            raise DataError(f"prompts of {tuple(prompt_lengths)} tokens in sequences of {lengths}")
        position_ids = np.concatenate([np.arange(length) for length in lengths])
        cu_seqlens = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
        return cls(
            input_ids=to_device(torch.from_numpy(_packed_row(sequences, np.int64)), device),
            # Strides as of a new tensor, where [None] would give 0: layers are compiled again for other strides.
            position_ids=to_device(torch.from_numpy(position_ids.reshape(1, -1)), device),
            lengths=lengths,
            cu_seqlens=to_device(torch.from_numpy(cu_seqlens), device),
            shared=None if prompt_lengths is None else _shared(sequences, prompt_lengths, device),
        )

    def states_at(self, states: Tensor, index: Tensor) -> Tensor:
        """Return a model's states [N, D] at positions [N] of the flattened batch.

        `states` is [B, T, D], [1, U, D] if prompts are shared, or those of a rank's part, at positions in that.
        """
        if self.shared is None:
            return states.flatten(0, 1).index_select(0, index)
        # Several positions may be stored once. Indexing adds up their gradients in a fixed order, index_select in any.
        return states[0][self.shared.copies.stored_at[index]]

    def at_every_token(self, values: Tensor) -> Tensor:
        """Return values [B, T] of all tokens, from those of the tokens that a model stores."""
        return values if self.shared is None else values[:, self.shared.copies.stored_at]

    def routed(self, routes: Sequence[np.ndarray]) -> "TokenBatch":
        """Return the batch with the experts of its tokens.

        Args:
            routes: one array per sequence, [R, layers, top_k], of its first R tokens. Routers choose for the others.

        Raises:
            DataError: more routes than tokens, or another number of arrays than of sequences.
        """
        counts = tuple(map(len, routes))
        if len(counts) != len(self.lengths) or (np.array(counts) > self.lengths).any():
            raise DataError(f"routes of {counts} tokens for sequences of {self.lengths} tokens")
        width = self.input_ids.shape[1]
        starts = np.cumsum((0, *self.lengths[:-1])) if self.is_packed else np.arange(len(counts)) * width
        flat = np.full((self.input_ids.numel(), *routes[0].shape[1:]), -1, np.int16)
        for start, own in zip(starts, routes, strict=True):
            flat[start : start + len(own)] = own
        rows = torch.from_numpy(flat).unflatten(0, self.input_ids.shape)
        return replace(self, routes=to_device(rows, self.input_ids.device))

    def with_images(self, arrays: Mapping[str, np.ndarray], shown: tuple[int, ...] | None = None) -> "TokenBatch":
        """Return the batch with the images of its sequences, if any, in order or in that of the indices `shown`."""
        if not arrays:
            return self
        device = self.input_ids.device
        images = {name: to_device(torch.from_numpy(array), device) for name, array in arrays.items()}
        return replace(self, images=images, shown=shown)

    def with_last(self, token_ids: Sequence[int], arrays: Mapping[str, np.ndarray]) -> "TokenBatch":
        """Return the batch with one more sequence at its end, which has all images that the batch reads."""
        device = self.input_ids.device
        sequences = [*(part.tolist() for part in self.split(self.input_ids)), token_ids]
        more = TokenBatch.packed(sequences, device) if self.is_packed else TokenBatch.padded(sequences, 0, device)
        return more.with_images(arrays)

    @property
    def is_packed(self) -> bool:
        """Whether the sequences are packed end to end."""
        return self.cu_seqlens is not None

    @property
    def target_mask(self) -> Tensor:
        """[B, T] bool, the tokens a model predicts: all except padding and the first token of each sequence."""
        later = self.position_ids > 0
        return later if self.padding_mask is None else later & self.padding_mask

    @property
    def host_target_mask(self) -> Tensor:
        """`target_mask` on the CPU, computed from the lengths without waiting for the device."""
        return self.lay_out([np.arange(length) > 0 for length in self.lengths], torch.bool, device="cpu")

    @property
    def last_index(self) -> Tensor:
        """[S] int64, index of each sequence's last token in the flattened batch."""
        lengths = torch.tensor(self.lengths)
        # Computed on the host from the lengths, so that the device is not waited for.
        starts = lengths.cumsum(0) - lengths if self.is_packed else torch.arange(len(lengths)) * self.input_ids.shape[1]
        return to_device(starts + lengths - 1, self.input_ids.device)

    def lay_out(self, sequences: Sequence[Any], dtype: torch.dtype, device: torch.device | str | None = None) -> Tensor:
        """Arrange one per-token array per sequence in the layout of this batch, [B, T], with 0 in padding.

        The result is on `device`, by default the batch's. Raises DataError for arrays of other lengths.
        """
        if (lengths := tuple(len(sequence) for sequence in sequences)) != self.lengths:
            raise DataError(f"arrays of lengths {lengths} for sequences of {self.lengths} tokens")
        arrange = _packed_row if self.is_packed else _padded_rows
        rows = arrange(sequences, torch.empty(0, dtype=dtype).numpy().dtype)
        return to_device(torch.from_numpy(rows), self.input_ids.device if device is None else device)

    def split(self, values: Tensor) -> list[Tensor]:
        """Return the values of each sequence, without padding, as views into `values` [B, T], in order."""
        if self.is_packed:
            return list(values[0].split(self.lengths))
        return [row[:length] for row, length in zip(values, self.lengths, strict=True)]


def _shared(sequences: Sequence[Any], prompt_lengths: Sequence[int], device: torch.device | str) -> SharedPrompts:
    return SharedPrompts.of(sequences, prompt_lengths).moved(lambda tensor: to_device(tensor, device))


def to_device(tensor: Tensor, device: torch.device | str) -> Tensor:
    """Copy a CPU tensor to a device. Pinned memory lets the copy to a GPU run without waiting for queued work."""
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
