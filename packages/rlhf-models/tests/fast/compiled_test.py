"""Compiled layers compute what the others do; here without a code generator, which a GPU test adds."""

import pytest
import torch
from torch._dynamo.backends import registry
from torch.nn.functional import linear

from rlhf_models.batch import TokenBatch
from rlhf_models.fast import compiled
from rlhf_models.fast.compiled import compile_layers, compile_unavailable_reason, join_products
from rlhf_models.loading import load_actor
from rlhf_models.lora import LoraSpec, add_lora
from rlhf_models.testing import tiny_model_dir


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny_model_dir(tmp_path_factory.mktemp("model"))


@pytest.mark.parametrize("checkpointing", [False, True])
def test_compile_layers_keeps_outputs_gradients_and_names(folder, checkpointing):
    plain, compiled = (load_actor(folder, dtype="float32", gradient_checkpointing=checkpointing) for _ in range(2))
    compile_layers(compiled.model, backend="aot_eager")
    for length in (3, 8):  # another shape, the same code
        batch = TokenBatch.padded([range(5, 5 + length), range(40, 40 + 2 * length)], 0)
        one, other = (model(batch).logprobs for model in (plain, compiled))
        torch.testing.assert_close(other, one, atol=1e-6, rtol=0)
        one.sum().backward()
        other.sum().backward()
    for (name, weight), (other_name, other_weight) in zip(
        plain.named_parameters(), compiled.named_parameters(), strict=True
    ):
        assert name == other_name
        torch.testing.assert_close(other_weight.grad, weight.grad, atol=1e-5, rtol=1e-5)


def test_compile_layers_calls_the_compiler(folder):
    calls = []

    def backend(graph, inputs):
        calls.append(graph)
        return graph.forward

    model = load_actor(folder, dtype="float32")
    compile_layers(model.model, backend=backend)
    with torch.no_grad():
        model(TokenBatch.padded([[5, 6, 7]], 0))
    assert calls


@pytest.mark.parametrize("checkpointing", [False, True])
def test_layers_with_adapters_share_one_compiled_code(folder, checkpointing):
    """The embedding is frozen, so that the first layer's input would have no gradient, unlike the others'."""
    pytest.importorskip("peft")
    compiled_graphs = []

    def backend(graph, inputs):
        if graph.graph.nodes:
            compiled_graphs.append(graph)
        return torch._dynamo.lookup_backend("aot_eager")(graph, inputs)

    batch = TokenBatch.padded([[5, 6, 7], [8, 9]], 0)
    results = []
    for is_compiled in (False, True):
        torch.manual_seed(0)
        actor = load_actor(folder, dtype="float32", gradient_checkpointing=checkpointing)
        add_lora(actor, LoraSpec(rank=2))
        trained = [weight for weight in actor.parameters() if weight.requires_grad]
        for weight in trained:  # B starts at zero, and would leave A without a gradient
            torch.nn.init.normal_(weight, std=0.1)
        if is_compiled:
            compile_layers(actor.model, backend=backend)
        results.append(torch.autograd.grad(actor(batch).logprobs.sum(), trained))
    assert len(compiled_graphs) == 2  # the layers' and the final norm's
    for got, want in zip(*results, strict=True):
        torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("rank", [0, 2])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_code_has_no_numbers_as_inputs(folder, checkpointing, rank):
    """They would be tensors of one number on the CPU, and inductor may need a C++ compiler for them."""
    inputs = []

    def backend(graph, found):
        inputs.extend(found)
        return graph.forward

    actor = load_actor(folder, dtype="float32", gradient_checkpointing=checkpointing)
    if rank:
        pytest.importorskip("peft")
        add_lora(actor, LoraSpec(rank=rank))
    compile_layers(actor.model, backend=backend)
    for length in (3, 5):
        actor(TokenBatch.padded([range(5, 5 + length)], 0)).logprobs.sum().backward()
    tensors = [found for found in inputs if isinstance(found, torch.Tensor)]
    assert len(tensors) > 10
    assert all(found.dim() for found in tensors)


class Branches(torch.nn.Module):
    """Products of one input: with bias, without, wide, frozen, and as a model may write them."""

    def __init__(self):
        super().__init__()
        frozen, bare = {4, 9}, {1024, 2048, 3}
        self.parts = torch.nn.ModuleList(
            torch.nn.Linear(8, size, bias=size not in bare).requires_grad_(size not in frozen)
            for size in (16, 5, 4, 1024, 2048, 9, 3, 6)
        )

    def forward(self, hidden):
        *plain, named, other = self.parts
        made = [part(hidden) for part in plain]
        made[0].clamp_(-0.5, 0.5)
        made[1] = made[1].view(-1)[None, :5].expand(len(hidden), 5)
        made.append(linear(hidden, weight=named.weight))
        made.append(linear(hidden, other.weight, bias=other.bias))
        made.append(linear(hidden, other.weight, other.bias * 2))
        return torch.cat([(part * (index + 1)).sin() for index, part in enumerate(made)], dim=-1)


