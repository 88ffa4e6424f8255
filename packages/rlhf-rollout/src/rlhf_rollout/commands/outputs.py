"""The options of the file that a command of `rlhf-rollout` writes, and of training data made from answers."""

from pathlib import Path

from rlhf_data.errors import ConfigError
from rlhf_data.options.checks import lacking
from rlhf_data.options.declare import Section, flag, one_of
from rlhf_data.options.sections import TemplateText
from rlhf_rollout.commands.post_process import POST_PROCESSORS, SELECTORS

PostProcessor = one_of(POST_PROCESSORS)
Selector = one_of(SELECTORS)


class FileSection(Section, title="output"):
    """The file that a command writes."""

    output_path: str | None = flag(None, "FILE.jsonl to write")
    overwrite: bool = flag(False, "replace the file if it exists")

    @property
    def path(self) -> Path:
        """The output file, which must be named."""
        assert self.output_path is not None
        return Path(self.output_path)

    def missing(self) -> list[ConfigError]:
        """Return an error when no output file is named."""
        return lacking(self, "output_path", "the rows must be written somewhere", "add --output_path FILE.jsonl")


class SelectedFileSection(FileSection):
    """Adds which answers become training data, and how."""

    min_reward: float | None = flag(
        None, "lowest reward that `rs` accepts; None: `rs` accepts responses with the verdict ok"
    )
    reward_template: TemplateText = flag(
        "{input} <rm_score>: {reward} ",
        r"the input of a row of `csft`, with {input} and {reward} in it; \n as in --input_template",
    )

    def check_template(self, kind: str) -> None:
        """Raise ConfigError if rows of `kind` need the reward template and it cannot be filled in."""
        template = self.reward_template
        if kind == "csft" and not all(template.count(part) == 1 for part in ("{input}", "{reward}")):
            raise ConfigError(f"--reward_template must hold {{input}} and {{reward}} once, got {template!r}")


class GenerateFileSection(SelectedFileSection):
    """Adds what is written: rollouts, or training data made from them."""

    resume: bool = flag(False, "continue a run that was stopped: prompts whose rollouts are in the file are skipped")
    post_processor: PostProcessor = flag(
        "rollouts", "; ".join(f"{name}: {text}" for name, text in POST_PROCESSORS.items())
    )

    @property
    def rollouts_path(self) -> Path:
        """The file of rollouts: the file of results itself, or one beside it."""
        return self.path if self.post_processor == "rollouts" else self.path.with_suffix(".rollouts.jsonl")


class ScoreFileSection(SelectedFileSection):
    """Adds what is written: all rows, or training data made from them."""

    post_processor: Selector = flag(
        "rows", "rows with one input are compared; " + "; ".join(f"{name}: {text}" for name, text in SELECTORS.items())
    )
