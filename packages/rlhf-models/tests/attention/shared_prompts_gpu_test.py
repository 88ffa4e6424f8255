"""Shared prompts on a GPU: torch's kernels against float32, with and without compiled layers."""

import logging

import numpy as np
import pytest
import torch

from rlhf_models.attention import packed as attention
from rlhf_models.attention.flash import flash_4_unavailable_reason
from rlhf_models.batch import TokenBatch
from rlhf_models.fast.compiled import compile_layers
from rlhf_models.loading import load_actor, load_critic
from rlhf_models.testing import tiny_model_dir

# Number of the prompt, and tokens of the response, of each sequence. One prompt is as long as several blocks of keys.
PROMPT_LENGTHS = (300, 1, 77)
RESPONSES = [(0, 200), (1, 300), (0, 7), (2, 1), (0, 129), (2, 0), (2, 512)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A model of 8 heads of 64 on 2 key-value heads."""
    sizes = {"vocab_size": 1003, "hidden_size": 512, "num_attention_heads": 8, "num_key_value_heads": 2}
    return tiny_model_dir(tmp_path_factory.mktemp("model"), **sizes)


def batch_of(*, is_shared: bool, seed: int = 0) -> TokenBatch:
    draw = np.random.default_rng(seed)
    prompts = [draw.integers(3, 1003, length) for length in PROMPT_LENGTHS]
    rows = [np.concatenate([prompts[number], draw.integers(3, 1003, length)]) for number, length in RESPONSES]
    lengths = [PROMPT_LENGTHS[number] for number, _ in RESPONSES] if is_shared else None
    return TokenBatch.packed(rows, "cuda", prompt_lengths=lengths)


def run(kind, folder, dtype, *, is_shared: bool, is_compiled: bool = False, attn_implementation: str = "rlhf_packed"):
    """Outputs of each token, and the gradient of a weighted sum of them."""
    model = kind(folder, dtype=dtype, packing=True, attn_implementation=attn_implementation)
    if kind is load_critic:
        torch.manual_seed(0)
        torch.nn.init.normal_(model.value_head.weight, std=0.1)
    model.cuda().train()
    if is_compiled:
        compile_layers(model.model)
        model(batch_of(is_shared=is_shared, seed=1))  # compiles; other tokens, the same lengths
    outputs = model(batch_of(is_shared=is_shared))
    flat = (outputs.logprobs if kind is load_actor else outputs).flatten()
    torch.manual_seed(0)
    (flat * torch.randn(flat.shape, device="cuda")).sum().backward()
    return flat.detach(), torch.cat([p.grad.flatten().float() for p in model.parameters() if p.grad is not None])


@pytest.fixture(params=attention.PACKED_ATTENTIONS)
def attn_implementation(request):
    if request.param == attention.PACKED_ATTENTION_4 and (reason := flash_4_unavailable_reason(64)):
        pytest.skip(reason)
    return request.param


@pytest.mark.parametrize("is_compiled", [False, True])
@pytest.mark.parametrize("kind", [load_actor, load_critic])
def test_shared_bfloat16_is_as_near_to_float32_as_copies_are(kind, folder, is_compiled, attn_implementation, caplog):
    attention._log_fallback_once.cache_clear()
    truth = run(kind, folder, "float32", is_shared=False)
    options = {"is_compiled": is_compiled, "attn_implementation": attn_implementation}
    copies = run(kind, folder, "bfloat16", is_shared=False, **options)
    caplog.clear()
    with caplog.at_level(logging.INFO):
        shared = run(kind, folder, "bfloat16", is_shared=True, **options)
    assert "sequence by sequence" not in caplog.text
    for got, other, want in zip(shared, copies, truth, strict=True):
        assert (got - want).norm() < 1.5 * (other - want).norm() + 1e-3 * want.norm()


def test_shared_float32_equals_copies(folder):
    expected = run(load_actor, folder, "float32", is_shared=False)
    shared = run(load_actor, folder, "float32", is_shared=True)
    torch.testing.assert_close(shared[0], expected[0], atol=1e-3, rtol=0)
    assert (shared[1] - expected[1]).norm() < 1e-3 * expected[1].norm()


def test_gradients_of_shared_states_add_up_in_a_fixed_order():
    batch = batch_of(is_shared=True)
    states = torch.randn(1, batch.shared.input_ids.shape[1], 64, device="cuda", dtype=torch.bfloat16)
    index = batch.host_target_mask.flatten().nonzero()[:, 0].cuda() - 1
    weights = torch.randn(len(index), 64, device="cuda", dtype=torch.bfloat16)
    gradients = []
    for _ in range(5):
        own = states.clone().requires_grad_()
        batch.states_at(own, index).backward(weights)
        gradients.append(own.grad)
    assert all(torch.equal(gradients[0], other) for other in gradients[1:])
