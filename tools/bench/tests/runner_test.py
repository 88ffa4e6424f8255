"""What benchmarks share: one command, flags from defaults, and reports that say how they were made."""

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

import run
import runner


def test_flags_have_the_types_of_their_defaults(capsys):
    defaults = {"steps": 10, "seeds": [1], "cost": (float, "in seconds"), "task": Path, "fast": False, "only": ""}
    defaults["shape"] = {"choices": ["tiny", "large"]}
    parser = runner.arguments("What it does.", **defaults, flags=runner.MORE_FLAGS)
    found = vars(parser.parse_args(["--out", "x.json", "--seeds", "3", "4", "--cost", "2", "--shape", "large"]))
    given = {"seeds": [3, 4], "cost": 2.0, "shape": "large", "out": Path("x.json")}
    assert found == {"steps": 10, "task": None, "fast": False, "only": "", "flags": []} | given
    found = vars(parser.parse_args(["--steps", "2", "--task", "here", "--fast", "--out", "y.json", "--", "--bf16"]))
    given = {"steps": 2, "task": Path("here"), "fast": True, "out": Path("y.json"), "flags": ["--bf16"]}
    assert found == {"seeds": [1], "cost": None, "only": "", "shape": None} | given
    with pytest.raises(SystemExit):
        parser.parse_args(["--steps", "two", "--out", "x.json"])
    assert "invalid int value: 'two'" in capsys.readouterr().err


def test_report_has_command_options_and_what_was_measured(tmp_path, monkeypatch):
    out = tmp_path / "x.json"
    monkeypatch.setattr(
        sys, "argv", [str(runner.ROOT / "tools/bench/run.py"), "learning", "--task", "t", "--out", str(out)]
    )
    options = runner.arguments(None, task=Path, steps=3).parse_args(sys.argv[2:])
    runner.write(options, "learning", {"steps": [0.5]})
    report = json.loads(out.read_text())
    assert report["command"] == "python tools/bench/run.py learning --task t --out x.json"
    assert (report["benchmark"], report["options"], report["steps"]) == ("learning", {"task": "t", "steps": 3}, [0.5])
    assert report["environment"]["num_cpus"] >= 1


def test_metrics_are_those_of_steps_and_the_last_of_the_run(tmp_path):
    gaps = [{"mismatch/logprob_gap_max": 0.25}, {}]
    steps = [{"time/step": seconds} | gap for seconds, gap in zip((3.0, 1.0), gaps, strict=True)]
    final = {"time/total": 9.0, "time/startup": 4.0, "eval/accuracy_before": 0.1, "eval/accuracy_after": 0.8}
    lines = [{"eval/accuracy": 0.1}, *steps, final, {"note": 1}]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    found = runner.read_metrics(tmp_path)
    assert (found.lines, found.steps, found.final) == (lines, lines[1:3], lines[3])
    costs = {"seconds_total": 9.0, "seconds_startup": 4.0, "seconds_a_step": 2.0, "logprob_gap_max": 0.25}
    assert found.accuracies() == {"accuracy_before": 0.1, "accuracy_after": 0.8, **costs}


def test_measured_run_has_flags_folder_and_a_cluster_of_its_own(tmp_path, monkeypatch):
    (tmp_path / "metrics.jsonl").write_text('{"time/step": 1.0}\n{"time/total": 2.0}\n')
    calls = []
    monkeypatch.setattr(subprocess, "run", lambda command, **options: calls.append((command, options)))
    monkeypatch.setenv("HERE", "1")
    assert runner.run_ppo(["--seed", "1"], tmp_path).final == {"time/total": 2.0}
    runner.run_ppo([], tmp_path, environ={"THERE": "2"}, timeout_s=3.0)
    (command, first), (_, second) = calls
    assert command[1:] == ["-m", "rlhf_cli.main", "ppo", "--seed", "1", "--save_path", str(tmp_path)]
    assert first["env"]["HERE"] == "1" and first["env"]["RAY_ADDRESS"] == "local"
    assert second["env"] == {"THERE": "2", "RAY_ADDRESS": "local"}
    assert (second["check"], second["timeout"], second["stdout"]) == (True, 3.0, sys.stderr)


def rank(number, folder, pipe):
    (folder / str(number)).touch()
    if pipe is not None:
        while len(list(folder.iterdir())) < 2:
            time.sleep(0.01)
        pipe.send(number)
        pipe.send([path.name for path in sorted(folder.iterdir())])


def test_first_rank_sends_and_all_ranks_run(tmp_path):
    assert runner.from_first_rank(rank, 2, 2, tmp_path) == [0, ["0", "1"]]
    with pytest.raises(EOFError):
        runner.from_first_rank(rank, 1, 3, tmp_path)


def test_every_benchmark_is_listed_with_what_it_measures(capsys):
    assert run.main([]) == 0 and run.main(["nothing"]) == 2
    listed = capsys.readouterr().out
    assert {"learning", "online", "kills", "async_sim"} < run.workloads().keys()
    assert "gpu_time" not in listed  # a part of another one
    assert "    busy              How much slower `rlhf ppo` gets" in listed


@pytest.mark.parametrize("name", run.workloads())
def test_help_of_a_benchmark_says_how_to_run_it(name, capsys):
    with pytest.raises(SystemExit) as end:
        run.main([name, "--help"])
    assert end.value.code == 0
    assert f"    python tools/bench/run.py {name} " in capsys.readouterr().out


def test_report_is_written_as_it_grows_and_a_missed_goal_is_the_status(bench, monkeypatch, capsys):
    written = []
    monkeypatch.setattr(run, "write", lambda options, name, report: written.append((options.seeds, name, dict(report))))
    module = run.importlib.import_module("workloads.learning.learning")
    reports = [{"table": [1]}, {"table": [1, 2], "missed": ["x is 2"]}]
    monkeypatch.setattr(module, "measure", lambda options, folder: (report for report in reports if folder.is_dir()))
    assert bench("learning", "--seeds", "7") == (1, None)
    assert written == [([7], "learning", report) for report in reports]
    assert "MISSED x is 2" in capsys.readouterr().out
    reports[1]["missed"] = []
    assert bench("learning")[0] == 0
