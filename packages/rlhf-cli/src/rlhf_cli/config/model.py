"""Options of models: which ones, and how they are computed."""

from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING

from rlhf_data.errors import ConfigError
from rlhf_data.options.checks import lacking, without_effect
from rlhf_data.options.declare import Section, flag, flag_of, matching, one_of
from rlhf_rollout.commands import sections
from rlhf_train.specs import ModelSpec, OptimizerSpec

if TYPE_CHECKING:
    from rlhf_models.lora import LoraSpec

TorchCompile = one_of(("auto", "on", "off"))


class ModelSection(sections.ModelSection):
    """The trained model and how every model is computed, for all training commands."""

    attn_implementation: str = flag(
        "auto",
        "attention of the trained models: `auto`, a name that transformers knows, or with --packing_samples"
        " `rlhf_packed` (FlashAttention 2) or `rlhf_packed_4` (FlashAttention 4, compute capability 9 or 10)",
    )
    gradient_checkpointing: bool = flag(False, "recompute activations in the backward pass: less memory, more time")
    packing_samples: bool = flag(False, "pack the sequences of a micro-batch into one row, instead of padding them")
    sequence_parallel_size: int = flag_of(
        ModelSpec.sequence_parallel_size,
        "with --packing_samples: number of training processes that divide the tokens of each pass (DeepSpeed-Ulysses);"
        " each needs 1 / N of the memory for activations. N must divide the number of attention heads",
    )
    ds_tensor_parallel_size: int = flag_of(
        ModelSpec.tensor_parallel_size,
        "number of training processes that divide the matrices of the layers (DeepSpeed AutoTP) and train on the same"
        " batches, below ZeRO stage 3. N must divide the number of key-value heads and the width of the MLPs of all"
        " models",
    )
    expert_parallel_size: int = flag_of(
        ModelSpec.expert_parallel_size,
        "mixtures of experts: number of training processes that divide the experts of each layer and send tokens to the"
        " processes that have their experts (by DeepSpeed's all-to-all), below ZeRO stage 3. N must divide the number"
        " of experts of all models",
    )
    torch_compile: TorchCompile = flag(
        "auto",
        "compile the layers, and with --bf16 at ZeRO stage 0 or 1 replay packed batches as CUDA graphs; auto: on a GPU,"
        " with --packing_samples, at ZeRO stage 3 only without adapters",
    )
    aux_loss_coef: float = flag_of(
        ModelSpec.aux_loss_coef,
        "mixtures of experts: weight of the router's load-balancing loss, in the policy's updates (ppo) or the trained"
        " model's; 0: none. Weights of 0.001 to 0.01 are usual",
    )
    lora_rank: int = flag(0, "rank of the LoRA adapters; 0: train all weights instead", ge=0)
    lora_alpha: float = flag(16.0, "the output of adapters is scaled by this / their rank", gt=0)
    target_modules: str = flag(
        "all-linear", "layers that get an adapter: `all-linear`, or comma-separated names such as q_proj,v_proj"
    )
    load_in_4bit: bool = flag(
        False,
        "with --lora_rank: keep the frozen weights under the adapters in 4 bits (NF4), which takes a quarter of the"
        " memory of bfloat16; needs bitsandbytes",
    )

    def check(self, given: Collection[str]) -> list[str]:
        """Return a notice for each option that has no effect."""
        if self.load_in_4bit and not self.has_adapters:
            message = "--load_in_4bit is for frozen weights under adapters, and --lora_rank is 0"
            raise ConfigError(message, hint="add --lora_rank 16, or drop --load_in_4bit")
        options = ["lora_alpha", "lora_dropout", "target_modules"]
        return without_effect(given, (not self.has_adapters, options, "--lora_rank is 0"))

    def missing(self) -> list[ConfigError]:
        """Return an error when no model to train is named."""
        hint = "add --pretrain FOLDER_OR_NAME; --pretrain builtin is the tiny model that ships"
        return lacking(self, "pretrain", "it names the model to train", hint)

    def spec(self, path: str, sharding: Mapping[str, int], optimizer: OptimizerSpec | None = None) -> ModelSpec:
        """Return how the model at `path` is computed. Without an optimizer it is frozen.

        `sharding` is `TrainingSection.sharding`.
        """
        options = matching(ModelSpec, self) | {"offload": getattr(self, "ref_reward_offload", False)}
        options["tensor_parallel_size"] = self.ds_tensor_parallel_size
        if optimizer is None:
            if options.get("routing_replay") or self.aux_loss_coef:
                # The policy is not compiled then. A compiled reference rounds differently, and their KL would not be 0.
                options["torch_compile"] = "off"
            options |= {"gradient_checkpointing": False, "lora": None, "aux_loss_coef": 0.0, "routing_replay": False}
        return ModelSpec(path=path, packing=self.packing_samples, optimizer=optimizer, **sharding, **options)

    @property
    def has_adapters(self) -> bool:
        """Whether a model trains adapters."""
        return self.lora_rank > 0

    @property
    def lora(self) -> "LoraSpec | None":
        """The adapters to train; None to train all weights."""
        return self.adapters(self.lora_rank)

    def adapters(self, rank: int) -> "LoraSpec | None":
        """Return adapters of this rank; None if it is 0."""
        if not rank:
            return None
        from rlhf_models.lora import LoraSpec  # imports torch

        targets = self.target_modules if self.target_modules == "all-linear" else tuple(self.target_modules.split(","))
        dropout = getattr(self, "lora_dropout", 0.0)
        return LoraSpec(
            rank=rank,
            alpha=self.lora_alpha,
            dropout=dropout,
            target_modules=targets,
            load_in_4bit=self.load_in_4bit,
        )


