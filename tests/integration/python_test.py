"""The example of a run from Python trains, its function gave the rewards, and the run continues."""

import re
import subprocess
import sys
from pathlib import Path
from statistics import mean

import pytest

import rlhf_cli

EXAMPLE = Path(__file__).parents[2] / "examples/from_python.py"


def expected_reward(rollout: dict) -> float:
    """What the example promises for a text, from the question itself."""
    first, second = map(int, re.search(r"What is (\d+) \+ (\d+)\?", rollout["prompt"]).groups())
    _, mark, said = rollout["text"].rpartition("#### ")
    if not mark or not said[:1].isdigit():
        return 0.0
    return 1.0 if int(re.match(r"\d+", said)[0]) == first + second else 0.2


@pytest.mark.usefixtures("words")  # ranks and engines are forks
def test_example_trains_on_its_function_and_continues(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "local")
    command = [sys.executable, str(EXAMPLE), str(tmp_path / "run")]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    first = rlhf_cli.open_run(tmp_path / "run").curves["rollout/reward"]
    assert f"reward by step: {[round(reward, 3) for _, reward in first]}\n" in done.stdout
    assert f"the model: {tmp_path / 'run/model'}\n" in done.stdout and (tmp_path / "run/model/config.json").is_file()
    run = rlhf_cli.ppo(resume=tmp_path / "run", train_steps=3)
    rewards: dict[int, list[float]] = {1: [], 2: [], 3: []}
    for rollout in rlhf_cli.read_rollouts(run):
        assert rollout["reward"] == pytest.approx(expected_reward(rollout))
        rewards[rollout["step"]].append(rollout["reward"])
    assert all(len(of_step) == 32 * 4 and len(set(of_step)) > 1 for of_step in rewards.values())
    assert run.curves["rollout/reward"] == [(step, pytest.approx(mean(rewards[step]))) for step in (1, 2, 3)]
    assert run.curves["rollout/reward"][:2] == first
    assert run.metrics["rollout/answered"] == pytest.approx(mean(float(reward > 0) for reward in rewards[3]))
