"""units.bzl says what the parts of a package import, as the files on the disk do."""

import runpy
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
MODULE = runpy.run_path(str(ROOT / "tools/bazel/units.py"))
Sources, text_of = MODULE["Sources"], MODULE["text_of"]
FILES = {
    "packages/rlhf-low/src/rlhf_low/__init__.py": "from rlhf_low.errors import Error",
    "packages/rlhf-low/src/rlhf_low/errors.py": '"""See rlhf_high.run."""\nTEXT = "rlhf_high.run has more"',
    "packages/rlhf-low/src/rlhf_low/read.py": "def read():\n    from rlhf_low import errors",
    "packages/rlhf-high/src/rlhf_high/__init__.py": "",
    "packages/rlhf-high/src/rlhf_high/run.py": "import rlhf_low.read\nHINT = 'try `rlhf_high.main`'",
    "packages/rlhf-high/src/rlhf_high/engines/__init__.py": "",
    "packages/rlhf-high/src/rlhf_high/engines/build.py": "from rlhf_high import run\nimport rlhf_high.engines.one",
    "packages/rlhf-high/src/rlhf_high/engines/one/__init__.py": "",
    "packages/rlhf-high/src/rlhf_high/engines/one/start.py": "import rlhf_high.engines.build",
    "packages/rlhf-high/src/rlhf_high/main.py": "from rlhf_low import Error\nNAMES = f'rlhf_high.engines.{kind}'",
    "packages/rlhf-low/tests/read_test.py": "from fakes import engine\nfrom rlhf_low.read import read",
    "packages/rlhf-high/tests/conftest.py": "from rlhf_low import errors",
    "packages/rlhf-high/tests/engines/conftest.py": "from fakes import engine",
    "packages/rlhf-high/tests/engines/build_test.py": "import torch",
    "packages/rlhf-high/tests/main_test.py": 'RUN = ["-m", "rlhf_high.main"]',
    "tests/support/fakes.py": "from rlhf_high.run import go",
}
WANTED = {
    "rlhf-low": """
UNITS = {
    "__init__": (["__init__"], []),
    "errors": (["errors"], []),
    "read": (["read"], ["rlhf-low/errors"]),
}

TESTS = {
    "read_test.py": ["rlhf-low/read", "tests/support/fakes"],
}
""",
    "rlhf-high": """
UNITS = {
    "__init__": (["__init__"], []),
    "engines": (["engines/", "engines/one/"], ["rlhf-high/run"]),
    "main": (["main"], ["rlhf-high/engines", "rlhf-low"]),
    "run": (["run"], ["rlhf-low/read"]),
}

TESTS = {
    "engines/build_test.py": ["rlhf-high/run", "rlhf-low/errors", "tests/support/fakes"],
    "main_test.py": ["rlhf-high/main", "rlhf-low/errors"],
}
""",
}


def test_units_of_packages_are_those_of_their_files(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["units.py", "--check"])
    assert MODULE["main"]() == 0, "run: python tools/bazel/units.py"


@pytest.mark.parametrize("package", WANTED)
def test_a_unit_is_a_folder_or_a_file_and_those_that_import_each_other_are_one(package, tmp_path):
    for name, text in FILES.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    assert text_of(Sources(tmp_path, WANTED), package).partition("\n")[2] == WANTED[package]
