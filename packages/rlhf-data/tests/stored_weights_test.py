"""Weights in files: where they are, and heads that contradict the config."""

import json

import numpy as np
import pytest
from safetensors.numpy import save_file

from rlhf_data import stored_weights as module
from rlhf_data.errors import ConfigError
from rlhf_data.stored_weights import check_tied_head, stored_weights

TABLE = np.arange(24, dtype=np.float32).reshape(6, 4)


@pytest.fixture
def folder(tmp_path):
    """Return a function that writes a model folder: one file, or one file per weight with an index."""

    def write(weights, *, sharded=False, **config):
        (tmp_path / "config.json").write_text(json.dumps(config))
        if sharded:
            files = {name: f"{number}.safetensors" for number, name in enumerate(weights)}
            for name, file in files.items():
                save_file({name: weights[name]}, tmp_path / file)
            (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))
        else:
            save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"} if weights else None)
        return tmp_path

    return write


@pytest.mark.parametrize("sharded", [False, True])
def test_stored_weights_says_where_each_weight_is(folder, sharded):
    weights = {"a": TABLE, "b": np.ones((2,), np.float16)}
    found = stored_weights(folder(weights, sharded=sharded))
    assert {name: (weight.dtype, weight.shape) for name, weight in found.items()} == {
        "a": ("F32", (6, 4)),
        "b": ("F16", (2,)),
    }
    for name, weight in found.items():
        assert weight.file.read_bytes()[weight.start : weight.stop] == weights[name].tobytes()


def test_stored_weights_of_a_file_without_any_are_none(folder):
    assert stored_weights(folder({})) == {}


@pytest.mark.parametrize("content", ["[]", "3", "null"])
def test_check_tied_head_names_a_config_that_is_no_object(tmp_path, content):
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(ConfigError, match=r"config\.json holds no object: .*\n\nhint: copy the model again"):
        check_tied_head(tmp_path)


@pytest.mark.parametrize(
    "name", ["model.embed_tokens.weight", "model.language_model.embed_tokens.weight", "wte.weight"]
)
@pytest.mark.parametrize("part_bytes", [8, 1 << 20])
@pytest.mark.parametrize("sharded", [False, True])
def test_check_tied_head_refuses_one_that_differs_in_a_single_value(folder, monkeypatch, name, part_bytes, sharded):
    monkeypatch.setattr(module, "_PART_BYTES", part_bytes)
    head = TABLE.copy()
    head[5, 3] += 1
    path = folder({name: TABLE, "lm_head.weight": head}, sharded=sharded, tie_word_embeddings=True)
    with pytest.raises(ConfigError, match=r'lm_head\.weight in its files differs from it\n\nhint: set "tie_word_emb'):
        check_tied_head(path)


@pytest.mark.parametrize("at", [0, 95])
def test_check_tied_head_compares_the_first_byte_and_the_last(folder, at):
    head = TABLE.copy()
    head.view(np.uint8).reshape(-1)[at] ^= 1
    path = folder({"wte.weight": TABLE, "lm_head.weight": head}, tie_word_embeddings=True)
    with pytest.raises(ConfigError, match="differs from it"):
        check_tied_head(path)


@pytest.mark.parametrize(
    ("weights", "config"),
    [
        ({"lm_head.weight": TABLE}, {"tie_word_embeddings": True}),  # the same values
        ({"lm_head.weight": TABLE + 1}, {"tie_word_embeddings": False}),
        ({"lm_head.weight": TABLE + 1}, {}),
        ({"lm_head.weight": TABLE + 1}, {"model_type": "llama"}),
        ({}, {"tie_word_embeddings": True}),
        ({"lm_head.weight": TABLE + 1, "encoder.embed_tokens.weight": TABLE}, {"tie_word_embeddings": True}),  # which?
    ],
    ids=["same", "untied", "unsaid", "untied by default", "no head", "two tables"],
)
def test_check_tied_head_accepts_what_no_program_reads_in_two_ways(folder, weights, config):
    check_tied_head(folder({"model.embed_tokens.weight": TABLE} | weights, **config))


@pytest.mark.parametrize(
    ("config", "prefix"),
    [
        ({"text_config": {"tie_word_embeddings": True}}, ""),
        ({"tie_word_embeddings": True, "text_config": {"tie_word_embeddings": False}}, ""),
        ({"model_type": "gemma3_text"}, ""),  # tied by default
        ({"model_type": "internvl", "text_config": {"model_type": "qwen2"}}, "language_model."),
        ({"model_type": "no_family", "tie_word_embeddings": True}, ""),
    ],
)
def test_check_tied_head_reads_both_parts_of_a_config_and_the_defaults_of_its_family(folder, config, prefix):
    weights = {f"{prefix}model.embed_tokens.weight": TABLE, f"{prefix}lm_head.weight": TABLE.astype(np.float16)}
    path = folder(weights, **config)
    with pytest.raises(ConfigError, match=f"ties the LM head to the embedding, and {prefix}lm_head.weight in its"):
        check_tied_head(path)
    (path / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": False, "text_config": {}}))
    check_tied_head(path)  # as the hint says


def test_check_tied_head_leaves_hub_names_and_broken_files_to_others(tmp_path):
    check_tied_head("owner/name")
    (tmp_path / "config.json").write_text('{"tie_word_embeddings": true}')
    for content in (b"", b"12345678", b"version https://git-lfs.github.com/spec/v1\n", b"\x02" + bytes(7) + b"{}{"):
        (tmp_path / "model.safetensors").write_bytes(content)
        check_tied_head(tmp_path)
    for content in ("{", "[]", '{"weight_map": 3}', '{"weight_map": {"a": 3}}'):
        (tmp_path / "model.safetensors.index.json").write_text(content)
        check_tied_head(tmp_path)
