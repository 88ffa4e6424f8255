"""Muon against its formula in float64, by singular values, and against PyTorch's own; and which weights it trains."""

import dataclasses

import numpy as np
import pytest
import torch
from torch import nn

from rlhf_data.errors import ConfigError
from rlhf_models.loading import load_critic
from rlhf_models.testing import tiny_model_dir
from rlhf_rollout.host import free_port
from rlhf_train.engine.deepspeed import DeepSpeedEngine
from rlhf_train.engine.optimizer import Muon, is_hidden_matrix, orthogonalized
from rlhf_train.engine.process_group import init_process_group
from rlhf_train.engine.shards import WeightSlice
from rlhf_train.specs import OptimizerSpec
from trainer_testing import run_ranks

SPEC = OptimizerSpec(
    learning_rate=0.02, betas=(0.8, 0.9), eps=1e-4, weight_decay=0.1, muon_momentum=0.7, max_norm=0.5,
    scheduler="constant",
)  # fmt: skip
HIDDEN = ("layers.0.weight", "layers.1.weight", "layers.2.experts.up")


def page(matrix: torch.Tensor) -> torch.Tensor:
    """Five times s <- 3.4445 s - 4.7750 s^3 + 2.0315 s^5 on the singular values of a matrix of norm 1, in float64."""
    left, values, right = torch.linalg.svd(matrix.double() / max(float(matrix.double().norm()), 1e-7), False)
    for _ in range(5):
        values = 3.4445 * values - 4.7750 * values**3 + 2.0315 * values**5
    return left @ values.diag() @ right


@pytest.mark.parametrize("shape", [(8, 8), (5, 9), (9, 5), (1, 6), (6, 1), (1, 1)])
@pytest.mark.parametrize("scale", [1.0, 1e-4])
def test_orthogonalized_changes_only_singular_values(shape, scale):
    matrix = scale * torch.randn(shape, generator=torch.Generator().manual_seed(1))
    found = orthogonalized(matrix)
    assert found.is_contiguous() and found.shape == shape
    torch.testing.assert_close(found.double(), page(matrix), rtol=0, atol=1e-3)
    assert torch.linalg.svdvals(found).max() < 1.3


@pytest.mark.parametrize("shape", [(3, 5, 9), (2, 9, 5), (1, 4, 4)])
def test_orthogonalized_takes_each_matrix_of_a_stack_by_itself(shape):
    stack = torch.randn(shape, generator=torch.Generator().manual_seed(2))
    stack[0] *= 1000
    found = orthogonalized(stack)
    assert found.is_contiguous() and found.shape == shape
    for matrix, one in zip(stack, found, strict=True):
        torch.testing.assert_close(one.double(), page(matrix), rtol=0, atol=1e-3)


def test_orthogonalized_of_low_rank_and_of_zeros():
    column = torch.tensor([[1.0], [2.0], [-2.0]])
    found = orthogonalized(column @ torch.tensor([[3.0, 4.0]]))
    torch.testing.assert_close(found.double(), page(column @ torch.tensor([[3.0, 4.0]])), rtol=0, atol=1e-4)
    assert torch.linalg.svdvals(found)[1] < 1e-4
    assert torch.equal(orthogonalized(torch.zeros(3, 2)), torch.zeros(3, 2))


def test_muon_takes_the_steps_of_pytorchs():
    torch.manual_seed(0)
    own = nn.Parameter(torch.randn(12, 7))
    other = nn.Parameter(own.detach().clone())
    ours = Muon([{"params": [own], "momentum": 0.9, "weight_decay": 0.1}], {"0.w": own.shape}, lr=0.05)
    ours.find([WeightSlice("0.w", 0, own.numel(), own, 0)], 1)
    options = {"momentum": 0.9, "weight_decay": 0.1, "adjust_lr_fn": "match_rms_adamw"}
    theirs = torch.optim.Muon([other], lr=0.05, **options)
    before = own.detach().clone()
    for _ in range(4):
        own.grad = torch.randn_like(own)
        other.grad = own.grad.clone()
        ours.step()
        theirs.step()
    moved = (own - before).norm()
    assert (own - other).norm() < 0.01 * moved  # PyTorch's products are in bfloat16


