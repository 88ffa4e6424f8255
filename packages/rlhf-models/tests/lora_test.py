"""Adapters: what they train, what they leave alone, and that base + adapter = merged, value head included."""

import json

import pytest
import torch

from rlhf_data.errors import ConfigError
from rlhf_models.batch import TokenBatch
from rlhf_models.loading import load_actor, load_critic, load_reward_model
from rlhf_models.lora import LoraSpec, adapters_off, add_lora, merge_adapter, save_adapter

pytest.importorskip("peft")

BATCH = TokenBatch.padded([[5, 6, 7, 8], [9, 10]], 0)


def stir(model: torch.nn.Module) -> None:
    """Give everything that is trained a value of its own."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.copy_(0.1 * torch.randn(parameter.shape, generator=generator))


def test_add_lora_starts_at_the_base_and_trains_adapters_of_all_linear_layers_alone(qwen2_dir):
    actor = load_actor(qwen2_dir, dtype="float32")
    before = actor(BATCH).logprobs
    add_lora(actor, LoraSpec(rank=3))
    torch.testing.assert_close(actor(BATCH).logprobs, before, rtol=0, atol=0)
    trained = [(name, parameter) for name, parameter in actor.named_parameters() if parameter.requires_grad]
    # A and B of q, k, v, o, gate, up and down of two layers; never the LM head.
    assert len(trained) == 2 * 7 * 2
    assert all(("lora_A" in name or "lora_B" in name) and "lm_head" not in name for name, _ in trained)
    assert {min(parameter.shape) for _, parameter in trained} == {3}


def test_lora_output_is_the_base_plus_alpha_over_rank_b_a(qwen2_dir):
    actor = load_actor(qwen2_dir, dtype="float32")
    add_lora(actor, LoraSpec(rank=2, alpha=6.0, target_modules=("q_proj",)))
    stir(actor)
    layer = actor.model.model.layers[0].self_attn.q_proj
    x = torch.randn(64)
    a, b = layer.lora_A["default"].weight, layer.lora_B["default"].weight
    torch.testing.assert_close(layer(x), layer.base_layer(x) + 3.0 * (b @ (a @ x)))


def test_adapters_off_is_the_base_within_the_block_only(qwen2_dir):
    base = load_actor(qwen2_dir, dtype="float32")(BATCH).logprobs
    actor = load_actor(qwen2_dir, dtype="float32")
    add_lora(actor, LoraSpec(rank=2))
    stir(actor)
    adapted = actor(BATCH).logprobs
    with adapters_off(actor):
        torch.testing.assert_close(actor(BATCH).logprobs, base, rtol=0, atol=0)
    torch.testing.assert_close(actor(BATCH).logprobs, adapted, rtol=0, atol=0)
    assert (adapted - base).abs().max() > 0.01


def test_merged_actor_equals_base_with_adapter_and_peft_reads_the_adapter(model_dir, tmp_path):
    from peft import PeftModel

    actor = load_actor(model_dir, dtype="float32")
    add_lora(actor, LoraSpec(rank=2))
    stir(actor)
    expected = actor(BATCH).logprobs
    adapter = save_adapter(actor, actor.state_dict(), tmp_path / "adapter")
    merged = load_actor(merge_adapter(model_dir, adapter, tmp_path / "merged", dtype="float32"), dtype="float32")
    torch.testing.assert_close(merged(BATCH).logprobs, expected)
    assert not [name for name, _ in merged.named_parameters() if "lora" in name]
    plain = load_actor(model_dir, dtype="float32")
    peft_model = PeftModel.from_pretrained(plain.model, str(adapter))
    logits = peft_model(input_ids=BATCH.input_ids).logits
    logprobs = logits.log_softmax(-1)[:, :-1].gather(-1, BATCH.input_ids[:, 1:, None])[..., 0]
    torch.testing.assert_close(logprobs[0], expected[0, 1:])
    assert json.loads((adapter / "adapter_config.json").read_text())["base_model_name_or_path"] == str(model_dir)


def test_merge_reports_each_weight_and_warns_of_none(model_dir, tmp_path, recwarn):
    actor = load_actor(model_dir, dtype="float32")
    add_lora(actor, LoraSpec(rank=2, target_modules=("q_proj", "v_proj")))
    adapter = save_adapter(actor, actor.state_dict(), tmp_path / "adapter")
    reports = []
    merge_adapter(
        model_dir, adapter, tmp_path / "merged", dtype="float32", report=lambda *numbers: reports.append(numbers)
    )
    num_weights = 2 * len(actor.model.model.layers)
    assert reports == [(done, num_weights) for done in range(num_weights + 1)]
    assert not [warning for warning in recwarn if "merged" in str(warning.message)]


def test_merged_reward_model_has_the_trained_head(model_dir, tmp_path):
    critic = load_critic(model_dir, dtype="float32")
    add_lora(critic, LoraSpec(rank=2))
    assert critic.value_head.weight.requires_grad
    stir(critic)
    adapter = save_adapter(critic, critic.state_dict(), tmp_path / "adapter")
    merged = load_reward_model(merge_adapter(model_dir, adapter, tmp_path / "merged", dtype="float32"), dtype="float32")
    after = critic(BATCH, after_token=True)
    torch.testing.assert_close(merged(BATCH), torch.stack([after[0, 3], after[1, 1]]))


@pytest.mark.parametrize("fields", [{"rank": 0}, {"rank": 2, "alpha": 0.0}, {"rank": 2, "dropout": 1.0}])
def test_lora_numbers_out_of_range_are_refused(fields):
    with pytest.raises(ConfigError, match="LoRA has rank"):
        LoraSpec(**fields)


def test_lora_target_of_no_layer_is_refused_with_a_hint(qwen2_dir):
    with pytest.raises(ConfigError, match="hint: target_modules"):
        add_lora(load_actor(qwen2_dir, dtype="float32"), LoraSpec(rank=2, target_modules=("no_such_layer",)))


def test_merge_of_a_folder_without_adapter_is_refused(qwen2_dir, tmp_path):
    with pytest.raises(ConfigError, match=r"adapter_config\.json"):
        merge_adapter(qwen2_dir, tmp_path, tmp_path / "out", dtype="float32")


def test_merge_of_an_adapter_of_another_shape_is_refused(qwen2_dir, tmp_path):
    from rlhf_models.testing import tiny_model_dir

    other = load_actor(tiny_model_dir(tmp_path / "other", hidden_size=32, num_attention_heads=1), dtype="float32")
    add_lora(other, LoraSpec(rank=2))
    adapter = save_adapter(other, other.state_dict(), tmp_path / "adapter")
    with pytest.raises(ConfigError, match="cannot load the adapter"):
        merge_adapter(qwen2_dir, adapter, tmp_path / "out", dtype="float32")
