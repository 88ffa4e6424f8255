"""All ways of scheduling are measured on steps in which every sequence decodes."""

import pytest

pytest.importorskip("vllm")

from rlhf_models.testing import tiny_model_dir
from workloads.speed import scheduling


@pytest.mark.parametrize("way", scheduling.WAYS)
def test_steps_that_decode_all_sequences_are_measured(tmp_path, monkeypatch, way):
    model = str(tiny_model_dir(tmp_path / "model"))
    seen = []
    made_up = scheduling.made_up_output
    monkeypatch.setattr(
        scheduling, "made_up_output", lambda *args: seen.append(args[1].num_scheduled_tokens) or made_up(*args)
    )
    found = scheduling.seconds_of(model, way, 3, 7)
    assert {part: len(seconds) for part, seconds in found.items()} == {"schedule": 7, "update": 6}
    assert all(seconds > 0 for part in found.values() for seconds in part)
    assert [list(counts.values()) for counts in seen[-7:]] == [[1, 1, 1]] * 7
