"""The reference: the policy that the trained one is kept near to."""

from pathlib import Path
from typing import Unpack

from rlhf_models.actor import Actor
from rlhf_models.loading import LoadOptions, load_actor


def load_reference(path: str | Path, **options: Unpack[LoadOptions]) -> Actor:
    """Load an actor that is never trained: in eval mode, without gradients. Errors as in `load_actor`."""
    return load_actor(path, **options).eval().requires_grad_(False)
