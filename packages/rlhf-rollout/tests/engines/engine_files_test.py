"""What engines read from a model folder, the checks before a request, and the spec."""

import dataclasses
import itertools
import json
import os
import struct
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rlhf_data.errors import ConfigError, EngineError
from rlhf_data.stored_weights import check_tied_head
from rlhf_rollout.engines import EngineSpec, build_engine
from rlhf_rollout.engines.model_files import (
    checkpoint_shapes,
    cpu_kv_cache_bytes,
    end_token_ids,
    read_config,
    resolve_model_dir,
)
from rlhf_rollout.engines.requests import check_request, sample_seeds
from rlhf_rollout.engines.vllm.core import graph_sizes
from rlhf_rollout.engines.vllm.memory import gpu_kv_cache_bytes, kv_cache_bytes
from rlhf_rollout.protocols import SamplingParams


def write(folder: Path, **files: Any) -> Path:
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    return folder


def write_safetensors(path: Path, shapes: dict[str, list[int]]) -> None:
    header = {name: {"dtype": "F32", "shape": shape, "data_offsets": [0, 0]} for name, shape in shapes.items()}
    text = json.dumps({"__metadata__": {"format": "pt"}, **header}).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text)


def test_end_token_ids_are_those_of_configs_and_tokenizer(tmp_path: Path) -> None:
    write(
        tmp_path,
        config={"eos_token_id": [5, 3], "text_config": {"eos_token_id": 2}},
        generation_config={"eos_token_id": [7, 5]},
        tokenizer_config={"eos_token": {"content": "<end>"}},
        tokenizer={"added_tokens": [{"id": 9, "content": "<end>"}, {"id": 10, "content": "<pad>"}]},
    )
    assert end_token_ids(tmp_path, tmp_path) == (3, 5, 7, 9)
    write(tmp_path, config={"text_config": {"eos_token_id": 2}})
    assert end_token_ids(tmp_path, tmp_path) == (5, 7, 9)
    write(tmp_path, generation_config={"temperature": 1.0})
    assert end_token_ids(tmp_path, tmp_path) == (2, 9)


def test_end_token_ids_of_a_bare_folder_are_none(tmp_path: Path) -> None:
    assert end_token_ids(write(tmp_path, config={"eos_token_id": None}), tmp_path) == ()


def test_read_config_puts_the_text_model_on_top(tmp_path: Path) -> None:
    text = {"vocab_size": 11, "model_type": "llama", "architectures": ["LlamaForCausalLM"]}
    stored = {"model_type": "vision", "architectures": ["VisionForConditionalGeneration"], "text_config": text}
    config = read_config(write(tmp_path, config=stored))
    assert (config["model_type"], config["vocab_size"]) == ("vision", 11)
    assert config["architectures"] == ["VisionForConditionalGeneration"]


def test_read_config_has_what_a_family_has_by_default(tmp_path: Path) -> None:
    stored = {"model_type": "gemma3", "text_config": {"model_type": "gemma3_text", "num_hidden_layers": 3}}
    config = read_config(write(tmp_path, config=stored))
    assert (config["vocab_size"], config["num_hidden_layers"]) == (262_208, 3)


@pytest.mark.parametrize(
    ("kind", "own", "sizes"),
    [
        ("gpt2", {"n_head": 2, "n_layer": 3, "n_embd": 8}, (2, 3, 8)),
        ("mpt", {"n_heads": 2, "n_layers": 3, "d_model": 8}, (2, 3, 8)),
        ("bloom", {"n_head": 2, "n_layer": 3, "hidden_size": 8}, (2, 3, 8)),
        ("nemotron_h", {"num_attention_heads": 2, "layers_block_type": ["mamba", "attention"]}, (2, 2, 4096)),
        ("a_kind_that_only_vllm_knows", {"n_head": 2}, (None, None, None)),
    ],
)
def test_read_config_has_sizes_by_the_names_of_llama(tmp_path: Path, kind, own, sizes) -> None:
    config = read_config(write(tmp_path, config={"model_type": kind, "vocab_size": 40} | own))
    names = ("num_attention_heads", "num_hidden_layers", "hidden_size")
    assert tuple(config.get(name) for name in names) == sizes
    assert config["vocab_size"] == 40
    assert cpu_kv_cache_bytes(config, max_num_seqs=1, max_model_len=8, item_bytes=2) == (
        16 << 20 if sizes[0] else 1 << 30
    )


