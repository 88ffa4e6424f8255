"""The scripts of `examples/scripts` pass a dry run as they are, with another model on GPUs, and with further flags."""

import os
import subprocess
from pathlib import Path

import pytest

from process_testing import eventually, is_running

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
SLURM = "train_ppo_ray_slurm.sh"  # needs programs of Slurm
# Stands for srun: writes down what it was asked to run, and on which node, and answers as Slurm and Ray would.
SRUN = """#!/usr/bin/env bash
while [[ $1 == --* ]]; do
  case $1 in
    --nodelist) node=$2; shift 2 ;;
    --nodes | --ntasks) shift 2 ;;
    *) shift ;;
  esac
done
echo "$node|${RAY_ADDRESS:-}|${RAY_AUTH_MODE:-}|${RAY_AUTH_TOKEN:-}|$*" >> "$LOG"
case $1 in
  hostname) echo "10.0.0.1 172.17.0.1" ;;
  ray) echo $$ >> "$LOG.pids"; exec sleep 600 ;;
  python)
    until [[ -f $LOG.pids && $(wc -l < "$LOG.pids") == 2 ]]; do sleep 0.05; done
    [[ $(grep -c python "$LOG") -gt $LATE ]]
    ;;
  rlhf) exit $STATUS ;;
esac
"""
OURS = {"MODEL": "org/model", "REWARD_MODEL": "org/reward", "PROMPTS": "prompts.jsonl", "GPUS": "8"}


def run(words: list[str], script: str, *arguments: str, folder: Path, **variables: str) -> str:
    """Return what a dry run of a script prints."""
    environment = os.environ | {"RLHF": " ".join(words), "BUILD_WORKING_DIRECTORY": str(folder)} | variables
    command = ["bash", str(SCRIPTS / script), *arguments, "--dry_run"]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    for title in ("no effect", "cannot run yet", "still missing"):
        assert title not in done.stdout + done.stderr
    return " ".join(done.stdout.split())


def test_scripts_are_those_that_openrlhf_has():
    assert {path.name for path in SCRIPTS.iterdir()} == {*PLACES, SLURM}
    assert all(os.access(path, os.X_OK) for path in SCRIPTS.iterdir())


@pytest.mark.parametrize("script", PLACES)
def test_script_plans_the_built_in_model_and_takes_further_flags(words, script, tmp_path):
    shown = run(words, script, "--train_steps", "7", folder=tmp_path)
    assert 'pretrain = "builtin"' in shown and "train_steps = 7" in shown


@pytest.mark.parametrize("script", PLACES)
def test_script_plans_a_model_on_gpus(words, script, tmp_path):
    (tmp_path / "prompts.jsonl").write_text(512 * '{"input": "What is 4 + 8?", "label": "12"}\n')
    shown = run(words, script, "--plan_gpus", "16", folder=tmp_path, **OURS)
    assert PLACES[script] in shown


def submitted(folder: Path, *arguments: str, late: int = 0, status: int = 0, **variables: str):
    """Run the script as in an allocation of two nodes. Ray has both of them at the look after `late` others.

    Returns the script's process, the lines of the fake srun by their parts, and the processes that stand for Ray.
    """
    programs = folder / "bin"
    programs.mkdir()
    for name, text in (
        ("srun", SRUN),
        ("scontrol", '#!/bin/sh\n[ "$*" = "show hostnames n[1-2]" ] && echo n1 && echo n2\n'),
    ):
        (programs / name).write_text(text)
        (programs / name).chmod(0o755)
    log = folder / "log"
    own = {"PATH": f"{programs}:{os.environ['PATH']}", "LOG": str(log), "LATE": str(late), "STATUS": str(status)}
    own |= {"SLURM_JOB_NODELIST": "n[1-2]", "POLL_S": "0"}
    environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    words = ["bash", str(SCRIPTS / SLURM), *arguments]
    done = subprocess.run(words, env=environment | own | variables, capture_output=True, text=True, timeout=60)
    lines = [line.split("|") for line in log.read_text().splitlines()]
    return done, lines, [int(pid) for pid in (folder / "log.pids").read_text().split()]


@pytest.mark.parametrize("late", [0, 3])
def test_slurm_script_starts_ray_on_all_nodes_then_the_run_on_the_first(tmp_path, late):
    done, lines, pids = submitted(tmp_path, "--pretrain", "org/a model", late=late, SLURM_GPUS_ON_NODE="8", PORT="6400")
    assert done.returncode == 0, done.stderr
    by_node = {node: [words for name, *_, words in lines if name == node] for node in ("n1", "n2")}
    head, *looks, run = by_node["n1"][1:]
    assert by_node["n1"][0] == "hostname --all-ip-addresses"
    # What runs in the background may be written down later than what comes after it.
    started = "ray start --head --node-ip-address 10.0.0.1 --port 6400 --num-gpus 8 --block"
    others = [words for words in (head, *looks) if words.startswith("python -c import ray")]
    assert sorted([head, *looks]) == sorted([*others, started]) and len(others) == late + 1
    assert all(words.endswith(" 2") for words in others)
    assert run == "rlhf ppo --pretrain org/a model" and lines[-1][-1] == run
    assert by_node["n2"] == ["ray start --address 10.0.0.1:6400 --num-gpus 8 --block"]
    # Nobody without the token gets in, and the run joins this cluster and no other.
    (tokens,) = {token for _, _, mode, token, words in lines if words.startswith(("ray", "rlhf")) and mode == "token"}
    assert len(tokens) == 64
    assert {address for _, address, *_, words in lines if words.startswith(("rlhf", "python"))} == {"10.0.0.1:6400"}
    assert {address for _, address, *_, words in lines if words.startswith("ray")} == {""}
    assert eventually(lambda: not any(map(is_running, pids))) and len(pids) == 2


def test_slurm_script_ends_ray_and_has_the_status_of_the_run(tmp_path):
    done, lines, pids = submitted(tmp_path, status=3, HEAD_IP="10.9.9.9", RLHF="rlhf")
    assert done.returncode == 3
    assert "hostname" not in " ".join(line[-1] for line in lines)
    assert "ray start --address 10.9.9.9:6379 --block" in [line[-1] for line in lines]
    assert eventually(lambda: not any(map(is_running, pids))) and len(pids) == 2


def test_slurm_script_ends_with_an_error_where_nodes_do_not_come(tmp_path):
    done, lines, pids = submitted(tmp_path, late=100)
    assert done.returncode == 1 and "error: Ray has not started on 2 nodes" in done.stderr
    assert not [line for line in lines if line[-1].startswith("rlhf")]
    assert eventually(lambda: not any(map(is_running, pids)))
