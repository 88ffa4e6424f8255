"""The state of the driver in a checkpoint: rollout groups and arrays are in files of their own."""

import hashlib
import json
import shutil
import struct
from array import array
from contextlib import closing
from dataclasses import replace

import numpy as np
import pytest

from random_records import plain, random_group
from rlhf_data.errors import CheckpointError
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
from rlhf_rollout.unfinished import Written
from rlhf_train.run.checkpoint import Checkpoint, Checkpoints, read_checkpoint
from rlhf_train.run.saved.state import read_state, write_state

BITS = [0x7FC00001, 0xBF800000, 0x80000000]  # a NaN, -1 and -0


def waiting_group(name: str) -> RolloutGroup:
    logprobs = np.array(BITS, np.uint32).view(np.float32)
    spans = (Span(SpanSource.PROMPT, [1, 2]), Span(SpanSource.POLICY, [2**31 - 1, 0, 7], logprobs, 3))
    verdict = Verdict(VerdictKind.OK, 0.1, seconds=1 / 3)
    rollout = Rollout(f"{name}/0", name, spans, FinishReason.STOP, "\ud800 \u00e9", verdict, images=("a b.png",))
    prompt = Prompt("p", [1, 2], "2+2=\udfff", extra={"n": [1, {"deep": None}]}, images=("a b.png",))
    return RolloutGroup(name, prompt, (Episode(f"{name}/e", name, (rollout,)),))


def commit(folder, step, state) -> Checkpoint:
    checkpoints = Checkpoints(folder)
    checkpoints.begin(step)
    return checkpoints.commit(step, state, [], None)


def test_arrays_of_a_state_are_in_a_file_of_their_own(tmp_path):
    growing = array("f", [-0.5, -1.5])
    written = Written(growing, 2)
    growing.append(-2.5)
    routes = np.arange(12, dtype=np.uint8).reshape(2, 3, 2)
    empty = Written(array("i"), 0)
    state = {"drafts": [{"routes": routes[:, ::2][:1, :, :1], "n": 1}, {"logprobs": written, "routes": routes[:, ::2]}]}
    state["drafts"].append({"token_ids": empty, "routes": None})
    saved = commit(tmp_path, 1, state)
    assert set(saved.files) == {"state.json", "unfinished.bin"}
    seal = hashlib.blake2b((saved.path / "state.json").read_bytes(), digest_size=16).digest()
    numbers = struct.pack("<2B2x2f8B", 0, 4, -0.5, -1.5, 0, 1, 4, 5, 6, 7, 10, 11)
    assert (saved.path / "unfinished.bin").read_bytes() == numbers + seal
    part, first, second = saved.state()["drafts"]
    assert (part["routes"].tolist(), part["n"]) == ([[[0], [4]]], 1)
    assert (first["logprobs"].dtype, first["logprobs"].tolist()) == (np.float32, [-0.5, -1.5])
    assert (first["routes"].dtype, first["routes"].tolist()) == (np.uint8, routes[:, ::2].tolist())
    assert (second["token_ids"].dtype, second["token_ids"].tolist(), second["routes"]) == (np.int32, [], None)


def test_state_of_empty_arrays_is_read(tmp_path):
    write_state(tmp_path, {"token_ids": Written(array("i"), 0)})
    assert read_state(tmp_path)["token_ids"].tolist() == []


