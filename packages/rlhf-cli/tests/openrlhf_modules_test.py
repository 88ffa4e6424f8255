"""OpenRLHF's command modules: which command each one runs, and what a launcher may start."""

import os
import subprocess
import sys
from importlib.util import find_spec

import pytest

from rlhf_cli import openrlhf

COMMANDS = {
    "train_ppo_ray": "ppo",
    "train_ppo": "ppo",
    "train_sft": "sft",
    "train_rm": "rm",
    "train_dpo": "dpo",
    "train_kto": "kto",
    "train_prm": "prm",
    "train_kd": "kd",
    "interactive_chat": "chat",
    "serve_rm": "serve_rm",
    "lora_combiner": "lora_combiner",
}


@pytest.fixture
def ran(monkeypatch) -> list[list[str]]:
    """The words that `rlhf` was called with."""
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    words: list[list[str]] = []
    monkeypatch.setattr("rlhf_cli.main.main", lambda argv: words.append(list(argv)) or 7)
    return words


def run_module(module: str, *words: str, **env: str) -> subprocess.CompletedProcess[str]:
    """Run a module as `python -m` does."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path), **env}
    command = [sys.executable, "-m", module, *words]
    return subprocess.run(command, capture_output=True, text=True, env=environment, check=False)


@pytest.mark.parametrize(("module", "command"), COMMANDS.items())
def test_module_runs_its_command_with_the_flags_as_they_are(ran, module, command):
    assert openrlhf.main(module, ["--pretrain", "x", "--bf16"]) == 7
    compares = ["--openrlhf"] if module.startswith("train_") else []
    assert ran == [[command, *compares, "--pretrain", "x", "--bf16"]]
    assert openrlhf.main(f"rlhf_cli.{module}", []) == 7
    assert ran[1] == [command, *compares]


def test_every_module_can_be_run_by_its_name():
    assert {name for name in openrlhf.COMMANDS if find_spec(f"rlhf_cli.{name}") is None} == set()
    assert set(openrlhf.COMMANDS) == {*COMMANDS, "batch_inference"}


@pytest.mark.parametrize(
    ("task", "words"),
    [
        (["--eval_task", "generate_vllm"], ["generate", "--engine", "vllm"]),
        (["--eval_task=generate"], ["generate", "--engine", "transformers"]),
        (["--eval_task", "rm"], ["score"]),
    ],
)
def test_batch_inference_runs_the_command_of_its_task(ran, task, words):
    assert openrlhf.main("batch_inference", ["--pretrain", "x", *task, "--zero_stage", "0"]) == 7
    assert ran == [[*words, "--pretrain", "x", "--zero_stage", "0"]]


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ([], "--eval_task is missing"),
        (["--pretrain", "x", "--eval_task"], "--eval_task is missing"),
        (["--eval_task", "generate_vlm"], "unknown value `generate_vlm`"),
    ],
)
def test_batch_inference_without_a_task_it_knows_is_refused(ran, capsys, argv, message):
    assert openrlhf.main("batch_inference", argv) == 2
    assert message in capsys.readouterr().err
    assert ran == []


def test_launcher_may_start_many_processes_of_offline_training_alone(ran, capsys, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "8")
    monkeypatch.setenv("RANK", "0")
    assert openrlhf.main("train_sft", []) == 7
    assert openrlhf.main("train_ppo_ray", []) == 2
    error = capsys.readouterr().err
    assert "8 processes of `python3 -m rlhf_cli.train_ppo_ray` were launched (WORLD_SIZE)" in error
    assert "hint: use `python3 -m rlhf_cli.train_ppo_ray --actor_num_gpus_per_node 8`, without a launcher\n" in error
    assert openrlhf.main("interactive_chat", []) == 2
    assert "hint: use `python3 -m rlhf_cli.interactive_chat`, without a launcher\n" in capsys.readouterr().err
    monkeypatch.setenv("RANK", "3")  # the first process has said it
    assert openrlhf.main("train_ppo_ray", []) == 2
    assert capsys.readouterr().err == ""
    assert ran == [["sft", "--openrlhf"]]


def test_module_under_python_m_shows_the_help_of_its_command():
    done = run_module("rlhf_cli.train_ppo_ray", "--help")
    assert done.returncode == 0, done.stderr
    assert "--advantage_estimator" in done.stdout
    refused = run_module("rlhf_cli.batch_inference", "--pretrain", "x")
    assert refused.returncode == 2
    assert "--eval_task is missing" in refused.stderr
