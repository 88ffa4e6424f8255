"""The optimizer's states in host memory while another process has the device's."""

from collections.abc import Iterable

import torch
from torch import Tensor


class HostStates:
    """Moves tensors to host memory and back, any number of times.

    Host memory is allocated once, and pinned: allocating it takes longer than the copies. While a tensor is away, it
    can be read where it is. Views of it, which must not be used meanwhile, are valid again when it is back.

    Args:
        is_frozen: whether the values never change, so that they are copied to host memory once.
    """

    def __init__(self, *, is_frozen: bool = False) -> None:
        self._is_frozen = is_frozen
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
        for tensor in kept:
            is_new = tensor not in self._hosts
            if is_new:
                self._hosts[tensor] = torch.empty_like(tensor, device="cpu", pin_memory=tensor.is_cuda)
            if is_new or not self._is_frozen:
                self._hosts[tensor].copy_(tensor, non_blocking=True)
            self._away.append((tensor, tensor.data))
        if torch.cuda.is_available():
            torch.cuda.synchronize()
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
