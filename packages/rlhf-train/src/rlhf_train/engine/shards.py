"""A model's trained weights and optimizer states in files, for any number of ranks and any ZeRO stage.

Each rank writes the parts that it keeps, with their position in the whole tensor. A reader puts the parts together, so
that a run with other ranks or another ZeRO stage can read them, each rank only what it needs.

torch's distributed checkpoint does not replace this file. It keeps the positions of parts in a pickle, which
runs the code of whoever wrote it when it is read, and its saving is a collective, in which all ranks wait for one that
died. It knows rectangular parts of tensors: those of a flattened tensor, which begin and end within rows, need
a planner that is longer than the reader here.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from rlhf_data.errors import CheckpointError
from rlhf_data.safety import open_to_others

# Names of tensors; see `Shards`.
WEIGHT, MOMENTUM = "weight", "momentum_buffer"
MOMENTS = ("exp_avg", "exp_avg_sq", MOMENTUM)
COLUMN_PARTS = "column_parts"  # among the numbers; see `column_parts`


class Shards:
    """Parts of flattened tensors by name, and the numbers that belong to them.

    A name is `KIND/WEIGHT`, where `WEIGHT` is a parameter's name in the module. Kinds are "weight" (in float32),
    "exp_avg" and "exp_avg_sq" (moments of AdamW), "momentum_buffer" (of Muon), and "average" (the moving average of the
    weights).

    Attributes:
        tensors: [n] each, in host memory.
        starts: position of each tensor's first element in the whole flattened tensor.
        numbers: JSON values, such as the number of updates: equal on all ranks, or a dictionary by weight.
        copies: whether `add` copies what is in host memory already, which may have no room for it twice. Otherwise it
            must not change before `write` is done.
    """

    def __init__(self) -> None:
        self.tensors: dict[str, Tensor] = {}
        self.starts: dict[str, int] = {}
        self.numbers: dict[str, Any] = {}
        self.copies = True

    def add(self, name: str, part: Tensor, start: int = 0) -> None:
        """Copy `part` [n] to host memory; its first element is number `start` of the whole tensor."""
        self.tensors[name] = part.detach().to("cpu", copy=self.copies)
        self.starts[name] = start

    def write(self, path: Path) -> None:
        """Write a safetensors file. Raises OSError or SafetensorError, for example for a full disk."""
        save_file(self.tensors, path, {"starts": json.dumps(self.starts), "numbers": json.dumps(self.numbers)})
        open_to_others(path)


class ShardReader:
    """Reads tensors from the files of all ranks.

    Args:
        paths: files that `Shards.write` wrote, one per rank.

    Attributes:
        numbers: see `Shards`.
        column_parts: in which form to read weights; see the function of this name. The files may have another.

    Raises:
        CheckpointError: there are no files, or one of them cannot be read.
    """

    def __init__(self, paths: list[Path]) -> None:
        if not paths:
            raise CheckpointError("the checkpoint has no files for this model", hint="was it trained in that run?")
        self._parts: dict[str, list[tuple[int, int, Any]]] = {}
        self.numbers: dict[str, Any] = {}
        self.column_parts: dict[str, list[int]] = {}
        for path in paths:
            try:
                file = safe_open(path, framework="pt")
                described = file.metadata()
                for name, number in json.loads(described["numbers"]).items():
                    # Numbers by weight lie in the files of the ranks that keep the weights.
                    self.numbers[name] = self.numbers.get(name, {}) | number if isinstance(number, dict) else number
                for name, start in json.loads(described["starts"]).items():
                    [size] = file.get_slice(name).get_shape()
                    self._parts.setdefault(name, []).append((start, size, file))
            except (OSError, SafetensorError, KeyError, ValueError, TypeError) as error:
                hint = "remove the folder of this checkpoint: the run then continues from the one before"
                raise CheckpointError(f"{path} cannot be read: {error}", hint=hint) from error

    def __contains__(self, name: str) -> bool:
        return name in self._parts

    def check(self, sizes: Mapping[str, int]) -> None:
        """Raise CheckpointError, on all ranks alike, unless the files have the weights of a model.

        `sizes` are the numbers of elements of its trained weights.
        """
        saved = {
            name.removeprefix(f"{WEIGHT}/"): max(start + size for start, size, _ in parts)
            for name, parts in self._parts.items()
            if name.startswith(f"{WEIGHT}/")
        }
        for name in sorted(sizes.keys() | saved.keys()):
            found, wanted = saved.get(name, 0), sizes.get(name, 0)
            if found != wanted:
                message = f"the checkpoint has {found} elements of {name}, and the model {wanted}"
                raise CheckpointError(message, hint="it belongs to another model, or a file of a rank is missing")

    def whole(self, name: str) -> Tensor:
        """Return all elements of a flattened tensor that no rank shares with another."""
        [(_, size, _)] = self._parts[name]
        return self.read(name, 0, size)

    def read(self, name: str, start: int, size: int) -> Tensor:
        """Return `size` elements of a flattened tensor, from number `start`.

        Raises CheckpointError when the files do not have all of them.
        """
        weight = name.partition("/")[2]
        count, *shape = self.numbers.get(COLUMN_PARTS, {}).get(weight, [1])
        own, *own_shape = self.column_parts.get(weight, [1])
        if count == own:
            return self._read(name, start, size)
        num_rows, num_columns = shape or own_shape
        parts = self._read(name, 0, num_rows * num_columns).view(count, num_rows, -1)
        rows = parts.transpose(0, 1).reshape(num_rows, own, -1)
        return rows.transpose(0, 1).flatten()[start : start + size]

    def _read(self, name: str, start: int, size: int) -> Tensor:
        parts = sorted(self._parts.get(name, []), key=lambda part: part[0])
        dtype = parts[0][2].get_slice(name)[:0].dtype if parts else torch.float32
        result = torch.empty(size, dtype=dtype)
        have = start
        for begin, length, file in parts:
            low = max(begin, have)
            high = min(begin + length, start + size)
            if begin <= have and low < high:
                result[low - start : high - start] = file.get_slice(name)[low - begin : high - begin]
                have = high
        if have != start + size:
            message = f"the checkpoint lacks elements {have} to {start + size - 1} of {name}"
            raise CheckpointError(message, hint="it belongs to another model, or a file of a rank is missing")
        return result


@torch.no_grad()
def load_weights(module: torch.nn.Module, reader: ShardReader) -> None:
    """Set the trained weights of a module, which has all of each, to the saved ones.

    Raises CheckpointError when the files lack a weight of this model.
    """
    for name, weight in module.named_parameters():
        if weight.requires_grad:
            weight.copy_(reader.read(f"{WEIGHT}/{name}", first_element(weight), weight.numel()).view_as(weight))


class WeightPart(NamedTuple):
    """The part of a weight that this rank has: number `number`, from 0, of `count` parts along dimension `dim`.

    It is the attribute `part` of a weight that ranks divide; see `engine.tensor_parallel`.
    """

    dim: int
    number: int
    count: int


def part_of(weight: Tensor) -> WeightPart:
    """Return which part of a weight this rank has."""
    return getattr(weight, "part", WeightPart(0, 0, 1))


def first_element(weight: Tensor) -> int:
    """Return the position of the first element of this rank's part in the whole weight, flattened part by part."""
    return part_of(weight).number * weight.numel()


