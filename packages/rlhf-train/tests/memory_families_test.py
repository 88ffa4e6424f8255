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
