"""Rollouts as columns: a file's bytes, and what is read of whole, cut and damaged files."""

import contextlib
import json
import os
import struct
import subprocess
import sys
import zlib

import numpy as np
import pytest

from random_records import plain, read_groups, write_steps
from record_testing import make_group, make_prompt, make_rollout
from rlhf_data.errors import DataError
from rlhf_data.records import FinishReason, Rollout, Span, SpanSource
from rlhf_rollout.records_io import RolloutWriter, json_lines, read_batches, read_lines


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
