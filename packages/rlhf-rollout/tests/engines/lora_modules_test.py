"""Adapters in folders that one vLLM engine applies side by side, compared with peft beside transformers."""

import asyncio
import json
import shutil

import numpy as np
import pytest

from rlhf_data.errors import ConfigError, EngineError, WeightSyncError
from rlhf_models.testing import tiny_model_dir
from rlhf_rollout.engines import EngineSpec, build_engine
from rlhf_rollout.engines.adapter_files import LoraModule, check_adapters, parse_lora_modules
from rlhf_rollout.engines.vllm.memory import piece_sizes
from rlhf_rollout.protocols import SamplingParams

BOUND = 1e-4  # nats; in float32 two orders of summation differ by about 1e-6
PROMPT = np.arange(3, 203, dtype=np.int32)  # longer than a block of the prefix cache
ATTENTION = ["q_proj", "v_proj"]
CONFIGS = {
    "small": {"r": 3, "lora_alpha": 7, "target_modules": "all-linear"},
    "rooted": {"r": 8, "lora_alpha": 4, "use_rslora": True, "target_modules": ATTENTION},
    "mixed": {
        "r": 2,
        "lora_alpha": 5,
        "target_modules": [*ATTENTION, "down_proj"],
        "rank_pattern": {"down_proj": 20, "layers.1.self_attn.q_proj": 1},
        "alpha_pattern": {"v_proj": 3},
    },
}
NAMES = [None, *CONFIGS]


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    pytest.importorskip("peft")
    return tiny_model_dir(tmp_path_factory.mktemp("model"), vocab_size=512)


@pytest.fixture(scope="module")
def modules(model_dir, tmp_path_factory):
    """Adapters as peft writes them, far enough from zero that each moves log-probs."""
    import peft
    import torch
    from transformers import AutoModelForCausalLM

    found = []
    for seed, (name, config) in enumerate(CONFIGS.items()):
        model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
        model = peft.get_peft_model(model, peft.LoraConfig(**config))
        generator = torch.Generator().manual_seed(seed)
        for key, parameter in model.requires_grad_(False).named_parameters():
            if ".lora_" in key:
                parameter += 0.1 * torch.randn(parameter.shape, generator=generator)
        path = tmp_path_factory.mktemp(name)
        model.save_pretrained(path)
        found.append(LoraModule(name, str(path)))
    return tuple(found)


@pytest.fixture(scope="module")
def reference(model_dir, modules):
    import peft
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    model = peft.PeftModel.from_pretrained(model, modules[0].path, adapter_name=modules[0].name)
    for module in modules[1:]:
        model.load_adapter(module.path, module.name)
    return model.eval()


@pytest.fixture(scope="module")
def engine(model_dir, modules):
    pytest.importorskip("vllm")
    limits = {"max_model_len": 320, "max_num_seqs": 16, "max_num_batched_tokens": 512, "enable_sleep": True}
    engine = build_engine("vllm", EngineSpec(model=str(model_dir), lora_modules=modules, **limits))
    yield engine
    asyncio.run(engine.close())


def ask(engine, names, **sampling):
    """The completions of one prompt, by adapter; all requests are in flight together."""

    async def all_at_once():
        asked = [SamplingParams(adapter=name, **({"max_tokens": 24, "seed": 3} | sampling)) for name in names]
        return await asyncio.gather(*(engine.generate(PROMPT, one) for one in asked))

    return [completion for [completion] in asyncio.run(all_at_once())]


def gap(reference, name, completion):
    """The largest distance, in nats, of log-probs from those of peft."""
    import torch

    tokens = torch.tensor(np.concatenate([PROMPT, completion.token_ids]), dtype=torch.long)[None]
    if name:
        reference.set_adapter(name)
        logits = reference(tokens).logits
    else:
        with reference.disable_adapter():
            logits = reference(tokens).logits
    expected = logits[0].log_softmax(-1)[len(PROMPT) - 1 : -1].gather(1, tokens[0, len(PROMPT) :, None])[:, 0]
    return float((torch.tensor(completion.logprobs) - expected.detach()).abs().max())


