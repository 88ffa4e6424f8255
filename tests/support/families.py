"""Families of models of transformers, each as a tiny random model, and what this system does with it.

`examine` compares with plain transformers, which reads each sequence alone and without padding.
"""

import json
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

from rlhf_data.errors import RlhfError
from rlhf_models.actor import Actor
from rlhf_models.attention.frequencies import pin_frequencies
from rlhf_models.attention.packed import check_shares_prompts
from rlhf_models.batch import TokenBatch
from rlhf_models.checkpoint.files import quiet_transformers, without_wrappers
from rlhf_models.loading import load_actor, load_critic
from rlhf_models.testing import tiny_tokenizer
from rlhf_models.weights import check_saves, hf_named_weights, save_hf

VOCAB_SIZE = 512
BOUND = 1e-5  # in nats and float32; the order of sums differs
_WINDOW = 8
_SMALL = {
    "vocab_size": VOCAB_SIZE,
    **dict.fromkeys(("hidden_size", "n_embd", "d_model"), 128),
    **dict.fromkeys(("intermediate_size", "ffn_dim"), 128),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers"), 3),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads"), 4),
    "num_key_value_heads": 2,
    "head_dim": 32,  # the smallest of vLLM on a CPU
    **dict.fromkeys(("max_position_embeddings", "n_positions"), 512),
    "sliding_window": _WINDOW,
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), 4),
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 64,
}
_ENDS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
# The sizes that vLLM's kernels for latent attention take.
_LATENT = {"kv_lora_rank": 512, "q_lora_rank": 32, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}
_LATENT |= {"head_dim": 64, "num_key_value_heads": 4, "n_group": 1, "topk_group": 1}
_ONE_DENSE = {"first_k_dense_replace": 1}  # experts begin after so many layers
_INDEXED = _LATENT | _ONE_DENSE | {"index_n_heads": 2, "index_head_dim": 128, "index_topk": VOCAB_SIZE}
_LINEAR = {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 64}
_LINEAR |= {"linear_value_head_dim": 64, "layer_types": ["linear_attention", "full_attention", "linear_attention"]}
_MAMBA = {"mamba_n_heads": 4, "mamba_d_state": 16, "mamba_chunk_size": 16}
_LATER_WINDOWS = {"use_sliding_window": True, "sliding_window": _WINDOW, "max_window_layers": 1}
_CAPPED = {"final_logit_softcapping": 2.0}
_GEMMA_N = {"num_kv_shared_layers": 0, "vocab_size_per_layer_input": VOCAB_SIZE, "hidden_size_per_layer_input": 8}
# Heads of layers without a window are larger, and fewer in the largest models, whose values are their keys.
_GEMMA_4 = _GEMMA_N | _CAPPED | {"global_head_dim": 64}
# Factors and caps that are 1, or far from what a tiny model reaches, unless they are named: one that is lost would not
# be seen.
_GRANITE = {"embedding_multiplier": 12.0, "logits_scaling": 8.0}
_GRANITE |= {"residual_multiplier": 0.5, "attention_multiplier": 0.5}
_FALCON_H1 = {"embedding_multiplier": 5.0, "lm_head_multiplier": 0.5, "mlp_multipliers": [0.5, 2.0]}
_FALCON_H1 |= {"key_multiplier": 2.0, "attention_in_multiplier": 0.5, "attention_out_multiplier": 2.0}
_FALCON_H1 |= {"ssm_in_multiplier": 2.0, "ssm_out_multiplier": 0.5, "ssm_multipliers": [0.5, 2.0, 0.7, 1.5, 1.2]}
_ROUTED = {"routed_scaling_factor": 2.5}
_YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 32.0, "original_max_position_embeddings": 16}
_YARN |= {"mscale": 1.0, "mscale_all_dim": 1.0}
_LONG_ROPE = {"rope_type": "longrope", "rope_theta": 10000.0, "original_max_position_embeddings": 16}
_LONG_ROPE |= {"long_factor": [4.0] * 16, "short_factor": [1.0] * 16}
_PHIMOE = {"attention_bias": True, "lm_head_bias": True}  # as all published ones have
_SMALL_PART = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
_SIGLIP = _SMALL_PART | {"intermediate_size": 32, "image_size": 28, "patch_size": 14}
_QWEN_EYE = {"depth": 1, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2, "out_hidden_size": 128}
_QWEN_EYE |= {"num_position_embeddings": 16, "deepstack_visual_indexes": []}
_LLAMA_EYE = _SIGLIP | {"intermediate_size": 64}
_LLAMA_EYE |= dict.fromkeys(("vision_output_dim", "projector_input_dim", "projector_output_dim"), 64)
_GEMMA_EYE = _SIGLIP | {"num_key_value_heads": 2, "head_dim": 16, "position_embedding_size": 16}
_GEMMA_EYE |= {"pooling_kernel_size": 1}
_GEMMA_EAR = _SMALL_PART | {"output_proj_dims": 32, "subsampling_conv_channels": [8, 4]}
# By family, the type of its config, and fields beyond those that are made small in all of them. A family with a config
# for text within its own has the fields of that in `text_config`.
_OTHERS: dict[str, tuple[str, dict[str, Any]]] = {
    "afmoe": ("afmoe", {"route_scale": 2.5, "mup_enabled": True}),
    "bamba": ("bamba", _MAMBA | {"attn_layer_indices": [1], "mamba_d_head": 64}),
    "deepseek_v2": ("deepseek_v2", _LATENT | _ROUTED | {"num_experts_per_tok": 2}),
    "deepseek_v3": ("deepseek_v3", _LATENT | _ONE_DENSE),
    "deepseek_v32": ("deepseek_v32", _INDEXED),
    "dots1": (
        "dots1",
        _ROUTED
        | {"n_group": 1, "topk_group": 1, "n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2},
    ),
    "falcon, ALiBi": ("falcon", {"alibi": True}),
    "falcon, new decoder": ("falcon", {"new_decoder_architecture": True, "num_kv_heads": 2}),
    "falcon_h1": ("falcon_h1", _MAMBA | _FALCON_H1 | {"mamba_d_ssm": 128, "mamba_d_head": 32}),
    "gemma2": ("gemma2", _CAPPED | {"attn_logit_softcapping": 0.5}),
    "gemma3": ("gemma3", {"vision_config": _SIGLIP, "mm_tokens_per_image": 4}),
    "gemma3_text": ("gemma3_text", _CAPPED),
    "gemma3n_text": (
        "gemma3n_text",
        _GEMMA_N
        | _CAPPED
        | {"num_hidden_layers": 2, "layer_types": ["sliding_attention", "full_attention"], "laurel_rank": 4}
        | {"activation_sparsity_pattern": [0.0, 0.0], "intermediate_size": 128},
    ),
    "gemma4": ("gemma4", {"text_config": _GEMMA_4, "vision_config": _GEMMA_EYE, "audio_config": _GEMMA_EAR}),
    "gemma4_text": ("gemma4_text", _GEMMA_4 | {"num_global_key_value_heads": 1, "attention_k_eq_v": True}),
    "glm4_moe": ("glm4_moe", _ROUTED | {"head_dim": 32}),
    "glm4_moe_lite": ("glm4_moe_lite", _LATENT),
    "glm_moe_dsa": ("glm_moe_dsa", _INDEXED),
    "gptj": ("gptj", {"rotary_dim": 8}),
    "granite": ("granite", _GRANITE),
    "granitemoe": ("granitemoe", _GRANITE),
    "hunyuan_v1_dense": ("hunyuan_v1_dense", {"head_dim": 32, "use_qk_norm": True}),
    "jamba": ("jamba", {"attn_layer_period": 2, "attn_layer_offset": 1}),
    "lfm2": ("lfm2", {"layer_types": ["conv", "full_attention", "conv"]}),
    "llama, tied": ("llama", {"tie_word_embeddings": True}),
    "llama4": (
        "llama4",
        {
            "text_config": {
                "attention_chunk_size": _WINDOW,
                "interleave_moe_layer_step": 2,
                "floor_scale": 4,
                "intermediate_size_mlp": 128,
                "num_experts_per_tok": 1,
            },
            "vision_config": _LLAMA_EYE,
        },
    ),
    "llama4_text": ("llama4_text", {"attention_chunk_size": _WINDOW, "floor_scale": 4, "num_experts_per_tok": 1}),
    "mamba2": ("mamba2", {"num_heads": 16, "head_dim": 16, "state_size": 16, "n_groups": 1}),
    "mimo_v2_flash": ("mimo_v2_flash", _ROUTED),
    "minicpm3": ("minicpm3", _LATENT),
    "ministral": ("ministral", {"head_dim": 32}),
    "ministral3": ("ministral3", {"rope_parameters": _YARN | {"llama_4_scaling_beta": 0.5}}),
    "mixtral, window": ("mixtral", {"sliding_window": _WINDOW}),
    "nanochat": ("nanochat", _CAPPED),
    "nemotron": ("nemotron", {"head_dim": 32, "num_key_value_heads": 2}),
    "nemotron_h": ("nemotron_h", {"layer_types": ["linear_attention", "mlp", "full_attention", "mlp"]}),
    "nemotron_h, experts": ("nemotron_h", _ROUTED),
    "olmo": ("olmo", {"clip_qkv": 0.5}),
    "olmoe, clipped": ("olmoe", {"clip_qkv": 0.5}),
    "phi": ("phi", {"num_key_value_heads": 4, "intermediate_size": 512}),  # four times the width, as in vLLM
    "phi3, LongRoPE": ("phi3", {"rope_parameters": _LONG_ROPE, "original_max_position_embeddings": 16}),
    "phi3, window": ("phi3", {"sliding_window": _WINDOW}),
    "phimoe": ("phimoe", _PHIMOE),
    "phimoe, window": ("phimoe", _PHIMOE | {"sliding_window": _WINDOW}),
    "qwen2, window": ("qwen2", _LATER_WINDOWS),
    "qwen2_moe, window": ("qwen2_moe", _LATER_WINDOWS),
    "qwen3_5": ("qwen3_5", {"text_config": _LINEAR, "vision_config": _QWEN_EYE}),
    "qwen3_5_text": ("qwen3_5_text", _LINEAR),
    "qwen3_next": ("qwen3_next", _LINEAR),
    "recurrent_gemma": ("recurrent_gemma", {"logits_soft_cap": 2.0}),
    "solar_open": ("solar_open", _ROUTED),
    "starcoder2, window": ("starcoder2", {"sliding_window": _WINDOW}),
    "vaultgemma": ("vaultgemma", _CAPPED | {"attn_logit_softcapping": 0.5}),
    "youtu": ("youtu", _LATENT),
    "zamba2": (
        "zamba2",
        {"layer_types": ["linear_attention", "hybrid", "linear_attention"], "hybrid_layer_ids": [1]}
        | {"layers_block_type": ["mamba", "hybrid", "mamba"], "num_key_value_heads": 4, "attention_head_dim": 64},
    ),
}
_PLAIN = """
apertus arcee bitnet bloom cohere cohere2 cwm diffllama doge ernie4_5 ernie4_5_moe exaone4 falcon gemma glm glm4 gpt2
gpt_bigcode gpt_neox gpt_oss helium hy_v3 internlm3 llama mamba minimax_m2 mistral mixtral mpt olmo2 olmo3 olmoe
opt phi3 qwen2 qwen2_moe qwen3 qwen3_moe seed_oss smollm3 stablelm starcoder2
"""
FAMILIES = dict(sorted({**{name: (name, {}) for name in _PLAIN.split()}, **_OTHERS}.items()))


def _sequences() -> list[list[int]]:
    """Two sequences with one prompt of 9 tokens, both longer than the window, and one that is shorter."""
    generator = torch.Generator().manual_seed(1)
    prompt, *rest = (torch.randint(3, VOCAB_SIZE, (size,), generator=generator).tolist() for size in (9, 24, 31, 5))
    return [prompt + rest[0], prompt + rest[1], rest[2]]


SEQUENCES = _sequences()
MAX_LENGTH = max(map(len, SEQUENCES))
PROMPT_LENGTHS = [9, 9]


@dataclass(frozen=True, slots=True)
class Findings:
    """What happens with a family: "equal", "refused", or what is wrong.

    Attributes:
        padded, packed: log-probs of a padded batch, also of its shortest sequence before and after it, and of one that
            is packed with the attention of "auto". With those of a padded batch, the values of a critic.
        named: those of batches that are packed with the attentions "sdpa" and "eager". They may be refused.
        shared: those of packed sequences that share their prompt.
        saved: the log-probs of the saved model in plain transformers after an update, its names and its config.
        sent: the names that are sent to engines, against those of the checkpoint.
    """

    padded: str
    packed: str
    named: str
    shared: str
    saved: str
    sent: str


def _tiny_config(kind: str, own: dict[str, Any]) -> Any:
    default = AutoConfig.for_model(kind)
    fields = default.get_text_config().to_dict()
    small = {name: value for name, value in _SMALL.items() if fields.get(name) is not None}
    small |= _ENDS | {"initializer_range": 0.1}
    if default.get_text_config() is default:
        return AutoConfig.for_model(kind, **(small | own))
    return AutoConfig.for_model(kind, **(own | {"text_config": small | own.get("text_config", {})}))


def text_type(family: str) -> str:
    """Return the type of the config for text of a family."""
    return AutoConfig.for_model(FAMILIES[family][0]).get_text_config().model_type


def write_tiny(family: str, folder: Path) -> None:
    """Write a random model of a family, with a tokenizer."""
    config = _tiny_config(*FAMILIES[family])
    is_text = config.get_text_config() is config
    generator = torch.Generator().manual_seed(1)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = (AutoModelForCausalLM if is_text else AutoModelForImageTextToText).from_config(config).float()
    with torch.no_grad():
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            # Biases and norms are made as zeros and ones, which would hide that one is missing.
            if name.endswith("_bias") or (tensor.dim() == 1 and isinstance(tensor, torch.nn.Parameter)):
                tensor.add_(torch.randn(tensor.shape, generator=generator) * 0.05)
    with quiet_transformers(), without_wrappers():
        model.save_pretrained(folder)
    tiny_tokenizer(VOCAB_SIZE).save_pretrained(folder)


def examine(family: str) -> Findings:
    """Return what happens with a family."""
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "model"
        write_tiny(family, folder)
        expected = logprobs_of(plain_model(folder)[0], SEQUENCES)
        checks: dict[str, Callable[[], str]] = {
            "padded": lambda: worst([word(partial(_padded, folder, expected)), word(partial(_valued, folder))]),
            "packed": lambda: _packed(folder, expected, "auto"),
            "named": lambda: worst([word(partial(_packed, folder, expected, name)) for name in ("sdpa", "eager")]),
            "shared": lambda: _shared(folder, expected[:2]),
            "saved": lambda: _saved(folder),
            "sent": lambda: _sent(folder),
        }
        return Findings(**{field.name: word(checks[field.name]) for field in fields(Findings)})


def plain_model(folder: Path, dtype: torch.dtype = torch.float32) -> tuple[Any, dict[str, Any]]:
    """Return the model of a folder as plain transformers loads it in `dtype`, and what it says of the weights.

    The frequencies of LongRoPE are those of a run with the longest of `SEQUENCES`. Some versions of transformers, such
    as 5.17, compute scores with a soft cap by `sdpa`, which leaves the cap out: such a model is loaded as `eager`.
    """
    config = AutoConfig.from_pretrained(folder).get_text_config()
    has_cap = getattr(config, "attn_logit_softcapping", None) is not None
    attention = {"attn_implementation": "eager"} if has_cap else {}
    with quiet_transformers():
        model, report = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, output_loading_info=True, **attention)
    pin_frequencies(model, MAX_LENGTH)
    return model.eval(), report


