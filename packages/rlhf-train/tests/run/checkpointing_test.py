"""When a run saves its state, what it saves beside the models, and which checkpoint it continues from."""

from dataclasses import replace
from datetime import datetime
from types import SimpleNamespace

import pytest

from rlhf_data.errors import CheckpointError
from rlhf_train.run.checkpoint import Checkpoints, CheckpointSpec, recorded_clock
from rlhf_train.run.checkpointing import Checkpointer, find_checkpoint
from rlhf_train.run.observer import Observer
from rlhf_train.run.timeline import Timeline


def test_run_whose_checkpoints_cannot_be_used_does_not_start_from_the_beginning(tmp_path):
    spec = CheckpointSpec(resume=True)
    said: list[str] = []
    observer = SimpleNamespace(notice=said.append, warning=said.append)
    assert find_checkpoint(spec, tmp_path, observer) is None  # there is none
    assert "starts from the beginning" in said[-1]
    checkpoints = Checkpoints(spec.home(tmp_path))
    for step in (1, 2):
        checkpoints.begin(step)
        (checkpoints.commit(step, {"step": step}, [], None).path / "state.json").unlink()
    with pytest.raises(CheckpointError, match=r"none of the 2 checkpoints .*\n\nhint: .* move them away"):
        find_checkpoint(spec, tmp_path, observer)
    assert [warning.partition("is skipped")[2] for warning in said[1:]] == [": state.json is missing"] * 2
    assert find_checkpoint(replace(spec, before=1), tmp_path, observer) is None  # both are of later steps
    checkpoints.begin(3)
    checkpoints.commit(3, {"step": 3}, [], None)
    assert find_checkpoint(spec, tmp_path, observer).step == 3


class FakeModels:
    def __init__(self) -> None:
        self.calls: list[str] = []

    def save_state(self, folder: str) -> list[str]:
        self.calls.append("save")
        return []

    def load_state(self, folder: str) -> None: ...

    def finish_state(self) -> None:
        self.calls.append("finish")


class Count:
    def state(self) -> int:
        return 5

    def restore(self, state: int) -> None:
        assert state == 5


@pytest.mark.parametrize("clock", [None, datetime(2025, 12, 31, 23, 59)])
def test_every_checkpoint_keeps_the_clock(tmp_path, clock):
    spec = CheckpointSpec(every=1, template_clock=clock)
    checkpoints = Checkpoints(tmp_path)
    args = spec, checkpoints, {"count": Count()}, FakeModels(), None, Timeline(), Observer()
    first = Checkpointer(*args)
    first.after_step(1, None)
    first.close()
    told = {} if clock is None else {"template_clock": "2025-12-31T23:59:00"}
    [saved] = checkpoints.all()
    assert saved.state() == {"step": 1, "is_recorded": True, "count": 5, **told}
    assert recorded_clock(tmp_path) == clock
    assert Checkpointer(*args).restore(saved) == 1


def test_models_have_written_a_state_before_they_save_the_next(tmp_path):
    models = FakeModels()
    spec = CheckpointSpec(every=1)
    saves = Checkpointer(spec, Checkpoints(tmp_path), {"count": Count()}, models, None, Timeline(), Observer())
    saves.after_step(1, None)
    saves.after_step(2, None)
    saves.close()
    assert models.calls[models.calls.index("save") :] == ["save", "finish", "save", "finish"]
