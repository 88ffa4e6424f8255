"""`rollouts`: show in the terminal what a run has generated, filtered and sorted."""

import sys
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import AfterValidator

from rlhf_cli.config.paths import user_path
from rlhf_cli.console.exits import SUCCESS, exit_status
from rlhf_cli.report.rollouts import SORTS, Filter, RolloutFile, Row, sort_rows, with_gaps
from rlhf_data.errors import ConfigError, DataError, unknown, with_hint
from rlhf_data.options.checks import lacking
from rlhf_data.options.command_line import CommandLine, show_parsed
from rlhf_data.options.declare import Config, Section, flag, one_of
from rlhf_data.records import FinishReason, VerdictKind
from rlhf_train.run.recorder import artifact_path

if TYPE_CHECKING:
    from rlhf_cli.console.views import Console

DESCRIPTION = """`rlhf rollouts RUN_DIR` shows rollouts that the run in that folder recorded, also while it goes on:
those of training, or with --held_out those of evaluations. Rollouts of one prompt that follow each other have it once.
What a model wrote is shown as text, with control characters and marks of direction as escapes."""

_LINE = 200  # characters of a text, unless it is shown whole
_INDENT = "            "


def _of(kind: str, known: Collection[str]) -> Any:
    """Return the type of an option with several of the `known` names, with commas between them."""

    def check(text: str) -> str:
        for name in text.split(","):
            if name.strip() not in known:
                raise ValueError(unknown(kind, name.strip(), known))
        return text

    return Annotated[str, AfterValidator(check)]


def _steps(text: str) -> str:
    first, _, last = text.partition("-")
    if not (first.isdigit() and (last or first).isdigit() and int(first) <= int(last or first)):
        raise ValueError(
            with_hint(f"`{text}` names no steps", "write one step, such as 12, or the first and last: 10-20")
        )
    return text


class RolloutsSection(Section, title="rollouts"):
    """Which rollouts are shown, in which order, and how."""

    run: str | None = flag(None, "the same as RUN_DIR")
    held_out: bool = flag(False, "show rollouts of evaluations; step 0 is before training")
    steps: Annotated[str, AfterValidator(_steps)] | None = flag(None, "those of one step, or of steps such as 10-20")
    min_reward: float | None = flag(None, "those with at least this reward")
    max_reward: float | None = flag(None, "those with at most this reward")
    min_length: int | None = flag(None, "those with at least so many sampled tokens", ge=0)
    max_length: int | None = flag(None, "those with at most so many sampled tokens", ge=0)
    min_gap: float | None = flag(None, "those with at least this mean gap of trainer and engine, in nats", ge=0)
    max_gap: float | None = flag(None, "those with at most this mean gap of trainer and engine, in nats", ge=0)
    verdict: _of("verdict", list(VerdictKind)) | None = flag(None, "those with this verdict, or one of ok,wrong")
    finish_reason: _of("reason", list(FinishReason)) | None = flag(None, "those that ended so, such as length")
    prompt_id: str | None = flag(None, "those of the prompt with this id, over all steps")
    text: str | None = flag(None, "those with this text in prompt, response or label, in capital letters or small ones")
    sort: one_of(SORTS) = flag("step", "what the order goes by; equal ones keep the order of the file")
    descending: bool = flag(False, "the largest first")
    limit: int = flag(20, "show at most so many", ge=1)
    whole: bool = flag(False, "show whole texts, with their lines, instead of one line of each")


class RolloutsConfig(Config):
    """All options of `rollouts`."""

    rollouts: RolloutsSection = RolloutsSection()

    def missing(self) -> list[ConfigError]:
        """See `Config`."""
        return lacking(self.rollouts, "run", "a run must be named", "write `rlhf rollouts RUN_DIR`")


