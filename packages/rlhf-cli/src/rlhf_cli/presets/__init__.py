"""Settings of algorithms as in their papers, for --preset. The files have the format of --config.

They do not set batch sizes and learning rates, which depend on the model and the machine.
"""

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

PRESETS: Mapping[str, Path] = MappingProxyType(
    {path.stem: path for path in sorted(Path(__file__).resolve().parent.glob("*.toml"))}
)
