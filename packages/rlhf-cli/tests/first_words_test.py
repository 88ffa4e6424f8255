"""Every command says what it is doing before it imports a heavy library, whose import takes seconds."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from rlhf_cli.builtin import BUILTIN, MODEL_DIR
from rlhf_cli.main import COMMANDS
from rlhf_rollout.commands.main import COMMANDS as ROLLOUT_COMMANDS
from rlhf_train.run.checkpoint import Checkpoints

# A `sitecustomize` that ends the process at the first import of a heavy library. Its exit status says whether the user
# had been told by then what the command is doing.
STOP = """
import os, sys

HEAVY = {"datasets", "deepspeed", "fastapi", "peft", "ray", "torch", "transformers", "triton", "uvicorn", "vllm"}

class Stop:
    def find_spec(self, name, path=None, target=None):
        if name in HEAVY:
            with open(os.environ["SAID"]) as file:
                said = any(line.endswith(" ...\\n") for line in file)
            with open(os.environ["SAID"], "a") as file:
                file.write(f"stopped at {name}\\n")
            os._exit(70 if said else 71)

sys.meta_path.insert(0, Stop())
"""
SAID, SILENT = 70, 71

ROW = {"input": "1+1=", "output": "2", "chosen": "2", "rejected": "3", "label": 1, "prompt": "1+1="}
REWARD = "def reward_func(queries, prompts, labels):\n    return {'rewards': [0.0] * len(queries)}\n"
MODEL = str(MODEL_DIR)
EXAMPLES = ("--pretrain", BUILTIN, "--dataset", "rows.jsonl")
SCORED = ("--dataset", "rows.jsonl", "--output_path", "out.jsonl", "--reward_pretrain", MODEL)
PROMPTS = ("--prompt_data", "rows.jsonl", "--output_path", "out.jsonl")

# What makes each command of `rlhf` run as far as its libraries.
FLAGS = {
    "ppo": (),
    "plan": ("--gpus", "1"),
    "sft": EXAMPLES,
    "rm": EXAMPLES,
    "dpo": EXAMPLES,
    "kto": EXAMPLES,
    "prm": (*EXAMPLES, "--placeholder_token", "#"),
    "kd": (*EXAMPLES, "--teacher_model", BUILTIN),
    "generate": ("--pretrain", MODEL, *PROMPTS),
    "score": SCORED,
    "serve": ("--pretrain", MODEL),
    "serve_rm": ("--reward_pretrain", MODEL),
    "bench": ("--pretrain", MODEL, "--prompt_data", "rows.jsonl"),
    "chat": ("--pretrain", MODEL),
    "replay": ("run", "--step", "1"),
    "checkpoints": ("run", "--export", "1", "--output_path", "exported"),
    "lora_combiner": ("--model_path", MODEL, "--lora_path", "adapter", "--output_path", "merged"),
}
# `doctor` imports libraries in other processes, each of which may fail; `report` and `rollouts` import none.
NOTHING_HEAVY = ("doctor", "report", "rollouts")
CASES = {f"rlhf {name}": ("rlhf_cli.main", name, *FLAGS[name]) for name in COMMANDS if name not in NOTHING_HEAVY}
CASES |= {f"rlhf-rollout {name}": ("rlhf_rollout.commands.main", name, *FLAGS[name]) for name in ROLLOUT_COMMANDS}
CASES["rlhf-data inspect"] = ("rlhf_data.main", "inspect", "--dataset", "rows.jsonl", "--tokenizer", MODEL)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with a row that suits every command, and a module that stops at heavy imports."""
    (tmp_path / "stop").mkdir()
    (tmp_path / "stop/sitecustomize.py").write_text(STOP)
    (tmp_path / "rows.jsonl").write_text(json.dumps(ROW) + "\n")
    (tmp_path / "reward.py").write_text(REWARD)
    (tmp_path / "adapter").mkdir()
    (tmp_path / "adapter/adapter_config.json").write_text("{}")
    (tmp_path / "run").mkdir()
    (tmp_path / "run/config.toml").write_text(
        '[model]\npretrain = "builtin"\n[data]\nprompt_data = "builtin"\ninput_key = "prompt"\nlabel_key = "answer"\n'
        '[reward]\nremote_rm_url = "rlhf_rollout.rewards.math"\n'
    )
    (tmp_path / "run/rollouts.jsonl").write_text(
        '{"step": 1, "num_steps": 1, "kept": true, "num_left": 0, "rest": 0}\n'
    )
    (tmp_path / "run/metrics.jsonl").write_text('{"step": 1, "time/step": 1.0}\n')
    checkpoints = Checkpoints(tmp_path / "run/checkpoints")
    (checkpoints.begin(1) / "actor-0-of-1.safetensors").write_bytes(b"")
    checkpoints.commit(1, {}, [], None)
    return tmp_path


def run(folder: Path, module: str, *words: str) -> tuple[int, str]:
    """Run a command until a heavy import; return its exit status, and what the user has seen."""
    said = folder / "said.txt"
    variables = {"PYTHONPATH": os.pathsep.join([str(folder / "stop"), str(folder), *sys.path]), "SAID": str(said)}
    with said.open("w") as output:
        command = [sys.executable, "-m", module, *words]
        environment = os.environ | variables | {"BUILD_WORKING_DIRECTORY": str(folder)}
        done = subprocess.run(command, cwd=folder, env=environment, stdout=output, stderr=output, check=False)
    return done.returncode, said.read_text()


@pytest.mark.parametrize("case", CASES)
def test_command_says_what_it_does_before_it_imports_anything_heavy(case, folder):
    status, said = run(folder, *CASES[case])
    assert status == SAID, said


@pytest.mark.parametrize(("words", "expected"), [("", SILENT), ("hello", SILENT), ("loading a model ...", SAID)])
def test_import_before_the_first_words_is_noticed(folder, words, expected):
    (folder / "slow.py").write_text(f"print({words!r}, flush=True)\nimport torch\n")
    status, said = run(folder, "slow")
    assert (status, said) == (expected, f"{words}\nstopped at torch\n")
