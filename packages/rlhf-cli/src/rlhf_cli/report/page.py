"""The report as data, and the page that shows it: one file without links to anything else."""

import base64
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from rlhf_cli.report.findings import FROM_CURVES, Finding, from_counts
from rlhf_cli.report.metrics import meanings
from rlhf_cli.report.rollouts import mean_gap
from rlhf_cli.report.runs import MAX_POINTS, Run, thinned
from rlhf_cli.report.samples import Recorded, choose, groups_of, record_fields
from rlhf_cli.report.thumbnails import thumbnail
from rlhf_cli.report.timeline import timeline_data
from rlhf_cli.report.tokens import Texts
from rlhf_data.records import SpanSource
from rlhf_train.run.recorder import artifact_path
from rlhf_train.tracing.token_values import read_values

FIRST_LINE = "<!doctype html>\n"
_MARK = '<meta name="generator" content="rlhf report">'
_ASSETS = Path(__file__).parent / "assets"
# The page can load nothing, whatever is in it, and asks only the server that it came from.
_POLICY = "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data:; connect-src 'self'"
_DECIMALS = 4  # of a log-prob in a page

# Fields of a record that every rollout of a page has, where they say something.
_FIELDS = ("reward", "score", "verdict", "detail", "extra", "turn_rewards", "token_rewards", "source_rewards")


def report_data(
    runs: Sequence[tuple[Run, Sequence[Recorded]]], max_rollouts: int, max_tokens: int, *, served: bool = False
) -> dict[str, Any]:
    """Return what the page shows, as plain JSON values. The limits hold for all runs together.

    Args:
        runs: each with the files of its rollouts, which have been read.
        max_rollouts: rollouts of which the page has the tokens.
        max_tokens: tokens that they have in all.
        served: whether a server answers the page's questions about other rollouts.
    """
    files = [recorded for _, files in runs for recorded in files]
    num_rollouts = _shares([len(recorded.rows) for recorded in files], max_rollouts)
    num_tokens = _shares([recorded.num_tokens for recorded in files], max_tokens)
    limits = dict(zip(files, zip(num_rollouts, num_tokens, strict=True), strict=True))
    names = _names([run.folder for run, _ in runs])
    return {
        "served": served,
        "meanings": meanings(sorted({name for run, _ in runs for name in run.curves})),
        "runs": [_run_data(name, run, files, limits) for name, (run, files) in zip(names, runs, strict=True)],
    }


