"""The plain torch twin of `adamw_bf16_moments_`, and the numbers that both forms take."""

from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

CHUNK_SIZE = 1 << 20  # elements; limits what is in float32 at once
_FACTORS = (0x7FEB352D, 0x846CA68B)
Number = TypeVar("Number", int, Tensor)


class Factors(NamedTuple):
    """Numbers of one update, by their place in the formula of `adamw_bf16_moments_`.

    Attributes:
        gain1, gain2: 1 - beta1 and 1 - beta2.
        step_size: lr / (1 - beta1^t).
        scale: 1 / sqrt(1 - beta2^t).
        eps: added to the root.
        keep: 1 - lr weight_decay.
        seed: of the noise, a hash of t in 32 bits.
    """

    gain1: float
    gain2: float
    step_size: float
    scale: float
    eps: float
    keep: float
    seed: int

    @classmethod
    def of(cls, num_updates: int, lr: float, betas: tuple[float, float], eps: float, weight_decay: float) -> "Factors":
        """Return the numbers of update `num_updates`, from 1."""
        beta1, beta2 = betas
        step_size = lr / (1 - beta1**num_updates)
        scale = (1 - beta2**num_updates) ** -0.5
        return cls(1 - beta1, 1 - beta2, step_size, scale, eps, 1 - lr * weight_decay, _hash(num_updates))


def adamw_bf16_moments_reference_(
    weight: Tensor, gradient: Tensor, average: Tensor, square: Tensor, factors: Factors, start: int
) -> None:
    """Update in place, as `adamw_bf16_moments_` does."""
    flat = weight.view(-1), gradient.reshape(-1), average.view(-1), square.view(-1)
    for part, g, m, v in zip(*(tensor.split(CHUNK_SIZE) for tensor in flat), strict=True):
        noise = _hash(torch.arange(start, start + len(part), device=part.device) ^ factors.seed)
        start += len(part)
        g = g.float()
        exact_m = m.float().lerp_(g, factors.gain1)
        exact_v = v.float().lerp_(g * g, factors.gain2)
        m.copy_(_rounded(exact_m, noise & 0xFFFF))
        v.copy_(_rounded(exact_v, noise >> 16))
        root = exact_v.sqrt_().mul_(factors.scale).add_(factors.eps)
        part.mul_(factors.keep).addcdiv_(exact_m, root, value=-factors.step_size)


def _rounded(value: Tensor, noise: Tensor) -> Tensor:
    """Return bfloat16 numbers, which are the upper 16 bits of float32 ones, whose lower 16 bits carry with noise."""
    return ((value.view(torch.int32) + noise.int()) >> 16).to(torch.int16).view(torch.bfloat16)


def _hash(numbers: Number) -> Number:
    """Return 32 random bits for a number, or for each of int64 numbers, of which the lower 32 bits count.

    Source: C. Wellons' "lowbias32", https://nullprogram.com/blog/2018/07/31/
    """
    bits = numbers & 0xFFFFFFFF
    bits = ((bits ^ (bits >> 16)) * _FACTORS[0]) & 0xFFFFFFFF
    bits = ((bits ^ (bits >> 15)) * _FACTORS[1]) & 0xFFFFFFFF
    return bits ^ (bits >> 16)
