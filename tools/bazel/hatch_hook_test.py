"""Tests of the metadata that packages share, and of what pip sees when it builds a package inside a checkout."""

from pathlib import Path

import pytest

import hatch_hook
from hatch_hook import CLASSIFIERS, CustomMetadataHook, bound


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    for folder in ("kernels", "packages/rlhf-data", "packages/rlhf-models"):
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / "pyproject.toml").touch()
    return tmp_path


@pytest.mark.parametrize(
    ("requirement", "expected"),
    [
        ("rlhf-data", "rlhf-data @ {packages}/rlhf-data"),
        ("rlhf-data[hf]>=0.1", "rlhf-data[hf] @ {packages}/rlhf-data"),
        ("rlhf-data ; python_version > '3'", "rlhf-data @ {packages}/rlhf-data ; python_version > '3'"),
        ("rlhf-kernels", "rlhf-kernels @ {root}/kernels"),
        ("rlhf-train[wandb] ; extra == 'x'", "rlhf-train[wandb]==3.2 ; extra == 'x'"),  # not in this checkout
        ("numpy>=2", "numpy>=2"),
        ("math-verify[antlr4-13-2]>=0.8", "math-verify[antlr4-13-2]>=0.8"),
    ],
)
def test_requirement_on_a_package_beside_is_its_folder_and_on_one_elsewhere_its_version(
    checkout: Path, requirement: str, expected: str
) -> None:
    filled = expected.format(root=checkout.as_uri(), packages=(checkout / "packages").as_uri())
    assert bound(requirement, "3.2", checkout / "packages/rlhf-models") == filled


@pytest.mark.parametrize("under_pip", [True, False])
def test_hook_sets_the_version_of_the_workspace_and_bounds_all_requirements(
    checkout: Path, monkeypatch: pytest.MonkeyPatch, under_pip: bool
) -> None:
    monkeypatch.delenv("PIP_BUILD_TRACKER", raising=False)
    if under_pip:
        monkeypatch.setenv("PIP_BUILD_TRACKER", "folder")
    (checkout / "pyproject.toml").write_text('[project]\nversion = "3.2"\n')
    monkeypatch.setattr(hatch_hook, "WORKSPACE", checkout / "pyproject.toml")
    metadata = {"dependencies": ["numpy", "rlhf-kernels"], "optional-dependencies": {"models": ["rlhf-data[hf]"]}}
    CustomMetadataHook(str(checkout / "packages/rlhf-models"), {}).update(metadata)
    assert metadata["version"] == "3.2"
    assert metadata["classifiers"] == CLASSIFIERS
    kernels, data = (f" @ {(checkout / name).as_uri()}" for name in ("kernels", "packages/rlhf-data"))
    assert metadata["dependencies"] == ["numpy", f"rlhf-kernels{kernels if under_pip else '==3.2'}"]
    assert metadata["optional-dependencies"] == {"models": [f"rlhf-data[hf]{data if under_pip else '==3.2'}"]}
