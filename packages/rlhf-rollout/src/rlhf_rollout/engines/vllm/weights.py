"""Loads buckets of weights into a running vLLM model by vLLM's weight-transfer API. Runs in vLLM's workers."""

import logging
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import distributed

from rlhf_data.errors import EngineError, RlhfError, WeightSyncError
from rlhf_rollout.engines.model_files import checkpoint_shapes
from rlhf_rollout.engines.vllm.derived import (
    DirectWrites,
    drop_expert_kernels,
    expert_kernels,
    holds_more_than_weights,
    keep_buffers,
    repack_cpu_heads,
    watch_expert_kernels,
)
from rlhf_rollout.engines.vllm.internals import SETTINGS
from rlhf_rollout.engines.vllm.names import (
    AttentionLayerBase,
    VocabParallelEmbedding,
    WeightTransferEngine,
    WeightTransferEngineFactory,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
    current_platform,
    finalize_layerwise_reload,
    get_layerwise_info,
    initialize_layerwise_reload,
    set_current_vllm_config,
)
from rlhf_rollout.engines.vllm.patches import load
from rlhf_rollout.engines.vllm.patches.copies import CopyRecord, CopyRecorder, Target
from rlhf_rollout.weights import MEDIA
from rlhf_rollout.weights.bucket import DRAFT, TensorSlot, WeightBucket, check_tensor, divided
from rlhf_rollout.weights.reader import BucketReader

logger = logging.getLogger(__name__)

# What says nothing about whether the weights fit: of the host, of CUDA and of NCCL.
_TRANSIENT = (MemoryError, OSError, torch.OutOfMemoryError, torch.AcceleratorError, distributed.DistError)

BACKENDS = {f"rlhf_{medium}": medium for medium in MEDIA}


@dataclass
class BucketInitInfo(WeightTransferInitInfo):
    """Empty: a bucket itself tells where its memory is."""


@dataclass
class BucketUpdateInfo(WeightTransferUpdateInfo):
    """One bucket."""

    bucket: WeightBucket


