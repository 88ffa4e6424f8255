"""The examples name commands that `rlhf` takes and an accuracy, and the report says which seeds have reached it."""

import json
import shlex
from pathlib import Path

import pytest

from rlhf_cli.main import command_line
from runner import ROOT
from workloads.learning import agents_learning

AGENTS = {path.stem: agents_learning.read_example(path) for path in sorted(agents_learning.EXAMPLES.glob("*.py"))}
FAKE = """
import json, os, pathlib, sys
words = sys.argv[1:]
seed = int(words[words.index("--seed") + 1])
folder = pathlib.Path(words[words.index("--save_path") + 1])
folder.mkdir(parents=True)
if seed == 7:
    sys.exit(f"no memory on {len(os.sched_getaffinity(0))} core")
gaps = {"time/step": 2.0, "mismatch/logprob_gap_max": seed / 100}
lines = [{"step": step, "rollout/accuracy": step / 10, **gaps} for step in (1, 2)]
lines.append({"time/total": 9.0, "eval/accuracy_before": 0.1, "eval/accuracy_after": 0.4 + seed / 10})
folder.joinpath("metrics.jsonl").write_text("".join(json.dumps(line) + chr(10) for line in lines))
"""
DOCSTRING = '''"""An agent.

    python examples/game.py > rows.jsonl
    rlhf ppo --prompt_data rows.jsonl \\\\
        --max_steps 3

It reaches a held-out accuracy
of at least 0.60 with each seed.
"""
import pathlib
print(pathlib.Path("examples").is_dir())
'''


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


def test_report_says_which_examples_have_reached_their_goals(bench, tmp_path, monkeypatch):
    examples = tmp_path / "examples"
    examples.mkdir()
    (examples / "game.py").write_text(DOCSTRING, encoding="utf-8")
    (examples / "other.py").write_text('"""Without commands."""', encoding="utf-8")
    fake = tmp_path / "fake.py"
    fake.write_text(FAKE, encoding="utf-8")
    monkeypatch.setattr(agents_learning, "EXAMPLES", examples)
    monkeypatch.setattr(agents_learning, "PROGRAMS", {"python": "", "rlhf": str(fake)})

    def report(*flags):
        status, found = bench("agents_learning", "--jobs", "2", *flags)
        [game] = found["examples"].values()
        return game, status

    game, code = report("--seeds", "3", "4")
    assert (game["goal"], game["goal_met"], code) == (0.6, True, 0)
    assert (game["mean_before"], game["worst_after"], game["logprob_gap_max"]) == (0.1, 0.7, 0.04)
    assert [result["accuracy_by_step"] for result in game["runs"]] == [{"1": 0.1, "2": 0.2}] * 2
    last = "rlhf ppo --prompt_data rows.jsonl --max_steps 3 --seed 4 --save_path out"
    assert game["runs"][1]["commands"] == ["python examples/game.py > rows.jsonl", last]

    game, code = report("--seeds", "1", "4")
    assert (game["worst_after"], game["goal_met"], code) == (0.5, False, 1)
    game, code = report("--seeds", "4", "7", "--jobs", "1", "--cores_per_job", "1")
    assert (game["worst_after"], game["goal_met"], code) == (0.8, False, 1)
    assert "no memory on 1 core" in game["runs"][1]["error"]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--jobs", "2", "--cores_per_job", "2"], "2 jobs of 2 cores need 4 cores, there are 3"),
        (["--only", "chess"], "there is no example chess with a goal; there are guess_number"),
    ],
)
def test_impossible_flags_are_refused(bench, monkeypatch, capsys, flags, message):
    monkeypatch.setattr(agents_learning.os, "sched_getaffinity", lambda pid: {0, 1, 2})
    with pytest.raises(SystemExit):
        bench("agents_learning", *flags)
    assert message in capsys.readouterr().err
