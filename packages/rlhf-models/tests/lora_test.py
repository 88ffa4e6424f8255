"""Adapters: what they train, what they leave alone, and that base + adapter = merged, value head included."""

import json
import sys

import pytest
import torch

from rlhf_data.errors import CheckpointError, ConfigError
from rlhf_models.batch import TokenBatch
from rlhf_models.checkpoint.files import write_fields
from rlhf_models.loading import load_actor, load_config, load_critic, load_reward_model, load_tokenizer
from rlhf_models.lora import (
    LoraSpec,
    adapters_by_weight,
    adapters_off,
    add_lora,
    check_lora,
    merge_adapter,
    save_adapter,
)
from rlhf_models.testing import tiny_model_dir
from rlhf_models.weights import hf_named_weights

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


@pytest.mark.parametrize("name", ["adapter_model.safetensors", "adapter_config.json", "value_head.safetensors"])
def test_adapter_that_cannot_be_written_is_an_error_with_the_folder(model_dir, tmp_path, name):
    critic = load_critic(model_dir, dtype="float32")
    add_lora(critic, LoraSpec(rank=2))
    folder = tmp_path / "adapter"
    (folder / name).mkdir(parents=True)
    with pytest.raises(CheckpointError, match=rf"cannot write the model to {folder}: (.|\n)*hint: check the disk"):
        save_adapter(critic, critic.state_dict(), folder)


def test_adapter_keeps_the_bias_of_a_head(model_dir, tmp_path):
    critic = load_critic(model_dir, dtype="float32")
    critic.value_head.take({"weight": torch.linspace(-1, 1, 64)[None], "bias": torch.tensor([2.5])})
    add_lora(critic, LoraSpec(rank=2))
    adapter = save_adapter(critic, critic.state_dict(), tmp_path / "adapter")
    head = load_critic(
        merge_adapter(model_dir, adapter, tmp_path / "merged", dtype="float32"), dtype="float32"
    ).value_head
    assert head.bias.tolist() == [2.5]
    assert torch.equal(head.weight, critic.value_head.weight)


def test_merged_model_has_the_template_and_the_fields_that_its_adapter_was_saved_with(tmp_path):
    base = tiny_model_dir(tmp_path / "base")
    write_fields(base, {"mean": 9.0, "std": 4.0})
    critic = load_critic(base, dtype="float32")
    add_lora(critic, LoraSpec(rank=2))
    tokenizer = load_tokenizer(base)
    tokenizer.chat_template = "trained"
    fields = {"mean": None, "std": 2.0}
    adapter = save_adapter(critic, critic.state_dict(), tmp_path / "adapter", tokenizer, fields)
    config = json.loads((merge_adapter(base, adapter, tmp_path / "m", dtype="float32") / "config.json").read_text())
    assert "mean" not in config and config["std"] == 2.0
    assert load_tokenizer(tmp_path / "m").chat_template == "trained"
    plain = save_adapter(critic, critic.state_dict(), tmp_path / "plain")
    config = json.loads((merge_adapter(base, plain, tmp_path / "n", dtype="float32") / "config.json").read_text())
    assert (config["mean"], config["std"]) == (9.0, 4.0)
    assert load_tokenizer(tmp_path / "n").chat_template == load_tokenizer(base).chat_template


