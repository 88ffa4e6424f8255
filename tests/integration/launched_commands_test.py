"""A command as a job that is submitted to a Ray cluster."""

import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from rlhf_cli.builtin import MODEL_DIR
from rlhf_rollout.host import free_port

TIMEOUT_S = 300
START_TIMEOUT_S = 180
RAY = (sys.executable, "-c", "from ray.scripts.scripts import main; main()")
REWARD = "def reward_func(queries, prompts, labels):\n    return {'rewards': [0.0] * len(queries)}\n"


def own_packages() -> str:
    """Return the folders of our packages: empty where they are installed."""
    paths = (path for path in sys.path if path and not path.startswith((sys.prefix, sys.base_prefix)))
    return os.pathsep.join(map(os.path.abspath, paths))


def write_jsonl(path: Path, rows: list[dict[str, str]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def run(*command: str, folder: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHONPATH": own_packages()} | variables
    for name in ("WORLD_SIZE", "RANK", "LOCAL_RANK", "BUILD_WORKING_DIRECTORY", "RAY_ADDRESS"):
        environment.pop(name, None)
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=TIMEOUT_S)


@pytest.fixture
def cluster() -> Iterator[str]:
    """A cluster of the test's own that takes jobs; yield the address of its dashboard."""
    with tempfile.TemporaryDirectory(prefix="ray", dir="/tmp") as folder:
        ports = {name: free_port() for name in ("port", "dashboard-port", "dashboard-agent-listen-port")}
        ports["ray-client-server-port"] = free_port()
        command = [*RAY, "start", "--head", "--block", "--num-cpus=2", "--num-gpus=0", "--include-dashboard=true"]
        command += ["--dashboard-host=127.0.0.1", *(f"--{name}={port}" for name, port in ports.items())]
        # RAY_TMPDIR keeps other programs from finding this cluster. PYTHONPATH is empty because the job's packages must
        # come from its runtime environment.
        environment = os.environ | {"RAY_TMPDIR": folder, "RAY_AUTH_MODE": "disabled", "PYTHONPATH": ""}
        for name in ("RAY_ADDRESS", "BUILD_WORKING_DIRECTORY"):
            environment.pop(name, None)
        head = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, start_new_session=True)
        try:
            deadline = time.monotonic() + START_TIMEOUT_S
            while not (listens(ports["dashboard-port"]) and listens(ports["dashboard-agent-listen-port"])):
                assert head.poll() is None and time.monotonic() < deadline, "ray start did not come up"
                time.sleep(0.2)
            yield f"http://127.0.0.1:{ports['dashboard-port']}"
        finally:
            head.terminate()
            head.wait(timeout=60)


def listens(port: int) -> bool:
    with socket.socket() as connection:
        return connection.connect_ex(("127.0.0.1", port)) == 0


def test_ray_runs_a_submitted_module_in_its_runtime_environment(tmp_path, cluster):
    shipped = tmp_path / "shipped"
    shutil.copytree(MODEL_DIR, shipped / "model")
    write_jsonl(shipped / "prompts.jsonl", [{"input": f"{n}+1="} for n in range(8)])
    (shipped / "reward.py").write_text(REWARD)
    runtime_env = {"working_dir": str(shipped), "env_vars": {"PYTHONPATH": own_packages()}}
    flags = ["--pretrain", "./model", "--prompt_data", "prompts.jsonl", "--remote_rm_url", "./reward.py"]
    flags += ["--rollout_batch_size", "8", "--train_batch_size", "8", "--prompt_max_len", "64", "--dry_run"]
    module = [sys.executable, "-m", "rlhf_cli.train_ppo_ray", *flags]
    submit = (*RAY, "job", "submit", f"--address={cluster}", f"--runtime-env-json={json.dumps(runtime_env)}")
    # The files of the job lie in the folder that was shipped, and not in the one where it is submitted.
    submitted = partial(run, *submit, "--", *module, folder=tmp_path, RAY_AUTH_MODE="disabled", NO_COLOR="1")
    done = submitted()
    said = done.stdout + done.stderr
    assert done.returncode != 0, said
    assert "is in Ray's copy of the job's working directory, which Ray removes" in said
    done = submitted("--save_path", str(tmp_path / "out"))
    said = done.stdout + done.stderr
    assert done.returncode == 0, said
    assert "succeeded" in said
    assert "placement: no GPU, everything shares the CPU" in said
    assert "still missing" not in said
