"""`report`: one page with what a run did: curves, rollouts with every token, configuration, and what needs a look."""

import sys
from collections.abc import Collection, Sequence
from contextlib import suppress
from itertools import takewhile
from pathlib import Path

from rlhf_cli.config.paths import parts, user_path
from rlhf_cli.console.exits import SUCCESS, exit_status
from rlhf_data.errors import ConfigError
from rlhf_data.options.checks import lacking, without_effect
from rlhf_data.options.command_line import CommandLine, show_parsed
from rlhf_data.options.declare import Config, Section, flag

DESCRIPTION = """`rlhf report RUN_DIR [RUN_DIR ...]` writes one HTML file about a run, or several to compare: curves,
rollouts with their tokens, configuration, and what needs a look. It opens from the disk and loads nothing else."""
_FILE = "report.html"


class ReportSection(Section, title="report"):
    """Which runs are shown, and where."""

    run: str | None = flag(None, "the same as RUN_DIR; several with commas")
    output_path: str | None = flag(None, f"file to write; None: {_FILE} in the first run's folder")
    max_rollouts: int = flag(
        10_000, "rollouts in the file; of more, some groups of every step are taken, and the page says so", ge=0
    )
    max_tokens: int = flag(1_000_000, "tokens in the file, about 30 bytes each; see --max_rollouts", ge=0)
    serve: bool = flag(
        False, "write no file, but show the page at an address of this machine, follow runs and search all rollouts"
    )
    port: int = flag(0, "of that address; 0: any free one", ge=0, le=65535)


class ReportConfig(Config):
    """All options of `report`."""

    report: ReportSection = ReportSection()

    def missing(self) -> list[ConfigError]:
        """See `Config`."""
        return lacking(self.report, "run", "a run must be named", "write `rlhf report RUN_DIR`")

    def check(self, given: Collection[str]) -> list[str]:
        """See `Config`."""
        return without_effect(
            given,
            (not self.report.serve, ["port"], "there is no --serve"),
            (self.report.serve, ["output_path"], "--serve writes no file"),
        )


COMMAND_LINE = CommandLine(
    config=ReportConfig, prog="rlhf report", words="RUN_DIR [RUN_DIR ...]", description=DESCRIPTION, resolve=user_path
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; return its exit status."""
    return exit_status(_run, argv)


def _run(argv: Sequence[str]) -> int:
    named = list(takewhile(lambda word: not word.startswith("-"), argv))
    parsed = COMMAND_LINE.parse([*(["--run", ",".join(named)] if named else []), *argv[len(named) :]])
    section = parsed.config.report
    show_parsed(parsed)
    if parsed.dry_run:
        return SUCCESS
    folders = list(dict.fromkeys(user_path(text) for text in named or parts(section.run or "")))
    if section.serve:
        return _serve(folders, section)
    return _write_page(folders, section)


def _serve(folders: Sequence[Path], section: ReportSection) -> int:
    from rlhf_cli.report.server import Report, open_server

    report = Report(folders, (section.max_rollouts, section.max_tokens))
    server, address = open_server(report, section.port)
    print(f"report for this machine only, until Ctrl-C: {address}", flush=True)
    with server, suppress(KeyboardInterrupt):
        server.serve_forever()
    return SUCCESS


def _write_page(folders: Sequence[Path], section: ReportSection) -> int:
    from rlhf_cli.report.page import html, is_report, report_data
    from rlhf_cli.report.runs import read_run
    from rlhf_cli.report.samples import recorded

    path = user_path(section.output_path) if section.output_path else folders[0] / _FILE
    if path.is_dir() or (path.exists() and not is_report(path)):
        hint = "name a new file, or one that `rlhf report` has written"
        raise ConfigError(f"--output_path {path} exists and is no report", hint=hint)
    runs = []
    for folder in folders:
        run = read_run(folder)
        files = recorded(folder)
        for file in files:
            file.read()
        runs.append((run, files))
    data = report_data(runs, section.max_rollouts, section.max_tokens)
    _write(path, html(data))
    for run in data["runs"]:
        for notice in _notices(run):
            print(f"notice: {run['folder']}: {notice}", file=sys.stderr)
        titles = ", ".join(finding["title"].lower() for finding in run["findings"])
        print(f"{run['folder']}: {titles or 'nothing needs a look'}")
    print(f"report in {path}")
    return SUCCESS


def _write(path: Path, text: str) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        hint = "name a file in a folder that you may write to"
        raise ConfigError(f"--output_path {path} cannot be written: {error.strerror}", hint=hint) from None


def _notices(run: dict) -> list[str]:
    """Return what the page does not have of a run."""
    found = [f"{run['num_damaged']} lines of metrics.jsonl are damaged and left out"] if run["num_damaged"] else []
    for file in run["files"]:
        if file["num_damaged"]:
            found.append(f"{file['num_damaged']} lines of {file['name']} are damaged and left out")
        if file["is_cut"]:
            found.append(f"{file['name']} ends within a record: the run is writing it, or it is cut off or damaged")
        shown = sum(len(group["rollouts"]) for group in run["groups"] if group["kind"] == file["kind"])
        if shown < file["num_rollouts"]:
            found.append(
                f"{shown} of the {file['num_rollouts']} rollouts in {file['name']} are in the page, in whole groups "
                "spread evenly over the steps; --max_rollouts and --max_tokens take more"
            )
    return found
