"""Packs of a model whose layers carry a state, against the same model on each sequence alone."""

import pytest
import torch
from transformers import AutoModelForCausalLM, Lfm2Config, MiniMaxConfig, Qwen2Config, Qwen3NextConfig

from rlhf_data.errors import ConfigError
from rlhf_models.attention.packed import check_shares_prompts, choose_attention
from rlhf_models.attention.sequence_parallel import check_heads
from rlhf_models.attention.states_apart import keep_states_apart
from rlhf_models.backbone import can_be_replayed
from rlhf_models.batch import TokenBatch
from rlhf_models.fast.compiled import compile_unavailable_reason
from rlhf_models.loading import load_actor
from rlhf_models.testing import tiny_tokenizer

SIZES = {"hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 2, "num_key_value_heads": 2}
SIZES |= {"vocab_size": 64, "initializer_range": 0.5, "pad_token_id": 0}
SEQUENCES = [[*range(3, 3 + length)] for length in (5, 1, 9, 4, 4)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    made = tmp_path_factory.mktemp("lfm2")
    torch.manual_seed(0)
    layers = {"num_hidden_layers": 3, "layer_types": ["conv", "full_attention", "conv"]}
    AutoModelForCausalLM.from_config(Lfm2Config(**SIZES, **layers, block_auto_adjust_ff_dim=False)).save_pretrained(
        made
    )
    tiny_tokenizer(64).save_pretrained(made)
    return made


def alone(folder):
    """The sum of the log-probs of plain transformers, which reads each sequence alone, and its gradients."""
    model = AutoModelForCausalLM.from_pretrained(folder)
    total = torch.zeros(())
    for sequence in SEQUENCES:
        ids = torch.tensor([sequence])
        logprobs = model(input_ids=ids).logits[0, :-1].log_softmax(-1)
        total = total + logprobs.gather(1, ids[0, 1:, None]).sum()
    total.backward()
    return total.detach(), {name: weight.grad for name, weight in model.named_parameters()}


@pytest.mark.parametrize(
    ("in_one_batch", "seen"),
    # Lengths of one, three and four binary digits; the padding is that of the longest of a batch.
    [(False, [(3, 5), (1, 1), (1, 9)]), (True, [(5, 9)])],
)
@pytest.mark.parametrize("checkpointing", [False, True])
def test_packs_equal_sequences_alone_and_layers_see_padded_batches(folder, in_one_batch, seen, checkpointing):
    actor = load_actor(folder, dtype="float32", packing=True, gradient_checkpointing=checkpointing)
    base = actor.model.base_model
    base.states_apart.in_one_batch = in_one_batch
    shapes = []
    base.layers[0].conv.in_proj.register_forward_hook(lambda _, inputs, __: shapes.append(tuple(inputs[0].shape[:2])))
    batch = TokenBatch.packed(SEQUENCES)
    for before in (batch, TokenBatch.padded(SEQUENCES[2:], 0)):  # neither leaves anything behind
        shapes.clear()
        with torch.no_grad():
            actor(before)
    assert shapes == [(3, 9)]
    shapes.clear()
    values = actor(batch).logprobs[batch.target_mask]
    assert shapes == seen
    values.sum().backward()
    assert shapes == seen * (1 + checkpointing)
    truth, gradients = alone(folder)
    torch.testing.assert_close(values.sum(), truth, atol=1e-4, rtol=0)
    for name, weight in actor.model.named_parameters():
        torch.testing.assert_close(weight.grad, gradients[name], atol=1e-3, rtol=1e-4)


def test_what_takes_tokens_of_several_sequences_at_once_is_refused(folder):
    actor = load_actor(folder, dtype="float32", packing=True)
    config = actor.model.config
    assert not can_be_replayed(config)
    assert "layers that carry a state" in compile_unavailable_reason(actor.model, torch.device("cuda"))
    with pytest.raises(ConfigError, match=r"a lfm2 model cannot share prompts: .*\n\nhint: drop ``share_prompts"):
        check_shares_prompts(config, config._attn_implementation)
    with pytest.raises(ConfigError, match=r"layers of a lfm2 model carry a state.*\n\nhint: turn it off"):
        check_heads(config, 2)


def test_attention_of_a_family_with_states_is_packed_as_that_of_others():
    assert choose_attention(Qwen3NextConfig(), "auto", packing=True) == "rlhf_packed"


def test_states_without_a_convolution_are_not_known_and_are_refused(tmp_path):
    layers = {"num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"], "head_dim": 16}
    model = AutoModelForCausalLM.from_config(MiniMaxConfig(**SIZES, **layers, num_local_experts=2))
    model.save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=r"a minimax model cannot be packed: .* state .*\n\nhint: turn packing off"):
        load_actor(tmp_path, dtype="float32", packing=True)


def test_model_without_states_is_left_as_it_is():
    model = AutoModelForCausalLM.from_config(Qwen2Config(**SIZES, num_hidden_layers=1))
    assert keep_states_apart(model)
    assert not hasattr(model.base_model, "states_apart")
