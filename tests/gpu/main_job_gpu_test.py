"""The main job in bfloat16, engines and trainers on the same devices: on one GPU, and on all of an even number."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from rlhf_rollout.host import local_gpus

NUM_PAIRS = local_gpus() // 2

FLAGS = ["--bf16", "--colocate_all_models"]
IN_TURN = ["--vllm_enable_sleep", "--deepspeed_enable_sleep"]
WITH_GRAPHS = ["--packing_samples", "--micro_batch_tokens", "1024"]
# As in OpenRLHF's main example: sharded models, and engines that divide weights over two GPUs.
ON_ALL_GPUS = [
    *IN_TURN,
    *("--actor_num_gpus_per_node", str(2 * NUM_PAIRS), "--zero_stage", "3", "--packing_samples"),
    *("--vllm_num_engines", str(NUM_PAIRS), "--vllm_tensor_parallel_size", "2"),
]


@pytest.mark.parametrize("mode", [IN_TURN, WITH_GRAPHS], ids=["in turn", "with graphs"])
def test_main_job_on_one_gpu_learns_and_syncs_by_cuda_ipc(tmp_path, mode):
    learns(tmp_path, mode)


@pytest.mark.skipif(NUM_PAIRS == 0, reason="needs two GPUs")
def test_main_job_on_all_gpus_learns_at_zero_stage_3_with_tensor_parallel_engines(tmp_path):
    learns(tmp_path, ON_ALL_GPUS)


def learns(tmp_path: Path, mode: list[str]) -> None:
    command = [sys.executable, "-m", "rlhf_cli.commands.ppo", *FLAGS, *mode, "--seed", "1", "--train_steps", "14"]
    done = subprocess.run([*command, "--save_path", tmp_path / "out"], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    lines = [json.loads(line) for line in (tmp_path / "out/metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    steps = [line for line in lines if "time/step" in line]
    assert len(steps) == 14
    assert all(line["samples/generated"] == line["samples/trained"] == 128 for line in steps)
    assert max(line["mismatch/logprob_gap_mean"] for line in steps) < 0.02
    assert lines[-1]["eval/accuracy_before"] <= 0.40
    assert lines[-1]["eval/accuracy_after"] >= 0.60
    assert lines[-1]["memory/trainer_peak_bytes"] > 0
