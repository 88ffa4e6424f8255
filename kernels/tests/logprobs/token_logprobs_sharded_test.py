"""`token_logprobs` of a vocabulary shared by two ranks (gloo, on the CPU) equals that of the whole, in both forms."""

import os
import subprocess
import sys
from pathlib import Path

import torch
from torch import distributed

from rlhf_kernels.ops.token_logprobs.reference import sharded_token_logprobs_reference, token_logprobs_reference

BOUNDS = [0, 37, 50]  # of unequal shares
TOKEN_IDS = torch.tensor([0, 36, 37, 49, -100, 10, 20, 50])  # the last is beyond the vocabulary
TEMPERATURE = 0.7


def on_rank(rank, form, store):
    """Check this rank's results and gradient, by random weights on all results, against the whole in float64."""
    distributed.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    generator = torch.Generator().manual_seed(0)
    whole = 4 * torch.randn(8, 50, generator=generator)
    whole[4] = float("nan")
    whole[5, :37] += 1e4  # all of the mass with one rank
    whole[6, 37:49] = float("-inf")
    weights = torch.randn(3, 7, dtype=torch.float64, generator=generator)
    part = whole[:, BOUNDS[rank] : BOUNDS[rank + 1]].clone().requires_grad_()
    if form == "triton":
        from rlhf_kernels.ops.token_logprobs.triton import token_logprobs_triton

        results = token_logprobs_triton(part, TOKEN_IDS, TEMPERATURE, False, distributed.group.WORLD, BOUNDS[rank])
    else:
        arguments = (TOKEN_IDS, TEMPERATURE, distributed.group.WORLD, BOUNDS[rank])
        results = sharded_token_logprobs_reference(part, *arguments)
    exact = whole.double().requires_grad_()
    expected = token_logprobs_reference(exact, TOKEN_IDS, TEMPERATURE)

    for values, want in zip(results, expected, strict=True):
        torch.testing.assert_close(values.double(), want, atol=2e-6, rtol=1e-6, equal_nan=True)
    assert results.logprobs.isnan().tolist() == [False] * 7 + [True]
    sum((w.float() * values[:7]).sum() for w, values in zip(weights, results, strict=True)).backward()
    sum((w * values[:7]).sum() for w, values in zip(weights, expected, strict=True)).backward()
    torch.testing.assert_close(part.grad.double(), exact.grad[:, BOUNDS[rank] : BOUNDS[rank + 1]], atol=3e-6, rtol=1e-5)
    distributed.destroy_process_group()


def test_token_logprobs_of_two_ranks_equals_the_whole_in_both_forms(tmp_path):
    environment = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    command = [sys.executable, "-W", "ignore::RuntimeWarning", Path(__file__).resolve(), tmp_path / "store"]
    done = subprocess.run(command, env=environment, stderr=subprocess.PIPE, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


if __name__ == "__main__":
    other = os.fork()
    for form in ("twin", "triton"):
        on_rank(int(other == 0), form, f"{sys.argv[1]}-{form}")
    if other:
        sys.exit(os.waitstatus_to_exitcode(os.waitpid(other, 0)[1]))