@pytest.mark.parametrize("text", ['{"vocab_size": 4, ', "[]", "\udcff"])
def test_a_damaged_config_is_named(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.json").write_bytes(text.encode(errors="surrogateescape"))
    for read in (read_config, check_tied_head):
        with pytest.raises(ConfigError, match=rf"^{tmp_path}/config.json (cannot be read: |holds no object: )"):
            read(tmp_path)


def test_a_folder_without_a_config_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"cannot load the model {tmp_path}"):
        read_config(tmp_path)


def test_checkpoint_shapes_leave_a_tied_head_out(tmp_path: Path) -> None:
    write(tmp_path, config={"tie_word_embeddings": True})
    write_safetensors(tmp_path / "model.safetensors", {"model.embed": [8, 2], "lm_head.weight": [8, 2]})
    assert checkpoint_shapes(tmp_path) == {"model.embed": (8, 2)}
    # The whole model's word holds, though its text part says another.
    write(tmp_path, config={"tie_word_embeddings": True, "text_config": {"tie_word_embeddings": False}})
    write_safetensors(tmp_path / "model.safetensors", {"model.embed": [8, 2], "language_model.lm_head.weight": [8, 2]})
    assert checkpoint_shapes(tmp_path) == {"model.embed": (8, 2)}


def test_checkpoint_shapes_follow_the_index(tmp_path: Path) -> None:
    write(
        tmp_path, config={}, **{"model.safetensors.index": {"weight_map": {"a": "x.safetensors", "b": "y.safetensors"}}}
    )
    write_safetensors(tmp_path / "x.safetensors", {"a": [3]})
    write_safetensors(tmp_path / "y.safetensors", {"b": [4, 1]})
    write_safetensors(tmp_path / "stray.safetensors", {"c": [1]})
    assert checkpoint_shapes(tmp_path) == {"a": (3,), "b": (4, 1)}


def test_checkpoint_shapes_without_safetensors_are_unknown(tmp_path: Path) -> None:
    assert checkpoint_shapes(write(tmp_path, config={})) is None


