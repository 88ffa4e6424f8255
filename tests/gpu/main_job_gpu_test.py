"""The main job on one GPU: bfloat16, one engine and one trainer on the same device."""

import json
import subprocess
import sys

import pytest

FLAGS = ["--bf16", "--colocate_all_models"]
IN_TURN = ["--vllm_enable_sleep", "--deepspeed_enable_sleep"]
WITH_GRAPHS = ["--packing_samples", "--micro_batch_tokens", "1024"]


@pytest.mark.parametrize("mode", [IN_TURN, WITH_GRAPHS], ids=["in turn", "with graphs"])
def test_main_job_on_one_gpu_learns_and_syncs_by_cuda_ipc(tmp_path, mode):
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
