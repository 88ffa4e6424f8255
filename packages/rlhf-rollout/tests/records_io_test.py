"""Rollouts as JSON lines."""

import base64
import contextlib
import dataclasses
import json
import os
import struct
import subprocess
import sys
import zlib

import numpy as np
import pytest

from record_testing import make_group, make_prompt, make_rollout
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
from rlhf_rollout.records_io import RolloutWriter, _numbers, json_lines, read_batches, read_lines, rollout_record


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


def random_verdict(rng, rollout):
    """A verdict of a random kind for a rollout: none, failed, or with rewards of turns, tokens or sources."""
    seconds = float(rng.integers(0, 9)) / 8
    kind = rng.choice(7)
    if kind == 0:
        return None
    if kind == 1:
        return Verdict(VerdictKind.TIMEOUT, detail="no answer\nwithin 1 s \u2028 \u00e9", seconds=seconds)
    if kind == 2:
        return Verdict(VerdictKind.CRASH, -1.0, 0.25, source_rewards=(0.1, -0.7))
    values = rng.normal(size=len(rollout.turn_ends)).tolist()
    if kind == 3 and values:
        before, later = rng.normal(size=2).tolist()
        total = sum(values) + before + later
        return Verdict(VerdictKind.OK, total, turn_rewards=tuple(values), earned_elsewhere=(before, later))
    if kind == 4:
        pairs = tuple((int(at), float(rng.normal())) for at in rng.choice(rollout.num_tokens, 2, replace=False))
        return Verdict(VerdictKind.WRONG, float(rng.normal()), token_rewards=tuple(sorted(pairs)))
    if kind == 5:
        return Verdict(VerdictKind.OK, 1 / 3, 2.0, "", {"length": float(rng.normal()), "n": 3.0}, seconds)
    return Verdict(VerdictKind.UNSCORED, 0.0)


def random_group(rng, number):
    """A group with episodes of one or several rollouts, of several spans each, and log-probs of every float32."""
    group_id = f"step1/{number}"

    def tokens(low=1):
        return rng.integers(0, 2**31 - 1, rng.integers(low, 5))

    def policy():
        ids = tokens()
        logprobs = rng.integers(0, 2**32, len(ids), dtype=np.uint32).view(np.float32)
        odd = rng.choice([np.nan, np.inf, -np.inf, -0.0], len(ids))
        return Span(SpanSource.POLICY, ids, np.where(rng.random(len(ids)) < 0.2, odd, logprobs), int(rng.integers(9)))

    messages = ({"role": "user", "content": "a\nb"},) if rng.random() < 0.5 else None
    prompt = Prompt(f"p{number}", tokens(), "2+2=\u00e9", None if rng.random() < 0.3 else "4", "sums", messages)
    episodes = []
    for index in range(3):
        rollouts = []
        for part in range(rng.integers(1, 4)):
            first = prompt.token_ids if rng.random() < 0.5 else tokens()
            spans = [Span(SpanSource.PROMPT, first)]
            for _ in range(rng.integers(1, 3)):
                spans += [policy(), policy(), Span(SpanSource.ENVIRONMENT, tokens(0))]
            reason = list(FinishReason)[rng.integers(3)]
            rollout = Rollout(f"{group_id}/{index}.{part}", group_id, tuple(spans), reason, '4"\n')
            routes = None
            if rng.random() < 0.5:
                routes = rng.integers(0, rng.choice([4, 256, 257]), (rng.integers(rollout.num_tokens + 1), 3, 2))
            rollouts.append(dataclasses.replace(rollout, verdict=random_verdict(rng, rollout), routes=routes))
        episodes.append(Episode(f"{group_id}/e{index}", group_id, tuple(rollouts)))
    return RolloutGroup(group_id, prompt, tuple(episodes))


