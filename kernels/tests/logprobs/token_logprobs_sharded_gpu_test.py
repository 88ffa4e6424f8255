"""`token_logprobs` of a real vocabulary shared by two GPUs (NCCL) equals that of the whole, twice alike."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import distributed

from rlhf_kernels import token_logprobs
from rlhf_kernels.ops.token_logprobs.reference import token_logprobs_reference

VOCAB_SIZE, NUM_ROWS = 151_936, 300
BOUNDS = [0, 76_032, VOCAB_SIZE]  # of unequal shares
TEMPERATURE = 0.7
ROUNDING = 2**-8  # of bfloat16


def on_rank(rank, store):
    """Check this rank's results and gradient, by random weights on all results, against the whole in float64."""
    torch.cuda.set_device(rank)
    distributed.init_process_group("nccl", init_method=f"file://{store}", rank=rank, world_size=2)
    generator = torch.Generator().manual_seed(0)
    whole = (3 * torch.randn(NUM_ROWS, VOCAB_SIZE, generator=generator)).bfloat16().cuda()
    token_ids = torch.randint(0, VOCAB_SIZE, (NUM_ROWS,), generator=generator).cuda()
    token_ids[5] = -100
    weights = torch.randn(3, NUM_ROWS, generator=generator).cuda()
    own = slice(*BOUNDS[rank : rank + 2])
    exact = whole.double().requires_grad_()
    expected = token_logprobs_reference(exact, token_ids, TEMPERATURE)
    sum((w * values).sum() for w, values in zip(weights.double(), expected, strict=True)).backward()
    passes = []
    for _ in range(2):
        part = whole[:, own].clone().requires_grad_()
        group = distributed.group.WORLD
        results = token_logprobs(part, token_ids, temperature=TEMPERATURE, group=group, vocab_start=own.start)
        sum((w * values).sum() for w, values in zip(weights, results, strict=True)).backward()
        passes.append([*results, part.grad])
    for got, want in zip(passes[0], expected, strict=False):
        torch.testing.assert_close(got.double(), want, atol=2e-5, rtol=1e-6)
    torch.testing.assert_close(passes[0][-1].double(), exact.grad[:, own], atol=1e-6, rtol=4 * ROUNDING)
    assert all(torch.equal(*pair) for pair in zip(*passes, strict=True))
    distributed.destroy_process_group()


def test_token_logprobs_of_two_gpus_equals_the_whole(tmp_path):
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two CUDA devices")
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    command = [sys.executable, Path(__file__).resolve(), tmp_path / "store"]
    ranks = [
        subprocess.Popen([*command, str(rank)], env=environment, stderr=subprocess.PIPE, text=True) for rank in (0, 1)
    ]
    errors = [rank.communicate(timeout=300)[1] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0], "\n".join(errors)


if __name__ == "__main__":
    on_rank(int(sys.argv[2]), sys.argv[1])
