"""Models of known sizes for tests of the memory function."""

from typing import Any

import transformers

from rlhf_train.memory import Passes
from rlhf_train.specs import ModelSpec, OptimizerSpec

QWEN2 = {
    "vocab_size": 151_936,
    "hidden_size": 896,
    "intermediate_size": 4864,
    "num_hidden_layers": 24,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
    "tie_word_embeddings": True,
}
LARGER = {"hidden_size": 1536, "intermediate_size": 8960, "num_hidden_layers": 28, "num_attention_heads": 12}
LLAMA_70B = {
    "vocab_size": 32_000,
    "hidden_size": 8192,
    "intermediate_size": 28_672,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
}
QWEN3_30B = {
    "vocab_size": 151_936,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "moe_intermediate_size": 768,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 48,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
}
SMALL = {"hidden_size": 128, "intermediate_size": 384, "num_attention_heads": 4, "num_key_value_heads": 2}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "Qwen2-0.5B": ("Qwen2", QWEN2),
    "Qwen2-1.5B": ("Qwen2", QWEN2 | LARGER),
    "Qwen2-7B": (
        "Qwen2",
        {
            "vocab_size": 152_064,
            "hidden_size": 3584,
            "intermediate_size": 18_944,
            "num_hidden_layers": 28,
            "num_attention_heads": 28,
            "num_key_value_heads": 4,
        },
    ),
    "Llama-2-70B": ("Llama", LLAMA_70B),
    "Qwen3": ("Qwen3", SMALL | {"head_dim": 64}),
    "Qwen3-30B-A3B": ("Qwen3Moe", QWEN3_30B),
    "dense layers between experts": (
        "Qwen2Moe",
        SMALL
        | {"num_experts": 5, "moe_intermediate_size": 24, "shared_expert_intermediate_size": 40}
        | {"decoder_sparse_step": 2, "mlp_only_layers": [3], "num_hidden_layers": 6, "num_experts_per_tok": 2},
    ),
    "Mixtral": ("Mixtral", SMALL | {"num_local_experts": 4}),
    "Mistral": ("Mistral", SMALL),
    "biases": ("Llama", SMALL | {"attention_bias": True, "mlp_bias": True}),
    "biases of Qwen3": ("Qwen3", SMALL | {"attention_bias": True}),
}
ADAMW = OptimizerSpec(learning_rate=1e-6)
BF16 = ModelSpec(path="m", dtype="bfloat16", packing=True, torch_compile="auto", optimizer=ADAMW)
NOTHING = Passes(train=(0, 0), forward=(0, 0), most_targets=0)


def config_of(name: str) -> Any:
    family, fields = FAMILIES[name]
    return getattr(transformers, f"{family}Config")(**fields)
