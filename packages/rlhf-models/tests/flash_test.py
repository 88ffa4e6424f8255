"""When FlashAttention 4 can run, and what is said where it cannot."""

import os
import sys
from types import ModuleType

import pytest
import torch
from transformers import GPT2Config, Qwen2Config

from rlhf_data.errors import ConfigError
from rlhf_models import attention, flash
from rlhf_models.attention import check_runs, check_shares_prompts, choose_attention, register_packed_attention
from rlhf_models.batch import TokenBatch
from rlhf_models.loading import load_actor


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
    assert reason == "it needs a Hopper or Blackwell GPU, and this is a NVIDIA A100"


def test_a_package_that_is_not_installed_is_named(hopper, monkeypatch):
    monkeypatch.undo()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (10, 0))
    monkeypatch.setattr(flash, "find_spec", lambda name: None)
    flash._flash_4.cache_clear()
    reason = flash.flash_4_unavailable_reason(64)
    assert reason == "the package flash-attn-4 cannot be imported: no module flash_attn.cute"


def test_kernels_that_it_compiles_are_kept_beside_those_of_torch(monkeypatch, tmp_path):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED", "")
    monkeypatch.delenv("FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED")
    monkeypatch.setenv("FLASH_ATTENTION_CUTE_DSL_CACHE_DIR", "")
    monkeypatch.delenv("FLASH_ATTENTION_CUTE_DSL_CACHE_DIR")
    for name in ("flash_attn", "flash_attn.cute", "flash_attn.cute.interface"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setattr(flash, "find_spec", lambda name: name)
    flash._flash_4.cache_clear()
    assert flash._flash_4() is sys.modules["flash_attn.cute.interface"]
    flash._flash_4.cache_clear()
    assert os.environ["FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED"] == "1"
    assert os.environ["FLASH_ATTENTION_CUTE_DSL_CACHE_DIR"] == str(tmp_path / "flash_attention_4")


def test_a_model_that_asks_for_it_in_vain_is_refused(model_dir, hopper, monkeypatch):
    config = Qwen2Config()
    assert choose_attention(config, "rlhf_packed_4", packing=True) == "rlhf_packed_4"
    check_runs(config, "rlhf_packed_4")
    check_shares_prompts(config, "rlhf_packed_4")
    check_runs(GPT2Config(n_embd=1024, n_head=4), "rlhf_packed")
    with pytest.raises(ConfigError, match=r"the model's is 256\n\nhint: take rlhf_packed"):
        check_runs(GPT2Config(n_embd=1024, n_head=4), "rlhf_packed_4")
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
