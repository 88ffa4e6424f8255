"""The comparison of the main job alone and beside a busy process: its arithmetic, and when it refuses to measure."""

import subprocess
import time

import pytest

from workloads.speed import busy


@pytest.fixture
def measured(bench, monkeypatch):
    """Return a function that runs the benchmark with given loads and step times."""

    def run(shares, alone, beside, *flags):
        calls = []

        def fake_run(options, folder):
            calls.append((options.steps, options.flags))
            seconds = beside if len(calls) in (2, 3) else alone
            return {"time/step": seconds, "time/train": seconds / 2}

        waiting = list(shares)
        monkeypatch.setattr(busy, "busy_share", lambda: waiting.pop(0))
        monkeypatch.setattr(busy, "run", fake_run)
        return *bench("busy", *flags), calls

    return run


def test_ratio_is_that_of_the_means(measured):
    status, report, calls = measured([0.0] * 4, 1.0, 2.0)
    assert (status, report["ratio"], report["seconds_alone"], report["seconds_beside"]) == (0, 2.0, 1.0, 2.0)
    assert report["by_phase"]["train"] == {"alone": 0.5, "beside": 1.0}
    assert report["idle_at_start"] is True
    assert [each["neighbour"] for each in report["runs"]] == [False, True, True, False]
    assert calls == [(10, [])] * 4


def test_machine_in_use_is_refused_or_told_in_the_report(measured, capsys):
    with pytest.raises(SystemExit):
        measured([0.4], 1.0, 1.0)
    assert "not idle: 40% of its cores are in use" in capsys.readouterr().err
    status, report, calls = measured([0.0, 0.4, 0.0, 0.0], 1.0, 1.5, "--even_if_busy", "--", "--seed", "3")
    assert (status, report["idle_at_start"], report["ratio"]) == (1, False, 1.5)
    assert "NOT idle" in capsys.readouterr().out
    assert calls[0] == (10, ["--seed", "3"])


def test_neighbour_keeps_a_core_busy_and_ends_with_its_block(monkeypatch):
    made, original = [], subprocess.Popen
    monkeypatch.setattr(
        subprocess, "Popen", lambda *args, **options: made.append(original(*args, **options)) or made[0]
    )
    monkeypatch.setattr(busy, "SAMPLE_S", 0.5)
    with busy.neighbour():
        started = time.process_time()
        assert 0 < busy.busy_share() <= 1
        assert time.process_time() - started < 0.4
        assert made[0].poll() is None
    assert made[0].poll() is not None
