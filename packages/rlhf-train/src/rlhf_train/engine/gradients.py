"""Gradients of bfloat16 weights at ZeRO stage 1, which add up in float32: a faster way than DeepSpeed's own."""

from collections.abc import Mapping

import torch
from torch import Tensor

from rlhf_kernels import accumulate_


def add_gradients_at_once(sums: Mapping[torch.nn.Parameter, Tensor]) -> None:
    """Add each bfloat16 gradient to DeepSpeed's float32 sum as soon as backward has computed it, and free it.

    DeepSpeed itself makes a float32 copy of the gradient and adds the copy, which moves twice as much memory.
    """

    def add(weight: torch.nn.Parameter) -> None:
        accumulate_(sums[weight], weight.grad)
        weight.grad = None

    for weight in sums:
        weight.register_post_accumulate_grad_hook(add)
