"""Models with Python code of their own: it runs only where the name says that it is trusted."""

import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import torch

# transformers reads this when it is imported: where it copies the code of models to.
os.environ.setdefault("HF_MODULES_CACHE", tempfile.mkdtemp())

from transformers import AutoModelForCausalLM

from own_code_testing import own_code_model_dir
from rlhf_data.errors import ConfigError
from rlhf_data.own_code import TrustedModel, admit_code, trusted
from rlhf_models import dequantize
from rlhf_models.batch import TokenBatch
from rlhf_models.loading import (
    check_critic,
    check_generates,
    check_reward_model,
    check_trained_copy,
    load_actor,
    load_config,
    load_critic,
    load_reward_model,
    load_tokenizer,
)
from rlhf_models.lora import LoraSpec, add_lora, check_lora, merge_adapter, save_adapter
from rlhf_models.weights import check_saves, save_hf

FILES = {"configuration_mine.py", "modeling_mine.py", "tokenization_mine.py"}
IDS = torch.arange(5, 25)


@pytest.fixture
def marker(tmp_path):
    return tmp_path / "was-run"


@pytest.fixture
def model(tmp_path, marker):
    return TrustedModel(own_code_model_dir(tmp_path / "mine", marker, tied=False))


def edit(folder, file, **fields):
    path = Path(folder) / file
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


def of_known_config(folder):
    """Have the code of the model take transformers' own config."""
    path = Path(folder) / "modeling_mine.py"
    own, known = "from .configuration_mine import", "from transformers import Qwen2Config as"
    path.write_text(path.read_text().replace(own, known))


def logits(folder):
    """Of plain transformers, which runs the code of the folder."""
    loaded = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)
    assert type(loaded).__name__ == "MineForCausalLM"
    with torch.no_grad():
        return loaded(IDS[None]).logits[0]


def of_actor(actor):
    batch = TokenBatch.padded([IDS.numpy()], 0)
    with torch.no_grad():
        return actor(batch, logits_after=torch.arange(len(IDS)))


def test_a_trusted_name_is_a_text_whose_derivatives_are_not_trusted():
    import pickle

    name = TrustedModel("owner/name")
    assert name == "owner/name"
    assert type(pickle.loads(pickle.dumps(name))) is TrustedModel
    for derived in (str(name), name.strip(), f"{name}", name + "", Path(name)):
        assert not isinstance(derived, TrustedModel)
    assert trusted("a", False) == "a"
    assert type(trusted("a", False)) is str


@pytest.mark.parametrize(
    "load",
    [
        load_config,
        load_tokenizer,
        check_critic,
        check_reward_model,
        lambda path: check_trained_copy(path, "float32", has_values=False),
        lambda path: load_actor(path, dtype="float32"),
        lambda path: load_critic(path, dtype="float32"),
        lambda path: load_reward_model(path, dtype="float32"),
        lambda path: dequantize.dequantize(path, Path(path).parent / "whole"),
    ],
)
def test_without_trust_nothing_of_the_folder_runs(model, marker, load):
    with pytest.raises(ConfigError, match=r"needs Python code of its own.*was not run\n\nhint: .*``TrustedModel``"):
        load(str(model))
    assert not marker.exists()


def test_code_in_another_repository_is_refused_as_such(model, marker):
    edit(model, "config.json", auto_map={"AutoConfig": "owner/name--configuration_mine.MineConfig"})
    with pytest.raises(ConfigError, match="needs Python code of its own"):
        load_config(str(model))
    assert not marker.exists()


def test_trusted_code_computes_and_is_saved_so_that_plain_transformers_runs_it(model, tmp_path):
    expected = logits(model)
    actor = load_actor(model, dtype="float32", packing=True)
    torch.testing.assert_close(of_actor(actor), expected, atol=1e-5, rtol=1e-5)
    check_generates(model, load_config(model))
    check_trained_copy(model, "float32", has_values=False)
    with torch.no_grad():
        actor.model.lm_head.weight.mul_(2)
    check_saves(actor)
    saved = save_hf(actor, None, load_tokenizer(model), tmp_path / "saved")
    shutil.rmtree(model)
    code = f"""
import sys, transformers
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
for auto in (AutoConfig, AutoModelForCausalLM, AutoTokenizer):
    print(type(auto.from_pretrained({str(saved)!r}, trust_remote_code=True)).__name__)
    try:
        auto.from_pretrained({str(saved)!r}, trust_remote_code=False)
    except ValueError:
        print("refused")
"""
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    names = ["MineConfig", "MineForCausalLM", "MineTokenizer"]
    assert run.stdout.split() == [word for name in names for word in (name, "refused")]
    torch.testing.assert_close(logits(saved), 2 * expected, atol=1e-4, rtol=1e-4)


