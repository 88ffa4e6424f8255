"""Estimates of memory for models of many families."""

from transformers import AutoConfig

from rlhf_rollout.engines import EngineSpec
from rlhf_train.memory import Model, Passes, engine_memory, trainer_memory
from rlhf_train.specs import ModelSpec, OptimizerSpec


def test_models_of_every_family_have_an_estimate():
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    # Configs without usual fields, with fields by layer, or with lists: a run of such a model must not end here.
    kinds = ("gemma3n_text", "gemma4", "deepseek_v2", "mamba", "gpt2", "qwen3_next", "jamba", "llama4_text")
    for kind in sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.keys() & kinds):
        config = AutoConfig.for_model(kind)
        model = Model(config, ModelSpec(path="", dtype="bfloat16", optimizer=OptimizerSpec(learning_rate=1e-4)))
        passes = Passes(train=(1000, 800), forward=(1000, 800), most_targets=800)
        assert trainer_memory([model], passes, 2).total > 0, kind
        assert engine_memory(config, EngineSpec(model="", max_model_len=256)).total > 0, kind


def test_secondary_partitions_keep_a_second_copy_among_neighbours():
    config = AutoConfig.for_model("qwen2", vocab_size=100, hidden_size=8, intermediate_size=16, num_hidden_layers=1,
                                  num_attention_heads=2, num_key_value_heads=1)  # fmt: skip
    # 2 tables of 800, q 64 + 8, k and v 2 (32 + 4), o 64, the MLP 384, and three norms of 8.
    num_weights = 1600 + 72 + 72 + 64 + 384 + 24
    passes = Passes(train=(10, 8), forward=(10, 8), most_targets=8)
    for optimizer in (OptimizerSpec(learning_rate=1e-4), None):
        spec = ModelSpec(path="", dtype="bfloat16", zero_stage=3, optimizer=optimizer, zpg=4)
        items = trainer_memory([Model(config, spec)], passes, 8).items
        assert items["second copy"] == 2 * num_weights / 4
