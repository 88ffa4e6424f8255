"""What a run leaves."""

from typing import ClassVar

from pydantic import Field

from rlhf_cli.config.base import Section


class OutputSection(Section):
    """The folder of a run."""

    TITLE: ClassVar[str] = "output"

    save_path: str | None = Field(
        None, description="folder for everything a run leaves, new or empty; None: ./rlhf-output/COMMAND-DATE-TIME"
    )


class PpoOutputSection(OutputSection):
    """Adds the critic."""

    save_value_network: bool = Field(False, description="save the critic beside the policy")
