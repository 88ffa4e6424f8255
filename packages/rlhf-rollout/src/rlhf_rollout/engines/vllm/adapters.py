"""Takes an adapter that arrives in buckets, in place of weights, or reads one. Runs in vLLM's workers."""

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from rlhf_data.errors import WeightSyncError
from rlhf_rollout.engines.adapter_files import WEIGHTS_FILE, LoraModule, layer_of, read_adapter
from rlhf_rollout.engines.vllm import weights
from rlhf_rollout.engines.vllm.weights import BucketTransferEngine, BucketUpdateInfo, WeightTransferEngineFactory
from rlhf_rollout.weights import MEDIA
from rlhf_rollout.weights.bucket import TensorSlot, check_tensor

BucketWorkerExtension = weights.BucketWorkerExtension  # by the name of this module, vLLM imports it in each worker


class AdapterTransferEngine(BucketTransferEngine):
    """Keeps the adapter that arrived last. The weights under it stay those of the model's folder.

    Attributes:
        adapter: its tensors by name, the two matrices of each layer: `LAYER.lora_A.weight` [rank, in], and
            `LAYER.lora_B.weight` [out, rank] with the adapter's scale. Empty before the first update.
    """

    def __init__(self, config: Any, vllm_config: Any, device: torch.device, model: torch.nn.Module) -> None:
        super().__init__(config, vllm_config, device, model)
        self._rank = vllm_config.additional_config[weights.SETTINGS]["adapter_rank"]
        self._arriving: dict[str, torch.Tensor] = {}
        self.adapter: dict[str, torch.Tensor] = {}

    def start_weight_update(self) -> None:
        """Wait for an adapter."""
        self._arriving = {}

    def receive_weights(self, update_info: BucketUpdateInfo) -> None:
        """Take one bucket. Raises WeightSyncError when a name or shape does not fit."""
        for slot in update_info.bucket.tensors:
            self._check_slot(slot)
        for part in self._reader.read_parts(update_info.bucket):
            self._arriving.update(part)

    def finish_weight_update(self) -> None:
        """Replace the adapter before by the one that arrived, which must have all tensors that the old one has."""
        layers = {name.rpartition(".lora_")[0] for name in [*self.adapter, *self._arriving]}
        needed = [f"{layer}.lora_{matrix}.weight" for layer in sorted(layers) for matrix in "AB"]
        self.missing = [name for name in needed or ["an adapter"] if name not in self._arriving]
        if not self.missing:
            self.adapter = self._arriving
        self._reader.end_update()

    def _check_slot(self, slot: TensorSlot) -> None:
        layer, _, matrix = slot.name.rpartition(".lora_")
        if matrix not in ("A.weight", "B.weight"):
            message = f"the weight {slot.name!r} arrived at an engine that takes adapters of rank {self._rank}"
            raise WeightSyncError(message, hint="send the adapter alone, or build the engine with ``adapter_rank=0``")
        weight = (self._expected or {}).get(f"{layer}.weight")
        if weight is not None:
            expected = (self._rank, weight[1]) if matrix[0] == "A" else (weight[0], self._rank)
            check_tensor(slot, expected, [])


def stored_adapter(folder: str) -> dict[str, torch.Tensor]:
    """Return the tensors of an adapter in peft's layout, in float32, as `AdapterTransferEngine.adapter` has them."""
    scales = read_adapter(LoraModule("", folder), {}).scales
    found = {}
    for name, tensor in load_file(Path(folder) / WEIGHTS_FILE).items():
        layer, matrix = layer_of(name)
        found[f"{layer}.lora_{matrix}.weight"] = tensor.float() * (scales[layer] if matrix == "B" else 1)
    return found


for _medium in MEDIA:
    if (_name := f"rlhf_adapter_{_medium}") not in WeightTransferEngineFactory._registry:
        weights.BACKENDS[_name] = _medium
        WeightTransferEngineFactory.register_engine(_name, AdapterTransferEngine)
