"""vLLM's worker, which an engine has one of per GPU. It may run in a process of its own.

What the engine wants of it is in vLLM's configuration, which all of its processes get: see `core.worker_settings`.
"""

import inspect
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from vllm.model_executor.layers.logits_processor import LogitsProcessor
from vllm.model_executor.warmup import kernel_warmup
from vllm.platforms import current_platform
from vllm.sampling_params import SamplingParams as VllmSamplingParams

from rlhf_data.errors import ConfigError, EngineError, WeightSyncError
from rlhf_rollout.engines.adapter_files import MERGE_HINT
from rlhf_rollout.engines.vllm.internals import SETTINGS, check_adapter_manager, check_worker, require, sampler_params
from rlhf_rollout.engines.vllm.patches import may_have_pieces, patch_graphs, patch_runner, replays_of
from rlhf_rollout.engines.vllm.speculation import plan_as_captured
from rlhf_rollout.private_names import missing_paths
from rlhf_rollout.protocols import SamplingParams

if current_platform.is_cpu():
    from vllm.v1.worker.cpu_worker import CPUWorker as PlatformWorker
else:
    from vllm.v1.worker.gpu_worker import Worker as PlatformWorker

check_worker(PlatformWorker)


class Worker(PlatformWorker):  # type: ignore[misc, valid-type]
    """Loads a model with masked ids, allocates and warms up what the requests that the engine expects need.

    vLLM takes it by its name.
    """

    @property
    def _settings(self) -> dict[str, Any]:
        return self.vllm_config.additional_config[SETTINGS]

    def determine_available_memory(self) -> int:
        """See vLLM. The KV cache takes as many bytes, but no more than it has a use for:

            limit = 4 * max_num_seqs * bytes of one sequence of max_model_len tokens

        A larger cache takes longer to allocate, to put to sleep and to wake up. Where vLLM measures the memory, it does
        not count pieces of graphs.
        """
        available = int(super().determine_available_memory())
        sequences = self._settings["kv_cache_sequences"]
        if sequences is None:  # the size is fixed
            return available
        layers = self.get_kv_cache_spec().values()
        is_measured = self.vllm_config.cache_config.kv_cache_memory_bytes is None
        if is_measured and may_have_pieces(layers):  # else `memory.kv_cache_bytes` has counted them
            available -= self._settings["piece_bytes"]
        return min(available, sequences * sum(layer.max_memory_usage_bytes(self.vllm_config) for layer in layers))

    def load_model(self, *args: Any, **options: Any) -> None:
        """See vLLM. The model then computes all of its logits, and gives the ids that the engine masks -inf."""
        rank = self._settings["adapter_rank"]
        has_adapters = rank or self._settings["has_modules"]
        with leave_head_to_base(self.model_runner) if has_adapters else nullcontext():
            super().load_model(*args, **options)
        complete_logits(self.get_model(), self.model_config.hf_config.get_text_config())
        if has_adapters:
            take_adapters(self.model_runner.lora_manager, self.weight_transfer_engine if rank else None, rank)
        masked_ids = self._settings["masked_ids"]
        mask_logits(self.get_model(), masked_ids)
        drafts = self.vllm_config.speculative_config
        draft = self.model_runner.get_draft_model() if drafts is not None else None
        if draft is not None:
            mask_logits(draft, masked_ids)
        if drafts is not None and drafts.method == "draft_model":
            self.weight_transfer_engine.take_draft(draft, self.model_runner.drafter._create_draft_vllm_config())
        if current_platform.is_cuda():
            patch_runner(self.model_runner, self._settings["skip_patches"], masked_ids)
            if drafts is not None:
                plan_as_captured(self.model_runner)

    _step: Any = None  # the scheduler's, between the two calls for it
    _later_steps: Iterator[Any] | None = None  # where there are any
    _replays: Any = None  # computes later steps, if it can be done without the host

    def execute_model(self, scheduler_output: Any) -> Any:
        """See vLLM. Where the scheduler asks for several steps at a time, this computes the first."""
        self._step = scheduler_output
        if getattr(scheduler_output, "num_steps", 1) > 1:
            from rlhf_rollout.engines.vllm.patches.multi_step import single_steps

            self._later_steps = single_steps(scheduler_output)
            scheduler_output = next(self._later_steps)
        return super().execute_model(scheduler_output)

    def sample_tokens(self, grammar_output: Any) -> Any:
        """See vLLM. Where the scheduler asks for several steps at a time, this computes the others, too."""
        later, self._later_steps = self._later_steps, None
        begun = self._replays.begun() if later is not None and self._replays is not None else None
        output = super().sample_tokens(grammar_output)
        if output is not None and begun is not None:
            output = self._replays.compute(begun, output, self._step.num_steps - 1)
        elif output is not None and later is not None:
            from rlhf_rollout.engines.vllm.patches.multi_step import joined

            outputs = [output]
            for step in later:
                super().execute_model(step)
                outputs.append(super().sample_tokens(None))
            output = joined(outputs)
        self._step.launched_at = time.perf_counter()  # for the scheduler, if it is in this process
        return output

    def compile_or_warm_up_model(self) -> Any:
        """See vLLM."""
        sampling = self._settings["expected_sampling"]
        expected = None if sampling is None else SamplingParams(**sampling)
        if current_platform.is_cuda():
            wanted = (self._settings[name] for name in ("skip_patches", "piece_sizes", "longest_prompt"))
            patch_graphs(self.model_runner, *wanted)
        with limited_warm_up(expected, has_experts=self._settings["has_experts"]):
            seconds = super().compile_or_warm_up_model()
        if current_platform.is_cuda():
            self._replays = replays_of(self.model_runner, self._settings["skip_patches"])
        return seconds


