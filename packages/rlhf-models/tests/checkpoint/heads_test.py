import json
import re
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModel, AutoModelForTokenClassification

from rlhf_data.errors import ConfigError
from rlhf_models.batch import TokenBatch
from rlhf_models.checkpoint.heads import HEAD_NAMES, load_head
from rlhf_models.loading import (
    check_critic,
    check_reward_model,
    check_same_tokenizer,
    load_config,
    load_critic,
    load_reward_model,
    load_tokenizer,
)
from rlhf_models.testing import tiny_model_dir, tiny_reward_model_dir, tiny_tokenizer
from rlhf_models.weights import save_hf


@pytest.fixture(scope="module")
def reward_dir(tmp_path_factory):
    return tiny_reward_model_dir(tmp_path_factory.mktemp("reward"))


def with_weights(folder, tmp_path, change):
    """A copy of a folder whose weights went through `change`."""
    copy = shutil.copytree(folder, tmp_path / "copy")
    file = copy / "model.safetensors"
    save_file(change(load_file(file)), file, {"format": "pt"})
    return copy


def final_values(critic, sequences):
    """The critic's value of each whole sequence: that of the state in which a next token would be written."""
    longer = TokenBatch.padded([[*tokens, 5] for tokens in sequences], 0)
    return critic(longer).flatten()[longer.last_index]


@pytest.mark.parametrize("name", HEAD_NAMES)
def test_load_head_is_found_under_each_name(reward_dir, tmp_path, name):
    folder = with_weights(reward_dir, tmp_path, lambda old: old | {f"{name}.weight": old.pop("score.weight")})
    expected = load_file(reward_dir / "model.safetensors")["score.weight"]
    assert torch.equal(load_reward_model(folder, dtype="float32").value_head.weight, expected)
    assert torch.equal(load_critic(folder, dtype="float32").value_head.weight, expected)


def test_load_head_of_shards_and_of_pickled_weights(reward_dir, tmp_path):
    model = load_reward_model(reward_dir, dtype="float32")
    whole = load_file(reward_dir / "model.safetensors")
    names = sorted(whole)
    sharded = shutil.copytree(reward_dir, tmp_path / "sharded")
    (sharded / "model.safetensors").unlink()
    files = {name: f"model-{index % 2}.safetensors" for index, name in enumerate(names)}
    for file in set(files.values()):
        save_file({name: whole[name] for name in names if files[name] == file}, sharded / file, {"format": "pt"})
    (sharded / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": files}))
    pickled = shutil.copytree(reward_dir, tmp_path / "pickled")
    (pickled / "model.safetensors").unlink()
    torch.save(whole, pickled / "pytorch_model.bin")
    for folder in (sharded, pickled):
        loaded = load_reward_model(folder, dtype="float32")
        assert all(torch.equal(one, other) for one, other in zip(loaded.parameters(), model.parameters(), strict=True))


def test_load_head_shard_that_is_missing_is_named(reward_dir, tmp_path):
    folder = shutil.copytree(reward_dir, tmp_path / "copy")
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"score.weight": "a.safetensors"}}))
    with pytest.raises(ConfigError, match=r"has no file a\.safetensors, which its index names for"):
        load_head(folder, load_config(folder))


def test_code_in_a_pickled_head_is_not_run(model_dir, tmp_path):
    class Code:
        def __reduce__(self):
            return open, (str(tmp_path / "was_run"), "w")

    folder = shutil.copytree(model_dir, tmp_path / "copy")
    torch.save({"v_head.weight": Code()}, folder / "value_head.bin")
    with pytest.raises(ConfigError, match="cannot load the model"):
        load_head(folder, load_config(folder))
    assert not (tmp_path / "was_run").exists()


def test_critic_of_a_reward_model_begins_with_its_scores_and_keeps_its_head_when_saved(reward_dir, tmp_path, sequences):
    batch = TokenBatch.padded(sequences, 0)
    expected = load_reward_model(reward_dir, dtype="float32")(batch)
    critic = load_critic(reward_dir, dtype="float32")
    torch.testing.assert_close(final_values(critic, sequences), expected)
    assert critic.training and critic.value_head.weight.requires_grad
    saved = save_hf(critic, None, None, tmp_path / "critic")
    torch.testing.assert_close(load_reward_model(saved, dtype="float32")(batch), expected)


def test_load_reward_model_is_frozen_and_in_eval_mode(reward_dir):
    model = load_reward_model(reward_dir, dtype="bfloat16")
    assert not model.training
    assert not any(parameter.requires_grad for parameter in model.parameters())
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}


@pytest.mark.parametrize("check", [check_reward_model, lambda path: load_reward_model(path, dtype="float32")])
def test_reward_model_of_a_causal_language_model_is_refused_with_a_hint(model_dir, check):
    with pytest.raises(ConfigError, match=r"no scalar head: none of score\.weight.*\n\nhint: .*one label"):
        check(model_dir)


@pytest.mark.parametrize(
    ("load", "else_"), [(load_reward_model, "serve a model of another kind "), (load_critic, "one without a head")]
)
def test_head_of_two_labels_is_refused_with_both_shapes(tmp_path, load, else_):
    folder = tiny_reward_model_dir(tmp_path, num_labels=2)
    says = r"score\.weight .* the shape \[2, 64\]; one score needs \[1, 64\]\n\nhint: use a model .* one label, or "
    with pytest.raises(ConfigError, match=says + else_):
        load(folder, dtype="float32")


