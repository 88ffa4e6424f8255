"""Memory of engines: a KV cache takes no more than full sequences need, four for each that runs; images take none."""

import json

import pytest

pytest.importorskip("vllm")

import torch
from vllm.config import VllmConfig
from vllm.v1.kv_cache_interface import FullAttentionSpec

from families import write_tiny
from rlhf_models.testing import tiny_model_dir
from rlhf_rollout.engines.model_files import read_config
from rlhf_rollout.engines.spec import EngineSpec
from rlhf_rollout.engines.vllm.core import build_core, prepare_environment
from rlhf_rollout.engines.vllm.memory import KV_CACHE_LIMIT, kv_cache_limit, limit_config


def test_the_limit_is_that_of_four_full_sequences_for_each_that_runs():
    config = VllmConfig(additional_config=limit_config(EngineSpec(model="m", max_num_seqs=3)))
    assert config.additional_config == {KV_CACHE_LIMIT: 12}

    class OfLength:
        def __init__(self, max_model_len: int) -> None:
            self.model_config = type("ModelConfig", (), {"max_model_len": max_model_len})
            self.parallel_config = config.parallel_config
            self.additional_config = config.additional_config

    # Keys and values of 2 heads of 8 numbers in bfloat16: 64 bytes per token, in blocks of 16 tokens.
    layer = FullAttentionSpec(block_size=16, num_kv_heads=2, head_size=8, dtype=torch.bfloat16)
    assert kv_cache_limit({"a": layer, "b": layer}, OfLength(32)) == 12 * 2 * 32 * 64
    assert kv_cache_limit({"a": layer, "b": layer}, OfLength(33)) == 12 * 2 * 48 * 64
    assert kv_cache_limit({}, OfLength(33)) == 0


def test_a_size_that_is_fixed_has_no_limit():
    assert limit_config(EngineSpec(model="m", kv_cache_memory_bytes=1 << 30)) == {}
    assert kv_cache_limit({}, VllmConfig(additional_config={})) is None


@pytest.mark.parametrize(("fixed", "found"), [(None, 4 * 2 * 3), (1 << 22, 256)])
def test_an_engine_allocates_as_many_blocks(tmp_path, fixed, found):
    """A block of 128 tokens has 16 KiB: keys and values of 2 layers with 2 heads of 8 numbers in bfloat16."""
    sizes = {"num_hidden_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2}
    model = tiny_model_dir(tmp_path / "model", **sizes)
    config = json.loads((model / "config.json").read_text())
    spec = EngineSpec(
        model=str(model), dtype="bfloat16", max_model_len=300, max_num_seqs=2, seed=0, kv_cache_memory_bytes=fixed
    )
    prepare_environment()
    core = build_core(spec, model, config, on_gpu=False)
    try:
        cache = core.engine_core.vllm_config.cache_config
        assert cache.block_size == 128
        assert cache.num_gpu_blocks == found
    finally:
        core.shutdown()


def test_an_engine_of_a_model_with_images_and_sounds_leaves_out_what_reads_them(tmp_path):
    """The folder has no files of a processor, which vLLM would need for them."""
    write_tiny("gemma4", tmp_path)
    spec = EngineSpec(model=str(tmp_path), dtype="bfloat16", max_model_len=64, max_num_seqs=2, seed=0)
    prepare_environment()
    core = build_core(spec, tmp_path, read_config(tmp_path), on_gpu=False)
    try:
        model = core.engine_core.model_executor.driver_worker.worker.model_runner.model
        names = {name.partition(".")[0] for name, _ in model.named_parameters()}
        assert names == {"language_model"}
    finally:
        core.shutdown()
