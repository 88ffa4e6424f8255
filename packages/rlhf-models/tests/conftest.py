"""Tiny models, made once for all tests of a file."""

import numpy as np
import pytest

from rlhf_models.checkpoint.files import without_wrappers
from rlhf_models.testing import tiny_model_dir

# Of one token, of two, and of lengths that no block size divides.
LENGTHS = (7, 1, 12, 30, 2)


@pytest.fixture(scope="session", autouse=True)
def quick_saving():
    """Spare the tests that write models themselves the import of DeepSpeed."""
    with without_wrappers():
        yield


@pytest.fixture(scope="session", params=["qwen2", "llama"])
def model_dir(request, tmp_path_factory):
    """A folder of each architecture."""
    return tiny_model_dir(tmp_path_factory.mktemp(request.param), architecture=request.param)


@pytest.fixture(scope="session")
def qwen2_dir(tmp_path_factory):
    """A folder with untied embeddings."""
    return tiny_model_dir(tmp_path_factory.mktemp("untied"), tied=False)


@pytest.fixture(scope="session")
def sequences():
    """Token sequences of very different lengths."""
    rng = np.random.default_rng(0)
    return [rng.integers(3, 512, length) for length in LENGTHS]
