"""Tests of the metadata that pip sees when it builds a package inside a checkout."""

from pathlib import Path

import pytest

from hatch_hook import CLASSIFIERS, CustomMetadataHook, localized


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    for folder in ("kernels", "packages/rlhf-data", "packages/rlhf-models"):
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / "pyproject.toml").touch()
    return tmp_path


def test_localized_sibling_becomes_a_file_url_with_its_extras_and_marker(checkout: Path) -> None:
    package, data = checkout / "packages/rlhf-models", (checkout / "packages/rlhf-data").as_uri()
    assert localized("rlhf-data", package) == f"rlhf-data @ {data}"
    assert localized("rlhf-data[hf]>=0.1", package) == f"rlhf-data[hf] @ {data}"
    assert localized("rlhf-data ; python_version > '3'", package) == f"rlhf-data @ {data} ; python_version > '3'"
    assert localized("rlhf-kernels", package) == f"rlhf-kernels @ {(checkout / 'kernels').as_uri()}"


@pytest.mark.parametrize("requirement", ["numpy>=2", "rlhf-train", "math-verify[antlr4-13-2]>=0.8"])
def test_localized_requirement_without_a_folder_beside_stays(checkout: Path, requirement: str) -> None:
    assert localized(requirement, checkout / "packages/rlhf-models") == requirement


@pytest.mark.parametrize("under_pip", [True, False])
def test_hook_rewrites_requirements_under_pip_only(
    checkout: Path, monkeypatch: pytest.MonkeyPatch, under_pip: bool
) -> None:
    monkeypatch.delenv("PIP_BUILD_TRACKER", raising=False)
    if under_pip:
        monkeypatch.setenv("PIP_BUILD_TRACKER", "folder")
    metadata = {"dependencies": ["numpy"], "optional-dependencies": {"models": ["rlhf-data"]}}
    CustomMetadataHook(str(checkout / "packages/rlhf-models"), {}).update(metadata)
    assert metadata["classifiers"] == CLASSIFIERS
    assert metadata["dependencies"] == ["numpy"]
    assert ("@" in metadata["optional-dependencies"]["models"][0]) == under_pip
