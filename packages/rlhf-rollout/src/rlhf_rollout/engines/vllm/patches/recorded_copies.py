"""Repeats the recorded copies of an update: in place, where that is all that loading takes, or layer by layer.

vLLM's loader spends most of an update in Python.
"""

from collections import Counter
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from rlhf_rollout.engines.vllm.names import (
    AttentionLayerBase,
    QuantizeMethodBase,
    UnquantizedEmbeddingMethod,
    UnquantizedLinearMethod,
    _layerwise_process,
    get_layerwise_info,
    materialize_layer,
)
from rlhf_rollout.engines.vllm.patches.copies import Copy, CopyRecord, CopyRecorder

_PLAIN_METHODS = (UnquantizedLinearMethod, UnquantizedEmbeddingMethod)


class InPlaceCheck:
    """Finds out while vLLM loads an update whether the copies alone would have left the same parameters.

    Attributes:
        problem: why they would not; None so far.
    """

    def __init__(self, model: nn.Module) -> None:
        self.problem = next(filter(None, (_processing(path, layer) for path, layer in model.named_modules())), None)
        self._pending: list[tuple[Copy, Tensor, Tensor]] = []

    def compare(self, recorder: CopyRecorder, weights: Sequence[tuple[str, Tensor]]) -> None:
        """Compare what was loaded of the last weights, and of earlier ones whose layers are loaded by now."""
        if self.problem is None:
            self._pending += [made for name, weight in weights for made in recorder.made(name, weight)]
            self._compare(at_end=False)

    def finish(self) -> None:
        """Compare the rest, once vLLM has put the update in force."""
        self._compare(at_end=True)

    def _compare(self, *, at_end: bool) -> None:
        pending = self._pending
        self._pending = []
        for copy, loaded_as, source in pending:
            layer = copy.target.layer
            if not at_end and get_layerwise_info(layer).can_load():
                self._pending.append((copy, loaded_as, source))
                continue
            found = getattr(layer, copy.target.name, None)
            same_form = (
                isinstance(found, Tensor)
                and (found.shape, found.dtype) == (loaded_as.shape, loaded_as.dtype)
                and found.is_contiguous()
            )
            if not same_form or not torch.equal(copy.place.of(found.data), source.to(found.dtype)):
                self.problem = self.problem or f"vLLM changes {copy.target} after it has loaded it"


class InPlace:
    """Repeats the copies of a record in the model's own parameters, and counts what has been written in an update."""

    def __init__(self, model: nn.Module, record: CopyRecord) -> None:
        self._record = record
        targets = {copy.target for copies in record.copies.values() for copy in copies}
        targets |= {target for target, _ in record.zeros}
        self._tensors = {target: getattr(target.layer, target.name) for target in targets}
        self._addresses = {target: tensor.data_ptr() for target, tensor in self._tensors.items()}
        self._places = {
            name: [copy.place.of(self._tensors[copy.target].data) for copy in copies]
            for name, copies in record.copies.items()
        }
        self._zeros = [part.of(self._tensors[target].data) for target, part in record.zeros]
        # Attention may keep tensors that depend on the weights of other layers, such as MLA's absorbed projections.
        self._attention = [layer for layer in model.modules() if _finishes_attention(layer)]
        self._written: Counter[str] = Counter()

    def have_moved(self) -> bool:
        """Return whether a layer has another tensor, or other memory, than when the record was made."""
        return any(
            getattr(target.layer, target.name, None) is not tensor or tensor.data_ptr() != self._addresses[target]
            for target, tensor in self._tensors.items()
        )

    def begin(self) -> None:
        """Begin an update. What no weight brings, such as rows that pad a vocabulary, may have been lost in sleep."""
        self._written.clear()
        if self._zeros:
            torch._foreach_zero_(self._zeros)

    def write(self, sources: Mapping[str, Sequence[Tensor]]) -> None:
        """Write the sources of the copies of some weights, by the weights' names, as one batch of copies."""
        places = [place for name in sources for place in self._places[name]]
        if places:
            torch._foreach_copy_(places, [source for parts in sources.values() for source in parts])
        for name in sources:
            for copy in self._record.copies[name]:
                self._written[copy.target.path] += copy.place.numel

    def count(self, numel: Mapping[str, int]) -> None:
        """Count elements that were written otherwise, by layer."""
        self._written.update(numel)

    def incomplete(self) -> list[str]:
        """Return the layers that have not been written whole in this update."""
        return [path for path, numel in self._record.numel.items() if self._written[path] < numel]

    def finish(self, dtype: torch.dtype) -> None:
        """Put the weights in force. `dtype` is that of the model."""
        for layer in self._attention:
            layer.process_weights_after_loading(dtype)


class Staging:
    """Repeats the copies of a record in layers that vLLM has prepared for loading, during one update.

    With a layer's last copy, vLLM processes the layer.
    """

    def __init__(self, record: CopyRecord) -> None:
        self._record = record
        self._num_copied: Counter[nn.Module] = Counter()

    def write(self, sources: Mapping[str, Sequence[Tensor]]) -> None:
        """Write the sources of the copies of some weights, by the weights' names."""
        for name, parts in sources.items():
            for copy, source in zip(self._record.copies[name], parts, strict=True):
                self._write(copy, source)

    def _write(self, copy: Copy, source: Tensor) -> None:
        layer = copy.target.layer
        info = get_layerwise_info(layer)
        if not info.can_load():
            return  # it is loaded already
        if layer not in self._num_copied:
            materialize_layer(layer, info)
            for target, part in self._record.zeros:
                if target.layer is layer:
                    part.of(getattr(layer, target.name).data).zero_()
        copy.place.of(getattr(layer, copy.target.name).data).copy_(source)
        info.load_numel += copy.place.numel
        self._num_copied[layer] += 1
        if self._num_copied[layer] == self._record.num_copies[layer]:
            _layerwise_process(layer, info)


def _finishes_attention(layer: nn.Module) -> bool:
    return isinstance(layer, AttentionLayerBase) and hasattr(layer, "process_weights_after_loading")


def _processing(path: str, layer: nn.Module) -> str | None:
    """Return a message if vLLM does more than to load a layer's parameters; None if it does not."""
    method = getattr(layer, "quant_method", None)
    if isinstance(method, QuantizeMethodBase):
        # On a CPU a linear layer computes with a packed copy.
        is_plain = type(method) in _PLAIN_METHODS and not hasattr(layer, "cpu_linear")
    else:
        is_plain = isinstance(layer, AttentionLayerBase) or not hasattr(layer, "process_weights_after_loading")
    return None if is_plain else f"vLLM processes the weights of {path} ({type(layer).__name__})"
