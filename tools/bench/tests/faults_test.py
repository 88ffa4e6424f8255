"""The campaigns of faults in small: what counts as a difference, a loss or a defect, and that a defect is found."""

import json
import random
import subprocess
import sys
import time
from pathlib import Path

import pytest

from rlhf_data.errors import DataError
from workloads.faults import fuzz, kills

METRICS = [{"step": 1, "policy/loss": 0.25, "time/step": 3.0}, {"step": 2, "policy/loss": 0.5, "memory/x": 1.0}]
ROLLOUTS = [{"rollout_id": f"step{step}/{number}", "score_seconds": 0.1} for step in (1, 2) for number in range(4)]


def write_run(folder: Path, metrics=METRICS, rollouts=ROLLOUTS, weights=b"weights") -> Path:
    for name in ("model", "ema_model"):
        (folder / name).mkdir(parents=True)
        (folder / name / "model.safetensors").write_bytes(weights)
    for name, lines in (("metrics", metrics), ("rollouts", rollouts), ("eval_rollouts", rollouts[:1])):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def test_runs_that_differ_in_seconds_only_have_the_same_content(tmp_path):
    slower = [line | {"time/step": 9.0} if "time/step" in line else line for line in METRICS]
    later = [line | {"score_seconds": 1.25e-05} for line in ROLLOUTS]
    whole = kills.content(write_run(tmp_path / "whole"))
    assert kills.content(write_run(tmp_path / "slower", slower, later)) == whole


@pytest.mark.parametrize(
    ("name", "changed", "place"),
    [
        (
            "metrics.jsonl",
            {"metrics": [METRICS[0], METRICS[1] | {"policy/loss": 0.5000001}]},
            "metrics of step 2: policy/loss",
        ),
        ("metrics.jsonl", {"metrics": METRICS[:1]}, "metrics.jsonl"),
        ("rollouts.jsonl", {"rollouts": [*ROLLOUTS[:-1], ROLLOUTS[-1] | {"rollout_id": "other"}]}, "rollouts.jsonl"),
        ("model/model.safetensors", {"weights": b"Weights"}, "model/model.safetensors"),
    ],
)
def test_any_other_difference_is_found(tmp_path, name, changed, place):
    whole = kills.content(write_run(tmp_path / "whole"))
    other = kills.content(write_run(tmp_path / "other", **changed))
    assert other[name] != whole[name]
    assert kills.first_difference(other, whole) == place
    assert kills.first_difference(whole, whole) is None


@pytest.mark.parametrize(
    ("rollouts", "lost"), [(ROLLOUTS, 0), (ROLLOUTS[:-1], 1), ([*ROLLOUTS[:-1], ROLLOUTS[0]], 2), ([], 8)]
)
def test_missing_and_repeated_rollouts_are_counted(tmp_path, rollouts, lost):
    assert kills.num_lost(write_run(tmp_path / "run", rollouts=rollouts), num_steps=2, num_rollouts=4) == lost


class Sleeper(kills.Run):
    """A run that is in its start for `start_s` seconds, then generates, and ends after `seconds`."""

    start_s = 0.3
    seconds = 60.0

    def start(self) -> subprocess.Popen[bytes]:
        script = (
            f"import time; time.sleep({self.start_s}); open({str(self._phase_path)!r}, 'w').write('generate'.ljust(16))"
        )
        self._phase_path.write_text("start".ljust(16))
        return subprocess.Popen([sys.executable, "-c", f"{script}; time.sleep({self.seconds})"])


@pytest.mark.parametrize(("share", "start_s", "phase"), [(0.0, 0.3, "generate"), (1.0, 30.0, "start")])
def test_kill_is_counted_for_the_phase_that_it_hits(tmp_path, monkeypatch, share, start_s, phase):
    monkeypatch.setattr(kills, "SHARE_IN_START", share)
    monkeypatch.setattr(Sleeper, "start_s", start_s)
    (tmp_path / "run/checkpoints/.step-3.partial").mkdir(parents=True)
    tally = kills.Tally()
    assert Sleeper(tmp_path / "run", "").kill(random.Random(0), 0.1, tally)
    assert (tally.phases, tally.num_writing) == ({phase: 1}, 1)


@pytest.mark.parametrize("name", fuzz.seeds())
def test_parser_reads_broken_input_or_refuses_it_properly(name, monkeypatch):
    monkeypatch.setattr(fuzz, "LIMIT_S", 60)  # the machine may stand still for seconds
    parse, inputs = fuzz.seeds()[name]
    for data in inputs:
        assert fuzz.fuzz(parse, [data], seed=0, seconds=60, most=1)["inputs"] == 1
    run = fuzz.fuzz(parse, inputs, seed=1, seconds=60, most=60)
    assert run["inputs"] == 60 or run["seconds"] >= 60
    assert run["defects"] == {}


def test_campaign_tells_refusals_from_tracebacks_and_hangs(monkeypatch):
    monkeypatch.setattr(fuzz, "LIMIT_S", 0.05)

    def parse(data, folder):
        if len(data) % 3 == 0:
            raise DataError("no")
        if len(data) % 3 == 1:
            raise KeyError("key")
        time.sleep(20)

    run = fuzz.fuzz(parse, [b"{}", b'{"a": [1, 2]}'], seed=0, seconds=60, most=60)
    assert run["inputs"] == 60 and 0 < run["refused"] < 60
    assert sorted(run["defects"]) == ["HangError in fuzz.py:ring", "KeyError in faults_test.py:parse"]


def test_report_counts_hung_rewards_and_what_they_leave(bench):
    status, report = bench("reward_faults", "--count", "12", "--timeout_s", "0.5")
    assert (status, report["missed"]) == (0, [])
    hangs = report["hangs"]
    assert (hangs["num_hung"], hangs["verdicts"], hangs["num_replaced"]) == (12, {"timeout": 12}, 12)
    assert hangs["num_processes_left"] == 0
    # Three per call; a worker on a busy machine may be ended before it has started its own.
    assert 0 < hangs["num_processes_seen"] <= 36 and hangs["num_processes_seen"] % 3 == 0
    assert hangs["memory_growth_mib"] < 20
