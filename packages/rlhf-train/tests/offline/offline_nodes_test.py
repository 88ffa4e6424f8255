"""Ranks on several nodes end at the start of a run that cannot work there, and not one by one, or never."""

import os
import threading
import time
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from rlhf_data.errors import ConfigError, DataError, EngineError
from rlhf_data.examples.sft import SftExample
from rlhf_train.engine.process_group import init_process_group
from rlhf_train.offline import collectives as ranks
from rlhf_train.offline.collectives import check_shared
from rlhf_train.offline.epochs import OfflineSchedule
from rlhf_train.offline.job import OfflineJob, run_offline
from rlhf_train.offline.meeting import failing_together, meet
from rlhf_train.offline.objectives.supervised import SupervisedObjective
from rlhf_train.run.observer import Observer
from rlhf_train.specs import ModelSpec, OptimizerSpec
from trainer_testing import run_ranks


def another_disk(folder: str, until: float = float("inf")) -> Any:
    """Return a patch with which this process sees nothing in a folder, until some time of `time.monotonic`."""
    listdir = os.listdir

    def list_own(path):
        if Path(path).is_relative_to(folder) and time.monotonic() < until:
            raise FileNotFoundError(path)
        return listdir(path)

    return mock.patch.object(os, "listdir", list_own)


def run_on_two_disks(rank: int, num_ranks: int, master: Any, folder: str) -> str:
    job = OfflineJob(
        objective=SupervisedObjective(),
        model=ModelSpec(path="no model is loaded", optimizer=OptimizerSpec(learning_rate=1e-3, total_steps=1)),
        examples=[SftExample("row", torch.arange(4).numpy(), torch.ones(4).bool().numpy())] * 4,
        schedule=OfflineSchedule(train_batch_size=4, micro_train_batch_size=2),
        model_path=Path(folder, "run/model"),
        rank=rank,
        num_ranks=num_ranks,
        master=master,
    )
    with mock.patch.object(ranks, "_LATE_S", 0.3):
        with another_disk(folder if rank == 1 else "/nowhere"), pytest.raises(ConfigError) as caught:
            run_offline(job, Observer())
        return str(caught.value)


def test_ranks_that_share_no_disk_end_before_a_model_is_loaded_and_leave_nothing(tmp_path):
    said = run_ranks(run_on_two_disks, 2, str(tmp_path))
    assert said[0] == said[1]
    assert "cannot see what rank 0 (" in said[0] and said[0].startswith("rank 1 (")
    assert f"writes to {tmp_path}/run/checkpoints\n\nhint: a run on several nodes needs a disk that they" in said[0]
    assert list(tmp_path.iterdir()) == []


def look(rank: int, num_ranks: int, master: Any, late: str, unwritable: str) -> None:
    init_process_group(rank=rank, world_size=num_ranks, master=master, device="cpu")
    with another_disk(late, time.monotonic() + rank):
        check_shared(Path(late, "run/checkpoints"))
    check_shared(Path(unwritable, "checkpoints"))


def test_disk_that_shows_files_late_and_one_without_access_are_no_errors(tmp_path):
    late, file = tmp_path / "late", tmp_path / "file"
    late.mkdir()
    file.touch()
    run_ranks(look, 2, str(late), str(file))
    assert list(late.iterdir()) == []


@pytest.fixture
def nodes(monkeypatch) -> None:
    """The environment of one of two ranks that torchrun started on two nodes, and the store that it keeps."""
    store = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    own = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "1", "TORCHELASTIC_USE_AGENT_STORE": "True"}
    for name, value in (own | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port)}).items():
        monkeypatch.setenv(name, value)
    yield
    del store


def test_rank_that_fails_before_all_have_met_ends_those_of_other_nodes(nodes, monkeypatch):
    with pytest.raises(DataError, match="no such file"), failing_together():
        raise DataError("no such file", hint="copy it")
    with pytest.raises(EngineError, match=r"rank 1 on .* failed: DataError: no such file\n\nhint: copy it"):
        meet()
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")  # the next attempt knows nothing of it
    other = threading.Thread(target=meet)
    other.start()
    meet()
    other.join(timeout=20)
    assert not other.is_alive()


def test_ranks_of_one_node_do_not_meet(nodes, monkeypatch):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    monkeypatch.setenv("MASTER_PORT", "1")
    meet()
    with pytest.raises(DataError), failing_together():
        raise DataError("no such file")


def test_error_about_variables_of_another_launcher_is_not_hidden(monkeypatch):
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
    monkeypatch.setenv("WORLD_SIZE", "two")
    with pytest.raises(ConfigError, match="WORLD_SIZE is"), failing_together():
        raise ConfigError("WORLD_SIZE is `two`")


def test_node_that_has_ended_is_an_error_with_its_address(nodes, monkeypatch):
    monkeypatch.setenv("MASTER_PORT", "1")
    monkeypatch.setattr("rlhf_train.offline.meeting._CONNECT", timedelta(seconds=1))
    with pytest.raises(EngineError, match=r"torchrun on 127.0.0.1:1 does not answer: [^\n]*\n\nhint: the output of"):
        meet()
