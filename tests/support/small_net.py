"""A small model for tests of training engines, and the states that an engine keeps of it."""

import torch
from torch import Tensor, nn

from rlhf_train.engine.shards import Shards


class Net(nn.Module):
    """Weights with and without decay, of odd sizes, which do not divide evenly over two ranks, and a frozen one.

    No two values are the same.
    """

    def __init__(self, width: int = 7) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.layers = nn.Sequential(nn.Linear(5, width), nn.Tanh(), nn.Linear(width, 3))
        self.frozen = nn.Parameter(torch.ones(3), requires_grad=False)

    def forward(self, rows: Tensor) -> Tensor:
        """Return [N, 3] for rows [N, 5]."""
        return self.layers(rows) * self.frozen


def kept(engine) -> dict[str, Tensor]:
    """Return copies of the weights and states that an engine would write to a checkpoint."""
    shards = Shards()
    engine.save_shards(shards)
    return {name: part.clone() for name, part in shards.tensors.items()}


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    """Return whether both have the same tensors to the last bit."""
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def equal(one, other) -> bool:
    """Return whether two engines have the same weights and states."""
    return same(kept(one), kept(other)) and same(one.state_dict(), other.state_dict())