def column_parts(module: torch.nn.Module) -> dict[str, list[int]]:
    """Return, for each weight whose columns ranks divide, the number of parts, and rows and columns of the whole.

    The elements of such a weight come in another order, part by part. Parts of rows leave the order as it is.
    """
    divided = {name: weight for name, weight in module.named_parameters() if part_of(weight).dim == 1}
    return {name: [part_of(w).count, len(w), part_of(w).count * w.shape[1]] for name, w in divided.items()}


class WeightSlice(NamedTuple):
    """Where this rank keeps a part of one weight; of size 0 if others keep all of it.

    Attributes:
        name: of the weight.
        start: first element of the part in the flattened weight.
        size: elements of the part.
        flat: float32 tensor of the optimizer that holds the part, among others.
        offset: first element of the part in `flat`.
    """

    name: str
    start: int
    size: int
    flat: Tensor
    offset: int

    def cut(self, tensor: Tensor) -> Tensor:
        """Return the part of `tensor`, which is shaped like `flat`, as a view."""
        return tensor.detach().view(-1)[self.offset : self.offset + self.size]


def save_moments(shards: Shards, kept: list[WeightSlice], states: Mapping[Tensor, Mapping[str, Tensor]]) -> None:
    """Add master weights and the moments of AdamW or Muon to `shards`.

    Args:
        shards: receives them.
        kept: the parts that this rank keeps.
        states: of the optimizer, by flat tensor; empty before the first update.
    """
    steps = {}
    for part in kept:
        shards.add(f"{WEIGHT}/{part.name}", part.cut(part.flat), part.start)
        state = states.get(part.flat) or {}
        for key in MOMENTS:
            if key in state:
                shards.add(f"{key}/{part.name}", part.cut(state[key]), part.start)
        if "step" in state:
            steps[part.name] = int(state["step"])
    shards.numbers["updates_by_weight"] = steps


@torch.no_grad()
def load_moments(
    reader: ShardReader,
    kept: list[WeightSlice],
    states: Any,
    *,
    step_on_device: bool,
    dtype: torch.dtype = torch.float32,
) -> None:
    """Set master weights and the moments of AdamW or Muon to those that `save_moments` saved.

    Args:
        reader: of the files of all ranks.
        kept, states: as for `save_moments`.
        step_on_device: whether AdamW counts its steps on the device, as its fused form does.
        dtype: of the optimizer's moments. Saved ones of another type are rounded to it.

    Raises:
        CheckpointError: the files lack a weight of this model.
    """
    for part in kept:
        part.cut(part.flat).copy_(reader.read(f"{WEIGHT}/{part.name}", part.start, part.size))
        saved = [key for key in MOMENTS if f"{key}/{part.name}" in reader]
        if not saved:
            continue
        state = states[part.flat]
        for key in saved:
            if key not in state:
                state[key] = torch.zeros_like(part.flat, dtype=dtype)
            part.cut(state[key]).copy_(reader.read(f"{key}/{part.name}", part.start, part.size))
        if MOMENTUM in saved:
            continue  # Muon counts no updates
        num_updates = reader.numbers["updates_by_weight"].get(part.name, reader.numbers["num_updates"])
        device = part.flat.device if step_on_device else "cpu"
        state["step"] = torch.tensor(float(num_updates), device=device)
