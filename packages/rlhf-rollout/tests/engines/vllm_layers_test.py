"""Layers of vLLM: what those that an update loads anew keep and still wait for; rotary positions on a CPU."""

from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("vllm")

from torch import nn  # noqa: E402
from vllm.config import VllmConfig, set_current_vllm_config  # noqa: E402
from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding  # noqa: E402
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding  # noqa: E402
from vllm.model_executor.model_loader.reload.layerwise import (  # noqa: E402
    finalize_layerwise_reload,
    get_layerwise_info,
    initialize_layerwise_reload,
    record_metadata_for_reloading,
)
from vllm.model_executor.model_loader.weight_utils import default_weight_loader  # noqa: E402

from rlhf_rollout.engines.vllm.derived import (  # noqa: E402
    DirectWrites,
    drop_expert_kernels,
    keep_buffers,
    watch_expert_kernels,
)
from rlhf_rollout.engines.vllm.internals import rotate_heads_on_cpu  # noqa: E402
from rlhf_rollout.engines.vllm.weights import _incomplete, _untouched  # noqa: E402

OLD = {
    "kept": torch.tensor([1.0, 2.0]),
    "computed": torch.tensor([3.0, 4.0]),
    "longer": torch.tensor([5.0, 6.0]),
    "wider": torch.tensor([7.0, 8.0]),
    "there": torch.tensor([9.0, 10.0]),
    "gone": torch.tensor([11.0]),
}


def reloaded() -> nn.Module:
    """A layer as vLLM leaves it when an update begins: on the meta device, with the old tensors noted apart."""
    layer = nn.Module()
    layer.register_buffer("kept", torch.empty(2, device="meta"))
    layer.register_buffer("computed", torch.empty(2, device="meta"), persistent=False)
    layer.register_buffer("longer", torch.empty(3, device="meta"))
    layer.register_buffer("wider", torch.empty(2, device="meta", dtype=torch.float64))
    layer.register_buffer("there", torch.zeros(2))
    layer.kept.weight_loader = "loader"
    get_layerwise_info(layer).kernel_tensors = ({}, dict(OLD))
    return layer


def test_persistent_buffers_of_the_same_form_keep_their_values_and_their_loader() -> None:
    model = nn.Module()
    model.layer = reloaded()
    model.other = nn.Linear(2, 2)  # vLLM does not load it anew
    keep_buffers(model)
    assert model.layer.kept.tolist() == [1.0, 2.0] and model.layer.kept.weight_loader == "loader"
    model.layer.kept.zero_()
    assert OLD["kept"].tolist() == [1.0, 2.0]  # the engine computes with the old one until the layer is complete
    assert {name for name, buffer in model.layer.named_buffers() if buffer.is_meta} == {"computed", "longer", "wider"}
    assert model.layer.there.tolist() == [0.0, 0.0]


@pytest.mark.parametrize(
    ("loaded", "num_loaded", "waits"),
    [([], 8, True), ([], 9, False), (["bias_correction"], 9, True), (["weight", "bias_correction"], 11, False)],
)
def test_layer_waits_for_its_parameters_and_the_buffers_that_have_begun_to_arrive(loaded, num_loaded, waits) -> None:
    layer = nn.Module()
    layer.weight = nn.Parameter(torch.zeros(3, 3))
    layer.register_buffer("bias_correction", torch.zeros(2))
    layer.inner = nn.Linear(5, 5)  # a layer of its own
    info = get_layerwise_info(layer)
    assert not _incomplete(layer)  # it is not being loaded
    info.load_numel_total = 11
    info.load_numel = num_loaded
    info.loaded_weights = [(name, None) for name in loaded]
    assert _incomplete(layer) == waits


def test_embedding_whose_vocabulary_is_padded_waits_for_its_first_element() -> None:
    layer = VocabParallelEmbedding.__new__(VocabParallelEmbedding)
    nn.Module.__init__(layer)
    layer.weight = nn.Parameter(torch.zeros(4, 2))
    info = get_layerwise_info(layer)
    info.load_numel_total = 8
    assert _incomplete(layer)
    info.load_numel = 1
    assert not _incomplete(layer)


class Experts(nn.Module):
    """A layer whose weights its model copies into the parameters itself, except for the last."""

    def __init__(self) -> None:
        super().__init__()
        for name in ("weight", "bias", "sinks", "gain"):
            setattr(self, name, nn.Parameter(torch.zeros(2, 3 if name == "weight" else 1), requires_grad=False))
        self.weight.weight_loader = lambda param, loaded, expert_id: pytest.fail("the loader for single experts")