@torch.no_grad()
def logprobs_of(model: Any, sequences: Sequence[Sequence[int]]) -> list[Tensor]:
    """Return the log-probs of all tokens but the first of each sequence, by plain transformers."""
    found = []
    for sequence in sequences:
        token_ids = torch.tensor([sequence], device=model.device)
        logprobs = model(input_ids=token_ids).logits[0].float().log_softmax(-1)
        found.append(logprobs[:-1].gather(1, token_ids[0, 1:, None])[:, 0])
    return found


def distance(one: Sequence[Tensor], other: Sequence[Tensor]) -> float:
    """Return the largest difference, in nats."""
    return max(float((a - b).abs().max()) for a, b in zip(one, other, strict=True))


def word(check: Callable[[], str]) -> str:
    """Return what a check found: its word, "refused" for an error with a hint, or the first line of another error."""
    try:
        return check()
    except RlhfError:
        return "refused"
    except Exception as error:
        return f"{type(error).__name__}: {error}".partition("\n")[0]


def worst(words: Sequence[str]) -> str:
    """Return the first word that tells of something wrong, else "refused" if one is."""
    wrong = [word for word in words if word not in ("equal", "refused")]
    return next(iter(wrong), "refused" if "refused" in words else "equal")


def load(folder: Path, **options: Any) -> Actor:
    """Return the actor of a folder in float32 and eval mode."""
    return load_actor(folder, dtype="float32", max_length=MAX_LENGTH, **options).eval()