@contextmanager
def limited_warm_up(sampling: SamplingParams | None, *, has_experts: bool) -> Iterator[None]:
    """Have vLLM warm up for `sampling` in this process, for the time of a `with` block.

    vLLM's own warm-up compiles all that its sampler can do, such as penalties, top-k and top-p, which takes 15 s on a
    machine that has not compiled it before. What is left out is compiled when a request first needs it.

    Args:
        sampling: how requests will mostly sample; None leaves the sampler's warm-up as it is.
        has_experts: whether the model is a mixture of experts.
    """
    own = VllmSamplingParams.for_sampler_warmup
    try:
        if sampling is not None:
            VllmSamplingParams.for_sampler_warmup = staticmethod(lambda: sampler_params(sampling))
        with nullcontext() if has_experts else _no_router_kernels():
            yield
    finally:
        VllmSamplingParams.for_sampler_warmup = staticmethod(own)


@contextmanager
def _no_router_kernels() -> Iterator[None]:
    """Keep versions of vLLM before 0.28 from compiling kernels of other models' routers, which takes 10 s."""
    own = getattr(kernel_warmup, "_warmup_ll_bf16_router_gemm", None)
    # Later versions take the model and see for themselves whether it has a router.
    if own is None or inspect.signature(own).parameters:
        yield
        return
    kernel_warmup._warmup_ll_bf16_router_gemm = lambda: None
    try:
        yield
    finally:
        kernel_warmup._warmup_ll_bf16_router_gemm = own


def complete_logits(model: nn.Module, config: Any) -> None:
    """Have a model of vLLM do to its logits what some of vLLM's classes leave out.

    The backend for models of transformers has no soft cap of logits before vLLM 0.28. The class of a PhiMoE loads the
    bias of the LM head and does not add it.

    Args:
        model: is changed where its class leaves something out.
        config: of the text model, as vLLM has it.
    """
    name = type(model).__name__
    processor = getattr(model, "logits_processor", None)
    if name.startswith("Transformers") and processor is not None and processor.soft_cap is None:
        processor.soft_cap = getattr(config, "final_logit_softcapping", None)
    if name == "PhiMoEForCausalLM" and config.lm_head_bias:  # without it, the bias of vLLM has no values

        def compute_logits(hidden_states: Tensor) -> Tensor | None:
            return processor(model.lm_head, hidden_states, model.lm_head.bias)

        model.compute_logits = compute_logits


