"""What a run leaves."""

from rlhf_data.options import Section, flag


class OutputSection(Section, title="output"):
    """The folder of a run."""

    save_path: str | None = flag(
        None, "folder for everything a run leaves, new or empty; None: ./rlhf-output/COMMAND-DATE-TIME"
    )


class PpoOutputSection(OutputSection):
    """Adds the critic."""

    save_value_network: bool = flag(False, "save the critic beside the policy")
