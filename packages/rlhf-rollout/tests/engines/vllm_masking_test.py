"""Ids that a model of vLLM never gives a probability, on its layer of logits alone: no model is loaded."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from rlhf_data.errors import EngineError
from rlhf_rollout.engines.spec import EngineSpec

pytest.importorskip("vllm")

from vllm.config import VllmConfig, set_current_vllm_config
from vllm.model_executor.layers.logits_processor import LogitsProcessor

from rlhf_rollout.engines.vllm.masking import mask_config, mask_logits


class Model(nn.Module):
    """Has vLLM's layer of logits for a vocabulary of 8, which returns what it is given."""

    def __init__(self) -> None:
        super().__init__()
        with set_current_vllm_config(VllmConfig()):
            self.logits_processor = LogitsProcessor(8, logits_as_input=True)

    def compute_logits(self, logits: torch.Tensor | None) -> torch.Tensor | None:
        return self.logits_processor(None, logits)


def masked(model: nn.Module, *ids: range) -> None:
    """Mask ids as each worker of an engine does."""
    config: dict[str, Any] = {"of another": 1} | mask_config(EngineSpec(model="x", masked_ids=ids))
    mask_logits(model, SimpleNamespace(additional_config=config))


def test_masked_ids_get_no_probability_and_the_others_share_all_of_it() -> None:
    model = Model()
    masked(model, range(1, 3), range(6, 8))
    logits = torch.linspace(-2, 2, 16).view(2, 8)
    expected = torch.zeros(2, 8, dtype=torch.float64)
    kept = [0, 3, 4, 5]
    expected[:, kept] = logits[:, kept].double().exp()
    expected /= expected.sum(1, keepdim=True)
    found = model.compute_logits(logits.clone())
    assert found is not None
    torch.testing.assert_close(found.double().softmax(1), expected)
    assert model.compute_logits(None) is None  # in a worker whose logits another one gathers


def test_an_engine_that_masks_nothing_adds_nothing_to_its_model() -> None:
    model = Model()
    masked(model)
    assert not model.logits_processor._forward_hooks
    masked(nn.Linear(2, 2))


def test_a_model_without_vllms_layer_of_logits_is_refused() -> None:
    with pytest.raises(EngineError, match=r"Linear of vLLM has no layer in which ids .* can be masked\n\nhint: "):
        masked(nn.Linear(2, 2), range(1, 3))
