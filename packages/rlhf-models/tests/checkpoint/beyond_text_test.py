"""Weights that text does not reach: they are not trained, and a saved model has them."""

import json
import logging
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    Gemma3Config,
    Gemma3nConfig,
    GPTNeoXConfig,
    Llama4Config,
    Qwen2_5_VLConfig,
    Qwen3_5Config,
    T5Config,
)
from transformers.utils.import_utils import BACKENDS_MAPPING, TIMM_IMPORT_ERROR

from rlhf_data.errors import ConfigError
from rlhf_models.batch import TokenBatch
from rlhf_models.checkpoint.beyond_text import save_left_out
from rlhf_models.checkpoint.files import tensor_files
from rlhf_models.loading import (
    check_generates,
    check_trained_copy,
    load_actor,
    load_config,
    load_critic,
    load_reward_model,
    load_tokenizer,
)
from rlhf_models.lora import LoraSpec, add_lora, merge_adapter, save_adapter
from rlhf_models.reward import score_sequences
from rlhf_models.testing import tiny_tokenizer
from rlhf_models.weights import hf_named_weights, save_hf

TEXT = {
    **dict.fromkeys(("hidden_size", "intermediate_size"), 64),
    "vocab_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
EYE = {"hidden_size": 32, "intermediate_size": 32, "patch_size": 14}
CONFIGS = {
    "gemma3": lambda: Gemma3Config(
        text_config=TEXT,
        vision_config=EYE | {"num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 28},
        mm_tokens_per_image=4,
    ),
    "qwen3_5": lambda: Qwen3_5Config(
        text_config=TEXT
        | {"linear_num_key_heads": 2, "linear_num_value_heads": 2, "linear_key_head_dim": 16}
        | {"linear_value_head_dim": 16, "layer_types": ["linear_attention", "full_attention"]},
        vision_config=EYE | {"depth": 1, "num_heads": 2, "out_hidden_size": 64, "num_position_embeddings": 4},
    ),
    "llama4": lambda: Llama4Config(
        text_config=TEXT | {"intermediate_size_mlp": 64, "num_local_experts": 2, "moe_layers": []},
        vision_config=EYE
        | {"num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 28}
        | {"projector_input_dim": 32, "projector_output_dim": 32, "vision_output_dim": 32},
    ),
}
IMAGES = ("vision", "visual", "multi_modal")


@pytest.fixture(scope="module", params=CONFIGS)
def folder(request, tmp_path_factory):
    """A model for images and text, with the file of its processor and, for Qwen3.5, a layer for a second token."""
    path = tmp_path_factory.mktemp(request.param)
    AutoModelForImageTextToText.from_config(CONFIGS[request.param]()).save_pretrained(path)
    tiny_tokenizer(512).save_pretrained(path)
    (path / "preprocessor_config.json").write_text('{"size": 28}')
    if request.param == "qwen3_5":
        weights = load_file(path / "model.safetensors") | {"mtp.fc.weight": torch.ones(2, 64)}
        save_file(weights, path / "model.safetensors", {"format": "pt"})
    return path


def stored(path):
    """The weights of a folder by name."""
    return {name: weight for file in sorted(path.glob("*.safetensors")) for name, weight in load_file(file).items()}


def is_of_images(name):
    return any(word in name for word in IMAGES)


def update(actor, sequences):
    """One step of AdamW with weight decay, over all weights that have gradients or none."""
    trained = [weight for weight in actor.parameters() if weight.requires_grad]
    for weight in trained:
        weight.grad = torch.zeros_like(weight)
    actor(TokenBatch.padded(sequences, 0)).logprobs.sum().neg().backward()
    torch.optim.AdamW(trained, lr=0.1, weight_decay=0.5).step()


def test_saved_model_has_the_untrained_weights_of_images(folder, tmp_path, sequences):
    actor = load_actor(folder, dtype="float32")
    update(actor, sequences)
    saved = save_hf(actor, None, load_tokenizer(folder), tmp_path / "saved")
    before, after = stored(folder), stored(saved)
    assert before.keys() == after.keys()
    same = {name for name in before if torch.equal(before[name], after[name])}
    assert {name for name in before if is_of_images(name) or name.startswith("mtp")} == same
    whole, report = AutoModelForImageTextToText.from_pretrained(saved, output_loading_info=True)
    assert not any(report.values())
    text = dict(whole.named_parameters())
    for name, weight in actor.model.named_parameters():
        inner = text.get(f"language_model.{name}", text.get(name.replace("model.", "model.language_model.", 1)))
        found = text.get(name, inner)
        assert torch.equal(found, weight)
    assert (saved / "preprocessor_config.json").read_text() == '{"size": 28}'


def test_saved_model_loads_for_text_as_before_and_has_the_config_of_the_whole(folder, tmp_path, sequences):
    actor = load_actor(folder, dtype="float32").eval()
    saved = save_hf(actor, None, None, tmp_path / "saved")
    again, report = AutoModelForCausalLM.from_pretrained(saved, output_loading_info=True)
    _, before = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert type(again) is type(actor.model) and report == before
    batch = TokenBatch.padded(sequences, 0)
    with torch.no_grad():
        assert torch.equal(load_actor(saved, dtype="float32").eval()(batch).logprobs, actor(batch).logprobs)

    def fields(path):
        return json.loads((path / "config.json").read_text(), object_hook=lambda one: one | {"dtype": None})

    assert fields(saved) == fields(folder)


def test_an_engine_of_the_whole_model_knows_the_names_of_the_weights_that_it_is_sent(folder):
    model = load_actor(folder, dtype="float32").model
    sent = {name: tuple(weight.shape) for name, weight in hf_named_weights(model)}
    assert sent and sent.items() <= {name: tuple(weight.shape) for name, weight in stored(folder).items()}.items()


def test_folder_that_has_gone_leaves_a_model_for_text_and_a_warning(folder, tmp_path, caplog):
    copy = shutil.copytree(folder, tmp_path / "copy")
    actor = load_actor(copy, dtype="float32")
    shutil.rmtree(copy)
    with caplog.at_level(logging.WARNING):
        saved = save_hf(actor, None, None, tmp_path / "saved")
    _, report = AutoModelForCausalLM.from_pretrained(saved, output_loading_info=True)
    assert not any(report.values())
    count = len(actor.model.left_out.files)
    assert f"lacks what was not trained: {count} weights of {copy}" in caplog.text


def test_file_that_has_gone_leaves_a_model_for_text_and_a_warning(folder, tmp_path, caplog):
    copy = shutil.copytree(folder, tmp_path / "copy")
    actor = load_actor(copy, dtype="float32")
    (copy / "model.safetensors").unlink()
    with caplog.at_level(logging.WARNING):
        saved = save_hf(actor, None, None, tmp_path / "saved")
    load_actor(saved, dtype="float32")
    assert (f"{copy} has no file model.safetensors, which" in caplog.text) == bool(actor.model.left_out.files)


def test_left_out_weights_join_a_model_of_several_files(tmp_path_factory, tmp_path):
    path = tmp_path_factory.mktemp("qwen3_5")
    AutoModelForImageTextToText.from_config(CONFIGS["qwen3_5"]()).save_pretrained(path, max_shard_size="200KB")
    model = load_actor(path, dtype="float32").model
    model.save_pretrained(tmp_path, max_shard_size="200KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    save_left_out(model, tmp_path)
    assert tensor_files(tmp_path).keys() == tensor_files(path).keys()
    _, report = AutoModelForImageTextToText.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(report.values())


def test_masks_and_constants_of_old_checkpoints_are_left_out(tmp_path):
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 1}
    model = AutoModelForCausalLM.from_config(GPTNeoXConfig(vocab_size=512, **sizes))
    model.save_pretrained(tmp_path / "old")
    old = {"attention.bias": torch.ones(1, 1, 4, 4, dtype=torch.bool), "attention.masked_bias": torch.tensor(-1e9)}
    file = tmp_path / "old/model.safetensors"
    weights = {f"gpt_neox.layers.0.{name}": tensor for name, tensor in old.items()}
    save_file(load_file(file) | weights, file, {"format": "pt"})
    saved = save_hf(load_actor(tmp_path / "old", dtype="float32"), None, None, tmp_path / "new")
    assert [file.name for file in saved.glob("*.safetensors")] == ["model.safetensors"]


@pytest.mark.parametrize("layers", ["all-linear", ("q_proj", "k_proj")])
def test_adapters_are_only_where_text_is_and_a_merged_model_is_whole(folder, tmp_path, layers):
    actor = load_actor(folder, dtype="float32")
    add_lora(actor, LoraSpec(rank=2, target_modules=layers))
    adapted = [name for name, _ in actor.named_parameters() if ".lora_" in name]
    assert adapted and not any(is_of_images(name) for name in adapted)
    adapter = save_adapter(actor, actor.state_dict(), tmp_path / "adapter")
    merged = merge_adapter(folder, adapter, tmp_path / "merged", dtype="float32")
    assert stored(merged).keys() == stored(folder).keys()


def test_critic_trains_text_and_its_head(folder):
    trained = {name: weight.requires_grad for name, weight in load_critic(folder, dtype="float32").named_parameters()}
    assert trained["value_head.weight"]
    assert {name for name, is_trained in trained.items() if not is_trained} == set(filter(is_of_images, trained))


def test_critic_and_the_reward_model_that_it_becomes_read_the_states_of_text(folder, tmp_path):
    check_trained_copy(folder, "float32", has_values=True)
    critic = load_critic(folder, dtype="float32")
    torch.nn.init.normal_(critic.value_head.weight)
    tokens = [5, 9, 7, 300, 2]
    plain = AutoModelForCausalLM.from_pretrained(folder)
    with torch.no_grad():
        states = plain(input_ids=torch.tensor([tokens]), output_hidden_states=True).hidden_states[-1]
        expected = (states @ critic.value_head.weight.T)[..., 0]
        torch.testing.assert_close(critic(TokenBatch.padded([tokens], 0), after_token=True), expected)
    saved = save_hf(critic, None, None, tmp_path / "critic")
    scores = score_sequences(load_reward_model(saved, dtype="float32"), [tokens], batch_size=1)
    assert scores == pytest.approx(expected[:, -1].tolist(), abs=1e-5)


def test_model_without_a_class_for_text_is_refused_with_the_cause(tmp_path):
    config = Qwen2_5_VLConfig()
    config.save_pretrained(tmp_path / "images")
    check = "it also reads images, videos or sounds, and has no class for text alone\n\n"
    check += "hint: `rlhf sft` and `rlhf ppo` train it on rows with images, ``image_key``; for text, use a text model"
    for refuse in (
        lambda path: load_actor(path, dtype="float32"),
        lambda path: check_generates(path, load_config(path)),
    ):
        with pytest.raises(ConfigError, match=rf"is a qwen2_5_vl \(Qwen2_5_VL\)[^\n]*{check}"):
            refuse(tmp_path / "images")
    check_generates("here", CONFIGS["qwen3_5"]())
    check_generates("here", CONFIGS["gemma3"]())


def test_package_that_reads_images_is_missed_before_the_model_is_loaded(tmp_path, monkeypatch):
    monkeypatch.setitem(BACKENDS_MAPPING, "timm", (lambda: False, TIMM_IMPORT_ERROR))
    Gemma3nConfig(text_config={"num_hidden_layers": 5, "num_kv_shared_layers": 0}).save_pretrained(tmp_path)
    save_file({"model.language_model.norm.weight": torch.ones(2048)}, tmp_path / "model.safetensors", {"format": "pt"})
    for has_values in (False, True):
        with pytest.raises(ConfigError, match=r"requires the timm library[^\n]*\n\nhint: pip install timm, or use"):
            check_trained_copy(tmp_path, "bfloat16", has_values=has_values)


def test_encoder_is_refused_as_no_language_model(tmp_path):
    with pytest.raises(ConfigError, match=r"is a t5 \(T5\), of which transformers has no language model\n\nhint: "):
        check_generates(tmp_path, T5Config())
