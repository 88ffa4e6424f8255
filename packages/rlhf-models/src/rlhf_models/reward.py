"""The reward model: one score per sequence."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from rlhf_data.errors import ConfigError, DataError
from rlhf_data.images.reader import ImageReader
from rlhf_models.attention.packed import PACKED_ATTENTION, choose_attention, head_sizes, varlen_unavailable_reason
from rlhf_models.attention.sequence_parallel import SequenceGroup
from rlhf_models.attention.states_apart import stateful_layers
from rlhf_models.backbone import PACKED_FAMILIES, last_hidden_state
from rlhf_models.batch import TokenBatch
from rlhf_models.critic import ValueHead

MAX_BATCH_TOKENS = 32768  # per forward pass, padding included, so that its activations take at most a few GiB


class RewardModel(nn.Module):
    """A transformers backbone without LM head, stored as `model`, with a `value_head` read at the last token.

    Args:
        model: the backbone. `mean` and `std` in its config are moments of its scores, stored when it was trained.
        normalize: return (score - mean) / std if the config has both.

    Raises:
        ConfigError: the mean is not finite or the deviation is not positive.
    """

    def __init__(self, model: nn.Module, *, normalize: bool = False) -> None:
        super().__init__()
        self.model = model
        self.value_head = ValueHead(model.config.get_text_config().hidden_size, model.dtype)
        self.moments = stored_moments(model.config) if normalize else None
        self.sequence_group: SequenceGroup | None = None  # see `Critic`

    def forward(self, batch: TokenBatch) -> Tensor:
        """Return the score of each sequence, [S] float32, in order."""
        group = self.sequence_group
        hidden = last_hidden_state(self.model, batch, group).flatten(0, 1)
        if group is None:
            scores = self.value_head(hidden.index_select(0, batch.last_index)).squeeze(-1)
        else:
            own, counts = group.divide(batch.last_index, batch)
            scores = group.gather(self.value_head(hidden.index_select(0, own)).squeeze(-1), counts)
        if self.moments is None:
            return scores
        mean, std = self.moments
        return (scores - mean) / std


def stored_moments(config: Any) -> tuple[float, float] | None:
    """Return the mean and standard deviation of the scores stored in a reward model's config, or None.

    Raises:
        ConfigError: the mean is not finite, or the deviation is not positive and finite.
    """
    mean = getattr(config, "mean", None)
    std = getattr(config, "std", None)
    if mean is None or std is None:
        return None
    if not (math.isfinite(mean) and math.isfinite(std) and std > 0):
        message = f"the reward model's config has the mean {mean} and the deviation {std} of its scores"
        raise ConfigError(message, hint="correct them in its config.json, or drop ``RewardModel.normalize``")
    return float(mean), float(std)


def moments_fields(mean: float, std: float) -> dict[str, float | None]:
    """Return the fields of config.json for the moments of a reward model's scores.

    They are None, which removes earlier ones, if all scores are equal: their deviation of 0 cannot divide anything.
    """
    if std > 0 and math.isfinite(mean) and math.isfinite(std):
        return {"mean": mean, "std": std}
    return {"mean": None, "std": None}


def has_packed_kernel(config: Any, dtype: str, device: str) -> bool:
    """Return whether a kernel of the device takes packed sequences of a family that is known to keep them apart.

    Args:
        config: of a transformers model.
        dtype, device: torch's names of them.
    """
    if getattr(config, "auto_map", None):  # the model's own code, which may call itself a known family
        return False
    # Models that also read images or sounds have other names than their layers for text.
    if config.model_type not in PACKED_FAMILIES or stateful_layers(config) or getattr(config, "sliding_window", None):
        return False
    of_keys, of_values = head_sizes(config)
    if of_keys != of_values or choose_attention(config, "auto", packing=True) != PACKED_ATTENTION:
        return False
    return varlen_unavailable_reason(torch.device(device), getattr(torch, dtype), of_keys, 0.0) is None


@torch.no_grad()
def score_sequences(
    model: RewardModel,
    samples: Sequence[Any],
    *,
    batch_size: int,
    reader: ImageReader | None = None,
    packing: bool = False,
) -> list[float]:
    """Return the score of each sample, in order.

    A sample is a token sequence, or a pair of one and the paths of its images, which `reader` reads. With `packing`,
    for a model that was loaded with it, the sequences of a pass are packed and not padded.

    Sequences are batched by length, with at most `batch_size` sequences and `MAX_BATCH_TOKENS` tokens per pass. Padded
    on a CPU, each sequence has a pass of its own, which costs little there and makes scores independent of the batch to
    the last bit.

    Raises:
        DataError: as `check_sequences`, or an image that cannot be read.
    """
    pairs = [sample if isinstance(sample, tuple) else (sample, ()) for sample in samples]
    sequences = [sequence for sequence, _ in pairs]
    check_sequences(sequences, InputLimits.of(model.model), "the reward model")
    device = model.value_head.weight.device
    scores = [0.0] * len(sequences)
    size = 1 if device.type == "cpu" and not packing else batch_size
    for rows in length_batches([len(sequence) for sequence in sequences], size):
        tokens = [sequences[row] for row in rows]
        batch = TokenBatch.packed(tokens, device) if packing else TokenBatch.padded(tokens, 0, device)
        if reader is not None:
            batch = batch.with_images(*reader.shown_arrays([path for row in rows for path in pairs[row][1]]))
        for row, score in zip(rows, model(batch).tolist(), strict=True):
            scores[row] = score
    return scores


@dataclass(frozen=True, slots=True)
class InputLimits:
    """What a model can read: the rows of its embedding, and its context in tokens, which is infinite for some."""

    num_rows: int
    context: float

    @classmethod
    def of(cls, model: Any) -> "InputLimits":
        """Return the limits of a transformers model with whole weights."""
        context = getattr(model.config.get_text_config(), "max_position_embeddings", None)
        return cls(model.get_input_embeddings().weight.shape[0], context or math.inf)


def check_sequences(sequences: Sequence[Any], limits: InputLimits, name: str) -> None:
    """Check that a model can read token sequences; `name` is what errors call the model.

    Raises:
        DataError: a token id outside of its embedding, or a sequence that is longer than its context.
    """
    for sequence in sequences:
        if len(sequence) > limits.context:
            raise DataError(f"{name} has a context of {limits.context} tokens and got a sequence of {len(sequence)}")
        # Check on the host: an index out of bounds on CUDA aborts the process.
        strays = [index for index in np.unique(sequence).tolist() if not 0 <= index < limits.num_rows]
        if strays:
            raise DataError(f"{name} has {limits.num_rows} embedding rows and got the token id {strays[0]}")


def length_batches(lengths: Sequence[int], batch_size: int) -> Iterator[list[int]]:
    """Yield batches of indices, sorted by length so that little padding is needed."""
    rows: list[int] = []
    for row in sorted(range(len(lengths)), key=lengths.__getitem__):
        if rows and (len(rows) == batch_size or (len(rows) + 1) * lengths[row] > MAX_BATCH_TOKENS):
            yield rows
            rows = []
        rows.append(row)
    if rows:
        yield rows
