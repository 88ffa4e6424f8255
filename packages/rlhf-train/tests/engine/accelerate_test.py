"""When the layers of a model are compiled. Nothing is compiled here: a GPU is pretended, and the call is counted."""

from types import SimpleNamespace

import pytest
import torch
from transformers import AutoModelForCausalLM

from rlhf_data.errors import ConfigError
from rlhf_models.batch import TokenBatch
from rlhf_models.testing import tiny_model_dir
from rlhf_rollout.host import free_port
from rlhf_train.engine import accelerate
from rlhf_train.engine.process_group import init_process_group
from rlhf_train.specs import ModelSpec

PACKED = {"packing": True, "torch_compile": "auto"}
MODEL = SimpleNamespace(model="model", whole=["layer", "other"])


@pytest.fixture
def compiled(monkeypatch):
    """The models that were compiled, and the layers that were compiled inside their hooks."""
    models = []
    monkeypatch.setattr(accelerate, "compile_unavailable_reason", lambda *args, **kwargs: None)
    monkeypatch.setattr(accelerate, "compile_layers", models.append)
    monkeypatch.setattr(accelerate, "compile_forwards", models.extend)
    monkeypatch.setattr(accelerate, "layers_taken_whole", lambda model: model.whole)
    return models


@pytest.mark.parametrize(
    ("fields", "is_compiled"),
    [
        (PACKED, True),
        (PACKED | {"sequence_parallel_size": 2}, False),
        (PACKED | {"tensor_parallel_size": 2}, False),
        (PACKED | {"expert_parallel_size": 2}, False),
        (PACKED | {"torch_compile": "off"}, False),
        ({"torch_compile": "auto"}, False),
        ({"torch_compile": "on"}, True),
    ],
)
def test_layers_are_compiled_where_that_is_possible_and_pays(compiled, fields, is_compiled):
    assert accelerate.compile_model(MODEL, ModelSpec(path="", **fields), "cuda") is is_compiled
    assert compiled == ["model"] * is_compiled


def test_layers_that_must_be_compiled_and_cannot_are_an_error(compiled):
    spec = ModelSpec(path="", torch_compile="on", tensor_parallel_size=2)
    reason = "tensor parallelism adds up over processes inside the layers"
    with pytest.raises(ConfigError, match=f"cannot be compiled: {reason}"):
        accelerate.compile_model(MODEL, spec, "cuda")
    assert not compiled


@pytest.mark.parametrize("fields", [PACKED, {"torch_compile": "on"}])
def test_layers_that_zero_3_takes_whole_are_compiled_inside_their_hooks(compiled, fields):
    assert accelerate.compile_model(MODEL, ModelSpec(path="", zero_stage=3, **fields), "cuda")
    assert compiled == MODEL.whole


def test_layers_that_zero_3_does_not_take_whole_are_not_compiled(compiled):
    adapted = SimpleNamespace(model="model", whole=[])
    assert not accelerate.compile_model(adapted, ModelSpec(path="", zero_stage=3, **PACKED), "cuda")
    assert not compiled


def test_compiling_at_zero_3_is_refused_where_no_layer_is_taken_whole(compiled):
    spec = ModelSpec(path="", torch_compile="on", zero_stage=3)
    adapted = SimpleNamespace(model="model", whole=[])
    message = r"(?s)cannot be compiled: ZeRO stage 3 gathers weights inside .*hint: leave ``torch_compile`` at auto"
    with pytest.raises(ConfigError, match=message):
        accelerate.compile_model(adapted, spec, "cuda")
    assert not compiled


def test_engine_gets_the_settings_of_its_model_and_its_group(monkeypatch):
    asked = {}
    monkeypatch.setattr(accelerate, "compile_model", lambda *_: False)
    monkeypatch.setattr(accelerate, "divide_weights", lambda model, group: None)
    monkeypatch.setattr(accelerate, "DeepSpeedEngine", lambda model, optimizer, **options: asked.update(options))
    spec = ModelSpec(path="", dtype="bfloat16", zero_stage=3, zpg=2, overlap_comm=True)
    accelerate.start_engine(MODEL, spec, num_ranks=4, device="cpu", pack_tokens=None, tensor_group="group")
    assert asked == {
        "zero_stage": 3,
        "dtype": torch.bfloat16,
        "device": "cpu",
        "zpg": 2,
        "overlap_comm": True,
        "tensor_group": "group",
        "expert_group": None,
    }
    accelerate.start_engine(MODEL, ModelSpec(path="", zero_stage=2), num_ranks=1, device="cpu", pack_tokens=None)
    assert asked["zero_stage"] == 1  # one rank has no gradients to shard


def test_frozen_model_gives_masked_ids_the_probability_0_and_shares_theirs_among_the_others(tmp_path):
    init_process_group(rank=0, world_size=1, master=("127.0.0.1", free_port()), device="cpu")
    folder = tiny_model_dir(tmp_path / "model")
    spec = ModelSpec(path=str(folder), dtype="float32", masked_ids=(range(20, 24), range(30, 31)))
    ids = [5, 9, 21, 7, 30, 12]
    found = accelerate.start_frozen(spec, torch.device("cpu"))(TokenBatch.padded([ids], 0)).logprobs[0, 1:]
    logits = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)(torch.tensor([ids])).logits[0, :-1]
    logits[:, [20, 21, 22, 23, 30]] = -torch.inf
    expected = logits.log_softmax(-1).gather(1, torch.tensor(ids[1:])[:, None])[:, 0]
    assert expected.isinf().tolist() == [False, True, False, True, False]
    torch.testing.assert_close(found.double(), expected, atol=1e-5, rtol=0)
