"""The reference model: the fixed policy that KL terms are measured against."""

from pathlib import Path
from typing import Unpack

from rlhf_models.actor import Actor
from rlhf_models.loading import LoadOptions, load_actor


def load_reference(path: str | Path, **options: Unpack[LoadOptions]) -> Actor:
    """Load a frozen actor: in eval mode, without gradients. Raises ConfigError as `load_actor`."""
    return load_actor(path, **options).eval().requires_grad_(False)