class Mixture(nn.Module):
    """Adds to a token what one of three experts makes of it, as transformers keeps experts: one weight of all."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ParameterDict({"up": torch.randn(3, 5, 6), "up_bias": torch.randn(3, 5)})

    def forward(self, hidden):
        chosen = torch.arange(len(hidden)) % 3
        inner = torch.einsum("tnm,tm->tn", self.experts["up"][chosen], hidden) + self.experts["up_bias"][chosen]
        return hidden + nn.functional.pad(torch.tanh(inner), (0, 1))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.embed = nn.Embedding(11, 6)
        self.layers = nn.ModuleList([nn.Linear(6, 9), nn.Linear(9, 6, bias=False), Mixture()])
        self.norm = nn.LayerNorm(6)
        self.head = nn.Linear(6, 11, bias=False)

    def forward(self, tokens):
        hidden = self.embed(tokens)
        hidden = hidden + self.layers[1](torch.tanh(self.layers[0](hidden)))
        return self.head(self.norm(self.layers[2](hidden)))


def loss_of(model, update):
    tokens = torch.randint(11, (40,), generator=torch.Generator().manual_seed(update))
    return nn.functional.cross_entropy(model(tokens), (tokens * 3 + update) % 11)


def expected(num_updates):
    """The weights after updates in float64: each formula by hand for matrices of layers, PyTorch's AdamW for others."""
    model = Net().double()
    named = dict(model.named_parameters())
    decayed = [named[name] for name in ("embed.weight", "head.weight")]
    vectors = [weight for weight in named.values() if weight.ndim == 1] + [named["layers.2.experts.up_bias"]]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    adamw = torch.optim.AdamW(groups, lr=0.02, betas=SPEC.betas, eps=SPEC.eps)
    momenta = {name: torch.zeros_like(named[name]) for name in HIDDEN}
    for update in range(num_updates):
        model.zero_grad()
        loss_of(model, update).backward()
        assert nn.utils.clip_grad_norm_(model.parameters(), 0.5) > 0.5
        adamw.step()
        for name in HIDDEN:
            gradient = named[name].grad
            momenta[name] = 0.7 * momenta[name] + 0.3 * gradient
            blend = 0.3 * gradient + 0.7 * momenta[name]
            matrices = torch.stack([page(matrix) for matrix in blend]) if blend.ndim == 3 else page(blend)
            step = 0.2 * max(gradient.shape[-2:]) ** 0.5 * matrices
            named[name].data = (1 - 0.02 * 0.1) * named[name].data - 0.02 * step
    return named


def trained(rank, num_ranks, master, zero_stage):
    """The weights after three updates in which the losses of all ranks are the same and add up."""
    init_process_group(rank=rank, world_size=num_ranks, master=master, device="cpu")
    engine = DeepSpeedEngine(Net(), SPEC, zero_stage=zero_stage, dtype=torch.float32, device="cpu")
    for update in range(3):
        engine.backward(loss_of(engine.forward, update) / num_ranks, is_last=True)
        engine.step()
    return {name: weight.numpy() for name, weight in engine.state_dict().items()}


def check(found):
    for name, weight in expected(3).items():
        np.testing.assert_allclose(found[name], weight.detach(), rtol=0, atol=2e-5, err_msg=name)


@pytest.mark.parametrize("zero_stage", [0, 1, 2, 3])
def test_engine_updates_matrices_of_layers_by_muon_and_the_rest_by_adamw(zero_stage):
    check(trained(0, 1, ("127.0.0.1", free_port()), zero_stage))


@pytest.mark.parametrize("zero_stage", [1, 3])
def test_ranks_share_the_matrices_also_where_their_number_is_odd(zero_stage):
    assert len(HIDDEN) == 3
    for found in run_ranks(trained, 2, zero_stage):
        check(found)


def test_muon_trains_the_matrices_of_layers_and_no_embedding_head_norm_or_bias(tmp_path):
    critic = load_critic(str(tiny_model_dir(tmp_path / "model")), dtype="float32")
    chosen = {name for name, weight in critic.named_parameters() if is_hidden_matrix(name, weight)}
    linear = {f"{name}.weight" for name, part in critic.named_modules() if isinstance(part, nn.Linear)}
    assert chosen == linear - {"value_head.weight"} and len(chosen) > 6


@pytest.mark.parametrize("architecture", ["qwen3_moe", "qwen2_moe", "mixtral"])
def test_muon_trains_routers_and_experts(tmp_path, architecture):
    critic = load_critic(str(tiny_model_dir(tmp_path / "model", architecture=architecture)), dtype="float32")
    chosen = {name: weight for name, weight in critic.named_parameters() if is_hidden_matrix(name, weight)}
    assert {name for name, weight in chosen.items() if weight.ndim == 3} == {
        f"model.layers.{layer}.mlp.experts.{part}" for layer in (0, 1) for part in ("gate_up_proj", "down_proj")
    }
    assert "model.layers.1.mlp.gate.weight" in chosen
    others = {name for name, _ in critic.named_parameters()} - chosen.keys()
    assert all(name.endswith(("norm.weight", "bias", "embed_tokens.weight", "value_head.weight")) for name in others)


def test_muon_leaves_convolutions_and_takes_experts_that_are_layers_of_their_own():
    assert not is_hidden_matrix("layers.0.conv.weight", torch.empty(4, 1, 3))
    assert is_hidden_matrix("layers.0.experts.2.up.weight", torch.empty(4, 3))
    assert not is_hidden_matrix("experts.up", torch.empty(2, 4, 3))


def test_model_without_layers_is_refused():
    init_process_group(rank=0, world_size=1, master=("127.0.0.1", free_port()), device="cpu")
    for spec, model in ((SPEC, nn.Linear(2, 2)), (SPEC, Net().requires_grad_(False))):
        with pytest.raises(ConfigError, match=r"this model trains none\n\nhint: use ``muon_momentum=None``"):
            DeepSpeedEngine(model, spec, zero_stage=1, dtype=torch.float32, device="cpu")
    DeepSpeedEngine(
        nn.Linear(2, 2), dataclasses.replace(SPEC, muon_momentum=None), zero_stage=1, dtype=torch.float32, device="cpu"
    )