def test_all_code_that_a_saved_config_names_is_in_the_saved_folder(model, tmp_path):
    names = json.loads((Path(model) / "config.json").read_text())["auto_map"]
    (Path(model) / "heads.py").write_text("from .helpers import WIDTH\n\nclass Scorer:\n    width = WIDTH\n")
    (Path(model) / "helpers.py").write_text("WIDTH = 1\n")
    elsewhere = {"AutoModelForTokenClassification": "owner/name--heads.Scorer"}
    edit(model, "config.json", auto_map=names | {"AutoModelForSequenceClassification": "heads.Scorer"} | elsewhere)
    saved = save_hf(load_actor(model, dtype="float32"), None, load_tokenizer(model), tmp_path / "saved")
    assert {path.name for path in saved.glob("*.py")} == {*FILES, "heads.py", "helpers.py"}
    assert (saved / "helpers.py").read_text() == "WIDTH = 1\n"
    assert json.loads((saved / "tokenizer_config.json").read_text())["auto_map"].keys() == {"AutoTokenizer"}


def test_critic_is_saved_with_its_code_and_scores_as_a_reward_model(model, tmp_path):
    check_critic(model)
    check_trained_copy(model, "float32", has_values=True)
    critic = load_critic(model, dtype="float32")
    with torch.no_grad():
        critic.value_head.weight.normal_()
    check_saves(critic)
    saved = TrustedModel(save_hf(critic, None, load_tokenizer(model), tmp_path / "critic"))
    assert {path.name for path in Path(saved).iterdir()} >= FILES
    check_reward_model(saved)
    assert load_reward_model(saved, dtype="float32").model.is_remote_code()
    again = load_critic(saved, dtype="float32")
    batch = TokenBatch.padded([IDS.numpy()], 0)
    with torch.no_grad():
        torch.testing.assert_close(again(batch), critic(batch))
    with pytest.raises(ConfigError, match="needs Python code of its own"):
        load_reward_model(str(saved), dtype="float32")


def test_code_under_a_known_config_is_not_saved_as_a_classifier_of_transformers(model, tmp_path):
    of_known_config(model)
    names = {"AutoModel": "modeling_mine.MineModel", "AutoModelForCausalLM": "modeling_mine.MineForCausalLM"}
    edit(model, "config.json", model_type="qwen2", auto_map=names)
    critic = load_critic(model, dtype="float32")
    assert type(critic.model).__name__ == "MineModel"
    check_saves(critic)
    saved = save_hf(critic, None, load_tokenizer(model), tmp_path / "critic")
    assert (saved / "value_head.safetensors").is_file()
    assert type(load_critic(TrustedModel(saved), dtype="float32").model).__name__ == "MineModel"


@pytest.mark.parametrize(
    "load",
    [check_critic, lambda path: load_critic(path, dtype="float32"), check_reward_model],
)
def test_critic_needs_a_class_without_the_lm_head(model, load):
    names = {"AutoConfig": "configuration_mine.MineConfig", "AutoModelForCausalLM": "modeling_mine.MineForCausalLM"}
    edit(model, "config.json", auto_map=names)
    check_trained_copy(model, "float32", has_values=False)
    with pytest.raises(ConfigError, match=r"the code of the model .* has no `AutoModel`.*\n\nhint: add \"AutoModel\""):
        load(model)


def test_model_that_mixes_packed_sequences_is_refused(model):
    modeling = Path(model) / "modeling_mine.py"
    mixed = "output.last_hidden_state = output.last_hidden_state.mean(1, keepdim=True)"
    modeling.write_text(modeling.read_text().replace("output[0].neg_()", mixed))
    load_actor(model, dtype="float32")
    with pytest.raises(ConfigError, match="pack"):
        load_actor(model, dtype="float32", packing=True)


