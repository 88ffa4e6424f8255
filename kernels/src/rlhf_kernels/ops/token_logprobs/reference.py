"""The plain torch twin of `token_logprobs`: what the fused kernel must equal, and the path of CPUs."""

from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

EMPTY = -1e4  # an exponent whose exponential is 0 in float32: stands for -inf, which times 0 would be NaN


class TokenLogprobs(NamedTuple):
    """What is known of one token a row; nats, 0.0 in an ignored row.

    Attributes:
        logprobs: [N], of the token.
        entropy: [N], of the row's distribution.
        logsumexp: [N], of the row's logits over the temperature.
    """

    logprobs: Tensor
    entropy: Tensor
    logsumexp: Tensor


def token_logprobs_reference(logits: Tensor, token_ids: Tensor, temperature: float) -> TokenLogprobs:
    """Return what `token_logprobs` does, in float32 or, for float64, in that."""
    vocab_size = logits.shape[1]
    scores, ignored = _readable_scores(logits, token_ids)
    # Centered before it is scaled, a row of large logits keeps all its digits; softmax does not see the shift.
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
    """Return what `token_logprobs` does for one rank's columns; the gradient of these is local."""
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
    # The values are the group's; to each is added 0 with the gradient that it has by this rank's columns.
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
    """Turn sums over one rank's columns, [4, N], into those over all ranks', in place, and return the results.

    The sums of a row are m = max z, s = sum e^c and u = sum c e^c with c = (z - m) / temperature, and the token's
    logit, NaN where the rank does not hold it.
    """
    from torch import distributed

    row_max, total, weighted, token_logits = sums.clone()
    distributed.all_reduce(sums[0], distributed.ReduceOp.MAX, group=group)
    shift = ((row_max - sums[0]) / temperature).clamp(min=EMPTY)
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
    """Return logits in at least float32 with the rows of negative ids made 0, and which rows [N] these are."""
    scores = logits.to(torch.promote_types(logits.dtype, torch.float32))
    ignored = token_ids < 0
    if ignored.any():
        # Before anything is computed of them: the gradient of a NaN is NaN even where its weight is 0.
        scores = scores.masked_fill(ignored[:, None], 0.0)
    return scores, ignored
