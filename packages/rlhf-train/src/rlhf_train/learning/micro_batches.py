"""A micro-batch of a rank's shard: what its models read, and what the policy loss is given."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import chain

import numpy as np
import torch
from torch import Tensor

from rlhf_data.images.reader import ImageReader
from rlhf_kernels import PolicyStream
from rlhf_models.batch import TokenBatch, to_device
from rlhf_train.algorithms.table import AlgorithmSpec
from rlhf_train.batching import Denominators, MiniBatch
from rlhf_train.learning.experience import Experience
from rlhf_train.losses.own import OwnTokenLoss
from rlhf_train.losses.teacher import TeacherTerm
from rlhf_train.specs import ModelSpec

# The input of a rank without rows, which must run a pass because collectives need every rank. It has two tokens,
# because the first token of a sequence has no log-prob.
IDLE_TOKENS = np.zeros(2, np.int32)


def token_batch(
    experience: Experience,
    rows: Sequence[int],
    device: torch.device | str,
    spec: ModelSpec,
    *,
    with_routes: bool,
    reader: ImageReader | None = None,
) -> TokenBatch:
    """Return rows of a shard as a batch on the device, laid out for a model; `IDLE_TOKENS` if there are no rows.

    `with_routes` adds the experts of the tokens, if the experience has them. `reader` adds the images of the rows.
    """
    tokens = [experience.token_ids[row] for row in rows] or [IDLE_TOKENS]
    if spec.packing:
        prompts = [experience.prompt_lengths[row] for row in rows] or [len(IDLE_TOKENS)]
        batch = TokenBatch.packed(tokens, device, prompt_lengths=prompts if spec.share_prompts else None)
    else:
        batch = TokenBatch.padded(tokens, pad_id=0, device=device)
    if reader is not None:
        batch = batch.with_images(*reader.shown_arrays([path for row in rows for path in experience.images[row]]))
    if not (rows and with_routes) or experience.routes is None:
        return batch
    return batch.routed([experience.routes[row] for row in rows])


def read_ahead(
    reader: ImageReader | None, experience: Experience, batches: Sequence[Sequence[int]]
) -> Iterator[Sequence[int]]:
    """Yield the rows of each pass. While one is computed, `reader` reads the images of the next."""
    for index, rows in enumerate(batches):
        if reader is not None:
            near = chain.from_iterable(batches[index : index + 2])
            reader.read_ahead(path for row in near for path in experience.images[row])
        yield rows


def lay_out(mask: Tensor, rows: Sequence[int], batch: TokenBatch) -> Tensor:
    """Return a shard's mask [B, T] bool in the layout of `batch`, which holds `rows`, on the CPU.

    Without rows it is all False.
    """
    parts = [mask[row, :length].numpy() for row, length in zip(rows, batch.lengths, strict=bool(rows))]
    return batch.lay_out(parts or [np.zeros_like(IDLE_TOKENS, bool)], torch.bool, device="cpu")


def policy_stream(
    experience: Experience,
    rows: Sequence[int],
    spec: AlgorithmSpec,
    denominators: Denominators,
    device: torch.device | str,
) -> PolicyStream:
    """Return the constant inputs of the policy loss: the trained tokens of a micro-batch, concatenated.

    Args:
        experience: a rank's shard, with the column "advantages", and if there are any "old_logprobs", "ref_logprobs",
            "weights" and "penalties".
        rows: of the shard, the micro-batch.
        spec: decides whether reference log-probs are included, and a loss of the user's own.
        denominators: of the whole update.
        device: where the result is placed.
    """
    columns = experience.columns
    mask = experience.policy_mask[list(rows)]
    lengths = mask.sum(dim=1)
    names = ["advantages", "old_logprobs", "weights", "penalties", *(["ref_logprobs"] if spec.use_kl_loss else [])]
    packed = {name: to_device(columns[name][list(rows)][mask], device) for name in names if name in columns}
    own = None
    if spec.own_policy_loss is not None:
        constants = {name: packed[name] for name in ("advantages", "old_logprobs") if name in packed}
        constants["rollout_logprobs"] = to_device(experience.rollout_logprobs[list(rows)][mask], device)
        own = OwnTokenLoss(spec.own_policy_loss, lengths, constants)
    return PolicyStream(
        **packed,
        own_loss=own,
        loss_mask=torch.ones(int(lengths.sum()), dtype=torch.bool, device=device),
        cu_seqlens=to_device(torch.nn.functional.pad(lengths.cumsum(0), (1, 0)), device),
        num_tokens=denominators.num_tokens,
        num_sequences=denominators.num_sequences,
        max_tokens=denominators.max_tokens,
    )


def teacher_term(
    experience: Experience, rows: Sequence[int], spec: AlgorithmSpec, device: torch.device | str
) -> TeacherTerm | None:
    """Return the teacher's term for the trained tokens of a micro-batch; None if it is no part of the loss."""
    if not spec.uses_teacher or spec.distribution is None:
        return None
    column = experience.columns["teacher_logprobs"][list(rows)][experience.policy_mask[list(rows)]]
    return TeacherTerm(to_device(column, device), spec.distribution, spec.teacher_coef)


def recounted(mini_batches: Sequence[MiniBatch], trained_mask: Tensor, device: torch.device | str) -> list[MiniBatch]:
    """Return mini-batches with denominators that leave out what was dropped or masked. Collective.

    Args:
        mini_batches: this rank's parts.
        trained_mask: [B, T] bool, the tokens of the shard that are still trained. False if another rank counts them.
        device: of the collective.
    """
    lengths = trained_mask.sum(dim=1)
    local_counts = []
    for batch in mini_batches:
        rows = list(chain.from_iterable(batch.micro_batches))
        local_counts.append([int(lengths[rows].sum()), int((lengths[rows] > 0).sum())])
    counts = torch.tensor(local_counts, dtype=torch.int64, device=device)
    torch.distributed.all_reduce(counts)
    return [
        replace(batch, denominators=Denominators(tokens, sequences, batch.denominators.max_tokens))
        for batch, (tokens, sequences) in zip(mini_batches, counts.tolist(), strict=True)
    ]
