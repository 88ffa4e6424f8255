"""Packed attention by itself, and how it calls torch's varlen kernel, which a twin stands in for on the CPU."""

import inspect
import logging
import sys

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    GPTJConfig,
    GptOssConfig,
    Llama4TextConfig,
    OPTConfig,
    PhimoeConfig,
    Qwen2Config,
    RecurrentGemmaConfig,
    RecurrentGemmaForCausalLM,
)

from rlhf_data.errors import ConfigError
from rlhf_models import backbone
from rlhf_models.attention import packed as attention
from rlhf_models.attention.packed import choose_attention, packed_attention, varlen_unavailable_reason
from rlhf_models.loading import load_actor

LENGTHS = (5, 1, 9)
BOUNDS = torch.tensor([0, 5, 6, 15], dtype=torch.int32)


def tensors():
    """Query of 4 heads, key and value of 2, of 15 packed tokens."""
    torch.manual_seed(0)
    return torch.randn(1, 4, 15, 8), torch.randn(1, 2, 15, 8), torch.randn(1, 2, 15, 8)


def expected(scaling, window=None):
    """One mask over all tokens: the same sequence, not later, and not further back than the window."""
    query, key, value = tensors()
    sequence = torch.repeat_interleave(torch.arange(3), torch.tensor(LENGTHS))
    index = torch.arange(15)
    mask = (sequence[:, None] == sequence[None, :]) & (index[:, None] >= index[None, :])
    if window:
        mask &= index[:, None] - index[None, :] < window
    key, value = key.repeat_interleave(2, 1), value.repeat_interleave(2, 1)
    return scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scaling).transpose(1, 2)


@pytest.mark.parametrize(("scaling", "window"), [(None, None), (0.7, None), (None, 3)])
def test_packed_attention_equals_a_block_diagonal_mask(scaling, window):
    out, weights = packed_attention(
        torch.nn.Module(), *tensors(), None, scaling=scaling, sliding_window=window, cu_seq_lens_q=BOUNDS
    )
    torch.testing.assert_close(out, expected(scaling, window), atol=1e-6, rtol=0)
    assert weights is None


def varlen_twin(query, key, value, bounds, window, scale):
    """What the kernel computes: [T, H, D] tensors, heads already equal or grouped, window as (left, right)."""
    outputs = []
    for start, end in zip(bounds[:-1].tolist(), bounds[1:].tolist(), strict=True):
        q, k, v = (tensor[start:end].transpose(0, 1) for tensor in (query, key, value))
        index = torch.arange(end - start)
        back = index[:, None] - index[None, :]
        mask = (back >= 0) & ((back <= window[0]) if window[0] >= 0 else True)
        outputs.append(scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale, enable_gqa=True))
    return torch.cat(outputs, 1).transpose(0, 1)


def newest(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, *, scale=None, window_size=(-1, -1), enable_gqa=False):
    assert window_size[1] == 0
    assert enable_gqa
    assert max_q == max_k == 9
    return varlen_twin(query, key, value, cu_seq_q, window_size, scale)


def without_groups(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, *, scale=None, window_size=(-1, -1)):
    assert window_size[1] == 0
    return varlen_twin(query, key, value, cu_seq_q, window_size, scale)


def oldest(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, is_causal=False):
    assert is_causal
    return varlen_twin(query, key, value, cu_seq_q, (-1, 0), None)


def test_heads_of_values_of_another_size_take_no_kernel(monkeypatch, caplog):
    monkeypatch.setattr(attention, "varlen_unavailable_reason", lambda *args: None)
    attention._log_fallback_once.cache_clear()
    query, key, value = tensors()
    narrow = value[..., :2]
    with caplog.at_level(logging.INFO):
        found = packed_attention(torch.nn.Module(), query, key, narrow, None, cu_seq_lens_q=BOUNDS, max_length_q=9)[0]
    torch.testing.assert_close(found, expected(None)[..., :2], atol=1e-6, rtol=0)
    assert "its heads of keys and values must have the same size" in caplog.text


@pytest.fixture
def kernel(monkeypatch):
    """Put a twin in the kernel's place, signature included."""

    def install(function):
        monkeypatch.setitem(attention._kernel, "function", function)
        monkeypatch.setitem(attention._kernel, "parameters", frozenset(inspect.signature(function).parameters))
        monkeypatch.setattr(attention, "varlen_unavailable_reason", lambda *args: None)

    return install


def call(**options):
    return packed_attention(torch.nn.Module(), *tensors(), None, cu_seq_lens_q=BOUNDS, max_length_q=9, **options)[0]


@pytest.mark.parametrize("function", [newest, without_groups, oldest])
@pytest.mark.parametrize("scaling", [None, 0.7])
def test_packed_attention_every_kernel_signature_gives_the_same(kernel, function, scaling):
    kernel(function)
    torch.testing.assert_close(call(scaling=scaling), expected(scaling), atol=1e-6, rtol=0)


