import json
import os
import resource
import stat
import subprocess
import sys
from contextlib import nullcontext
from functools import partial

import pytest
import torch
from safetensors import safe_open
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    Gemma2Config,
    Gemma3TextConfig,
    modeling_utils,
)
from transformers.core_model_loading import WeightRenaming

from rlhf_data.errors import CheckpointError, ConfigError
from rlhf_models import weights
from rlhf_models.loading import load_actor, load_critic, load_reward_model, load_tokenizer
from rlhf_models.lora import LoraSpec, add_lora, save_adapter
from rlhf_models.reward import moments_fields, score_sequences
from rlhf_models.testing import tiny_model_dir
from rlhf_models.weights import check_saves, hf_named_weights, save_hf


def checkpoint_names(folder):
    with safe_open(folder / "model.safetensors", "pt") as file:
        return set(file.keys())


def gathered(model):
    """The state as an engine gathers it: parameters once, and every buffer."""
    state = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    return state | {name: buffer.clone() for name, buffer in model.named_buffers()}


def same(one, other):
    return all(torch.equal(a, b) for a, b in zip(one.parameters(), other.parameters(), strict=True))


@pytest.mark.parametrize("tied", [True, False])
def test_hf_named_weights_are_those_of_the_checkpoint(tmp_path, tied):
    folder = tiny_model_dir(tmp_path, tied=tied)
    actor = load_actor(folder, dtype="float32")
    names = [name for name, _ in hf_named_weights(actor)]
    assert set(names) == checkpoint_names(folder)
    assert len(names) == len(set(names))
    assert ("lm_head.weight" in names) != tied
    assert names == [name for name, _ in hf_named_weights(actor.model)]


def test_hf_named_weights_have_the_persistent_buffers_of_a_checkpoint(tmp_path):
    folder = tiny_model_dir(tmp_path, architecture="apertus")
    actor = load_actor(folder, dtype="float32")
    sent = dict(hf_named_weights(actor, lambda parameter: nullcontext(parameter + 1)))
    assert set(sent) == checkpoint_names(folder)
    assert float(sent["model.layers.1.mlp.act_fn.beta"]) == 0.5  # the config's, never gathered


def test_hf_named_weights_of_which_a_checkpoint_joins_several_are_refused(tmp_path, monkeypatch):
    actor = load_actor(tiny_model_dir(tmp_path, architecture="mixtral"), dtype="float32")
    parts = ("model.layers.0.self_attn.q_proj.weight", "model.layers.0.self_attn.k_proj.weight")

    def joined(model, state):
        found = {name: tensor for name, tensor in state.items() if name not in parts}
        return found | ({"model.layers.0.qk.weight": torch.empty(0)} if parts[0] in state and parts[1] in state else {})

    monkeypatch.setattr(weights, "_in_checkpoint", joined)
    with pytest.raises(ConfigError, match=r"(?s)mixtral checkpoint has tensors made of several .*qk\.weight.*hint: "):
        hf_named_weights(actor)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("state_of", [lambda a: None, lambda a: a.state_dict(), gathered, lambda a: gathered(a.model)])
def test_save_hf_actor_loads_in_plain_transformers(tmp_path, tied, state_of):
    actor = load_actor(tiny_model_dir(tmp_path / "from", tied=tied), dtype="bfloat16", packing=True)
    with torch.no_grad():
        actor.model.model.norm.weight.add_(1.0)
    tokenizer = load_tokenizer(tmp_path / "from")
    folder = save_hf(actor, state_of(actor), tokenizer, tmp_path / "deep" / "to")

    model = AutoModelForCausalLM.from_pretrained(folder)
    assert model.dtype == torch.bfloat16
    assert same(model, actor.model)
    assert AutoTokenizer.from_pretrained(folder).chat_template == tokenizer.chat_template
    assert checkpoint_names(folder) == checkpoint_names(tmp_path / "from")
    assert json.loads((folder / "generation_config.json").read_text())["eos_token_id"] == tokenizer.eos_token_id
    assert "rlhf_packed" not in (folder / "config.json").read_text()
    assert [path.name for path in folder.parent.iterdir()] == ["to"]


