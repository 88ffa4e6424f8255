"""tests/gpu/selection.txt lists the tests that `--config=gpu` runs, as file names and BUILD files select them."""

import ast
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
MACROS = {"python_package": "tests/", "pytest_tests": ""}  # to the folder of their tests


def macro_calls(build_file: Path) -> Iterator[tuple[str, dict[str, ast.expr]]]:
    """Yield the folder of the tests and the arguments of each macro that makes tests of a folder."""
    for node in ast.walk(ast.parse(build_file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") in MACROS:
            yield MACROS[node.func.id], {keyword.arg: keyword.value for keyword in node.keywords}


def build_files() -> list[Path]:
    return sorted(
        path for pattern in ("kernels", "packages/*", "tests/*") for path in ROOT.glob(f"{pattern}/BUILD.bazel")
    )


def selected() -> list[str]:
    """The files that `--config=gpu` runs, relative to the repository."""
    files = []
    for build_file in build_files():
        for folder, arguments in macro_calls(build_file):
            tests = build_file.parent / folder
            assert "folder" not in arguments
            files += tests.glob("**/*_gpu_test.py")
            also = arguments.get("also_on_gpu", ast.Dict([]))
            files += [tests / ast.literal_eval(name) for name in also.keys]
    return sorted(str(path.relative_to(ROOT)) for path in files)


def test_selection_lists_every_file_that_config_gpu_runs() -> None:
    listed = (ROOT / "tests/gpu/selection.txt").read_text(encoding="utf-8").split()
    assert listed == selected()
    assert [name for name in listed if not (ROOT / name).is_file()] == []


def test_gpu_tests_lie_in_folders_that_a_macro_covers() -> None:
    folders = [build_file.parent / folder for build_file in build_files() for folder, _ in macro_calls(build_file)]
    found = [path for top in ("kernels", "packages", "tests", "tools") for path in ROOT.glob(f"{top}/**/*_gpu_test.py")]
    assert found
    assert [path for path in found if not any(path.is_relative_to(folder) for folder in folders)] == []


@pytest.mark.parametrize(
    ("name", "required", "has_gpu", "code", "said"),
    [
        ("x_gpu_test.py", "0", False, 0, "2 skipped"),
        ("x_test.py", "0", False, 0, "2 passed"),
        ("x_gpu_test.py", "1", False, 4, "RLHF_REQUIRE_GPU is 1 and PyTorch finds no GPU"),
        ("x_test.py", "1", False, 4, "RLHF_REQUIRE_GPU is 1 and PyTorch finds no GPU"),
        ("x_gpu_test.py", "0", True, 0, "2 passed"),
        ("x_gpu_test.py", "1", True, 0, "2 passed"),
    ],
)
def test_gpu_tests_without_a_gpu_are_skipped_unless_one_is_required(
    tmp_path: Path, name: str, required: str, has_gpu: bool, code: int, said: str
) -> None:
    stand_in = f"class cuda:\n    is_available = staticmethod(lambda: {has_gpu})\n"
    (tmp_path / "torch.py").write_text(stand_in, encoding="utf-8")  # PyTorch itself takes seconds to import
    (tmp_path / "conftest.py").write_text((ROOT / "conftest.py").read_text(encoding="utf-8"), encoding="utf-8")
    (tmp_path / name).write_text("def test_a(): pass\ndef test_b(): pass\n", encoding="utf-8")
    environment = os.environ | {"PYTHONPATH": str(tmp_path), "RLHF_REQUIRE_GPU": required}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-c", os.devnull, "--rootdir", "."]
    done = subprocess.run([*command, name], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == code, done.stdout + done.stderr
    assert said in done.stdout + done.stderr
