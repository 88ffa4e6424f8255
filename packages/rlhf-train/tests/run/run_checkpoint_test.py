"""Checkpoints on the disk: whole or not there, found again, checked, and removed when there are too many."""

import errno
import hashlib
import json
import math
import os
import shutil
import subprocess
import sys
import threading
import time
from datetime import datetime
from pathlib import Path
from types import SimpleNamespace

import pytest

from rlhf_data.errors import CheckpointError
from rlhf_train.run import checkpoint as checkpoint_module
from rlhf_train.run import rank_state
from rlhf_train.run.checkpoint import (
    MANIFEST,
    RECEIPT,
    Checkpoint,
    Checkpoints,
    folders,
    read_checkpoint,
    recorded_clock,
    superfluous,
    write_receipt,
)


def save(checkpoints: Checkpoints, step: int, metric: float | None = None, size: int = 10):
    staging = checkpoints.begin(step)
    (staging / "actor").write_bytes(b"w" * size)
    write_receipt(staging / "actor")
    (staging / "hf").mkdir()
    (staging / "hf/config.json").write_text("{}")
    return checkpoints.commit(step, {"step": step, "pi": 3.25}, ["actor"], metric)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_checkpoint_holds_files_state_and_their_hashes(tmp_path):
    saved = save(Checkpoints(tmp_path / "c"), 20, 0.5)
    assert saved.path == tmp_path / "c/step-20"
    assert saved.state() == {"step": 20, "pi": 3.25}
    assert (saved.step, saved.metric, saved.problems()) == (20, 0.5, [])
    assert names(saved.path) == ["actor", "hf", "manifest.json", "state.json"]
    assert saved.files["actor"] == (10, hashlib.sha256(b"w" * 10).hexdigest())
    assert set(saved.files) == {"actor", "hf/config.json", "state.json"}
    assert saved.size_bytes == 10 + 2 + len('{"step": 20, "pi": 3.25}')
    assert read_checkpoint(saved.path) == saved


def test_unfinished_checkpoint_does_not_count_and_is_removed(tmp_path):
    checkpoints = Checkpoints(tmp_path)
    save(checkpoints, 1)
    (checkpoints.begin(2) / "actor").write_bytes(b"half")
    assert [checkpoint.step for checkpoint in checkpoints.all()] == [1]
    assert checkpoints.newest_whole(pytest.fail).step == 1
    save(checkpoints, 3)
    assert names(tmp_path) == ["step-1", "step-3"]


@pytest.mark.parametrize(
    ("damage", "problem"),
    [
        (lambda path: (path / "actor").unlink(), "actor is missing"),
        (lambda path: (path / "actor").write_bytes(b"w" * 9), "actor has 9 bytes, not 10"),
        (lambda path: (path / "actor").write_bytes(b"w" * 9 + b"v"), "actor has changed since it was written"),
        (lambda path: (path / "state.json").write_text('{"step": 9}'), "state.json has"),
        (lambda path: (path / MANIFEST).unlink(), "cannot be read"),
        (lambda path: (path / MANIFEST).write_text("[]"), "cannot be read"),
        (lambda path: (path / MANIFEST).write_text('{"format": 7}'), "has format 7; this version reads formats 1, 2"),
    ],
)
def test_damaged_checkpoint_is_named_and_the_one_before_is_used(tmp_path, damage, problem):
    checkpoints = Checkpoints(tmp_path)
    save(checkpoints, 9)
    damage(save(checkpoints, 10).path)
    warnings: list[str] = []
    assert checkpoints.newest_whole(warnings.append).step == 9
    [warning] = warnings
    assert f"the checkpoint {tmp_path / 'step-10'} is skipped: " in warning
    assert problem in warning


