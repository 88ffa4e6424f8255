"""The run's folder: rollouts are written in the background, and none is lost however the run ends."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from record_testing import make_group, read_jsonl, short_rollout
from rlhf_data.errors import ConfigError, RlhfError
from rlhf_data.records import Prompt, RolloutGroup
from rlhf_rollout.records_io import RolloutWriter, json_lines, read_batches, read_lines
from rlhf_train.background import BackgroundWriter, cannot_write
from rlhf_train.run.observer import Observer
from rlhf_train.run.recorder import Recorder, RemoteTracker
from rlhf_train.run.trackers.jsonl import JsonlTracker
from rlhf_train.run.trackers.spec import TrackerSpec
from rlhf_train.tracing.token_values import COLUMNS, TokenValues, halves, read_values


class Listener(Observer):
    """Keeps what it is told."""

    def __init__(self) -> None:
        self.warnings, self.notices = [], []
        self.warning, self.notice = self.warnings.append, self.notices.append


def group(name: str) -> RolloutGroup:
    """Return a group of one rollout."""
    return make_group(name, Prompt("p", np.array([1]), "?"), [short_rollout(f"{name}/0", name)])


@pytest.fixture
def gate(monkeypatch):
    """Hold back every write of rollouts until the event is set."""
    event = threading.Event()
    write = RolloutWriter.write

    def late(self, *arguments, **fields):
        assert event.wait(60)
        write(self, *arguments, **fields)

    monkeypatch.setattr(RolloutWriter, "write", late)
    yield event
    event.set()


def test_rollouts_are_written_after_the_call_in_order_with_their_fields(gate, tmp_path):
    recorder = Recorder(str(tmp_path / "run"), "")
    recorder.rollouts("rollouts", 1, [group("a"), group("b")], kept=True)
    recorder.rollouts("rollouts", 1, [group("c")], kept=False)
    recorder.rollouts("held-out rollouts", 2, [group("d")])
    assert read_jsonl(recorder.path("rollouts")) == []
    gate.set()
    recorder.close()
    written = [(line["step"], line["kept"], line["group_id"]) for line in read_jsonl(recorder.path("rollouts"))]
    assert written == [(1, True, "a"), (1, True, "b"), (1, False, "c")]
    [line] = read_jsonl(recorder.path("held-out rollouts"))
    assert (line["step"], line["group_id"]) == (2, "d")
    assert "kept" not in line


def test_a_run_that_raises_still_has_all_rollouts(gate, tmp_path):
    def run():
        with Recorder(str(tmp_path), "") as recorder:
            for step in range(1, 4):
                recorder.rollouts("rollouts", step, [group(f"g{step}")])
            threading.Timer(0.2, gate.set).start()
            raise KeyError("the run's own error")

    with pytest.raises(KeyError, match="the run's own error"):
        run()
    assert [line["step"] for line in read_jsonl(tmp_path / "rollouts.jsonl")] == [1, 2, 3]


SCRIPT = """
import os, signal, sys, time
signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in the background starts with Ctrl-C ignored
from run_recorder_test import group
from rlhf_rollout.records_io import RolloutWriter, json_lines, read_batches, read_lines
from rlhf_train.run.recorder import Recorder

write = RolloutWriter.write
def slowly(self, *arguments, **fields):
    while not os.path.exists(sys.argv[3]):
        time.sleep(0.01)
    write(self, *arguments, **fields)
RolloutWriter.write = slowly

def run(recorder):
    for step in range(1, 5):
        recorder.rollouts("rollouts", step, [group(f"g{step}")])
    print("submitted", flush=True)
    if sys.argv[2] == "ctrl-c":
        time.sleep(60)

recorder = Recorder(sys.argv[1], "")
if sys.argv[2] == "ctrl-c":
    with recorder:
        run(recorder)
