"""`check`: look for faults in functions of your own on random data, before a run."""

from collections.abc import Sequence

from rlhf_cli.config.paths import user_path
from rlhf_cli.console.exits import SUCCESS, exit_status
from rlhf_data.errors import ConfigError
from rlhf_data.options.checks import lacking
from rlhf_data.options.command_line import CommandLine, show_parsed
from rlhf_data.options.declare import Config, Section, flag
from rlhf_data.options.exits import FAILURE
from rlhf_rollout.commands.terminal import TERMINAL

DESCRIPTION = """`rlhf check FILE.py` runs the functions `policy_loss`, `advantages`, `keep_group` and `step_metrics` of
a file, as ppo takes them by --policy_loss_path, --advantage_path, --group_filter_path and --metrics_path, on random
data: results, gradients, masks, padding, splits of the batch, orders. The status is 1 if something is wrong."""


class CheckSection(Section, title="check"):
    """What is checked."""

    file: str | None = flag(None, "the same as FILE.py")


class CheckConfig(Config):
    """All options of `check`."""

    check_file: CheckSection = CheckSection()

    def missing(self) -> list[ConfigError]:
        """See `Config`."""
        return lacking(self.check_file, "file", "a file must be named", "write `rlhf check FILE.py`")


COMMAND_LINE = CommandLine(
    config=CheckConfig, prog="rlhf check", words="FILE.py", description=DESCRIPTION, resolve=user_path
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; return its exit status."""
    return exit_status(_run, argv)


def _run(argv: Sequence[str]) -> int:
    parsed = COMMAND_LINE.parse_naming("--file", argv)
    show_parsed(parsed)
    if parsed.dry_run:
        return SUCCESS
    file = parsed.config.check_file.file
    assert file is not None
    path = user_path(file)
    found = {}
    with TERMINAL.progress.doing(f"checking {path.name}"):
        from rlhf_train.algorithms.own_code import INPUTS, OwnCode, top_names
        from rlhf_train.losses.own_check import check_own_code

        names = top_names(path)
        for function in [name for name in INPUTS if name in names] or ["policy_loss"]:
            found[function] = check_own_code(OwnCode.read(function, path))
    for function, findings in found.items():
        print(*(f"fault: {error}\n" for error in findings), sep="\n", end="\n" if findings else "")
        print(f"{function}: {f'{len(findings)} fault(s)' if findings else 'ok'}")
    return FAILURE if any(found.values()) else SUCCESS