def mask_logits(model: nn.Module, ranges: Sequence[Sequence[int]]) -> None:
    """Have a model of vLLM give the ids in `ranges`, each with its end, the logit -inf, in each pass from now on.

    Requests could name the allowed ids instead, but vLLM then copies a mask of the whole vocabulary to the GPU whenever
    a request begins or ends. Slices need no memory on the GPU, which would be lost when the engine sleeps.

    Raises EngineError for a model whose logits do not come from vLLM's `LogitsProcessor`.
    """
    if not ranges:
        return

    def mask(module: nn.Module, arguments: Any, logits: Tensor | None) -> None:
        if logits is None:  # with tensor parallelism, one worker may gather the logits of all
            return
        for start, stop in ranges:
            logits[..., start:stop] = -torch.inf

    layers = [module for module in model.modules() if isinstance(module, LogitsProcessor)]
    if not layers:
        message = f"{type(model).__name__} of vLLM has no layer in which ids of the vocabulary can be masked"
        raise EngineError(message, hint="use another version of vLLM, or a tokenizer with a token for each id")
    for layer in layers:
        layer.register_forward_hook(mask)


@contextmanager
def leave_head_to_base(runner: Any) -> Iterator[None]:
    """Let a worker that loads its model within a `with` block prepare no adapters for embeddings and the LM head.

    Such adapters would take the most time and memory, stay zero, and bypass the mask of token ids.
    """
    load = runner.load_lora_model

    def load_without(model: Any, *args: Any) -> Any:
        for module in model.modules():
            if getattr(module, "embedding_modules", None):
                module.embedding_modules = {}
        return load(model, *args)

    runner.load_lora_model = load_without
    try:
        yield
    finally:
        del runner.load_lora_model


def take_adapters(manager: Any, receiver: Any, rank: int) -> None:
    """Let a worker take the adapter that it has received, or else have it read one from a folder in our way.

    vLLM's own way leaves out layers without a word that its model lacks, and knows one rank and one scale.

    Args:
        manager: the worker's manager of adapters.
        receiver: the worker's `AdapterTransferEngine`; None if adapters are in folders.
        rank: of all matrices that are received.
    """
    from vllm.lora.lora_model import LoRAModel
    from vllm.lora.peft_helper import PEFTHelper

    from rlhf_rollout.engines.vllm.adapters import stored_adapter

    check_adapter_manager(manager)
    layers = manager._adapter_manager
    if mapper := getattr(layers.model, "hf_to_vllm_mapper", None):
        require(missing_paths(mapper, ("orig_to_new_stacked",)))
        # Adapters keep the names of parts, such as q_proj: vLLM itself joins those of layers that it has fused.
        mapper = replace(mapper, orig_to_new_stacked={})

    def load(request: Any) -> Any:
        number = request.lora_int_id
        tensors = stored_adapter(request.lora_path) if receiver is None else dict(receiver.adapter)
        if not tensors:
            return layers.create_dummy_lora(number, rank, manager.embedding_modules)  # of zeros
        device = "cpu" if receiver is None else manager.device
        options = {"device": device, "dtype": manager.lora_config.lora_dtype, "weights_mapper": mapper}
        own = rank or max(tensor.shape[0] for name, tensor in tensors.items() if ".lora_A." in name)
        scales = PEFTHelper(r=own, lora_alpha=own, target_modules="all-linear")
        adapter = LoRAModel.from_lora_tensors(number, tensors, scales, **options)
        # vLLM silently leaves out adapters that it has no layer for.
        if lost := sorted(adapter.loras.keys() - layers.modules.keys() - {*chain(*layers.packed_modules.values())}):
            name = type(layers.model).__name__
            message = f"{name} of vLLM applies no adapter to {len(lost)} layers, such as {lost[0]}"
            if receiver is None:
                raise ConfigError(f"{request.lora_path}: {message}", hint=MERGE_HINT)
            receiver.adapter = {}  # the next update may name other tensors
            raise WeightSyncError(message, hint="use ``adapter_rank=0``, which sends merged weights")
        return adapter

    manager._load_adapter = load
