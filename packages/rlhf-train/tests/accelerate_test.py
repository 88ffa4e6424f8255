"""When the layers of a model are compiled. Nothing is compiled here: a GPU is pretended, and the call is counted."""

import pytest

from rlhf_data.errors import ConfigError
from rlhf_train.engine import accelerate
from rlhf_train.specs import ModelSpec

PACKED = {"packing": True, "torch_compile": "auto"}


@pytest.fixture
def compiled(monkeypatch):
    """The models that were compiled."""
    models = []
    monkeypatch.setattr(accelerate, "compile_unavailable_reason", lambda model, device: None)
    monkeypatch.setattr(accelerate, "compile_layers", models.append)
    return models


@pytest.mark.parametrize(
    ("fields", "is_compiled"),
    [
        (PACKED, True),
        (PACKED | {"zero_stage": 3}, False),
        (PACKED | {"sequence_parallel_size": 2}, False),
        (PACKED | {"tensor_parallel_size": 2}, False),
        (PACKED | {"torch_compile": "off"}, False),
        ({"torch_compile": "auto"}, False),
        ({"torch_compile": "on"}, True),
    ],
)
def test_layers_are_compiled_where_that_is_possible_and_pays(compiled, fields, is_compiled):
    assert accelerate.compile_model("model", ModelSpec(path="", **fields), "cuda") is is_compiled
    assert compiled == ["model"] * is_compiled


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"zero_stage": 3}, "ZeRO stage 3 gathers weights inside the layers"),
        ({"packing": True, "sequence_parallel_size": 2}, "sequence parallelism exchanges heads inside the layers"),
        ({"tensor_parallel_size": 2}, "tensor parallelism adds up over processes inside the layers"),
    ],
)
def test_layers_that_must_be_compiled_and_cannot_are_an_error(compiled, fields, reason):
    with pytest.raises(ConfigError, match=f"cannot be compiled: {reason}"):
        accelerate.compile_model("model", ModelSpec(path="", torch_compile="on", **fields), "cuda")
    assert not compiled