class BucketTransferEngine(WeightTransferEngine[BucketInitInfo, BucketUpdateInfo]):
    """Loads buckets in checkpoint format into the model, and records which weights are missing.

    vLLM's loader spends most of an update in Python. So it loads the first update only, layer by layer, and the copies
    that it makes are recorded (see `CopyRecord`). Later updates repeat them: in place if vLLM computes with the
    parameters as they were loaded, otherwise into new tensors for each layer, which vLLM then processes. An update that
    the record does not fit is left to the loader, and so are all updates of a model whose copies cannot be repeated.

    Attributes:
        missing: weights that did not arrive in the last update.
        kept: layers that have their old weights after it, though all weights arrived.
        num_repeated: weights of the update that were loaded by the record.
        draft: loads the weights of the draft model, whose names begin with `DRAFT`, if updates may bring any.
    """

    init_info_cls = BucketInitInfo
    update_info_cls = BucketUpdateInfo
    supports_draft_weight_update = False

    def __init__(
        self,
        config: Any,
        vllm_config: Any,
        device: torch.device,
        model: torch.nn.Module,
        reader: BucketReader | None = None,
    ) -> None:
        super().__init__(config, vllm_config, device, model)
        self._reader = reader or BucketReader(BACKENDS[config.backend], device)
        self._expected = checkpoint_shapes(Path(self.model_config.model))
        self._received: set[str] = set()
        self._recorder: CopyRecorder | None = None
        self._copies = load("recorded_copies", vllm_config.additional_config[SETTINGS]["skip_patches"])
        self._check_in_place: Any = None
        self._record: CopyRecord | None = None
        self._places: Any = None
        self._staging: Any = None
        self._direct_writes: DirectWrites | None = None
        self._expert_kernels: list[tuple[Any, Any, Any]] = []
        self._misfit: str | None = None
        self._can_record = self._copies is not None
        self.missing: list[str] = []
        self.kept: list[str] = []
        self.num_repeated = 0
        self.draft: BucketTransferEngine | None = None
        self._draft_arrives = False

    def take_draft(self, model: torch.nn.Module, vllm_config: Any) -> None:
        """Load weights of the draft model, too, from now on. `vllm_config` is that of the draft model."""
        # A buffer may hold weights of both, and is opened once.
        self.draft = BucketTransferEngine(self.config, vllm_config, self.device, model, self._reader)

    @property
    def has_record(self) -> bool:
        """Whether the copies of an update are recorded; otherwise vLLM's loader makes the next update."""
        return self._record is not None

    def init_transfer_engine(self, init_info: BucketInitInfo) -> None:
        """Do nothing: a bucket itself tells where its memory is."""

    def start_weight_update(self) -> None:
        """Prepare the layers for weights in checkpoint format."""
        self._draft_arrives = False
        self._received = set()
        self._misfit = None
        self.num_repeated = 0
        if self._places is not None and self._places.have_moved():
            self._forget("parameters have moved")
        if self._places is not None:
            self._places.begin()
            return
        with self._loading():
            initialize_layerwise_reload(self.model)
            keep_buffers(self.model)
        self._direct_writes = DirectWrites(self.model)
        if current_platform.is_cpu():
            drop_expert_kernels(self.model)
        self._expert_kernels = expert_kernels(self.model)
        self._recorder = None
        if self._record is None and self._can_record:
            self._recorder = CopyRecorder(_targets(self.model))
            self._check_in_place = self._copies.InPlaceCheck(self.model)
        self._staging = None if self._record is None else self._copies.Staging(self._record)

    def receive_weights(self, update_info: BucketUpdateInfo) -> None:
        """Load one bucket. Raises WeightSyncError before the model changes when a name or shape does not fit."""
        own, drafted = divided(update_info.bucket)
        if self.draft is None or not drafted.tensors:
            self.load_bucket(update_info.bucket)
            return
        self._reader.view(update_info.bucket)  # which compares the checksum
        if own.tensors:
            self.load_bucket(own)
        if not self._draft_arrives:
            self._draft_arrives = True
            self.draft.start_weight_update()
        self.draft.load_bucket(drafted)

    def load_bucket(self, bucket: WeightBucket) -> None:
        """Load a bucket whose weights are all of this model. Raises as `receive_weights`."""
        self._check(bucket)
        unknown = self._unknown(bucket)
        with self._loading():
            if self._record is not None and len(unknown) < len(bucket.tensors):
                self._repeat(self._record, bucket, unknown)
            for part in self._reader.read_parts(bucket) if unknown else ():
                if weights := [(name, weight) for name, weight in part if name in unknown]:
                    self._load(weights)
        self._received.update(slot.name for slot in bucket.tensors)

    def finish_weight_update(self) -> None:
        """Put the weights in force; `missing` and `kept` then list what the update did not bring."""
        try:
            self.put_in_force()
            if self.draft is not None and self._draft_arrives:
                self.draft.put_in_force()
                self.missing += [DRAFT + name for name in self.draft.missing]
                self.kept += [DRAFT + name for name in self.draft.kept]
        finally:
            self._reader.end_update()

    def put_in_force(self) -> None:
        """Do as `finish_weight_update` for this model alone, and keep the sender's memory open."""
        try:
            with self._loading():
                self.missing = self._find_missing()
                # A record was made of an update that reached all layers.
                self.kept = [] if self.missing or self._places is not None else _untouched(self.model)
                if self._places is not None:
                    self._places.finish(self.model_config.dtype)
                else:
                    finalize_layerwise_reload(self.model, self.model_config)
                    if current_platform.is_cpu():
                        repack_cpu_heads(self.model)
                        watch_expert_kernels(self.model)
                    # CUDA graphs read memory of the kernels that they were captured with, and those read the parameters
                    # that have the new weights. vLLM makes new kernels for experts in FP8.
                    for method, kernel, config in self._expert_kernels:
                        method.moe_kernel, method.moe_quant_config = kernel, config
                    self._end_recording()
        finally:
            self._recorder = self._check_in_place = self._direct_writes = None
        if self._misfit is not None:
            self._forget(self._misfit)

    def shutdown(self) -> None:
        """Unmap the sender's memory."""
        self._reader.close()

    @staticmethod
    def trainer_send_weights(iterator: Iterator[Any], trainer_args: Any) -> None:
        """Raise WeightSyncError: `WeightSource` sends. vLLM 0.26 requires the method of every engine."""
        raise WeightSyncError("weights are sent by rlhf_rollout.weights.source")

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

    def _load(self, weights: list[tuple[str, torch.Tensor]]) -> None:
        """Have vLLM's loader load the weights."""
        recorder = self._recorder
        if self._places is not None:
            # The parameters are as the loader wants them, so that it can load in place; this counts what it loads.
            recorder = CopyRecorder(_targets(self.model))
        if recorder is None:
            self._load_by_vllm(weights)
            return
        recorder.expect(weights)
        with recorder:
            self._load_by_vllm(weights)
        if self._places is not None:
            self._places.count(recorder.finish().numel)
        elif self._check_in_place is not None:
            self._check_in_place.compare(recorder, weights)

    def _load_by_vllm(self, weights: list[tuple[str, torch.Tensor]]) -> None:
        with self._direct_writes or nullcontext():
            self.model.load_weights(weights)

    def _unknown(self, bucket: WeightBucket) -> set[str]:
        """Return the names of the weights of a bucket that the record, if any, does not have in their shapes."""
        if self._record is None:
            return {slot.name for slot in bucket.tensors}
        unknown = [slot for slot in bucket.tensors if self._record.shapes.get(slot.name) != tuple(slot.shape)]
        if unknown:
            self._misfit = f"{unknown[0].name} did not arrive with shape {tuple(unknown[0].shape)} before"
        return {slot.name for slot in unknown}

    def _repeat(self, record: CopyRecord, bucket: WeightBucket, unknown: Collection[str]) -> None:
        """Load a bucket by the record, without the weights that it does not know."""
        slots = [slot for slot in bucket.tensors if slot.name not in unknown]
        sources = _sources(self._reader.view(bucket).to(self.device), slots, record)
        for name in self._received.intersection(sources):
            del sources[name]
        (self._places or self._staging).write(sources)
        self._reader.settle()
        self.num_repeated += len(sources)

    def _find_missing(self) -> list[str]:
        # Layers are counted and not names: vLLM fuses several weights of a checkpoint into one parameter.
        if self._places is not None:
            incomplete = self._places.incomplete()
        else:
            incomplete = [
                name or type(layer).__name__ for name, layer in self.model.named_modules() if _incomplete(layer)
            ]
        if not incomplete or self._expected is None:
            return incomplete
        return sorted(name for name in self._expected if name not in self._received)

    def _end_recording(self) -> None:
        """Keep the record of an update that was complete, if its copies can be repeated."""
        recorder = self._recorder
        check = self._check_in_place
        if recorder is None or check is None or self.missing or self.kept:
            return
        record = recorder.finish()
        problem = recorder.problem
        if any(isinstance(layer, AttentionLayerBase) for layer in record.num_copies):
            problem = problem or "an attention layer has weights of its own"
        if problem is not None:
            self._can_record = False
            logger.warning("vLLM loads each update of the weights layer by layer, which is slower: %s", problem)
            return
        check.finish()
        self._record = record
        if check.problem is None:
            self._places = self._copies.InPlace(self.model, record)
        else:
            logger.info("vLLM processes each layer in each update of the weights: %s", check.problem)

    def _forget(self, reason: str) -> None:
        logger.warning("the copies that load weights are recorded again in the next update: %s", reason)
        self._record = self._places = None


