"""All processes of a machine that load a model share the memory of its file, whatever they do with the weights then."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from rlhf_models.testing import tiny_model_dir

SIZES = {"vocab_size": 8192, "hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 3}
STATUS = Path("/proc/self/status")
# Each in a process of its own: memory that another model has had before would serve again. They share the imports.
PROGRAM = """
import json, os, sys
from pathlib import Path
from rlhf_models import loading

def private_bytes():
    [line] = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("RssAnon:")]
    return 1024 * int(line.split()[1])

for load in (loading.load_actor, loading.load_critic):
    if os.fork():
        assert os.wait()[1] == 0
        continue
    load(sys.argv[1], dtype="bfloat16")  # imports, and what a first load allocates
    before = private_bytes()
    weights = [weight.detach() for weight in load(sys.argv[2], dtype="bfloat16").parameters()]
    loaded = private_bytes() - before
    copies = [weight.clone() for weight in weights]
    print(json.dumps([sum(weight.nbytes for weight in weights), loaded, private_bytes() - before]), flush=True)
    os._exit(0)
"""

pytestmark = pytest.mark.skipif(not STATUS.exists(), reason="needs Linux's /proc")


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A small model, and one of over 100 MB."""
    home = tmp_path_factory.mktemp("models")
    small = tiny_model_dir(home / "small", dtype=torch.bfloat16)
    return small, tiny_model_dir(home / "large", dtype=torch.bfloat16, **SIZES)


def test_weights_that_are_loaded_in_the_type_of_their_file_take_no_memory_of_the_process(folders):
    command = [sys.executable, "-c", PROGRAM, *map(str, folders)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=300)
    found = done.stdout.splitlines()
    assert len(found) >= 2
    for line in found[-2:]:
        size, loaded, copied = json.loads(line)
        assert size > 100e6
        assert loaded < 0.1 * size
        assert copied > 0.9 * size  # or the measurement shows nothing
