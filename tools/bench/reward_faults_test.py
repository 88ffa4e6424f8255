"""The benchmark of hung rewards in small: its report, and that it finds a process that is left."""

import json
import os
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parent / "reward_faults.py"


def test_report_counts_hung_rewards_and_what_they_leave(tmp_path):
    out = tmp_path / "out.json"
    command = [sys.executable, str(SCRIPT), "--count", "12", "--timeout_s", "0.5", "--out", str(out)]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    hangs, held_back = (json.loads(out.read_text())[name] for name in ("hangs", "held_back"))
    assert (hangs["num_hung"], hangs["verdicts"], hangs["num_replaced"]) == (12, {"timeout": 12}, 12)
    assert hangs["num_processes_left"] == 0
    # Three per call; a worker on a busy machine may be ended before it has started its own.
    assert 0 < hangs["num_processes_seen"] <= 36 and hangs["num_processes_seen"] % 3 == 0
    assert hangs["memory_growth_mib"] < 20
    assert held_back["num_rewards"] == 12
    assert held_back["num_calls"] < 12
