"""How cases run in Triton's interpreter, on the CPU.

The interpreter is chosen when Triton is imported, and would hold for everything else in the process: the cases run in a
process of their own, which is their file again.
"""

import functools
import gc
import math
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from xml.etree import ElementTree

import pytest


@pytest.fixture(scope="session")
def interpreted(request, tmp_path_factory):
    """The number of passed cases by file, and pytest's output, of this session's files for the interpreter.

    They run in one process, because importing PyTorch and Triton takes seconds.
    """
    paths = sorted({item.path for item in request.session.items if item.path.name.endswith("_interpreter_test.py")})
    folder = tmp_path_factory.mktemp("interpreted")
    environment = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    options = ["-q", "-p", "no:cacheprovider", "-c", os.devnull, "--rootdir", folder, "--import-mode=importlib"]
    report = ["--junitxml", folder / "report.xml", "-o", "junit_family=xunit1"]
    command = [sys.executable, "-m", "pytest", *options, *report, *paths]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    cases = ElementTree.parse(folder / "report.xml").iter("testcase") if done.returncode in (0, 1) else ()
    return Counter(Path(case.get("file")).name for case in cases if not len(case)), done.stdout + done.stderr


@pytest.fixture
def interpret(interpreted):
    """Return a function that expects so many cases of a test file to pass in the interpreter, and no other result."""

    def expect(path, num_cases):
        passed, output = interpreted
        assert passed[path.name] == num_cases, output

    return expect


def pytest_collection_finish():
    """Keep what is imported from Python's garbage collector, which the interpreter's many objects would start often."""
    if os.environ.get("TRITON_INTERPRET") == "1":
        gc.freeze()
        gc.set_threshold(10_000)


@pytest.fixture(autouse=True)
def faster_interpreter(monkeypatch):
    """Have the interpreter do once what it does again and again, with the same results.

    It maps Triton's language to NumPy at every call of a device function; once per launch is enough. It makes a table
    of types whenever it looks for one, and wraps the sizes of every tensor anew. It folds by xor, which `tl.flip` does,
    number by number. It computes sums and products of integers again with 64 bits, to see overflows, of which numbers
    of these tests are far.
    """
    if os.environ.get("TRITON_INTERPRET") != "1":
        return
    import numpy
    import triton.language as tl
    from triton.runtime import interpreter

    map_language = interpreter._patch_lang
    apply_reduction = interpreter.ReduceOps.apply_impl
    find_type = interpreter._get_np_dtype
    types = {}

    @functools.cache
    def languages(function):
        return [module for module in (tl, tl.core) if any(value is module for value in function.__globals__.values())]

    def map_once(function):
        is_mapped = not any(tl.core.is_builtin(module.load) for module in languages(function))
        return interpreter._LangPatchScope() if is_mapped else map_language(function)

    @functools.cache
    def sizes(shape):
        return tl.constexpr(math.prod(shape)), tl.core.tuple([tl.constexpr(size) for size in shape])

    def make_tensor(self, handle, type):
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.numel, self.shape = sizes(type.shape if type.is_block() else ())

    def numpy_type(given):
        element = given.scalar
        name = "pointer" if element.is_ptr() else element.name
        if name not in types:
            types[name] = find_type(given)
        return types[name]

    def reduce(operation, inputs):
        if operation.combine_fn != tl.standard._xor_combine:
            return apply_reduction(operation, inputs)
        numbers = inputs[0].handle.data
        folded = numpy.bitwise_xor.reduce(numbers, axis=operation.axis, keepdims=operation.keep_dims)
        return operation.to_tensor(folded, inputs[0].dtype)

    options = interpreter.InterpreterOptions(sanitize_overflow=False)
    monkeypatch.setattr(interpreter.interpreter_builder, "options", options)
    monkeypatch.setattr(tl.tensor, "__init__", make_tensor)
    monkeypatch.setattr(interpreter, "_patch_lang", map_once)
    monkeypatch.setattr(interpreter, "_get_np_dtype", numpy_type)
    monkeypatch.setattr(interpreter.ReduceOps, "apply_impl", reduce)


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


@pytest.fixture(autouse=True)
def equal_draws(request):
    """Draw the same random numbers in each test of the kernels."""
    if os.environ.get("TRITON_INTERPRET") == "1" or request.path.name.endswith("_gpu_test.py"):
        import torch

        torch.manual_seed(0)


@pytest.fixture(autouse=True)
def poisoned_buffers(monkeypatch):
    """Hand the interpreter output buffers full of NaN, so that an element never written shows."""
    if os.environ.get("TRITON_INTERPRET") != "1":
        return
    import torch

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


@pytest.fixture
def require_equal_float64():
    """Return a function that compares results and gradients, by random weights on all results, with a twin in float64.

    The results are of `leaves`, the expected ones of `exact`, the same tensors in float64; either may hold None.
    """
    import torch

    def require(results, expected, leaves, exact, tolerance=1e-5):
        weights = torch.randn(len(results), len(results[0]), dtype=torch.float64)
        sum((w.float() * values).sum() for w, values in zip(weights, results, strict=True)).backward()
        sum((w * values).sum() for w, values in zip(weights, expected, strict=True)).backward()
        for values, want in zip(results, expected, strict=True):
            assert values.dtype == torch.float32
            torch.testing.assert_close(values.double(), want.detach(), atol=20 * tolerance, rtol=tolerance)
        for tensor, want in zip(leaves, exact, strict=True):
            if tensor is not None:
                assert tensor.grad.dtype == tensor.dtype
                assert (tensor.grad.double() - want.grad).norm() <= tolerance * want.grad.norm()

    return require


@pytest.fixture
def require_drawn_from():
    """Return a function that expects counts of drawn tokens to have a distribution: Pearson's chi-square test.

    For many degrees of freedom the statistic is nearly normal; the bound of 5 deviations fails once in 10^6.
    """
    import numpy

    def require(token_ids, logits):
        logits = numpy.asarray(logits, dtype=numpy.float64)
        shares = numpy.exp(logits - logits.max())
        expected = shares / shares.sum() * len(token_ids)
        counts = numpy.bincount(numpy.asarray(token_ids), minlength=len(expected))
        assert counts[expected == 0].sum() == 0
        # The test needs about five draws of each token: rarer ones are taken together.
        rare = expected < 5
        expected = numpy.append(expected[~rare], expected[rare].sum())
        counts = numpy.append(counts[~rare], counts[rare].sum())
        expected, counts = expected[expected > 0], counts[expected > 0]
        freedom = len(expected) - 1
        statistic = ((counts - expected) ** 2 / expected).sum()
        assert freedom > 20 and statistic < freedom + 5 * (2 * freedom) ** 0.5

    return require