run(recorder)
"""


@pytest.mark.parametrize(("how", "status"), [("ctrl-c", -signal.SIGINT), ("forgotten", 0)])
def test_a_process_that_ends_while_rollouts_wait_writes_them_first(how, status, tmp_path):
    folder = tmp_path / "run"
    paths = os.pathsep.join([str(Path(__file__).parent), *filter(None, sys.path)])
    process = subprocess.Popen(
        [sys.executable, "-c", SCRIPT, str(folder), how, str(tmp_path / "may-write")],
        env=os.environ | {"PYTHONPATH": paths},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout.readline() == "submitted\n"
    if how == "ctrl-c":
        process.send_signal(signal.SIGINT)
    with pytest.raises(subprocess.TimeoutExpired):  # the end waits
        process.wait(0.5)
    (tmp_path / "may-write").touch()
    _, errors = process.communicate(timeout=60)
    assert process.returncode == status, errors
    assert [line["step"] for line in read_jsonl(folder / "rollouts.jsonl")] == [1, 2, 3, 4]


def fill_disk(recorder: Recorder) -> None:
    """Make the file of rollouts one that is always full."""
    recorder.path("rollouts").symlink_to("/dev/full")


def settle(recorder: Recorder) -> None:
    """Wait until the writes that were submitted have run."""
    done = threading.Event()
    _, background = recorder._rollouts["rollouts"]
    background._executor.submit(done.set)
    assert done.wait(60)


FULL = r"rollouts\.jsonl cannot be written: .*No space left.*\n\nhint: free space there, or use another ``save_path``"


def next_call(recorder: Recorder) -> None:
    settle(recorder)
    with pytest.raises(RlhfError, match=FULL):
        recorder.rollouts("rollouts", 2, [group("b")])
    recorder.close()


def other_error(recorder: Recorder) -> None:
    raise KeyError("engine")


@pytest.mark.parametrize(
    ("then", "error", "says", "warnings"),
    [
        (next_call, RlhfError, FULL, []),
        (lambda recorder: None, RlhfError, FULL, []),
        (other_error, KeyError, "engine", ["No space left"]),
    ],
    ids=["at the next call", "at the end", "beside another error, which stays"],
)
def test_a_full_disk_is_said_once(tmp_path, then, error, says, warnings):
    listener = Listener()

    def run():
        with Recorder(str(tmp_path), "", observer=listener) as recorder:
            fill_disk(recorder)
            recorder.rollouts("rollouts", 1, [group("a")])
            then(recorder)

    with pytest.raises(error, match=says):
        run()
    assert len(listener.warnings) == len(warnings)
    assert all(text in warning for text, warning in zip(warnings, listener.warnings, strict=True))


def test_metrics_on_a_full_disk_are_an_error_at_once(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.symlink_to("/dev/full")
    tracker = JsonlTracker(path)
    with pytest.raises(RlhfError, match=r"metrics\.jsonl cannot be written: .*No space left"):
        tracker.log(1, {"loss": 1.0})
    with pytest.raises(RlhfError, match="No space left"):
        tracker.close()


def test_background_writer_bounds_what_waits_and_keeps_the_order():
    event, written = threading.Event(), []
    writer = BackgroundWriter(lambda error: cannot_write("x", error), max_pending=2)

    def write(index: int) -> None:
        assert event.wait(60)
        written.append(index)

    def submit_all() -> None:
        for index in range(4):
            writer.submit(lambda index=index: write(index))
            submitted.append(index)

    submitted: list[int] = []
    thread = threading.Thread(target=submit_all)
    thread.start()
    deadline = time.monotonic() + 60
    while len(submitted) < 2 and time.monotonic() < deadline:
        time.sleep(0.01)
    time.sleep(0.2)
    assert submitted == [0, 1]  # the third waits for room
    event.set()
    thread.join(60)
    writer.close(lambda: written.append("closed"))
    assert written == [0, 1, 2, 3, "closed"]


def test_background_writer_writes_nothing_after_a_failure_but_closes():
    written = []
    writer = BackgroundWriter(lambda error: cannot_write("x", error))

    def fail() -> None:
        event.wait(60)
        raise OSError("broken")

    event = threading.Event()
    writer.submit(fail)
    writer.submit(lambda: written.append("after"))
    event.set()
    with pytest.raises(RlhfError, match="x cannot be written: broken"):
        writer.close(lambda: written.append("closed"))
    assert written == ["closed"]


def test_background_writer_says_when_only_closing_fails():
    writer = BackgroundWriter(lambda error: cannot_write("x", error))

    def fail() -> None:
        raise OSError("quota")

    with pytest.raises(RlhfError, match="x cannot be written: quota"):
        writer.close(fail)


class Broken:
    """A tracker that fails from its second number on."""

    where = "http://far.away"

    run_id = None

    def __init__(self) -> None:
        self.logged: list[int] = []
        self.is_closed = False

    def log(self, step, metrics):
        if step > 1:
            raise ConnectionError("no route")
        self.logged.append(step)

    def close(self):
        self.is_closed = True


def test_remote_tracker_that_fails_is_said_once_and_ends_no_run():
    listener, broken = Listener(), Broken()
    tracker = RemoteTracker("MLflow", broken, listener.warning)
    for step in range(1, 30):
        tracker.log(step, {"loss": 1.0})
        time.sleep(0.01)
    tracker.close()
    assert broken.logged == [1]
    assert broken.is_closed
    [warning] = listener.warnings
    assert warning.startswith("MLflow failed: no route; ")
    assert "metrics.jsonl" in warning


def test_remote_tracker_gets_the_numbers_as_they_were():
    class Slow(Broken):
        def log(self, step, metrics):
            assert event.wait(60)
            self.logged.append(dict(metrics))

    event, slow, metrics = threading.Event(), Slow(), {"loss": 1.0}
    tracker = RemoteTracker("MLflow", slow, pytest.fail)
    tracker.log(1, metrics)
    metrics["loss"] = 2.0
    event.set()
    tracker.close()
    assert slow.logged == [{"loss": 1.0}]


def test_trackers_hear_of_every_nth_step_and_of_every_evaluation_and_the_file_of_all(tmp_path, monkeypatch):
    tracker = Broken()
    tracker.log = lambda step, metrics: tracker.logged.append((step, *metrics))
    monkeypatch.setattr("rlhf_train.run.recorder.open_tensorboard", lambda *_: tracker)
    with Recorder(str(tmp_path), "", TrackerSpec(logging_steps=3)) as recorder:
        recorder.metrics(0, {"eval": 1.0})
        for step in range(1, 8):
            recorder.step(step, {"loss": 1.0})
        recorder.metrics(7, {"eval": 1.0})
    assert tracker.logged == [(0, "eval"), (3, "loss"), (6, "loss"), (7, "eval")]
    assert [line["step"] for line in read_jsonl(tmp_path / "metrics.jsonl")] == [0, 1, 2, 3, 4, 5, 6, 7, 7]


def test_recorder_says_where_remote_trackers_are(tmp_path, monkeypatch):
    listener = Listener()
    monkeypatch.setattr("rlhf_train.run.recorder.open_remote", lambda *_: {"MLflow": Broken()})
    with Recorder(str(tmp_path), "", observer=listener):
        pass
    assert listener.notices == ["MLflow: http://far.away"]


def test_every_part_is_closed_when_one_fails(tmp_path, monkeypatch):
    first, second = Broken(), Broken()

    def fail():
        raise RlhfError("first")

    first.close = fail
    monkeypatch.setattr("rlhf_train.run.recorder.open_tensorboard", lambda *_: first)
    recorder = Recorder(str(tmp_path), "")
    recorder._trackers.append(second)
    with pytest.raises(RlhfError, match="first"):
        recorder.close()
    assert second.is_closed
    assert recorder._metrics._file.closed


def test_recorder_refuses_a_folder_with_something_in_it_but_its_own_log_and_inputs(tmp_path):
    (tmp_path / "log.txt").write_text("said before the run began")
    (tmp_path / "inputs").mkdir()
    Recorder(str(tmp_path), "a = 1").close()
    assert (tmp_path / "config.toml").read_text() == "a = 1"
    with pytest.raises(ConfigError, match=r"is not empty\n\nhint: name a new folder"):
        Recorder(str(tmp_path), "")


@pytest.mark.parametrize("record_format", ["jsonl", "columns"])
@pytest.mark.parametrize(("is_recorded", "kept"), [(True, 2), (False, 1)])
def test_run_that_continues_keeps_the_records_up_to_its_checkpoint(tmp_path, is_recorded, kept, record_format):
    """Rollouts are written before the updates of their step, metrics and evaluations after them."""
    with Recorder(str(tmp_path), "", record_format=record_format) as recorder:
        for step in (0, 1, 2, 3):
            recorder.metrics(step, {"eval/reward": 0.5})
            recorder.rollouts("held-out rollouts", step, [group("g/0")])
            if step:
                recorder.token_values(step, [values_of("g/0/0", step)])
                recorder.rollouts("rollouts", step, [group("g/0")])
                recorder.step(step, {"policy/loss": 0.1})
    assert (tmp_path / f"rollouts.{record_format}").is_file() and (
        tmp_path / f"eval_rollouts.{record_format}"
    ).is_file()
    options = {"resumed_step": 2, "is_recorded": is_recorded, "record_format": record_format}
    with Recorder(str(tmp_path), "", **options) as recorder:
        assert read_values(recorder.path("token values"), 3) == {}
        recorder.token_values(3, [values_of("again/0", 3), values_of("again/1", 4)])
        recorder.rollouts("rollouts", 3, [group("again")])
    whole = list(range(kept + 1))
    for name, steps in {"metrics": whole, "rollouts": [1, 2, 3], "held-out rollouts": whole}.items():
        lines = list(json_lines(read_lines(recorder.path(name)))) if name != "metrics" else recorder.path(name).open()
        assert sorted({json.loads(line)["step"] for line in lines}) == steps, name
    ids = [batch.groups[0].group_id for batch in read_batches(recorder.path("rollouts"))]
    assert ids == ["g/0", "g/0", "again"]
    written = {step: read_values(recorder.path("token values"), step) for step in (1, 2, 3)}
    assert [list(found) for found in written.values()] == [["g/0/0"], ["g/0/0"], ["again/0", "again/1"]]
    again = written[3]["again/1"]
    assert again.keys() == set(COLUMNS) - {"kl"} and again["gap"].tolist() == [4.0, 4.0, 4.0]
    assert again["advantage"].tolist() == [65504.0, -65504.0, 4.0]  # of float16
    file = recorder.path("token values") / "step-2.safetensors"
    assert file.stat().st_mode == recorder.path("metrics").stat().st_mode  # of any new file
    file.write_bytes(b"cut off")
    assert read_values(recorder.path("token values"), 2) == {}


def values_of(rollout_id, value):
    """Three tokens, whose values are all the same but for the advantages; there is no reference."""
    columns = {name: halves(np.full(3, value)) for name in COLUMNS}
    columns |= {"kl": halves(np.full(3, np.nan)), "advantage": halves(np.array([1e9, -np.inf, value]))}
    return TokenValues([rollout_id], np.array([3]), columns)


@pytest.mark.parametrize("began", ["jsonl", "columns"])
def test_run_that_continues_goes_on_in_the_files_that_it_has(tmp_path, began):
    with Recorder(str(tmp_path), "", record_format=began) as recorder:
        recorder.rollouts("rollouts", 1, [group("g/0")])
    for asked in ("jsonl", "columns"):
        said = Listener()
        with Recorder(str(tmp_path), "", None, said, resumed_step=1, record_format=asked) as recorder:
            recorder.rollouts("rollouts", 2, [group("g/1")])
        ids = [batch.groups[0].group_id for batch in read_batches(tmp_path / f"rollouts.{began}")]
        assert ids == ["g/0", "g/1"]
        notice = f"``record_format={asked}`` has no effect: the run goes on in {tmp_path / f'rollouts.{began}'}"
        assert said.notices == ([] if asked == began else [notice])


def test_run_that_is_killed_in_its_start_leaves_a_folder_that_can_be_continued(tmp_path):
    for _ in range(2):  # the command with --load_checkpoint, killed before its first step, and once more
        Recorder(str(tmp_path / "run"), "[a]\n", resumed_step=-1).close()
        assert (tmp_path / "run/config.toml").read_text() == "[a]\n"


def test_continued_run_keeps_its_configuration_until_the_first_step_with_the_new_one(tmp_path):
    Recorder(str(tmp_path / "run"), "[a]\n").close()
    recorder = Recorder(str(tmp_path / "run"), "[b]\n", resumed_step=3)
    assert (tmp_path / "run/config.toml").read_text() == "[a]\n"
    recorder.step(4, {"x": 1.0})
    assert (tmp_path / "run/config.toml").read_text() == "[b]\n"
    recorder.close()
