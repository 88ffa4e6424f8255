"""Shards of a test: each of its tests is in one, and tests that share the fixtures of a module are in the same."""

import os
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

MAIN = Path(__file__).parent / "pytest_main.py"
TESTS = """
import pytest

@pytest.fixture(scope="module", params="ab")
def model(request): return request.param

@pytest.fixture(scope="module")
def trained(model): return model

@pytest.fixture
def own(): return 1

@pytest.mark.parametrize("size", [1, 2])
def test_model(model, size): pass

def test_trained(trained): pass

def test_model_again(model, own): pass

@pytest.mark.parametrize("size", [1, 2, 3])
def test_alone(own, size): pass
"""


def names_of(shard: int, total: int, folder: Path) -> set[str]:
    names = {"XML_OUTPUT_FILE": f"{folder}/{shard}.xml", "TEST_SHARD_STATUS_FILE": f"{folder}/status"}
    names |= {"TEST_TOTAL_SHARDS": str(total), "TEST_SHARD_INDEX": str(shard), "TEST_TMPDIR": str(folder)}
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("TEST", "XML"))} | names
    (folder / "x_test.py").write_text(TESTS)
    command = [sys.executable, MAIN, "x_test.py", "-c", os.devnull, "--rootdir", "."]
    subprocess.run(command, cwd=folder, env=environment, check=True, capture_output=True)
    return {case.get("name", "") for case in ElementTree.parse(f"{folder}/{shard}.xml").iter("testcase")}


def test_shards_keep_tests_of_the_same_fixtures_together(tmp_path: Path) -> None:
    found = [names_of(shard, 3, tmp_path) for shard in range(3)]
    # In the order of pytest: a and b of the model, of what is trained from it, then each of the others alone.
    models = [{f"test_model[{name}-1]", f"test_model[{name}-2]", f"test_model_again[{name}]"} for name in "ab"]
    assert sum(map(len, found)) == len(set.union(*found)) == 11
    for together in models:
        assert any(together <= names for names in found)
    assert max(map(len, found)) <= 5
    assert names_of(7, 8, tmp_path) == set()
