"""Which models, and how they are computed."""

from typing import ClassVar

from pydantic import Field

from rlhf_cli.config.base import Section


class ModelSection(Section):
    """The policy's model and how every model is run; what all commands have in common."""

    TITLE: ClassVar[str] = "model"

    pretrain: str | None = Field(
        None,
        description="the policy to start from: a Hugging Face model folder or hub name, or `builtin` for the tiny model"
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