class Model(nn.Module):
    """A model that loads as vLLM's gpt-oss does."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = Experts()
        self.norm = nn.LayerNorm(3)
        self.norm.scale = nn.Parameter(torch.zeros(3))  # vLLM leaves biases where they are

    def load_weights(self, weights) -> None:
        known = dict(self.named_parameters())
        for name, weight in weights:
            param = known[name]
            if name == "experts.weight":
                param.copy_(weight.permute(1, 0).contiguous())
            elif name in ("experts.bias", "experts.sinks"):
                param.data.copy_(weight)
            else:
                getattr(param, "weight_loader", default_weight_loader)(param, weight)


@pytest.mark.parametrize("in_one_bucket", [True, False])
def test_weights_that_a_model_copies_itself_arrive_in_every_update(in_one_bucket: bool) -> None:
    model = Model()
    record_metadata_for_reloading(model)
    places = {name: param.data_ptr() for name, param in model.named_parameters()}
    for update in (1.0, 2.0):
        sent = {
            "experts.weight": update * torch.arange(6.0).view(3, 2),
            "experts.bias": torch.tensor([[update], [5.0]]),
            "norm.weight": torch.full((3,), update),
            "experts.gain": torch.full((2, 1), -update),
            "norm.bias": torch.full((3,), 3 * update),
            "experts.sinks": torch.tensor([[7.0], [update]]),
            "norm.scale": torch.full((3,), 4 * update),
        }
        with torch.no_grad():
            initialize_layerwise_reload(model)
            direct = DirectWrites(model)
            weights = list(sent.items())
            for bucket in [weights] if in_one_bucket else [[weight] for weight in weights]:
                with direct:
                    model.load_weights(bucket)
            finalize_layerwise_reload(model, None)
        expected = sent | {"experts.weight": sent["experts.weight"].t()}
        for name, param in model.named_parameters():
            assert torch.equal(param, expected[name]), name
            assert param.data_ptr() == places[name]  # which CUDA graphs read


def test_layers_that_get_nothing_in_an_update_are_named() -> None:
    model = Model()
    record_metadata_for_reloading(model)
    with torch.no_grad():
        initialize_layerwise_reload(model)
        model.load_weights([("norm.weight", torch.ones(3)), ("experts.bias", torch.ones(2, 1))])
        assert _untouched(model) == ["experts"]
        finalize_layerwise_reload(model, None)


class Kernel:
    """A kernel of experts, which may report what it chooses."""

    def __init__(self, report: object = None) -> None:
        self.fused_experts = self
        self.routing_replay_capture_fn = report

    def set_capture_fn(self, report: object) -> None:
        self.routing_replay_capture_fn = report


def test_new_kernels_of_experts_report_to_whom_the_ones_before_did() -> None:
    model = nn.ModuleList(nn.Module() for _ in range(5))
    for layer, report in zip(model, ("first", "second", None), strict=False):
        layer.quant_method = SimpleNamespace(moe_kernel=Kernel(report))
    model[3].quant_method = SimpleNamespace(moe_kernel=None)  # it has got no weights yet
    drop_expert_kernels(model)
    assert [layer.quant_method.moe_kernel for layer in model[:4]] == [None] * 4
    model[0].quant_method.moe_kernel, model[2].quant_method.moe_kernel = Kernel(), Kernel("nobody")
    watch_expert_kernels(model)
    assert model[0].quant_method.moe_kernel.routing_replay_capture_fn == "first"
    assert model[1].quant_method.moe_kernel is None
    assert model[2].quant_method.moe_kernel.routing_replay_capture_fn == "nobody"


class Tied(nn.Module):
    """A model whose head has the parameter of the embedding, in a layer of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head, self.other = nn.Linear(2, 3, bias=False), nn.Linear(2, 3), nn.Linear(2, 3)
        self.head.weight = self.embedding.weight
        self.head.bias = None


def test_head_that_is_tied_to_the_embedding_gets_what_that_gets() -> None:
    model = Tied()
    record_metadata_for_reloading(model)
    with torch.no_grad():
        initialize_layerwise_reload(model)
        assert _untouched(model) == ["embedding", "head", "other"]
        model.embedding.weight.weight_loader(model.embedding.weight, torch.ones(3, 2))
        assert _untouched(model) == ["other"]
        finalize_layerwise_reload(model, None)
    assert model.head.weight.tolist() == [[1.0, 1.0]] * 3


def test_layers_without_memory_of_their_own_count_as_others_do() -> None:
    model = nn.Module()
    model.packed, model.written = nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False)
    record_metadata_for_reloading(model)
    with torch.no_grad():
        initialize_layerwise_reload(model)
        for layer in (model.packed, model.written):
            get_layerwise_info(layer).kernel_tensors = ({"weight": torch.empty(0)}, {})
        get_layerwise_info(model.written).load_numel = 1
        assert _untouched(model) == ["packed"]


@pytest.mark.parametrize("with_keys", [True, False])
@pytest.mark.parametrize("is_flat", [True, False])
def test_positions_on_a_cpu_are_those_of_tokens_in_whatever_shape_heads_are(with_keys: bool, is_flat: bool) -> None:
    rotate_heads_on_cpu()
    with set_current_vllm_config(VllmConfig()):
        rope = RotaryEmbedding(8, 8, 32, 10000.0, True, torch.float32)
    positions = torch.tensor([3, 0, 7])
    query, key = torch.randn(3, 4, 8), torch.randn(3, 2, 8)
    expected = rope.forward_native(positions, query.clone(), key.clone())
    shape = (3, -1) if is_flat else (3, -1, 8)
    found = rope.forward_cpu(positions, query.reshape(shape), key.reshape(shape) if with_keys else None)
    assert found[0].shape == query.reshape(shape).shape
    torch.testing.assert_close(found[0].view(3, 4, 8), expected[0])
    if with_keys:
        assert found[1].shape == key.reshape(shape).shape
        torch.testing.assert_close(found[1].view(3, 2, 8), expected[1])
    else:
        assert found[1] is None
