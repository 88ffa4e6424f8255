"""Loads buckets of weights into a running vLLM model by vLLM's weight-transfer API. Runs in vLLM's workers."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from vllm.config import set_current_vllm_config
from vllm.distributed.weight_transfer.base import WeightTransferEngine, WeightTransferInitInfo, WeightTransferUpdateInfo
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info
from vllm.platforms import current_platform

from rlhf_data.errors import RlhfError, WeightSyncError
from rlhf_rollout.engines.model_files import checkpoint_shapes
from rlhf_rollout.weight_sync import MEDIA
from rlhf_rollout.weight_sync.bucket import WeightBucket, check_tensor
from rlhf_rollout.weight_sync.reader import BucketReader

logger = logging.getLogger(__name__)

BACKENDS = {f"rlhf_{medium}": medium for medium in MEDIA}


@dataclass
class BucketInitInfo(WeightTransferInitInfo):
    """Empty: a bucket itself tells where its memory is."""


@dataclass
class BucketUpdateInfo(WeightTransferUpdateInfo):
    """One bucket."""

    bucket: WeightBucket


class BucketTransferEngine(WeightTransferEngine[BucketInitInfo, BucketUpdateInfo]):
    """Loads buckets in checkpoint format into the model, layer by layer, and records which weights are missing."""

    init_info_cls = BucketInitInfo
    update_info_cls = BucketUpdateInfo
    supports_draft_weight_update = False

    def __init__(self, config: Any, vllm_config: Any, device: torch.device, model: torch.nn.Module) -> None:
        super().__init__(config, vllm_config, device, model)
        self._reader = BucketReader(BACKENDS[config.backend], device)
        self._expected = checkpoint_shapes(Path(self.model_config.model))
        self._received: set[str] = set()
        self.missing: list[str] = []

    def init_transfer_engine(self, init_info: BucketInitInfo) -> None:
        """Do nothing: a bucket itself tells where its memory is."""

    def start_weight_update(self) -> None:
        """Prepare the layers for weights in checkpoint format."""
        self._received = set()
        with self._loading():
            initialize_layerwise_reload(self.model)
        if current_platform.is_cpu():
            _drop_expert_kernels(self.model)

    def receive_weights(self, update_info: BucketUpdateInfo) -> None:
        """Load one bucket. Raises WeightSyncError before the model changes when a name or shape does not fit."""
        bucket = update_info.bucket
        self._check(bucket)
        weights = self._reader.read(bucket)
        with self._loading():
            self.model.load_weights(weights)
        self._received.update(name for name, _ in weights)

    def finish_weight_update(self) -> None:
        """Put the weights in force; `missing` then lists those that did not arrive."""
        try:
            with self._loading():
                self.missing = self._find_missing()
                finalize_layerwise_reload(self.model, self.model_config)
                if current_platform.is_cpu():
                    _repack_cpu_heads(self.model)
                    _watch_expert_kernels(self.model)
        finally:
            self._reader.close()

    def shutdown(self) -> None:
        """Unmap the sender's memory."""
        self._reader.close()

    @staticmethod
    def trainer_send_weights(iterator: Iterator[Any], trainer_args: Any) -> None:
        """Raise WeightSyncError: `rlhf_train.weight_sync` sends. vLLM 0.26 requires the method of every engine."""
        raise WeightSyncError("weights are sent by rlhf_train.weight_sync")

    @contextmanager
    def _loading(self) -> Iterator[None]:
        # vLLM 0.26 does not set its config around updates, and some layers ask for it when they are rebuilt.
        with torch.no_grad(), set_current_vllm_config(self.vllm_config):
            yield

    def _check(self, bucket: WeightBucket) -> None:
        if self._expected is None:
            return
        for spec in bucket.tensors:
            # Folders that were saved from the backbone alone lack the first part of each name, such as `model.`.
            expected = self._expected.get(spec.name, self._expected.get(spec.name.partition(".")[2]))
            check_tensor(spec, expected, self._expected)

    def _find_missing(self) -> list[str]:
        # Layers are counted and not names: vLLM fuses several weights of a checkpoint into one parameter.
        incomplete = [name or type(layer).__name__ for name, layer in self.model.named_modules() if _incomplete(layer)]
        if not incomplete or self._expected is None:
            return incomplete
        return sorted(name for name in self._expected if name not in self._received)


def _incomplete(layer: torch.nn.Module) -> bool:
    """Return whether the layer still waits for elements of its own parameters."""
    info = get_layerwise_info(layer)
    if not info.can_load():
        return False
    needed = sum(parameter.numel() for parameter in layer.parameters(recurse=False))
    if isinstance(layer, VocabParallelEmbedding):
        # The rows that pad the vocabulary are never sent, so the full number is never reached.
        needed = min(needed, 1)
    return info.load_numel < needed


def _repack_cpu_heads(model: torch.nn.Module) -> None:
    """Pack embeddings that are also the output head again: on a CPU a reload does not change their packed copy."""
    from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm

    for module in model.modules():
        if isinstance(module, VocabParallelEmbedding) and hasattr(module, "cpu_linear") and module.weight.numel():
            dispatch_cpu_unquantized_gemm(module, remove_weight=False)


def _drop_expert_kernels(model: torch.nn.Module) -> None:
    """Have the layers with experts of a model on a CPU make their kernels anew when their weights are there.

    vLLM packs the weights of experts for the CPU only when it makes their kernel. A layer that still has one would
    compute with weights that are not packed. A layer that gets no weights has no kernel until the next update; the
    engine refuses requests until then.
    """
    for module in model.modules():
        method = getattr(module, "quant_method", None)
        if getattr(method, "moe_kernel", None) is not None:
            method.rlhf_capture_fn = getattr(method.moe_kernel.fused_experts, "routing_replay_capture_fn", None)
            method.moe_kernel = None


def _watch_expert_kernels(model: torch.nn.Module) -> None:
    """Have new kernels of experts report what they choose to whom the ones before reported it (`capture_on_cpu`)."""
    for module in model.modules():
        method = getattr(module, "quant_method", None)
        capture = getattr(method, "rlhf_capture_fn", None)
        if capture is not None and method.moe_kernel is not None:
            method.moe_kernel.fused_experts.set_capture_fn(capture)


class BucketWorkerExtension:
    """Methods that vLLM mixes into its worker class; importing this module registers the backends there."""

    weight_transfer_engine: BucketTransferEngine

    def rlhf_receive_weights(self, bucket: WeightBucket) -> list[RlhfError]:
        """Load one bucket; return the error if that failed, else nothing.

        An error that a worker raises reaches the engine as text without a type, and the answers of other workers would
        be taken for those to the next call.
        """
        try:
            self.update_weights({"bucket": bucket})
        except RlhfError as error:
            return [error]
        except Exception as error:
            logger.exception("a bucket of weights cannot be loaded")
            return [WeightSyncError(f"vLLM could not load a bucket of weights: {type(error).__name__}: {error}")]
        return []

    def rlhf_missing_weights(self) -> list[str]:
        """Return the names of the weights that were missing in the last update."""
        return self.weight_transfer_engine.missing

    def rlhf_abandon_weight_update(self) -> None:
        """Close the layers after a failed bucket; their weights are then a mixture of old and new."""
        if getattr(self, "_weight_update_active", False):  # another worker failed, and vLLM counts this one as updating
            self.finish_weight_update()
        else:
            self.weight_transfer_engine.finish_weight_update()


for _name in BACKENDS:
    if _name not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(_name, BucketTransferEngine)
