"""What a rank keeps on its device: optimizer states and frozen models, while they are needed there."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch

from rlhf_models.host_states import HostStates
from rlhf_train.engine.deepspeed import DeepSpeedEngine
from rlhf_train.engine.deepspeed_internals import frozen_parts


@dataclass(slots=True, eq=False, repr=False)
class Residence:
    """Moves optimizer states and frozen models of a rank between its device and host memory.

    Attributes:
        engines: role to the engine of its trained model; may grow.
        frozen: role to its frozen model; may grow.
        device: of the rank.
        trains_in_turn: optimizer states are on the device only in updates of their model, and frozen models only when
            they run: at most one model has its states there.
    """

    engines: Mapping[str, DeepSpeedEngine]
    frozen: Mapping[str, Callable]
    device: torch.device
    trains_in_turn: bool
    _with_states: set[str] = field(default_factory=set)  # roles whose optimizer states are on the device
    _frozen_weights: HostStates = field(default_factory=lambda: HostStates(is_frozen=True))
    _frozen_are_here: bool = True

    def loaded(self, role: str) -> None:
        """Take note of a trained model that was loaded, and make room for the next one if models train in turn."""
        self._with_states.add(role)
        if self.trains_in_turn:
            self._offload_states(role)
            release_cache()

    @contextmanager
    def in_turn(self, role: str) -> Iterator[None]:
        """Within a `with` block, have the optimizer states of `role` on the device; if models train in turn, only these
        and no frozen model."""
        if not self.trains_in_turn:
            yield
            return
        self._offload_frozen()
        release_cache()
        self._reload_states(role)
        yield
        self._offload_states(role)
        release_cache()

    def offload(self) -> None:
        """Move optimizer states and frozen models to host memory."""
        for role in sorted(self._with_states):
            self._offload_states(role)
        self._offload_frozen()
        release_cache()

    def reload(self) -> None:
        """Move back what `offload` moved. If models train in turn, `in_turn` moves the states."""
        if not self.trains_in_turn:
            for role in self.engines.keys() - self._with_states:
                self._reload_states(role)
        self.reload_frozen()

    def reload_frozen(self) -> None:
        """Have the frozen models on the device."""
        self._frozen_weights.reload()
        self._frozen_are_here = True

    def _offload_states(self, role: str) -> None:
        self.engines[role].offload()
        self._with_states.discard(role)

    def _reload_states(self, role: str) -> None:
        self.engines[role].reload()
        self._with_states.add(role)

    def _offload_frozen(self) -> None:
        if self.device.type != "cuda" or not self._frozen_are_here:
            return  # on a CPU, frozen weights lie in their files, mapped into memory
        modules = [module for module in self.frozen.values() if isinstance(module, torch.nn.Module)]
        self._frozen_weights.offload(part for module in modules for part in frozen_parts(module))
        self._frozen_are_here = False


def release_cache() -> None:
    """Give back memory of the device that the allocator would keep from other processes."""
    torch.cuda.empty_cache()  # does nothing on a CPU