def _sources(flat: torch.Tensor, slots: Sequence[TensorSlot], record: CopyRecord) -> dict[str, list[torch.Tensor]]:
    """Return views of a bucket's memory for the recorded copies of some of its weights."""
    typed: dict[str, torch.Tensor] = {}
    sources = {}
    for slot in slots:
        if slot.dtype not in typed:
            dtype = getattr(torch, slot.dtype)
            typed[slot.dtype] = flat[: flat.numel() - flat.numel() % dtype.itemsize].view(dtype)
        memory = typed[slot.dtype]
        start = slot.offset_bytes // memory.itemsize
        sources[slot.name] = [copy.source.of(memory, start) for copy in record.copies[slot.name]]
    return sources


def _targets(model: torch.nn.Module) -> dict[Target, torch.Tensor]:
    return {
        Target(path, layer, name): tensor
        for path, layer in model.named_modules()
        for name, tensor in (layer._parameters | layer._buffers).items()
        if tensor is not None
    }


def _incomplete(layer: torch.nn.Module) -> bool:
    """Return whether the layer still waits for elements of its own parameters."""
    info = get_layerwise_info(layer)
    if not info.can_load():
        return False
    # A buffer that no checkpoint brings counts only once it is loaded.
    loaded = {name for name, _ in info.loaded_weights}
    tensors = [*layer.named_parameters(recurse=False)]
    tensors += [(name, buffer) for name, buffer in layer.named_buffers(recurse=False) if name in loaded]
    needed = sum(tensor.numel() for _, tensor in tensors)
    if isinstance(layer, VocabParallelEmbedding):
        # The rows that pad the vocabulary are never sent, so the full number is never reached.
        needed = min(needed, 1)
    return info.load_numel < needed


