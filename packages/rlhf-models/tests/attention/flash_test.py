"""When FlashAttention 4 can run, and what is said where it cannot."""

import importlib
import logging
import os
import sys
from collections.abc import Iterator
from types import ModuleType

import pytest
import torch
from transformers import DeepseekV3Config, Gemma4TextConfig, GPT2Config, Qwen2Config

from rlhf_data.errors import ConfigError
from rlhf_models.attention import flash
from rlhf_models.attention import packed as attention
from rlhf_models.attention.packed import (
    check_shares_prompts,
    choose_attention,
    head_sizes,
    packed_attention_here,
    register_packed_attention,
)
from rlhf_models.batch import TokenBatch
from rlhf_models.loading import load_actor
from rlhf_models.testing import tiny_model_dir


@pytest.fixture(autouse=True)
def forgetful() -> Iterator[None]:
    """Tests do not see what other tests have cached of the package."""
    cached = (flash._flash_4, flash._log_choice_once)
    for function in cached:
        function.cache_clear()
    yield
    for function in cached:
        function.cache_clear()


def install(monkeypatch) -> ModuleType:
    """Put a package with the functions of FlashAttention 4 in the place of the real one."""
    for name in ("flash_attn", "flash_attn.cute", "flash_attn.cute.interface"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setattr(flash, "find_spec", lambda name: name)
    interface = sys.modules["flash_attn.cute.interface"]

    def forward(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, softmax_scale, causal, return_lse):
        """Takes what version 4.0.0b36 takes."""

    def backward(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, softmax_scale, causal, deterministic):
        """Takes what version 4.0.0b36 takes."""

    interface._flash_attn_fwd, interface._flash_attn_bwd = forward, backward
    return interface


@pytest.fixture
def hopper(monkeypatch):
    """A machine with a Hopper GPU on which the package is installed."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None: "NVIDIA A100")
    monkeypatch.setattr(flash, "_flash_4", lambda: ModuleType("interface"))


def test_it_runs_on_hopper_with_heads_of_up_to_128(hopper):
    assert flash.flash_4_unavailable_reason(64) is None
    assert flash.flash_4_unavailable_reason(128) is None
    assert flash.flash_4_unavailable_reason(136).endswith("at most 128, the model's is 136")
    assert flash.flash_4_unavailable_reason(20).endswith("multiple of 8 and at most 128, the model's is 20")


@pytest.mark.parametrize("capability", [(8, 0), (12, 0)])
def test_another_gpu_is_named(hopper, monkeypatch, capability):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)
    reason = flash.flash_4_unavailable_reason(64)
    assert reason == "it needs a GPU of compute capability 9 or 10, and this is a NVIDIA A100"


def test_a_package_that_is_not_installed_is_named(hopper, monkeypatch):
    monkeypatch.undo()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (10, 0))
    monkeypatch.setattr(flash, "find_spec", lambda name: None)
    reason = flash.flash_4_unavailable_reason(64)
    assert reason == "the package flash-attn-4 cannot be imported: no module flash_attn.cute"


def test_kernels_that_it_compiles_are_kept_beside_those_of_torch(monkeypatch, tmp_path):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED", "")
    monkeypatch.delenv("FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED")
    monkeypatch.setenv("FLASH_ATTENTION_CUTE_DSL_CACHE_DIR", "")
    monkeypatch.delenv("FLASH_ATTENTION_CUTE_DSL_CACHE_DIR")
    interface = install(monkeypatch)
    assert flash._flash_4() is interface
    assert os.environ["FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED"] == "1"
    assert os.environ["FLASH_ATTENTION_CUTE_DSL_CACHE_DIR"] == str(tmp_path / "flash_attention_4")


def test_a_version_whose_functions_differ_is_not_called(hopper, monkeypatch):
    monkeypatch.undo()
    interface = install(monkeypatch)
    del interface._flash_attn_bwd
    with pytest.raises(ImportError, match="its function _flash_attn_bwd is missing or takes other arguments"):
        flash._flash_4()
    interface._flash_attn_bwd = interface._flash_attn_fwd
    with pytest.raises(ImportError, match="its function _flash_attn_bwd is missing or takes other arguments"):
        flash._flash_4()


def test_auto_takes_it_where_it_was_measured_to_be_faster(hopper, monkeypatch):
    def chosen(head_dim: int, dtype: torch.dtype = torch.bfloat16, name: str = "auto") -> str:
        return packed_attention_here(Qwen2Config(hidden_size=head_dim * 4, num_attention_heads=4), name, dtype)

    assert chosen(64) == chosen(128) == "rlhf_packed_4"
    assert chosen(64, name="rlhf_packed") == "rlhf_packed"
    assert chosen(96) == chosen(256) == chosen(64, torch.float32) == "rlhf_packed"
    assert chosen(96, name="rlhf_packed_4") == "rlhf_packed_4"
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (10, 0))
    assert chosen(64) == "rlhf_packed"
    assert chosen(64, name="rlhf_packed_4") == "rlhf_packed_4"


def test_largest_heads_of_a_model_whose_layers_differ_decide(hopper):
    published = Gemma4TextConfig()
    assert head_sizes(published) == (512, 512)  # of layers without a window; those with one have 256
    small = Gemma4TextConfig(head_dim=64, global_head_dim=256)
    assert packed_attention_here(small, "auto", torch.bfloat16) == "rlhf_packed"
    with pytest.raises(ConfigError, match="at most 128, the model's is 256"):
        packed_attention_here(small, "rlhf_packed_4", torch.bfloat16)


def test_latent_attention_has_heads_of_its_own_sizes(hopper):
    latent = DeepseekV3Config()
    assert latent.head_dim == 64  # a part of a head
    assert head_sizes(latent) == (192, 128)
    assert packed_attention_here(latent, "auto", torch.bfloat16) == "rlhf_packed"
    with pytest.raises(ConfigError, match="heads of keys and values must have the same size"):
        packed_attention_here(latent, "rlhf_packed_4", torch.bfloat16)
    equal = DeepseekV3Config(qk_nope_head_dim=64, qk_rope_head_dim=64, v_head_dim=128)
    assert packed_attention_here(equal, "auto", torch.bfloat16) == "rlhf_packed_4"


def test_an_installation_that_fails_in_any_way_is_none(hopper, monkeypatch):
    monkeypatch.undo()
    install(monkeypatch)

    def fails(name):
        raise RuntimeError("two versions of cutlass")

    monkeypatch.setattr(importlib, "import_module", fails)
    with pytest.raises(ImportError, match="RuntimeError: two versions of cutlass"):
        flash._flash_4()


def test_the_log_says_once_what_auto_takes(hopper, monkeypatch, caplog):
    caplog.set_level(logging.INFO)
    for _ in range(2):
        assert flash.flash_4_is_faster(64)
    assert caplog.messages == ["packed sequences take FlashAttention 4"]
    caplog.clear()
    monkeypatch.setattr(flash, "_flash_4", lambda: importlib.import_module("flash_attn.none"))
    assert not flash.flash_4_is_faster(64)
    [message] = caplog.messages
    assert "the package flash-attn-4 cannot be imported" in message
    assert message.endswith("4, of rlhf-models' extra `flash`, is faster on this GPU")


def test_models_are_loaded_with_what_auto_takes(hopper, tmp_path):
    folder = tiny_model_dir(tmp_path, hidden_size=128, num_attention_heads=2, num_key_value_heads=1)
    assert load_actor(folder, dtype="bfloat16", packing=True).model.config._attn_implementation == "rlhf_packed_4"
    assert load_actor(folder, dtype="float32", packing=True).model.config._attn_implementation == "rlhf_packed"
    assert load_actor(folder, dtype="bfloat16").model.config._attn_implementation == "sdpa"


def test_a_model_that_asks_for_it_in_vain_is_refused(model_dir, hopper, monkeypatch):
    config = Qwen2Config()
    assert choose_attention(config, "rlhf_packed_4", packing=True) == "rlhf_packed_4"
    check_shares_prompts(config, "rlhf_packed_4")
    large = GPT2Config(n_embd=1024, n_head=4)
    with pytest.raises(ConfigError, match=r"the model's is 256\n\nhint: leave ``attn_implementation`` at auto"):
        packed_attention_here(large, "rlhf_packed_4", torch.bfloat16)
    monkeypatch.undo()
    with pytest.raises(ConfigError, match=r"rlhf_packed_4 is FlashAttention 4: it runs on CUDA, and there is no GPU"):
        load_actor(model_dir, dtype="float32", packing=True, attn_implementation="rlhf_packed_4")


def test_transformers_knows_both_names():
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    register_packed_attention()
    assert set(attention.PACKED_ATTENTIONS) <= set(ALL_ATTENTION_FUNCTIONS.valid_keys())
    assert ALL_ATTENTION_FUNCTIONS["rlhf_packed_4"].keywords == {"version": 4}


@pytest.mark.parametrize("name", attention.PACKED_ATTENTIONS)
def test_neither_gets_a_mask_for_packed_batches(name):
    arguments = attention.packed_arguments(TokenBatch.packed([[1, 2, 3], [4]]), name)
    assert arguments["attention_mask"] is attention.NO_MASK
    assert arguments["cu_seq_lens_q"].tolist() == [0, 3, 4]