@pytest.mark.parametrize("function", [newest, without_groups])
def test_packed_attention_window_of_three_sees_two_tokens_back(kernel, function):
    kernel(function)
    torch.testing.assert_close(call(sliding_window=3), expected(None, 3), atol=1e-6, rtol=0)


def test_packed_attention_kernel_without_windows_refuses_one_that_matters(kernel):
    kernel(oldest)
    torch.testing.assert_close(call(sliding_window=9), expected(None), atol=1e-6, rtol=0)
    with pytest.raises(ConfigError, match="no sliding window\n\nhint: turn packing off, with ``packing=false``"):
        call(sliding_window=3)


def test_packed_attention_soft_cap_is_refused():
    with pytest.raises(ConfigError, match="soft cap"):
        call(softcap=30.0)
    with pytest.raises(ConfigError, match="with sinks cannot be packed"):
        call(s_aux=torch.zeros(2))


@pytest.mark.parametrize(
    ("device", "dtype", "head_dim", "dropout", "reason"),
    [
        ("cpu", torch.bfloat16, 64, 0.0, "runs on CUDA"),
        ("cuda", torch.float32, 64, 0.0, "computes in torch.float32"),
        ("cuda", torch.bfloat16, 64, 0.1, "no dropout"),
        ("cuda", torch.bfloat16, 512, 0.0, "the model's is 512"),
        ("cuda", torch.bfloat16, 20, 0.0, "multiple of 8 and at most 256, the model's is 20"),
    ],
)
def test_varlen_unavailable_reason_says_what_stands_in_the_way(device, dtype, head_dim, dropout, reason):
    assert reason in varlen_unavailable_reason(torch.device(device), dtype, head_dim, dropout)


