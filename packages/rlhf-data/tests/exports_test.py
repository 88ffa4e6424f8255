"""The package's public names, and what importing them must not bring along."""

import subprocess
import sys

import rlhf_data


def test_exports_exist():
    assert all(hasattr(rlhf_data, name) for name in rlhf_data.__all__)


def test_import_brings_no_heavy_library():
    code = (
        f"import sys; sys.path[:] = {sys.path!r}; import rlhf_data, rlhf_data.testing; "
        "print([name for name in ('torch', 'transformers', 'ray', 'vllm', 'deepspeed') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