def test_groups_of_a_state_are_in_a_file_of_their_own(tmp_path):
    state = {"dropped": [waiting_group("a")], "tickets": [[1, None], [2, waiting_group("b")]], "other": {"n": 1}}
    saved = commit(tmp_path, 1, state)
    assert set(saved.files) == {"state.json", "waiting.bin"}
    assert json.loads((saved.path / "state.json").read_text())["other"] == {"n": 1}
    read = saved.state()
    assert read["other"] == {"n": 1} and read["tickets"][0] == [1, None]
    for name, group in {"a": read["dropped"][0], "b": read["tickets"][1][1]}.items():
        [rollout] = group.rollouts
        assert (group.group_id, rollout.text, group.prompt.text) == (name, "\ud800 \u00e9", "2+2=\udfff")
        assert group.prompt.images == rollout.images == ("a b.png",)
        assert (group.prompt.extra, rollout.verdict.seconds) == ({"n": [1, {"deep": None}]}, 1 / 3)
        prompt, answer = rollout.spans
        assert (prompt.token_ids.tolist(), answer.token_ids.tolist()) == ([1, 2], [2**31 - 1, 0, 7])
        assert answer.logprobs.view(np.uint32).tolist() == BITS
        assert answer.policy_version == 3
        assert answer.token_ids.flags.aligned and answer.logprobs.flags.aligned


def test_any_group_is_read_as_it_was_written(tmp_path):
    rng = np.random.default_rng(3)
    groups = [random_group(rng, number) for number in range(20)]
    write_state(tmp_path, {"groups": groups})
    assert [plain(group) for group in read_state(tmp_path)["groups"]] == [plain(group) for group in groups]


def test_what_no_json_has_is_refused_with_its_type(tmp_path):
    with pytest.raises(TypeError, match="set in the state of a run is no JSON value"):
        write_state(tmp_path, {"step": {1}})
    group = waiting_group("a")
    group.prompt.extra["n"] = {1}
    with pytest.raises(TypeError, match="set in a rollout group is no JSON value"):
        write_state(tmp_path, {"group": group})


CUT = "is cut off, or belongs to another checkpoint"
# How a file is damaged, and what the error says after its path.
DAMAGE = {
    "missing": (lambda path, other: path.unlink(), "is missing"),
    "empty": (lambda path, other: path.write_bytes(b""), "is empty"),
    "cut": (lambda path, other: path.write_bytes(path.read_bytes()[:-1]), CUT),
    "short": (lambda path, other: path.write_bytes(b"ab"), CUT),
    "of another step": (lambda path, other: shutil.copy(other, path), CUT),
}


@pytest.mark.parametrize("how", DAMAGE)
@pytest.mark.parametrize("name", ["waiting.bin", "unfinished.bin"])
def test_a_damaged_file_of_the_state_is_named(tmp_path, name, how):
    state = {"groups": [waiting_group("a")], "drafts": np.arange(3)}
    saved, other = (commit(tmp_path, step, {"step": step, **state}) for step in (1, 2))
    assert (other.path / name).stat().st_size == (saved.path / name).stat().st_size
    damage, message = DAMAGE[how]
    damage(saved.path / name, other.path / name)
    with pytest.raises(CheckpointError) as caught:
        saved.state()
    assert str(caught.value).startswith(
        f"{saved.path / name} {message}\n\nhint: copy all files of this checkpoint again"
    )
    assert other.state()["step"] == 2


@pytest.mark.parametrize(
    ("content", "message"),
    [(None, "is missing"), (b"", "cannot be read: Expecting"), (b'{"a', "cannot be read: Unterm")],
)
def test_a_damaged_state_is_named(tmp_path, content, message):
    saved = commit(tmp_path, 1, {"step": 1})
    (saved.path / "state.json").unlink()
    if content is not None:
        (saved.path / "state.json").write_bytes(content)
    with pytest.raises(CheckpointError) as caught:
        saved.state()
    assert str(caught.value).startswith(f"{saved.path / 'state.json'} {message}")
    assert "\n\nhint: copy all files" in str(caught.value)


def test_a_group_that_is_none_is_named(tmp_path):
    """As after an edit of the file that left its size and end."""
    write_state(tmp_path, {"groups": [waiting_group("a")]})
    path = tmp_path / "waiting.bin"
    path.write_bytes(path.read_bytes().replace(b'"group_id": "a"', b'"group_ID": "a"'))
    with pytest.raises(CheckpointError, match=r"waiting\.bin has no group at \[.*KeyError\('group_id'\)"):
        read_state(tmp_path)


