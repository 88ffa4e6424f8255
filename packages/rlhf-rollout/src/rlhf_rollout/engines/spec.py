"""The settings of an engine, and the kinds of engines."""

import math
from dataclasses import dataclass
from typing import Literal

from rlhf_data.bounds import bounded, check_bounds
from rlhf_data.errors import ConfigError, check_name, unknown
from rlhf_rollout.engines.adapter_files import MAX_RANK, LoraModule
from rlhf_rollout.protocols import SamplingParams
from rlhf_rollout.weights import MEDIA, Medium

ENGINE_KINDS = ("fake", "http", "transformers", "vllm")
_DTYPES = ("float32", "bfloat16")
QUANTIZATIONS = ("fp8",)
DRAFTS = ("ngram", "mtp")
# Speed-ups of vLLM, see `rlhf_rollout.engines.vllm.patches`.
VLLM_PATCHES = (
    "idle_slots",
    "bulk_decoding",
    "list_logprobs",
    "multi_step",
    "bulk_admission",
    "shared_hashes",
    "recorded_copies",
    "sampling_head",
    "replayed_steps",
    "graph_pieces",
    "shared_prefixes",
)


# Those that have nothing to do where sequences get several tokens per step.
OF_SINGLE_TOKENS = (
    "idle_slots",
    "bulk_decoding",
    "multi_step",
    "sampling_head",
    "replayed_steps",
    "graph_pieces",
    "shared_prefixes",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSpec:
    """The settings of an engine.

    Attributes:
        model: a Hugging Face folder or hub name; for "http" the model's name on the server.
        tokenizer: folder or hub name of the tokenizer, whose end token ends completions; None for the model's own.
        dtype: data type of weights and activations.
        quantization: "fp8" rounds the weights of linear layers and experts to FP8, with one scale per output channel,
            when they are loaded and in each update, and their inputs token by token; it needs dtype bfloat16, "vllm"
            and, on a GPU, compute capability 8.9. None computes in `dtype`.
        max_model_len: prompt and completion together, in tokens.
        max_num_seqs: completions that are decoded at once, at most.
        max_num_batched_tokens: tokens per engine step, at most; see `batched_tokens`.
        gpu_memory_utilization: share of the GPU's memory for weights, activations and KV cache.
        kv_cache_memory_bytes: fixes the KV cache's size; None takes it from `gpu_memory_utilization` on a GPU, with
            "vllm" at most what 4 * `max_num_seqs` full sequences need, and on a CPU from what `max_num_seqs` full
            sequences need (at most 1 GiB).
        measures_memory: whether vLLM measures at its start how much memory a GPU's KV cache can have, during which no
            other process may allocate or free memory on the GPU. Otherwise a bound says it, which is a little less.
        enforce_eager: no compilation and no CUDA graphs.
        enable_sleep: allow `sleep`; on a GPU the weights and KV cache then lie in memory that can be given back.
        enable_prefix_caching: reuse the KV cache of common prefixes.
        keep_kv: keep the KV cache through weight updates, that of cached prefixes and of sequences that a pause keeps.
            Later tokens then attend to keys and values of older weights. Otherwise all of it is computed again.
        return_routes: tell the experts that each token went through, `Completion.routes`. Only "vllm" does, for models
            with experts.
        adapter_rank: rank of the LoRA adapter that arrives in each update in place of weights. "vllm" applies it to the
            weights of `model` as it computes. 0: all weights arrive.
        lora_modules: adapters in folders, which "vllm" applies side by side: each request names its own, or none. Such
            an engine takes no updates.
        images: take the images of prompts, for models of `rlhf_data.images.reader.IMAGE_FAMILIES`. Only "vllm" and
            "transformers" do. Otherwise the parts that read images are left out.
        tensor_parallel_size: GPUs per engine.
        num_threads: CPU threads of the engine's process; None for OMP_NUM_THREADS, or else one per core.
        speculative: "ngram" has "vllm" draft the tokens that followed the last ones where these stood before, in prompt
            or response, and check them in one pass of the model. Samples have the same distribution. "mtp" drafts with
            the layers for that which the model's folder has, and which updates leave as they are. None: no drafts.
        draft_model: folder or hub name of a smaller model with the same vocabulary, whose most likely tokens "vllm"
            takes for drafts, as with `speculative`. Updates change it if they bring its weights, under names that begin
            with `rlhf_rollout.weights.bucket.DRAFT`. None: no such drafts.
        speculative_tokens: tokens per draft at most.
        skip_patches: speed-ups of vLLM to do without, of `VLLM_PATCHES`: in case that one is suspected of a fault.
        masked_ids: ids of the model's vocabulary that are never sampled, in ascending ranges: log-probs are those of a
            softmax over the other ids. "vllm" and "transformers" mask them; "fake" follows its script, and a server
            behind "http" has settings of its own.
        expected_sampling: how requests will mostly sample; "vllm" on one GPU then starts without compiling kernels for
            anything else, which the first request that needs them waits for. None compiles all at the start.
        seed: seed for requests without a seed; None draws one for each engine that starts.
        weight_transfer: medium by which new weights arrive, one of `rlhf_rollout.weights.MEDIA`. By "ipc", as many
            senders as the engine has GPUs make each call of an update, one on each GPU.
        base_url: address of the server, for "http" only.
        request_timeout_s: for which an engine with requests may write no token of any of them, pauses left out, unless
            the call has its own limit. A server whose `/metrics` do not tell what it writes has as long for a whole
            request.
        control_timeout_s: deadline of one control call, such as the transfer of one bucket of weights. A call that
            waits until the requests in flight are done has as long, and `request_timeout_s` in addition, after each of
            their tokens.
        health_timeout_s: deadline of a health check.
        start_timeout_s: deadline of the engine's start in another process; the trainers and reward models of an online
            run have as long.
    """

    model: str
    tokenizer: str | None = None
    dtype: Literal["float32", "bfloat16"] = "float32"
    quantization: Literal["fp8"] | None = None
    max_model_len: int = bounded(2048, ge=1)
    max_num_seqs: int = bounded(256, ge=1)
    max_num_batched_tokens: int = bounded(8192, ge=1)
    gpu_memory_utilization: float = bounded(0.9, gt=0, le=1)
    kv_cache_memory_bytes: int | None = None
    measures_memory: bool = True
    enforce_eager: bool = False
    enable_sleep: bool = False
    enable_prefix_caching: bool = True
    keep_kv: bool = False
    return_routes: bool = False
    adapter_rank: int = bounded(0, ge=0, le=MAX_RANK)
    lora_modules: tuple[LoraModule, ...] = ()
    images: bool = False
    tensor_parallel_size: int = bounded(1, ge=1)
    num_threads: int | None = None
    speculative: Literal["ngram", "mtp"] | None = None
    draft_model: str | None = None
    speculative_tokens: int = bounded(4, ge=1, le=32)
    skip_patches: tuple[str, ...] = ()
    masked_ids: tuple[range, ...] = ()
    expected_sampling: SamplingParams | None = None
    seed: int | None = None
    weight_transfer: Medium = "shared_memory"
    base_url: str | None = None
    request_timeout_s: float = bounded(1800.0, gt=0, lt=math.inf)
    control_timeout_s: float = bounded(600.0, gt=0, lt=math.inf)
    health_timeout_s: float = bounded(30.0, gt=0, lt=math.inf)
    start_timeout_s: float = bounded(1800.0, gt=0, lt=math.inf)

    def __post_init__(self) -> None:
        check_bounds(self)
        check_name("engine dtype", self.dtype, _DTYPES)
        if self.quantization not in (None, *QUANTIZATIONS):
            raise ConfigError(unknown("quantization", self.quantization, QUANTIZATIONS))
        if self.speculative not in (None, *DRAFTS):
            raise ConfigError(unknown("speculative", self.speculative, DRAFTS))
        if self.speculative and self.draft_model:
            message = f"``speculative={self.speculative}`` and ``draft_model`` are two ways to draft tokens"
            raise ConfigError(message, hint="drop one of them")
        marks = {
            "``adapter_rank``": self.adapter_rank,
            "``lora_modules``": self.lora_modules,
            "``images``": self.images,
            "``return_routes``": self.return_routes,
            "``EngineSpec.tensor_parallel_size``": self.tensor_parallel_size > 1,
        }
        if self.has_drafts and (others := [mark for mark, value in marks.items() if value]):
            own = f"``speculative={self.speculative}``" if self.speculative else "``draft_model``"
            message = f"{own} is not tested with {' and '.join(others)}"
            raise ConfigError(message, hint="drop one of them")
        others = {"``adapter_rank``": self.adapter_rank, f"``quantization={self.quantization}``": self.quantization}
        if self.lora_modules and (found := [name for name, value in others.items() if value]):
            message = f"``lora_modules`` is not tested with {' and '.join(found)}"
            raise ConfigError(message, hint="drop one of them")
        for name in self.skip_patches:
            check_name("patch of vLLM in ``skip_patches``", name, VLLM_PATCHES)
        check_name("weight transfer", self.weight_transfer, MEDIA)

    @property
    def has_drafts(self) -> bool:
        """Whether tokens are drafted."""
        return bool(self.speculative or self.draft_model)

    @property
    def step_tokens(self) -> int:
        """Tokens of a sequence, at most, in a step that only decodes."""
        return 1 + self.speculative_tokens if self.has_drafts else 1

    @property
    def batched_tokens(self) -> int:
        """Tokens of a step of the engine, at most: a multiple of the slots, and no more than they can hold.

        vLLM tries a step of so many tokens at its start, divided among all slots. With more than `max_model_len` for
        one of them, FlashAttention reads beyond its table of blocks, which ends the process.
        """
        room = min(self.max_num_batched_tokens, self.max_num_seqs * self.max_model_len)
        return max(room - room % self.max_num_seqs, self.max_num_seqs * self.step_tokens)

    def check_kind(self, kind: str) -> None:
        """Raise ConfigError for an unknown kind of engine, or one that these settings do not suit."""
        check_name("engine", kind, ENGINE_KINDS)
        if (kind == "http") != (self.base_url is not None):
            message = f"engine {kind} got base_url {self.base_url}; engine http needs one, the other engines take none"
            raise ConfigError(message)
        if self.return_routes and kind != "vllm":
            raise ConfigError(f"engine {kind} does not tell the experts of tokens", hint="use engine vllm")
        if self.adapter_rank and kind != "vllm":
            raise ConfigError(f"engine {kind} applies no adapters", hint="use engine vllm, or ``adapter_rank=0``")
        if self.lora_modules and kind != "vllm":
            raise ConfigError(f"engine {kind} applies no adapters", hint="use engine vllm, or drop ``lora_modules``")
        if self.has_drafts and kind != "vllm":
            own = "speculative" if self.speculative else "draft_model"
            raise ConfigError(f"engine {kind} drafts no tokens", hint=f"use engine vllm, or drop ``{own}``")
        if self.images and kind not in ("transformers", "vllm"):
            raise ConfigError(f"engine {kind} takes no images", hint="use engine vllm or transformers")
        if kind == "vllm" and self.quantization and self.dtype != "bfloat16":
            message = f"``quantization={self.quantization}`` rounds bfloat16 weights, and the engine's are {self.dtype}"
            raise ConfigError(message, hint="add ``dtype=bfloat16``, or drop ``quantization``")
