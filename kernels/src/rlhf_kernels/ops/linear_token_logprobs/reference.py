"""The plain torch twin of `linear_token_logprobs`, with full logits."""

from torch import Tensor
from torch.nn.functional import linear

from rlhf_kernels.ops.token_logprobs.reference import TokenLogprobs, token_logprobs_reference

Head = tuple[Tensor, Tensor, Tensor | None]  # hidden [N, H], weight [V, H], bias [V] or None


def linear_token_logprobs_reference(head: Head, token_ids: Tensor, temperature: float) -> TokenLogprobs:
    """Return what `linear_token_logprobs` does, in float32, or in float64 for float64 input."""
    return token_logprobs_reference(head_logits(head, token_ids), token_ids, temperature)


def head_logits(head: Head, token_ids: Tensor) -> Tensor:
    """Return the logits [N, V]. Hidden states of ignored rows (negative id) are replaced by zeros."""
    hidden, weight, bias = head
    # 0 times a hidden state that is not finite would put NaN into the weight's gradient.
    return linear(hidden.masked_fill((token_ids < 0)[:, None], 0.0), weight, bias)