def reason_on(monkeypatch, capability):
    """The reason on a GPU of that capability, not remembered for other tests."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(attention, "_kernel", {})
    return varlen_unavailable_reason.__wrapped__(torch.device("cuda"), torch.bfloat16, 64, 0.0)


def test_varlen_unavailable_reason_of_an_old_gpu_names_what_it_has(monkeypatch):
    assert reason_on(monkeypatch, (7, 5)) == "it needs compute capability 8.0, the GPU has (7, 5)"


def test_varlen_unavailable_reason_of_a_torch_without_it_names_the_version(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch.nn.attention.varlen", None)
    assert f"torch {torch.__version__} has none" in reason_on(monkeypatch, (9, 0))


def test_packed_attention_calls_the_kernel_as_the_installed_torch_declares_it(monkeypatch):
    assert reason_on(monkeypatch, (8, 0)) is None
    signature = inspect.signature(attention._kernel["function"])

    def bound(*args, **kwargs):
        given = signature.bind(*args, **kwargs)
        given.apply_defaults()
        window, scale = given.arguments["window_size"], given.arguments["scale"]
        assert given.arguments["enable_gqa"]
        return varlen_twin(*given.args[:4], window, scale)

    monkeypatch.setitem(attention._kernel, "function", bound)
    monkeypatch.setattr(attention, "varlen_unavailable_reason", lambda *args: None)
    torch.testing.assert_close(call(scaling=0.7, sliding_window=3), expected(0.7, 3), atol=1e-6, rtol=0)


def test_packed_attention_fallback_drops_weights_out():
    dropped = call(dropout=1.0)
    assert torch.equal(dropped, torch.zeros_like(dropped))


def test_packed_attention_fallback_is_logged_once(caplog):
    attention._log_fallback_once.cache_clear()
    with caplog.at_level(logging.INFO):
        call()
        call()
    assert len(caplog.records) == 1
    assert "sequence by sequence" in caplog.text


def test_packed_attention_left_padded_generation_equals_sdpa(model_dir):
    # The same loaded model may also `generate`, with a mask and without bounds.
    packed = load_actor(model_dir, dtype="float32", packing=True).model.eval()
    plain = AutoModelForCausalLM.from_pretrained(model_dir)
    inputs = {
        "input_ids": torch.tensor([[0, 0, 40, 41], [50, 51, 52, 53]]),
        "attention_mask": torch.tensor([[0, 0, 1, 1], [1, 1, 1, 1]]),
    }
    settings = {"max_new_tokens": 6, "do_sample": False}
    assert torch.equal(packed.generate(**inputs, **settings), plain.generate(**inputs, **settings))


def test_choose_attention_auto_depends_on_packing():
    config = Qwen2Config()
    assert choose_attention(config, "auto", packing=False) == "sdpa"
    assert choose_attention(config, "auto", packing=True) == "rlhf_packed"
    assert choose_attention(config, "eager", packing=True) == "eager"


@pytest.mark.parametrize("config", [Gemma2Config(), GptOssConfig()])
def test_choose_attention_of_soft_caps_and_sinks_is_eager_or_packed_with_its_scores(config):
    assert choose_attention(config, "auto", packing=False) == "eager"
    assert choose_attention(config, "eager", packing=False) == "eager"
    assert choose_attention(config, "auto", packing=True) == "rlhf_packed_scored"
    for name in ("sdpa", "rlhf_packed"):
        with pytest.raises(ConfigError, match=f"cannot use the attention {name}: .* soft caps or sinks"):
            choose_attention(config, name, packing=True)


def test_choose_attention_of_a_family_with_its_own_code_of_attention_is_eager():
    assert choose_attention(GPTJConfig(), "auto", packing=True) == "eager"


def write(config, folder, **fields):
    """A tiny random model of a config."""
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 64}
    for name, size in (sizes | {"pad_token_id": 0, "initializer_range": 0.5} | fields).items():
        setattr(config, name, size)
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder


@pytest.mark.parametrize("name", ["auto", "sdpa", "eager"])
def test_llama_4_whose_chunks_packed_attention_does_not_know_is_refused_with_a_hint(tmp_path, name):
    fields = {"attention_chunk_size": 4, "num_local_experts": 2, "num_key_value_heads": 2, "head_dim": 16}
    layers = {"num_hidden_layers": 2, "layer_types": ["chunked_attention", "full_attention"], "moe_layers": []}
    write(Llama4TextConfig(**fields, **layers, intermediate_size=32, intermediate_size_mlp=32), tmp_path)
    message = r"llama4_text model cannot be packed: .* chunked_attention .*\n\nhint: turn packing off"
    with pytest.raises(ConfigError, match=message):
        load_actor(tmp_path, dtype="float32", packing=True, attn_implementation=name)
    load_actor(tmp_path, dtype="float32", attn_implementation=name)


def test_model_whose_window_is_in_a_mask_only_cannot_be_packed(tmp_path):
    fields = {"sliding_window": 4, "num_key_value_heads": 2, "intermediate_size": 32, "num_local_experts": 2}
    write(PhimoeConfig(), tmp_path, **fields)
    with pytest.raises(
        ConfigError, match=r"PhimoeAttention has its sliding window in a mask.*\n\nhint: turn packing off"
    ):
        load_actor(tmp_path, dtype="float32", packing=True)
    load_actor(tmp_path, dtype="float32")


def test_layer_whose_config_has_a_window_must_pass_it_on():
    layer = torch.nn.Module()
    layer.layer_idx = 1
    layer.config = Qwen2Config(num_hidden_layers=2, use_sliding_window=True, sliding_window=3, max_window_layers=1)
    with pytest.raises(ConfigError, match="sliding window in a mask"):
        packed_attention(layer, *tensors(), None, cu_seq_lens_q=BOUNDS)
    out, _ = packed_attention(layer, *tensors(), None, sliding_window=3, cu_seq_lens_q=BOUNDS)
    torch.testing.assert_close(out, expected(None, 3), atol=1e-6, rtol=0)
    layer.layer_idx = 0  # a layer without a window
    out, _ = packed_attention(layer, *tensors(), None, cu_seq_lens_q=BOUNDS)
    torch.testing.assert_close(out, expected(None), atol=1e-6, rtol=0)


@pytest.mark.parametrize("name", ["sdpa", "eager"])
def test_model_that_mixes_packed_sequences_with_an_attention_is_refused_with_it(tmp_path, name):
    write(OPTConfig(), tmp_path, ffn_dim=32, word_embed_proj_dim=32)
    with pytest.raises(
        ConfigError, match=rf"opt model with the attention {name} .* mixes .*\n\nhint: leave ``attn_impl"
    ):
        load_actor(tmp_path, dtype="float32", packing=True, attn_implementation=name)
    load_actor(tmp_path, dtype="float32", packing=True)
    load_actor(tmp_path, dtype="float32", attn_implementation=name)


def test_family_that_is_not_known_is_compared_when_it_is_loaded(model_dir, monkeypatch):
    monkeypatch.setattr(backbone, "PACKED_FAMILIES", frozenset())
    assert load_actor(model_dir, dtype="bfloat16", packing=True).training
    plain = backbone.run_backbone

    def mixed(model, batch, *rest):
        output = plain(model, batch, *rest)
        if batch.is_packed:
            output.last_hidden_state = output.last_hidden_state.roll(1, dims=1)
        return output

    monkeypatch.setattr(backbone, "run_backbone", mixed)
    with pytest.raises(ConfigError, match=r"cannot be packed: it mixes packed sequences\n\nhint: turn packing off"):
        load_actor(model_dir, dtype="bfloat16", packing=True)


def test_model_with_a_state_that_is_not_kept_apart_is_refused(tmp_path):
    config = RecurrentGemmaConfig(
        hidden_size=64, num_attention_heads=2, num_hidden_layers=3, intermediate_size=64, vocab_size=40, lru_width=64
    )
    RecurrentGemmaForCausalLM(config).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=r"recurrent_gemma model .*cannot be packed: .*\n\nhint: turn packing off"):
        load_actor(tmp_path, dtype="bfloat16", packing=True)
