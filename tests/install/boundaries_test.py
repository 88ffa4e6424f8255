"""The packages' code, pyproject.toml and BUILD.bazel keep to boundaries.toml and to each other."""

import ast
import re
import tomllib
from pathlib import Path

import pytest

from boundaries import BOUNDARIES, Boundary

each_package = pytest.mark.parametrize("boundary", BOUNDARIES, ids=lambda boundary: boundary.distribution)


def imported_roots(path: Path) -> set[str]:
    """The top-level names that a file imports, at any depth of its code."""
    roots = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"), str(path))):
        if isinstance(node, ast.Import):
            roots |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            roots.add(node.module.partition(".")[0])
    return roots


def project(boundary: Boundary) -> dict:
    return tomllib.loads((boundary.folder / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def distribution(requirement: str) -> str:
    return re.match(r"[A-Za-z0-9._-]+", requirement).group().lower()


def bazel_dependencies(build_file: Path) -> set[str]:
    """The distributions that `deps` of the file's `python_package` names."""
    for node in ast.walk(ast.parse(build_file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "python_package":
            [labels] = [ast.literal_eval(keyword.value) for keyword in node.keywords if keyword.arg == "deps"]
            return {re.split(r"//|:", label)[-1].replace("_", "-") for label in labels}
    raise AssertionError(f"{build_file} has no python_package")


@each_package
def test_code_imports_nothing_forbidden(boundary: Boundary) -> None:
    files = sorted((boundary.folder / "src").rglob("*.py"))
    assert files
    crossings = {str(path): imported_roots(path) & set(boundary.never) for path in files}
    assert {path: roots for path, roots in crossings.items() if roots} == {}


@each_package
def test_metadata_names_the_first_party_packages_of_the_table(boundary: Boundary) -> None:
    metadata = project(boundary)
    needed = {distribution(text) for text in metadata["dependencies"]}
    assert metadata["name"] == boundary.distribution
    assert {name for name in needed if name.startswith("rlhf-")} == set(boundary.first_party)
    optional = {distribution(text) for texts in metadata.get("optional-dependencies", {}).values() for text in texts}
    assert {name for name in optional if name.startswith("rlhf-")} == set(boundary.extras)


@each_package
def test_bazel_and_metadata_name_the_same_dependencies(boundary: Boundary) -> None:
    needed = set()
    by_name = {other.distribution: other for other in BOUNDARIES}
    for requirement in project(boundary)["dependencies"]:
        name = distribution(requirement)
        needed.add(name)
        for extra in (part for group in re.findall(r"\[(.*?)\]", requirement) for part in group.split(",")):
            if name in by_name:
                needed |= {distribution(text) for text in project(by_name[name])["optional-dependencies"][extra]}
    assert bazel_dependencies(boundary.folder / "BUILD.bazel") == needed
