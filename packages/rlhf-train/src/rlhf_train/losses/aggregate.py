"""From one loss a token or a sequence to one number, by denominators that do not depend on how the batch was split."""

from torch import Tensor

from rlhf_train.batching import Denominators
from rlhf_train.shapes import check_same_shape


def token_mean(token_loss: Tensor, loss_mask: Tensor, denominators: Denominators) -> Tensor:
    """Return this micro-batch's share of the mean over all trained tokens; the shares of all add up to the whole.

    The actor's reductions, this and others, are `rlhf_kernels.packed_policy_loss`'s.

    Args:
        token_loss: [B, T] float; anything, NaN included, where the mask is False.
        loss_mask: [B, T] bool, True where the token is trained.
        denominators: global counts.

    Returns:
        Scalar; 0.0, with a gradient of zero, when nothing is trained.

    Raises:
        ValueError: shapes differ.
    """
    check_same_shape(token_loss=token_loss, loss_mask=loss_mask)
    return token_loss.masked_fill(~loss_mask, 0.0).sum() / max(denominators.num_tokens, 1)


def sequence_mean(losses: Tensor, denominators: Denominators) -> Tensor:
    """Return this micro-batch's share of the mean of `losses` [B], one a pair or an answer, over the whole batch."""
    return losses.sum() / max(denominators.num_sequences, 1)
