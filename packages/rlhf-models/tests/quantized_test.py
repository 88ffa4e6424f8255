"""Quantized models: what transformers makes of them cannot be saved, which is noticed before training."""

import json
import runpy
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoTokenizer,
    FineGrainedFP8Config,
    GptOssConfig,
    LlamaConfig,
)

from rlhf_data.errors import ConfigError
from rlhf_models import dequantize as dequantize_module
from rlhf_models.actor import Actor
from rlhf_models.dequantize import dequantize, main
from rlhf_models.testing import tiny_model_dir, tiny_tokenizer
from rlhf_models.weights import check_saves, save_hf
from tiny_vision import tiny_vision_model_dir

BLOCK = 32
E2M1 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]  # the magnitudes of 4-bit floating-point numbers


def rewrite(folder, tensors, **config):
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"dtype": "bfloat16"} | config))
    return folder


def fp8_dir(path, architecture="llama"):
    """Write a model in blocks of FP8 with a scale each; return its folder and its weights in bfloat16."""
    folder = tiny_model_dir(path, architecture=architecture, tied=False, hidden_size=64)
    return quantized(folder)


def fp8_vision_dir(path):
    """Write a model that reads images, whose text part alone says that it is quantized."""
    folder = Path(tiny_vision_model_dir(path, "qwen2_5_vl"))
    _, whole = quantized(folder)
    fields = json.loads((folder / "config.json").read_text())
    fields["text_config"]["quantization_config"] = fields.pop("quantization_config")
    (folder / "config.json").write_text(json.dumps(fields))
    return folder, whole


def quantized(folder):
    """Round the layers of a language model in a folder; return the folder and its weights in bfloat16."""
    stored, whole = {}, {}
    for name, weight in load_file(folder / "model.safetensors").items():
        whole[name] = stored[name] = weight.bfloat16()
        if ".layers." in name and weight.dim() == 2 and ".gate.weight" not in name and "visual" not in name:
            rows, columns = weight.shape
            blocks = weight.reshape(rows // BLOCK, BLOCK, columns // BLOCK, BLOCK)
            scales = blocks.abs().amax((1, 3), keepdim=True) / 448  # the largest number of float8_e4m3fn
            rounded = (blocks / scales).to(torch.float8_e4m3fn)
            stored[name] = rounded.reshape(rows, columns)
            stored[f"{name}_scale_inv"] = scales[:, 0, :, 0].contiguous()
            whole[name] = (rounded.float() * scales).reshape(rows, columns).bfloat16()
    options = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [BLOCK, BLOCK]}
    return rewrite(
        folder, stored, quantization_config=options | {"modules_to_not_convert": ["lm_head", "gate", "visual"]}
    ), whole


