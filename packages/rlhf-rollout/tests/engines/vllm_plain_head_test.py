"""Models of vLLM whose logits are the product of hidden states and their head alone, and those that do more."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

pytest.importorskip("vllm")

from vllm.model_executor.layers.logits_processor import LogitsProcessor

from rlhf_rollout.engines.vllm.patches.sampling_head import UnfitError, plain_head
from sampling_head_testing import PADDED_SIZE, VOCAB_SIZE, WIDTH, Model


class ScaledHidden(Model):
    def compute_logits(self, hidden):
        return super().compute_logits(hidden / 2)


class ScaledInPlace(Model):
    def compute_logits(self, hidden):
        return super().compute_logits(hidden.mul_(2))


class ScaledLogits(Model):
    def compute_logits(self, hidden):
        return 2 * super().compute_logits(hidden)


class MaskedInPlace(Model):
    def compute_logits(self, hidden):
        logits = super().compute_logits(hidden)
        logits[:, 3] = -1e9
        return logits


class Biased(Model):
    def compute_logits(self, hidden):
        return self.logits_processor(self.lm_head, hidden, torch.zeros(PADDED_SIZE))


class Twice(Model):
    def compute_logits(self, hidden):
        super().compute_logits(hidden)
        return super().compute_logits(hidden)


class WithoutLayer(nn.Module):
    def compute_logits(self, hidden):
        return hidden


def with_quantized_head():
    model = Model()
    model.lm_head.quant_method = SimpleNamespace(apply=lambda layer, hidden, bias: hidden @ layer.weight.T)
    return model


class AnotherDtype(Model):
    def __init__(self):
        super().__init__()
        self.logits_processor.head_dtype = torch.float64


class OwnProcessor(LogitsProcessor):
    def forward(self, lm_head, hidden_states, embedding_bias=None):
        return super().forward(lm_head, hidden_states / 2, embedding_bias)


def with_a_processor_of_its_own():
    model = Model()
    model.logits_processor.__class__ = OwnProcessor
    return model


class OneRow(Model):
    def compute_logits(self, hidden):
        raise AssertionError("one row only")


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (with_a_processor_of_its_own, "a OwnProcessor makes the logits"),
        (OneRow, r"the logits of hidden states \[2, 8\] failed: one row only"),
        (lambda: Model(scale=0.5), "logits are scaled"),
        (lambda: Model(soft_cap=30.0), "logits are capped"),
        (lambda: Model(scale=2.0, soft_cap=30.0), "logits are scaled and capped"),
        (lambda: Model(logits_as_input=True), "logits are no product"),
        (with_quantized_head, "logits are quantized"),
        (ScaledHidden, "ScaledHidden changes hidden states before the head"),
        (ScaledInPlace, "ScaledInPlace changes hidden states before the head"),
        (ScaledLogits, "ScaledLogits changes logits behind the head"),
        (MaskedInPlace, "MaskedInPlace changes logits behind the head"),
        (Biased, "logits are biased"),
        (AnotherDtype, "logits are of another dtype"),
        (Twice, "the logits are made of 2 products"),
        (WithoutLayer, "the logits are made of 0 products"),
    ],
)
def test_logits_that_are_more_than_the_product_with_the_head_are_left_to_vllm(make, reason):
    model = make()
    with pytest.raises(UnfitError, match=f"^{reason}$"):
        plain_head(model, torch.ones(2, WIDTH))
    assert not any(module._forward_hooks for module in model.modules())


def test_a_head_whose_width_is_not_the_models_is_left_to_vllm():
    with pytest.raises(UnfitError, match=r"the logits of hidden states \[2, 12\] failed: "):
        plain_head(Model(), torch.ones(2, 12))


def test_the_hook_that_masks_ids_does_not_count_as_a_change():
    from rlhf_rollout.engines.vllm.worker import mask_logits

    model = Model()
    mask_logits(model, [(3, 5)])
    head = plain_head(model, torch.ones(2, WIDTH))
    assert head.layer is model.lm_head and head.weight.shape == (VOCAB_SIZE, WIDTH)
