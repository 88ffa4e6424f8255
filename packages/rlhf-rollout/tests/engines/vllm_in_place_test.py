"""Copies into the parameters themselves: when they are all that loading takes, what they write, and what they lack."""

from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("vllm")

from torch import nn  # noqa: E402
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase  # noqa: E402
from vllm.model_executor.layers.linear import UnquantizedLinearMethod  # noqa: E402
from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase  # noqa: E402
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod  # noqa: E402
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info  # noqa: E402

from rlhf_data.errors import EngineError, WeightSyncError  # noqa: E402
from rlhf_rollout.engines.vllm.derived import holds_more_than_weights  # noqa: E402
from rlhf_rollout.engines.vllm.patches.copies import CopyRecorder, Target  # noqa: E402
from rlhf_rollout.engines.vllm.patches.recorded_copies import InPlace, InPlaceCheck  # noqa: E402
from rlhf_rollout.engines.vllm.weights import BucketWorkerExtension  # noqa: E402

SHAPES = {"q": (2, 3), "k": (1, 3), "norm": (4,)}
SEEN: list = []  # what attention was told


class Fused(nn.Module):
    """Two weights of a checkpoint in one parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((3, 3), -7.0), requires_grad=False)


class Norm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((4,), -7.0), requires_grad=False)


class Attention(nn.Module, AttentionLayerBase):
    """Processes what depends on the weights of other layers."""

    def get_attn_backend(self):
        raise AssertionError

    def get_kv_cache_spec(self, vllm_config):
        raise AssertionError

    def process_weights_after_loading(self, dtype) -> None:
        SEEN.append(dtype)


class Processed(nn.Module):
    def process_weights_after_loading(self) -> None:
        raise AssertionError


class Packed(UnquantizedLinearMethod):
    """A method that may do anything."""


class Rounded(QuantizeMethodBase):
    def create_weights(self, *args, **kwargs):
        raise AssertionError

    def apply(self, *args, **kwargs):
        raise AssertionError


def model_of(**layers: nn.Module) -> nn.Module:
    model = nn.Module()
    for name, layer in ({"fused": Fused(), "norm": Norm(), "attention": Attention()} | layers).items():
        model.add_module(name, layer)
    return model


def with_method(method: QuantizeMethodBase) -> nn.Module:
    layer = Norm()
    layer.quant_method = method
    return layer


def weights(seed: int, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator).to(dtype) for name, shape in SHAPES.items()}


def load(model: nn.Module, named: dict[str, torch.Tensor]) -> None:
    places = {"q": model.fused.weight[:2], "k": model.fused.weight[2:], "norm": model.norm.weight}
    for name, weight in named.items():
        places[name].data.copy_(weight)


def recorder_of(model: nn.Module, named: dict[str, torch.Tensor]) -> CopyRecorder:
    """Return the recorder of a load of these weights."""
    tensors = {
        Target(path, layer, name): tensor
        for path, layer in model.named_modules()
        for name, tensor in layer._parameters.items()
    }
    recorder = CopyRecorder(tensors)
    recorder.expect(list(named.items()))
    with recorder:
        load(model, named)
    return recorder


# -- whether copies are enough ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "layer",
    [with_method(UnquantizedLinearMethod()), with_method(UnquantizedEmbeddingMethod()), Attention(), Norm()],
    ids=["linear", "embedding", "attention", "norm"],
)
def test_layers_that_vllm_only_loads_have_no_problem(layer):
    check = InPlaceCheck(model_of(last=layer))
    assert check.problem is None


@pytest.mark.parametrize(
    ("layer", "kind"),
    [
        (with_method(Rounded()), "Norm"),
        (with_method(Packed()), "Norm"),
        (Processed(), "Processed"),
    ],
)
def test_layers_that_vllm_processes_are_a_problem(layer, kind):
    check = InPlaceCheck(model_of(last=layer, later=Processed()))
    assert check.problem == f"vLLM processes the weights of last ({kind})"


def test_linear_layer_with_a_packed_copy_is_a_problem():
    layer = with_method(UnquantizedLinearMethod())
    layer.cpu_linear = None
    assert InPlaceCheck(model_of(last=layer)).problem == "vLLM processes the weights of last (Norm)"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_that_stay_as_they_were_loaded_are_no_problem(dtype):
    model, named = model_of(), weights(1, dtype)
    check = InPlaceCheck(model)
    check.compare(recorder_of(model, named), list(named.items()))
    check.finish()
    assert check.problem is None


def replaced(layer, tensor):
    layer.weight = nn.Parameter(tensor, requires_grad=False)


CHANGES = {
    "values": lambda layer: layer.weight.data[2].neg_(),
    "one value": lambda layer: layer.weight.data[0, 0].add_(1e-6),
    "type": lambda layer: replaced(layer, layer.weight.data.double()),
    "shape": lambda layer: replaced(layer, torch.cat([layer.weight.data, torch.zeros(1, 3)])),
    "order in memory": lambda layer: replaced(layer, layer.weight.data.t().contiguous().t()),
    "no tensor": lambda layer: delattr(layer, "weight"),
}


@pytest.mark.parametrize("name", CHANGES)
@pytest.mark.parametrize("is_late", [False, True])
def test_parameter_that_is_not_as_it_was_loaded_is_a_problem(name, is_late):
    model, named = model_of(), weights(1)
    check = InPlaceCheck(model)
    recorder = recorder_of(model, named)
    info = get_layerwise_info(model.fused)
    if is_late:  # vLLM says so while it has parts of the layer yet to load
        info.load_numel_total = 9
    else:
        CHANGES[name](model.fused)
    check.compare(recorder, list(named.items()))
    if is_late:
        assert check.problem is None
        CHANGES[name](model.fused)
        check.finish()
    assert check.problem == "vLLM changes fused.weight after it has loaded it"


def test_weight_of_a_layer_that_still_loads_is_compared_once_it_is_loaded():
    model, named = model_of(), weights(1)
    check = InPlaceCheck(model)
    recorder = recorder_of(model, named)
    info = get_layerwise_info(model.fused)
    info.load_numel_total = 9
    check.compare(recorder, list(named.items())[:1])
    model.fused.weight.data[:2] += 1
    info.reset()
    check.compare(recorder, list(named.items())[1:])
    assert check.problem == "vLLM changes fused.weight after it has loaded it"


def test_first_problem_stays():
    model, named = model_of(last=Processed()), weights(1)
    check = InPlaceCheck(model)
    recorder = recorder_of(model, named)
    model.norm.weight.data.neg_()
    check.compare(recorder, list(named.items()))
    check.finish()
    assert check.problem == "vLLM processes the weights of last (Processed)"
    check = InPlaceCheck(model_of())
    model.fused.weight.data.neg_()
    check.compare(recorder, list(named.items()))
    check.finish()
    assert check.problem == "vLLM changes fused.weight after it has loaded it"


# -- the copies -------------------------------------------------------------------------------------------------------


def in_place_of(model: nn.Module) -> tuple[InPlace, dict]:
    """Return the repeated copies, and the record's sources of given weights."""
    record = recorder_of(model, weights(1)).finish()

    def sources(named):
        return {name: [copy.source.of(weight) for copy in record.copies[name]] for name, weight in named.items()}

    return InPlace(model, record), sources