def test_old_checkpoint_that_cannot_be_removed_does_not_end_a_new_one(tmp_path, monkeypatch):
    checkpoints = Checkpoints(tmp_path, max_num=1)
    save(checkpoints, 1)
    plain = os.rmdir

    def rmdir(path, **options):  # as on NFS, whose folder keeps the names of files that are in use
        if str(path).endswith(".removed"):
            raise OSError(errno.ENOTEMPTY, os.strerror(errno.ENOTEMPTY), str(path))
        plain(path, **options)

    monkeypatch.setattr(os, "rmdir", rmdir)
    for step in (2, 3):
        assert save(checkpoints, step).problems() == []
    assert [path.name for path in folders(tmp_path)] == ["step-3"]


def test_file_is_flushed_and_summed_while_the_interpreter_ends(tmp_path):
    (tmp_path / "actor").write_bytes(b"w" * 10)
    script = """
import threading, sys
from pathlib import Path
from rlhf_train.run.checkpoint import write_receipt
threading.Thread(target=lambda: (threading.main_thread().join(), write_receipt(Path(sys.argv[1])))).start()
"""
    subprocess.run([sys.executable, "-c", script, str(tmp_path / "actor")], check=True)
    told = json.loads((tmp_path / f"actor{RECEIPT}").read_bytes())
    assert told == {"size": 10, "sha256": hashlib.sha256(b"w" * 10).hexdigest()}


def test_without_a_whole_checkpoint_there_is_none(tmp_path):
    assert Checkpoints(tmp_path / "nothing").newest_whole(pytest.fail) is None
    (tmp_path / "step-x").mkdir()
    warnings: list[str] = []
    assert Checkpoints(tmp_path).newest_whole(warnings.append) is None
    assert len(warnings) == 1


@pytest.mark.parametrize(
    ("limits", "kept"),
    [
        ({}, [3, 4, 5]),
        ({"max_num": 1}, [5]),
        ({"max_num": 9}, [1, 2, 3, 4, 5]),
        ({"max_num": 9, "max_bytes": 450}, [4, 5]),  # each has 100 bytes and its state and folder
        ({"max_num": 9, "max_bytes": 1}, [5]),
    ],
)
def test_oldest_checkpoints_beyond_the_limits_are_removed(tmp_path, limits, kept):
    checkpoints = Checkpoints(tmp_path, **limits)
    for step in range(1, 6):
        save(checkpoints, step, size=150)
    assert [checkpoint.step for checkpoint in checkpoints.all()] == kept


def test_checkpoint_that_fits_is_kept_though_a_newer_one_is_too_large():
    sizes = {1: 20, 2: 100, 3: 10}
    found = [Checkpoint(Path(f"step-{step}"), step, None, False, {"f": (size, "")}) for step, size in sizes.items()]
    assert [one.step for one in superfluous(found, max_num=9, max_bytes=30)] == [2]
    assert {one.step for one in superfluous(found, max_num=9, max_bytes=29)} == {1, 2}


@pytest.mark.parametrize(("lowest", "best"), [(True, 2), (False, 3)])
def test_checkpoint_whose_metric_is_nan_is_never_the_best(lowest, best):
    metrics = {1: math.nan, 2: 1.0, 3: 2.0, 4: math.nan, 5: None}
    found = [Checkpoint(Path(f"step-{step}"), step, metric, lowest, {}) for step, metric in metrics.items()]
    assert {one.step for one in superfluous(found, max_num=1)} == {1, 2, 3, 4} - {best}


def test_best_checkpoint_is_kept_besides_the_newest(tmp_path):
    checkpoints = Checkpoints(tmp_path, max_num=2)
    for step, metric in enumerate([0.1, 0.9, 0.3, None, 0.9, 0.2, 0.1, 0.0], start=1):
        save(checkpoints, step, metric)
    # Of two equal ones the later: the run has learned more.
    assert [checkpoint.step for checkpoint in checkpoints.all()] == [5, 7, 8]


