"""Which GPUs each of several engines on one machine has."""

import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from rlhf_data.errors import ConfigError


@dataclass(frozen=True, slots=True)
class EnginePlaces:
    """Where engines run.

    Attributes:
        gpus: the GPUs of each engine, by their names in CUDA_VISIBLE_DEVICES; none on a machine without GPUs.
    """

    gpus: tuple[tuple[str, ...], ...]

    @property
    def most_per_gpu(self) -> int:
        """The largest number of engines on one GPU; 1 without GPUs."""
        return max(Counter(name for names in self.gpus for name in names).values(), default=1)

    def describe(self) -> str:
        """Return in words where they run."""
        if not self.gpus[0]:
            return f"{len(self.gpus)} engines share the {_num_cores()} cores of this machine"
        each = ", ".join("+".join(names) for names in self.gpus)
        return f"{len(self.gpus)} engines are on the GPUs {each}"

    def environs(self) -> list[dict[str, str]]:
        """Return the variables that give each engine its GPUs, or its part of the cores."""
        if len(self.gpus) == 1:
            return [{}]
        if self.gpus[0]:
            return [{"CUDA_VISIBLE_DEVICES": ",".join(names)} for names in self.gpus]
        threads = os.environ.get("OMP_NUM_THREADS") or str(max(_num_cores() // len(self.gpus), 1))
        return [{"OMP_NUM_THREADS": threads} for _ in self.gpus]


def place_engines(num_engines: int, gpus_per_engine: int, visible: Sequence[str]) -> EnginePlaces:
    """Return the GPUs of each engine: sets of neighbours among those that are `visible`, which are dealt out in turn.

    If there are more engines than sets, engines share GPUs. Raises ConfigError if there are fewer GPUs than one engine
    needs; engines on a machine without GPUs need none.
    """
    if not visible and gpus_per_engine == 1:
        return EnginePlaces(((),) * num_engines)
    sets = [
        tuple(visible[first : first + gpus_per_engine])
        for first in range(0, len(visible) - gpus_per_engine + 1, gpus_per_engine)
    ]
    if not sets:
        message = f"an engine needs {gpus_per_engine} GPUs, and {len(visible)} are visible"
        raise ConfigError(message, hint="lower ``EngineSpec.tensor_parallel_size``, or use a machine with more GPUs")
    return EnginePlaces(tuple(sets[number % len(sets)] for number in range(num_engines)))


def _num_cores() -> int:
    return len(os.sched_getaffinity(0))
