"""The examples name commands that `rlhf` takes and an accuracy, and the report says which seeds have reached it."""

import json
import shlex
from pathlib import Path

import pytest

from rlhf_cli.main import command_line
from runner import ROOT
from workloads.learning import agents_learning

AGENTS = {path.stem: agents_learning.read_example(path) for path in sorted(agents_learning.EXAMPLES.glob("*.py"))}


def test_examples_of_agents_are_found():
    assert {"math_retries", "openai_client", "openrlhf_math", "two_tools"} <= {name for name in AGENTS if AGENTS[name]}


@pytest.mark.parametrize("name", [name for name in AGENTS if AGENTS[name]])
def test_commands_of_an_example_are_accepted(name, monkeypatch):
    monkeypatch.chdir(ROOT)
    example = AGENTS[name]
    for text in example.commands:
        program, command, *words = shlex.split(agents_learning.with_seed(text, 3))
        if program == "python":
            assert Path(command).is_file()
            continue
        config = command_line(command).parse(words).config
        assert config.training.seed == 3
    assert config.agent.agent_func_path == f"examples/{name}.py"
    assert config.data.eval_data == "builtin" or example.commands[-1].count("--eval_data") == 1
    assert 0.5 <= example.goal <= 1.0


def test_every_seed_of_the_committed_report_is_above_the_goal_that_its_example_states():
    report = json.loads((ROOT / "tools/bench/results/agents-learning-cpu.json").read_text(encoding="utf-8"))
    assert {name: part["goal"] for name, part in report["examples"].items()} == {
        name: example.goal for name, example in AGENTS.items() if example
    }
    for name, part in report["examples"].items():
        reached = [run["accuracy_after"] for run in part["runs"]]
        assert part["goal_met"] and len(reached) == 3 and min(reached) >= part["goal"] + 0.05, name