@pytest.mark.parametrize("architecture", ["qwen2", "llama", "mixtral", "qwen3_moe"])
def test_save_hf_reward_model_gives_its_scores_in_plain_transformers(tmp_path, architecture):
    base = tiny_model_dir(tmp_path / "base", architecture=architecture)
    critic = load_critic(base, dtype="float32")
    torch.nn.init.normal_(critic.value_head.weight)
    folder = save_hf(critic, gathered(critic), load_tokenizer(base), tmp_path / "rm")
    plain, report = AutoModelForSequenceClassification.from_pretrained(folder, output_loading_info=True)
    assert not report["missing_keys"] and not report["unexpected_keys"] and not report["mismatched_keys"]
    assert json.loads((folder / "config.json").read_text())["architectures"] == [type(plain).__name__]
    assert plain.score.weight.shape == (1, 64) and torch.equal(plain.score.weight, critic.value_head.weight)
    rows = [[5, 9, 7, 300, 2], [8, 2], [40, 41, 42]]
    pad = load_tokenizer(base).pad_token_id
    ids = torch.tensor([row + [pad] * (5 - len(row)) for row in rows])
    with torch.no_grad():
        theirs = plain.eval()(input_ids=ids, attention_mask=(ids != pad).long()).logits[:, 0].tolist()
    ours = score_sequences(load_reward_model(folder, dtype="float32"), rows, batch_size=1)
    assert ours == pytest.approx(theirs, abs=1e-5)
    again = load_critic(folder, dtype="float32")
    assert same(again, critic)
    if architecture in ("mixtral", "qwen3_moe"):  # experts are stored one by one, as in the base
        stored = {name for name in checkpoint_names(folder) if ".experts." in name}
        assert stored == {name for name in checkpoint_names(base) if ".experts." in name}


@pytest.mark.parametrize("kind", [partial(Gemma2Config, attn_logit_softcapping=0.5), Gemma3TextConfig])
def test_save_hf_reward_model_of_gemma_gives_its_scores_in_plain_transformers(tmp_path, kind):
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    sizes |= {"num_key_value_heads": 1, "head_dim": 32, "vocab_size": 512, "sliding_window": 4, "pad_token_id": 0}
    sizes |= {"layer_types": ["sliding_attention", "full_attention"], "initializer_range": 0.3}
    AutoModelForCausalLM.from_config(kind(**sizes)).save_pretrained(tmp_path / "base")
    critic = load_critic(tmp_path / "base", dtype="float32")
    torch.nn.init.normal_(critic.value_head.weight)
    folder = save_hf(critic, gathered(critic), None, tmp_path / "rm", fields=moments_fields(0.5, 2.0))
    plain = AutoModelForSequenceClassification.from_pretrained(folder, attn_implementation="eager").eval()
    row = torch.arange(5, 17)[None]
    with torch.no_grad():
        theirs = float(plain(input_ids=row).logits)
    for normalize, expected in ((False, theirs), (True, (theirs - 0.5) / 2)):
        model = load_reward_model(folder, dtype="float32", normalize=normalize)
        assert score_sequences(model, row.tolist(), batch_size=1) == pytest.approx([expected], abs=1e-5)


def test_save_hf_reward_model_in_bfloat16_names_this_type(tmp_path):
    critic = load_critic(tiny_model_dir(tmp_path / "base"), dtype="bfloat16")
    plain = AutoModelForSequenceClassification.from_pretrained(save_hf(critic, None, None, tmp_path / "rm"))
    assert plain.dtype == torch.bfloat16


@pytest.mark.parametrize("load", [load_actor, load_critic])
@pytest.mark.parametrize("architecture", ["qwen2", "apertus", "qwen3_moe"])
def test_check_saves_what_plain_transformers_loads(tmp_path, architecture, load):
    check_saves(load(tiny_model_dir(tmp_path, architecture=architecture), dtype="bfloat16"))


def saved_report(model, folder, auto_class=AutoModelForCausalLM):
    """What plain transformers says of the names in a saved folder."""
    return auto_class.from_pretrained(save_hf(model, None, None, folder), output_loading_info=True)[1]


def test_check_saves_refuses_names_that_plain_transformers_would_not_load(model_dir, tmp_path, monkeypatch):
    actor = load_actor(model_dir, dtype="float32")
    actor.model._weight_conversions = [WeightRenaming("old_norm", "norm")]  # it was loaded under another name
    report = saved_report(actor, tmp_path / "saved")
    assert len(report["missing_keys"]) == len(report["unexpected_keys"]) == 5
    says = r"missing keys: 5, such as model\.layers\.0\.input_layernorm\.weight; unexpected keys: 5, such as model\.lay"
    with pytest.raises(ConfigError, match=rf"^a trained \w+ could not be saved .*\({says}.*\n\nhint: "):
        check_saves(actor)


