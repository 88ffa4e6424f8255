import json
import logging
import shutil
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    Phi3Config,
    PretrainedConfig,
)

from rlhf_data.errors import ConfigError
from rlhf_models.attention.frequencies import pin_frequencies
from rlhf_models.batch import TokenBatch
from rlhf_models.loading import (
    check_critic,
    check_reward_model,
    check_tokenizer_fits,
    check_trained_copy,
    check_weights,
    load_actor,
    load_config,
    load_critic,
    load_reference,
    load_tokenizer,
    resolve_dtype,
)
from rlhf_models.testing import tiny_model_dir


def edited(folder, tmp_path, file, **fields):
    """A copy of a model folder with fields of one of its JSON files changed."""
    copy = shutil.copytree(folder, tmp_path / "copy")
    content = json.loads((copy / file).read_text())
    (copy / file).write_text(json.dumps(content | fields))
    return copy


@pytest.mark.parametrize("path", ["/no/such/folder", "./nowhere", "nowhere", "a/b/c"])
@pytest.mark.parametrize("load", [load_config, load_tokenizer, check_reward_model])
def test_load_missing_folder_names_it_and_hints(path, load):
    with pytest.raises(ConfigError, match=rf"no model folder {path}\n\nhint: "):
        load(path)


def test_load_config_hub_name_that_cannot_be_reached_names_it_and_hints(monkeypatch):
    monkeypatch.setattr("rlhf_data.pretrained.hub_answers", lambda: True)

    def offline(*args, **kwargs):
        raise OSError("We couldn't connect\nto the hub")

    monkeypatch.setattr("transformers.AutoConfig.from_pretrained", offline)
    with pytest.raises(ConfigError, match=r"cannot load the model some/name: We couldn't connect\n\nhint: .*offline"):
        load_config("some/name")


def test_load_config_that_contradicts_itself_says_in_what(model_dir, tmp_path):
    config = json.loads((model_dir / "config.json").read_text(encoding="utf-8"))
    (tmp_path / "config.json").write_text(
        json.dumps(config | {"num_hidden_layers": 7, "layer_types": ["full_attention"]}), encoding="utf-8"
    )
    with pytest.raises(ConfigError, match=r"cannot load the model .*: .*num_hidden_layers.*\n\nhint: "):
        load_config(tmp_path)


@pytest.mark.parametrize("place", ["config", "text_config"])
@pytest.mark.parametrize("load", [load_config, lambda path: load_actor(path, dtype="float32")])
def test_quantized_model_is_refused_with_its_method(qwen2_dir, tmp_path, monkeypatch, load, place):
    folder = edited(qwen2_dir, tmp_path, "config.json", quantization_config={"quant_method": "gptq", "bits": 4})
    if place == "text_config":

        class Whole(PretrainedConfig):
            def get_text_config(self, *_, **__):
                return PretrainedConfig(quantization_config={"quant_method": "gptq"})

        monkeypatch.setattr("transformers.AutoConfig.from_pretrained", lambda *_, **__: Whole())
    with pytest.raises(ConfigError, match=r"copy is quantized \(gptq\), and .* need whole weights\n\nhint: "):
        load(folder)


@pytest.mark.parametrize(
    ("name", "method", "hint"),
    [
        ("Qwen/Qwen3-8B-FP8", "fp8", r"made from, by its name Qwen/Qwen3-8B; `python -m rlhf_models\.dequantize Qwen/"),
        ("Qwen/Qwen2.5-7B-Instruct-GPTQ-Int4", "gptq", r"by its name Qwen/Qwen2\.5-7B-Instruct$"),
        ("unsloth/Llama-3.2-1B-unsloth-bnb-4bit", "bitsandbytes", r"by its name unsloth/Llama-3\.2-1B$"),
        ("openai/gpt-oss-20b", "mxfp4", r"such as unsloth/gpt-oss-20b-BF16; `python -m rlhf_models\.dequantize openai"),
        ("deepseek-ai/DeepSeek-V3", "fp8", r"in bfloat16; `python -m rlhf_models\.dequantize deepseek-ai/DeepSeek-V3 "),
        ("owner/name", "quark", r"a copy with its weights in bfloat16$"),
    ],
)
def test_hint_for_a_quantized_model_names_a_copy_or_says_how_to_make_one(monkeypatch, name, method, hint):
    config = PretrainedConfig(quantization_config={"quant_method": method})
    monkeypatch.setattr("transformers.AutoConfig.from_pretrained", lambda *_, **__: config)
    with pytest.raises(ConfigError, match=rf"{name} is quantized \({method}\).*\n\nhint: .*{hint}"):
        load_config(name)