def mxfp4_dir(path):
    """Write a model with experts in MXFP4, pairs of 4-bit numbers in bytes; return its folder and whole weights."""
    sizes = {"hidden_size": 64, "intermediate_size": 64, "head_dim": 32, "num_hidden_layers": 2, "vocab_size": 512}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "num_local_experts": 4, "num_experts_per_tok": 2}
    config = GptOssConfig(**sizes, **heads, eos_token_id=2, pad_token_id=0, initializer_range=0.1)
    AutoModelForCausalLM.from_config(config).bfloat16().save_pretrained(path)
    tiny_tokenizer().save_pretrained(path)
    generator = torch.Generator().manual_seed(0)
    stored, whole = {}, {}
    for name, weight in load_file(path / "model.safetensors").items():
        whole[name] = stored[name] = weight
        if name.endswith("_proj") and ".experts." in name:
            experts, rows, columns = weight.shape  # [E, in, out]; blocks lie along the input
            del stored[name]
            codes = torch.randint(16, (experts, columns, rows), generator=generator)
            exponents = torch.randint(118, 124, (experts, columns, rows // 32), generator=generator)
            stored[f"{name}_blocks"] = (codes[..., ::2] | codes[..., 1::2] << 4).to(torch.uint8)
            stored[f"{name}_blocks"] = stored[f"{name}_blocks"].reshape(experts, columns, rows // 32, 16)
            stored[f"{name}_scales"] = exponents.to(torch.uint8)
            values = torch.tensor([*E2M1, *(-value for value in E2M1)])[codes]
            scales = torch.exp2(exponents - 127.0).repeat_interleave(32, -1)
            whole[name] = (values * scales).transpose(1, 2).contiguous().bfloat16()
    return rewrite(path, stored, quantization_config={"quant_method": "mxfp4"}), whole


def test_model_that_transformers_dequantized_is_refused_before_training_with_what_it_would_save(tmp_path):
    folder, _ = fp8_dir(tmp_path / "fp8")
    whole = FineGrainedFP8Config(dequantize=True)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, quantization_config=whole)
    with pytest.raises(
        ConfigError,
        match=r"a trained llama could not be saved .*unexpected keys: (\d+), such as .*scale_inv.*\n\nhint: ",
    ) as error:
        check_saves(Actor(model))
    # What plain transformers says of such a folder.
    saved = save_hf(Actor(model), None, None, tmp_path / "saved")
    _, report = AutoModelForCausalLM.from_pretrained(saved, output_loading_info=True)
    assert f"unexpected keys: {len(report['unexpected_keys'])}," in str(error.value)


@pytest.mark.parametrize("make", [fp8_dir, lambda path: fp8_dir(path, "qwen3_moe"), mxfp4_dir, fp8_vision_dir])
def test_dequantized_copy_has_the_whole_weights_in_plain_transformers(tmp_path, make, capsys):
    folder, whole = make(tmp_path / "quantized")
    (tmp_path / "copy").mkdir()  # an empty folder may be there
    assert main([str(folder), str(tmp_path / "copy")]) == 0
    assert capsys.readouterr().out.endswith(f"written to {tmp_path / 'copy'}\n")
    stored = load_file(tmp_path / "copy" / "model.safetensors")
    assert stored.keys() == whole.keys()
    for name, weight in whole.items():
        torch.testing.assert_close(stored[name], weight, rtol=2**-7, atol=0, msg=name)  # FP8 is scaled in bfloat16
    family = AutoModelForImageTextToText if make is fp8_vision_dir else AutoModelForCausalLM
    model, report = family.from_pretrained(tmp_path / "copy", output_loading_info=True)
    assert not any(report.values()) and model.dtype == torch.bfloat16
    assert "quantization_config" not in (tmp_path / "copy" / "config.json").read_text()
    files = {part: (part / "preprocessor_config.json").exists() for part in (folder, tmp_path / "copy")}
    assert set(files.values()) == {make is fp8_vision_dir}
    assert AutoTokenizer.from_pretrained(tmp_path / "copy").chat_template


def test_dequantize_asks_for_whole_weights_also_where_a_gpu_could_compute_with_quantized_ones(tmp_path, monkeypatch):
    folder, _ = fp8_dir(tmp_path / "quantized")
    plain = AutoModelForCausalLM.from_pretrained
    asked = []

    def noted(*args, quantization_config, **options):
        asked.append(quantization_config.dequantize)
        return plain(*args, quantization_config=quantization_config, **options)

    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", noted)
    entrusted = []
    monkeypatch.setattr(dequantize_module, "entrust", lambda config, name: entrusted.append((type(config), name)))
    dequantize(folder, tmp_path / "copy")
    assert asked == [True]
    assert entrusted == [(LlamaConfig, str(folder))]  # whose code, if it has any, the copy gets


def test_dequantize_writes_nothing_that_transformers_would_not_load(tmp_path, monkeypatch):
    def refuse(actor):
        raise ConfigError(f"a {actor.model.config.model_type} could not be saved")

    folder, _ = fp8_dir(tmp_path / "quantized")
    monkeypatch.setattr(dequantize_module, "check_saves", refuse)
    with pytest.raises(ConfigError, match="a llama could not be saved"):
        dequantize(folder, tmp_path / "copy")
    assert not (tmp_path / "copy").exists()


def test_help_of_dequantize_explains_the_command_and_each_of_its_words(capsys):
    with pytest.raises(SystemExit):
        main(["--help"])
    told = " ".join(capsys.readouterr().out.split())
    for text in ("which can be trained", "quantized by fp8 or mxfp4", "new folder", "read it before"):
        assert text in told


def test_module_is_a_command(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["dequantize", str(tmp_path / "nothing"), str(tmp_path / "copy")])
    with pytest.raises(SystemExit) as exited:
        runpy.run_path(dequantize_module.__file__, run_name="__main__")
    assert exited.value.code not in (0, None)
    assert f"no model folder {tmp_path / 'nothing'}" in capsys.readouterr().err


def test_dequantize_refuses_other_models_and_folders_with_files(tmp_path):
    folder = tiny_model_dir(tmp_path / "whole")
    with pytest.raises(ConfigError, match="unknown quant_method `None`"):
        dequantize(folder, tmp_path / "copy")
    with pytest.raises(ConfigError, match=r"whole is not an empty folder\n\nhint: name a new folder"):
        dequantize(folder, folder)
