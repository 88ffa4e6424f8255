"""The commands in the Markdown pages, as a shell expands them: loops, variables and quotes included."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
PATTERNS = ("*.md", "docs/**/*.md", "kernels/README.md", "packages/*/README.md")
# Programs that the pages name. Stand-ins of these names write down how they are called.
PROGRAMS = ("bazel", "pip", "pytest", "python", "python3", "ray", "rlhf", "rlhf-data", "rlhf-rollout", "uv")
PATHS = ("tools/bazelw", ".venv/bin/rlhf", ".venv/bin/python")

_BLOCK = re.compile(r"^```(?P<language>\w*)\n(?P<text>.*?)^```$", re.M | re.S)
# Writes down how it was called. A shell starts it, by the path of this Python: `python3` is a stand-in itself.
_STAND_IN = """#!/bin/sh
exec "{python}" -c '
import json, os, sys
with open(os.environ["CALLS"], "a") as file:
    file.write(json.dumps(sys.argv[1:]) + "\\n")
if sys.argv[1] == "pip":
    print("wheels")
' {name} "$@"
"""


class Block(NamedTuple):
    """A fenced block of a page."""

    page: str
    line: int
    language: str
    text: str


def blocks(language: str) -> Iterator[Block]:
    """Yield the fenced blocks of all pages in one language."""
    for page in sorted({path for pattern in PATTERNS for path in ROOT.glob(pattern)}):
        text = page.read_text(encoding="utf-8")
        for match in _BLOCK.finditer(text):
            if match["language"] == language:
                line = text.count("\n", 0, match.start()) + 1
                yield Block(str(page.relative_to(ROOT)), line, language, match["text"])


def script(page: str) -> str:
    """Return all shell commands of a page as one script."""
    return "\n".join(block.text for block in blocks("sh") if block.page == page)


def calls(page: str, folder: Path) -> list[list[str]]:
    """Return the arguments of every program call of a page, by running its commands with stand-ins for the programs.

    Everything else in the commands (sed, echo, loops) runs for real, in `folder`.
    """
    log = folder / "calls.jsonl"
    log.touch()
    for path in (*(f"bin/{name}" for name in PROGRAMS), *PATHS):
        stand_in = folder / path
        stand_in.parent.mkdir(parents=True, exist_ok=True)
        name = path.removeprefix("bin/").removeprefix(".venv/bin/")
        stand_in.write_text(_STAND_IN.format(python=sys.executable, name=name))
        stand_in.chmod(0o755)
    environment = os.environ | {"PATH": f"{folder / 'bin'}:{os.environ['PATH']}", "CALLS": str(log)}
    command = ["bash", "-euo", "pipefail", "-c", script(page)]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, f"{page}: {done.stderr}"
    return [json.loads(line) for line in log.read_text(encoding="utf-8").splitlines()]