def test_hint_for_a_folder_of_a_quantized_model_takes_its_name_for_no_hub_name(qwen2_dir, tmp_path):
    folder = edited(qwen2_dir, tmp_path, "config.json", quantization_config={"quant_method": "gptq"})
    folder = folder.rename(tmp_path / "Qwen3-8B-GPTQ")
    with pytest.raises(
        ConfigError, match=r"GPTQ is quantized [^\n]*\n\nhint: use the model that it was made from, or a"
    ):
        load_config(folder)


def test_critic_may_have_a_head_of_one_score_only(qwen2_dir, tmp_path):
    for num_labels in (1, 2):
        config = AutoConfig.from_pretrained(qwen2_dir, num_labels=num_labels)
        AutoModelForSequenceClassification.from_config(config).save_pretrained(tmp_path / str(num_labels))
    check_critic(qwen2_dir)  # which has no head
    check_critic(tmp_path / "1")
    check_critic("some/name")
    with pytest.raises(ConfigError, match=r"score.weight of the model .*2 has the shape \[2, \d+\]; one score needs"):
        check_critic(tmp_path / "2")


@pytest.mark.parametrize("has_values", [False, True])
@pytest.mark.parametrize("suffix", ["safetensors", "bin"])
def test_check_trained_copy_reads_which_weights_a_folder_has_and_no_numbers(qwen2_dir, tmp_path, has_values, suffix):
    check_trained_copy("some/name", "bfloat16", has_values=has_values)
    folder = shutil.copytree(qwen2_dir, tmp_path / "copy")
    weights = load_file(folder / "model.safetensors")
    if suffix == "bin":
        (folder / "model.safetensors").unlink()
    write = {"safetensors": lambda: save_file(weights, folder / "model.safetensors", {"format": "pt"})}
    write["bin"] = lambda: torch.save(weights, folder / "pytorch_model.bin")
    write[suffix]()
    check_trained_copy(folder, "bfloat16", has_values=has_values)
    del weights["model.norm.weight"]
    write[suffix]()
    name = "norm.weight" if has_values else "model.norm.weight"
    with pytest.raises(ConfigError, match=rf"copy lacks 1 weights of a Qwen2\w+, such as {name}\n\nhint: "):
        check_trained_copy(folder, "bfloat16", has_values=has_values)


def test_check_trained_copy_refuses_weights_of_other_shapes_than_the_config(qwen2_dir, tmp_path):
    folder = edited(qwen2_dir, tmp_path, "config.json", intermediate_size=96)
    with pytest.raises(ConfigError, match=r"copy has 6 weights of other shapes than its config, such as model\.layers"):
        check_trained_copy(folder, "float32", has_values=False)


def test_model_that_cannot_be_loaded_without_memory_is_left_to_loading_with_a_warning(qwen2_dir, monkeypatch, caplog):
    def fail(*_, **__):
        raise NotImplementedError("no such operator for meta tensors")

    monkeypatch.setattr("transformers.Qwen2ForCausalLM.from_pretrained", fail)
    check_trained_copy(qwen2_dir, "float32", has_values=False)
    assert "a qwen2 cannot be loaded without memory, and is not checked: no such operator" in caplog.text


def test_check_weights_whole_folder_and_hub_name_pass(model_dir):
    check_weights(model_dir)
    check_weights("some/name")


def test_check_weights_sharded_folder_needs_every_shard(model_dir, tmp_path):
    load_actor(model_dir, dtype="float32").model.save_pretrained(tmp_path, max_shard_size="100KB")
    check_weights(tmp_path)
    shard = sorted(tmp_path.glob("model-*.safetensors"))[1]
    shard.unlink()
    with pytest.raises(ConfigError, match=rf"lacks the weights in {shard.name}\n\nhint: "):
        check_weights(tmp_path)


WHOLE = r"model.safetensors is not a whole safetensors file[^\n]*\n\nhint: .*git lfs pull"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda file: file.unlink(), r"has no weights, such as model\.safetensors[^\n]*\n\nhint: .*git lfs pull"),
        (lambda file: file.write_bytes(b"version https://git-lfs.github.com/spec/v1\n"), WHOLE),
        (lambda file: file.write_bytes(b""), WHOLE),
        (lambda file: file.write_bytes(file.read_bytes()[:-1]), WHOLE),
        (lambda file: file.rename(f"{file}.index.json").write_text("[]"), "is not an index of weights"),
    ],
    ids=["absent", "pointer", "empty", "cut off", "no index"],
)
def test_check_weights_absent_or_broken_are_named(model_dir, tmp_path, change, message):
    change(shutil.copytree(model_dir, tmp_path / "copy") / "model.safetensors")
    with pytest.raises(ConfigError, match=message):
        check_weights(tmp_path / "copy")


