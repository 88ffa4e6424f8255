"""The configuration of `sft`."""

from collections.abc import Collection

from pydantic import BaseModel, ConfigDict, Field

from rlhf_cli.config.checks import check_betas, check_schedule, missing
from rlhf_cli.config.data import DemonstrationSection
from rlhf_cli.config.model import ModelSection
from rlhf_cli.config.output import OutputSection
from rlhf_cli.config.training import SftTrainingSection


class SftConfig(BaseModel):
    """Everything `sft` is told."""

    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=())

    model: ModelSection = Field(default_factory=ModelSection)
    data: DemonstrationSection = Field(default_factory=DemonstrationSection)
    training: SftTrainingSection = Field(default_factory=SftTrainingSection)
    output: OutputSection = Field(default_factory=OutputSection)

    def check(self, given: Collection[str]) -> list[str]:
        """Check what concerns several fields.

        Args:
            given: the options that somebody set to something else than the default.

        Returns:
            A notice for each option that has no effect.

        Raises:
            ConfigError: options that cannot work together.
        """
        if self.model.pretrain is None:
            raise missing(
                "pretrain", "sft needs a model to start from", "--pretrain builtin is the tiny model that ships"
            )
        if self.data.dataset is None:
            raise missing("dataset", "sft needs examples", "--dataset FILE.jsonl, with --input_key and --output_key")
        check_betas(self.training)
        return check_schedule(self.training, given)
