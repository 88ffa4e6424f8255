"""Metadata that all packages share: classifiers, the version, and requirements of one package on another.

The version of all packages is that of the pyproject.toml at the root. A wheel needs the others of its own version: its
requirement `rlhf-data` becomes `rlhf-data==0.1.0`, because the packages change together.

pip knows no workspaces: `pip install packages/rlhf-rollout` would look for `rlhf-data` on an index. When pip builds a
package inside a checkout, its requirement `rlhf-data` becomes `rlhf-data @ file:///.../rlhf-data`. uv reads the
workspace itself, and Bazel builds from a copy without siblings.
"""

import os
import re
import tomllib
from pathlib import Path

from hatchling.metadata.plugin.interface import MetadataHookInterface

CLASSIFIERS = [
    "Intended Audience :: Science/Research",
    "Operating System :: POSIX :: Linux",
    "Programming Language :: Python :: 3 :: Only",
    "Topic :: Scientific/Engineering :: Artificial Intelligence",
    "Typing :: Typed",
]
WORKSPACE = Path(__file__).resolve().parents[2] / "pyproject.toml"


def bound(requirement: str, version: str, package: Path | None) -> str:
    """Return a requirement on another package here with exactly this version, and any other one unchanged.

    If it names a package beside the folder `package`, it gets the URL of that folder instead of the version.
    """
    match = re.match(r"(rlhf-[a-z]+)(\[[^]]*\])?[^;]*(;.*)?$", requirement)
    if match is None:
        return requirement
    name, extras, marker = match.groups(default="")
    beside = (package.parent / name, package.parent.parent / name.removeprefix("rlhf-")) if package else ()
    for folder in beside:
        if (folder / "pyproject.toml").is_file():
            return f"{name}{extras} @ {folder.as_uri()} {marker}".rstrip()
    return f"{name}{extras}=={version} {marker}".rstrip()


class CustomMetadataHook(MetadataHookInterface):
    """Set the classifiers, the version and the requirements on other packages here."""

    def update(self, metadata: dict) -> None:
        """Change the `[project]` table `metadata` in place."""
        version = tomllib.loads(WORKSPACE.read_text(encoding="utf-8"))["project"]["version"]
        metadata["classifiers"] = CLASSIFIERS
        metadata["version"] = version
        # pip sets this variable while it builds; uv and Bazel do not.
        package = Path(self.root).resolve() if "PIP_BUILD_TRACKER" in os.environ else None
        groups = metadata.get("optional-dependencies", {})
        for table, key in [(metadata, "dependencies"), *((groups, extra) for extra in groups)]:
            table[key] = [bound(text, version, package) for text in table[key]]
