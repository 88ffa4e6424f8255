"""`rlhf doctor` for real: libraries, two ranks and the run of the built-in model on this machine."""

import json
import os
import subprocess
import sys


def test_doctor_finds_no_fault_where_the_tests_run(tmp_path):
    environ = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "HTTPS_PROXY": "http://ann:hunter22@proxy.invalid"}
    command = [sys.executable, "-m", "rlhf_cli.main", "doctor", "--json", "--save_path", str(tmp_path / "runs")]
    done = subprocess.run(command, capture_output=True, text=True, env=environ, check=False)
    told = json.loads(done.stdout)
    levels = {row["check"]: row["level"] for row in told["findings"]}
    faults = {row["check"]: row for row in told["findings"] if row["level"] == "fault"}
    # Where tests run, memory for processes may be small, and the clock of a disk another.
    assert not faults.keys() - {"shared memory", "disk", "open files", "clock"}, faults
    assert done.returncode == (1 if faults else 0), done.stderr
    named = {"versions", "GPU", "torch", "transformers", "vllm", "deepspeed", "Ray", "ports", "sandbox", "hub"}
    assert levels.keys() >= named | {"trial run"}
    assert levels.keys() & {"gloo", "NCCL"}
    [trial] = [row for row in told["findings"] if row["check"] == "trial run"]
    assert trial["found"].startswith("8 samples, an update and a sync of ")
    assert "Traceback" not in done.stderr
    assert "hunter22" not in done.stdout
    assert list(tmp_path.iterdir()) == []