class FrozenSection(Section, title="model"):
    """Where models that are not trained are kept."""

    ref_reward_offload: bool = flag(
        False,
        "keep models that are not trained (reference, teacher, reward models) in CPU memory, and on the GPU only while"
        " they run",
    )


class ImageModelSection(ModelSection):
    """Adds what is trained of a model that reads images."""

    freeze_visual_encoder: bool = flag(
        False, "with --image_key: train only the weights that text reaches, not those that read images"
    )

    def reads_images(self, image_key: str | None) -> str:
        """Return how the trained model reads images; see `ModelSpec`."""
        if image_key is None:
            return ""
        return "frozen" if self.freeze_visual_encoder else "trained"


class PpoModelSection(ImageModelSection, FrozenSection):
    """Adds the critic, prompts that are stored once, and what a model takes over from its rollouts."""

    share_prompts: bool = flag(
        False,
        "with --packing_samples: the responses to one prompt in a pass share its tokens in the layers, which saves the"
        " time and the memory of its copies",
    )
    routing_replay: bool = flag(
        False,
        "mixtures of experts: train the policy with the experts that the engine chose for each token (Rollout Routing"
        " Replay, R3), so that the log-probs of trainer and engine differ less",
    )

    critic_pretrain: str | None = flag(
        None,
        "model from which the critic starts; None: the first of --reward_pretrain, or else --pretrain, with a value"
        " head of zeros",
        names_model=True,
    )
    critic_lora_rank: int | None = flag(
        None, "rank of the critic's LoRA adapters; 0: train all of its weights; None: that of --lora_rank", ge=0
    )

    @property
    def has_adapters(self) -> bool:
        """Whether a model trains adapters."""
        return bool(self.lora_rank or self.critic_lora_rank)

    @property
    def critic_lora(self) -> "LoraSpec | None":
        """The adapters of the critic; None to train all of its weights."""
        return self.lora if self.critic_lora_rank is None else self.adapters(self.critic_lora_rank)


class OfflineModelSection(ModelSection):
    """Adds dropout of adapters."""

    lora_dropout: float = flag(0.0, "dropout probability of an adapter's input", ge=0, lt=1)


class ImageOfflineModelSection(ImageModelSection, OfflineModelSection):
    """Options of both."""


class ComparedModelSection(ImageOfflineModelSection, FrozenSection):
    """Adds the reference."""

    ref_pretrain: str | None = flag(None, "the reference model; None: a frozen copy of --pretrain", names_model=True)
    precompute_reference: bool = flag(
        False, "compute the reference's log-probs of all examples once before training, not at every update"
    )

    def check(self, given: Collection[str]) -> list[str]:
        """See `ModelSection.check`."""
        is_own_base = self.lora_rank > 0 and self.ref_pretrain is None
        unused = ["ref_reward_offload"]
        return super().check(given) + without_effect(
            given,
            (self.precompute_reference, unused, "--precompute_reference drops the reference before the first update"),
            (is_own_base, unused, "with --lora_rank the reference is the model without its adapters"),
        )


class TaughtModelSection(ImageOfflineModelSection, FrozenSection):
    """Adds the teacher."""

    teacher_model: str | None = flag(
        None, "the teacher: a model folder or hub name with the same tokenizer", names_model=True
    )
