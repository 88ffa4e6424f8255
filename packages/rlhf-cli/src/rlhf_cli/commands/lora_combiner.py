"""`lora_combiner`: merge a LoRA adapter into its model."""

from collections.abc import Collection, Sequence
from pathlib import Path

from rlhf_cli.config.paths import check_output_folder, model_of_run, model_path, run_folder_notices, user_path
from rlhf_cli.console.exits import SUCCESS, exit_status
from rlhf_cli.openrlhf.flags import flags_of
from rlhf_data.errors import ConfigError
from rlhf_data.options.checks import lacking
from rlhf_data.options.command_line import CommandLine, show_parsed
from rlhf_data.options.declare import Config, flag, with_defaults
from rlhf_data.options.sections import TrustSection
from rlhf_data.pretrained import check_code
from rlhf_rollout.commands.sections import PrecisionSection
from rlhf_rollout.commands.terminal import TERMINAL, log_file

DESCRIPTION = "Merge a low-rank adapter into its model, or reward model, and write a plain Hugging Face model folder."


class MergeSection(with_defaults(PrecisionSection, bf16=True), TrustSection, title="merge"):
    """The adapter, its model and the output folder."""

    model_path: str | None = flag(
        None, "the model that the adapter was trained on: a folder or hub name", names_model=True
    )
    lora_path: str | None = flag(
        None, "folder of the adapter; for a reward model it also contains the score head", names_model=True
    )
    output_path: str | None = flag(None, "new or empty folder for the merged model")
    load_in_4bit: bool = flag(
        False,
        "merge into the weights that training with --load_in_4bit computed with, which makes the policy that was"
        " trained; else into those of --model_path",
    )


class LoraCombinerConfig(Config):
    """All options of `lora_combiner`."""

    merge: MergeSection = MergeSection()

    def missing(self) -> list[ConfigError]:
        """See `Config`."""
        found = []
        whats = {"model_path": "the model", "lora_path": "the adapter", "output_path": "the folder to write"}
        for name, what in whats.items():
            found += lacking(self.merge, name, f"it names {what}", f"add --{name} DIR")
        return found

    def check(self, given: Collection[str]) -> list[str]:
        """See `Config`."""
        return run_folder_notices(self)


COMMAND_LINE = CommandLine(
    config=LoraCombinerConfig,
    prog="rlhf lora_combiner",
    description=DESCRIPTION,
    resolve=user_path,
    foreign=flags_of("lora_combiner"),
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; return its exit status."""
    return exit_status(_run, argv)


def _run(argv: Sequence[str]) -> int:
    parsed = COMMAND_LINE.parse(argv)
    merge = parsed.config.merge
    show_parsed(parsed)
    if parsed.dry_run:
        check_code(model_path(merge.model_path) if merge.model_path else "")
        return SUCCESS
    out = user_path(merge.output_path)
    check_output_folder(out, "--output_path")
    with TERMINAL.captured(log_file("lora_combiner", str(out))):
        _merge(merge, out)
    print(f"written to {out}")
    return SUCCESS


def _merge(merge: MergeSection, out: Path) -> None:
    progress = TERMINAL.progress

    def report(done: int, total: int) -> None:
        if done < total:
            progress.show(f"merging {merge.lora_path}", done=done, total=total)
        else:
            progress.show(f"writing {out}")

    with progress.doing(f"loading {merge.model_path}"):
        from rlhf_models.lora import merge_adapter  # imports torch, which takes seconds

        base, adapter = model_path(merge.model_path), model_of_run(user_path(merge.lora_path))
        merge_adapter(base, adapter, out, dtype=merge.dtype, load_in_4bit=merge.load_in_4bit, report=report)
