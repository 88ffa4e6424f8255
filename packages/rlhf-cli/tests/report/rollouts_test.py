"""Recorded rollouts as rows: what is read, filtered and sorted, in files of both kinds, whole and damaged."""

import contextlib
import json
import math

import pytest

from record_testing import make_group, make_prompt, make_rollout
from rlhf_cli.report.rollouts import SORTS, Filter, RolloutFile, sort_rows
from rlhf_data.errors import DataError
from rlhf_data.records import (
    Episode,
    FinishReason,
    Prompt,
    Rollout,
    RolloutGroup,
    Span,
    SpanSource,
    Verdict,
    VerdictKind,
)
from rlhf_rollout.records_io import RolloutWriter

KINDS = pytest.mark.parametrize("name", ["rollouts.jsonl", "rollouts.columns"])


def write(path):
    """Write two steps: a group of three answers, then one of two turns with a token of an environment between them."""
    first = make_prompt("2+2=", "4")
    looks_like_tokens = '"token_ids": [1], "logprobs": [2], "spans": '
    judged = (("4", Verdict(VerdictKind.OK, 1.0)), (looks_like_tokens, Verdict(VerdictKind.WRONG, -0.5)))
    answers = [make_rollout(first, text, index=n, verdict=verdict) for n, (text, verdict) in enumerate(judged)]
    answers.append(make_rollout(first, "no <script>", index=2, policy_version=3))
    prompt = Prompt("p-turns", [2, 65], "Turns", source="games")
    spans = (
        Span(SpanSource.PROMPT, prompt.token_ids),
        Span(SpanSource.POLICY, [66, 67], [-0.5, -0.25], 3),
        Span(SpanSource.POLICY, [68], [-0.125], 4),
        Span(SpanSource.ENVIRONMENT, [70, 71]),
        Span(SpanSource.POLICY, [72], [-2.0], 5),
    )
    verdict = Verdict(VerdictKind.TIMEOUT, detail="too slow")
    turns = Rollout("g1/0", "g1", spans, FinishReason.LENGTH, "Two TURNS", verdict)
    with contextlib.closing(RolloutWriter(path)) as writer:
        writer.write(make_group("g0", first, answers), step=1, kept=True)
        writer.write(RolloutGroup("g1", prompt, (Episode("g1/0", "g1", (turns,)),)), step=2, kept=False)
    return path


def ids(path, **wanted):
    return [row.rollout_id for row, _ in RolloutFile(path).rows(Filter(**wanted))]


@KINDS
def test_a_row_says_what_its_record_says(name, tmp_path):
    rows = [row for row, _ in RolloutFile(write(tmp_path / name)).rows()]
    assert [(row.step, row.group_id, row.rollout_id, row.prompt_id, row.source, row.kept) for row in rows] == [
        *((1, "g0", f"g0/{n}", "p-2+2=", "default", True) for n in range(3)),
        (2, "g1", "g1/0", "p-turns", "games", False),
    ]
    # An answer has a token per byte and one for its end.
    assert [row.num_tokens for row in rows] == [2, 45, 12, 4]
    assert [(row.reward, row.score, row.verdict) for row in rows] == [
        (1.0, 1.0, "ok"),
        (-0.5, -0.5, "wrong"),
        (None, None, None),
        (None, None, "timeout"),
    ]
    assert [(row.num_turns, row.finish_reason, row.versions) for row in rows] == [
        (1, "stop", (0, 0)),
        (1, "stop", (0, 0)),
        (1, "stop", (3, 3)),
        (2, "length", (3, 5)),
    ]


@KINDS
def test_records_of_any_rows_are_whole(name, tmp_path):
    file = RolloutFile(write(tmp_path / name))
    listed = list(file.rows())
    assert {(record["token_ids"], record["logprobs"]) == (None, None) for _, record in listed} == {True}
    rows = [row for row, _ in listed]
    for order in ([0, 1, 2, 3], [3, 0, 2], [2, 2, 1], [1, 3]):
        records = list(file.records(rows[at] for at in order))
        assert [record["rollout_id"] for record in records] == [rows[at].rollout_id for at in order]
    [record] = file.records(rows[3:])
    assert record["token_ids"] == [2, 65, 66, 67, 68, 70, 71, 72]
    assert record["logprobs"] == [0.0, 0.0, -0.5, -0.25, -0.125, 0.0, 0.0, -2.0]
    assert record["detail"] == "too slow"