@torch.no_grad()
def _compared(actor: Actor, batch: TokenBatch, expected: Sequence[Tensor]) -> str:
    found = [values[1:] for values in batch.split(actor(batch).logprobs)]
    gap = distance(found, expected)
    return "equal" if gap <= BOUND else f"off by {gap:.1e}"


def _padded(folder: Path, expected: Sequence[Tensor]) -> str:
    actor = load(folder)
    # The others of a batch may not matter, nor those of the batch before.
    parts = (SEQUENCES[-1:], SEQUENCES, SEQUENCES[-1:])
    return worst([_compared(actor, TokenBatch.padded(part, 0), expected[-len(part) :]) for part in parts])


@torch.no_grad()
def _valued(folder: Path) -> str:
    """Compare the values of a critic with its head applied to the last hidden states of plain transformers."""
    critic = load_critic(folder, dtype="float32", max_length=MAX_LENGTH).eval()
    critic.value_head.weight.normal_(generator=torch.Generator().manual_seed(1))
    whole = plain_model(folder)[0]
    plain = getattr(whole, "model", whole.base_model)
    batch = TokenBatch.padded(SEQUENCES, 0)
    found = batch.split(critic(batch, after_token=True))
    states = [plain(input_ids=torch.tensor([ids])).last_hidden_state[0] for ids in SEQUENCES]
    expected = [critic.value_head(state)[:, 0] for state in states]
    gap = distance(found, expected) / max(float(values.abs().max()) for values in expected)
    return "equal" if gap <= BOUND else f"values off by {gap:.1e} of the largest"


