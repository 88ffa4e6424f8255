"""The plain torch twin of `token_logprobs`: what the fused kernel must equal, and the path of CPUs."""

import torch
from torch import Tensor


def token_logprobs_reference(logits: Tensor, token_ids: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """Return log-probs [N] and entropies [N] as `token_logprobs` does, in float32 or, for float64, in that."""
    vocab_size = logits.shape[1]
    scores = logits.to(torch.promote_types(logits.dtype, torch.float32))
    ignored = token_ids < 0
    if ignored.any():
        # Before anything is computed of them: the gradient of a NaN is NaN even where its weight is 0.
        scores = scores.masked_fill(ignored[:, None], 0.0)
    # Centered before it is scaled, a row of large logits keeps all its digits; softmax does not see the shift.
    scaled = (scores - scores.detach().amax(dim=-1, keepdim=True)) / temperature
    all_logprobs = torch.log_softmax(scaled, dim=-1)
    probs = all_logprobs.exp()

    picked = all_logprobs.gather(1, token_ids.long().clamp(0, vocab_size - 1)[:, None])[:, 0]
    logprobs = torch.where(token_ids < vocab_size, picked, torch.nan)
    # p log p tends to 0 with p, but 0 * -inf is NaN, in the value and in the gradient.
    entropy = -(probs * all_logprobs.masked_fill(probs == 0, 0.0)).sum(dim=-1)

    return logprobs.masked_fill(ignored, 0.0), entropy.masked_fill(ignored, 0.0)
