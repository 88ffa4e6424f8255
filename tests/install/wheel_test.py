"""Each wheel installs alone in a clean environment, and importing it is quick and loads nothing heavy."""

import json
import subprocess
import zipfile
from pathlib import Path

import pytest

from boundaries import BOUNDARIES, HEAVY, IMPORT_SECONDS, Boundary
from clean_installs import clean_environ, install, wheel_of

IMPORT = """
import json, sys, time
before = set(sys.modules)
start = time.process_time()
module = __import__(sys.argv[1])
seconds = time.process_time() - start
roots = sorted({name.partition(".")[0] for name in set(sys.modules) - before})
print(json.dumps({"file": module.__file__, "seconds": seconds, "roots": roots}))
"""
NAMES = [boundary.distribution for boundary in BOUNDARIES]


@pytest.fixture(scope="module", params=BOUNDARIES, ids=NAMES)
def boundary(request: pytest.FixtureRequest) -> Boundary:
    return request.param


@pytest.fixture(scope="module")
def installed(boundary: Boundary, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return install(boundary, tmp_path_factory.mktemp(boundary.package))


def import_in(python: Path, package: str) -> dict:
    command = [python, "-c", IMPORT, package]
    return json.loads(subprocess.run(command, env=clean_environ(), capture_output=True, text=True, check=True).stdout)


def test_wheel_installed_alone_brings_only_its_first_party_requirements(boundary: Boundary, installed: Path) -> None:
    [site] = installed.parents[1].glob("lib/python*/site-packages")
    found = {path.name for path in site.glob("rlhf_*") if path.suffix != ".dist-info"}
    expected = {name.replace("-", "_") for name in closure(boundary)} | {boundary.package}
    assert found == expected


def closure(boundary: Boundary) -> set[str]:
    """The distributions of this repository that `boundary` needs, directly or not."""
    by_name = {other.distribution: other for other in BOUNDARIES}
    return set(boundary.first_party).union(*(closure(by_name[name]) for name in boundary.first_party))


def test_import_of_installed_wheel_loads_nothing_heavy_or_forbidden(boundary: Boundary, installed: Path) -> None:
    imported = import_in(installed, boundary.package)
    assert imported["file"] is not None, f"{boundary.package} has no __init__.py"
    assert Path(imported["file"]).is_relative_to(installed.parents[1])
    assert not set(imported["roots"]) & {*HEAVY, *boundary.never}


def test_import_of_installed_wheel_takes_under_a_second(boundary: Boundary, installed: Path) -> None:
    # Processor time, and the best of three: other tests may keep the machine busy.
    assert min(import_in(installed, boundary.package)["seconds"] for _ in range(3)) < IMPORT_SECONDS


def test_wheel_holds_every_file_of_the_package(boundary: Boundary) -> None:
    source = boundary.folder / "src"
    files = {path.relative_to(source).as_posix() for path in source.rglob("*") if path.is_file()}
    names = zipfile.ZipFile(wheel_of(boundary)).namelist()
    packed = {name for name in names if not name.partition("/")[0].endswith(".dist-info")}
    assert f"{boundary.package}/py.typed" in packed
    assert {name for name in files if "__pycache__" not in name} == packed