@pytest.mark.parametrize("file", ["model.safetensors", "value_head.safetensors", "value_head.bin"])
def test_head_of_trl_with_its_bias_keeps_both_when_saved(model_dir, tmp_path, sequences, file):
    # TRL's AutoModelForCausalLMWithValueHead; LLaMA-Factory writes its head into a file beside the language model.
    head = {"v_head.summary.weight": torch.linspace(-1, 1, 64)[None], "v_head.summary.bias": torch.tensor([2.5])}
    folder = shutil.copytree(model_dir, tmp_path / "trl")
    if file == "model.safetensors":
        save_file(load_file(folder / file) | head, folder / file, {"format": "pt"})
    elif file.endswith(".bin"):
        torch.save(head, folder / file)
    else:
        save_file(head, folder / file, {"format": "pt"})
    check_critic(folder)
    check_reward_model(folder)
    with torch.no_grad():
        hidden = AutoModel.from_pretrained(folder)(torch.from_numpy(sequences[0])[None]).last_hidden_state[0, -1]
    expected = float(hidden.double() @ torch.linspace(-1, 1, 64).double() + 2.5)
    batch = TokenBatch.padded([sequences[0]], 0)
    critic = load_critic(folder, dtype="float32")
    assert float(load_reward_model(folder, dtype="float32")(batch)) == pytest.approx(expected, abs=1e-5)
    assert float(final_values(critic, [sequences[0]])) == pytest.approx(expected, abs=1e-5)
    with torch.no_grad():
        critic.value_head.bias.add_(1.0)
    saved = save_hf(critic, None, None, tmp_path / "saved")
    assert float(load_reward_model(saved, dtype="float32")(batch)) == pytest.approx(expected + 1.0, abs=1e-5)


def test_head_of_a_token_classifier_gives_its_scores(reward_dir, tmp_path, sequences):
    """verl's critics are ...ForTokenClassification with one label."""
    config = AutoConfig.from_pretrained(reward_dir, num_labels=1)
    theirs = AutoModelForTokenClassification.from_config(config).eval()
    torch.nn.init.constant_(theirs.score.bias, 3.0)
    theirs.save_pretrained(tmp_path)
    with torch.no_grad():
        expected = theirs(torch.from_numpy(sequences[0])[None]).logits[0, -1, 0]
    score = load_reward_model(tmp_path, dtype="float32")(TokenBatch.padded([sequences[0]], 0))[0]
    torch.testing.assert_close(score, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("shape", [(1, 64), (64,), (1, 32)])
def test_unused_weight_that_may_be_a_head_is_refused_by_name(model_dir, tmp_path, shape):
    folder = with_weights(model_dir, tmp_path, lambda old: old | {"critic.2.weight": torch.ones(shape)})
    message = rf"has the weight critic\.2\.weight of shape {re.escape(str(list(shape)))}[^\n]*\n\nhint: rename"
    for load in (check_critic, lambda path: load_critic(path, dtype="float32")):
        with pytest.raises(ConfigError, match=message):
            load(folder)


def test_weights_of_a_language_model_are_no_heads(tmp_path):
    folder = tiny_model_dir(tmp_path / "untied", tied=False)
    changed = with_weights(folder, tmp_path, lambda old: old | {"other.weight": torch.ones(3, 64)})
    assert load_head(changed, load_config(changed)) == {}
    check_critic(changed)
    assert not load_critic(changed, dtype="float32").value_head.weight.any()


def test_check_reward_model_missing_folder_and_broken_weights_are_named(reward_dir, tmp_path):
    with pytest.raises(ConfigError, match="no model folder /no/such"):
        check_reward_model("/no/such")
    folder = shutil.copytree(reward_dir, tmp_path / "copy")
    (folder / "model.safetensors").write_bytes(b"nothing")
    with pytest.raises(ConfigError, match="not a whole safetensors file"):
        check_reward_model(folder)
    with pytest.raises(ConfigError, match="cannot load the model"):
        load_reward_model(folder, dtype="float32")


def test_check_reward_model_of_a_hub_name_reads_nothing():
    check_reward_model("some/name")


def test_check_same_tokenizer_of_one_family_passes(model_dir, reward_dir):
    check_same_tokenizer(reward_dir, load_tokenizer(model_dir))


def test_check_same_tokenizer_more_tokens_on_the_model_side_do_no_harm(model_dir, reward_dir, tmp_path):
    folder = shutil.copytree(reward_dir, tmp_path / "copy")
    tokenizer = load_tokenizer(folder)
    tokenizer.add_tokens(["<pad2>", "<a>"])
    tokenizer.save_pretrained(folder)
    check_same_tokenizer(folder, load_tokenizer(model_dir))
    with pytest.raises(ConfigError, match=r"differs from the policy's in 2 of 514 tokens: '<pad2>' has id 512"):
        check_same_tokenizer(model_dir, tokenizer)


def test_check_same_tokenizer_another_vocabulary_is_refused_with_a_hint(tmp_path):
    folder = tiny_model_dir(tmp_path, vocab_size=300)
    with pytest.raises(ConfigError, match=r"differs from the policy's[^\n]*\n\nhint: .*``RemoteReward"):
        check_same_tokenizer(folder, tiny_tokenizer(512))