def test_check_saves_refuses_shapes_and_types_that_the_config_does_not_have(model_dir, tmp_path):
    critic = load_critic(model_dir, dtype="bfloat16")
    critic.model.norm.float()
    with pytest.raises(ConfigError, match=r"loads it \(other types: 1, such as model\.norm\.weight\)\n\nhint: "):
        check_saves(critic)
    actor = load_actor(model_dir, dtype="float32")
    actor.model.config.intermediate_size += 2
    with pytest.raises(ConfigError, match=r"loads it \(mismatched keys: 6, such as model\.layers\.0\.mlp\.down_proj"):
        check_saves(actor)


def test_save_hf_reward_model_whose_end_is_its_padding_names_no_padding(tmp_path):
    base = tiny_model_dir(tmp_path / "base")
    tokenizer = load_tokenizer(base)
    tokenizer.pad_token = tokenizer.eos_token
    critic = load_critic(base, dtype="float32")
    torch.nn.init.normal_(critic.value_head.weight)
    folder = save_hf(critic, None, tokenizer, tmp_path / "rm")
    plain = AutoModelForSequenceClassification.from_pretrained(folder).eval()
    row = [5, 9, tokenizer.eos_token_id]
    with torch.no_grad():
        theirs = plain(input_ids=torch.tensor([row])).logits[0].tolist()
    assert score_sequences(load_reward_model(folder, dtype="float32"), [row], batch_size=1) == pytest.approx(theirs)


def test_reward_models_with_their_head_in_a_file_are_read_and_written_where_there_is_no_classifier(
    tmp_path, monkeypatch
):
    base = tiny_model_dir(tmp_path / "base")
    critic = load_critic(base, dtype="float32")
    torch.nn.init.normal_(critic.value_head.weight)
    monkeypatch.setattr(weights, "_classifier", lambda *args: None)
    folder = save_hf(critic, None, load_tokenizer(base), tmp_path / "rm")
    with safe_open(folder / "value_head.safetensors", "pt") as file:
        assert torch.equal(file.get_tensor("weight"), critic.value_head.weight)
    assert same(load_critic(folder, dtype="float32"), critic)


@pytest.mark.parametrize(
    ("named", "saved", "in_config"),
    [
        (None, [2], 2),
        (0, [2, 0], 2),
        ([0, 5], [2, 0, 5], 2),
        ([5, 2], [5, 2], [5, 2]),
        (2, 2, 2),
    ],
)
def test_save_hf_names_the_end_token_of_the_tokenizer(tmp_path, named, saved, in_config):
    base = tiny_model_dir(tmp_path / "base")
    assert load_tokenizer(base).eos_token_id == 2
    for name in ("config.json", "generation_config.json"):
        fields = json.loads((base / name).read_text())
        (base / name).write_text(json.dumps(fields | {"eos_token_id": named}))
    actor = load_actor(base, dtype="float32")
    folder = save_hf(actor, None, load_tokenizer(base), tmp_path / "saved")
    assert json.loads((folder / "generation_config.json").read_text())["eos_token_id"] == saved
    assert json.loads((folder / "config.json").read_text())["eos_token_id"] == in_config
    assert actor.model.generation_config.eos_token_id == named  # saving changes nothing


def test_saved_model_stops_where_its_training_data_ended(tmp_path):
    """A base model that only knows another end token goes on; saved with the tokenizer, it stops."""
    base = tiny_model_dir(tmp_path / "base")
    fields = json.loads((base / "generation_config.json").read_text())
    (base / "generation_config.json").write_text(json.dumps(fields | {"eos_token_id": 0}))
    actor = load_actor(base, dtype="float32")
    with torch.no_grad():  # every next token is the tokenizer's end token
        actor.model.model.norm.weight.zero_()
        bias = torch.nn.Linear(64, 512)
        bias.weight.zero_()
        bias.bias.zero_()
        bias.bias[2] = 5.0
    for folder, length in ((base, 8), (save_hf(actor, None, load_tokenizer(base), tmp_path / "saved"), 1)):
        model = AutoModelForCausalLM.from_pretrained(folder)
        model.lm_head = bias
        made = model.generate(torch.tensor([[5, 6]]), max_new_tokens=8, do_sample=False)
        assert made.shape[1] - 2 == length


