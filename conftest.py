"""The rule for tests that need a GPU: their files are named `*_gpu_test.py`, and are skipped where there is none.

`RLHF_REQUIRE_GPU=1`, which Bazel's `--config=gpu` sets, makes a missing GPU an error, so that a run that is meant for a
GPU does not pass with every test skipped.
"""

import os

import pytest

SUFFIX = "_gpu_test.py"


def pytest_configure() -> None:
    """Refuse to start without the GPU that RLHF_REQUIRE_GPU asks for."""
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
