"""Intervals of several processes are added up without counting a moment twice, and a run is recorded in one step."""

import os

import pytest

from workloads.speed import gpu_time

BEGIN = 1_700_000_000_000_000_000  # nanoseconds, as large as real ones


def write(folder, monkeypatch, pid, role, events):
    monkeypatch.setattr(os, "getpid", lambda: pid)
    events = [(BEGIN + round(start * 1e9), round(lasts * 1e9), name) for start, lasts, name in events]
    gpu_time.write_events(folder, role, events)


def test_moments_count_once_per_role_and_once_for_all(tmp_path, monkeypatch):
    # Engine 1 works in [0, 1] and [3, 4], engine 2 in [0.5, 2] and, inside of it, [1, 1.5], the trainer in [1.5, 3.5].
    write(tmp_path, monkeypatch, 1, "engines", [(3, 1, "b"), (0, 1, "a")])
    write(tmp_path, monkeypatch, 2, "engines", [(0.5, 1.5, "a"), (1, 0.5, "a")])
    write(tmp_path, monkeypatch, 3, "trainers", [(1.5, 2, "c")])
    found = gpu_time.account(tmp_path, BEGIN, BEGIN + 10 * 10**9)
    assert found["seconds"] == 10
    assert found["busy"] == pytest.approx({"engines": 3, "trainers": 2, "all": 4})
    assert found["kernels"] == {"engines": {"a": [3, 3.0], "b": [1, 1.0]}, "trainers": {"c": [1, 2.0]}}


def test_what_lies_outside_of_the_step_does_not_count(tmp_path, monkeypatch):
    write(tmp_path, monkeypatch, 1, "trainers", [(-2, 1, "before"), (-1, 2, "into"), (4, 2, "out of"), (6, 1, "after")])
    found = gpu_time.account(tmp_path, BEGIN, BEGIN + 5 * 10**9, top=1)
    assert found["busy"] == pytest.approx({"trainers": 2, "all": 2})
    assert found["kernels"] == {"trainers": {"into": [1, 2.0]}}
    assert gpu_time.account(tmp_path / "nothing", BEGIN, BEGIN + 1)["busy"] == {"all": 0.0}
