"""The plain torch twin of `linear_sample`, with full logits, and the random numbers that both forms use."""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import linear, pad

from rlhf_kernels.ops.linear_token_logprobs.reference import Head

GROUP_SIZE = 64  # consecutive tokens per group; a draw takes a group, then a token of it
OF_GROUPS, OF_TOKENS = 0, 1  # the last word of the counter: what the noise is for

_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 10
_WORD = 0xFFFFFFFF


class SampledTokens(NamedTuple):
    """What `linear_sample` returns.

    Attributes:
        token_ids: [N] int64, the tokens drawn.
        logprobs: [N] float32, their log-probabilities in nats, at the row's temperature (at 1 if it is 0).
        logsumexp: [N] float32, log of the sum of exp(logits / temperature), in nats.
    """

    token_ids: Tensor
    logprobs: Tensor
    logsumexp: Tensor


def linear_sample_reference(head: Head, temperature: Tensor, seeds: Tensor, positions: Tensor) -> SampledTokens:
    """Return what `linear_sample` does, computed in float32, or in float64 for float64 input."""
    logits = linear(*head)
    logits = logits if logits.dtype == torch.float64 else logits.float()
    is_greedy = (temperature == 0)[:, None]
    # The root of a negative temperature is NaN, and so is all that follows.
    scale = torch.where(temperature == 0, 1.0, temperature.sqrt().square())[:, None]
    x = logits / scale.to(logits.dtype)
    vocab_size = x.shape[1]
    num_groups = -(-vocab_size // GROUP_SIZE)
    groups = pad(x, (0, num_groups * GROUP_SIZE - vocab_size), value=-torch.inf).unflatten(1, (num_groups, GROUP_SIZE))
    rows = (seeds[:, None], positions[:, None])

    levels = torch.where(is_greedy, groups.amax(2), groups.logsumexp(2))
    noise = -exponentials(*rows, torch.arange(num_groups, device=x.device), OF_GROUPS).log()
    group = torch.where(is_greedy, levels, levels + noise).argmax(1, keepdim=True)

    ids = group * GROUP_SIZE + torch.arange(GROUP_SIZE, device=x.device)
    values = groups.gather(1, group[..., None].expand(-1, -1, GROUP_SIZE))[:, 0]
    noise = -exponentials(*rows, ids, OF_TOKENS).log()
    place = torch.where(is_greedy, values, values + noise).argmax(1, keepdim=True)

    logsumexp = x.logsumexp(1)
    # A row with +inf has the log-sum-exp +inf here, and NaN in the fused form.
    logsumexp = torch.where(logsumexp == torch.inf, torch.nan, logsumexp)
    logprobs = values.gather(1, place)[:, 0] - logsumexp
    token_ids = torch.where(logprobs.isnan(), 0, ids.gather(1, place)[:, 0])
    return SampledTokens(token_ids, logprobs.float(), logsumexp.float())


def exponentials(seeds: Tensor, positions: Tensor, indices: Tensor, purpose: int) -> Tensor:
    """Return exponentially distributed numbers of rate 1, float64, from broadcast int64 tensors.

    The token of the least `exponential / probability` has the distribution of the probabilities. The negative logarithm
    of such a number is Gumbel noise.
    """
    uniform = (random_words(seeds, positions, indices, purpose).double() + 0.5) / 2**32
    return -torch.log1p(-uniform)


def random_words(seeds: Tensor, positions: Tensor, indices: Tensor, purpose: int) -> Tensor:
    """Return 32 random bits as int64, from broadcast int64 tensors: the first word of Philox 4x32-10.

    The key is the seed, the counter is (index, low word of the position, high word, purpose).
    Source: J. Salmon et al. 2011, Parallel random numbers: as easy as 1, 2, 3.
    """
    keys = [seeds & _WORD, seeds >> 32 & _WORD]
    first, second, third, fourth = indices & _WORD, positions & _WORD, positions >> 32 & _WORD, torch.tensor(purpose)
    for _ in range(_ROUNDS):
        high, low = _product(_MULTIPLIERS[0], first)
        other_high, other_low = _product(_MULTIPLIERS[1], third)
        first = other_high ^ second ^ keys[0]
        second = other_low
        third = high ^ fourth ^ keys[1]
        fourth = low
        keys = [(key + step) & _WORD for key, step in zip(keys, _KEY_STEPS, strict=True)]
    return first


def _product(factor: int, words: Tensor) -> tuple[Tensor, Tensor]:
    """Return the high and the low 32 bits of the products. The whole product would exceed a signed 64-bit number."""
    lower = factor * (words & 0xFFFF)
    upper = factor * (words >> 16) + (lower >> 16)
    return upper >> 16, (upper << 16 & _WORD) | (lower & 0xFFFF)
