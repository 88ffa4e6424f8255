"""How cases run in Triton's interpreter, on the CPU.

The interpreter is chosen when Triton is imported, and would hold for everything else in the process: the cases run in a
process of their own, which is their file again.
"""

import functools
import os
import subprocess
import sys

import pytest


@pytest.fixture
def interpret(tmp_path):
    """Return a function that runs a test file in the interpreter, and expects so many cases of it to pass."""

    def run(path, num_cases):
        environment = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        options = ["-q", "-p", "no:cacheprovider", "-c", os.devnull, "--rootdir", tmp_path]
        command = [sys.executable, "-m", "pytest", *options, path]
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
        assert f"{num_cases} passed" in done.stdout

    return run


@pytest.fixture(autouse=True)
def language_mapped_once(monkeypatch):
    """Have the interpreter map Triton's language to NumPy once per launch.

    It maps it again at every call of a device function. That changes nothing and takes half of the time.
    """
    if os.environ.get("TRITON_INTERPRET") != "1":
        return
    import triton.language as tl
    from triton.runtime import interpreter

    map_language = interpreter._patch_lang

    @functools.cache
    def languages(function):
        return [module for module in (tl, tl.core) if any(value is module for value in function.__globals__.values())]

    def map_once(function):
        is_mapped = not any(tl.core.is_builtin(module.load) for module in languages(function))
        return interpreter._LangPatchScope() if is_mapped else map_language(function)

    monkeypatch.setattr(interpreter, "_patch_lang", map_once)


@pytest.fixture(params=["product", "logits"])
def form(request, monkeypatch):
    """Whether log-probs come from the product with the head, here of several tiles each way, or from its logits."""
    from rlhf_kernels.ops.linear_token_logprobs import product

    if request.param == "logits":
        monkeypatch.setattr(product, "fits", lambda *_: False)
    tiles = {"TILE_ROWS": 16, "TILE_COLUMNS": 32, "TILE_DEPTH": 8, "MAX_ROWS": 32, "GROUP_TILES": 2}
    for name, value in {**tiles, "MERGED_ROWS": 2, "MERGED_PARTS": 2}.items():
        monkeypatch.setattr(product, name, value)
    return request.param


@pytest.fixture
def poisoned_buffers(monkeypatch):
    """Hand out output buffers full of NaN, so that an element never written shows."""
    import torch

    torch.manual_seed(0)

    def poison(make):
        def poisoned(*args, **kwargs):
            tensor = make(*args, **kwargs)
            return tensor.fill_(float("nan")) if tensor.is_floating_point() else tensor

        return poisoned

    monkeypatch.setattr(torch, "empty", poison(torch.empty))
    monkeypatch.setattr(torch, "empty_like", poison(torch.empty_like))
    monkeypatch.setattr(torch.Tensor, "new_empty", poison(torch.Tensor.new_empty))


@pytest.fixture
def require_as_near():
    """Return a function that expects results to be about as far from the truth as those of a plain computation."""

    def require(results, plain, truth):
        for got, other, want in zip(results, plain, truth, strict=True):
            error, allowed = (part.double() - want for part in (got, other))
            assert error.norm() <= 1.5 * allowed.norm() + 1e-5 * want.norm()
            assert error.abs().max() <= 3 * allowed.abs().max() + 1e-5 * want.abs().max()

    return require
