"""One contract for every tracker; each is read back by its own library and not by ours."""

import json
import math
import os
import struct
import subprocess
import sys

import pytest

from rlhf_data.errors import ConfigError
from rlhf_train.run.trackers.jsonl import JsonlTracker
from rlhf_train.run.trackers.mlflow import metric_name
from rlhf_train.run.trackers.spec import TrackerSpec
from rlhf_train.run.trackers.start import check_trackers, open_remote, open_tensorboard

CONFIG = "[training]\nseed = 7\n\n[output]\nuse_wandb = true\n"
KEY = "0123456789abcdef0123456789abcdef01234567"
NAMES = ("jsonl", "tensorboard", "wandb", "mlflow")
Numbers = dict[str, dict[int, float]]  # by metric and step


@pytest.fixture(autouse=True)
def nothing_leaves_this_machine(monkeypatch, tmp_path):
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_API_KEY", KEY)
    for name in ("WANDB_CONFIG_DIR", "WANDB_CACHE_DIR", "WANDB_DATA_DIR"):
        monkeypatch.setenv(name, str(tmp_path / "home"))
    monkeypatch.delenv("MLFLOW_ALLOW_FILE_STORE", raising=False)


def open_tracker(name, folder, **options):
    if name == "jsonl":
        return JsonlTracker(folder / "metrics.jsonl")
    if name == "tensorboard":
        return open_tensorboard(TrackerSpec(**options), folder / "tensorboard")
    chosen = {"wandb": {"use_wandb": True}, "mlflow": {"use_mlflow": str(folder / "mlruns")}}[name]
    [tracker] = open_remote(TrackerSpec(**chosen, **options), folder, CONFIG).values()
    return tracker


def read_jsonl(folder, tracker) -> Numbers:
    numbers: Numbers = {}
    for line in map(json.loads, (folder / "metrics.jsonl").read_text().splitlines()):
        step = line.pop("step")
        for name, value in line.items():
            numbers.setdefault(name, {})[step] = math.nan if value is None else value
    return numbers


def read_tensorboard(folder, tracker) -> Numbers:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder / "tensorboard"))
    events.Reload()
    return {name: {e.step: e.value for e in events.Scalars(name)} for name in events.Tags()["scalars"]}


def wandb_records(folder):
    """Parse the offline file: after seven bytes, LevelDB's log format, whose chunks are protocol buffers."""
    from wandb.proto.wandb_internal_pb2 import Record

    [path] = folder.glob("wandb/offline-run-*/*.wandb")
    content, at, data = path.read_bytes(), 7, b""
    while at + 7 <= len(content):
        left = 32768 - at % 32768
        if left < 7:  # a block ends with zeros where no header fits
            at += left
            continue
        _, size, kind = struct.unpack("<IHB", content[at : at + 7])
        data += content[at + 7 : at + 7 + size]
        at += 7 + size
        if kind in (1, 4):  # a whole record, or the last part of one
            record = Record()
            record.ParseFromString(data)
            data = b""
            yield record


def read_wandb(folder, tracker) -> Numbers:
    numbers: Numbers = {}
    for record in wandb_records(folder):
        if record.WhichOneof("record_type") != "history":
            continue
        items = {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in record.history.item}
        step = items["_step"]
        for name, value in items.items():
            if not name.startswith("_"):
                numbers.setdefault(name, {})[step] = math.nan if value == "NaN" else value
    return numbers


def read_mlflow(folder, tracker) -> Numbers:
    from mlflow import MlflowClient

    client = MlflowClient(tracking_uri=str(folder / "mlruns"))
    [run] = client.search_runs([e.experiment_id for e in client.search_experiments()])
    names = run.data.metrics
    return {name: {m.step: m.value for m in client.get_metric_history(run.info.run_id, name)} for name in names}


READERS = {"jsonl": read_jsonl, "tensorboard": read_tensorboard, "wandb": read_wandb, "mlflow": read_mlflow}


@pytest.mark.parametrize("name", NAMES)
def test_every_number_is_under_its_name_and_step(name, tmp_path):
    tracker = open_tracker(name, tmp_path)
    assert tracker.where
    tracker.log(0, {"eval/reward": 0.25})
    tracker.log(1, {"train/loss": 2.5, "time/step": 1e-3})
    tracker.log(2, {"train/loss": math.nan, "time/step": 4.0})
    tracker.log(2, {"eval/reward": 0.75})  # an evaluation after the step, under the same number
    tracker.close()
    found = READERS[name](tmp_path, tracker)
    assert math.isnan(found["train/loss"].pop(2))
    assert found == {
        "eval/reward": {0: 0.25, 2: 0.75},
        "train/loss": {1: 2.5},
        "time/step": {1: pytest.approx(1e-3), 2: 4.0},
    }


