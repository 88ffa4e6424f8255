"""The package's public names, and what importing them must not bring along."""

import subprocess
import sys

import pytest

import rlhf_data
from rlhf_data import prompts, records


def test_exports_are_what_type_checkers_see():
    assert {"load_prompts", "Rollout", "ConfigError"} <= set(rlhf_data.__all__)
    assert rlhf_data.load_prompts is prompts.load_prompts and rlhf_data.Rollout is records.Rollout
    assert all(hasattr(rlhf_data, name) for name in rlhf_data.__all__)
    with pytest.raises(AttributeError, match="module 'rlhf_data' has no attribute 'Rollouts'"):
        rlhf_data.Rollouts  # noqa: B018


def test_import_brings_no_heavy_library():
    code = (
        f"import sys; sys.path[:] = {sys.path!r}; import rlhf_data, rlhf_data.testing; "
        "print([name for name in ('torch', 'transformers', 'ray', 'vllm', 'deepspeed') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
