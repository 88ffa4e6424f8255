"""Names that stand for flags, by `flag_names.toml`."""

import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

_TABLES = tomllib.loads((Path(__file__).parent / "flag_names.toml").read_text(encoding="utf-8"))
FLAGS_OF_FIELDS: Mapping[str, str] = MappingProxyType(_TABLES["fields"])
FLAGS_FOR_TRL: Mapping[str, Sequence[str]] = MappingProxyType(_TABLES["trl"])
