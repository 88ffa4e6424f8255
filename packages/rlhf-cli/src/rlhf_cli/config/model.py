"""Options of models: which ones, and how they are computed."""

from typing import TYPE_CHECKING

from rlhf_data.checks import lacking
from rlhf_data.errors import ConfigError
from rlhf_data.options import flag, matching, one_of
from rlhf_rollout.commands import sections
from rlhf_train.specs import ModelSpec, OptimizerSpec

if TYPE_CHECKING:
    from rlhf_models.lora import LoraSpec

TorchCompile = one_of(("auto", "on", "off"))


class ModelSection(sections.ModelSection):
    """The trained model and how every model is computed, for all training commands."""

    attn_implementation: str = flag(
        "auto", "attention of the trained models: `auto`, or a name that transformers knows"
    )
    gradient_checkpointing: bool = flag(False, "recompute activations in the backward pass: less memory, more time")
    packing_samples: bool = flag(False, "pack the sequences of a micro-batch into one row, instead of padding them")

    def missing(self) -> list[ConfigError]:
        """Return an error when no model to train is named."""
        hint = "add --pretrain FOLDER_OR_NAME; --pretrain builtin is the tiny model that ships"
        return lacking(self, "pretrain", "it names the model to train", hint)

    def spec(self, path: str, zero_stage: int, optimizer: OptimizerSpec | None = None) -> ModelSpec:
        """Return how the model at `path` is computed. Without an optimizer it is frozen."""
        recomputes = self.gradient_checkpointing and optimizer is not None
        options = matching(ModelSpec, self) | {"gradient_checkpointing": recomputes}
        return ModelSpec(path=path, packing=self.packing_samples, zero_stage=zero_stage, optimizer=optimizer, **options)


class PpoModelSection(ModelSection):
    """Adds the critic."""

    critic_pretrain: str | None = flag(
        None,
        "model from which the critic starts; None: the first of --reward_pretrain, or else --pretrain, with a value"
        " head of zeros",
    )


class OfflineModelSection(ModelSection):
    """Adds adapters and compilation."""

    torch_compile: TorchCompile = flag(
        "auto",
        "compile the layers, and with --bf16 at ZeRO stage 0 or 1 replay packed batches as CUDA graphs; auto: on a GPU,"
        " below ZeRO stage 3",
    )
    lora_rank: int = flag(0, "rank of the LoRA adapters; 0: train all weights instead", ge=0)
    lora_alpha: float = flag(16.0, "the output of adapters is scaled by this / --lora_rank", gt=0)
    lora_dropout: float = flag(0.0, "dropout probability of an adapter's input", ge=0, lt=1)
    target_modules: str = flag(
        "all-linear", "layers that get an adapter: `all-linear`, or comma-separated names such as q_proj,v_proj"
    )

    def lora(self) -> "LoraSpec | None":
        """Return the adapters to train; None to train all weights."""
        if not self.lora_rank:
            return None
        from rlhf_models.lora import LoraSpec  # imports torch

        targets = self.target_modules if self.target_modules == "all-linear" else tuple(self.target_modules.split(","))
        rates = {"alpha": self.lora_alpha, "dropout": self.lora_dropout}
        return LoraSpec(rank=self.lora_rank, target_modules=targets, **rates)


class ComparedModelSection(OfflineModelSection):
    """Adds the reference."""

    ref_pretrain: str | None = flag(None, "the reference model; None: a frozen copy of --pretrain")
    precompute_reference: bool = flag(
        False, "compute the reference's log-probs of all examples once before training, not at every update"
    )


class TaughtModelSection(OfflineModelSection):
    """Adds the teacher."""

    teacher_model: str | None = flag(None, "the teacher: a model folder or hub name with the same tokenizer")
