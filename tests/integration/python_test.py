"""A run that Python starts is the run of the command line: the example's has the metrics of a typed one."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

import rlhf_cli

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples/from_python.py"
# What differs between runs of the same numbers.
CLOCK = ("time/", "throughput/", "memory/", "cpu/", "gpu/")

REWARD = """
def reward_func(queries, prompts, labels):
    rewards = []
    for query, prompt, label in zip(queries, prompts, labels):
        _, mark, said = query[len(prompt):].rpartition("#### ")
        digits = said[: len(said) - len(said.lstrip("0123456789"))]
        rewards.append(0.0 if not digits else 1.0 if digits == label else 0.2)
    return {"rewards": rewards, "extra_logs": {"answered": [float(reward > 0) for reward in rewards]}}
"""


def numbers_of(folder: Path) -> list[dict]:
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text("utf-8").splitlines()]
    return [
        {name: value for name, value in line.items() if not name.startswith(CLOCK)}
        for line in lines
        if "rollout/reward" in line
    ]


def test_example_has_the_metrics_of_the_command_and_continues(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "local")
    begun = tmp_path / "begun"
    command = [sys.executable, str(EXAMPLE), str(begun)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    first = numbers_of(begun)
    assert f"reward by step: {[round(line['rollout/reward'], 3) for line in first]}\n" in done.stdout
    assert f"the model: {begun / 'model'}\n" in done.stdout and (begun / "model/config.json").is_file()
    run = rlhf_cli.ppo(resume=begun, train_steps=3)
    assert run.last_step == 3 and run.folder == begun
    assert numbers_of(begun)[:2] == first
    (tmp_path / "reward.py").write_text(REWARD)
    flags = "--advantage_estimator group_norm --init_kl_coef 0 --train_steps 2 --eval_data None"
    files = ["--remote_rm_url", str(tmp_path / "reward.py"), "--save_path", str(tmp_path / "typed")]
    command = [sys.executable, "-m", "rlhf_cli.main", "ppo", *flags.split(), *files]
    subprocess.run(command, capture_output=True, check=True, cwd=tmp_path)
    assert numbers_of(tmp_path / "typed") == first
    assert 0 < run.metrics["reward/answered"] <= 1
    assert {rollout["step"] for rollout in rlhf_cli.read_rollouts(run)} == {1, 2, 3}