def test_update_sets_to_zero_what_no_weight_brings():
    model = model_of()
    record = recorder_of(model, weights(1)).finish()
    record.zeros = [(Target("norm", model.norm, "weight"), SimpleNamespace(of=lambda tensor: tensor[2:]))]
    places = InPlace(model, record)
    model.norm.weight.data.fill_(torch.nan)  # what was in the memory that an engine gets back
    places.begin()
    assert model.norm.weight.isnan().tolist() == [True, True, False, False]
    assert model.norm.weight[2:].tolist() == [0, 0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_writes_leave_what_a_load_leaves_in_the_same_memory(dtype):
    model, expected = model_of(), model_of()
    places, sources = in_place_of(model)
    addresses = {name: parameter.data_ptr() for name, parameter in model.named_parameters()}
    new = weights(2, dtype)
    load(expected, new)
    places.begin()
    places.write(sources(new))
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, expected.get_parameter(name))
        assert parameter.data_ptr() == addresses[name]
    assert places.incomplete() == []


def test_layers_lack_what_was_not_written_in_this_update():
    model = model_of()
    places, sources = in_place_of(model)
    new = weights(2)
    places.begin()
    places.write({})
    assert places.incomplete() == ["fused", "norm"]
    places.write(sources({"q": new["q"], "norm": new["norm"]}))
    assert places.incomplete() == ["fused"]  # 6 of 9 elements
    places.count({"fused": 2})
    assert places.incomplete() == ["fused"]
    places.count({"fused": 1})
    assert places.incomplete() == []
    places.begin()
    assert places.incomplete() == ["fused", "norm"]


