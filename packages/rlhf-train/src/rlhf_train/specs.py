"""Settings of a model on the training side and of its optimizer, as frozen data."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rlhf_data.bounds import bounded, check_bounds, check_none
from rlhf_data.errors import ConfigError

if TYPE_CHECKING:
    from rlhf_models.lora import LoraSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerSpec:
    """Settings of the optimizer and of the learning-rate schedule.

    Attributes:
        learning_rate: the peak of the schedule.
        betas, eps: of AdamW.
        weight_decay: of matrices.
        muon_momentum: of Muon, which trains the matrices of the layers; None trains all weights by AdamW. See
            `engine.optimizer`.
        max_norm: gradients with a larger global L2 norm are scaled down to it; 0 for no limit.
        scheduler: "constant", "linear" or "cosine_with_min_lr"; see `learning_rate_at`.
        warmup_steps: updates of linear warm-up.
        total_steps: updates until the end of the schedule.
        min_lr_ratio: final learning rate of cosine_with_min_lr as a fraction of the peak.
        offload: keep master weights and moments in host memory; see `engine.host_adamw` and `ModelSpec.check_ranks`.
        offload_path: with `offload`, a folder on a disk of each node for them, instead of memory.
        bf16_moments: keep the moments of AdamW in bfloat16; see `engine.bf16_moments`. Not with Muon.
    """

    learning_rate: float = bounded(ge=0)
    betas: tuple[float, float] = bounded((0.9, 0.95), ge=0, lt=1)
    eps: float = 1e-8
    weight_decay: float = bounded(0.0, ge=0)
    muon_momentum: float | None = bounded(None, ge=0, lt=1)
    max_norm: float = bounded(1.0, ge=0)
    scheduler: str = "cosine_with_min_lr"
    warmup_steps: int = 0
    total_steps: int = 1
    min_lr_ratio: float = bounded(0.1, ge=0, le=1)
    offload: bool = False
    offload_path: str | None = None
    bf16_moments: bool = False

    def __post_init__(self) -> None:
        check_bounds(self)
        if self.bf16_moments and self.muon_momentum is not None:
            message = "``bf16_moments`` is for AdamW, and the optimizer is Muon, whose momentum is in float32"
            raise ConfigError(message, hint="use ``muon_momentum=None``, or drop ``bf16_moments``")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """Settings of one model on the training side.

    Attributes:
        path: folder or hub name of a Hugging Face model.
        dtype: "float32" or "bfloat16".
        attn_implementation: see `rlhf_models.loading`.
        gradient_checkpointing: recompute activations in the backward pass, which saves memory.
        packing: concatenate the rows of a micro-batch into one sequence, instead of padding them.
        share_prompts: store the prompt of packed rows that have the same one once, which needs packing.
        sequence_parallel_size: neighbouring ranks that divide the tokens of each pass among them, which needs packing.
            All models of a rank set have the same.
        tensor_parallel_size: neighbouring ranks that divide the weights of the layers among them, and have the same
            batches; see `engine.tensor_parallel`. All models of a run have the same.
        expert_parallel_size: neighbouring ranks that divide the experts of each layer among them, and have batches of
            their own; see `engine.expert_parallel`. All models of a run have the same.
        torch_compile: "on", "off", or "auto", which compiles where that is possible and faster.
        zero_stage: ZeRO stage of DeepSpeed, 0 to 3.
        zpg: neighbouring ranks that keep a second copy of all weights among them, from which passes gather them; 1 for
            none. Needs ZeRO stage 3.
        overlap_comm: at ZeRO stage 3, gather the weights of a trained model, and reduce its gradients, while layers
            compute. Without effect at other stages.
        optimizer: None for a frozen model.
        lora: adapters to train instead of all weights; None for all weights.
        aux_loss_coef: weight of the load-balancing loss in updates; 0 for none. Only for models with experts.
        offload: of a frozen model on a GPU: keep its weights in host memory while it does not run.
        routing_replay: whether tokens of rollouts go through the experts that the engine chose. Only for the actor.
        masked_ids: ids of a language model's vocabulary that get the probability 0, as in the engines that sample
            (`EngineSpec.masked_ids`). Offline runs mask none.
        max_length: tokens of the longest sequence of the run; see `rlhf_models.attention.frequencies.pin_frequencies`.
        chat_template: Jinja text that is saved with the model; None for that of its own tokenizer.
        images: "", "frozen" or "trained"; see `rlhf_models.loading.LoadOptions`.
        is_average: of a teacher: it is the moving average of the actor's weights, see `LearningSpec.ema_beta`, in the
            actor's processes and with the actor's model.
    """

    path: str
    dtype: str = "float32"
    attn_implementation: str = "auto"
    gradient_checkpointing: bool = False
    packing: bool = False
    share_prompts: bool = False
    sequence_parallel_size: int = bounded(1, ge=1)
    tensor_parallel_size: int = bounded(1, ge=1)
    expert_parallel_size: int = bounded(1, ge=1)
    torch_compile: str = "off"
    zero_stage: int = bounded(2, ge=0, le=3)
    zpg: int = bounded(1, ge=1)
    overlap_comm: bool = False
    optimizer: OptimizerSpec | None = None
    lora: "LoraSpec | None" = None
    aux_loss_coef: float = bounded(0.0, ge=0)
    offload: bool = False
    routing_replay: bool = False
    masked_ids: tuple[range, ...] = ()
    max_length: int | None = None
    chat_template: str | None = None
    images: str = ""
    is_average: bool = False

    def __post_init__(self) -> None:
        check_bounds(self)
        divides_tokens = self.sequence_parallel_size > 1
        size = f"``sequence_parallel_size={self.sequence_parallel_size}``"
        compiles = self.torch_compile == "on"
        leave = "leave ``torch_compile`` at auto"
        not_packed = (not self.packing, "``packing`` is off", "add ``packing``")
        shares = (self.share_prompts, "with ``share_prompts`` sequences have parts in common", "drop one of them")
        check_none(
            self.images,
            "a model that reads images is trained on whole sequences with whole layers, not compiled:",
            (self.share_prompts, "``share_prompts`` stores prompts once", "drop it"),
            (divides_tokens, "``sequence_parallel_size`` divides sequences", "drop it"),
            (self.tensor_parallel_size > 1, "``tensor_parallel_size`` divides the layers", "drop it"),
            (compiles, "``torch_compile`` is on", leave),
        )
        check_none(
            self.is_in_4bit,
            "``load_in_4bit`` restores weights inside the layers:",
            (self.zero_stage == 3, "ZeRO stage 3 divides weights of one form", "use ``zero_stage=2``"),
            (self.images, "it is not tested for models that read images", "drop ``load_in_4bit``"),
            (compiles, "the layers are not compiled", leave),
        )
        copies = f"``zpg={self.zpg}`` copies the parts of weights that ZeRO stage 3 makes, and ``zero_stage`` is"
        other_stage = (self.zero_stage < 3, f"{self.zero_stage}", "add ``zero_stage=3``, or drop ``zpg``")
        check_none(self.zpg > 1, copies, other_stage)
        check_none(divides_tokens, f"{size} divides packed sequences, and", not_packed)
        check_none(self.share_prompts, "``share_prompts`` stores the prompts of packed samples once, and", not_packed)
        compiled = (compiles, f"the layers are not compiled with {size}", leave)
        check_none(divides_tokens, "``torch_compile=on``, and", compiled)
        check_none(divides_tokens, "``sequence_parallel_size`` divides sequences, and", shares)
        check_none(self.aux_loss_coef > 0, "``aux_loss_coef`` counts the tokens of whole sequences, and", shares)
        apart = "``routing_replay`` sends the tokens of each sequence to experts of its own, and"
        check_none(self.routing_replay, apart, shares)

    def check_passes(self, max_tokens: int | None) -> None:
        """Raise ConfigError for passes of at most `max_tokens` tokens, unless this is None or samples are packed."""
        hint = "add ``packing``, or use ``micro_train_batch_size``"
        message = "``micro_batch_tokens`` limits packed sequences, and"
        check_none(max_tokens is not None, message, (not self.packing, "``packing`` is off", hint))

    def check_ranks(self, num_ranks: int, how: str = "{} of them") -> None:
        """Raise ConfigError for what cannot be done on `num_ranks` processes, or not with this optimizer.

        That is division of tokens or weights, a second copy of the weights, and states of the optimizer in host memory.
        `how` says in a hint how to start more processes, with {} for their number.
        """
        for name in ("sequence_parallel_size", "tensor_parallel_size", "expert_parallel_size"):
            size = getattr(self, name)
            if num_ranks % size:
                message = f"``{name}`` is {size}, and a model has {num_ranks} training process(es)"
                raise ConfigError(message, hint=f"use {size} or a multiple: {how.format(size)}")
        optimizer = self.optimizer
        is_muon = optimizer is not None and optimizer.muon_momentum is not None
        offloads = optimizer is not None and optimizer.offload
        compiles = (self.torch_compile == "on", "``torch_compile`` is on", "leave ``torch_compile`` at auto")
        sharded = (self.zero_stage == 3, "``zero_stage`` is 3", "use ``zero_stage=2``, or ``zero_stage=3`` alone")
        size = self.tensor_parallel_size
        check_none(
            size > 1,
            f"``tensor_parallel_size={size}`` divides the matrices of the layers over processes, and",
            sharded,
            (self.sequence_parallel_size > 1, "``sequence_parallel_size`` divides tokens", "use one of them"),
            (self.lora is not None, "LoRA adapters add matrices that are not divided", "drop one of them"),
            (is_muon, "Muon needs whole matrices", "use ``muon_momentum=None``"),
            compiles,
        )
        size = self.expert_parallel_size
        check_none(
            size > 1,
            f"``expert_parallel_size={size}`` divides the experts of the layers over processes, and",
            sharded,
            (self.tensor_parallel_size > 1, "``tensor_parallel_size`` divides the layers", "use one of them"),
            (self.lora is not None, "LoRA adapters train no experts", "drop one of them"),
            (is_muon, "Muon shares matrices out over all processes", "use ``muon_momentum=None``"),
            (offloads, "``OptimizerSpec.offload`` knows no ranks with other experts", "drop one of them"),
            (self.images, "models that read images are trained whole", "drop it"),
            compiles,
        )
        if num_ranks % self.zpg:
            sizes = [size for size in range(1, num_ranks + 1) if num_ranks % size == 0]
            message = (
                f"``zpg={self.zpg}`` must divide the number of training processes of each model, which is {num_ranks}"
            )
            raise ConfigError(message, hint=f"use one of {', '.join(map(str, sizes))}, or another number of processes")
        shares_gradients = self.zero_stage == 2 and num_ranks > self.tensor_parallel_size
        check_none(
            offloads,
            "``OptimizerSpec.offload`` is for AdamW on bfloat16 weights, not at ZeRO stage 2 on several processes:",
            (is_muon, "the optimizer is Muon", "use ``muon_momentum=None``"),
            (self.dtype != "bfloat16", f"weights are {self.dtype}", "add ``dtype=bfloat16``"),
            (shares_gradients, "``zero_stage`` is 2", "use ``zero_stage=1``, or 3 to divide more"),
        )

    @property
    def may_compile_ahead(self) -> bool:
        """Whether nothing in these settings keeps layers from being compiled before the first step.

        At ZeRO stage 3 the first step compiles them, because passes need DeepSpeed's engine.
        """
        is_whole = self.ranks_per_batch == self.expert_parallel_size == 1
        has_whole_layers = is_whole and not self.images and not self.is_in_4bit
        return self.torch_compile != "off" and self.zero_stage < 3 and has_whole_layers

    @property
    def is_in_4bit(self) -> bool:
        """Whether its frozen weights are in 4 bits."""
        return self.lora is not None and self.lora.load_in_4bit

    @property
    def ranks_per_batch(self) -> int:
        """Neighbouring ranks that have the same batches."""
        return self.sequence_parallel_size * self.tensor_parallel_size

    def is_base_of(self, other: "ModelSpec | None") -> bool:
        """Return whether this model is the one that another model becomes without its adapters."""
        has_adapters = other is not None and other.lora is not None
        return has_adapters and (self.path, self.load_options) == (other.path, other.load_options)

    @property
    def load_options(self) -> dict[str, Any]:
        """The keyword arguments that all loaders of `rlhf_models` take."""
        names = ("dtype", "attn_implementation", "packing", "max_length", "images")
        return {name: getattr(self, name) for name in names}
