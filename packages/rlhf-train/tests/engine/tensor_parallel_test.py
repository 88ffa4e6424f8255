"""Ranks that divide the weights of layers compute the outputs and gradients of plain transformers, and refuse models
and settings that they cannot divide."""

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from torch import nn

from rlhf_data.errors import ConfigError
from rlhf_models.lora import LoraSpec
from rlhf_train.engine.tensor_parallel import check_divides, divide_weights, join_tensor_group
from rlhf_train.specs import ModelSpec, OptimizerSpec
from trainer_testing import run_ranks

SIZES = {
    "vocab_size": 320, "hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "initializer_range": 0.3, "pad_token_id": 0,
}  # fmt: skip
FAMILIES = {
    "llama": ("Llama", {"attention_bias": True, "mlp_bias": True}),  # biases of columns and of rows
    "qwen2": ("Qwen2", {}),
    "qwen3": ("Qwen3", {"head_dim": 8}),  # norms of heads, whole on each rank, of which each has some
    "gemma3": ("Gemma3Text", {"head_dim": 8, "sliding_window": 3, "query_pre_attn_scalar": 8}),
    "mistral": ("Mistral", {"head_dim": 8, "sliding_window": 3}),
}
ROWS = torch.arange(12).view(2, 6) * 7 % SIZES["vocab_size"]


