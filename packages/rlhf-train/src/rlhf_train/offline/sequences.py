"""Helpers that objectives share: batches of sequences, and log-probs of answers by the model and the reference."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from rlhf_data.examples.sft import SftExample
from rlhf_data.images.files import ImageRef
from rlhf_models.batch import TokenBatch, to_device
from rlhf_train.engine.protocol import TrainEngine
from rlhf_train.offline.collectives import of_all_ranks
from rlhf_train.offline.epochs import Objective, OfflineSchedule, this_ranks_part
from rlhf_train.run.metrics import Mean, Metric


@dataclass(frozen=True, slots=True)
class Compared:
    """The sequences of one example that the loss compares with each other or with the reference.

    Attributes:
        example: a `PreferenceExample` or `UnpairedExample`.
        sequences: tokens and loss masks, such as the chosen and the rejected answer with their prompt.
        ref_logprobs: the reference's log-prob of each sequence's answer, summed over tokens, nats; None unless
            precomputed.
    """

    example: Any
    sequences: tuple[SftExample, ...]
    ref_logprobs: tuple[float, ...] | None = None

    @property
    def lengths(self) -> tuple[int, ...]:
        """Number of tokens of each sequence."""
        return tuple(sequence.num_tokens for sequence in self.sequences)

    @property
    def images(self) -> tuple[ImageRef, ...]:
        """The images of all sequences."""
        return tuple(ref for sequence in self.sequences for ref in sequence.images)


def mean_metrics(prefix: str, count: float | Tensor, **sums: Tensor) -> dict[str, Metric]:
    """Return metrics that are means, from `sums` over a micro-batch of `count` items or tokens."""
    return {f"{prefix}/{name}": Mean(total.detach().double(), count) for name, total in sums.items()}


def num_ordered(chosen: Tensor, rejected: Tensor) -> Tensor:
    """Return the number of pairs whose chosen value is higher; a tie counts one half, like a random guess."""
    return (chosen > rejected).sum() + (chosen == rejected).sum() / 2


def lay_out(objective: Objective[Any], sequences: Sequence[Any], device: torch.device) -> TokenBatch:
    """Return sequences with `token_ids` as one batch, packed or padded, with `images` if the objective reads any."""
    token_ids = [sequence.token_ids for sequence in sequences]
    batch = TokenBatch.packed(token_ids, device) if objective.packing else TokenBatch.padded(token_ids, 0, device)
    if objective.reader is None:
        return batch
    return batch.with_images(*objective.reader.shown_arrays([ref for sequence in sequences for ref in sequence.images]))


def trained_mask(batch: TokenBatch, sequences: Sequence[SftExample]) -> Tensor:
    """Return the trained tokens of a batch, bool in the batch's layout, on the CPU."""
    masks = [sequence.loss_mask for sequence in sequences]
    return batch.lay_out(masks, torch.bool, device="cpu") & batch.host_target_mask


def answer_logprobs(
    objective: Objective[Any], forward: Callable[..., Any], sequences: Sequence[SftExample], device: torch.device
) -> tuple[Tensor, Tensor]:
    """Return the log-probs of the answers in S sequences, and the answers' lengths.

    Args:
        objective: whose `packing` and `reader` give the layout and the images.
        forward: of an `Actor`, or of a reference.
        sequences: S sequences; the loss mask marks the answer.
        device: of the model.

    Returns:
        Sums of log-probs over each answer's tokens, [S] float32, nats; and the number of these tokens, [S] int64.
    """
    batch = lay_out(objective, sequences, device)
    mask = trained_mask(batch, sequences)
    logprobs = forward(batch, logits_mask=mask).logprobs
    sums = torch.stack([part.sum() for part in batch.split(logprobs)])
    return sums, to_device(torch.stack([part.sum() for part in batch.split(mask)]), device)


def reference_logprobs(
    objective: Objective[Compared], items: Sequence[Compared], which: Sequence[int], device: torch.device
) -> Tensor:
    """Return the reference's log-probs of answers, [len(which) * B] float32, nats; constants.

    Args:
        objective: has the reference.
        items: B items.
        which: indices into the sequences of each item. The result has the B items' values for the first index, then
            those for the second, and so on.
        device: of the result.
    """
    if items[0].ref_logprobs is not None:
        return torch.tensor([item.ref_logprobs[index] for index in which for item in items], device=device)
    sequences = [item.sequences[index] for index in which for item in items]
    with torch.no_grad():
        return answer_logprobs(objective, objective.reference, sequences, device)[0]


def with_reference(
    engine: TrainEngine, objective: Objective[Compared], items: Sequence[Compared], schedule: OfflineSchedule
) -> list[Compared]:
    """Return the items with precomputed log-probs of the reference. Collective: each rank computes a part of them."""
    own: dict[int, tuple[float, ...]] = {}
    micro_batches = this_ranks_part(objective, items, schedule)[0]
    for index, batch in enumerate(micro_batches):
        objective.read_ahead(micro_batches[index : index + 2])
        which = range(len(items[0].sequences))
        values = reference_logprobs(objective, batch.items, which, engine.device).view(len(which), -1)
        own |= dict(zip(batch.rows, map(tuple, values.T.tolist()), strict=False))
    found = {row: values for part in of_all_ranks(own) for row, values in part.items()}
    return [replace(item, ref_logprobs=found[row]) for row, item in enumerate(items)]