@pytest.mark.parametrize("name", NAMES)
def test_closing_without_numbers_leaves_none(name, tmp_path):
    tracker = open_tracker(name, tmp_path)
    tracker.close()
    assert READERS[name](tmp_path, tracker) == {}


@pytest.mark.parametrize("name", ["wandb", "mlflow"])
def test_the_key_is_in_no_file(name, tmp_path, monkeypatch):
    tracker = open_tracker(name, tmp_path)
    tracker.log(1, {"train/loss": 1.0})
    tracker.close()
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert files
    assert [path for path in files if KEY.encode() in path.read_bytes()] == []


def test_wandb_is_filed_as_asked_with_the_configuration(tmp_path):
    options = {"wandb_org": "org", "wandb_group": "group", "wandb_project": "project", "run_name": "name"}
    open_tracker("wandb", tmp_path, **options).close()
    [run] = [r.run for r in wandb_records(tmp_path) if r.WhichOneof("record_type") == "run"]
    assert (run.entity, run.run_group, run.project, run.display_name) == ("org", "group", "project", "name")
    config = {item.key: json.loads(item.value_json) for item in run.config.update}
    assert config["training"] == {"seed": 7}


def test_wandb_without_a_key_is_an_error_and_no_question(tmp_path, monkeypatch):
    monkeypatch.delenv("WANDB_MODE")
    monkeypatch.delenv("WANDB_API_KEY")
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    monkeypatch.setenv("HOME", str(tmp_path))
    for refused in (lambda: open_tracker("wandb", tmp_path), lambda: check_trackers(TrackerSpec(use_wandb=True))):
        with pytest.raises(ConfigError, match=r"no API key.*\n\nhint: set WANDB_API_KEY"):
            refused()


def test_wandb_key_of_a_wrong_form_is_an_error_with_a_hint(tmp_path, monkeypatch):
    monkeypatch.delenv("WANDB_MODE")
    monkeypatch.setenv("WANDB_API_KEY", "{your-wandb-token}")
    for refused in (lambda: open_tracker("wandb", tmp_path), lambda: check_trackers(TrackerSpec(use_wandb=True))):
        with pytest.raises(ConfigError, match=r"does not take the API key: .*\n\nhint: set WANDB_API_KEY") as caught:
            refused()
        assert "your-wandb-token" not in str(caught.value)


def test_mlflow_has_the_experiment_the_name_and_the_configuration(tmp_path):
    open_tracker("mlflow", tmp_path, project="rlhf-sft", run_name="first").close()
    from mlflow import MlflowClient

    client = MlflowClient(tracking_uri=str(tmp_path / "mlruns"))
    experiment = client.get_experiment_by_name("rlhf-sft")
    [run] = client.search_runs([experiment.experiment_id])
    assert (run.info.run_name, run.info.status) == ("first", "FINISHED")
    assert client.list_artifacts(run.info.run_id)[0].path == "config.toml"


def test_mlflow_that_cannot_be_used_says_so(tmp_path):
    (tmp_path / "mlruns").write_text("a file in the way")
    with pytest.raises(ConfigError, match=r"MLflow at .*mlruns cannot be used.*\n\nhint: give ``use_mlflow``"):
        open_tracker("mlflow", tmp_path)


@pytest.mark.parametrize(
    ("name", "allowed"),
    [("eval/pass@4", "eval/pass_at_4"), ("eval/gsm8k+x/reward", "eval/gsm8k_x/reward"), ("a-b.c d", "a-b.c d")],
)
def test_mlflow_names(name, allowed):
    assert metric_name(name) == allowed


def test_tensorboard_folder_of_the_users_has_a_folder_per_run(tmp_path):
    run, shared = tmp_path / "run", tmp_path / "shared"
    for options, folder in (({}, "run"), ({"run_name": "mine"}, "mine")):
        spec = TrackerSpec(use_tensorboard=str(shared), **options)
        open_tensorboard(spec, run / "tensorboard").close()
        assert list((shared / folder).glob("events.*"))
    assert not run.exists()


@pytest.mark.parametrize(
    ("options", "flag", "extra"),
    [({"use_wandb": True}, "``use_wandb``", "wandb"), ({"use_mlflow": "http://host"}, "``use_mlflow``", "mlflow")],
)
def test_a_library_that_is_not_installed_is_named_with_the_extra(options, flag, extra, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "offline")
    check_trackers(TrackerSpec(**options))
    monkeypatch.setitem(sys.modules, extra, None)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(
        ConfigError,
        match=rf"{flag} needs .* {extra}.*\n\nhint: in a checkout, pip install './packages/rlhf-cli\[{extra}\]'",
    ):
        check_trackers(TrackerSpec(**options))
    check_trackers(TrackerSpec())


def test_importing_the_recorder_imports_no_tracker_library():
    code = "import sys; import rlhf_train.run.recorder as _; print({'wandb', 'mlflow', 'torch'} & sys.modules.keys())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=os.environ, check=True)
    assert done.stdout.strip() == "set()"
