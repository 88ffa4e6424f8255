"""Files of rollouts that somebody edited."""

import json

import pytest

from rlhf_data.errors import DataError
from rlhf_rollout.commands.parts import write_rows
from rlhf_rollout.commands.post_process import training_rows

RECORD = {"group_id": "g", "input": "i", "text": "t", "verdict": "ok", "finish_reason": "stop"}
WHOLE = {**RECORD, "reward": 1.0, "label": None}


def rows(path, *lines, kind="plain"):
    path.write_bytes(b"\n".join(lines) + b"\n")
    return training_rows(path, kind, min_reward=None, reward_template="{input}{reward}")


def test_record_that_is_whole_becomes_a_row(tmp_path):
    [row] = rows(tmp_path / "r.jsonl", json.dumps(WHOLE).encode())
    assert (row["input"], row["output"], row["reward"]) == ("i", "t", 1.0)


@pytest.mark.parametrize(
    "line",
    [
        b"\xff",
        b"[" * 5000,
        b"[]",
        b"1",
        json.dumps(WHOLE)[:-2].encode(),
        *(json.dumps({k: v for k, v in WHOLE.items() if k != key}).encode() for key in WHOLE),
        *(json.dumps({**WHOLE, key: {}}).encode() for key in WHOLE if key != "label"),
        json.dumps({**WHOLE, "reward": 10**400}).encode(),
        json.dumps({**WHOLE, "reward": float("nan")}).encode(),
        json.dumps({**WHOLE, "reward": float("inf")}).encode(),
    ],
    ids=lambda line: line[-60:].decode(errors="replace"),
)
def test_line_that_is_no_record_is_named(tmp_path, line):
    path = tmp_path / "r.jsonl"
    with pytest.raises(DataError, match=rf"(?s){path}:2: .* is not a record of a rollout.*hint: repair or remove"):
        rows(path, json.dumps(WHOLE).encode(), line)


def test_messages_are_refused_where_the_reward_is_written_into_text(tmp_path):
    messages = [{"role": "user", "content": "i"}]
    with pytest.raises(DataError, match="must be text and not messages"):
        rows(tmp_path / "r.jsonl", json.dumps({**WHOLE, "input": messages}).encode(), kind="csft")


def test_text_that_is_no_unicode_is_written_as_a_json_escape(tmp_path):
    path = tmp_path / "new" / "rows.jsonl"
    assert write_rows(path, [{"text": "\u00e9\ud800"}]) == 1
    assert path.read_bytes() == b'{"text": "\xc3\xa9\\ud800"}\n'
