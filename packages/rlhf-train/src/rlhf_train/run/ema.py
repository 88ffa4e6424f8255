"""An exponential moving average of a model's weights, in float32 in host memory."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from rlhf_data.errors import ConfigError
from rlhf_train.engine.protocol import TrainEngine
from rlhf_train.run.models import own_base


class WeightAverage:
    """The moving average of the weights that one rank keeps (`DeepSpeedEngine.local_weights`).

        average <- beta * average + (1 - beta) * weights        after each update

    Args:
        beta: decay per update, in [0, 1).
        weights: name and tensor of each weight; the average starts at these values.

    Raises:
        ConfigError: beta is out of range.

    Source: Polyak and Juditsky 1992, "Acceleration of stochastic approximation by averaging".
    """

    def __init__(self, beta: float, weights: Iterable[tuple[str, Tensor]]) -> None:
        if not 0 <= beta < 1:
            raise ConfigError(f"ema_beta is {beta}; it must lie in [0, 1)")
        self._beta = beta
        self._average = {name: _on_host(tensor) for name, tensor in weights}

    def update(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Average in the weights after one more update."""
        for name, tensor in weights:
            self._average[name].lerp_(_on_host(tensor), 1 - self._beta)

    def values(self) -> dict[str, Tensor]:
        """Return the averages by name, float32 in host memory; writing to them changes the average."""
        return self._average

    @contextmanager
    def in_place_of(self, weights: Iterable[tuple[str, Tensor]]) -> Iterator[None]:
        """Replace the weights by their average within a `with` block, for example to save the average."""
        weights = list(weights)
        kept = [tensor.detach().to("cpu", copy=True) for _, tensor in weights]
        try:
            for name, tensor in weights:
                # Rounded on the host, the copy is done when this returns; ZeRO-3 may gather weights on another stream.
                tensor.detach().copy_(self._average[name].to(tensor.dtype))
            yield
        finally:
            for (_, tensor), own in zip(weights, kept, strict=True):
                tensor.detach().copy_(own)


class AveragedModel:
    """A trained model with the average of its weights, as a frozen model. It runs while it is `awake`.

    Args:
        engine: of the trained model.
        average: of the engine's `local_weights`.

    Source: Tarvainen and Valpola 2017 (Mean Teacher), arXiv:1703.01780.
    """

    def __init__(self, engine: TrainEngine, average: WeightAverage) -> None:
        self._engine = engine
        self._average = average
        self._run = own_base(engine, has_adapters=False)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run one pass."""
        return self._run(*args, **kwargs)

    @contextmanager
    def awake(self) -> Iterator[None]:
        """Have the average in place of the weights within a `with` block. Collective under ZeRO-3."""
        with self._average.in_place_of(self._engine.local_weights()):
            yield
            for _ in self._engine.local_weights():
                pass  # ZeRO-3 leaves small weights gathered, and the next pass would take those of the average


def _on_host(tensor: Tensor) -> Tensor:
    return tensor.detach().to("cpu", torch.float32, copy=True)
