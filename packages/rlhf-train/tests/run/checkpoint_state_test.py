"""The state of the driver in a checkpoint: rollout groups and arrays are in files of their own."""

import json
import struct
from array import array

import numpy as np
import pytest

from rlhf_data.errors import CheckpointError
from rlhf_data.records import Episode, FinishReason, Prompt, Rollout, RolloutGroup, Span, SpanSource
from rlhf_rollout.unfinished import Written
from rlhf_train.run.checkpoint import Checkpoints, read_state, write_state


def waiting_group(name: str) -> RolloutGroup:
    logprobs = np.array([0x7FC00001, 0xBF800000, 0x80000000], np.uint32).view(np.float32)  # a NaN, -1 and -0
    spans = (Span(SpanSource.PROMPT, [1, 2]), Span(SpanSource.POLICY, [2**31 - 1, 0, 7], logprobs, 3))
    rollout = Rollout(f"{name}/0", name, spans, FinishReason.STOP, "\ud800 \u00e9")
    return RolloutGroup(name, Prompt("p", [1, 2], "2+2="), (Episode(f"{name}/e", name, (rollout,)),))


def test_arrays_of_a_state_are_in_a_file_of_their_own(tmp_path):
    growing = array("f", [-0.5, -1.5])
    written = Written(growing, 2)
    growing.append(-2.5)
    routes = np.arange(12, dtype=np.uint8).reshape(2, 3, 2)
    empty = Written(array("i"), 0)
    state = {"drafts": [{"logprobs": written, "routes": routes[:, ::2]}, {"token_ids": empty, "routes": None}], "n": 1}
    checkpoints = Checkpoints(tmp_path)
    checkpoints.begin(1)
    saved = checkpoints.commit(1, state, [], None)
    assert set(saved.files) == {"state.json", "unfinished.bin"}
    assert (saved.path / "unfinished.bin").read_bytes() == struct.pack("<ff8B", -0.5, -1.5, 0, 1, 4, 5, 6, 7, 10, 11)
    first, second = saved.state()["drafts"]
    assert (first["logprobs"].dtype, first["logprobs"].tolist()) == (np.float32, [-0.5, -1.5])
    assert (first["routes"].dtype, first["routes"].tolist()) == (np.uint8, routes[:, ::2].tolist())
    assert (second["token_ids"].dtype, second["token_ids"].tolist(), second["routes"]) == (np.int32, [], None)
    (saved.path / "unfinished.bin").write_bytes((saved.path / "unfinished.bin").read_bytes()[:-1])
    assert "unfinished.bin has 15 bytes, not 16" in saved.problems()
    with pytest.raises(CheckpointError, match=r"state\.json cannot be read: .* is no place in a file of 15 bytes"):
        saved.state()
    (saved.path / "unfinished.bin").unlink()
    with pytest.raises(CheckpointError, match=r"state\.json cannot be read"):
        saved.state()


def test_state_of_empty_arrays_is_read(tmp_path):
    write_state(tmp_path, {"token_ids": Written(array("i"), 0)})
    assert read_state(tmp_path)["token_ids"].tolist() == []


def test_groups_of_a_state_are_in_a_file_of_their_own(tmp_path):
    checkpoints = Checkpoints(tmp_path)
    state = {"dropped": [waiting_group("a")], "tickets": [[1, None], [2, waiting_group("b")]], "other": {"n": 1}}
    staging = checkpoints.begin(1)
    assert staging.is_dir()
    saved = checkpoints.commit(1, state, [], None)
    assert set(saved.files) == {"state.json", "waiting.columns"}
    assert json.loads((saved.path / "state.json").read_text()) == {
        "dropped": [{"waiting.columns": 0}],
        "tickets": [[1, None], [2, {"waiting.columns": 1}]],
        "other": {"n": 1},
    }
    read = saved.state()
    assert read["other"] == {"n": 1} and read["tickets"][0] == [1, None]
    for name, group in {"a": read["dropped"][0], "b": read["tickets"][1][1]}.items():
        [rollout] = group.rollouts
        assert (group.group_id, rollout.text, group.prompt.text) == (name, "\ud800 \u00e9", "2+2=")
        prompt, answer = rollout.spans
        assert (prompt.token_ids.tolist(), answer.token_ids.tolist()) == ([1, 2], [2**31 - 1, 0, 7])
        assert answer.logprobs.view(np.uint32).tolist() == [0x7FC00001, 0xBF800000, 0x80000000]
        assert answer.policy_version == 3
    (saved.path / "waiting.columns").write_bytes((saved.path / "waiting.columns").read_bytes()[:-1])
    assert "waiting.columns has" in saved.problems()[0]
    with pytest.raises(CheckpointError, match=r"state\.json cannot be read: .*waiting\.columns:2 .*cut off or damaged"):
        saved.state()
    (saved.path / "waiting.columns").unlink()
    with pytest.raises(CheckpointError, match=r"state\.json cannot be read: list index out of range"):
        saved.state()
