"""Ranks that divide the experts of a mixture compute the outputs and gradients of plain transformers, and refuse models
and settings that they cannot divide."""

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from torch import nn

from rlhf_data.errors import ConfigError, EngineError
from rlhf_models.lora import LoraSpec
from rlhf_train.engine.expert_parallel import (
    MODEL_TYPES,
    check_divides_experts,
    divide_experts,
    join_expert_group,
)
from rlhf_train.specs import ModelSpec, OptimizerSpec
from trainer_testing import run_ranks

SIZES = {
    "vocab_size": 320, "hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 4, "initializer_range": 0.3, "pad_token_id": 0, "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
}  # fmt: skip
LATENT = {"q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 8}
GROUPS = {"n_routed_experts": 4, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1}
FAMILIES = {
    "deepseek_v2": ("DeepseekV2", LATENT | GROUPS),
    "deepseek_v3": ("DeepseekV3", LATENT | GROUPS),
    "glm4_moe": ("Glm4Moe", GROUPS | {"head_dim": 8}),
    "mixtral": ("Mixtral", {"num_local_experts": 4}),
    "olmoe": ("Olmoe", {"num_experts": 4}),
    "qwen2_moe": ("Qwen2Moe", {"num_experts": 4, "shared_expert_intermediate_size": 20}),
    "qwen3_moe": ("Qwen3Moe", {"num_experts": 4, "head_dim": 8, "mlp_only_layers": [1]}),
}
PAIR = torch.arange(2)
ROWS = torch.arange(24).view(2, 2, 6) * 7 % SIZES["vocab_size"]  # of 2 ranks


class Wrapped(nn.Module):
    """As models of rlhf_models have a transformers model."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model


def new_model(family: str) -> Any:
    prefix, fields = FAMILIES[family]
    kind = getattr(transformers, f"{prefix}Model")
    torch.manual_seed(5)
    config = kind.config_class(**(SIZES | fields), attn_implementation="eager")
    config._experts_implementation = "eager"  # grouped products are not for float64
    model = kind(config).double().train()
    if family == "olmoe":  # all tokens go to the same two experts, which are on one rank
        for name, module in model.named_modules():
            if name.endswith(".gate"):
                module.register_forward_hook(lambda *call: (*call[2][:2], torch.zeros_like(call[2][2]) + PAIR))
    return model


def loss_of(hidden: torch.Tensor) -> torch.Tensor:
    return (hidden * torch.linspace(-1, 1, hidden.numel(), dtype=torch.float64).view_as(hidden)).sum()


def divided_passes(rank: int, num_ranks: int, master: Any) -> dict[str, Any]:
    from rlhf_train.engine.process_group import init_process_group

    init_process_group(rank=rank, world_size=num_ranks, master=master, device="cpu")
    group = join_expert_group(2)
    found: dict[str, Any] = {}
    for family in FAMILIES:
        model = new_model(family)
        num_all = {name: len(weight) for name, weight in model.named_parameters() if ".experts." in name}
        if family == "mixtral":
            model.gradient_checkpointing_enable({"use_reentrant": False})
        divide_experts(Wrapped(model), group)
        assert num_all and all(2 * len(model.get_parameter(name)) == count for name, count in num_all.items())
        hidden = model(input_ids=ROWS[rank]).last_hidden_state
        loss_of(hidden).backward()
        whole = {name: group.whole(weight).numpy().copy() for name, weight in model.named_parameters()}
        for weight in model.parameters():
            if not hasattr(weight, "part"):
                torch.distributed.all_reduce(weight.grad)
            weight.data = weight.grad
        gradients = {name: group.whole(weight).numpy().copy() for name, weight in model.named_parameters()}
        found[family] = (hidden.detach().numpy().copy(), whole, gradients)
    return found


@pytest.fixture(scope="module")
def passes() -> list[dict[str, Any]]:
    return run_ranks(divided_passes, 2)


@pytest.mark.parametrize("family", list(FAMILIES))
def test_divided_experts_compute_what_transformers_does(passes, family):
    plain = new_model(family)
    hidden = [plain(input_ids=rows).last_hidden_state for rows in ROWS]
    sum(map(loss_of, hidden)).backward()
    for wanted, ranks in zip(hidden, passes, strict=True):
        found, weights, gradients = ranks[family]
        assert np.abs(found - wanted.detach().numpy()).max() < 1e-12
        for name, weight in plain.named_parameters():
            assert np.array_equal(weights[name], weight.detach().numpy())
            largest = float(weight.grad.abs().max())
            assert np.abs(gradients[name] - weight.grad.numpy()).max() <= 1e-9 * largest, name
    idle = [name for name, weight in plain.named_parameters() if ".experts." in name and not weight.grad[2:].any()]
    assert bool(idle) == (family == "olmoe")


def test_families_that_are_tested_are_those_that_are_known():
    assert set(MODEL_TYPES) == set(FAMILIES)


# -- what cannot be divided --------------------------------------------------------------------------------------

ADAMW = OptimizerSpec(learning_rate=1e-2)


@pytest.mark.parametrize(
    ("changes", "message", "hint"),
    [
        ({"zero_stage": 3}, "``zero_stage`` is 3", "use ``zero_stage=2``"),
        ({"tensor_parallel_size": 2}, "``tensor_parallel_size`` divides the layers", "use one of them"),
        ({"lora": LoraSpec(rank=1)}, "LoRA adapters train no experts", "drop one"),
        ({"optimizer": dataclasses.replace(ADAMW, muon_momentum=0.9)}, "Muon shares", "use ``muon_momentum=None``"),
        ({"optimizer": dataclasses.replace(ADAMW, offload=True)}, "``OptimizerSpec.offload`` knows", "drop one"),
        ({"images": "trained"}, "models that read images", "drop it"),
        ({"torch_compile": "on"}, "``torch_compile`` is on", "leave ``torch_compile`` at auto"),
    ],
)
def test_settings_that_do_not_go_together_are_refused(changes, message, hint):
    with pytest.raises(ConfigError, match=rf"(?s)``expert_parallel_size=2`` divides.*, and {message}.*hint: {hint}"):
        ModelSpec(path="", expert_parallel_size=2, **changes).check_ranks(2)
    ModelSpec(path="", expert_parallel_size=2, optimizer=ADAMW).check_ranks(4)
    with pytest.raises(ConfigError, match="``expert_parallel_size`` is 2, and a model has 3 training"):
        ModelSpec(path="", expert_parallel_size=2).check_ranks(3)


@pytest.mark.parametrize(
    ("config", "size", "message"),
    [
        (transformers.LlamaConfig(), 2, "and a llama model has none.*hint: drop it"),
        (transformers.GptOssConfig(), 2, "of deepseek_v2, .* models, not of gpt_oss.*hint: drop it; ``zero_stage=3``"),
        (transformers.MixtralConfig(), 3, "and the model has 8.*hint: use one of 2, 4, 8, or drop it"),
    ],
)
def test_models_whose_experts_ranks_cannot_divide_are_refused(config, size, message):
    with pytest.raises(ConfigError, match=f"(?s)``expert_parallel_size={size}`` divides the experts.*{message}"):
        check_divides_experts(config, size)
    check_divides_experts(transformers.MixtralConfig(), 4)


def test_another_version_of_deepspeed_is_told(monkeypatch):
    from rlhf_train.engine import deepspeed_internals

    names = deepspeed_internals.EXPERT_NAMES | {"deepspeed.moe.layer": ("Other",)}
    monkeypatch.setattr(deepspeed_internals, "EXPERT_NAMES", names)
    with pytest.raises(EngineError, match=r"there is no deepspeed\.moe\.layer\.Other"):
        join_expert_group(2)