def test_rank_that_cannot_write_fails_the_checkpoint_and_the_old_one_stays(tmp_path):
    checkpoints = Checkpoints(tmp_path)
    save(checkpoints, 1)
    staging = checkpoints.begin(2)
    write_receipt(staging / "actor", OSError("no space left on device"))
    with pytest.raises(
        CheckpointError, match=r"actor cannot be written: OSError: no space left(.|\n)*``CheckpointSpec.folder``"
    ):
        checkpoints.commit(2, {}, ["actor"], None)
    assert checkpoints.newest_whole(pytest.fail).step == 1


def test_disk_without_room_for_the_reason_is_named_as_the_reason(tmp_path, monkeypatch):
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=1.5 * 2**20))
    checkpoints = Checkpoints(tmp_path)
    staging = checkpoints.begin(1)
    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_bytes", lambda path, content: write_a_part(path, content, full))
        write_receipt(staging / "actor", full)
    assert (staging / f"actor{RECEIPT}").read_bytes() == b""
    says = r"actor cannot be written: there is no room even for the reason; 1\.5 MiB are free there\n\nhint: free space"
    with pytest.raises(CheckpointError, match=says):
        checkpoints.commit(1, {}, ["actor"], None)


def write_a_part(path, content, error):
    with path.open("wb") as file:
        file.write(content[:3])
    raise error


def test_receipt_of_a_file_that_the_disk_has_no_room_for_is_an_error(tmp_path, monkeypatch):
    (tmp_path / "actor").write_bytes(b"w")
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    monkeypatch.setattr(Path, "write_bytes", lambda path, content: write_a_part(path, content, full))
    with pytest.raises(OSError, match="No space left"):
        write_receipt(tmp_path / "actor")
    assert not (tmp_path / f"actor{RECEIPT}").exists()


def test_disk_on_which_no_file_can_be_made_keeps_the_error_and_the_other_files(tmp_path, monkeypatch):
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def refuse(path, content):
        raise full

    monkeypatch.setattr(Path, "write_bytes", refuse)
    with pytest.raises(OSError, match="No space left"):
        write_receipt(tmp_path / "actor", full)
    written = []

    def write(path):
        written.append(path.name)
        raise full

    rank_state._write({name: SimpleNamespace(write=write) for name in ("actor", "critic")}, tmp_path)
    assert sorted(written) == ["actor", "critic"]


def test_file_that_cannot_be_written_whole_makes_room_for_its_receipt(tmp_path):
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    shards = SimpleNamespace(write=lambda path: write_a_part(path, b"weights", full))
    rank_state._write({"actor": shards}, tmp_path)
    assert names(tmp_path) == [f"actor{RECEIPT}"]
    assert "No space left" in json.loads((tmp_path / f"actor{RECEIPT}").read_text())["error"]


def test_files_of_a_rank_are_written_and_hashed_at_the_same_time(tmp_path, monkeypatch):
    both = threading.Barrier(2, timeout=60)
    monkeypatch.setattr(checkpoint_module, "flush", lambda path: both.wait())
    files = {name: SimpleNamespace(write=lambda path: path.write_bytes(path.name.encode())) for name in ("a", "b")}
    rank_state._write(files, tmp_path)  # one after the other, the first would wait for ever
    receipts = {name: json.loads((tmp_path / f"{name}{RECEIPT}").read_text()) for name in files}
    digests = {name: hashlib.sha256(name.encode()).hexdigest() for name in files}
    assert receipts == {name: {"size": 1, "sha256": digest} for name, digest in digests.items()}


