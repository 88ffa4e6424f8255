"""Count single tests in Bazel's build event file and print `N passed, N failed`.

Usage: count.py EVENTS. Tests whose result comes from Bazel's cache count as well. A target without a report (it did not
build, timed out or died) counts as one failed test. Each failure is named with the first line of its error, also one
that a second attempt did not show again. Targets that took more than a third of their time limit are named: on a busy
machine they would time out.
"""

import json
import sys
import urllib.parse
import urllib.request
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterable, Iterator
from typing import NamedTuple

_LINE_LENGTH = 300


class Count(NamedTuple):
    """The tests of a run: how many passed, and for each that failed a line that names it.

    Attributes:
        passed: the tests that passed.
        failed: the failures that count.
        flaky: the failures of attempts after which another attempt passed.
    """

    passed: int
    failed: list[str]
    flaky: list[str]


def cases(report: str) -> tuple[int, list[str]]:
    """Return how many tests of a JUnit report (a file URL) passed, and a line about each that failed.

    Skipped tests count as neither.
    """
    path = urllib.request.url2pathname(urllib.parse.urlparse(report).path)
    passed = 0
    failed = []
    for case in ElementTree.parse(path).iter("testcase"):
        outcomes = {child.tag: child for child in case}
        problem = outcomes.get("failure", outcomes.get("error"))
        if problem is not None:
            name = ".".join(filter(None, (case.get("classname", "").rpartition(".")[2], case.get("name"))))
            failed.append(f"{name}: {problem.get('message', '').partition(chr(10))[0]}"[:_LINE_LENGTH])
        elif "skipped" not in outcomes:
            passed += 1
    return passed, failed


def count(events: Iterable[dict]) -> Count:
    """Count the tests of all targets. Where a target ran several times, its last attempt counts."""
    attempts: dict[tuple, list[dict]] = {}
    unbuilt: list[str] = []
    for event in events:
        identity = event["id"]
        if "testResult" in identity and "testResult" in event:
            key = identity["testResult"]
            attempts.setdefault((key["label"], key.get("run", 1), key.get("shard", 1)), []).append(event["testResult"])
        elif "targetCompleted" in identity and not event.get("completed", {}).get("success"):
            unbuilt.append(identity["targetCompleted"]["label"])
    total = Count(0, [], [])
    for (label, *_), results in attempts.items():
        *_, (passed, failed) = outcomes = [_read_result(label, result) for result in results]
        earlier = [line for _, lines in outcomes[:-1] for line in lines]
        # If the last attempt fails too, the earlier ones tell nothing new.
        total = Count(total.passed + passed, total.failed + failed, total.flaky + ([] if failed else earlier))
    tested = {key[0] for key in attempts}
    missing = [f"{label}: it did not build or did not run" for label in unbuilt if label not in tested]
    return total._replace(failed=total.failed + missing)


def _read_result(label: str, result: dict) -> tuple[int, list[str]]:
    """Return how many tests of an attempt passed, and a line about each failure."""
    files = [output["uri"] for output in result.get("testActionOutput", []) if output["name"] == "test.xml"]
    passed, failed = cases(files[0]) if files else (0, [])
    if result["status"] != "PASSED" and not failed:
        failed = [f"it ended as {result['status']}"]
    return passed, [f"{label}: {line}" for line in failed]


LIMITS_S = {"SMALL": 60, "MEDIUM": 300, "LARGE": 900, "ENORMOUS": 3600}  # Bazel's, by size


def near_limit(events: Iterable[dict]) -> list[tuple[str, float, int]]:
    """Return the targets above a third of their time limit: label, seconds of the slowest shard, limit in seconds.

    Targets nearest to their limit come first.
    """
    limits: dict[str, int] = {}
    seconds: dict[str, float] = {}
    for event in events:
        identity = event["id"]
        if "targetConfigured" in identity:
            size = event.get("configured", {}).get("testSize")
            if size in LIMITS_S:
                limits[identity["targetConfigured"]["label"]] = LIMITS_S[size]
        elif "testResult" in identity and "testResult" in event:
            label = identity["testResult"]["label"]
            took = int(event["testResult"].get("testAttemptDurationMillis", 0)) / 1000
            seconds[label] = max(took, seconds.get(label, 0.0))
    near = [
        (label, took, limits[label]) for label, took in seconds.items() if label in limits and 3 * took > limits[label]
    ]
    return sorted(near, key=lambda each: each[1] / each[2], reverse=True)


def read(path: str) -> Iterator[dict]:
    """Yield the events of a file with one JSON object per line."""
    with open(path, encoding="utf-8") as stream:
        for line in stream:
            yield json.loads(line)


def main() -> int:
    """Print slow targets, failed tests and the totals. Return the exit status, 1 if no test ran."""
    for label, seconds, limit in near_limit(read(sys.argv[1])):
        print(f"above a third of its limit: {label} {seconds:.0f} s of {limit} s")
    total = count(read(sys.argv[1]))
    for line in total.flaky:
        print(f"passed at another attempt: {line}")
    for line in total.failed:
        print(f"failed: {line}")
    print(f"{total.passed} passed, {len(total.failed)} failed")
    return 0 if total.passed + len(total.failed) else 1


if __name__ == "__main__":
    sys.exit(main())
