"""Reads boundaries.toml: what each package may depend on and must never import."""

import tomllib
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parents[1]


@dataclass(frozen=True)
class Boundary:
    """The walls of one distribution.

    Attributes:
        distribution: its name, as pip spells it.
        package: its import name.
        first_party: distributions of this repository that it needs.
        extras: distributions of this repository that one of its optional dependencies brings.
        never: import names that its code must not contain.
        layers: rows of folders and files, the lowest first; each imports from lower rows only. "." is all the rest.
    """

    distribution: str
    package: str
    first_party: tuple[str, ...]
    never: tuple[str, ...]
    extras: tuple[str, ...] = ()
    layers: tuple[list[str], ...] = ()

    @property
    def folder(self) -> Path:
        """The package's folder in the repository."""
        return ROOT / ("kernels" if self.distribution == "rlhf-kernels" else f"packages/{self.distribution}")


_TABLE = tomllib.loads((HERE / "boundaries.toml").read_text(encoding="utf-8"))
HEAVY: tuple[str, ...] = tuple(_TABLE["heavy"])
IMPORT_SECONDS: float = _TABLE["import_seconds"]
BOUNDARIES = [
    Boundary(name, **{key: tuple(value) if isinstance(value, list) else value for key, value in entry.items()})
    for name, entry in _TABLE.items()
    if isinstance(entry, dict)
]