def plain(record):
    """A record as nested tuples that compare equal exactly when all values are equal; a NaN equals any NaN."""
    if isinstance(record, np.ndarray):
        return str(record.dtype), [repr(value) for value in record.tolist()]
    if dataclasses.is_dataclass(record):
        names = [field.name for field in dataclasses.fields(record)]
        return type(record).__name__, [(name, plain(getattr(record, name))) for name in names]
    if isinstance(record, tuple):
        return [plain(value) for value in record]
    return type(record).__name__, dict(record) if isinstance(record, dict) else record


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
    "an unknown field": (lambda rows: [changed(rows[0], colour="red"), rows[1]], 1, "`colour` does not fit the rest"),
    "fractions of tokens": (
        lambda rows: [changed(rows[0], token_ids=[1.5] * 7), rows[1]],
        1,
        "`token_ids` does not fit the rest",
    ),
    "fewer tokens than its spans": (lambda rows: [changed(rows[0], token_ids=[1, 2]), rows[1]], 1, "log-probs for"),
    "fewer log-probs": (lambda rows: [changed(rows[0], logprobs=[0.0] * 6), rows[1]], 1, "1 log-probs for 2 tokens"),
    "more log-probs": (lambda rows: [changed(rows[0], logprobs=[0.0] * 8), rows[1]], 1, "`logprobs` does not fit"),
    "routes of more tokens": (
        lambda rows: [changed(rows[0], routes={"shape": [8, 1, 1], "dtype": "uint8", "data": "AAAAAAAAAAA="}), rows[1]],
        1,
        "has 7 tokens and routes of 8",
    ),
    "routes of another shape": (
        lambda rows: [changed(rows[0], routes={"shape": [3, 1, 1], "dtype": "uint8", "data": "AAA="}), rows[1]],
        1,
        "cannot reshape",
    ),
    "routes that are no Base64": (
        lambda rows: [changed(rows[0], routes={"shape": [1, 1, 1], "dtype": "uint8", "data": "A?=="}), rows[1]],
        1,
        "base64",
    ),
    "routes of a larger type": (
        lambda rows: [changed(rows[0], routes={"shape": [1, 1, 1], "dtype": "uint16", "data": "AAA="}), rows[1]],
        1,
        "`routes` does not fit the rest",
    ),
    "routes of an unknown type": (
        lambda rows: [changed(rows[0], routes={"shape": [1, 1, 1], "dtype": "expert", "data": "AA=="}), rows[1]],
        1,
        "expert",
    ),
    "a reward that is no number": (lambda rows: [changed(rows[0], reward="one"), rows[1]], 1, "isfinite"),
    "an infinite reward": (lambda rows: [changed(rows[0], reward=float("inf")), rows[1]], 1, "the reward is inf"),
    "a verdict without its reward": (lambda rows: [changed(rows[0], reward=None), rows[1]], 1, "without a reward"),
    "an unknown verdict": (lambda rows: [changed(rows[0], verdict="good"), rows[1]], 1, "'good' is not a valid"),
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


def write_steps(path, steps, **options):
    """Append a batch of two groups for each step; return all groups."""
    rng = np.random.default_rng(steps[0])
    written = []
    with contextlib.closing(RolloutWriter(path, **options)) as writer:
        for step in steps:
            groups = [random_group(rng, 10 * step + number) for number in range(2)]
            writer.write(*groups, step=step)
            written.extend(groups)
    return written


def read_groups(path):
    return tuple(group for batch in read_batches(path) for group in batch.groups)


@pytest.mark.parametrize("level", [0, 1])
def test_columns_give_every_bit_of_a_log_prob_again(level, tmp_path):
    path = tmp_path / "rollouts.columns"
    bits = [0x7FC00001, 0xFFC12345, 0x7F800000, 0xFF800000, 0x80000000, 0, 1, 0x80000001, 0xBF8CCCCD, 0x3F8CCCCD]
    logprobs = np.array(bits, np.uint32).view(np.float32)
    prompt = make_prompt("2+2=", "4")
    rollout = make_rollout(prompt, "123456789", logprobs=logprobs)
    with contextlib.closing(RolloutWriter(path, level=level)) as writer:
        writer.write(make_group("g0", prompt, (rollout,)), step=1)
    [group] = read_groups(path)
    [_, answer] = group.rollouts[0].spans
    assert answer.logprobs.view(np.uint32).tolist() == bits