@KINDS
def test_a_filter_keeps_what_all_its_fields_allow(name, tmp_path):
    path = write(tmp_path / name)
    assert ids(path) == ["g0/0", "g0/1", "g0/2", "g1/0"]
    assert ids(path, first_step=2) == ["g1/0"]
    assert ids(path, last_step=1) == ["g0/0", "g0/1", "g0/2"]
    assert ids(path, min_reward=1.0) == ["g0/0"]
    assert ids(path, max_reward=1.0) == ["g0/0", "g0/1"]
    assert ids(path, min_tokens=4, max_tokens=12) == ["g0/2", "g1/0"]
    assert ids(path, verdicts=frozenset({"timeout", "unscored"})) == ["g0/2", "g1/0"]
    assert ids(path, finish_reasons=frozenset({"length"})) == ["g1/0"]
    assert ids(path, prompt_id="p-turns") == ["g1/0"]
    assert ids(path, text="turns") == ["g1/0"]  # of the prompt and the response
    assert ids(path, text="<SCRIPT") == ["g0/2"]
    assert ids(path, text="4", verdicts=frozenset({"wrong"})) == ["g0/1"]  # the label


@KINDS
def test_rows_are_sorted_with_those_without_a_value_last(name, tmp_path):
    rows = [row for row, _ in RolloutFile(write(tmp_path / name)).rows()]
    order = {by: [row.rollout_id[-3:] for row in sort_rows(rows, by)] for by in SORTS}
    assert order["length"] == ["0/0", "1/0", "0/2", "0/1"]
    assert order["reward"] == ["0/1", "0/0", "0/2", "1/0"]
    assert [row.reward for row in sort_rows(rows, "reward", descending=True)] == [1.0, -0.5, None, None]
    assert [row.num_tokens for row in sort_rows(rows, "length", descending=True)] == [45, 12, 4, 2]


@KINDS
def test_a_file_that_grows_is_read_on(name, tmp_path):
    whole = write(tmp_path / name).read_bytes()
    growing = tmp_path / f"now-{name}"
    file = RolloutFile(growing)
    seen = []
    for size in range(0, len(whole) + 1, 7):
        growing.write_bytes(whole[:size])
        seen += [row.rollout_id for row, _ in file.rows()]
    growing.write_bytes(whole)
    seen += [row.rollout_id for row, _ in file.rows()]
    assert seen == ["g0/0", "g0/1", "g0/2", "g1/0"]
    assert (file.num_damaged, file.is_cut) == (0, False)


def test_damaged_lines_are_counted_and_left_out(tmp_path):
    path = write(tmp_path / "rollouts.jsonl")
    first, *others = path.read_bytes().splitlines(keepends=True)
    no_spans = json.dumps({**json.loads(first), "spans": None}).encode() + b"\n"
    changes = ({"reward": math.nan}, {"extra": {"a": math.inf}}, {"score": 10**400}, {"step": math.inf})
    bad = [json.dumps({**json.loads(first), **change}).encode() + b"\n" for change in changes]
    path.write_bytes(b"".join([b"not JSON\n", first, b"[]\n", no_spans, b"\n", *bad, *others, b'{"step": 3']))
    file = RolloutFile(path)
    rows = [row for row, _ in file.rows()]
    assert [row.rollout_id for row in rows] == ["g0/0", "g0/1", "g0/2", "g1/0"]
    assert (file.num_damaged, file.is_cut) == (8, True)
    assert [record["rollout_id"] for record in file.records(rows)] == [row.rollout_id for row in rows]


def test_damaged_columns_end_the_file(tmp_path):
    path = write(tmp_path / "rollouts.columns")
    whole = path.read_bytes()
    path.write_bytes(whole[:-3] + b"???")
    file = RolloutFile(path)
    assert [row.group_id for row, _ in file.rows()] == ["g0", "g0", "g0"]
    assert file.is_cut


def test_a_file_that_is_not_there_or_has_changed_is_an_error(tmp_path):
    with pytest.raises(DataError, match=r"nowhere\.jsonl"):
        list(RolloutFile(tmp_path / "nowhere.jsonl").rows())
    path = write(tmp_path / "rollouts.jsonl")
    file = RolloutFile(path)
    rows = [row for row, _ in file.rows()]
    path.write_bytes(path.read_bytes().splitlines(keepends=True)[0])
    with pytest.raises(DataError, match=r"has no rollout any more(.|\n)*hint: make the report again"):
        list(file.records(rows[3:]))
