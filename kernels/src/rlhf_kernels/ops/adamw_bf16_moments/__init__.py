"""AdamW with moments in bfloat16, rounded stochastically."""

import torch
from torch import Tensor

from rlhf_kernels.dispatch import FLOATS, takes_triton
from rlhf_kernels.ops.adamw_bf16_moments.reference import Factors, adamw_bf16_moments_reference_


def adamw_bf16_moments_(
    weight: Tensor,
    gradient: Tensor,
    average: Tensor,
    square: Tensor,
    *,
    num_updates: int,
    lr: float,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
    start: int = 0,
) -> None:
    """Make update number t = `num_updates` of AdamW in place, and round its moments to bfloat16 without bias.

        m <- m + (1 - beta1) (g - m)
        v <- v + (1 - beta2) (g^2 - v)
        w <- (1 - lr weight_decay) w - lr / (1 - beta1^t) m / (sqrt(v / (1 - beta2^t)) + eps)

    in float32. Then m and v become one of their two neighbours in bfloat16, each with the probability that makes the
    mean exact. The random bits are a hash of t and the element's position: chunks of a tensor, in any order, get the
    update of the whole.

    Args:
        weight: float32, any shape, contiguous.
        gradient: bfloat16, float16 or float32, with as many elements, in the same order.
        average, square: m and v, bfloat16, likewise, contiguous; zeros before the first update.
        num_updates: 1 for the first update.
        lr, betas, eps, weight_decay: of AdamW.
        start: position of the first element, for a chunk of a longer tensor.

    Raises:
        ValueError: a wrong shape, dtype, device or layout, or an update before the first.

    Sources: Loshchilov & Hutter 2019, arXiv:1711.05101; for stochastic rounding, Gupta et al. 2015, arXiv:1502.02551.
    """
    tensors = (weight, gradient, average, square)
    dtypes = [tensor.dtype for tensor in tensors]
    if dtypes[::2] + dtypes[3:] != [torch.float32, torch.bfloat16, torch.bfloat16] or dtypes[1] not in FLOATS:
        message = "adamw_bf16_moments_ takes a float32 weight, a gradient and two bfloat16 moments"
        raise ValueError(f"{message}; got {', '.join(map(str, dtypes))}")
    if len({(tensor.numel(), tensor.device) for tensor in tensors}) > 1:
        shapes = ", ".join(f"{list(tensor.shape)} on {tensor.device}" for tensor in tensors)
        raise ValueError(f"adamw_bf16_moments_ takes four tensors of equal size on one device; got {shapes}")
    if not all(tensor.is_contiguous() for tensor in (weight, average, square)):
        raise ValueError("adamw_bf16_moments_ changes tensors in place and needs them contiguous; got a strided view")
    if num_updates < 1:
        raise ValueError(f"adamw_bf16_moments_ counts updates from 1; got {num_updates}")
    factors = Factors.of(num_updates, lr, betas, eps, weight_decay)
    if takes_triton("adamw_bf16_moments_", weight):
        from rlhf_kernels.ops.adamw_bf16_moments.triton import adamw_bf16_moments_triton_

        return adamw_bf16_moments_triton_(*tensors, factors, start)
    return adamw_bf16_moments_reference_(*tensors, factors, start)
