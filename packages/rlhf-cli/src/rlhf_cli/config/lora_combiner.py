"""The configuration of `lora_combiner`."""

from collections.abc import Collection
from typing import ClassVar

from pydantic import BaseModel, ConfigDict, Field

from rlhf_cli.config.base import Section, one_of
from rlhf_cli.config.checks import missing


class MergeSection(Section):
    """What is merged into what."""

    TITLE: ClassVar[str] = "merge"

    model_path: str | None = Field(None, description="the model that the adapter was trained on: a folder or hub name")
    lora_path: str | None = Field(None, description="the adapter's folder; one of a reward model has its head in it")
    output_path: str | None = Field(None, description="folder for the merged model, new or empty")
    param_dtype: one_of(("bfloat16", "float32")) = Field("bfloat16", description="type of the merged weights")


class LoraCombinerConfig(BaseModel):
    """Everything `lora_combiner` is told."""

    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=())

    merge: MergeSection = Field(default_factory=MergeSection)

    def check(self, given: Collection[str]) -> list[str]:
        """Raise ConfigError unless all three paths are there."""
        for name in ("model_path", "lora_path", "output_path"):
            if getattr(self.merge, name) is None:
                raise missing(name, f"lora_combiner needs a {name}", f"--{name} DIR")
        return []
