"""Tests of the count that closes a CI run."""

from pathlib import Path

from count import count

REPORT = """<testsuites><testsuite>
<testcase name="a"/>
<testcase classname="x.tests.b_test" name="b[1]"><failure message="assert 2 == 3&#10; where">trace</failure></testcase>
<testcase name="c"><skipped/></testcase><testcase name="d"/>
</testsuite></testsuites>"""


def result(label: str, status: str, report: Path | None = None, *, attempt: int = 1) -> dict:
    """A test result as Bazel's build event file has it."""
    outputs = [{"name": "test.xml", "uri": report.as_uri()}] if report else []
    identity = {"testResult": {"label": label, "run": 1, "shard": 1, "attempt": attempt}}
    return {"id": identity, "testResult": {"status": status, "testActionOutput": outputs}}


def completed(label: str, *, success: bool) -> dict:
    return {"id": {"targetCompleted": {"label": label}}, "completed": {"success": True} if success else {}}


def test_count_of_a_report_leaves_out_skipped_tests_and_names_failures(tmp_path: Path) -> None:
    report = tmp_path / "test.xml"
    report.write_text(REPORT)
    events = [completed("//a:x", success=True), result("//a:x", "FAILED", report)]
    # a and d passed, b failed, c was skipped
    assert count(events) == (2, ["//a:x: b_test.b[1]: assert 2 == 3"], [])


def test_count_takes_the_last_attempt_and_names_what_an_earlier_one_failed(tmp_path: Path) -> None:
    first, second = tmp_path / "first.xml", tmp_path / "test.xml"
    first.write_text(REPORT)
    second.write_text("<testsuites><testsuite><testcase name='a'/></testsuite></testsuites>")
    events = [result("//a:x", "FAILED", first), result("//a:x", "PASSED", second, attempt=2)]
    assert count(events) == (1, [], ["//a:x: b_test.b[1]: assert 2 == 3"])
    events += [result("//a:y", "TIMEOUT"), result("//a:y", "FAILED", first, attempt=2)]
    assert count(events) == (3, ["//a:y: b_test.b[1]: assert 2 == 3"], ["//a:x: b_test.b[1]: assert 2 == 3"])


def test_count_of_targets_without_report_is_one_failure_each() -> None:
    events = [completed("//a:unbuilt", success=False), result("//a:late", "TIMEOUT")]
    failed = ["//a:late: it ended as TIMEOUT", "//a:unbuilt: it did not build or did not run"]
    assert count(events) == (0, failed, [])