def _shares(sizes: Sequence[int], limit: int) -> list[int]:
    """Return a limit for each size, which add up to at most `limit`. What small ones leave is for larger ones."""
    shares = [0] * len(sizes)
    left = limit
    for number, at in enumerate(sorted(range(len(sizes)), key=lambda at: sizes[at])):
        shares[at] = min(sizes[at], left // (len(sizes) - number))
        left -= shares[at]
    return shares


def _names(folders: Sequence[Path]) -> list[str]:
    """Return short names of folders that differ: the last part, or more parts where it is the same."""
    parts = [folder.resolve().parts for folder in folders]
    size = next((n for n in range(1, max(map(len, parts))) if len({part[-n:] for part in parts}) == len(parts)), 99)
    return ["/".join(part[-size:]).replace("//", "/") for part in parts]


def follow_data(runs: Sequence[tuple[Run, Sequence[Recorded]]]) -> dict[str, Any]:
    """Return `report_data` without rollouts, for a page that follows runs."""
    names = _names([run.folder for run, _ in runs])
    found = [findings(run, files) for run, files in runs]
    return {"runs": [_summary(*each) for each in zip(names, *zip(*runs, strict=True), found, strict=True)]}


def _run_data(
    name: str, run: Run, files: Sequence[Recorded], limits: Mapping[Recorded, tuple[int, int]]
) -> dict[str, Any]:
    found = findings(run, files)
    wanted = [rollout_id for finding in found for rollout_id in finding.rollouts]
    texts = Texts(run)
    groups = []
    for recorded in files:
        chosen = choose(recorded.rows, *limits[recorded], wanted)
        groups += group_data(recorded, chosen, texts)
    rollouts = {"tokenizer": texts.path, "groups": groups, "vocabulary": texts.seen}
    return _summary(name, run, files, found) | rollouts | {"timeline": timeline_data(run.folder)}


def _summary(name: str, run: Run, files: Sequence[Recorded], found: Sequence[Finding]) -> dict[str, Any]:
    return {
        "name": name,
        "folder": str(run.folder),
        "command": run.command,
        "last_step": run.last_step,
        "curves": {name: _curve_data(curve) for name, curve in sorted(run.curves.items())},
        "thinned": any(len(curve) > MAX_POINTS for curve in run.curves.values()),
        "config": run.config,
        "log": run.log,
        "num_log_lines": run.num_log_lines,
        "environment": run.environment,
        "num_damaged": run.num_damaged,
        "findings": [finding._asdict() for finding in found],
        "files": [_file_data(recorded) for recorded in files],
    }


def findings(run: Run, files: Iterable[Recorded]) -> list[Finding]:
    """Return what in a run needs a look: from its metrics, and from its rollouts in training."""
    found = [finding for check in FROM_CURVES if (finding := check(run.curves)) is not None]
    for recorded in files:
        if recorded.kind == "training":
            found += from_counts(recorded.counts)
    return found


def _curve_data(curve: Sequence[tuple[int, float | None]]) -> list[list[float | None]]:
    points = thinned(list(curve))
    return [[step for step, _ in points], [value if value is None else float(f"{value:.7g}") for _, value in points]]


def _file_data(recorded: Recorded) -> dict[str, Any]:
    return {
        "kind": recorded.kind,
        "name": recorded.file.path.name,
        "num_rollouts": len(recorded.rows),
        "num_tokens": recorded.num_tokens,
        "num_damaged": recorded.file.num_damaged,
        "is_cut": recorded.file.is_cut,
    }


def group_data(recorded: Recorded, rows: Sequence[Any], texts: Texts) -> list[dict[str, Any]]:
    """Return groups of rollouts with their tokens; each has its prompt once."""
    groups = []
    records = recorded.file.records(rows)
    folder = artifact_path(recorded.file.path.parent, "token values")
    read: tuple[int, dict] = (0, {})  # step, and its values
    for members in groups_of(rows):
        group: dict[str, Any] = {}
        if recorded.kind == "training" and members[0].step != read[0]:
            read = (members[0].step, read_values(folder, members[0].step))
        for row, record in zip(members, records, strict=False):
            prompt = _prompt_tokens(record)
            images = record.get("images", [])
            asked = record.get("prompt_images", images)
            if not group:
                group = {
                    "kind": recorded.kind,
                    "step": row.step,
                    "id": row.group_id,
                    "prompt_tokens": texts.see(prompt),
                    "kept": row.kept,
                    "rollouts": [],
                    **record_fields(record, ("prompt_id", "source", "prompt", "label")),
                }
                if asked:
                    group["images"] = _thumbnails(asked)
            same = len(prompt) if prompt == group["prompt_tokens"] else 0
            rollout = _rollout_data(record, row.num_tokens, same, texts)
            if images != asked:  # an agent has shown others
                rollout["images"] = _thumbnails(images)
            group["rollouts"].append(rollout | _value_data(read[1].get(row.rollout_id, {}), row.num_tokens))
        groups.append(group)
    return groups


def _thumbnails(images: Sequence[Any]) -> list[dict[str, Any]]:
    return [thumbnail(str(path)) for path in images]


def _prompt_tokens(record: Mapping[str, Any]) -> list[int]:
    first = record["spans"][0]
    return record["token_ids"][: first["num_tokens"]] if first["source"] == SpanSource.PROMPT else []


def _rollout_data(record: Mapping[str, Any], num_tokens: int, num_shared: int, texts: Texts) -> dict[str, Any]:
    """Return a rollout. The first `num_shared` tokens are those of the group's prompt, and left out."""
    logprobs = np.asarray([_finite(value) for value in record["logprobs"][num_shared:]], np.float64)
    return {
        "id": record["rollout_id"],
        "episode": record["episode_id"],
        "text": record["text"],
        "length": num_tokens,
        "finish": record["finish_reason"],
        "shared": num_shared,
        "tokens": texts.see(record["token_ids"][num_shared:]),
        "logprobs": [None if value != value else value for value in (np.round(logprobs, _DECIMALS) + 0.0).tolist()],
        "spans": [[span["source"], span["num_tokens"], span["policy_version"]] for span in record["spans"]],
        **record_fields(record, _FIELDS),
    }


def _value_data(values: Mapping[str, np.ndarray], num_tokens: int) -> dict[str, Any]:
    """Return what the trainer computed for a rollout: the columns, and the mean size of the gap to the engine."""
    if any(len(column) != num_tokens for column in values.values()):
        return {}
    data: dict[str, Any] = {"values": {name: _packed(column) for name, column in values.items()}} if values else {}
    gap = mean_gap(values, num_tokens)
    return data if gap is None else data | {"gap": float(f"{gap:.4g}")}


def _packed(values: np.ndarray) -> str | float:
    """Return float16 numbers in Base64, little-endian; or one number if all are the same."""
    if len(values) and (values == values[0]).all():
        return float(values[0])
    return base64.b64encode(values.astype("<f2").tobytes()).decode()


def _finite(value: Any) -> float:
    """Return a log-prob; NaN for one that is not finite."""
    number = float("nan") if value is None else float(value)
    return number if abs(number) != float("inf") else float("nan")


def html(data: Mapping[str, Any]) -> str:
    """Return the page that shows `data`. Nothing in the data can end the element that holds it."""
    text = json.dumps(data, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
    return "".join(
        [
            FIRST_LINE,
            '<html lang="en">\n<head>\n<meta charset="utf-8">\n',
            f'{_MARK}\n<meta name="viewport" content="width=device-width, initial-scale=1">\n',
            f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">\n<link rel="icon" href="data:,">\n',
            f"<title>rlhf report</title>\n<style>\n{_part('report.css')}</style>\n</head>\n<body>\n",
            _part("report.html"),
            f'<script type="application/json" id="data">{text}</script>\n',
            *(
                f"<script>\n{_part(name)}</script>\n"
                for name in ("common.js", "curves.js", "rollouts.js", "timeline.js", "report.js")
            ),
            "</body>\n</html>\n",
        ]
    )


def _part(name: str) -> str:
    return (_ASSETS / name).read_text(encoding="utf-8")


def is_report(path: Path) -> bool:
    """Return whether a file is a page that `html` made, which a new one may replace."""
    with path.open(encoding="utf-8", errors="replace") as file:
        return _MARK in file.read(500)