def test_each_request_of_a_mixed_batch_is_computed_by_its_own_adapter(engine, reference):
    together = ask(engine, NAMES)
    for name, completion in zip(NAMES, together, strict=True):
        assert completion.num_cached_tokens == 0, "an adapter got what another one has computed"
        assert gap(reference, name, completion) < BOUND
        for other in NAMES:
            assert other == name or gap(reference, other, completion) > 20 * BOUND
    for name, expected in zip(NAMES, together, strict=True):
        [alone] = ask(engine, [name])
        assert alone.num_cached_tokens == 128  # its own block
        np.testing.assert_array_equal(alone.token_ids, expected.token_ids)
        np.testing.assert_allclose(alone.logprobs, expected.logprobs, rtol=0, atol=BOUND)


def test_engine_refuses_unknown_adapters_and_new_weights_and_keeps_adapters_in_its_sleep(engine, reference):
    with pytest.raises(EngineError, match=r"unknown adapter `smal`; known: mixed, rooted, small\s+hint: .*`small`"):
        ask(engine, ["smal"])
    with pytest.raises(WeightSyncError, match="keeps the weights that its adapters were trained on"):
        asyncio.run(engine.begin_weight_update(1))
    asyncio.run(engine.sleep(keep_weights=False))
    asyncio.run(engine.wake_up())
    for name, completion in zip(NAMES, ask(engine, NAMES, seed=4), strict=True):
        assert gap(reference, name, completion) < BOUND


def changed(source, folder, config=None, tensors=None):
    """A copy of an adapter, with other settings, and tensors by name: None for one that is taken out."""
    from safetensors.torch import load_file, save_file

    shutil.copytree(source, folder)
    file = folder / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | (config or {})))
    weights = folder / "adapter_model.safetensors"
    new = {name: tensor for name, tensor in (load_file(weights) | (tensors or {})).items() if tensor is not None}
    save_file(new, weights)
    return (LoraModule("math", str(folder)),)


def tensor(*shape):
    import torch

    return torch.ones(shape)


Q = "base_model.model.model.layers.0.self_attn.q_proj.lora_"


@pytest.mark.parametrize(
    ("config", "tensors", "message"),
    [
        ({"use_dora": True}, {}, "the adapter math in .* has use_dora True, which vLLM does not apply"),
        ({"modules_to_save": ["lm_head"], "bias": "all"}, {}, r"bias all and modules_to_save \['lm_head'\]"),
        ({"init_lora_weights": "pissa_niter_4"}, {}, "init_lora_weights pissa_niter_4"),
        ({"peft_type": "IA3"}, {}, "is of the kind IA3"),
        ({}, {f"{Q}magnitude_vector": (64,)}, f"1 tensors that belong to no linear layer, such as {Q}magnitude_vector"),
        ({}, {"base_model.model.lm_head.lora_A.weight": (3, 64)}, "changes the LM head"),
        ({}, {f"{Q}B.weight": None}, r"matrices of shapes \[3, 64\] and \[\] for model.layers.0.self_attn.q_proj"),
        ({}, {f"{Q}B.weight": (64, 4)}, r"\[3, 64\] and \[64, 4\] for .* do not match"),
        ({}, {f"{Q}B.weight": (32, 3)}, r"q_proj of shape \[32, 64\]; the model's is \[64, 64\]"),
        ({}, {f"{Q}A.weight": (513, 64), f"{Q}B.weight": (64, 513)}, "has rank 513; vLLM takes up to 512"),
        ({}, {Q.replace("0", "7") + "A.weight": (3, 64)}, r"changes 1 layers that the model lacks, .*layers\.7"),
        ({"lora_alpha": None}, {}, "has the alpha None for model.layers.0"),
        ({"lora_alpha": float("nan")}, {}, "has the alpha nan for"),
        ({"alpha_pattern": {"q_proj": "7"}}, {}, r"has the alpha '7' for .*q_proj"),
        ({"base_model_name_or_path": ["a/b"]}, {}, r"names no model as its base, but \['a/b'\]"),
    ],
)
def test_adapter_that_vllm_would_apply_wrongly_is_refused_with_a_way_out(
    model_dir, modules, tmp_path, config, tensors, message
):
    made = {name: None if shape is None else tensor(*shape) for name, shape in tensors.items()}
    with pytest.raises(
        ConfigError, match=rf"{message}(.|\n)*hint: (name the model|copy|vLLM|its files|`rlhf lora_combiner`)"
    ):
        check_adapters(changed(modules[0].path, tmp_path / "adapter", config, made), model_dir)


