"""The order in which the items of a data set are used: shuffled per epoch from one seed, resumable at any item."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from rlhf_data.errors import CheckpointError, ConfigError


class EpochSampler:
    """An endless stream of batches of indices.

    Every epoch contains every index exactly once. A batch at the end of an epoch is filled up from the next epoch, so
    that no item is dropped and every batch is full. Such a batch may contain an item twice.

    Args:
        num_items: size of the data set.
        batch_size: indices per batch; may exceed `num_items`.
        seed: determines, with the number of the epoch, the order of the epoch.
        shuffle: False keeps the order of the data set.
    """

    def __init__(self, num_items: int, batch_size: int, *, seed: int = 0, shuffle: bool = True) -> None:
        if num_items < 1 or batch_size < 1:
            raise ConfigError(f"num_items ({num_items}) and batch_size ({batch_size}) must be at least 1")
        if seed < 0:
            raise ConfigError(f"the seed must not be negative, got {seed}")
        self.num_items = num_items
        self.batch_size = batch_size
        self.seed = seed
        self.shuffle = shuffle
        self._identity = {"num_items": num_items, "seed": seed, "shuffle": shuffle}
        self.num_seen = 0  # indices returned since the beginning; the only state
        self._shuffled = (-1, np.array([], np.int64))  # the current epoch and its order

    def next_batch(self) -> np.ndarray:
        """Return the next [batch_size] int64 indices."""
        return self.take(self.batch_size)

    def take(self, count: int) -> np.ndarray:
        """Return the next [count] int64 indices."""
        batch: list[int] = []
        while len(batch) < count:
            epoch, position = divmod(self.num_seen, self.num_items)
            if self._shuffled[0] != epoch:
                self._shuffled = (epoch, self._order(epoch))
            taken = self._shuffled[1][position : position + count - len(batch)]
            batch.extend(taken.tolist())
            self.num_seen += len(taken)
        return np.array(batch, dtype=np.int64)

    def state_dict(self) -> dict[str, Any]:
        """Return the state from which `load_state_dict` continues with the next batch."""
        return {"num_seen": self.num_seen, **self._identity}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue where `state` was taken. The batch size may differ.

        Raises:
            CheckpointError: the state belongs to another data set, seed or order.
        """
        for name, own in self._identity.items():
            if state.get(name) != own:
                message = f"the saved order has {name} {state.get(name)}, this run has {own}"
                raise CheckpointError(message, hint="resume with the data set and seed of the saved run")
        self.num_seen = int(state["num_seen"])

    def _order(self, epoch: int) -> np.ndarray:
        if not self.shuffle:
            return np.arange(self.num_items)
        return np.random.default_rng((self.seed, epoch)).permutation(self.num_items)
