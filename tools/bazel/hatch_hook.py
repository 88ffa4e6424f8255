"""Metadata that all packages share, and a rewrite of requirements that lets pip install a package from a checkout.

pip knows no workspaces: `pip install packages/rlhf-rollout` would look for `rlhf-data` on an index. When pip builds a
package inside a checkout, its requirement `rlhf-data` becomes `rlhf-data @ file:///.../rlhf-data`. uv reads the
workspace itself and Bazel builds from a copy without siblings, so their wheels keep the plain names.
"""

import os
import re
from pathlib import Path

from hatchling.metadata.plugin.interface import MetadataHookInterface

CLASSIFIERS = [
    "Intended Audience :: Science/Research",
    "Operating System :: POSIX :: Linux",
    "Programming Language :: Python :: 3 :: Only",
    "Topic :: Scientific/Engineering :: Artificial Intelligence",
    "Typing :: Typed",
]


def localized(requirement: str, package: Path) -> str:
    """Return `requirement` with a file URL if it names a package beside the folder `package`, else unchanged."""
    match = re.match(r"(rlhf-[a-z]+)(\[[^]]*\])?[^;]*(;.*)?$", requirement)
    if match is None:
        return requirement
    name, extras, marker = match.groups(default="")
    for folder in (package.parent / name, package.parent.parent / name.removeprefix("rlhf-")):
        if (folder / "pyproject.toml").is_file():
            return f"{name}{extras} @ {folder.as_uri()} {marker}".rstrip()
    return requirement


class CustomMetadataHook(MetadataHookInterface):
    """Set the classifiers and, under pip, rewrite the first-party requirements."""

    def update(self, metadata: dict) -> None:
        """Change the `[project]` table `metadata` in place."""
        metadata["classifiers"] = CLASSIFIERS
        # pip sets this variable while it builds; uv and Bazel do not.
        if "PIP_BUILD_TRACKER" not in os.environ:
            return
        package = Path(self.root).resolve()
        groups = metadata.get("optional-dependencies", {})
        for table, key in [(metadata, "dependencies"), *((groups, extra) for extra in groups)]:
            table[key] = [localized(text, package) for text in table[key]]
