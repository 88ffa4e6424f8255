"""How often Triton compiles the kernels of the head: not again for another number of tokens."""

from collections import defaultdict

import pytest
import torch
from triton.backends.compiler import BaseBackend
from triton.runtime.jit import JITFunction, create_function_from_signature

from rlhf_kernels import PolicyObjective, PolicyStream
from rlhf_kernels.ops.linear_policy_loss.triton import linear_policy_loss_triton
from rlhf_kernels.ops.linear_token_logprobs import product

FEW_TOKENS = 16 * 1024  # a multiple of 16, in blocks that are multiples of 16


@pytest.fixture
def compiled(monkeypatch):
    """By kernel, the keys under which Triton would have looked for compiled code. Nothing runs."""
    keys = defaultdict(set)

    def note(kernel, *args, grid, warmup, **options):
        bind = create_function_from_signature(kernel.signature, kernel.params, BaseBackend)
        _, key, options = bind(*args, **options)
        keys[kernel.__name__].add(f"{key} {options}")

    monkeypatch.setattr(JITFunction, "run", note)
    return keys


@pytest.mark.parametrize("fits", [True, False])
@pytest.mark.parametrize("entropy_coef", [0.0, 0.1])
def test_kernels_of_the_head_are_compiled_once_for_all_numbers_of_tokens(compiled, monkeypatch, fits, entropy_coef):
    monkeypatch.setattr(product, "fits", lambda *_: fits)
    keys = []
    for num_tokens in (FEW_TOKENS, FEW_TOKENS + 1):
        compiled.clear()
        hidden, weight = (torch.randn(rows, 8, requires_grad=True) for rows in (num_tokens, 64))
        bounds = torch.tensor([0, num_tokens])
        mask = torch.ones(num_tokens, dtype=torch.bool)
        stream = PolicyStream(
            advantages=torch.zeros(num_tokens), loss_mask=mask, cu_seqlens=bounds, num_tokens=9, num_sequences=1
        )
        objective = PolicyObjective(entropy_coef=entropy_coef)
        linear_policy_loss_triton(hidden, weight, mask.long(), 1.0, stream, objective, torch.float32)
        keys.append(dict(compiled))
    few, more = keys
    assert few.keys() == more.keys() and len(few) > 2
    # The kernel of the loss takes seconds less to compile, and loads vectors by masks of the number of tokens.
    assert {name for name in few if few[name] != more[name]} == {"_policy_kernel"}