def test_load_config_folder_without_config_says_what_belongs_there(tmp_path):
    with pytest.raises(ConfigError, match=r"no config.json\n\nhint: .*save_pretrained"):
        load_config(tmp_path)


def test_check_weights_refuses_a_tied_model_with_a_head_of_its_own(tmp_path):
    folder = tiny_model_dir(tmp_path)
    check_weights(folder)
    weights = load_file(folder / "model.safetensors")
    weights["lm_head.weight"] = -weights["model.embed_tokens.weight"]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ConfigError, match="ties the LM head to the embedding"):
        check_weights(folder)


def beyond(tokenizer, number):
    tokenizer.add_special_tokens({"additional_special_tokens": [f"<image_{n}>" for n in range(number)]})


@pytest.mark.parametrize(
    ("change", "fits"),
    [
        (lambda tokenizer: None, None),
        (lambda tokenizer: beyond(tokenizer, 1), 512),  # the number of ids that there are
        (lambda tokenizer: beyond(tokenizer, 64), 512),
        (lambda tokenizer: beyond(tokenizer, 65), "ids up to 576"),
        (
            lambda tokenizer: tokenizer.add_tokens(["text"]),
            r"token ids up to 512, but .* ends at 511\n\nhint: take the",
        ),
        (
            lambda tokenizer: tokenizer.add_special_tokens({"eos_token": "<new_end>"}),
            "token ids up to 512, but the model's embedding ends at 511",
        ),
        (
            lambda tokenizer: setattr(tokenizer, "eos_token", None),
            r"no end-of-sequence token\n\nhint: .*tokenizer_config.json",
        ),
    ],
    ids=["its own", "one special", "64 special", "65 special", "a text", "the end", "no end"],
)
def test_check_tokenizer_fits_up_to_64_special_tokens_beyond_the_embedding(model_dir, change, fits):
    tokenizer = load_tokenizer(model_dir)
    change(tokenizer)
    with pytest.raises(ConfigError, match=fits) if isinstance(fits, str) else nullcontext():
        assert check_tokenizer_fits(load_config(model_dir), tokenizer) == fits


def test_resolve_dtype_other_than_two_is_refused():
    assert resolve_dtype("bfloat16") is resolve_dtype(torch.bfloat16) is torch.bfloat16
    with pytest.raises(ConfigError, match="unknown dtype `float16`; known: bfloat16, float32"):
        resolve_dtype("float16")


@pytest.mark.parametrize("load", [load_actor, load_critic])
def test_load_bfloat16_holds_every_weight_in_it_and_trains(model_dir, load):
    model = load(model_dir, dtype="bfloat16")
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    assert model.training
    assert all(parameter.requires_grad for parameter in model.parameters())


def test_load_reference_is_frozen_and_in_eval_mode(model_dir):
    reference = load_reference(model_dir, dtype="float32")
    assert not reference.training
    assert not any(parameter.requires_grad for parameter in reference.parameters())


def test_load_actor_reports_nothing_on_the_terminal(model_dir, capfd):
    from transformers.utils import logging as hf_logging

    level = hf_logging.get_verbosity()
    load_critic(model_dir, dtype="float32")
    assert capfd.readouterr() == ("", "")
    assert hf_logging.get_verbosity() == level != logging.ERROR
    assert hf_logging.is_progress_bar_enabled()


def test_load_actor_weights_of_other_shapes_are_refused(qwen2_dir, tmp_path):
    with pytest.raises(ConfigError, match="cannot load the model"):
        load_actor(edited(qwen2_dir, tmp_path, "config.json", hidden_size=32), dtype="float32")


def test_load_actor_missing_weights_are_refused_not_made_up(qwen2_dir, tmp_path):
    with pytest.raises(ConfigError, match=r"lacks 12 weights of a Qwen2ForCausalLM, such as model.layers.2"):
        load_actor(
            edited(qwen2_dir, tmp_path, "config.json", num_hidden_layers=3, layer_types=["full_attention"] * 3),
            dtype="float32",
        )


