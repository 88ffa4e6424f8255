"""The plain torch twin of `token_logprobs`: the definition the fused kernel is tested against, and the CPU path."""

from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

EMPTY = -1e4  # replaces an exponent of -inf: its exponential is 0 too, but 0 * EMPTY is 0 where 0 * -inf is NaN


class TokenLogprobs(NamedTuple):
    """Results per row, in nats, 0.0 in ignored rows.

    Attributes:
        logprobs: [N], log-prob of the row's token.
        entropy: [N], entropy of the row's distribution.
        logsumexp: [N], log-sum-exp of the row's logits divided by the temperature.
    """

    logprobs: Tensor
    entropy: Tensor
    logsumexp: Tensor


def token_logprobs_reference(logits: Tensor, token_ids: Tensor, temperature: float) -> TokenLogprobs:
    """Return what `token_logprobs` does, in float32, or in float64 for float64 input."""
    vocab_size = logits.shape[1]
    scores, ignored = _readable_scores(logits, token_ids)
    # Subtract the maximum before scaling, so that rows of large logits keep their digits. Softmax is shift-invariant.
    row_max = scores.detach().amax(dim=-1, keepdim=True)
    scaled = (scores - row_max) / temperature
    all_logprobs = torch.log_softmax(scaled, dim=-1)
    probs = all_logprobs.exp()

    picked = all_logprobs.gather(1, token_ids.long().clamp(0, vocab_size - 1)[:, None])[:, 0]
    logprobs = torch.where(token_ids < vocab_size, picked, torch.nan)
    # p log p tends to 0 with p, but 0 * -inf is NaN, in the value and in the gradient.
    entropy = -(probs * all_logprobs.masked_fill(probs == 0, 0.0)).sum(dim=-1)
    logsumexp = torch.logsumexp(scaled, dim=-1) + row_max[:, 0] / temperature
    return TokenLogprobs(*(values.masked_fill(ignored, 0.0) for values in (logprobs, entropy, logsumexp)))


def sharded_token_logprobs_reference(
    logits: Tensor, token_ids: Tensor, temperature: float, group: "ProcessGroup", vocab_start: int
) -> TokenLogprobs:
    """Return what `token_logprobs` does when each rank holds some columns of the logits.

    Forward sums are combined over the ranks. The gradient needs no communication: it is local to each rank's columns.
    """
    scores, ignored = _readable_scores(logits, token_ids)
    here = token_ids.long() - vocab_start
    held = (here >= 0) & (here < logits.shape[1])
    token_logits = torch.where(held, scores.gather(1, here.clamp(0, logits.shape[1] - 1)[:, None])[:, 0], torch.nan)
    with torch.no_grad():
        row_max = scores.amax(dim=-1)
        centered = ((scores - row_max[:, None]) / temperature).clamp(min=EMPTY)
        weight = centered.exp()
        sums = torch.stack([row_max, weight.sum(-1), (centered * weight).sum(-1), token_logits])
        values = combine_shards(sums, token_ids, temperature, group)
        logp = (scores - sums[0, :, None]) / temperature - sums[1, :, None].log()
        probs = logp.exp()
        surprise = probs * torch.where(probs > 0, logp + values.entropy[:, None], 0.0)
    # `values` has no gradient. Add terms whose value is 0 and whose gradient is that of this rank's columns.
    scaled = torch.where(probs > 0, scores, 0.0) / temperature
    mean = (probs * scaled).sum(-1)
    slopes = (
        torch.where(token_logits.isfinite(), token_logits, 0.0) / temperature - mean,
        -(surprise * scaled).sum(-1),
        mean,
    )
    pairs = zip(values, slopes, strict=True)
    return TokenLogprobs(*(value + (slope - slope.detach()).masked_fill(ignored, 0.0) for value, slope in pairs))


def combine_shards(sums: Tensor, token_ids: Tensor, temperature: float, group: "ProcessGroup") -> TokenLogprobs:
    """Combine sums over one rank's columns, [4, N], with those of all ranks, in place, and return the results.

    The four sums of a row are m = max z, s = sum e^c, u = sum c e^c, where c = (z - m) / temperature, and the token's
    logit, which is NaN on ranks that do not hold it.
    """
    from torch import distributed

    row_max, total, weighted, token_logits = sums.clone()
    distributed.all_reduce(sums[0], distributed.ReduceOp.MAX, group=group)
    shift = ((row_max - sums[0]) / temperature).clamp(min=EMPTY)  # from this rank's maximum to the common one
    held = ~token_logits.isnan()
    centered = torch.where(held, (token_logits - sums[0]) / temperature, 0.0)
    parts = torch.stack([total * shift.exp(), (weighted + shift * total) * shift.exp(), centered, held.to(sums.dtype)])
    distributed.all_reduce(parts, group=group)
    sums[1:3] = parts[:2]
    log_sum = parts[0].log()
    logprobs = torch.where(parts[3] > 0, parts[2], torch.nan) - log_sum
    results = (logprobs, log_sum - parts[1] / parts[0], sums[0] / temperature + log_sum)
    return TokenLogprobs(*(values.masked_fill(token_ids < 0, 0.0) for values in results))


def _readable_scores(logits: Tensor, token_ids: Tensor) -> tuple[Tensor, Tensor]:
    """Return logits in at least float32, with ignored rows set to 0, and the mask [N] of ignored rows."""
    scores = logits.to(torch.promote_types(logits.dtype, torch.float32))
    ignored = token_ids < 0
    if ignored.any():
        # Mask before any arithmetic: a NaN in the forward pass gives a NaN gradient even with weight 0.
        scores = scores.masked_fill(ignored[:, None], 0.0)
    return scores, ignored
