"""What a model on the training side is told, as plain frozen data."""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerSpec:
    """AdamW and its schedule.

    Attributes:
        learning_rate: the peak.
        betas, eps, weight_decay: AdamW's.
        max_norm: gradients are scaled down to this global norm; 0 for no limit.
        scheduler: "constant", "linear" or "cosine_with_min_lr".
        warmup_steps: updates of linear warm-up.
        total_steps: updates until the schedule's end.
        min_lr_ratio: of the peak, at the end of cosine_with_min_lr.
    """

    learning_rate: float
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    weight_decay: float = 0.0
    max_norm: float = 1.0
    scheduler: str = "cosine_with_min_lr"
    warmup_steps: int = 0
    total_steps: int = 1
    min_lr_ratio: float = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """One model on the training side.

    Attributes:
        path: a Hugging Face model folder or name.
        dtype: "float32" or "bfloat16".
        attn_implementation: see `rlhf_models.loading`.
        gradient_checkpointing: recompute activations in the backward pass.
        packing: rows of a micro-batch are packed into one sequence instead of padded.
        torch_compile: "on", "off", or "auto": where it can be done and pays; of models that learn from fixed examples.
        zero_stage: DeepSpeed's, 0 to 3.
        optimizer: None for a frozen model.
    """

    path: str
    dtype: str = "float32"
    attn_implementation: str = "auto"
    gradient_checkpointing: bool = False
    packing: bool = False
    torch_compile: str = "off"
    zero_stage: int = 2
    optimizer: OptimizerSpec | None = None

    @property
    def load_options(self) -> dict[str, Any]:
        """What every loader of `rlhf_models` is told of it."""
        return {"dtype": self.dtype, "attn_implementation": self.attn_implementation, "packing": self.packing}
