"""Which models, and how they are computed."""

from rlhf_data.options import flag, matching, one_of
from rlhf_rollout.commands import sections
from rlhf_train.specs import ModelSpec, OptimizerSpec

TorchCompile = one_of(("auto", "on", "off"))


class ModelSection(sections.ModelSection):
    """The trained model and how every model is run; what all commands have in common."""

    attn_implementation: str = flag(
        "auto", "attention of the trained models: `auto`, or a name that transformers knows"
    )
    gradient_checkpointing: bool = flag(False, "recompute activations in the backward pass: less memory, more time")
    packing_samples: bool = flag(False, "pack the sequences of a micro-batch into one row instead of padding them")

    def spec(self, path: str, zero_stage: int, optimizer: OptimizerSpec | None = None) -> ModelSpec:
        """Return how the model at `path` is run; without an optimizer it is frozen."""
        recomputes = self.gradient_checkpointing and optimizer is not None
        options = matching(ModelSpec, self) | {"gradient_checkpointing": recomputes}
        return ModelSpec(path=path, packing=self.packing_samples, zero_stage=zero_stage, optimizer=optimizer, **options)


class PpoModelSection(ModelSection):
    """Adds the critic."""

    critic_pretrain: str | None = flag(
        None,
        "what the critic starts from; None: the first --reward_pretrain, or else --pretrain, with a value"
        " head of zeros",
    )


class OfflineModelSection(ModelSection):
    """Adds adapters and compilation."""

    torch_compile: TorchCompile = flag(
        "auto",
        "compile the layers, and in bf16 at ZeRO 0 and 1 replay packs as CUDA graphs; auto: on a GPU, below ZeRO 3",
    )
    lora_rank: int = flag(0, "rank of the adapters that are trained; 0: train all weights", ge=0)
    lora_alpha: float = flag(16.0, "adapters count this / --lora_rank times", gt=0)
    lora_dropout: float = flag(0.0, "share of an adapter's input that is left out", ge=0, lt=1)
    target_modules: str = flag(
        "all-linear", "layers that get an adapter: `all-linear`, or names with commas, as q_proj,v_proj"
    )


class ComparedModelSection(OfflineModelSection):
    """Adds the reference."""

    ref_pretrain: str | None = flag(None, "the reference policy; None: --pretrain, as it is at the start")
    precompute_reference: bool = flag(
        False, "ask the reference once about all examples, before the first step, not at every step"
    )


class TaughtModelSection(OfflineModelSection):
    """Adds the teacher."""

    teacher_model: str | None = flag(None, "the teacher: a model folder or hub name with the same tokens")
