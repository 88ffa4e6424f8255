"""Reductions: from one loss per token or sequence to one number.

They divide by counts over the whole update, so that the result does not depend on how the batch is split.
"""

from torch import Tensor

from rlhf_train.batching import Denominators
from rlhf_train.shapes import check_same_shape


def token_mean(token_loss: Tensor, loss_mask: Tensor, denominators: Denominators) -> Tensor:
    """Return this micro-batch's share of the mean over all trained tokens of the update.

    The shares of all micro-batches and ranks add up to the mean.

    Args:
        token_loss: [B, T] float; values where the mask is False are ignored, NaN included.
        loss_mask: [B, T] bool, True where the token is trained.
        denominators: counts over the whole update.

    Returns:
        Scalar; 0.0, with a zero gradient, when no token is trained.

    Raises:
        ValueError: shapes differ.
    """
    check_same_shape(token_loss=token_loss, loss_mask=loss_mask)
    return token_loss.masked_fill(~loss_mask, 0.0).sum() / max(denominators.num_tokens, 1)


def sequence_mean(losses: Tensor, denominators: Denominators) -> Tensor:
    """Return this micro-batch's share of the mean of `losses` over the whole update.

    Args:
        losses: [B] float, one per sequence, pair or answer.
        denominators: counts over the whole update.
    """
    return losses.sum() / max(denominators.num_sequences, 1)
