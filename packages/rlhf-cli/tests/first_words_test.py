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
            with open(os.environ.get("SAID", os.devnull)) as file:
                said = any(line.endswith(" ...\\n") for line in file)
            with open(os.environ.get("SAID", os.devnull), "a") as file:
                file.write(f"stopped at {name}\\n")
            os._exit(70 if said else 71)

sys.meta_path.insert(0, Stop())
"""
SAID, SILENT = 70, 71

# Imports what all commands need before they parse their flags, and runs each in a fork of its own and a folder of its
# own, as `python -m` would.
FORKS = """
import json, os, runpy, sys
import rlhf_cli.commands.examples, rlhf_cli.commands.ppo, rlhf_rollout.commands.configs

ended = {}
for case, (module, *words) in json.loads(sys.argv[1]).items():
    if (child := os.fork()) == 0:
        os.chdir(case)
        sys.path.insert(0, os.getcwd())
        os.environ |= {"BUILD_WORKING_DIRECTORY": os.getcwd(), "SAID": os.path.abspath("said.txt")}
        with open("said.txt", "w") as file:
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
        sys.argv[1:] = words
        runpy.run_module(module, run_name="__main__", alter_sys=True)
        sys.exit()
    ended[case] = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
print(json.dumps(ended))
"""

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
    "check": ("reward.py",),
    "replay": ("run", "--step", "1"),
    "checkpoints": ("run", "--export", "1", "--output_path", "exported"),
    "lora_combiner": ("--model_path", MODEL, "--lora_path", "adapter", "--output_path", "merged"),
}
# `doctor` imports libraries in other processes, each of which may fail; `report` and `rollouts` import none.
NOTHING_HEAVY = ("doctor", "report", "rollouts")
CASES = {f"rlhf {name}": ("rlhf_cli.main", name, *FLAGS[name]) for name in COMMANDS if name not in NOTHING_HEAVY}
CASES |= {f"rlhf-rollout {name}": ("rlhf_rollout.commands.main", name, *FLAGS[name]) for name in ROLLOUT_COMMANDS}
CASES["rlhf-data inspect"] = ("rlhf_data.main", "inspect", "--dataset", "rows.jsonl", "--tokenizer", MODEL)
SLOW = {"nothing": ("", SILENT), "other words": ("hello", SILENT), "words": ("loading a model ...", SAID)}
ALL = CASES | dict.fromkeys(SLOW, ("slow",))


def prepare(folder: Path) -> None:
    """Write a row that suits every command, and what else they read."""
    folder.mkdir()
    (folder / "rows.jsonl").write_text(json.dumps(ROW) + "\n")
    (folder / "reward.py").write_text(REWARD)
    (folder / "adapter").mkdir()
    (folder / "adapter/adapter_config.json").write_text("{}")
    (folder / "run").mkdir()
    (folder / "run/config.toml").write_text(
        '[model]\npretrain = "builtin"\n[data]\nprompt_data = "builtin"\ninput_key = "prompt"\nlabel_key = "answer"\n'
        '[reward]\nremote_rm_url = "rlhf_rollout.rewards.math"\n'
    )
    (folder / "run/rollouts.jsonl").write_text('{"step": 1, "num_steps": 1, "kept": true, "num_left": 0, "rest": 0}\n')
    (folder / "run/metrics.jsonl").write_text('{"step": 1, "time/step": 1.0}\n')
    checkpoints = Checkpoints(folder / "run/checkpoints")
    (checkpoints.begin(1) / "actor-0-of-1.safetensors").write_bytes(b"")
    checkpoints.commit(1, {}, [], None)


@pytest.fixture(scope="module")
def ended(tmp_path_factory) -> dict[str, tuple[int, str]]:
    """How each command ended, at a heavy import, and what the user had seen by then."""
    home = tmp_path_factory.mktemp("home")
    for case in ALL:
        prepare(home / case)
        if case in SLOW:
            (home / case / "slow.py").write_text(f"print({SLOW[case][0]!r}, flush=True)\nimport torch\n")
    (home / "sitecustomize.py").write_text(STOP)
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(home), *filter(None, sys.path)])}
    command = [sys.executable, "-c", FORKS, json.dumps(ALL)]
    done = subprocess.run(command, cwd=home, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    return {case: (status, (home / case / "said.txt").read_text()) for case, status in json.loads(done.stdout).items()}


@pytest.mark.parametrize("case", CASES)
def test_command_says_what_it_does_before_it_imports_anything_heavy(ended, case):
    status, said = ended[case]
    assert status == SAID, said


@pytest.mark.parametrize("case", SLOW)
def test_import_before_the_first_words_is_noticed(ended, case):
    words, expected = SLOW[case]
    assert ended[case] == (expected, f"{words}\nstopped at torch\n")