def _packed(folder: Path, expected: Sequence[Tensor], attention: str) -> str:
    actor = load(folder, packing=True, attn_implementation=attention)
    return _compared(actor, TokenBatch.packed(SEQUENCES), expected)


def _shared(folder: Path, expected: Sequence[Tensor]) -> str:
    actor = load(folder, packing=True)
    check_shares_prompts(actor.model.config, actor.model.config._attn_implementation)
    return _compared(actor, TokenBatch.packed(SEQUENCES[:2], prompt_lengths=PROMPT_LENGTHS), expected)


def _saved(folder: Path) -> str:
    """Make an update, save the model, and load it in plain transformers."""
    actor = load_actor(folder, dtype="float32", max_length=MAX_LENGTH)
    for kind in (load_actor, load_critic):  # refused here is refused in the page
        check_saves(kind(folder, dtype="bfloat16"))
    before = {name: weight.detach().clone() for name, weight in actor.named_parameters()}
    actor(TokenBatch.padded(SEQUENCES, 0)).logprobs.sum().neg().backward()
    with torch.no_grad():
        for weight in actor.parameters():
            if weight.grad is not None:
                weight.sub_(0.01 * weight.grad.clamp(-1, 1))
    moved = sum(not torch.equal(before[name], weight) for name, weight in actor.named_parameters())
    if moved < len(before) / 2:
        return f"{moved} of {len(before)} weights have a gradient"
    new = folder.with_name("new")
    save_hf(actor, None, None, new)
    loaded, report = plain_model(new)
    _, original = plain_model(folder)  # of a class for text alone, which says what else the folder has
    problems = {name: sorted(keys)[:3] for name, keys in report.items() if keys and keys != original[name]}
    if problems or type(loaded) is not type(actor.model):
        return f"{type(loaded).__name__}: {problems}"
    if differing := _names(new) ^ _names(folder):
        return f"{', '.join(sorted(differing)[:2])}"
    if _config(new) != _config(folder):
        return "another config"
    gap = distance(logprobs_of(loaded, SEQUENCES), logprobs_of(actor.eval().model, SEQUENCES))
    return "equal" if gap <= BOUND else f"off by {gap:.1e}"


def _config(folder: Path) -> dict[str, Any]:
    def without_dtype(config: dict[str, Any]) -> dict[str, Any]:
        return {name: value for name, value in config.items() if name != "dtype"}

    return json.loads((folder / "config.json").read_text(), object_hook=without_dtype)


def _sent(folder: Path) -> str:
    actor = load(folder)
    sent = {name for name, _ in hf_named_weights(actor)}
    left_out = getattr(actor.model, "left_out", None)
    names = _names(folder) - set(left_out.files if left_out else ())
    return "equal" if names == sent else f"{', '.join(sorted(names ^ sent)[:2])}"


def _names(folder: Path) -> set[str]:
    names = set()
    for file in folder.glob("*.safetensors"):
        with safe_open(file, "pt") as stored:
            names |= set(stored.keys())
    return names
