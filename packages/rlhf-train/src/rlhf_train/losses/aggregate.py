"""From one loss a token to one number, by denominators that do not depend on how the batch was split."""

from torch import Tensor

from rlhf_data.errors import unknown
from rlhf_train.algorithms import REDUCTIONS
from rlhf_train.batching import Denominators
from rlhf_train.shapes import check_same_shape


def aggregate(token_loss: Tensor, loss_mask: Tensor, reduction: str, denominators: Denominators) -> Tensor:
    """Return this micro-batch's share of the loss: the shares of all micro-batches add up to the whole.

        token_mean               sum_i sum_t l_it / num_tokens
        seq_mean_token_mean      sum_i (sum_t l_it / n_i) / num_sequences,      n_i = trained tokens of rollout i
        seq_mean_token_sum       sum_i sum_t l_it / num_sequences
        seq_mean_token_sum_norm  sum_i sum_t l_it / (num_sequences max_tokens)

    Args:
        token_loss: [B, T] float; anything, NaN included, where the mask is False.
        loss_mask: [B, T] bool, True where the token is trained.
        reduction: one of the names above.
        denominators: global counts.

    Returns:
        Scalar; 0.0, with a gradient of zero, when nothing is trained.

    Raises:
        ValueError: unknown reduction, or shapes differ.

    Source: the names are verl's; sum_norm is Dr. GRPO's, Liu et al. 2025, arXiv:2503.20783.
    """
    check_same_shape(token_loss=token_loss, loss_mask=loss_mask)
    masked = token_loss.masked_fill(~loss_mask, 0.0)
    num_tokens, num_sequences = max(denominators.num_tokens, 1), max(denominators.num_sequences, 1)
    if reduction == "token_mean":
        return masked.sum() / num_tokens
    if reduction == "seq_mean_token_mean":
        return (masked.sum(dim=1) / loss_mask.sum(dim=1).clamp(min=1)).sum() / num_sequences
    if reduction == "seq_mean_token_sum":
        return masked.sum() / num_sequences
    if reduction == "seq_mean_token_sum_norm":
        return masked.sum() / (num_sequences * denominators.max_tokens)
    raise ValueError(unknown("reduction", reduction, REDUCTIONS))


def sequence_mean(losses: Tensor, denominators: Denominators) -> Tensor:
    """Return this micro-batch's share of the mean of `losses` [B], one a pair or an answer, over the whole batch."""
    return losses.sum() / max(denominators.num_sequences, 1)
