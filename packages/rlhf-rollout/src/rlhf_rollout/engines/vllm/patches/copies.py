"""Records the copies by which a loader brings weights into parameters, so that later updates need only repeat them."""

from bisect import bisect_right
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import chain
from math import prod
from typing import Any, NamedTuple
from weakref import ref

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

_COPY = torch.ops.aten.copy_.default
_FILLS = (torch.ops.aten.fill_.Scalar, torch.ops.aten.zero_.default)


class Target(NamedTuple):
    """A parameter or buffer that weights are loaded into.

    Attributes:
        path: name of the layer in the model.
        layer: the module that has the tensor as an attribute.
        name: name of this attribute.
    """

    path: str
    layer: nn.Module
    name: str

    def __str__(self) -> str:
        return f"{self.path}.{self.name}"


class Part(NamedTuple):
    """A part of a tensor, in elements from the tensor's first."""

    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    @property
    def numel(self) -> int:
        """Number of elements."""
        return prod(self.size)

    def of(self, tensor: Tensor, start: int = 0) -> Tensor:
        """Return this part of what begins `start` elements after the first of `tensor`, as a view."""
        return tensor.as_strided(self.size, self.stride, tensor.storage_offset() + start + self.offset)


class Copy(NamedTuple):
    """One copy: part of a weight into part of a parameter."""

    target: Target
    place: Part
    source: Part


class CopyRecord:
    """The copies of one whole update.

    Args:
        shapes: the shape of each weight that arrived, by its name.
        copies: made of each weight, by its name; none for a weight that the loader leaves out.
        zeros: parts that the loader sets to zero, because no weight brings them.

    Attributes:
        shapes, copies, zeros: as given.
        num_copies: by layer.
        numel: elements that are copied into each layer, by its name in the model.
    """

    def __init__(
        self,
        shapes: Mapping[str, tuple[int, ...]],
        copies: Mapping[str, Sequence[Copy]],
        zeros: Sequence[tuple[Target, Part]],
    ) -> None:
        self.shapes = shapes
        self.copies = copies
        self.zeros = zeros
        self.num_copies: Counter[nn.Module] = Counter()
        self.numel: Counter[str] = Counter()
        for copy in chain.from_iterable(copies.values()):
            self.num_copies[copy.target.layer] += 1
            self.numel[copy.target.path] += copy.place.numel


