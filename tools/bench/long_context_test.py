"""Every number of ranks trains on the same sequences, with the same loss and gradients."""

import json

import pytest

import long_context


def test_two_ranks_agree_with_one(tmp_path, monkeypatch):
    out = tmp_path / "report.json"
    words = ["long_context.py", "--shape", "tiny", "--num_tokens", "48", "--ranks", "1", "2", "--out", str(out)]
    monkeypatch.setattr("sys.argv", words)
    long_context.main()
    ranks = json.loads(out.read_text())["ranks"]
    assert {name: len(run["updates"]) for name, run in ranks.items()} == {"1": 4, "2": 4}
    for value in ranks["2"]["first_update"].values():
        assert value["relative_error"] == pytest.approx(0, abs=1e-5)
    losses = [[update["sft/loss"] for update in run["updates"]] for run in ranks.values()]
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)
    assert len(set(losses[0])) == 4  # another sequence in each update
