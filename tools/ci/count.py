"""Count single tests in Bazel's build event file and print `N passed, N failed`.

Usage: count.py EVENTS. Tests whose result comes from Bazel's cache count as well. A target without a report (it did not
build, timed out or died) counts as one failed test. Targets that took more than a third of their time limit are named:
on a busy machine they would time out.
"""

import json
import sys
import urllib.parse
import urllib.request
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterable, Iterator


def cases(report: str) -> tuple[int, int]:
    """Return how many tests of a JUnit report (a file URL) passed and failed. Skipped tests count as neither."""
    path = urllib.request.url2pathname(urllib.parse.urlparse(report).path)
    passed = failed = 0
    for case in ElementTree.parse(path).iter("testcase"):
        outcomes = {child.tag for child in case}
        if outcomes & {"failure", "error"}:
            failed += 1
        elif "skipped" not in outcomes:
            passed += 1
    return passed, failed


def count(events: Iterable[dict]) -> tuple[int, int, list[str]]:
    """Return the number of tests that passed, the number that failed, and the labels of the targets that failed."""
    passed = failed = 0
    labels: dict[str, None] = {}
    reports: dict[tuple, dict] = {}
    unbuilt: list[str] = []
    for event in events:
        identity = event["id"]
        if "testResult" in identity and "testResult" in event:
            key = identity["testResult"]
            # A later attempt of a shard replaces an earlier one.
            reports[(key["label"], key.get("run", 1), key.get("shard", 1))] = event["testResult"]
        elif "targetCompleted" in identity and not event.get("completed", {}).get("success"):
            unbuilt.append(identity["targetCompleted"]["label"])
    for (label, *_), result in reports.items():
        good = result["status"] == "PASSED"
        files = [output["uri"] for output in result.get("testActionOutput", []) if output["name"] == "test.xml"]
        ok, bad = cases(files[0]) if files else (0, 0)
        passed += ok
        failed += bad or (0 if good else 1)
        if not good:
            labels[label] = None
    tested = {key[0] for key in reports}
    for label in unbuilt:
        if label not in tested:
            failed += 1
            labels[label] = None
    return passed, failed, list(labels)


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
    """Print slow targets, failed targets and the totals. Return the exit status, 1 if no test ran."""
    for label, seconds, limit in near_limit(read(sys.argv[1])):
        print(f"above a third of its limit: {label} {seconds:.0f} s of {limit} s")
    passed, failed, labels = count(read(sys.argv[1]))
    for label in labels:
        print(f"failed: {label}")
    print(f"{passed} passed, {failed} failed")
    return 0 if passed + failed else 1


if __name__ == "__main__":
    sys.exit(main())
