"""Every command can be started by the launcher that Bazel builds for it, and by its module elsewhere."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from rlhf_cli.main import COMMANDS
from rlhf_cli.openrlhf.modules import COMMANDS as MODULES

LAUNCHERS = Path(__file__).parents[2] / "packages/rlhf-cli"
TIMEOUT_S = 60


def run(name: str, module: str, *words: str) -> subprocess.CompletedProcess[str]:
    """Run the launcher called `name`; in a checkout, which has none, the module that it runs."""
    # Under Bazel a launcher that the test's data lacks must fail, and not fall back to the module.
    command = [str(LAUNCHERS / name)] if "TEST_SRCDIR" in os.environ else [sys.executable, "-m", module]
    return subprocess.run([*command, *words], capture_output=True, text=True, timeout=TIMEOUT_S, check=False)


@pytest.mark.parametrize("name", COMMANDS)
def test_command_shows_its_help(name):
    # `bazel run` adds the command's word (`args` of the target), and a launcher started directly does not have it.
    module, words = ("rlhf_cli.commands.ppo", []) if name == "ppo" else ("rlhf_cli.main", [name])
    done = run(name, module, *words, "--help")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith(f"usage: rlhf {name} ")


@pytest.mark.parametrize("name", [name for name in MODULES if name not in COMMANDS])
def test_openrlhf_module_shows_the_help_of_its_command(name):
    done = run(name, f"rlhf_cli.{name}", "--help")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith(f"usage: rlhf {MODULES[name]} ")


def test_rlhf_shows_its_version():
    done = run("rlhf", "rlhf_cli.main", "--version")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("rlhf-cli")
