"""The comparison of the main job alone and beside a busy process: its arithmetic, and when it refuses to measure."""

import json
import subprocess
import sys
import time

import pytest

import busy


def steps(*seconds):
    return [{"time/step": value, "time/train": value / 2} for value in seconds]


@pytest.fixture
def measured(monkeypatch, tmp_path):
    """Return a function that runs the benchmark with given loads and step times, and returns status and report."""

    def run(shares, alone, beside, *flags):
        calls = []

        def fake_run(num_steps, more, folder, timeout_s):
            calls.append((num_steps, more))
            return steps(9.0, *(beside if len(calls) in (2, 3) else alone))

        waiting = list(shares)
        monkeypatch.setattr(busy, "busy_share", lambda: waiting.pop(0))
        monkeypatch.setattr(busy, "run", fake_run)
        out = tmp_path / "busy.json"
        monkeypatch.setattr(sys, "argv", ["busy.py", "--out", str(out), *flags])
        status = busy.main()
        return status, json.loads(out.read_text()) if out.exists() else None, calls

    return run


def test_ratio_is_that_of_the_medians_without_the_first_step(measured):
    status, report, calls = measured([0.0] * 4, [1.0, 1.0, 4.0], [2.0, 2.0, 2.0])
    assert (status, report["ratio"], report["seconds_alone"], report["seconds_beside"]) == (0, 2.0, 1.0, 2.0)
    assert report["by_phase"]["train"] == {"alone": 0.5, "beside": 1.0}
    assert report["idle_at_start"] is True
    assert [each["neighbour"] for each in report["runs"]] == [False, True, True, False]
    assert calls == [(10, [])] * 4


def test_ratio_above_the_goal_fails(measured, capsys):
    status, report, _ = measured([0.0] * 4, [1.0], [2.6])
    assert (status, report["ratio"]) == (1, 2.6)
    assert "2.60 times (goal: at most 2.5)" in capsys.readouterr().out


def test_machine_in_use_is_refused_before_anything_runs(measured, capsys):
    status, report, calls = measured([0.4], [1.0], [1.0])
    assert (status, report, calls) == (1, None, [])
    assert "not idle: 40% of its cores are in use" in capsys.readouterr().out


def test_machine_in_use_is_told_in_the_report_when_measured_all_the_same(measured, capsys):
    status, report, calls = measured([0.0, 0.4, 0.0, 0.0], [1.0], [1.5], "--even_if_busy", "--", "--seed", "3")
    assert (status, report["idle_at_start"], report["ratio"]) == (1, False, 1.5)
    assert "NOT idle" in capsys.readouterr().out
    assert calls[0] == (10, ["--seed", "3"])


def test_busy_share_sees_a_busy_process():
    with busy.neighbour():
        started = time.process_time()
        assert 0 < busy.busy_share(0.5) <= 1
        assert time.process_time() - started < 0.4


def test_neighbour_ends_with_its_block(monkeypatch):
    made, original = [], subprocess.Popen
    monkeypatch.setattr(
        subprocess, "Popen", lambda *args, **options: made.append(original(*args, **options)) or made[0]
    )
    with busy.neighbour():
        assert made[0].poll() is None
    assert made[0].poll() is not None
