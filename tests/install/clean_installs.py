"""New environments that hold one wheel of this repository and what its metadata asks for, made without a network."""

import atexit
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import zipfile
from collections import Counter
from functools import cache
from importlib.metadata import Distribution, PathDistribution, distributions
from pathlib import Path

from pip._vendor.packaging.requirements import Requirement

from boundaries import BOUNDARIES, ROOT, Boundary

LOCKED = Path(sysconfig.get_path("purelib"))
OWN = {boundary.distribution: boundary for boundary in BOUNDARIES}


def wheel_of(boundary: Boundary) -> Path:
    """The wheel of a package, which Bazel has built; in a checkout it is built here, by the same program."""
    return _wheel(boundary.distribution)


@cache
def _wheel(distribution: str) -> Path:
    if "TEST_SRCDIR" in os.environ:
        [wheel] = (ROOT / "wheels").glob(f"{distribution.replace('-', '_')}-*.whl")
        return wheel
    out = Path(tempfile.mkdtemp(prefix="wheel-"))
    atexit.register(shutil.rmtree, out)
    return build(OWN[distribution], out)


def build(boundary: Boundary, out: Path, umask: int = -1) -> Path:
    """Build the wheel of a package as Bazel does, in the folder `out`; return its path."""
    package = boundary.folder
    sources = [path for path in (package / "src").rglob("*") if path.is_file() and "__pycache__" not in str(path)]
    sources += [package / "pyproject.toml", package / "README.md"]
    sources += [ROOT / name for name in ("pyproject.toml", "LICENSE", "tools/bazel/hatch_hook.py")]
    names = [path.relative_to(ROOT) for path in sources]
    folder = package.relative_to(ROOT)
    command = [sys.executable, "tools/bazel/build_wheel.py", "--package", folder, "--out", out, *names]
    subprocess.run(command, cwd=ROOT, check=True, env=clean_environ(), umask=umask)
    [wheel] = out.glob("*.whl")
    return wheel


def clean_environ() -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "PIP_", "RAY_", "HF_"))}
    return kept | {"RLHF_ENGINE_TOKEN": "", "RLHF_REMOTE_RM_TOKEN": ""}


def name_of(text: str) -> str:
    return re.sub(r"[-_.]+", "-", text).lower()


@cache
def locked() -> dict[str, Distribution]:
    """The distributions of the locked environment, by name."""
    return {name_of(found.name): found for found in distributions(path=[str(LOCKED)])}


@cache
def owners() -> Counter[str]:
    """For each name in the locked environment's folder, how many distributions have files in it."""
    return Counter(top for found in locked().values() for top in {file.parts[0] for file in found.files or ()})


def wanted(name: str, extras: frozenset[str], seen: set[tuple[str, frozenset[str]]]) -> set[str]:
    """The names of third-party distributions that a distribution asks for with some extras, directly or not."""
    if (name, extras) in seen:
        return set()
    seen.add((name, extras))
    if name in OWN:
        parts = zipfile.Path(_wheel(name)).iterdir()
        [found] = [PathDistribution(part) for part in parts if part.name.endswith(".dist-info")]
    else:
        found = locked()[name]
    names = set() if name in OWN else {name}
    for requirement in map(Requirement, found.requires or ()):
        marker = requirement.marker
        if marker is None or any(marker.evaluate({"extra": extra}) for extra in ("", *extras)):
            names |= wanted(name_of(requirement.name), frozenset(requirement.extras), seen)
    return names


def link(names: set[str], site: Path) -> None:
    """Put distributions of the locked environment into another one, by links to their files and to nothing else."""
    for name in names:
        for top in {file.parts[0] for file in locked()[name].files or ()} - {"..", "__pycache__"}:
            if owners()[top] == 1:
                (site / top).symlink_to(LOCKED / top)
                continue
            for file in locked()[name].files or ():  # a folder that several distributions share
                if file.parts[0] == top and (LOCKED / file).exists():
                    (site / file).parent.mkdir(parents=True, exist_ok=True)
                    if not (site / file).exists():
                        (site / file).symlink_to(LOCKED / file)


def install(boundary: Boundary, environment: Path, *extras: str) -> Path:
    """The interpreter of a new environment in which pip installed one wheel and what its metadata asks for.

    First-party requirements come from the other wheels. The third-party ones are linked from the locked environment:
    those that the metadata asks for, directly or not, and no other. Nothing is downloaded, yet pip still compares every
    version, and fails if one is missing.
    """
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", environment], check=True, env=clean_environ())
    [site] = environment.glob("lib/python*/site-packages")
    link(wanted(boundary.distribution, frozenset(extras), set()), site)
    python = environment / "bin" / "python"
    command = [sys.executable, "-m", "pip", "--python", python, "install", "--no-index", "--quiet"]
    folders = [f"--find-links={wheel_of(other).parent}" for other in BOUNDARIES]
    target = f"{wheel_of(boundary)}[{','.join(extras)}]" if extras else wheel_of(boundary)
    result = subprocess.run(
        [*command, *folders, target], env=clean_environ(), capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr
    return python