COMMAND_LINE = CommandLine(
    config=RolloutsConfig, prog="rlhf rollouts", words="RUN_DIR", description=DESCRIPTION, resolve=user_path
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; return its exit status."""
    return exit_status(_run, argv)


def _run(argv: Sequence[str]) -> int:
    parsed = COMMAND_LINE.parse_naming("--run", argv)
    section = parsed.config.rollouts
    show_parsed(parsed)
    if parsed.dry_run:
        return SUCCESS
    if section.run is None:
        raise parsed.missing[0]

    from rlhf_cli.console.views import Console

    console = Console(sys.stdout, sys.stderr)
    file = _find(user_path(section.run), held_out=section.held_out)
    rows = [row for row, _ in file.rows(_wanted(section))]
    if section.sort == "gap" or section.min_gap is not None or section.max_gap is not None:
        folder = artifact_path(user_path(section.run), "token values")
        rows = list(with_gaps(rows, folder, section.min_gap, section.max_gap))
    rows = sort_rows(rows, section.sort, descending=section.descending)
    shown = rows[: section.limit]
    group = ""
    for row, record in zip(shown, file.records(shown), strict=True):
        _show(console, row, record, whole=section.whole, with_prompt=row.group_id != group)
        group = row.group_id
    more = f"; {len(rows) - len(shown)} more with --limit {len(rows)}" if len(rows) > len(shown) else ""
    console.log(f"{len(shown)} of {len(rows)} matching rollouts{more}")
    if file.num_damaged:
        console.log(f"warning: {file.num_damaged} line(s) of {file.path} are damaged and left out", "yellow")
    return SUCCESS


def _find(run: Path, *, held_out: bool) -> RolloutFile:
    """Return the file of a run. Raises DataError if there is none."""
    path = artifact_path(run, "held-out rollouts" if held_out else "rollouts")
    if not path.is_file():
        other = artifact_path(run, "rollouts" if held_out else "held-out rollouts")
        hint = "name the folder of a run of `rlhf ppo`: its --save_path, or rlhf-output/ppo-DATE-TIME"
        if other.is_file():
            hint = (
                "the run has no evaluation: leave out --held_out" if held_out else "add --held_out: it has evaluations"
            )
        raise DataError(f"there are no such rollouts: {path} is missing", hint=hint)
    return RolloutFile(path)


def _wanted(section: RolloutsSection) -> Filter:
    first, _, last = (section.steps or "").partition("-")
    return Filter(
        first_step=int(first) if first else None,
        last_step=int(last or first) if first else None,
        min_reward=section.min_reward,
        max_reward=section.max_reward,
        min_tokens=section.min_length,
        max_tokens=section.max_length,
        verdicts=_names(section.verdict),
        finish_reasons=_names(section.finish_reason),
        prompt_id=section.prompt_id,
        text=section.text,
    )


def _names(text: str | None) -> frozenset[str]:
    return frozenset(name.strip() for name in (text or "").split(",") if name)


def _show(console: "Console", row: Row, record: Mapping[str, Any], *, whole: bool, with_prompt: bool) -> None:
    if with_prompt:
        label = "" if record.get("label") is None else f"  label {_line(str(record['label']), 60)}"
        console.row([(f"\n{row.group_id}", "bold"), (f"  prompt {row.prompt_id}{label}", "dim")])
        _text(console, "prompt", str(record["prompt"]), "dim", whole=whole)
    oldest, newest = row.versions
    facts = [
        f"step {row.step}",
        *([] if row.reward is None else [f"reward {row.reward:g}"]),
        *([] if row.score in (None, row.reward) else [f"score {row.score:g}"]),
        *([] if row.gap is None else [f"gap {row.gap:.3g}"]),
        f"{row.num_tokens} tokens",
        *([f"{row.num_turns} turns"] if row.num_turns > 1 else []),
        row.finish_reason,
        f"version {newest}" if oldest == newest else f"versions {oldest} to {newest}",
        *(["not trained"] if row.kept is False else []),
    ]
    verdict = row.verdict or "unscored"
    style = {"ok": "green", "unscored": "dim"}.get(verdict, "red")
    console.row([(f"  {row.rollout_id}  ", ""), (verdict, style), (f"  {', '.join(facts)}", "")])
    _text(console, "response", str(record["text"]), "", whole=whole)


def _text(console: "Console", title: str, text: str, style: str, *, whole: bool) -> None:
    """Write a text beside its title. All its lines are indented: none can pass for one of this command."""
    lines = text.splitlines() if whole else [_line(text, _LINE)]
    for number, line in enumerate(lines or [""]):
        head = f"    {title}" if number == 0 else ""
        console.row([(head.ljust(len(_INDENT) + 2), "dim"), (line, style)])


def _line(text: str, most: int) -> str:
    text = " ".join(text.split())
    return text if len(text) <= most else f"{text[:most]} ... ({len(text)} characters)"