@pytest.mark.parametrize("seed", range(3))
def test_columns_as_json_lines_are_the_bytes_of_a_jsonl_file(seed, tmp_path):
    for name in ("a.jsonl", "a.columns"):
        write_steps(tmp_path / name, [seed, seed + 1])
    expected = (tmp_path / "a.jsonl").read_bytes()
    assert b"".join(json_lines(read_lines(tmp_path / "a.columns"))) == expected
    assert b"".join(json_lines(read_lines(tmp_path / "a.jsonl"))) == expected


@pytest.mark.parametrize("name", ["a.columns", "a.jsonl"])
def test_lines_without_their_tokens_are_the_same_lines(name, tmp_path):
    write_steps(tmp_path / name, [1, 2])
    whole = list(read_lines(tmp_path / name))
    lines = list(read_lines(tmp_path / name, has_tokens=False))
    assert [line[:3] for line in lines] == [line[:3] for line in whole]
    assert all(line.text.endswith(b"\n") for line in lines)
    tokens = [line.tokens for line in lines]
    assert tokens == [None] * len(whole) if name == "a.jsonl" else all([*map(len, pair)] == [0, 0] for pair in tokens)


def test_columns_lie_in_the_file_as_the_module_says(tmp_path):
    """Reads a chunk by hand."""
    path = tmp_path / "rollouts.columns"
    prompt = make_prompt("2+2=", "4")
    rollout = make_rollout(prompt, "4", logprobs=[-1.0, 0.5])
    with contextlib.closing(RolloutWriter(path)) as writer:
        writer.write(make_group("g0", prompt, (rollout,)), step=1)
    data = path.read_bytes()
    assert data[:20] == b"\x89rlhf-rollouts\r\n" + (1).to_bytes(4, "little")
    crc, *sizes = struct.unpack("<I5Q", data[20:64])
    assert len(data) == 64 + sum(sizes)
    assert crc == zlib.crc32(bytes(4) + data[24:])
    ends = np.cumsum(sizes)
    parts = [data[64 + end - size : 64 + end] for end, size in zip(ends, sizes, strict=True)]
    record = json.loads(zlib.decompress(parts[0]))
    assert (record["step"], record["num_left"], record["token_ids"], record["logprobs"]) == (1, 0, None, None)
    assert zlib.decompress(parts[1]) == struct.pack("<2i", 7, 2)
    assert zlib.decompress(parts[2]) == bytes([2, *b"2+2=", ord("4"), 0]) + bytes(21)
    # -1 is 0xBF800000 and 0.5 is 0x3F000000; turned left by one bit they are 0x7F000001 and 0x7E000000.
    assert zlib.decompress(parts[3]) == bytes([0x7F, 0x7E, 0, 0])
    assert parts[4] == bytes([0, 0, 1, 0])


def test_columns_are_a_fifth_of_the_json(tmp_path):
    rng = np.random.default_rng(0)
    prompt = make_prompt("2+2=", "4")
    ids = rng.integers(0, 50_000, 20_000)
    answer = Span(SpanSource.POLICY, ids, -rng.exponential(size=20_000), 0)
    rollout = Rollout("g0/0", "g0", (Span(SpanSource.PROMPT, prompt.token_ids), answer), FinishReason.STOP, "4")
    sizes = []
    for name in ("a.jsonl", "a.columns"):
        with contextlib.closing(RolloutWriter(tmp_path / name)) as writer:
            writer.write(make_group("g0", prompt, (rollout,)))
        sizes.append((tmp_path / name).stat().st_size / 20_000)
    assert sizes[0] > 18
    assert sizes[1] < 5.5  # two bytes of an even id, 3.3 of a log-prob