def test_join_products_joins_narrow_ones_of_a_kind_and_keeps_gradients():
    torch.manual_seed(0)
    module = Branches()
    products = []

    def backend(graph, inputs):
        join_products(graph)
        products.extend(graph.graph.find_nodes(op="call_function", target=linear))
        return torch._dynamo.lookup_backend("aot_eager")(graph, inputs)

    results = []
    for run in (module, torch.compile(module, backend=backend, fullgraph=True)):
        hidden = torch.randn(5, 8, generator=torch.Generator().manual_seed(1), requires_grad=True)
        output = run(hidden)
        trained = [hidden, *(weight for weight in module.parameters() if weight.requires_grad)]
        results.append([output, *torch.autograd.grad(output.cos().sum(), trained)])
    for got, want in zip(*results, strict=True):
        torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-5)
    assert len(products) == 7  # two trained, two frozen, two wide ones, and three that are not plain layers


@pytest.mark.parametrize("checkpointing", [False, True])
def test_compile_layers_joins_queries_keys_and_values_and_the_gate(folder, checkpointing):
    products = []

    def backend(module, inputs):
        found = [part.graph.find_nodes(op="call_function", target=linear) for part in module.modules()]
        products.append(sum(map(len, found)))
        return module.forward

    model = load_actor(folder, dtype="float32", gradient_checkpointing=checkpointing)
    compile_layers(model.model, backend=backend)
    model(TokenBatch.padded([[5, 6, 7]], 0)).logprobs.sum().backward()
    assert products[0] == 4  # of 7


def test_compile_layers_compiles_the_final_norm(folder):
    model = load_actor(folder, dtype="float32")
    compile_layers(model.model, backend="eager")
    base = model.model.base_model
    compiled = [name for name, part in base.named_modules() if part._compiled_call_impl is not None]
    assert compiled == [*(f"layers.{index}" for index in range(len(base.layers))), "norm"]


def test_compile_unavailable_reason_on_a_cpu_and_without_layers(folder):
    model = load_actor(folder, dtype="float32").model
    assert "model is on cpu" in compile_unavailable_reason(model, torch.device("cpu"))
    assert "a Linear has no layers" in compile_unavailable_reason(torch.nn.Linear(2, 2), torch.device("cuda"))


def test_layers_whose_packed_attention_has_no_kernel_are_not_compiled(folder, monkeypatch):
    model = load_actor(folder, dtype="bfloat16", packing=True).model
    monkeypatch.setattr("rlhf_models.fast.compiled.varlen_unavailable_reason", lambda *args: None)
    assert compile_unavailable_reason(model, torch.device("cuda")) is None
    monkeypatch.setattr("rlhf_models.fast.compiled.head_sizes", lambda config: (192, 128))
    reason = compile_unavailable_reason(model, torch.device("cuda"))
    assert reason == "packed attention has no kernel for heads of keys and values of different sizes"


def test_compile_unavailable_reason_after_zero_3_has_replaced_the_linear_function(folder, monkeypatch):
    model = load_actor(folder, dtype="float32").model
    assert compile_unavailable_reason(model, torch.device("cuda")) is None
    monkeypatch.setattr(torch.nn.functional, "linear", lambda *arguments: linear(*arguments))
    assert "linear has been replaced" in compile_unavailable_reason(model, torch.device("cuda"))
    assert compile_unavailable_reason(model, torch.device("cuda"), inside_hooks=True) is None


def test_compile_unavailable_reason_packed_float32_has_no_kernel(folder):
    model = load_actor(folder, dtype="float32", packing=True).model
    assert "computes in torch.float32" in compile_unavailable_reason(model, torch.device("cuda"))


@pytest.mark.parametrize("rank", [0, 2])
def test_inductor_rounds_as_eager_code_where_there_are_adapters(folder, monkeypatch, rank):
    settings = []

    def inductor(graph, inputs, config_patches=None):
        settings.append(config_patches)
        return graph.forward

    monkeypatch.setitem(registry._COMPILER_FNS, "inductor", inductor)
    monkeypatch.setattr(compiled, "_joining", compiled._joining.__wrapped__)  # which would keep the backend
    actor = load_actor(folder, dtype="float32")
    if rank:
        pytest.importorskip("peft")
        add_lora(actor, LoraSpec(rank=rank))
    compile_layers(actor.model)
    with torch.no_grad():
        actor(TokenBatch.padded([[5, 6, 7]], 0))
    assert settings
    assert all(found == ({"emulate_precision_casts": True} if rank else None) for found in settings)