class Wrapped(nn.Module):
    """As models of rlhf_models have a transformers model."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model


def new_model(family: str, **changes: Any) -> Any:
    prefix, fields = FAMILIES[family]
    kind = getattr(transformers, f"{prefix}Model")
    torch.manual_seed(5)
    model = kind(kind.config_class(**(SIZES | fields | changes), attn_implementation="eager")).double()
    for name, weight in model.named_parameters():
        if weight.ndim == 1:  # biases start as zeros and scales as ones, which would hide mistakes
            weight.data = torch.rand(weight.shape, generator=torch.Generator().manual_seed(len(name))).double()
    return model


def loss_of(hidden: torch.Tensor) -> torch.Tensor:
    return (hidden * torch.linspace(-1, 1, hidden.numel(), dtype=torch.float64).view_as(hidden)).sum()


def divided_passes(rank: int, num_ranks: int, master: Any, size: int) -> dict[str, Any]:
    from rlhf_train.engine.process_group import init_process_group

    init_process_group(rank=rank, world_size=num_ranks, master=master, device="cpu")
    group = join_tensor_group(size)
    found: dict[str, Any] = {"place": (group.rank, group.size, group.data_rank, group.data_size)}
    for family in FAMILIES:
        model = new_model(family)
        if family == "llama":
            model.gradient_checkpointing_enable({"use_reentrant": False})
        model.train()
        num_all = sum(weight.numel() for weight in model.layers.parameters() if weight.ndim > 1)
        wrapped = Wrapped(model)
        divide_weights(wrapped, group)
        num_own = sum(weight.numel() for weight in model.layers.parameters() if weight.ndim > 1)
        assert num_own * size == num_all
        hidden = model(input_ids=ROWS + group.data_rank).last_hidden_state
        loss_of(hidden).backward()
        norm = group.norm(list(model.parameters()))
        whole = {name: group.whole(weight).numpy().copy() for name, weight in model.named_parameters()}
        gradients = {}
        for name, weight in model.named_parameters():
            weight.data = weight.grad
            gradients[name] = group.whole(weight).numpy().copy()
        found[family] = (hidden.detach().numpy(), gradients, whole, norm)
    return found


@pytest.mark.parametrize(("num_ranks", "size"), [(2, 2), (4, 2)])
def test_outputs_and_gradients_are_those_of_plain_transformers_in_float64(num_ranks, size):
    ranks = run_ranks(divided_passes, num_ranks, size)
    assert [rank["place"] for rank in ranks] == [
        (n % size, size, n // size, num_ranks // size) for n in range(num_ranks)
    ]
    for rank in ranks:
        for family in FAMILIES:
            plain = new_model(family)
            weights = {name: weight.detach().clone().numpy() for name, weight in plain.named_parameters()}
            wanted = plain(input_ids=ROWS + rank["place"][2]).last_hidden_state
            loss_of(wanted).backward()
            hidden, gradients, whole, norm = rank[family]
            np.testing.assert_allclose(hidden, wanted.detach().numpy(), rtol=1e-9, atol=1e-9, err_msg=family)
            assert gradients.keys() == whole.keys() == weights.keys()
            for name, weight in plain.named_parameters():
                assert np.array_equal(whole[name], weights[name])
                largest = weight.grad.abs().max()
                assert largest > 1e-3
                # Gemma's norms of heads add up over tokens and heads in float32.
                tolerance = 1e-6 if family == "gemma3" and "self_attn" in name and weight.ndim == 1 else 1e-9
                error = np.abs(gradients[name] - weight.grad.numpy()).max()
                assert error < tolerance * float(largest), f"{family} {name}"
            squares = sum(float(weight.grad.square().sum()) for weight in plain.parameters())
            assert norm == pytest.approx(squares**0.5, rel=1e-8)


# -- what cannot be divided --------------------------------------------------------------------------------------

ADAMW = OptimizerSpec(learning_rate=1e-2)


@pytest.mark.parametrize(
    ("changes", "num_ranks", "message", "hint"),
    [
        ({"zero_stage": 3}, 2, "``zero_stage`` is 3", "use ``zero_stage=2``"),
        (
            {"sequence_parallel_size": 2, "packing": True},
            4,
            "``sequence_parallel_size`` divides tokens",
            "use one of them",
        ),
        ({"lora": LoraSpec(rank=1)}, 2, "LoRA adapters add matrices", "drop one"),
        (
            {"optimizer": dataclasses.replace(ADAMW, muon_momentum=0.9)},
            2,
            "Muon needs",
            "use ``muon_momentum=None``",
        ),
        ({"torch_compile": "on"}, 2, "``torch_compile`` is on", "leave ``torch_compile`` at auto"),
    ],
)
def test_settings_that_do_not_go_together_are_refused(changes, num_ranks, message, hint):
    with pytest.raises(ConfigError, match=rf"(?s)``tensor_parallel_size=2`` divides.* and {message}.*hint: {hint}"):
        ModelSpec(path="", tensor_parallel_size=2, **changes).check_ranks(num_ranks)


def test_settings_that_go_together_are_not_refused():
    offloaded = dataclasses.replace(ADAMW, offload=True)
    ModelSpec(path="", tensor_parallel_size=2, optimizer=offloaded, dtype="bfloat16").check_ranks(2)  # nothing to shard
    ModelSpec(path="", tensor_parallel_size=2, optimizer=ADAMW).check_ranks(4)
    with pytest.raises(ConfigError, match="``zero_stage`` is 2"):
        ModelSpec(path="", tensor_parallel_size=2, optimizer=offloaded, dtype="bfloat16").check_ranks(4)


def config(family: str = "Llama", **changes: Any) -> Any:
    return getattr(transformers, f"{family}Config")(**(SIZES | changes))


@pytest.mark.parametrize(
    ("config", "size", "message"),
    [
        (config(), 3, "must divide the model's num_attention_heads, which is 4\n\nhint: use 2"),
        (config(), 8, "num_attention_heads, which is 4\n\nhint: use 2$"),  # 4 does not divide 2 key-value heads
        (config(num_attention_heads=8, num_key_value_heads=8), 16, "heads, which is 8\n\nhint: use 2 or 4 or 8$"),
        (config(num_key_value_heads=1), 2, "num_key_value_heads, which is 1\n\nhint: drop it"),
        (config(), 4, "must divide the model's num_key_value_heads, which is 2\n\nhint: use 2"),
        (config(num_key_value_heads=4, intermediate_size=42), 4, "intermediate_size, which is 42\n\nhint: use 2"),
        (transformers.GPT2Config(), 2, "no plan to divide a gpt2 model\n\nhint: .* ``zero_stage=3``"),
        (config("Phi3"), 2, "a phi3 model is divided in ways .*colwise_gather_output"),
        (transformers.Gemma3nTextConfig(), 2, "gemma3n_text model differ in intermediate_size\n\nhint: drop"),
        (transformers.AutoConfig.for_model("embedding_gemma2_text"), 2, "differ in num_key_value_heads\n\nhint: drop"),
        (config("Qwen3Moe"), 2, "a qwen3_moe model is divided in ways .*hint: .* ``zero_stage=3``"),
    ],
)
def test_models_that_cannot_be_divided_are_refused(config, size, message):
    with pytest.raises(ConfigError, match=f"(?s)``tensor_parallel_size={size}``.*{message}"):
        check_divides(config, size)


class Adapted(nn.Linear):
    """A layer that does more than its weights say."""


def refusals(rank: int, num_ranks: int, master: Any) -> list[str]:
    from rlhf_train.engine.process_group import init_process_group

    init_process_group(rank=rank, world_size=num_ranks, master=master, device="cpu")
    group = join_tensor_group(2)
    assert join_tensor_group(1) is None
    adapted = new_model("llama")
    adapted.layers[1].mlp.down_proj = Adapted(40, 24)
    gated = new_model("llama")
    gated.layers[0].self_attn.gate = nn.Parameter(torch.ones(4))
    normed = new_model("llama")
    normed.layers[0].mlp.norm = nn.LayerNorm(24)
    odd = new_model("llama")
    odd.layers[0].mlp.up_proj = nn.Linear(24, 41)
    texts = []
    for model in (adapted, gated, normed, odd):
        with pytest.raises(ConfigError) as caught:
            divide_weights(Wrapped(model), group)
        texts.append(str(caught.value))
    return texts


def test_layers_that_the_plan_does_not_fit_are_refused():
    for texts in run_ranks(refusals, 2):
        assert "2 ranks cannot divide the layer layers.1.mlp.down_proj: Adapted" in texts[0]
        assert "does not say how ranks divide layers.0.self_attn\n" in texts[1]
        assert "does not say how ranks divide layers.0.mlp.norm\n" in texts[2]
        assert "2 ranks cannot divide the layer layers.0.mlp.up_proj: Linear" in texts[3]
        assert all("hint:" in text for text in texts)