def test_receipt_says_that_a_file_is_on_the_disk_only_when_it_is(tmp_path, monkeypatch):
    (tmp_path / "actor").write_bytes(b"w")
    receipt, seen = tmp_path / f"actor{RECEIPT}", []
    hashed = threading.Event()
    monkeypatch.setattr(checkpoint_module, "sha256", lambda path: hashed.set() or "digest")

    def flush(path):
        assert hashed.wait(60)  # the hash does not wait for the disk
        time.sleep(0.2)
        seen.append(receipt.exists())

    monkeypatch.setattr(checkpoint_module, "flush", flush)
    write_receipt(tmp_path / "actor")
    assert seen == [False] and receipt.exists()
    receipt.unlink()
    monkeypatch.setattr(checkpoint_module, "flush", lambda path: os.close(1 << 20))
    with pytest.raises(OSError, match="Bad file descriptor"):
        write_receipt(tmp_path / "actor")
    assert not receipt.exists()


def test_commit_waits_for_the_ranks_and_gives_up_when_they_have_ended(tmp_path):
    checkpoints = Checkpoints(tmp_path)
    staging = checkpoints.begin(1)
    (staging / "actor").write_bytes(b"w")
    threading.Timer(0.3, write_receipt, [staging / "actor"]).start()
    assert checkpoints.commit(1, {}, ["actor"], None).problems() == []
    staging = checkpoints.begin(2)
    ended = threading.Event()
    threading.Timer(0.2, ended.set).start()
    with pytest.raises(CheckpointError, match=r"the rank that writes it has ended; \d+\.\d MiB are free there"):
        checkpoints.commit(2, {}, ["actor"], None, ended)


def test_commit_lists_the_folder_before_it_gives_up_because_nfs_remembers_what_was_absent(tmp_path, monkeypatch):
    checkpoints = Checkpoints(tmp_path)
    staging = checkpoints.begin(1)
    (staging / "actor").write_bytes(b"w")
    write_receipt(staging / "actor")
    listed = []
    exists, listdir = Path.exists, os.listdir
    monkeypatch.setattr(os, "listdir", lambda path: listed.append(path) or listdir(path))
    monkeypatch.setattr(Path, "exists", lambda path: exists(path) and (bool(listed) or RECEIPT not in path.name))
    ended = threading.Event()
    ended.set()
    assert checkpoints.commit(1, {}, ["actor"], None, ended).problems() == []


def test_checkpoint_is_on_the_disk_before_it_has_its_name(tmp_path, monkeypatch):
    done = []
    rename, fsync = Path.rename, os.fsync

    def path_of(descriptor):
        return os.readlink(f"/proc/self/fd/{descriptor}")

    monkeypatch.setattr(os, "fsync", lambda descriptor: (done.append(path_of(descriptor)), fsync(descriptor)))
    monkeypatch.setattr(Path, "rename", lambda path, target: (done.append(f"to {target}"), rename(path, target)))
    save(Checkpoints(tmp_path), 7)
    staging = f"{tmp_path}/.step-7.partial"
    written = [f"{staging}/{name}" for name in ("hf", "hf/config.json", "state.json", "manifest.json")]
    rank = [f"{staging}/actor", f"to {staging}/actor{RECEIPT}"]
    assert done == [*rank, *written, staging, f"to {tmp_path}/step-7", str(tmp_path)]


def test_newest_checkpoint_stays_beside_those_of_later_steps_that_a_run_has_left(tmp_path):
    for step in (7, 8, 9):
        save(Checkpoints(tmp_path), step)
    assert save(Checkpoints(tmp_path, max_num=2), 1).step == 1
    assert names(tmp_path) == ["step-1", "step-8", "step-9"]


def test_checkpoint_of_a_step_that_has_one_takes_its_place(tmp_path):
    checkpoints = Checkpoints(tmp_path)
    save(checkpoints, 3, size=5)
    assert save(checkpoints, 3, size=6).files["actor"][0] == 6
    assert names(tmp_path) == ["step-3"]
    assert checkpoints.newest_whole(pytest.fail).problems() == []


