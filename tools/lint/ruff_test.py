"""ruff reports no broken rule of pyproject.toml and no file that it would format differently."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    "command", [["check", "--output-format=concise"], ["format", "--check", "--diff"]], ids=["check", "format"]
)
def test_ruff_on_every_python_file_finds_nothing(command: list[str]) -> None:
    paths = [path.relative_to(ROOT) for path in sorted(ROOT.rglob("*.py"))]
    files = [str(path) for path in paths if not any(part.startswith(".") for part in path.parts)]  # .venv has thousands
    assert len(files) > 50
    ruff = [sys.executable, "-m", "ruff", *command, "--no-cache", "--force-exclude", *files]
    result = subprocess.run(
        ruff, cwd=ROOT, capture_output=True, text=True, check=False, env={**os.environ, "PYTHONPATH": ""}
    )
    assert result.returncode == 0, result.stdout + result.stderr
