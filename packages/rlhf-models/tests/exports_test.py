import os
import subprocess
import sys

import rlhf_models


def test_every_exported_name_exists():
    for name in rlhf_models.__all__:
        assert getattr(rlhf_models, name).__name__ == name


def test_import_loads_neither_torch_nor_transformers():
    code = "import sys, rlhf_models; print(sorted({'torch', 'transformers', 'rlhf_kernels'} & set(sys.modules)))"
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment)
    assert done.stdout.strip() == "[]", done.stderr
