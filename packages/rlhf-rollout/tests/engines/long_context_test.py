"""Models whose context their config makes longer: engines compute what transformers computes."""

from pathlib import Path

import numpy as np

from engine_testing import (
    PROMPT,
    run,
)
from rlhf_rollout.engines import EngineSpec, build_engine
from rlhf_rollout.protocols import SamplingParams


def test_transformers_engine_has_the_frequencies_of_its_longest_request(tmp_path: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    from rlhf_models.testing import tiny_model_dir

    rope = {"rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 8, "attention_factor": 1.0}
    rope |= {"short_factor": [1.0] * 16, "long_factor": [4.0] * 16}
    folder = tiny_model_dir(tmp_path, architecture="llama", rope_parameters=rope, initializer_range=0.5)
    engine = build_engine("transformers", EngineSpec(model=str(folder), max_model_len=9))
    [completion] = run(engine.generate(PROMPT[:3], SamplingParams(max_tokens=6, min_tokens=6, seed=1)))
    # LongRoPE with one factor for all frequencies is linear scaling by it.
    linear = {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}
    plain = AutoModelForCausalLM.from_pretrained(folder, rope_parameters=linear)
    ids = torch.tensor([[*PROMPT[:3], *completion.token_ids]])
    logprobs = plain(ids).logits[0].log_softmax(-1)[2:-1].gather(1, ids[0, 3:, None])[:, 0]
    np.testing.assert_allclose(completion.logprobs, logprobs.detach(), atol=5e-3)


def test_longer_context_of_a_config_holds_for_trainer_engine_and_the_saved_model(tmp_path: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    from rlhf_models.batch import TokenBatch
    from rlhf_models.loading import load_actor
    from rlhf_models.testing import tiny_model_dir
    from rlhf_models.weights import save_hf

    # A context of 16 tokens made four times as long, as docs/models.md says how.
    rope = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 16}
    shape = {"max_position_embeddings": 64, "rope_parameters": rope, "initializer_range": 0.3}
    folder = tiny_model_dir(tmp_path / "model", **shape)
    engine = build_engine("transformers", EngineSpec(model=str(folder), max_model_len=64))
    [completion] = run(engine.generate(PROMPT[:3], SamplingParams(max_tokens=60, seed=1)))
    ids = [*map(int, PROMPT[:3]), *completion.token_ids]
    assert len(ids) > 40
    saved = save_hf(load_actor(str(folder), dtype="float32"), None, None, tmp_path / "saved")
    for path in (folder, saved):
        actor = load_actor(str(path), dtype="float32", max_length=64).eval()
        with torch.no_grad():
            batch = TokenBatch.padded([np.array(ids)], 0)
            [own] = batch.split(actor(batch).logprobs)
        np.testing.assert_allclose(own[3:], completion.logprobs, atol=1e-4)
    # Without the scaling the model is another one, already within the old context.
    plain = AutoModelForCausalLM.from_pretrained(folder, rope_parameters={"rope_type": "default", "rope_theta": 1e4})
    tokens = torch.tensor([ids])
    with torch.no_grad():
        unscaled = plain(tokens).logits[0].log_softmax(-1)[:-1].gather(1, tokens[0, 1:, None])[:, 0]
    assert np.abs(unscaled[2:].numpy() - completion.logprobs).max() > 0.1