def test_columns_go_on_in_a_file_that_was_cut_between_two_batches(tmp_path):
    path = tmp_path / "rollouts.columns"
    first = write_steps(path, [1])
    end = path.stat().st_size
    write_steps(path, [2])
    ends = [line.end for line in read_lines(path)]
    assert sorted(set(ends)) == [end, path.stat().st_size]
    os.truncate(path, end)
    third = write_steps(path, [3])
    assert plain(read_groups(path)) == plain(tuple(first + third))


def test_cut_columns_give_the_batches_before_the_cut_and_say_so(tmp_path):
    path = tmp_path / "rollouts.columns"
    first = write_steps(path, [1])
    end = path.stat().st_size
    write_steps(path, [2])
    whole = path.read_bytes()
    num_records = sum(len(group.rollouts) for group in first)
    for size in (end + 1, end + 20, end + 44, end + 45, (end + len(whole)) // 2, len(whole) - 1):
        path.write_bytes(whole[:size])
        read = []
        with pytest.raises(
            DataError, match=rf"{path}:{num_records + 1} .*: the file is cut off or damaged here\n\nhint"
        ):
            read.extend(read_batches(path))
        assert plain(tuple(group for batch in read for group in batch.groups)) == plain(tuple(first))
        assert [line.end for line in read_lines(path)][-1] == end
    for size in (1, 19):
        path.write_bytes(whole[:size])
        with pytest.raises(DataError, match=f"{path}:1 is not a rollout"):
            read_groups(path)
    for size in (0, 20):
        path.write_bytes(whole[:size])
        assert read_groups(path) == ()


def test_every_changed_byte_of_columns_is_found(tmp_path):
    path = tmp_path / "rollouts.columns"
    prompt = make_prompt("2+2=", "4")
    with contextlib.closing(RolloutWriter(path)) as writer:
        writer.write(make_group("g0", prompt, (make_rollout(prompt, "4"),)), step=1)
    whole = path.read_bytes()
    for at in range(len(whole)):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 0x41]) + whole[at + 1 :])
        with pytest.raises(DataError, match=r"cut off or damaged here|has version"):
            read_groups(path)


def test_columns_of_a_newer_version_are_refused(tmp_path):
    path = tmp_path / "rollouts.columns"
    path.write_bytes(b"\x89rlhf-rollouts\r\n" + (2).to_bytes(4, "little") + b"whatever")
    with pytest.raises(DataError, match=r"has version 2 of the columns; this program reads version 1\n\nhint: "):
        read_groups(path)


def test_columns_are_known_by_their_beginning_and_a_name_of_columns_asks_for_it(tmp_path):
    written = write_steps(tmp_path / "a.columns", [1])
    (tmp_path / "a.columns").rename(tmp_path / "a.jsonl")
    assert plain(read_groups(tmp_path / "a.jsonl")) == plain(tuple(written))
    write_steps(tmp_path / "b.jsonl", [1])
    (tmp_path / "b.jsonl").rename(tmp_path / "b.columns")
    with pytest.raises(DataError, match=r"b.columns:1 is not a rollout"):
        read_groups(tmp_path / "b.columns")


def test_module_prints_columns_as_json_lines(tmp_path):
    for name in ("a.jsonl", "a.columns"):
        write_steps(tmp_path / name, [1])

    def run(*words):
        command = [sys.executable, "-m", "rlhf_rollout.records_io", *words]
        return subprocess.run(command, capture_output=True, check=False)

    done = run(tmp_path / "a.columns")
    assert (done.returncode, done.stdout, done.stderr) == (0, (tmp_path / "a.jsonl").read_bytes(), b"")
    none = run()
    assert (none.returncode, none.stdout) == (2, b"")
    assert b"error: one file of rollouts must be named" in none.stderr
    (tmp_path / "a.columns").write_bytes((tmp_path / "a.columns").read_bytes()[:-1])
    cut = run(tmp_path / "a.columns")
    assert cut.returncode == 2
    assert b"record 1 is not a rollout as it was written: the file is cut off or damaged here" in cut.stderr