def test_parameters_have_moved_if_one_is_another_tensor_or_has_other_memory_or_is_gone():
    for move in (
        lambda layer: replaced(layer, layer.weight.data),
        lambda layer: setattr(layer.weight, "data", layer.weight.data.clone()),
        lambda layer: delattr(layer, "weight"),
    ):
        model = model_of()
        places, _ = in_place_of(model)
        assert not places.have_moved()
        move(model.norm)
        assert places.have_moved()


def test_attention_alone_processes_weights_at_the_end_of_an_update():
    places, sources = in_place_of(model_of(last=Processed()))
    SEEN.clear()
    places.begin()
    places.write(sources(weights(2)))
    assert not SEEN
    places.finish(torch.bfloat16)
    assert [*SEEN] == [torch.bfloat16]


class Derived(nn.Module):
    """A layer with a view of its weight, and maybe with a tensor of its own, in itself or in what computes for it."""

    def __init__(self, place: str) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4, 4))
        self.register_buffer("scale", torch.ones(4))
        self.view = self.weight.data[:2]
        self.impl = SimpleNamespace(scale=self.scale)
        if place == "kv_cache":
            self.kv_cache = torch.ones(4)
        elif place == "experts":
            self.quant_method = SimpleNamespace(moe_kernel=None)
        elif place == "list":
            self.parts = [{"of": (torch.ones(4),)}]
        elif place:
            owner = self if place == "layer" else self.impl
            owner.product = self.weight.data @ self.weight.data


@pytest.mark.parametrize(
    ("place", "holds_more"),
    [("", False), ("kv_cache", False), ("layer", True), ("impl", True), ("list", True), ("experts", True)],
)
def test_model_holds_more_than_weights_if_a_layer_has_a_tensor_of_its_own(place: str, holds_more: bool) -> None:
    assert holds_more_than_weights(nn.Sequential(Derived(place))) is holds_more


@pytest.mark.parametrize("has_record", [True, False])
def test_worker_keeps_its_weights_until_an_update_has_been_recorded(has_record: bool) -> None:
    worker = BucketWorkerExtension()
    worker.weight_transfer_engine = SimpleNamespace(has_record=has_record)
    worker.model_runner = SimpleNamespace(model=nn.Sequential(Derived("")))
    assert worker.rlhf_holds_more_than_weights() is not has_record


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (torch.OutOfMemoryError("3 GiB"), EngineError),
        (MemoryError(), EngineError),
        (torch.AcceleratorError("an illegal memory access"), EngineError),
        (torch.distributed.DistBackendError("NCCL error"), EngineError),
        (ConnectionResetError("by the sender"), EngineError),
        (EngineError("the node is gone"), EngineError),
        (RuntimeError("shapes"), WeightSyncError),
        (WeightSyncError("no weight 'q'"), WeightSyncError),
    ],
)
def test_a_worker_tells_weights_that_did_not_arrive_from_weights_that_do_not_fit(error, kind) -> None:
    class Worker(BucketWorkerExtension):
        def update_weights(self, update) -> None:
            raise error

    [told] = Worker().rlhf_receive_weights(None)
    assert type(told) is kind and str(error) in str(told)
    if isinstance(error, EngineError | WeightSyncError):
        assert told is error
