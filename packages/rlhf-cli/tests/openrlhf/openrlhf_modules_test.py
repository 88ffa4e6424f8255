"""OpenRLHF's command modules: which command each one runs, and what a launcher may start."""

import os
import subprocess
import sys
from pkgutil import iter_modules

import pytest

import rlhf_cli
from rlhf_cli.openrlhf import modules

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
    found = lambda name: (None, lambda flags: words.append([name, *flags]) or 7)  # noqa: E731
    monkeypatch.setattr("rlhf_cli.main._found", found)
    return words


def run_module(module: str, *words: str, **env: str) -> subprocess.CompletedProcess[str]:
    """Run a module as `python -m` does."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path), **env}
    command = [sys.executable, "-m", module, *words]
    return subprocess.run(command, capture_output=True, text=True, env=environment, check=False)


@pytest.mark.parametrize(("module", "command"), COMMANDS.items())
def test_module_runs_its_command_with_the_flags_as_they_are(ran, module, command):
    assert modules.main(module, ["--pretrain", "x", "--bf16"]) == 7
    compares = ["--openrlhf"] if module.startswith("train_") else []
    assert ran == [[command, *compares, "--pretrain", "x", "--bf16"]]
    assert modules.main(f"rlhf_cli.{module}", []) == 7
    assert ran[1] == [command, *compares]


def test_every_module_can_be_run_by_its_name():
    assert set(modules.COMMANDS) <= {module.name for module in iter_modules(rlhf_cli.__path__)}
    assert set(modules.COMMANDS) == {*COMMANDS, "batch_inference"}


@pytest.mark.parametrize(
    ("task", "words"),
    [
        (["--eval_task", "generate_vllm"], ["generate", "--engine", "vllm", "--post_processor", "rendered"]),
        (["--eval_task=generate"], ["generate", "--engine", "transformers", "--post_processor", "rendered"]),
        (["--eval_task", "rm"], ["score"]),
        (["--eval_task", "rm", "--post_processor", "null"], ["score"]),
        (["--eval_task", "rm", "--post_processor=rs"], ["score", "--post_processor", "best_of_n"]),
        (["--post-processor", "iter_dpo", "--eval_task", "rm"], ["score", "--post_processor", "iter_dpo"]),
    ],
)
def test_batch_inference_runs_the_command_of_its_task(ran, task, words):
    assert modules.main("batch_inference", ["--pretrain", "x", *task, "--zero_stage", "0"]) == 7
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
    assert modules.main("batch_inference", argv) == 2
    assert message in capsys.readouterr().err
    assert ran == []


# The steps of iterative DPO, of rejection sampling and of conditional SFT, and the reward server, with flags as in
# examples/scripts of OpenRLHF.
_SCORES = (
    "batch_inference --eval_task rm --pretrain org/reward --bf16 --dataset {made} --dataset_probs 1.0 --zero_stage 0"
)
LINES = {
    "generate": "batch_inference --eval_task generate_vllm --pretrain org/policy --max_new_tokens 2048"
    " --prompt_max_len 2048 --dataset org/prompts --input_key context_messages --apply_chat_template --temperature 1.0"
    " --tp_size 4 --best_of_n 16 --enable_prefix_caching --max_num_seqs 64 --iter 2 --rollout_batch_size 10240"
    " --zero_stage 0 --output_path made.jsonl",
    "iter_dpo": _SCORES + " --max_len 4096 --post_processor iter_dpo --micro_batch_size 4 --output_path out.jsonl",
    "rs": _SCORES + " --max_len 4096 --post_processor rs --micro_batch_size 4 --output_path out.jsonl",
    "csft": _SCORES
    + " --max_len 2048 --post_processor csft --normalize_reward --micro_batch_size 4 --output_path o.jsonl",
    "serve": "serve_rm --reward_pretrain org/reward --port 5000 --bf16 --flash_attn --normalize_reward --max_len 8192"
    " --batch_size 16 --attn_implementation flash_attention_2",
}


@pytest.mark.parametrize("name", LINES)
def test_printed_command_line_of_inference_parses(name, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    made = tmp_path / "made.jsonl"
    made.write_text('{"input": "q", "output": "a"}\n')
    module, *flags = LINES[name].format(made=made).split()
    assert modules.main(module, [*flags, "--dry_run"]) == 0, capsys.readouterr().err


def test_launcher_may_start_many_processes_of_offline_training_alone(ran, capsys, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "8")
    monkeypatch.setenv("RANK", "0")
    assert modules.main("train_sft", []) == 7
    assert modules.main("train_ppo_ray", []) == 2
    error = capsys.readouterr().err
    assert "8 processes of `python3 -m rlhf_cli.train_ppo_ray` were launched (WORLD_SIZE)" in error
    assert "hint: use `python3 -m rlhf_cli.train_ppo_ray --actor_num_gpus_per_node 8`, without a launcher\n" in error
    assert modules.main("interactive_chat", []) == 2
    assert "hint: use `python3 -m rlhf_cli.interactive_chat`, without a launcher\n" in capsys.readouterr().err
    monkeypatch.setenv("RANK", "3")  # the first process has said it
    assert modules.main("train_ppo_ray", []) == 2
    assert capsys.readouterr().err == ""
    assert ran == [["sft", "--openrlhf"]]


def test_module_under_python_m_shows_the_help_of_its_command():
    done = run_module("rlhf_cli.train_ppo_ray", "--help")
    assert done.returncode == 0, done.stderr
    assert "--advantage_estimator" in done.stdout
    refused = run_module("rlhf_cli.batch_inference", "--pretrain", "x")
    assert refused.returncode == 2
    assert "--eval_task is missing" in refused.stderr
