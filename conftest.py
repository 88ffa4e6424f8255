"""What all tests share: the rule for those that need a GPU, and a Ray cluster of their own.

Tests that need a GPU are in files named `*_gpu_test.py`, and are skipped where there is none.
`RLHF_REQUIRE_GPU=1`, which Bazel's `--config=gpu` sets, makes a missing GPU an error, so that a run that is meant for a
GPU does not pass with every test skipped.
"""

import os

import pytest

SUFFIX = "_gpu_test.py"


def pytest_configure() -> None:
    """Keep tests out of a Ray cluster that runs on this machine; insist on the GPU that RLHF_REQUIRE_GPU asks for."""
    os.environ.setdefault("RAY_ADDRESS", "local")
    if os.environ.get("RLHF_REQUIRE_GPU") == "1" and not _has_gpu():
        raise pytest.UsageError("RLHF_REQUIRE_GPU is 1 and PyTorch finds no GPU")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip GPU tests where there is no GPU."""
    needing = [item for item in items if item.path.name.endswith(SUFFIX)]
    if needing and not _has_gpu():
        for item in needing:
            item.add_marker(pytest.mark.skip(reason="needs a GPU"))


def _has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()