def merged(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    adapters = adapters_by_weight(model)
    weights = hf_named_weights(model)
    return {name: adapters[weight].merged(weight) if weight in adapters else weight for name, weight in weights}


def test_weights_merged_one_by_one_are_those_of_pefts_merge_under_the_names_of_the_checkpoint(model_dir, tmp_path):
    from peft import PeftModel

    actor = load_actor(model_dir, dtype="float32")
    start = dict(actor.model.named_parameters())
    add_lora(actor, LoraSpec(rank=2, alpha=6.0))
    assert merged(actor).keys() == start.keys()
    assert all(torch.equal(weight, start[name]) for name, weight in merged(actor).items())  # B is zero
    stir(actor)
    before = {name: weight.clone() for name, weight in actor.named_parameters()}
    plain = load_actor(model_dir, dtype="float32").model
    plain = PeftModel.from_pretrained(plain, str(save_adapter(actor, actor.state_dict(), tmp_path))).merge_and_unload()
    found, expected = merged(actor), dict(plain.named_parameters())
    assert found.keys() == expected.keys()
    assert all(torch.equal(weight, expected[name]) for name, weight in found.items())
    assert all(torch.equal(weight, before[name]) for name, weight in actor.named_parameters())


def test_bfloat16_weights_are_merged_in_float32_and_rounded_once(qwen2_dir):
    actor = load_actor(qwen2_dir, dtype="bfloat16")
    add_lora(actor, LoraSpec(rank=2, alpha=6.0, target_modules=("q_proj",)))
    stir(actor)
    layer = actor.model.model.layers[0].self_attn.q_proj
    a, b, weight = (
        tensor.detach().double()
        for tensor in (layer.lora_A["default"].weight, layer.lora_B["default"].weight, layer.base_layer.weight)
    )
    exact = weight + 3.0 * b @ a
    found = merged(actor)["model.layers.0.self_attn.q_proj.weight"]
    assert found.dtype == torch.bfloat16
    # Half a unit in the last of 8 bits, and a little for float32.
    assert ((found.double() - exact).abs() <= exact.abs() * 2.0**-8 * 1.001 + 1e-7).all()


def test_transposed_weights_are_merged_as_peft_does(tmp_path):
    from transformers import GPT2Config, GPT2LMHeadModel

    from rlhf_models.actor import Actor

    model = Actor(GPT2LMHeadModel(GPT2Config(n_layer=1, n_embd=8, n_head=2, vocab_size=16, n_positions=8)))
    add_lora(model, LoraSpec(rank=2))
    stir(model)
    found = {name: weight.detach().clone() for name, weight in merged(model).items()}
    layer = model.model.transformer.h[0].attn.c_attn
    layer.merge()
    assert layer.base_layer.weight.shape == (8, 24)
    assert torch.equal(found["transformer.h.0.attn.c_attn.weight"], layer.base_layer.weight)


def test_merge_reports_each_weight_and_warns_of_none(model_dir, tmp_path, recwarn):
    actor = load_actor(model_dir, dtype="float32")
    add_lora(actor, LoraSpec(rank=1, target_modules=("q_proj", "v_proj")))
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


def test_lora_without_peft_says_how_to_install_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(ConfigError, match=r"is not installed\n\nhint: .*rlhf-models\[lora\]', or train all"):
        add_lora(torch.nn.Linear(2, 2), LoraSpec(rank=1))


def test_lora_with_a_peft_that_is_too_old_for_transformers_says_what_fits(monkeypatch):
    monkeypatch.setattr("transformers.integrations.peft.MIN_PEFT_VERSION", "99.1")
    with pytest.raises(ConfigError, match=r"needs peft 99\.1 or newer, and 0\..*\n\nhint: upgrade peft, or"):
        add_lora(torch.nn.Linear(2, 2), LoraSpec(rank=1))


@pytest.mark.parametrize("fields", [{"rank": 0}, {"rank": 2, "alpha": 0.0}, {"rank": 2, "dropout": 1.0}])
def test_lora_numbers_out_of_range_are_refused(fields):
    with pytest.raises(ConfigError, match="LoRA has rank"):
        LoraSpec(**fields)


def test_lora_target_of_no_layer_is_refused_with_a_hint(qwen2_dir):
    with pytest.raises(ConfigError, match="hint: ``target_modules``"):
        add_lora(load_actor(qwen2_dir, dtype="float32"), LoraSpec(rank=2, target_modules=("no_such_layer",)))


@pytest.mark.parametrize("target", ["embed_tokens", "lm_head"])
def test_lora_of_the_embedding_or_a_tied_head_is_refused_with_a_hint(model_dir, target):
    with pytest.raises(ConfigError, match=r"the embedding(.|\n)*hint: ``target_modules``"):
        add_lora(load_actor(model_dir, dtype="float32"), LoraSpec(rank=2, target_modules=("q_proj", target)))


def test_lora_is_tried_without_weights_and_its_share_is_that_of_the_real_model(qwen2_dir):
    actor = load_actor(qwen2_dir, dtype="float32")
    num_weights = sum(weight.numel() for weight in actor.parameters())
    add_lora(actor, LoraSpec(rank=2, target_modules=("q_proj",)))
    trained = sum(weight.numel() for weight in actor.parameters() if weight.requires_grad)
    numbers = torch.get_rng_state()
    share = check_lora(load_config(qwen2_dir), LoraSpec(rank=2, target_modules=("q_proj",)))
    assert share == trained / num_weights
    assert torch.equal(torch.get_rng_state(), numbers)
    with pytest.raises(ConfigError, match="hint: ``target_modules``"):
        check_lora(load_config(qwen2_dir), LoraSpec(rank=2, target_modules=("no_such_layer",)))


def test_merge_of_a_folder_without_adapter_is_refused(qwen2_dir, tmp_path):
    with pytest.raises(ConfigError, match=rf"^there is no adapter in {tmp_path}\n"):
        merge_adapter(qwen2_dir, tmp_path, tmp_path / "out", dtype="float32")


def test_merge_of_an_adapter_of_another_shape_is_refused(qwen2_dir, tmp_path):
    from rlhf_models.testing import tiny_model_dir

    other = load_actor(tiny_model_dir(tmp_path / "other", hidden_size=32, num_attention_heads=1), dtype="float32")
    add_lora(other, LoraSpec(rank=2))
    adapter = save_adapter(other, other.state_dict(), tmp_path / "adapter")
    with pytest.raises(ConfigError, match="cannot load the adapter"):
        merge_adapter(qwen2_dir, adapter, tmp_path / "out", dtype="float32")
