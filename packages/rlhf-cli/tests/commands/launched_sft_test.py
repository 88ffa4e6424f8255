"""`sft` in two launched processes trains one model: the one that a single process trains with the same batches."""

import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import psutil
import pytest

from rlhf_rollout.host import free_port
from rlhf_train.run.checkpoint import Checkpoints

TIMEOUT_S = 240
ROWS = [{"prompt": f"What is {number} + {number}?", "answer": str(2 * number)} for number in range(10, 34)]
LAUNCHERS = {
    "one process": (),
    "torchrun": ("torch.distributed.run", "--standalone", "--nproc_per_node", "2"),
    "deepspeed": ("deepspeed.launcher.runner", "--num_accelerators", "2", "--master_port", "FREE"),
}


def start(folder: Path, *launcher: str, flags: tuple[str, ...] = ()) -> subprocess.Popen[str]:
    """Start train_sft on `ROWS`, 24 examples in updates of 8, as a person would under `launcher`."""
    data = folder / "rows.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in ROWS), encoding="utf-8")
    words = ["--pretrain", "builtin", "--dataset", str(data), "--input_key", "prompt", "--output_key", "answer"]
    words += ["--apply_chat_template", "--max_len", "64", "--train_batch_size", "8", "--micro_train_batch_size", "3"]
    words += ["--learning_rate", "1e-4", "--lr_scheduler", "constant", "--lr_warmup_ratio", "0"]
    words += ["--save_path", str(folder / "out"), *flags]
    launcher = tuple(str(free_port()) if word == "FREE" else word for word in launcher)
    module = ["--module"] if "deepspeed" in "".join(launcher) else ["-m"]
    command = [*(["-m", *launcher] if launcher else []), *module, "rlhf_cli.train_sft", *words]
    path = os.pathsep.join(path for path in sys.path if path)
    environment = {
        name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")
    }
    environment |= {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    pipe = subprocess.PIPE
    return subprocess.Popen(
        [sys.executable, *command], stdout=pipe, stderr=subprocess.STDOUT, text=True, env=environment
    )


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> dict[str, tuple[list[dict[str, float]], dict[str, np.ndarray], str]]:
    """The metrics of each update, the final weights and the output, by launcher."""
    from safetensors.numpy import load_file

    outcomes = {}
    for name in ("one process", "torchrun"):
        launcher = LAUNCHERS[name]
        folder = tmp_path_factory.mktemp("run")
        run = start(folder, *launcher)
        output, _ = run.communicate(timeout=TIMEOUT_S)
        assert run.returncode == 0, f"{name}:\n{output}"
        lines = [json.loads(line) for line in (folder / "out" / "metrics.jsonl").read_text().splitlines()]
        updates = [line for line in lines if "sft/loss" in line]
        outcomes[name] = updates, load_file(folder / "out" / "model" / "model.safetensors"), output
    return outcomes


def check_updates(updates: list[dict[str, float]], expected: list[dict[str, float]]) -> None:
    assert [line["step"] for line in updates] == [1, 2, 3]
    for line, other in zip(updates, expected, strict=True):
        assert line["sft/loss"] == pytest.approx(other["sft/loss"], rel=1e-4)
        assert line["train/grad_norm"] == pytest.approx(other["train/grad_norm"], rel=1e-3)


def test_two_launched_processes_train_the_model_of_one(runs):
    updates, weights, output = runs["torchrun"]
    expected_updates, expected_weights, _ = runs["one process"]
    check_updates(updates, expected_updates)
    assert weights.keys() == expected_weights.keys()
    # Adam turns rounding of tiny gradients into moves of up to a learning rate, so compare the mean difference.
    differences = np.concatenate([np.abs(weights[key] - expected_weights[key]).ravel() for key in weights])
    assert differences.mean() < 1e-7
    assert output.count("results will be in") == 1


def test_launcher_trains_the_same_and_its_signal_ends_all_ranks_with_one_checkpoint(runs, tmp_path):
    """DeepSpeed's launcher passes SIGTERM to one rank, and to the next one when that has ended."""
    run = start(tmp_path, *LAUNCHERS["deepspeed"], flags=("--max_epochs", "9999"))
    metrics = tmp_path / "out/metrics.jsonl"
    deadline = time.monotonic() + TIMEOUT_S
    while not metrics.exists() or metrics.read_text().count("\n") < 3:
        assert run.poll() is None and time.monotonic() < deadline
        time.sleep(0.1)
    # The runner has started the launcher, which has started the ranks.
    [launcher] = psutil.Process(run.pid).children()
    launcher.terminate()
    output, _ = run.communicate(timeout=TIMEOUT_S)
    assert run.returncode == 1, output
    assert output.count(f"`rlhf sft --resume {tmp_path}/out` continues this run from its newest checkpoint") == 1
    [checkpoint] = Checkpoints(tmp_path / "out/checkpoints").all()
    assert checkpoint.problems() == []
    lines = metrics.read_text().splitlines()
    check_updates([json.loads(line) for line in lines[:3]], runs["one process"][0])
    assert checkpoint.step == json.loads(lines[-1])["step"] == len(lines)


def test_failure_on_one_node_ends_the_others_before_they_wait_for_it(tmp_path):
    port = str(free_port())
    nodes = []
    for number in ("0", "1"):
        folder = tmp_path / number
        folder.mkdir()
        place = ("--nnodes", "2", "--node_rank", number, "--nproc_per_node", "1", "--master_port", port)
        nodes.append(start(folder, "torch.distributed.run", "--master_addr", "127.0.0.1", *place))
        if number == "1":
            (folder / "rows.jsonl").unlink()
    outputs = [node.communicate(timeout=TIMEOUT_S)[0] for node in nodes]
    assert [node.returncode for node in nodes] == [1, 1], outputs
    said = f"data file {tmp_path}/1/rows.jsonl does not exist"
    assert f"error: {said}" in outputs[1]
    assert re.search(rf"error: rank 1 on .* failed: DataError: {said}", outputs[0])
