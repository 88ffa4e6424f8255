"""Lets plain pip install one package of a checkout: its first-party dependencies are taken from the folders beside it.

pip knows no workspaces: `pip install packages/rlhf-rollout` would look for `rlhf-data` on an index. When pip builds a
package inside a checkout, its requirement `rlhf-data` becomes `rlhf-data @ file:///.../packages/rlhf-data`. uv reads the
workspace itself and Bazel builds from a copy without siblings, so their wheels keep the plain names.
"""

import os
import re
from pathlib import Path

from hatchling.metadata.plugin.interface import MetadataHookInterface

PROJECT = "rlhf-"


def sibling(package: Path, name: str) -> Path:
    """Returns the folder in which the distribution `name` would be, seen from the folder `package`."""
    root = next(folder for folder in (package, *package.parents) if (folder / "tools" / "wheel").is_dir())
    return root / "kernels" if name == "rlhf-kernels" else root / "packages" / name


def localized(requirement: str, package: Path) -> str:
    """Returns `requirement` with a file URL when it names a sibling of `package`, else as it is."""
    match = re.match(rf"({PROJECT}[a-z]+)(\[[^]]*\])?(.*)$", requirement)
    if match is None:
        return requirement
    name, extras, rest = match.groups(default="")
    folder = sibling(package, name)
    if not (folder / "pyproject.toml").is_file():
        return requirement
    marker = rest[rest.index(";") :] if ";" in rest else ""
    return f"{name}{extras} @ {folder.as_uri()} {marker}".rstrip()


class CustomMetadataHook(MetadataHookInterface):
    """Rewrites `project.dependencies` and the extras, for pip only."""

    def update(self, metadata: dict) -> None:
        """Changes `metadata` in place."""
        if "PIP_BUILD_TRACKER" not in os.environ:
            return
        package = Path(self.root).resolve()
        metadata["dependencies"] = [localized(text, package) for text in metadata["dependencies"]]
        for name, texts in metadata.get("optional-dependencies", {}).items():
            metadata["optional-dependencies"][name] = [localized(text, package) for text in texts]
