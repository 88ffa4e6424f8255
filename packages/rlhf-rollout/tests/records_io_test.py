"""Rollouts as JSON lines."""

import base64
import contextlib
import dataclasses
import json

import numpy as np
import pytest

from random_records import plain, random_group
from record_testing import make_group, make_prompt, make_rollout
from rlhf_data.errors import DataError
from rlhf_data.records import (
    Verdict,
    VerdictKind,
)
from rlhf_rollout.records_io import RolloutWriter, _numbers, read_batches, rollout_record


def record_of(group):
    (episode,) = group.episodes
    return rollout_record(group, episode, episode.rollouts[0])


def group_of(verdict=None, logprobs=None):
    prompt = make_prompt("2+2=", "4")
    return make_group("g0", prompt, (make_rollout(prompt, "4", logprobs=logprobs, verdict=verdict),))


def test_rollout_record_holds_everything_as_plain_json():
    verdict = Verdict(VerdictKind.OK, 0.5, 1.0, "fine", {"length": 1.0}, seconds=0.25, turn_rewards=(0.5,))
    group = group_of(verdict, [-0.1, -2.5])
    record = json.loads(json.dumps(record_of(group), allow_nan=False))
    assert record == {
        "rollout_id": "g0/0",
        "episode_id": "g0/0",
        "group_id": "g0",
        "prompt_id": "p-2+2=",
        "source": "default",
        "prompt": "2+2=",
        "prompt_token_ids": None,
        "messages": None,
        "label": "4",
        "text": "4",
        "token_ids": [2, *b"2+2=", ord("4"), 0],
        "logprobs": [0.0, 0.0, 0.0, 0.0, 0.0, -0.1, -2.5],
        "spans": [
            {"source": "prompt", "num_tokens": 5, "policy_version": None},
            {"source": "policy", "num_tokens": 2, "policy_version": 0},
        ],
        "routes": None,
        "finish_reason": "stop",
        "policy_version": 0,
        "reward": 0.5,
        "score": 1.0,
        "verdict": "ok",
        "detail": "fine",
        "extra": {"length": 1.0},
        "turn_rewards": [0.5],
        "earned_elsewhere": [0.0, 0.0],
        "token_rewards": [],
        "source_rewards": [],
        "score_seconds": 0.25,
    }


def test_rollout_record_routes_are_shape_type_and_bytes():
    group = group_of()
    rollout = dataclasses.replace(group.rollouts[0], routes=[[[1, 2]], [[3, 255]], [[4, 256]]])
    record = rollout_record(group, group.episodes[0], rollout)["routes"]
    assert json.loads(json.dumps(record)) == {
        "shape": [3, 1, 2],
        "dtype": "uint16",
        "data": base64.b64encode(bytes([1, 0, 2, 0, 3, 0, 255, 0, 4, 0, 0, 1])).decode(),
    }


def test_rollout_record_token_rewards_are_pairs():
    record = record_of(group_of(Verdict(VerdictKind.OK, 0.5, token_rewards=((5, 0.25), (6, 0.125)))))
    assert json.loads(json.dumps(record))["token_rewards"] == [[5, 0.25], [6, 0.125]]


def test_numbers_have_the_shortest_decimals_of_float32_at_any_size():
    rng = np.random.default_rng(0)
    sizes = np.float32(10.0) ** rng.integers(-9, 8, 20_000)
    values = np.concatenate([rng.normal(size=20_000) * sizes, 2.0 ** np.arange(-40, 40), [0.1, 1 / 3, 99999.99, 1e-4]])
    values = values.astype(np.float32)
    assert _numbers(values) == [float(str(value)) for value in values]


def test_rollout_record_without_verdict_and_with_a_nan_log_prob_is_null():
    group = group_of(logprobs=[np.nan, -1.0])
    record = record_of(group)
    assert (record["reward"], record["score"], record["verdict"], record["score_seconds"]) == (None,) * 4
    assert record["turn_rewards"] == record["token_rewards"] == []
    assert record["logprobs"][-2:] == [None, -1.0]
    failed = record_of(group_of(Verdict(VerdictKind.TIMEOUT, detail="late")))
    assert (failed["reward"], failed["verdict"], failed["detail"]) == (None, "timeout", "late")


def test_rollout_writer_appends_whole_lines_with_fields(tmp_path):
    path = tmp_path / "new" / "folders" / "rollouts.jsonl"
    with contextlib.closing(RolloutWriter(path)) as writer:
        writer.write(group_of(), step=1)
        assert len(path.read_text().splitlines()) == 1  # on disk at once
    with contextlib.closing(RolloutWriter(path)) as writer:
        writer.write(group_of(), step=2)
    assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == [1, 2]


def test_rollout_writer_keeps_half_of_a_surrogate_pair(tmp_path):
    path = tmp_path / "rollouts.jsonl"
    prompt = dataclasses.replace(
        make_prompt("2+2=", "\ud800 \udcff é"), messages=({"role": "user", "content": "\udfff"},)
    )
    group = make_group("g0", prompt, (make_rollout(prompt, "4"),))
    writer = RolloutWriter(path)
    writer.write(group, tools=["\ud83d"])
    writer.close()
    [batch] = read_batches(path)
    [read] = batch.groups
    assert (read.prompt.label, read.prompt.messages[0]["content"]) == ("\ud800 \udcff é", "\udfff")
    assert batch.fields["tools"] == ["\ud83d"]
    assert "é" in path.read_text(encoding="utf-8")


