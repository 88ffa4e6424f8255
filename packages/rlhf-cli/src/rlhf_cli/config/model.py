"""Which models, and how they are computed."""

from typing import ClassVar

from pydantic import Field

from rlhf_cli.config.base import Section, one_of

TorchCompile = one_of(("auto", "on", "off"))


class ModelSection(Section):
    """The trained model and how every model is run; what all commands have in common."""

    TITLE: ClassVar[str] = "model"

    pretrain: str | None = Field(
        None,
        description="the model to start from: a Hugging Face model folder or hub name, or `builtin` for the tiny one"
        " that ships",
    )
    bf16: bool = Field(False, description="compute in bfloat16 with float32 master weights; else float32")
    attn_implementation: str = Field(
        "auto", description="attention of the trained models: `auto`, or a name that transformers knows"
    )
    gradient_checkpointing: bool = Field(
        False, description="recompute activations in the backward pass: less memory, more time"
    )
    packing_samples: bool = Field(
        False, description="pack the sequences of a micro-batch into one row instead of padding them"
    )


class PpoModelSection(ModelSection):
    """Adds the critic."""

    critic_pretrain: str | None = Field(
        None,
        description="what the critic starts from; None: the first --reward_pretrain, or else --pretrain, with a value"
        " head of zeros",
    )


class OfflineModelSection(ModelSection):
    """Adds adapters and compilation."""

    torch_compile: TorchCompile = Field(
        "auto", description="compile the model's layers; auto: on a GPU, with --zero_stage below 3"
    )
    lora_rank: int = Field(0, ge=0, description="rank of the adapters that are trained; 0: train all weights")
    lora_alpha: float = Field(16.0, gt=0, description="adapters count this / --lora_rank times")
    lora_dropout: float = Field(0.0, ge=0, lt=1, description="share of an adapter's input that is left out")
    target_modules: str = Field(
        "all-linear", description="layers that get an adapter: `all-linear`, or names with commas, as q_proj,v_proj"
    )


class ComparedModelSection(OfflineModelSection):
    """Adds the reference."""

    ref_pretrain: str | None = Field(None, description="the reference policy; None: --pretrain, as it is at the start")
    precompute_reference: bool = Field(
        False, description="ask the reference once about all examples, before the first step, not at every step"
    )


class TaughtModelSection(OfflineModelSection):
    """Adds the teacher."""

    teacher_model: str | None = Field(None, description="the teacher: a model folder or hub name with the same tokens")