def test_adapters_that_fit_are_read_with_the_scale_of_each_layer(model_dir, modules, tmp_path):
    small, rooted, mixed = check_adapters(modules, model_dir)
    assert [small.rank, rooted.rank, mixed.rank] == [3, 8, 20]
    assert set(small.scales.values()) == {7 / 3} and set(rooted.scales.values()) == {4 / 8**0.5}
    layer = "model.layers.1"
    assert {name: scale for name, scale in mixed.scales.items() if name.startswith(layer)} == {
        f"{layer}.self_attn.q_proj": 5.0,
        f"{layer}.self_attn.v_proj": 1.5,
        f"{layer}.mlp.down_proj": 0.25,
    }
    assert small.base == str(model_dir)
    (tmp_path / "none").mkdir()
    with pytest.raises(ConfigError, match=r"there is no adapter math in .*none"):
        check_adapters((LoraModule("math", str(tmp_path / "none")),), model_dir)
    damaged = changed(modules[0].path, tmp_path / "damaged")
    (tmp_path / "damaged" / "adapter_model.safetensors").write_bytes(b"version https://git-lfs")
    with pytest.raises(ConfigError, match="cannot load the adapter"):
        check_adapters(damaged, model_dir)


def test_layers_that_vllm_lacks_are_refused_where_files_do_not_tell_it(model_dir, modules, tmp_path):
    """The names of all layers are those of another family, so that the checkpoint says nothing about them."""
    from safetensors.torch import load_file

    pytest.importorskip("vllm")
    stored = load_file(f"{modules[0].path}/adapter_model.safetensors")
    others = {name.replace("model.layers", "transformer.h"): tensor for name, tensor in stored.items()}
    own = changed(modules[0].path, tmp_path / "adapter", {}, dict.fromkeys(stored) | others)
    check_adapters(own, model_dir)
    with pytest.raises(
        ConfigError, match=r"(?s)applies no adapter to 14 layers, such as transformer\.h.*lora_combiner"
    ):
        build_engine("vllm", EngineSpec(model=str(model_dir), lora_modules=own, max_model_len=64, max_num_seqs=2))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a=x,b", "b lacks a name or a folder"),
        ("=x", "=x lacks a name or a folder"),
        ("a=x,a=y", "two adapters a: x and y"),
        (" , ", "names no adapter"),
    ],
)
def test_list_of_adapters_that_is_none_is_refused(text, message):
    with pytest.raises(ConfigError, match=rf"(?s){message}.*hint: "):
        parse_lora_modules(text)


def test_adapters_are_for_vllm_without_what_was_not_tried_with_them(modules):
    assert parse_lora_modules(None) == ()
    assert parse_lora_modules(" a = x/y , b==z") == (LoraModule("a", "x/y"), LoraModule("b", "=z"))
    for kind in ("fake", "transformers"):
        with pytest.raises(ConfigError, match=f"engine {kind} applies no adapters"):
            EngineSpec(model="", lora_modules=modules).check_kind(kind)
    for options in ({"adapter_rank": 2}, {"quantization": "fp8"}, {"speculative": "ngram"}):
        with pytest.raises(ConfigError, match="is not tested with"):
            EngineSpec(model="", lora_modules=modules, **options)
    small = {"hidden_size": 64, "intermediate_size": 128}
    assert piece_sizes(EngineSpec(model="", max_num_batched_tokens=512), small)
    assert not piece_sizes(EngineSpec(model="", max_num_batched_tokens=512, lora_modules=modules), small)