@pytest.mark.parametrize(("umask", "mode"), [(0o022, 0o644), (0o027, 0o640)])
def test_files_of_models_have_the_permissions_that_the_umask_leaves(model_dir, tmp_path, umask, mode):
    critic = load_critic(model_dir, dtype="float32")
    adapted = load_critic(model_dir, dtype="float32")
    add_lora(adapted, LoraSpec(rank=2))
    before = os.umask(umask)
    try:
        folder = save_hf(critic, None, load_tokenizer(model_dir), tmp_path / "critic")
        adapter = save_adapter(adapted, adapted.state_dict(), tmp_path / "adapter")
    finally:
        os.umask(before)
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in (*folder.iterdir(), *adapter.iterdir())}
    assert {"config.json", "model.safetensors", "adapter_model.safetensors", "value_head.safetensors"} <= set(modes)
    assert set(modes.values()) == {mode}


def test_save_hf_earlier_folder_is_replaced_whole(model_dir, tmp_path):
    target = tmp_path / "model"
    target.mkdir()
    (target / "stale.txt").write_text("from before")
    save_hf(load_actor(model_dir, dtype="float32"), None, None, target)
    assert not (target / "stale.txt").exists()
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_save_hf_failure_leaves_the_earlier_folder_as_it_was(model_dir, tmp_path):
    actor = load_actor(model_dir, dtype="float32")
    target = save_hf(actor, None, None, tmp_path / "model")
    state = gathered(actor)
    del state["model.model.norm.weight"]
    with pytest.raises(CheckpointError, match=r"lacks 1 weights, such as model\.norm\.weight"):
        save_hf(actor, state, None, target)
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
    assert same(AutoModelForCausalLM.from_pretrained(target), actor.model)


@pytest.mark.parametrize("died_at", ["write_fields", "Path.rename"])
def test_save_hf_after_a_killed_one_leaves_neither_its_files_nor_loses_the_earlier_folder(model_dir, tmp_path, died_at):
    actor = load_actor(model_dir, dtype="float32")
    target = save_hf(actor, None, None, tmp_path / "model")
    kill = "lambda *_: os.kill(os.getpid(), 9)"
    if died_at == "Path.rename":  # the earlier folder is out of its place, and the new one not yet there
        kill = "lambda path, to, move=os.rename: move(path, to) if path.name == 'model' else os.kill(os.getpid(), 9)"
    code = f"""import os; from pathlib import Path; from rlhf_models import weights
from rlhf_models.loading import load_actor
actor = load_actor({str(model_dir)!r}, dtype="float32")
{died_at if "." in died_at else f"weights.{died_at}"} = {kill}
weights.save_hf(actor, None, None, {str(target)!r})"""
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == -9
    assert len(list(tmp_path.iterdir())) == (2 if died_at == "write_fields" else 1)
    state = gathered(actor)
    del state["model.model.norm.weight"]
    with pytest.raises(CheckpointError, match="lacks 1 weights"):
        save_hf(actor, state, None, target)
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
    assert same(AutoModelForCausalLM.from_pretrained(target), actor.model)


def test_save_hf_does_not_look_for_wrappers_which_would_import_deepspeed(model_dir, tmp_path, monkeypatch):
    monkeypatch.setattr("transformers.modeling_utils.unwrap_model", None)
    save_hf(load_actor(model_dir, dtype="float32"), None, None, tmp_path / "saved")
    assert modeling_utils.unwrap_model is None


def test_save_hf_critic_state_without_head_is_refused(model_dir, tmp_path):
    critic = load_critic(model_dir, dtype="float32")
    with pytest.raises(CheckpointError, match=r"value_head\.weight"):
        save_hf(critic, gathered(critic.model), None, tmp_path / "critic")


def test_save_hf_path_that_cannot_be_made_hints(model_dir, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match=r"cannot write the model to .*\n\nhint: "):
        save_hf(load_actor(model_dir, dtype="float32"), None, None, tmp_path / "file" / "model")


def test_save_hf_file_that_cannot_be_written_to_its_end_hints_and_leaves_nothing(model_dir, tmp_path):
    actor = load_actor(model_dir, dtype="float32")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, hard))  # bytes a file, below those of the weights
    try:
        with pytest.raises(CheckpointError, match=r"cannot write the model to .*\n\nhint: "):
            save_hf(actor, None, None, tmp_path / "model")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert not any(tmp_path.iterdir())


def test_save_hf_generation_config_that_cannot_be_saved_is_mended(model_dir, tmp_path, caplog):
    actor = load_actor(model_dir, dtype="float32")
    actor.model.generation_config.temperature = 0.6
    folder = save_hf(actor, None, None, tmp_path / "model")
    assert json.loads((folder / "generation_config.json").read_text())["do_sample"] is True
    assert "do_sample" in caplog.text
