"""Runs from Python: options, functions and rows reach the command, and its errors come back."""

import json
import re
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from importlib import import_module
from pathlib import Path
from threading import Lock
from typing import Any

import pytest

from rlhf_cli import api
from rlhf_cli.commands.ppo import COMMAND_LINE
from rlhf_data.errors import ConfigError, RlhfError

# A function that needs another name of its file, which lies beside the user's script, and a file beside both.
BESIDE = """
import number_beside

FACTOR = 2

def scaled(queries, prompts, labels, power=1):
    return {"rewards": [FACTOR * number_beside.read(label) ** power for label in labels]}
"""
NUMBER = """
from threading import Lock

LOCK = Lock()  # which no pickle can hold

def read(label):
    with LOCK:
        return float(label)
"""


class Scaler:
    def __init__(self, factor: float) -> None:
        self.factor = factor

    def __call__(self, queries, prompts, labels):
        return {"rewards": [self.factor * float(label) for label in labels]}


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[str], None]:
    """Return a function that puts a shell script in the place of the interpreter that runs commands."""

    def put(script: str) -> None:
        program = tmp_path / "python"
        program.write_text(f"#!/bin/sh\n{script}")
        program.chmod(0o755)
        monkeypatch.setattr(sys, "executable", str(program))

    return put


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[list[str]]:
    """The commands that were started, of which each leaves two steps of a run in `tmp_path`/run."""
    words: list[list[str]] = []

    def start(command: list[str]) -> None:
        words.append(command)
        (tmp_path / "run").mkdir(exist_ok=True)
        (tmp_path / "run/metrics.jsonl").write_text(
            '{"step": 1, "rollout/reward": 0.25, "kl/reference": 0.5}\n{"step": 2, "rollout/reward": 0.75}\n'
        )

    monkeypatch.setattr(api, "_start", start)
    return words


def test_options_are_those_of_the_command_line_and_the_result_is_what_the_folder_says(
    started: list[list[str]], tmp_path: Path
) -> None:
    run = api.ppo(
        preset="grpo",
        train_steps=3,
        adam_betas=(0.5, 0.75),
        actor_learning_rate=1e-5,
        packing_samples=True,
        record=False,
        eval_data=None,
        save_path=tmp_path / "run",
    )
    [(command, *words)] = started
    flags = "--preset grpo --train_steps 3 --adam_betas 0.5 0.75 --actor_learning_rate 1e-5 --packing_samples --record"
    typed = [*flags.split(), "false", "--eval_data", "None", "--save_path", str(tmp_path / "run")]
    assert command == "ppo" and COMMAND_LINE.parse(words) == COMMAND_LINE.parse(typed)
    assert run.folder == tmp_path / "run"
    assert run.curves["rollout/reward"] == [(1, 0.25), (2, 0.75)]
    assert run.metrics == {"rollout/reward": 0.75, "kl/reference": 0.5}


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        ("file", 6.0),
        ("part of a file", 18.0),
        (Scaler(0.5), 1.5),
        (lambda queries, prompts, labels: {"rewards": [len(label) for label in labels]}, 1),
    ],
)
def test_function_and_rows_are_in_the_folder_of_the_run_for_any_process(
    started: list[list[str]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    function: Any,
    expected: float,
) -> None:
    (tmp_path / "scripts").mkdir()
    (tmp_path / "scripts/file_beside.py").write_text(BESIDE)
    (tmp_path / "scripts/number_beside.py").write_text(NUMBER)
    monkeypatch.syspath_prepend(tmp_path / "scripts")
    for name in ("file_beside", "number_beside"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    if isinstance(function, str):
        scaled = import_module("file_beside").scaled
        function = scaled if function == "file" else partial(scaled, power=2)
    rows = [{"question": "1 + 2", "answer": "3"}, {"question": "é", "answer": None}]
    api.ppo(pretrain="builtin", prompt_data=rows, remote_rm_url=function, save_path=str(tmp_path / "run"))
    config = COMMAND_LINE.parse(started[0][1:]).config
    read = [json.loads(line) for line in Path(config.data.prompt_data).read_text("utf-8").splitlines()]
    assert read == rows
    code = f"import runpy; print(runpy.run_path({config.reward.remote_rm_url!r})['reward_func'](['q'], ['p'], ['3']))"
    said = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert said.stdout == f"{{'rewards': [{expected}]}}\n"
    assert {path.parent for path in map(Path, (config.data.prompt_data, config.reward.remote_rm_url))} == {
        tmp_path / "run/inputs"
    }


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"trian_steps": 3}, r"--trian_steps.*hint: .*--train_steps"),
        ({"train_steps": "many"}, r"--train_steps is many; it must be a whole number"),
        (
            {"agent_func_path": print},
            r"`agent_func_path` is a value of type builtin_function_or_method\n\nhint: a function may be given",
        ),
        ({"remote_rm_url": Scaler(Lock())}, r"`remote_rm_url` cannot be written to a file: .*hint: name a file"),
        ({"pretrain": "builtin", "prompt_data": [{"x": {1}}], "remote_rm_url": "r.py"}, r"`prompt_data` cannot be"),
    ],
)
def test_bad_options_are_errors_before_anything_starts(
    started: list[list[str]], tmp_path: Path, options: dict, message: str
) -> None:
    with pytest.raises(ConfigError, match=re.compile(message, re.DOTALL)):
        api.ppo(save_path=tmp_path / "run", **options)
    assert not started
    api.ppo(train_steps=1, save_path=tmp_path / "run")  # the folder can still be used


@pytest.mark.parametrize(("status", "kind"), [(2, ConfigError), (1, RlhfError)])
def test_error_of_the_command_is_raised_with_its_hint(
    stand_in: Callable[[str], None], tmp_path: Path, capfd: pytest.CaptureFixture[str], status: int, kind: type
) -> None:
    said = "step 1\\nnotice: error: none\\nerror: no room, error: 28\\n\\nhint: make some\\n"
    stand_in(f"echo $3\nprintf '{said}' >&2\nexit {status}\n")
    with pytest.raises(RlhfError, match=r"^no room, error: 28\n\nhint: make some$") as caught:
        api.sft(pretrain="builtin", dataset="rows.jsonl", save_path=tmp_path / "run")
    assert type(caught.value) is kind
    assert capfd.readouterr().out.startswith("sft\nstep 1\n")


def test_interrupt_is_passed_on_once_and_the_command_ends_in_its_own_way(
    stand_in: Callable[[str], None], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    stand_in("trap 'echo saved; exit 130' INT\necho ready\nwhile :; do sleep 0.1; done\n")
    said = []

    def interrupted_print(line: str, **options: Any) -> None:
        said.append(line)
        if line == "ready\n":
            raise KeyboardInterrupt

    monkeypatch.setattr(api, "print", interrupted_print, raising=False)
    with pytest.raises(KeyboardInterrupt):
        api.ppo(save_path=tmp_path / "run")
    assert said == ["ready\n", "saved\n"]
