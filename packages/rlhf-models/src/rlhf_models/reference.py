"""The reference: the policy that the trained one is kept near to."""

from pathlib import Path

import torch

from rlhf_models.actor import Actor
from rlhf_models.loading import load_actor


def load_reference(
    path: str | Path,
    *,
    dtype: str | torch.dtype,
    attn_implementation: str = "auto",
    gradient_checkpointing: bool = False,
    packing: bool = False,
) -> Actor:
    """Load an actor that is never trained: in eval mode, without gradients. Arguments and errors as in `load_actor`."""
    actor = load_actor(
        path,
        dtype=dtype,
        attn_implementation=attn_implementation,
        gradient_checkpointing=gradient_checkpointing,
        packing=packing,
    )
    return freeze(actor)


def freeze(actor: Actor) -> Actor:
    """Put an actor into eval mode and take its parameters out of training; returns the same actor."""
    return actor.eval().requires_grad_(False)