def test_folder_that_is_removed_while_ranks_write_is_an_error(tmp_path):
    checkpoints = Checkpoints(tmp_path / "c")
    checkpoints.begin(1).rmdir()
    ended = threading.Event()
    timer = threading.Timer(20, ended.set)
    timer.start()
    with pytest.raises(CheckpointError, match=r"\.step-1\.partial/actor cannot be written: the folder was removed"):
        checkpoints.commit(1, {}, ["actor"], None, ended)
    timer.cancel()


def test_name_that_is_taken_by_a_file_is_an_error_and_leaves_nothing(tmp_path):
    (tmp_path / "step-4").write_text("mine")
    with pytest.raises(CheckpointError, match=r"step-4 cannot be written: .*Not a directory(.|\n)*hint: free space"):
        save(Checkpoints(tmp_path), 4)
    assert names(tmp_path) == ["step-4"]


def test_folders_are_ordered_by_step_and_those_without_a_number_are_left_out(tmp_path):
    for name in ("step-10", "step-2", "step-0", "step-x", ".step-3.partial"):
        (tmp_path / name).mkdir()
    assert folders(tmp_path) == [tmp_path / name for name in ("step-0", "step-2", "step-10")]


def test_folder_that_takes_no_files_is_an_error(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match=r"cannot be written(.|\n)*hint: free space"):
        Checkpoints(tmp_path / "file").begin(1)


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("../other", "../other is missing"),
        ("/etc/hostname", "/etc/hostname is missing"),
        ("x" * 300, f"{'x' * 300} cannot be read: File name too long"),
        ("hf", "hf is missing"),  # a folder
    ],
)
def test_file_that_a_checkpoint_cannot_have_is_a_problem(tmp_path, name, problem):
    saved = save(Checkpoints(tmp_path), 3)
    (tmp_path / "other").write_bytes(b"w" * 10)
    manifest = json.loads((saved.path / MANIFEST).read_text())
    manifest["files"][name] = manifest["files"]["actor"]
    (saved.path / MANIFEST).write_text(json.dumps(manifest))
    assert read_checkpoint(saved.path).problems() == [problem]


HUGE = '{"format": 1, "step": 4, "files": {}, "lowest": false, "metric": ' + "9" * 400 + "}"


@pytest.mark.parametrize("text", ['{"a":' * 5000, HUGE, "\udc80", "[]", "7", ""])
def test_broken_manifest_or_state_is_refused_and_the_checkpoint_before_is_used(tmp_path, text):
    checkpoints = Checkpoints(tmp_path)
    older, newer = save(checkpoints, 3), save(checkpoints, 4)
    for name in (MANIFEST, "state.json"):
        (newer.path / name).write_text(text, encoding="utf-8", errors="surrogateescape")
    with pytest.raises(CheckpointError, match=r"manifest\.json cannot be read"):
        read_checkpoint(newer.path)
    if text not in (HUGE, "[]"):  # which are states
        with pytest.raises(CheckpointError, match=r"state\.json cannot be read"):
            newer.state()
    said = []
    assert checkpoints.newest_whole(said.append) == older
    assert len(said) == 1


def test_clock_is_that_of_the_newest_checkpoint_that_can_be_read(tmp_path):
    def save_at(step: int, **state: str) -> Path:
        checkpoints.begin(step)
        return checkpoints.commit(step, {"step": step, **state}, [], None).path

    checkpoints = Checkpoints(tmp_path, max_num=9)
    assert recorded_clock(tmp_path) is recorded_clock(tmp_path / "nothing") is None
    save_at(9)  # by a template that writes no time
    assert recorded_clock(tmp_path) is None
    save_at(10, template_clock="2025-12-31T23:59:59.000007")
    (save_at(11, template_clock="2026-01-01T00:00:00") / "state.json").write_text("{")
    (save_at(12, template_clock="2026-01-01T00:00:00") / MANIFEST).unlink()
    save_at(13, template_clock="noon")
    (tmp_path / "step-14").write_text("no folder")
    assert recorded_clock(tmp_path) == datetime(2025, 12, 31, 23, 59, 59, 7)
