"""Write what each part of a package imports into its units.bzl: a change reruns the tests of what depends on it.

A unit is a folder of a package's sources, or a file beside its folders. Units that import each other are one.
"""

import ast
import re
import sys
from argparse import ArgumentParser
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = "tools/bazel/units.py"
PACKAGES = ("rlhf-data", "rlhf-models", "rlhf-rollout", "rlhf-train", "rlhf-cli")  # the lowest first
SUPPORT = "tests/support"
_MODULE = re.compile(r"\brlhf_\w+(?:\.\w+)+\.?")  # in a string, such as what a new process is to run
_QUOTED = re.compile(r"`[^`]*(?:`|$)")  # in a message to people


@dataclass(frozen=True, order=True)
class Unit:
    """A part of a package: a folder of its sources, by its path, or a file beside the folders."""

    package: str
    path: str


class Sources:
    """The modules of all packages and of the tests' support, and what they import.

    Args:
        root: of the repository.
        packages: names of folders in `packages`, the lowest first.
    """

    def __init__(self, root: Path, packages: Iterable[str] = PACKAGES) -> None:
        self.root = root
        self.packages = tuple(packages)
        self.files: dict[str, Path] = {}  # by module
        self.units: dict[str, Unit] = {}  # by module
        for package in self.packages:
            source = self.source(package)
            for file in sorted(source.rglob("*.py")):
                parts = file.relative_to(source).with_suffix("").parts
                folder = [part for part in parts if part != "__init__"]
                module = ".".join((source.name, *folder))
                self.files[module] = file
                self.units[module] = Unit(package, "/".join(parts[:-1]) or parts[0])
        self._imports: dict[Path, frozenset[str]] = {}
        self.support = {file.stem: file for file in sorted((root / SUPPORT).glob("*.py"))}

    def source(self, package: str) -> Path:
        return self.root / "packages" / package / "src" / package.replace("-", "_")

    def is_folder(self, unit: Unit) -> bool:
        return (self.source(unit.package) / unit.path).is_dir()

    def is_root(self, module: str) -> bool:
        """Return whether a module is a whole package, which any import from it runs and which imports on demand."""
        return "." not in module

    def needed(self, module: str) -> list[str]:
        """Return the modules that Python runs for an import of `module`: those of its folders, but not the package."""
        parts = module.split(".")
        return [name for count in range(2, len(parts) + 1) if (name := ".".join(parts[:count])) in self.files]

    def imports(self, file: Path) -> frozenset[str]:
        """Return the modules that a file imports or names in a string, and the support modules by their names.

        A package stands for names that are imported from it.
        """
        if file not in self._imports:
            self._imports[file] = frozenset(self._read(file))
        return self._imports[file]

    def _read(self, file: Path) -> Iterator[str]:
        tree = ast.parse(file.read_text(encoding="utf-8"))
        prose = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
        found: set[str] = set()
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and node.module:
                names = [f"{node.module}.{alias.name}" for alias in node.names]
                found.update(name if name in self.files else node.module for name in names)
            elif isinstance(node, ast.Import):
                found.update(alias.name for alias in node.names)
            elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in prose:
                for text in _MODULE.findall(_QUOTED.sub("", node.value)):
                    found.update(self._named(text))
        return (name for name in found if name in self.files or name in self.support)

    def _named(self, text: str) -> Iterator[str]:
        """Return the module that a string begins with; all modules of a folder if a name in it is still to come."""
        if text.endswith(".") and not self.is_root(text[:-1]):
            yield from (name for name in self.files if name.startswith(text))
        while text not in self.files and "." in text:
            text = text.rpartition(".")[0]
        if not self.is_root(text):
            yield text

    def product(self) -> tuple[dict[Unit, set[Unit]], dict[Unit, set[str]]]:
        """Return what each unit imports: other units, and whole packages."""
        units: dict[Unit, set[Unit]] = defaultdict(set)
        whole: dict[Unit, set[str]] = defaultdict(set)
        for module, file in self.files.items():
            unit = self.units[module]
            units[unit] |= set()
            if self.is_root(module):
                continue
            for name in (module, *self.imports(file)):
                package = self.units[name].package
                if self.packages.index(package) > self.packages.index(unit.package):
                    continue  # a text that names what stands above
                if self.is_root(name) and package != unit.package:
                    whole[unit].add(package)
                units[unit] |= {self.units[needed] for needed in self.needed(name)} - {unit}
        return units, whole

    def tests(self, package: str) -> dict[str, set[Unit | str]]:
        """Return for each test of a package, by its path, what it imports: units, whole packages, support modules.

        Packages above it are left out: support modules have parts for them, which its tests do not use.
        """
        folder = self.root / "packages" / package / "tests"
        above = self.packages[self.packages.index(package) + 1 :]
        found = {}
        for file in sorted(folder.rglob("*_test.py")):
            entries = self._reached(file)
            own = {one for one in entries if (one.package if isinstance(one, Unit) else one) not in above}
            found[file.relative_to(folder).as_posix()] = own
        return found

    def _reached(self, test: Path) -> set[Unit | str]:
        """Return what a test imports, and what the support modules and conftest.py that it uses import for it."""
        found: set[Unit | str] = set()
        pending = [test, *(file for folder in test.parents[:2] for file in folder.glob("conftest.py"))]
        seen: set[str] = set()
        while pending:
            for name in self.imports(pending.pop()) - seen:
                seen.add(name)
                if name in self.support:
                    found.add(f"{SUPPORT}/{name}")
                    pending.append(self.support[name])
                elif self.is_root(name):
                    found.add(self.units[name].package)
                else:
                    found.update(self.units[needed] for needed in self.needed(name))
        return found