def test_cpu_kv_cache_bytes_hold_every_sequence() -> None:
    config = {"num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 2, "hidden_size": 512}
    config |= {"vocab_size": 40}
    # head 512 / 8 = 64; tokens: 16 sequences of 2 + 1 pages of 128; 2 * 4 * 2 * 64 * 4 bytes each.
    found = cpu_kv_cache_bytes(config, max_num_seqs=16, max_model_len=256, item_bytes=4)
    assert found == 2 * 4 * 2 * 64 * 4 * 16 * 3 * 128


@pytest.mark.parametrize("larger", [{"global_head_dim": 128}, {"per_layer_config": {"03": {"head_dim": 128}}}])
def test_cpu_kv_cache_bytes_are_those_of_the_largest_heads(larger: dict[str, Any]) -> None:
    config = {"num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 2, "hidden_size": 512}
    config |= {"vocab_size": 40, "head_dim": 64} | larger
    found = cpu_kv_cache_bytes(config, max_num_seqs=16, max_model_len=256, item_bytes=4)
    assert found == 2 * 4 * 2 * 128 * 4 * 16 * 3 * 128


def test_cpu_kv_cache_bytes_stay_within_bounds() -> None:
    config = {"num_hidden_layers": 1, "num_attention_heads": 1, "hidden_size": 8, "vocab_size": 40}
    assert cpu_kv_cache_bytes(config, max_num_seqs=1, max_model_len=8, item_bytes=2) == 16 << 20
    assert cpu_kv_cache_bytes(config, max_num_seqs=1 << 20, max_model_len=1 << 10, item_bytes=4) == 1 << 30


def test_resolve_model_dir_missing_folder_raises(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="there is no model folder"):
        resolve_model_dir(str(tmp_path / "none"))
    with pytest.raises(ConfigError, match=r"no config\.json"):
        resolve_model_dir(str(tmp_path))


def test_sample_seeds_are_63_bit_and_differ() -> None:
    seeds = [*sample_seeds(0, 4), *sample_seeds(1, 4), *sample_seeds(-1, 4)]
    assert len(set(seeds)) == 12
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert sample_seeds(1, 2) == sample_seeds(1, 4)[:2]
    # A run that goes on in another version draws the same samples.
    assert sample_seeds(0, 2) == [7896617691693857887, 6195319269190327588]
    assert sample_seeds(-1, 1) == sample_seeds(2**64 - 1, 1) == [6295558014972089990]


@pytest.mark.parametrize(
    ("token_ids", "max_tokens", "vocab_size", "says"),
    [
        ([0, 255], 4, 256, None),
        ([-1, 256], 4, None, None),
        ([0, 256], 4, 256, "token id 256 is outside the model's vocabulary of 256"),
        ([-1, 300], 4, 256, "token id -1 is outside"),
        ([0, 1], 5, 256, r"exceed the engine's context of 6 tokens\s+hint: raise max_model_len to 7"),
        ([0, 1], 2, 256, "min_tokens 3 is above max_tokens 2"),
        ([0, 1], 3, 256, None),
        ([], 4, 256, "the prompt has no tokens"),
    ],
)
def test_requests_at_the_edge_of_what_fits(token_ids, max_tokens, vocab_size, says) -> None:
    sampling = SamplingParams(max_tokens=max_tokens, min_tokens=3)
    with nullcontext() if says is None else pytest.raises(EngineError, match=says):
        check_request(np.array(token_ids, np.int32), sampling, max_model_len=6, vocab_size=vocab_size)


def test_build_engine_unknown_kind_raises_with_the_nearest() -> None:
    with pytest.raises(ConfigError, match="did you mean `vllm`"):
        build_engine("vlm", EngineSpec(model="m"))


def test_quantization_of_another_type_than_bfloat16_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"weights, and the engine's are float32\n\nhint: add ``dtype=bfloat16``"):
        build_engine("vllm", EngineSpec(model="m", quantization="fp8", dtype="float32"))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"dtype": "float23"}, "did you mean `float32`"),
        ({"weight_transfer": "files"}, "unknown weight transfer `files`"),
        ({"max_num_seqs": 0}, "``max_num_seqs`` is 0"),
        ({"gpu_memory_utilization": 1.5}, "``gpu_memory_utilization`` is 1.5"),
    ],
    ids=["dtype", "transfer", "sequences", "memory"],
)
def test_engine_spec_impossible_raises(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        EngineSpec(model="m", **fields)


SMALL = {"hidden_size": 896, "intermediate_size": 4864, "vocab_size": 151_936}


def test_gpu_kv_cache_bytes_are_what_weights_and_work_leave_of_the_share(tmp_path: Path) -> None:
    write_safetensors(tmp_path / "model.safetensors", {"a": [1 << 20, 128], "b": [1000]})
    spec = EngineSpec(model="m", dtype="bfloat16", max_num_seqs=512, gpu_memory_utilization=0.25)
    found = gpu_kv_cache_bytes(spec, tmp_path, SMALL, 80 << 30)
    # 8,192 tokens per step with 4 x 896 + 3 x 4,864 numbers each, and 7 x 512 rows of logits. The largest piece of CUDA
    # graphs keeps 2,048 tokens.
    pieces = 2048 * 18_176 * 2
    assert found == (20 << 30) - 268_437_456 - (2 << 30) - 8192 * 18_176 * 2 - pieces - 2_178_154_496
    halves = dataclasses.replace(spec, tensor_parallel_size=2)
    assert gpu_kv_cache_bytes(halves, tmp_path, SMALL, 80 << 30) == found + 268_437_456 // 2 + pieces
    # In FP8, the matrices of layers take a byte each, and embeddings and vectors two.
    named = {"layers.0.up.weight": [1 << 20, 100], "embed.weight": [1 << 20, 28], "layers.0.up.bias": [1000]}
    write_safetensors(tmp_path / "model.safetensors", named)
    assert gpu_kv_cache_bytes(spec, tmp_path, SMALL, 80 << 30) == found
    rounded = dataclasses.replace(spec, quantization="fp8")
    assert gpu_kv_cache_bytes(rounded, tmp_path, SMALL, 80 << 30) == found + (100 << 20)
    # vLLM keeps slots of rank 8, 16 or 32 and so on: ranks 9 to 16 take 16 numbers per input and output.
    adapted = dataclasses.replace(spec, adapter_rank=9)
    slots = 16 * ((1 << 20) + 100) * 2
    assert gpu_kv_cache_bytes(adapted, tmp_path, SMALL, 80 << 30) == found + pieces - slots
    # A draft model has weights, too, and each drafted token a row of logits.
    drafting = dataclasses.replace(spec, draft_model=str(tmp_path))
    assert gpu_kv_cache_bytes(drafting, tmp_path, SMALL, 80 << 30) == found + pieces - 268_437_456 - 4 * 2_178_154_496
    # A token goes through eight experts.
    experts = SMALL | {"num_experts_per_tok": 8, "moe_intermediate_size": 768}
    assert gpu_kv_cache_bytes(spec, tmp_path, experts, 80 << 30) == found + pieces - 8192 * 3 * (8 * 768 - 4864) * 2


def test_share_of_a_gpu_that_is_too_small_for_the_model_is_refused(tmp_path: Path) -> None:
    (tmp_path / "model.bin").touch()
    os.truncate(tmp_path / "model.bin", 3 << 30)  # takes no space on the disk
    spec = EngineSpec(model="m", max_num_seqs=64, gpu_memory_utilization=0.2, enforce_eager=True)
    message = r"(?s)is 4\.0 GiB, and its weights take 3\.0 GiB and its work up to 2\.8.*hint: raise .* above 0\.30, or"
    with pytest.raises(ConfigError, match=message):
        gpu_kv_cache_bytes(spec, tmp_path, SMALL, 20 << 30)
    with pytest.raises(ConfigError, match="hint: use a larger GPU, or several"):
        gpu_kv_cache_bytes(spec, tmp_path, SMALL, 4 << 30)


def test_vllm_measures_only_where_nothing_else_gives_the_size(tmp_path: Path) -> None:
    spec = EngineSpec(model="m")
    assert kv_cache_bytes(spec, tmp_path, SMALL, on_gpu=True) is None
    for given in (dataclasses.replace(spec, kv_cache_memory_bytes=5, measures_memory=own) for own in (True, False)):
        assert kv_cache_bytes(given, tmp_path, SMALL, on_gpu=True) == 5


@pytest.mark.parametrize(
    ("num_slots", "sizes"),
    [(1, [1]), (3, [1, 2, 3]), (8, [1, 2, 4, 8]), (20, [1, 2, 4, 8, 16, 20])],
)
def test_decode_steps_of_any_number_of_sequences_have_a_graph(num_slots, sizes):
    assert graph_sizes(num_slots) == sizes


def test_graphs_of_many_slots_are_an_eighth_apart_at_most():
    sizes = graph_sizes(1100)
    assert sizes == sorted(set(sizes)) and sizes[-1] == 1100 and len(sizes) < 80
    assert all(high - low <= max(8, low / 8) for low, high in itertools.pairwise(sizes))
