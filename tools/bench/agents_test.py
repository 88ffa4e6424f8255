"""The benchmark of agents in small: every episode is run, and the report says what was measured."""

import json
import os
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parent / "agents.py"


def test_report_tells_the_cost_of_the_door_and_of_many_episodes(tmp_path):
    out = tmp_path / "out.json"
    shape = ["--door_episodes", "10", "--episodes", "100", "--turns", "3", "--latency_s", "0.3"]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, str(SCRIPT), *shape, "--out", str(out)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert done.stdout.startswith("door: "), done.stdout + done.stderr
    report = json.loads(out.read_text())
    door, rounds = report["door"], report["episodes"]["rounds"]
    assert door["num_requests"] == 30
    assert 0 < door["direct_median_ms"] < door["door_median_ms"]
    assert 0 < door["overhead_median_ms"] <= door["overhead_p99_ms"]
    for one in rounds:
        assert 50 < one["max_concurrent_episodes"] <= 100
        # Three times the question and the answer; the prompt is the question, too.
        assert one["num_tokens"] == 100 * (4 * 65 + 3 * 25)
        assert one["lag_median_ms"] <= one["lag_p99_ms"] <= one["lag_max_ms"]