def test_what_a_trusted_model_lacks_is_found_before_the_run(model):
    from safetensors.torch import load_file, save_file

    file = Path(model) / "model.safetensors"
    weights = load_file(file)
    del weights["model.norm.weight"]
    save_file(weights, file, {"format": "pt"})
    with pytest.raises(ConfigError, match=r"lacks 1 weights of a MineForCausalLM, such as model.norm.weight"):
        check_trained_copy(model, "float32", has_values=False)


def test_adapters_train_and_merge_into_a_model_with_its_code(model, tmp_path):
    spec = LoraSpec(rank=2)
    assert 0 < check_lora(load_config(model), spec) < 1
    actor = load_actor(model, dtype="float32")
    before = of_actor(actor)
    add_lora(actor, spec)
    with torch.no_grad():
        for name, weight in actor.named_parameters():
            if "lora_B" in name:
                weight.normal_(std=0.1)
    adapter = save_adapter(actor, actor.state_dict(), tmp_path / "adapter", load_tokenizer(model))
    merged = merge_adapter(model, adapter, tmp_path / "merged", dtype="float32")
    assert {path.name for path in merged.glob("*.py")} == FILES
    assert not torch.allclose(logits(merged), before, atol=1e-3)
    torch.testing.assert_close(logits(merged), of_actor(actor), atol=1e-4, rtol=1e-4)
    with pytest.raises(ConfigError, match="needs Python code of its own"):
        merge_adapter(str(model), adapter, tmp_path / "other", dtype="float32")


@pytest.mark.parametrize("trust", [False, True])
def test_model_of_a_known_family_runs_its_own_code_only_with_trust(model, marker, tmp_path, trust):
    names = {"AutoModelForCausalLM": "modeling_mine.MineForCausalLM"}
    of_known_config(model)
    edit(model, "config.json", model_type="qwen2", auto_map=names)
    edit(model, "tokenizer_config.json", tokenizer_class="PreTrainedTokenizerFast")
    name = trusted(str(model), trust)
    actor = load_actor(name, dtype="float32")
    check_saves(actor)
    saved = save_hf(actor, None, load_tokenizer(name), tmp_path / "saved")
    assert marker.exists() is trust
    assert type(actor.model).__name__ == ("MineForCausalLM" if trust else "Qwen2ForCausalLM")
    assert ("auto_map" in json.loads((saved / "config.json").read_text())) is trust
    assert ("auto_map" in json.loads((saved / "tokenizer_config.json").read_text())) is trust


def test_code_is_copied_to_the_cache_by_one_process_at_a_time(model, monkeypatch, tmp_path):
    from contextlib import contextmanager

    from transformers import dynamic_module_utils

    held = []
    copied = []

    @contextmanager
    def lock(path):
        held.append(Path(path))
        yield
        held.pop()

    def copy(name, file, **options):
        assert [path.parent for path in held] == [cache]
        copied.append((name, file, options))

    cache = tmp_path / "home" / "modules"
    monkeypatch.setattr("huggingface_hub.utils.WeakFileLock", lock)
    monkeypatch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", str(cache))
    monkeypatch.setattr(dynamic_module_utils, "get_cached_module_file", copy)
    for _ in range(2):
        copied.clear()
        assert admit_code(model, is_local=True)
        assert sorted(copied, key=str) == sorted(((model, file, {"local_files_only": True}) for file in FILES), key=str)
    assert cache.is_dir()
    copied.clear()
    assert not admit_code(str(model), is_local=True)
    assert copied == []


@pytest.mark.parametrize("words", [[], ["--trust_remote_code"]])
def test_dequantize_trusts_a_model_only_with_its_flag(monkeypatch, tmp_path, words):
    named = []
    monkeypatch.setattr(dequantize, "dequantize", lambda path, folder: named.append(path))
    assert dequantize.main(["owner/name", str(tmp_path / "new"), *words]) == 0
    assert isinstance(named[0], TrustedModel) is bool(words)


def test_dequantize_reads_a_trusted_model_by_its_code(model, tmp_path):
    with pytest.raises(ConfigError, match="unknown quant_method `None`"):
        dequantize.dequantize(model, tmp_path / "new")