def _untouched(model: torch.nn.Module) -> list[str]:
    """Return the names of the layers whose parameters got nothing in an update.

    An output head that is tied to the embedding has its memory, and so its new weights.
    """
    waiting = [(name, layer) for name, layer in model.named_modules() if _incomplete(layer)]
    untouched = {layer: name for name, layer in waiting if not get_layerwise_info(layer).load_numel}
    written = set().union(*(_memory(layer) for layer in model.modules() if layer not in untouched))
    return [
        name or type(layer).__name__
        for layer, name in untouched.items()
        if not (own := _memory(layer)) or not own <= written
    ]


def _memory(layer: torch.nn.Module) -> set[int]:
    """Return where the parameters lie that the engine computes with; an update has others while it loads."""
    kernel_tensors = get_layerwise_info(layer).kernel_tensors
    tensors = layer._parameters if kernel_tensors is None else kernel_tensors[0]
    # A layer that has packed its weights for a CPU has an empty parameter.
    return {tensor.data_ptr() for tensor in tensors.values() if tensor is not None and tensor.numel() > 0}


class BucketWorkerExtension:
    """Methods that vLLM mixes into its worker class; importing this module registers the backends there."""

    weight_transfer_engine: BucketTransferEngine
    model_runner: Any

    def rlhf_receive_weights(self, bucket: WeightBucket) -> list[RlhfError]:
        """Load one bucket; return the error if that failed, else nothing.

        An error that a worker raises reaches the engine as text without a type, and the answers of other workers would
        be taken for those to the next call.
        """
        try:
            self.update_weights({"bucket": bucket})
        except RlhfError as error:
            return [error]
        except _TRANSIENT as error:
            # The weights did not arrive, which says nothing about whether they fit. A restarted engine may get them.
            return [EngineError(f"a bucket of weights did not arrive: {type(error).__name__}: {error}")]
        except Exception as error:
            logger.exception("a bucket of weights cannot be loaded")
            return [WeightSyncError(f"vLLM could not load a bucket of weights: {type(error).__name__}: {error}")]
        return []

    def rlhf_missing_weights(self) -> list[str]:
        """Return the names of the weights that were missing in the last update."""
        return self.weight_transfer_engine.missing

    def rlhf_kept_layers(self) -> list[str]:
        """Return the names of the layers that have their old weights, though all weights of the last update arrived."""
        return self.weight_transfer_engine.kept

    def rlhf_holds_more_than_weights(self) -> bool:
        """Return whether the model may compute with something that the next update does not bring.

        A record has been checked to write every parameter whole; `holds_more_than_weights` finds what else there is.
        """
        return not self.weight_transfer_engine.has_record or holds_more_than_weights(self.model_runner.model)

    def rlhf_abandon_weight_update(self) -> None:
        """Close the layers after a failed bucket; their weights are then a mixture of old and new."""
        if getattr(self, "_weight_update_active", False):  # another worker failed, and vLLM counts this one as updating
            self.finish_weight_update()
        else:
            self.weight_transfer_engine.finish_weight_update()


for _name in BACKENDS:
    if _name not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(_name, BucketTransferEngine)