@pytest.mark.parametrize("place", [[0, "int64", [4]], [-8, "int64", [1]], [0, "int64", [-1]]])
def test_a_place_outside_of_the_file_is_named(tmp_path, place):
    write_state(tmp_path, {"drafts": np.arange(3)})
    text = json.dumps({"drafts": {"unfinished.bin": place}}).encode()
    (tmp_path / "state.json").write_bytes(text)
    (tmp_path / "unfinished.bin").write_bytes(bytes(24) + hashlib.blake2b(text, digest_size=16).digest())
    with pytest.raises(CheckpointError, match=r"unfinished\.bin has 24 bytes, and no array at \["):
        read_state(tmp_path)


def older_checkpoint(path, groups, logprobs):
    """Write a checkpoint as version 3 of the format has it, and return it."""
    path.mkdir()
    with closing(RolloutWriter(path / "waiting.columns", level=0)) as writer:
        for group in groups:
            writer.write(group)
    (path / "unfinished.bin").write_bytes(struct.pack(f"<{len(logprobs)}f", *logprobs))
    places = [{"waiting.columns": number} for number in range(len(groups))]
    state = {"groups": places, "drafts": {"unfinished.bin": [0, "float32", [len(logprobs)]]}}
    (path / "state.json").write_text(json.dumps(state))
    manifest = {"format": 3, "step": len(groups), "metric": None, "lowest": False, "files": {}}
    (path / "manifest.json").write_text(json.dumps(manifest))
    return read_checkpoint(path)


def test_older_checkpoints_are_read(tmp_path):
    groups = [waiting_group("a"), waiting_group("b")]
    read = older_checkpoint(tmp_path / "step-2", groups, [-0.5, -1.5]).state()
    assert read["drafts"].tolist() == [-0.5, -1.5]
    rounded = [replace(one.rollouts[0].verdict, seconds=0.333333) for one in groups]
    assert [one.rollouts[0].verdict.seconds for one in read["groups"]] == [one.seconds for one in rounded]
    assert [group.group_id for group in read["groups"]] == ["a", "b"]
    for group in read["groups"]:
        assert group.rollouts[0].spans[1].logprobs.view(np.uint32).tolist() == BITS


OLDER = {
    ("waiting.columns", "missing"): "is missing",
    ("waiting.columns", "empty"): "has 0 rollout groups, not at least 1: it belongs to another checkpoint",
    ("waiting.columns", "cut"): "is cut off or damaged: ",
    ("waiting.columns", "of an earlier step"): "has 1 rollout groups, not at least 2: it belongs to another checkpoint",
    ("waiting.columns", "of a later step"): "has 3 rollout groups, not 2: it belongs to another checkpoint",
    ("unfinished.bin", "missing"): "is missing",
    ("unfinished.bin", "empty"): "has 0 bytes, and no array at [0, 'float32', [2]]: it is cut off",
    ("unfinished.bin", "cut"): "has 7 bytes, and no array at [0, 'float32', [2]]: it is cut off",
    ("unfinished.bin", "of an earlier step"): "has 4 bytes, and no array at [0, 'float32', [2]]: it is cut off",
    ("unfinished.bin", "of a later step"): "has 12 bytes, not 8: it belongs to another checkpoint",
}


@pytest.mark.parametrize(("name", "how"), OLDER)
def test_a_damaged_file_of_an_older_state_is_named(tmp_path, name, how):
    earlier, saved, later = (
        older_checkpoint(tmp_path / f"step-{step}", [waiting_group(str(one)) for one in range(step)], [-1.0] * step)
        for step in (1, 2, 3)
    )
    damage, _ = DAMAGE["of another step" if how.startswith("of") else how]
    damage(saved.path / name, (earlier if "earlier" in how else later).path / name)
    with pytest.raises(CheckpointError) as caught:
        saved.state()
    assert str(caught.value).startswith(f"{saved.path / name} {OLDER[name, how]}")
    assert "\n\nhint: copy all files of this checkpoint again" in str(caught.value)
    assert str(caught.value).count("hint:") == 1
