"""The base of all media: memory that the trainer writes and engines read. Does not import torch."""

from collections.abc import Callable, Sequence
from importlib import import_module
from typing import TYPE_CHECKING, Any, ClassVar

from rlhf_data.errors import WeightSyncError
from rlhf_rollout.weights import Medium

if TYPE_CHECKING:
    import torch

OpenBuffer = Callable[[int, Sequence[str]], "BucketBuffer"]
HOST_WINDOW = 3  # buffers in the host's memory, each of the size of a bucket
OpenMemory = Callable[[Any, "torch.device"], "torch.Tensor"]


class BucketBuffer:
    """Memory that the trainer writes and engines read. A medium is a subclass, named `Buffer` in the medium's file.

    A buffer is opened for a size in bytes and the names of engines. A medium overrides the methods that do something.

    Attributes:
        window: how many buffers an update uses in turn, so that an engine may be behind the others by as many buckets.
        holds_two: whether the next filling may be written while engines read the last one, where `window` is 1.
        is_mapped: whether engines map the memory, which takes time, so that it is worth keeping for the next update.
        may_read_again: whether an engine tries a second time to read what did not arrive. It does not where that might
            wait for ever: CUDA's state and a broadcast's are not known after a failure.
        open_memory: returns the memory of a handle as a flat uint8 tensor, in an engine. Raises EngineError for what
            may be transient, and WeightSyncError for memory that the engine can never open.
        data: [size_bytes] uint8, the memory on the trainer's side, for the next filling.
        handles: one per engine, with which the engine opens the memory.
    """

    window: ClassVar[int] = 1
    holds_two: ClassVar[bool] = False
    is_mapped: ClassVar[bool] = False
    may_read_again: ClassVar[bool] = False
    open_memory: ClassVar[OpenMemory]
    data: "torch.Tensor"
    handles: Sequence[Any]

    @classmethod
    def sender(cls, workers_per_engine: int, host: str) -> OpenBuffer:
        """Return the function that opens buffers. See `WeightSource` for the arguments."""
        return cls

    @classmethod
    def receiver(cls) -> OpenMemory:
        """Return the function that opens memory for one process of an engine."""
        return cls.open_memory

    def reserve(self, end_bytes: int) -> None:
        """Make the first `end_bytes` bytes of `data` writable. Raises WeightSyncError when there is no room."""

    def publish(self) -> None:
        """Wait until other processes can read what was written, or begin to send it. `handles` are then valid."""

    def settle(self) -> str | None:
        """Wait until what was published last may be overwritten, once all engines have answered.

        Returns why no engine can receive further buckets, or None if they can.
        """

    def close(self) -> None:
        """Free the memory. Never raises."""


def no_memory(size_bytes: int, reason: object) -> WeightSyncError:
    """Return the error of a host that has no memory for a buffer."""
    message = f"the host has no memory for {size_bytes} bytes of weights: {reason}"
    return WeightSyncError(message, hint="end other programs, or use a smaller model")


def buffer_class(medium: Medium) -> type[BucketBuffer]:
    """Return the class that holds both halves of a medium."""
    return import_module(f"rlhf_rollout.weights.{medium}").Buffer
