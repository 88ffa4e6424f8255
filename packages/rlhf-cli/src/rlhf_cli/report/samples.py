"""All rollouts of a run counted, and some of them chosen for a page, which cannot hold a large run."""

from collections.abc import Iterator, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from rlhf_cli.report.findings import StepCounts
from rlhf_cli.report.rollouts import RolloutFile, Row
from rlhf_rollout.records_io import NUM_LEFT

KINDS = {"rollouts": "training", "eval_rollouts": "held-out"}  # by the stem of the file, what its rollouts are
_SUFFIXES = (".jsonl", ".columns")


class Recorded:
    """The rollouts in a file of a run, without texts and tokens.

    Attributes:
        kind: "training" or "held-out".
        file: where they are.
        rows: of all rollouts so far.
        counts: by step, for the findings.
    """

    def __init__(self, path: Path) -> None:
        self.kind = KINDS[path.stem]
        self.file = RolloutFile(path)
        self.rows: list[Row] = []
        self.counts: dict[int, StepCounts] = {}
        self._group: list[tuple[Row, str]] = []  # of which more rollouts may follow, with their texts

    @property
    def num_tokens(self) -> int:
        """Tokens that the policy sampled in all rollouts."""
        return sum(row.num_tokens for row in self.rows)

    def read(self) -> bool:
        """Read what the file has gained; return whether that is anything."""
        num_before = len(self.rows)
        for row, record in self.file.rows():
            if self._group and self._group[0][0].group_id != row.group_id:
                self._count()
            self.rows.append(row)
            self._group.append((row, str(record.get("text") or "")))
            if record.get(NUM_LEFT) == 0:
                self._count()
        return len(self.rows) > num_before

    def _count(self) -> None:
        step = self._group[0][0].step
        group = [(row.rollout_id, text, row.reward) for row, text in self._group]
        self.counts.setdefault(step, StepCounts()).add(group)
        self._group = []


def recorded(folder: Path) -> list[Recorded]:
    """Return the files of rollouts that a run's folder has, which are not read yet."""
    paths = (folder / f"{stem}{suffix}" for stem in KINDS for suffix in _SUFFIXES)
    return [Recorded(path) for path in paths if path.is_file()]


def groups_of(rows: Sequence[Row]) -> list[list[Row]]:
    """Return the rows of each group; those of a group follow each other."""
    return [list(members) for _, members in groupby(rows, key=lambda row: (row.step, row.group_id))]


def choose(rows: Sequence[Row], max_rollouts: int, max_tokens: int, wanted: Sequence[str] = ()) -> list[Row]:
    """Return rows of whole groups within both limits, in the order of `rows`; all if they fit.

    First come the groups of the rollouts whose ids are `wanted`, then groups spread evenly over the steps, and over the
    groups of each step.
    """
    groups = groups_of(rows)
    if len(rows) <= max_rollouts and sum(row.num_tokens for row in rows) <= max_tokens:
        return list(rows)
    first = [at for at, group in enumerate(groups) if any(row.rollout_id in wanted for row in group)]
    taken: dict[int, None] = {}
    num_rollouts = 0
    num_tokens = 0
    for at in (*first, *_spread_over_steps(groups)):
        group = groups[at]
        size = sum(row.num_tokens for row in group)
        if at in taken or num_rollouts + len(group) > max_rollouts or num_tokens + size > max_tokens:
            continue
        taken[at] = None
        num_rollouts += len(group)
        num_tokens += size
    return [row for at in sorted(taken) for row in groups[at]]


def _spread_over_steps(groups: Sequence[Sequence[Row]]) -> Iterator[int]:
    """Yield the places of groups: one of each step, then a second one of each, and so on."""
    places: dict[int, list[int]] = {}
    for at, group in enumerate(groups):
        places.setdefault(group[0].step, []).append(at)
    steps = list(places.values())
    order = [steps[at] for at in spread(len(steps))]
    within = [[places[at] for at in spread(len(places))] for places in order]
    for turn in range(max(map(len, within), default=0)):
        yield from (places[turn] for places in within if turn < len(places))


def spread(size: int) -> list[int]:
    """Return the numbers below `size` in an order whose beginnings are all spread evenly: the first, the last, those
    in the middle of a half, of a quarter, and so on."""
    found: dict[int, None] = dict.fromkeys([0, size - 1] if size else [])
    part = size - 1
    while len(found) < size:
        part = part / 2
        found.update(dict.fromkeys(round(part * at) for at in range(1, round((size - 1) / part), 2)))
        if part < 1:
            found.update(dict.fromkeys(range(size)))
    return list(found)


def record_fields(record: dict[str, Any], names: Sequence[str]) -> dict[str, Any]:
    """Return the fields of a record that say something: those that are not empty and not null."""
    return {name: record[name] for name in names if record.get(name) not in (None, "", [], {})}
