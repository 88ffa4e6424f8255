"""Tensors in host memory, or on a disk, while the device has no room for them: states of optimizers, frozen models."""

import mmap
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from itertools import accumulate
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

import torch
from torch import Tensor

from rlhf_data.errors import EngineError

_ALIGNMENT = 256  # bytes
_MAX_THREADS = 16  # the other ranks of the machine use its cores, too


class _Pinned(mmap.mmap):
    """Memory that a GPU reads and writes without the CPU, at the speed of the bus.

    Forked processes do not get this memory. If they did, the first write to a page after the fork would go to a copy
    elsewhere, which the GPU does not know.
    """

    _unpin: Callable[[int], Any] | None = None

    def __new__(cls, size: int) -> "_Pinned":
        """Reserve `size` bytes. They are private, because the system can give private memory in large pages."""
        memory = super().__new__(cls, -1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        memory.madvise(mmap.MADV_DONTFORK)
        with suppress(OSError):  # a kernel without large pages
            memory.madvise(mmap.MADV_HUGEPAGE)
        return memory

    def tensor(self) -> Tensor:
        """Return all bytes, which keep this memory alive, as zeros."""
        memory = torch.frombuffer(self, dtype=torch.uint8)
        with _cpu_threads():  # the system gives a page at its first write; pinning would get them one by one
            memory.zero_()
        runtime = torch.cuda.cudart()
        if status := int(runtime.cudaHostRegister(memory.data_ptr(), memory.nbytes, 0)):
            message = f"{memory.nbytes / 2**30:.1f} GiB of host memory cannot be pinned: CUDA error {status}"
            hint = "use a machine with more memory, or drop ``OptimizerSpec.offload``, ``ModelSpec.offload``"
            raise EngineError(message, hint=f"{hint} or the flags for sleep")
        self._address = memory.data_ptr()
        self._unpin = runtime.cudaHostUnregister
        return memory

    def __del__(self) -> None:
        if self._unpin is not None:
            self._unpin(self._address)


@contextmanager
def _cpu_threads() -> Iterator[None]:
    """Have PyTorch use the CPU's cores within a `with` block. Ray starts its workers with one thread each."""
    before = torch.get_num_threads()
    torch.set_num_threads(max(before, min(len(os.sched_getaffinity(0)), _MAX_THREADS)))
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _file_memory(folder: str, size: int) -> Tensor:
    """Return bytes of a file in `folder`, all zeros. It has no name, so that it goes with the process, however it ends.

    Raises EngineError when there is no place for it.
    """
    try:
        Path(folder).mkdir(parents=True, exist_ok=True)
        with TemporaryFile(dir=folder) as file:
            os.posix_fallocate(file.fileno(), 0, size)  # a disk that is full would end the process later
            return torch.frombuffer(mmap.mmap(file.fileno(), size), dtype=torch.uint8)
    except OSError as error:
        message = f"{folder} has no place for {size / 2**30:.1f} GiB of the optimizer's states: {error.strerror}"
        raise EngineError(
            message, hint="name a folder on a disk with more space in ``OptimizerSpec.offload_path``"
        ) from error


def zeros_on_host(like: Sequence[Tensor], *, pinned: bool, folder: str | None = None) -> list[Tensor]:
    """Return zeros in host memory with the shapes and types of tensors, contiguous.

    They share one piece of memory: torch's allocator would round each size up to a power of two. With `pinned`, copies
    from and to a GPU need no CPU. With `folder`, the memory is that of a file there, and never pinned: the system keeps
    parts of it in memory, as it has room. Raises EngineError when either is not possible.
    """
    ends = list(accumulate(-(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT for tensor in like))
    total = ends[-1] if ends else 0
    if total and folder is not None:
        memory = _file_memory(folder, total)
    else:
        memory = _Pinned(total).tensor() if pinned and total else torch.zeros(total, dtype=torch.uint8)
    starts = [0, *ends[:-1]]
    pieces = [memory[start : start + tensor.nbytes] for start, tensor in zip(starts, like, strict=False)]
    return [piece.view(tensor.dtype).view(tensor.shape) for piece, tensor in zip(pieces, like, strict=True)]


class HostStates:
    """Moves tensors to host memory and back, any number of times.

    Host memory is allocated once, and pinned: allocating it takes longer than the copies. While a tensor is away, it
    can be read where it is. Views of it, which must not be used meanwhile, are valid again when it is back.

    Args:
        is_frozen: whether the values never change, so that they are copied to host memory once.
        folder: see `zeros_on_host`.
    """

    def __init__(self, *, is_frozen: bool = False, folder: str | None = None) -> None:
        self._is_frozen = is_frozen
        self._folder = folder
        self._hosts: dict[Tensor, Tensor] = {}
        self._away: list[tuple[Tensor, Tensor]] = []  # a tensor, and another one that kept its place on the device
        self._dropped: list[Tensor] = []

    @torch.no_grad()
    def offload(self, kept: Iterable[Tensor], dropped: Iterable[Tensor] = ()) -> None:
        """Free the device's memory of tensors.

        Args:
            kept: tensors that share their memory with nothing but views of them. They must be the same at every call;
                further ones may be added.
            dropped: likewise, but their values are lost. They cannot be read while away.
        """
        kept = list(kept)
        new = [tensor for tensor in kept if tensor not in self._hosts]
        pinned = any(tensor.is_cuda for tensor in new)
        self._hosts |= zip(new, zeros_on_host(new, pinned=pinned, folder=self._folder), strict=True)
        changed = new if self._is_frozen else kept
        for tensor in changed:
            self._hosts[tensor].copy_(tensor, non_blocking=True)
        if changed and torch.cuda.is_available():
            torch.cuda.synchronize()
        self._away = [(tensor, tensor.data) for tensor in kept]
        for tensor, place in self._away:
            tensor.data = self._hosts[tensor]
            place.untyped_storage().resize_(0)
        self._dropped = list(dropped)
        for tensor in self._dropped:
            tensor.untyped_storage().resize_(0)

    @torch.no_grad()
    def reload(self) -> None:
        """Bring back what `offload` moved. The values of what it dropped are arbitrary."""
        for tensor, place in self._away:
            place.untyped_storage().resize_(place.nbytes)
            place.copy_(self._hosts[tensor], non_blocking=True)
            tensor.data = place
        for tensor in self._dropped:
            tensor.untyped_storage().resize_(tensor.nbytes)
        self._away = []
        self._dropped = []


class RestingModel:
    """A frozen model whose weights are in host memory while it does not run. A call runs its forward pass.

    Args:
        run: the forward pass.
        weights: the model's weights, on the device.
    """

    def __init__(self, run: Callable[..., Any], weights: Iterable[Tensor]) -> None:
        self._run = run
        self._weights = list(weights)
        self._states = HostStates(is_frozen=True)
        self._is_awake = False
        self._states.offload(self._weights)
        torch.cuda.empty_cache()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run one pass. Its memory stays reserved for this process, which is about to use it for other passes."""
        with self._on_device():
            return self._run(*args, **kwargs)

    @contextmanager
    def awake(self) -> Iterator[None]:
        """Have the weights on the device within a `with` block; give the memory back to all processes after it."""
        with self._on_device():
            yield
        torch.cuda.empty_cache()

    @contextmanager
    def _on_device(self) -> Iterator[None]:
        if self._is_awake:
            yield
            return
        self._states.reload()
        self._is_awake = True
        try:
            yield
        finally:
            self._is_awake = False
            self._states.offload(self._weights)


def awake(model: Any) -> AbstractContextManager[None]:
    """Return `awake` of a model that rests, as `RestingModel` does, and a context that does nothing for any other."""
    return getattr(model, "awake", nullcontext)()
