"""Algorithms with the settings of their papers, by the names that --preset takes; files in the format of --config.

Batch sizes and learning rates are left to the user: they depend on the model and the machine.
"""

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

PRESETS: Mapping[str, Path] = MappingProxyType(
    {path.stem: path for path in sorted(Path(__file__).resolve().parent.glob("*.toml"))}
)