class CopyRecorder(TorchDispatchMode):
    """Watches a loader while it is entered, and notes what the loader writes into `targets`.

    The order in which targets are written does not matter to the record, so it holds for buckets of any size.

    Args:
        targets: tensors that the loader writes first, on any device; they must live as long as this object.

    Attributes:
        problem: why the loader's work cannot be repeated as copies of weights; None so far.
    """

    def __init__(self, targets: Mapping[Target, Tensor]) -> None:
        super().__init__()
        self._tensors = targets
        self._targets: dict[int, Target] = {}
        for target, tensor in targets.items():
            self._targets.setdefault(_storage(tensor), target)
        self._shapes: dict[str, tuple[int, ...]] = {}
        # Keys of dicts, as a loader may make the same copy twice: vLLM counts elements by loading into biases.
        self._copies: dict[str, dict[Copy, None]] = {}
        self._zeros: dict[tuple[Target, Part], None] = {}
        self._written: set[Target] = set()
        self._sources: dict[int, list[tuple[int, str, ref[Tensor]]]] = {}
        self.problem: str | None = None

    def expect(self, weights: Sequence[tuple[str, Tensor]]) -> None:
        """Take the weights as sources of copies as long as they live.

        vLLM may keep a weight of one bucket until the rest of its layer arrives, and then copies it again.
        """
        for known in self._sources.values():
            known[:] = [entry for entry in known if entry[2]() is not None]
        for name, weight in weights:
            self._shapes[name] = tuple(weight.shape)
            self._copies.setdefault(name, {})
            begin = weight.storage_offset() * weight.itemsize
            self._sources.setdefault(_storage(weight), []).append((begin, name, ref(weight)))
        for known in self._sources.values():
            known.sort(key=lambda entry: entry[0])

    def made(self, name: str, weight: Tensor) -> list[tuple[Copy, Tensor, Tensor]]:
        """Return the copies that were made of a weight, each with its target as it was written and its source."""
        return [(copy, self._tensors[copy.target], copy.source.of(weight)) for copy in self._copies[name]]

    def finish(self) -> CopyRecord:
        """Return the record of all copies since the beginning. `problem` tells whether it can be used.

        It can if every element of each target that is a parameter, or is written at all, was written by exactly one
        copy. The attribute of a layer that shares its parameter with a written one need not be written itself.
        """
        copies = {name: list(found) for name, found in self._copies.items()}
        parts = {target: [] for target in self._written}
        for target, part in chain(self._zeros, (copy[:2] for copy in chain.from_iterable(copies.values()))):
            parts[target].append(part)
        written = {id(getattr(target.layer, target.name, None)) for target in parts}
        for target, tensor in self._tensors.items():
            is_shared = target not in parts and id(getattr(target.layer, target.name, None)) in written
            if target in parts or (isinstance(tensor, nn.Parameter) and not is_shared):
                reason = _gap(tensor, parts.get(target, []))
                if reason is not None and self.problem is None:
                    self.problem = f"{target} {reason}"
        return CopyRecord(self._shapes, copies, list(self._zeros))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Note a write after it has been made."""
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if func._schema.is_mutable:
            written = [*args[:1], kwargs.get("out")]
            for tensor in written + (list(args[0]) if isinstance(args[0], list | tuple) else []):
                if isinstance(tensor, Tensor) and tensor.numel() and _storage(tensor) in self._targets:
                    self._note(func, tensor, args[1:])
        return result

    def _note(self, func: Any, place: Tensor, values: Sequence[Any]) -> None:
        target = self._targets[_storage(place)]
        whole = self._tensors[target]
        part = Part(tuple(place.shape), place.stride(), place.storage_offset() - whole.storage_offset())
        if func is _COPY and _same(place, values[0]):
            return  # vLLM copies a layer's old tensors into themselves where it has not made new ones
        source = self._find(values[0].expand(place.shape)) if func is _COPY else None
        # Rows that pad a vocabulary. A fill alone may be the value of a weight that happens to be zero.
        is_padding = func in _FILLS and target in self._written and not any(float(value) for value in values)
        if source is None and not is_padding:
            self.problem = self.problem or f"{target} is written with values that are not those of a weight"
        elif place.dtype != whole.dtype or not place.is_contiguous():
            self.problem = self.problem or f"{target} is not written in contiguous parts"
        elif source is None:
            self._zeros[target, part] = None
        else:
            name, read = source
            self._copies.setdefault(name, {})[Copy(target, part, read)] = None
            self._written.add(target)

    def _find(self, source: Tensor) -> tuple[str, Part] | None:
        """Return the name of the weight that `source` is a view of, and which part; None if there is none."""
        known = self._sources.get(_storage(source), [])
        begin = source.storage_offset() * source.itemsize
        index = bisect_right(known, begin, key=lambda entry: entry[0]) - 1
        if index < 0:
            return None
        start, name, reference = known[index]
        weight = reference()
        if weight is None or source.dtype != weight.dtype:
            return None
        return name, Part(tuple(source.shape), source.stride(), (begin - start) // source.itemsize)


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _same(one: Tensor, other: Tensor) -> bool:
    places = [(_storage(tensor), tensor.storage_offset(), tensor.stride()) for tensor in (one, other)]
    return places[0] == places[1]


def _gap(tensor: Tensor, parts: Sequence[Part]) -> str | None:
    """Return what is wrong with `parts`, each contiguous, as the division of a tensor; None if they divide it."""
    if not tensor.is_contiguous():
        return "is not contiguous"
    end = 0
    for part in sorted(parts, key=lambda part: part.offset):
        if part.offset < end:
            return "is written twice in part"
        if part.offset > end:
            break
        end += part.numel
    return None if end == tensor.numel() else "is not written whole"
