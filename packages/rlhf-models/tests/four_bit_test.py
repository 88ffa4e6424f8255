"""Layers in 4 bits: their numbers, their gradients, what stays whole, and adapters saved beside them."""

import sys

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM

from rlhf_data.errors import ConfigError
from rlhf_models.batch import TokenBatch
from rlhf_models.four_bit import Linear4bit, pack_layers, packed_layers, round_layers
from rlhf_models.loading import load_actor, load_critic
from rlhf_models.lora import LoraSpec, add_lora, merge_adapter, save_adapter

peft = pytest.importorskip("peft")
pytest.importorskip("bitsandbytes")

BATCH = TokenBatch.padded([[5, 6, 7, 8], [9, 10]], 0)
SPEC = LoraSpec(rank=2, alpha=6.0, load_in_4bit=True)
LINEAR = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
# The 16 numbers of NF4: arXiv:2305.14314, appendix E.
NF4 = torch.tensor(
    [
        *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635),
        *(-0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725),
        *(0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
    ]
)


def linear(rows: int = 96, columns: int = 128, dtype: torch.dtype = torch.float32) -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(columns, rows, dtype=dtype).requires_grad_(False)


def stirred(model: nn.Module, spec: LoraSpec) -> nn.Module:
    """Add adapters, of the same numbers for the same sizes."""
    add_lora(model, spec)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.copy_(0.1 * torch.randn(parameter.shape, generator=generator))
    return model


def rounded(path, dtype: str) -> nn.Module:
    """An actor of whole weights, rounded as a base in 4 bits is."""
    actor = load_actor(path, dtype=dtype)
    round_layers(actor.model, [name for name, _ in actor.model.named_modules() if name.endswith(LINEAR)])
    return actor


def test_weights_are_the_nearest_nf4_numbers_times_the_largest_of_their_block():
    layer = linear()
    packed = Linear4bit(layer)
    blocks, found = layer.weight.reshape(-1, 64), packed.whole().reshape(-1, 64)
    scales = blocks.abs().amax(1, keepdim=True)
    nearest = NF4[(blocks[..., None] / scales[..., None] - NF4).abs().argmin(-1)]
    restored = found.abs().amax(1, keepdim=True)
    torch.testing.assert_close(found, nearest * restored, rtol=1e-5, atol=1e-7)
    assert ((restored / scales - 1).abs() < 0.01).all()  # they are stored in 8 bits
    assert packed.weight.nbytes == layer.weight.numel() / 2


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_outputs_and_gradients_are_those_of_the_restored_weights_in_every_mode(model_dir, dtype):
    actors = [
        stirred(load_actor(model_dir, dtype=dtype), SPEC),
        stirred(rounded(model_dir, dtype), LoraSpec(rank=2, alpha=6.0)),
    ]
    found, expected = ({}, {})
    for actor, gradients in zip(actors, (found, expected), strict=True):
        actor(BATCH).logprobs.sum().backward()
        gradients |= {name: weight.grad for name, weight in actor.named_parameters() if weight.requires_grad}
    assert found.keys() == expected.keys() and len(found) == 2 * 7 * 2
    for name, gradient in found.items():
        torch.testing.assert_close(gradient, expected[name])
        assert gradient.any()
    trained = actors[0](BATCH).logprobs
    with torch.no_grad():
        assert torch.equal(actors[0].eval()(BATCH).logprobs, trained)
    torch.testing.assert_close(trained, actors[1](BATCH).logprobs)
    plain = stirred(load_actor(model_dir, dtype=dtype), LoraSpec(rank=2, alpha=6.0))
    assert (plain(BATCH).logprobs - trained).abs().max() > 1e-3


def test_a_product_keeps_no_whole_weights_for_the_backward_pass():
    kept = []
    layer = linear()
    packed = Linear4bit(layer)
    x = torch.randn(3, 5, 128, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: kept.append(tensor.shape), lambda _: None):
        y = packed(x)
    exact = x.double() @ packed.whole().double().T + layer.bias.double()
    torch.testing.assert_close(y.double(), exact, rtol=0, atol=1e-5)
    assert torch.Size((96, 128)) not in kept


def test_only_linear_layers_are_in_4_bits_and_take_half_a_byte_per_weight(qwen2_dir):
    for model in (load_actor(qwen2_dir, dtype="bfloat16"), load_critic(qwen2_dir, dtype="bfloat16")):
        before = dict(model.named_parameters())
        sizes = {
            name: weight.numel()
            for name, weight in before.items()
            if name.split(".")[-2] in LINEAR and weight.dim() > 1
        }
        add_lora(model, LoraSpec(rank=2, target_modules=("q_proj",), load_in_4bit=True))
        packed = packed_layers(model)
        assert sum(weight.nbytes for weight in packed) == sum(sizes.values()) / 2
        after = {
            name.replace(".base_layer", ""): weight for name, weight in model.named_parameters() if "lora" not in name
        }
        assert {name for name, weight in after.items() if weight in packed} == sizes.keys()
        assert all(after[name] is weight for name, weight in before.items() if name not in sizes)
        assert {weight.dtype for weight in after.values()} <= {torch.bfloat16, torch.float32}


def test_a_change_of_the_data_type_leaves_the_scales_and_odd_layers_stay_whole():
    model = nn.Sequential(linear(dtype=torch.bfloat16), linear(rows=3, columns=7))
    pack_layers(model, ["0", "1"])
    before = model[0].whole()
    assert torch.equal(model.bfloat16()[0].whole(), before)
    assert type(model[1]) is nn.Linear


def test_saved_adapter_fits_the_whole_base_in_peft_and_merges_into_either_base(model_dir, tmp_path):
    actor = stirred(load_actor(model_dir, dtype="float32"), SPEC).eval()
    adapter = save_adapter(actor, actor.state_dict(), tmp_path / "adapter")
    plain = peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(model_dir), str(adapter))
    on_whole, on_rounded = (
        load_actor(
            merge_adapter(model_dir, adapter, tmp_path / str(flag), dtype="float32", load_in_4bit=flag), dtype="float32"
        )
        for flag in (False, True)
    )
    logprobs = actor(BATCH).logprobs
    torch.testing.assert_close(on_rounded.eval()(BATCH).logprobs, logprobs, rtol=0, atol=1e-5)
    ids = torch.tensor([[5, 6, 7, 8]])
    torch.testing.assert_close(plain(ids).logits, on_whole.eval().model(ids).logits, rtol=0, atol=1e-5)
    assert (on_whole(BATCH).logprobs - logprobs).abs().max() > 1e-3


def test_without_bitsandbytes_the_error_says_how_to_install_it_and_the_model_is_unchanged(model_dir, monkeypatch):
    actor = load_actor(model_dir, dtype="float32")
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    with pytest.raises(ConfigError, match=r"needs bitsandbytes.*\n\nhint: .*rlhf-models\[4bit\]', or drop"):
        add_lora(actor, SPEC)
    assert not packed_layers(actor)