@pytest.mark.parametrize("name", ["rollouts.jsonl", "rollouts.columns"])
@pytest.mark.parametrize("seed", range(20))
def test_what_is_written_is_read_back_equal(seed, name, tmp_path):
    rng = np.random.default_rng(seed)
    batches = [[random_group(rng, 10 * batch + number) for number in range(2)] for batch in range(3)]
    path = tmp_path / name
    with contextlib.closing(RolloutWriter(path)) as writer:
        for step, groups in enumerate(batches, start=1):
            writer.write(*groups, step=step, kept=step == 2)
    read = list(read_batches(path))
    assert [dict(batch.fields) for batch in read] == [{"step": step, "kept": step == 2} for step in (1, 2, 3)]
    for batch, groups in zip(read, batches, strict=True):
        assert plain(batch.groups) == plain(tuple(groups))


@pytest.fixture
def written(tmp_path):
    """A file with two batches of two groups of one rollout each, as lines."""
    path = tmp_path / "rollouts.jsonl"
    verdict = Verdict(VerdictKind.OK, 0.5, 1.0, source_rewards=(0.5,))
    prompt = make_prompt()
    with contextlib.closing(RolloutWriter(path)) as writer:
        for step in (1, 2):
            names = [f"step{step}/{number}" for number in range(2)]
            rollouts = [make_rollout(prompt, "4", group_id=name, verdict=verdict) for name in names]
            writer.write(
                *[make_group(name, prompt, [one]) for name, one in zip(names, rollouts, strict=True)], step=step
            )
    return path


def changed(line, **values):
    return json.dumps(json.loads(line) | values) + "\n"


def first(**values):
    """Return what leaves two lines, the first of them changed."""
    return lambda rows: [changed(rows[0], **values), rows[1]]


def routes(shape, dtype, data):
    return {"shape": shape, "dtype": dtype, "data": data}


DAMAGES = {
    "cut in the middle of a line": (lambda rows: [*rows[:3], rows[3][:40]], 4, "Unterminated|Expecting|Invalid"),
    "cut between two lines": (lambda rows: rows[:3], 3, "1 records of its batch should follow, and none does"),
    "a line is missing": (lambda rows: [rows[0], *rows[2:]], 2, "1 records of another batch should follow"),
    "a line is there twice": (lambda rows: [rows[0], *rows], 2, "1 records of another batch should follow"),
    "not JSON": (lambda rows: ["hello\n", *rows], 1, "Expecting value"),
    "not UTF-8": (lambda rows: ["\udcff\n", *rows], 1, "decode"),
    "another kind of record": (
        lambda rows: [*rows[:2], '{"step": 1, "policy/loss": 0.5}\n'],
        3,
        "it lacks 'token_ids'",
    ),
    "no object": (lambda rows: ["[1, 2]\n", *rows], 1, "list indices"),
    "nested too deeply": (lambda rows: ["[" * 100_000 + "\n", *rows], 1, "recursion|nested"),
    "a record of an earlier version": (
        lambda rows: [*rows[:2], json.dumps({k: v for k, v in json.loads(rows[2]).items() if k != "source_rewards"})],
        3,
        "it lacks 'source_rewards'",
    ),
    "an unknown field": (first(colour="red"), 1, "`colour` does not fit the rest"),
    "fractions of tokens": (first(token_ids=[1.5] * 7), 1, "`token_ids` does not fit the rest"),
    "fewer tokens than its spans": (first(token_ids=[1, 2]), 1, "log-probs for"),
    "fewer log-probs": (first(logprobs=[0.0] * 6), 1, "1 log-probs for 2 tokens"),
    "more log-probs": (first(logprobs=[0.0] * 8), 1, "`logprobs` does not fit"),
    "routes of more tokens": (
        first(routes=routes([8, 1, 1], "uint8", "AAAAAAAAAAA=")),
        1,
        "has 7 tokens and routes of 8",
    ),
    "routes of another shape": (first(routes=routes([3, 1, 1], "uint8", "AAA=")), 1, "cannot reshape"),
    "routes that are no Base64": (first(routes=routes([1, 1, 1], "uint8", "A?==")), 1, "base64"),
    "routes of a larger type": (first(routes=routes([1, 1, 1], "uint16", "AAA=")), 1, "`routes` does not fit the rest"),
    "routes of an unknown type": (first(routes=routes([1, 1, 1], "expert", "AA==")), 1, "expert"),
    "a reward that is no number": (first(reward="one"), 1, "isfinite"),
    "an infinite reward": (first(reward=float("inf")), 1, "the reward is inf"),
    "a verdict without its reward": (first(reward=None), 1, "without a reward"),
    "an unknown verdict": (first(verdict="good"), 1, "'good' is not a valid"),
    "another prompt within a group": (
        lambda rows: [changed(rows[0], group_id="g", num_left=1), changed(rows[1], group_id="g", label="5")],
        2,
        "`label` does not fit the rest",
    ),
    "fields of another batch": (lambda rows: [rows[0], changed(rows[1], step=2)], 2, "`step` does not fit the rest"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_file_is_refused_with_file_and_line_after_the_batches_before_it(damage, written):
    damaged, number, reason = DAMAGES[damage]
    rows = damaged(written.read_text().splitlines(keepends=True))
    written.write_text("".join(rows), errors="surrogateescape")
    batches = []
    with pytest.raises(DataError, match=f"(?s){written}:{number} is not a rollout.*({reason}).*\n\nhint: use the file"):
        batches.extend(read_batches(written))
    assert len(batches) == (number - 1) // 2


def test_missing_file_is_named_with_a_similar_one(written):
    with pytest.raises(DataError, match=r"the record of rollouts .*rollout.jsonl does not exist\n\nhint: did you mean"):
        next(read_batches(written.with_name("rollout.jsonl")))


def test_empty_file_has_no_batch(tmp_path):
    (tmp_path / "empty").write_text("")
    assert list(read_batches(tmp_path / "empty")) == []