@pytest.mark.parametrize(
    ("kind", "shape"),
    [
        ("bloom", {"hidden_size": 16, "n_layer": 1, "n_head": 2}),
        ("mpt", {"d_model": 16, "n_layers": 1, "n_heads": 2}),
    ],
)
def test_load_actor_whose_own_attention_mixes_sequences_is_not_packed(kind, shape, tmp_path):
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(kind, vocab_size=32, **shape)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    load_actor(tmp_path, dtype="float32", attn_implementation="eager")
    with pytest.raises(ConfigError, match=rf"a {kind} model .*cannot be packed: it mixes.*\n\nhint: turn packing off"):
        load_actor(tmp_path, dtype="float32", packing=True)


@pytest.fixture
def long_rope_dir(tmp_path):
    """A model with LongRoPE, whose frequencies change beyond 8 tokens."""
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 8}
    rope |= {"long_factor": [4.0] * 8, "short_factor": [1.0] * 8}
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    sizes |= {"num_key_value_heads": 2, "vocab_size": 64, "pad_token_id": 0, "max_position_embeddings": 64}
    torch.manual_seed(0)
    config = Phi3Config(**sizes, initializer_range=0.5, rope_parameters=rope, original_max_position_embeddings=8)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("max_length", "used"),
    [(8, "short_factor"), (9, "long_factor"), (64, "long_factor"), (None, "long_factor")],  # None: the context, 64
)
def test_frequencies_of_long_rope_are_those_of_the_longest_sequence_of_the_run(long_rope_dir, max_length, used):
    # A model whose two sets of frequencies are equal has no choice.
    plain = AutoModelForCausalLM.from_pretrained(long_rope_dir).eval()
    for name in ("short_factor", "long_factor"):
        plain.config.rope_parameters[name] = {"short_factor": [1.0] * 8, "long_factor": [4.0] * 8}[used]
    plain.model.rotary_emb = type(plain.model.rotary_emb)(plain.config)
    actor = load_actor(long_rope_dir, dtype="float32", max_length=max_length).eval()
    sequences = [[5, 6, 7], list(range(3, 3 + min(max_length or 64, 20)))]
    with torch.no_grad():
        for batch in (sequences, sequences[:1], sequences[1:]):
            found = TokenBatch.padded(batch, 0)
            for sequence, values in zip(batch, found.split(actor(found).logprobs), strict=True):
                ids = torch.tensor([sequence])
                expected = plain(ids).logits.log_softmax(-1)[0, :-1].gather(1, ids[0, 1:, None])[:, 0]
                torch.testing.assert_close(values[1:], expected, atol=1e-4, rtol=0)


def test_dynamic_rope_is_refused_for_sequences_beyond_the_length_that_it_was_trained_for(tmp_path):
    tiny_model_dir(
        tmp_path,
        architecture="llama",
        max_position_embeddings=16,
        rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0},
    )
    for max_length in (16, None):
        load_actor(tmp_path, dtype="float32", max_length=max_length)
    with pytest.raises(ConfigError, match=r"dynamic beyond 16 tokens.*\n\nhint: use sequences of at most 16 tokens"):
        load_actor(tmp_path, dtype="float32", max_length=17)


def test_long_rope_that_a_model_makes_anew_in_each_batch_is_refused_beyond_its_old_context(tmp_path):
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 16}
    rope |= {"short_factor": [1.0] * 8, "long_factor": [4.0] * 8, "short_mscale": 1.2, "long_mscale": 1.3}
    shape = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 1}
    shape |= {"num_local_experts": 2, "intermediate_size": 32, "vocab_size": 32, "max_position_embeddings": 64}
    config = AutoConfig.for_model("phimoe", rope_parameters=rope, pad_token_id=0, bos_token_id=1, **shape)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    load_actor(tmp_path, dtype="float32", max_length=16)
    for max_length, longest in ((17, 17), (None, 64)):
        message = rf"longest sequence of a batch[^\n]*\n\nhint: use [^\n]* 16 tokens, the run's may have {longest}"
        with pytest.raises(ConfigError, match=message):
            load_actor(tmp_path, dtype="float32", max_length=max_length)


def test_long_rope_in_some_of_the_layers_is_refused():
    model = torch.nn.Module()
    model.config = SimpleNamespace(model_type="mixed")
    model.rotary = torch.nn.Module()
    model.rotary.rope_type = {"full_attention": "yarn", "sliding_attention": "default"}
    pin_frequencies(model, 64)
    model.rotary.rope_type["full_attention"] = "longrope"
    with pytest.raises(ConfigError, match=r"layers of mixed [^\n]*, one longrope: [^\n]*\n\nhint: use a model of"):
        pin_frequencies(model, 64)
