"""The scripts of `examples/scripts` pass a dry run as they are, with another model on GPUs, and with further flags."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCRIPTS = ROOT / "examples/scripts"
ALL = "train 8 x actor + critic + reference, GPU 0-7 engines 8 x vLLM, GPU 0-7 "
WITHOUT_CRITIC = "train 8 x actor + reference, GPU 0-7 engines 8 x vLLM, GPU 0-7 batches"
PLACES = {
    "train_ppo_ray_hybrid_engine.sh": ALL + "reward 8 x reward, GPU 0-7",
    "train_ppo_with_reward_fn.sh": ALL + "batches",
    "train_reinforce_baseline_hybrid_engine.sh": WITHOUT_CRITIC,
    "train_reinforce_baseline_ray_agent_async.sh": "actor 8 x actor, node 0 GPU 0-7 engines 8 x vLLM, node 1 GPU 0-7",
}
OURS = {"MODEL": "org/model", "REWARD_MODEL": "org/reward", "PROMPTS": "prompts.jsonl", "GPUS": "8"}


def run(script: str, *arguments: str, folder: Path, **variables: str) -> str:
    """Return what a dry run of a script prints."""
    binary = ROOT / "packages/rlhf-cli/rlhf"
    command = str(binary) if binary.is_file() else f"{sys.executable} -m rlhf_cli.main"
    environment = os.environ | {"RLHF": command, "BUILD_WORKING_DIRECTORY": str(folder)} | variables
    words = ["bash", str(SCRIPTS / script), *arguments, "--dry_run"]
    done = subprocess.run(words, cwd=folder, env=environment, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    for title in ("no effect", "cannot run yet", "still missing"):
        assert title not in done.stdout + done.stderr
    return " ".join(done.stdout.split())


def test_scripts_are_those_that_openrlhf_has():
    assert {path.name for path in SCRIPTS.iterdir()} == set(PLACES)
    assert all(os.access(path, os.X_OK) for path in SCRIPTS.iterdir())


@pytest.mark.parametrize("script", PLACES)
def test_script_plans_the_built_in_model_and_takes_further_flags(script, tmp_path):
    shown = run(script, "--train_steps", "7", folder=tmp_path)
    assert 'pretrain = "builtin"' in shown and "train_steps = 7" in shown


@pytest.mark.parametrize("script", PLACES)
def test_script_plans_a_model_on_gpus(script, tmp_path):
    (tmp_path / "prompts.jsonl").write_text(512 * '{"input": "What is 4 + 8?", "label": "12"}\n')
    shown = run(script, "--plan_gpus", "16", folder=tmp_path, **OURS)
    assert PLACES[script] in shown