def merged(graph: Mapping[Unit, set[Unit]]) -> dict[Unit, Unit]:
    """Return for each unit the one that stands for it: the first of those that import each other, else itself."""
    stands = {unit: unit for unit in graph}
    while True:
        joined = {unit: set() for unit in stands.values()}
        for unit, imported in graph.items():
            joined[stands[unit]] |= {stands[other] for other in imported} - {stands[unit]}
        try:
            TopologicalSorter(joined).prepare()
        except CycleError as error:
            cycle = set(error.args[1])
            folders = sorted(unit for unit in cycle if "/" not in unit.path)
            first = (folders or sorted(cycle))[0]
            stands = {unit: first if other in cycle else other for unit, other in stands.items()}
        else:
            return stands


def text_of(sources: Sources, package: str) -> str:
    """Return the text of a package's units.bzl."""
    graph, whole = sources.product()
    stands = merged(graph)
    lines = [f'"""Written by {SCRIPT}: what the parts of this package, and its tests, import."""', "", "UNITS = {"]
    for unit in sorted({other for other in stands.values() if other.package == package}):
        members = sorted(member for member, other in stands.items() if other == unit)
        imported = {stands[other] for member in members for other in graph[member]} - {unit}
        packages = {name for member in members for name in whole[member]}
        parts = [f'"{member.path}{"/" if sources.is_folder(member) else ""}"' for member in members]
        lines.append(f'    "{unit.path}": ([{", ".join(parts)}], [{_words({*imported, *packages})}]),')
    lines += ["}", "", "TESTS = {"]
    for test, imported in sources.tests(package).items():
        stand = {stands[entry] if isinstance(entry, Unit) else entry for entry in imported}
        lines.append(f'    "{test}": [{_words(stand)}],')
    return "\n".join([*lines, "}"]) + "\n"


def _words(entries: Iterable[Unit | str]) -> str:
    words = (f"{entry.package}/{entry.path}" if isinstance(entry, Unit) else entry for entry in entries)
    return ", ".join(f'"{word}"' for word in sorted(words))


def main() -> int:
    parser = ArgumentParser(description="Write what the parts of each package import into its units.bzl.")
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 if a file differs")
    is_check = parser.parse_args().check
    sources = Sources(ROOT)
    status = 0
    for package in PACKAGES:
        path = ROOT / "packages" / package / "units.bzl"
        text = text_of(sources, package)
        if is_check:
            status |= int(not path.exists() or path.read_text(encoding="utf-8") != text)
        else:
            path.write_text(text, encoding="utf-8")
    return status


if __name__ == "__main__":
    sys.exit(main())
