"""Packed soft caps and sinks on a GPU: flex attention beside the same arithmetic, sequence by sequence, in float64."""

import pytest
import torch
from torch import nn
from transformers import Gemma2Config, Gemma2ForCausalLM, GptOssConfig, GptOssForCausalLM

from rlhf_models.attention.scored import SCORED_ATTENTION, scored_attention
from rlhf_models.batch import TokenBatch
from rlhf_models.fast.compiled import compile_unavailable_reason
from rlhf_models.loading import load_actor
from rlhf_models.testing import tiny_model_dir

LENGTHS = (300, 1, 77, 512, 2, 129)
SMALL = {
    "vocab_size": 1003,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "sliding_window": 100,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
FAMILIES = {
    "gemma2": (Gemma2ForCausalLM, Gemma2Config, {"attn_logit_softcapping": 2.0, "query_pre_attn_scalar": 1}),
    "gpt_oss": (GptOssForCausalLM, GptOssConfig, {"num_local_experts": 4, "num_experts_per_tok": 2}),
}


@pytest.mark.parametrize("window", [None, 100])
@pytest.mark.parametrize(("cap", "has_sinks"), [(2.0, False), (None, True), (2.0, True)])
@pytest.mark.parametrize("num_keys", [2, 6])
def test_flex_attention_is_as_near_to_float64_as_bfloat16_allows(cap, has_sinks, window, num_keys):
    torch.manual_seed(0)
    bounds = torch.tensor([0, *LENGTHS], device="cuda").cumsum(0).to(torch.int32)
    shapes = [(1, count, sum(LENGTHS), 64) for count in (6, num_keys, num_keys)]
    given = [torch.randn(shape, device="cuda", dtype=torch.bfloat16) for shape in shapes]
    given += [torch.randn(6, device="cuda", dtype=torch.bfloat16)] if has_sinks else []
    weight = torch.randn(1, sum(LENGTHS), 6, 64, device="cuda")

    def run(dtype, dropout):  # with the smallest dropout, sequences are computed one by one
        tensors = [tensor.detach().to(dtype).requires_grad_() for tensor in given]
        own = {"s_aux": tensors[3]} if has_sinks else {}
        options = {"softcap": cap, "sliding_window": window, "cu_seq_lens_q": bounds, "dropout": dropout}
        output, _ = scored_attention(nn.Module(), *tensors[:3], None, **options, **own)
        (output * weight.to(dtype)).sum().backward()
        return [output.detach(), *(tensor.grad for tensor in tensors)]

    for found, truth in zip(run(torch.bfloat16, 0.0), run(torch.float64, 1e-300), strict=True):
        assert (found - truth).norm() < 0.01 * truth.norm()


@pytest.mark.parametrize("name", [*FAMILIES])
def test_packed_family_is_as_near_to_float32_as_padded(name, tmp_path):
    model_class, config_class, more = FAMILIES[name]
    folder = tiny_model_dir(tmp_path)
    torch.manual_seed(0)
    model_class(config_class(**SMALL, **more)).save_pretrained(folder)
    torch.manual_seed(0)
    sequences = [torch.randint(3, 1003, (length,)).numpy() for length in LENGTHS]

    def run(dtype, packing):
        actor = load_actor(folder, dtype=dtype, packing=packing).cuda()
        assert actor.model.config._attn_implementation == (SCORED_ATTENTION if packing else "eager")
        if packing:
            assert compile_unavailable_reason(actor.model, torch.device("cuda")) is not None
        batch = TokenBatch.packed(sequences, "cuda") if packing else TokenBatch.padded(sequences, 0, "cuda")
        logprobs = torch.cat(batch.split(actor(batch).logprobs))
        (logprobs * torch.linspace(-1, 1, len(logprobs), device="cuda")).sum().backward()
        gradients = [weight.grad.flatten().float() for weight in actor.parameters() if weight.grad is not None]
        return logprobs.detach(), torch.cat(gradients)

    truth, padded, packed = run("float32", False), run("bfloat16", False), run("bfloat16", True)
    for own, other, exact in zip(packed, padded, truth, strict=True):
        assert (own - exact).norm() < 1.2 * (other - exact).norm()
