"""Online training computes the same log-probs in training mode as in eval mode."""

import json

import torch

from rlhf_models.batch import TokenBatch
from rlhf_models.loading import load_actor
from rlhf_models.testing import tiny_model_dir
from rlhf_train.run.models import without_dropout


def test_without_dropout_training_mode_gives_the_logprobs_of_eval_mode(tmp_path):
    folder = tiny_model_dir(tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"attention_dropout": 0.5}))
    actor = load_actor(folder, dtype="float32")
    actor.model.base_model.dropout = torch.nn.Dropout(0.5)
    batch = TokenBatch.padded([list(range(1, 20))], pad_id=0)
    expected = actor.eval()(batch).logprobs
    assert not torch.equal(actor.train()(batch).logprobs, expected)
    assert torch.equal(without_dropout(actor).train()(batch).logprobs, expected)
    assert actor.training and actor.model.base_model.dropout.p == 0.0


def test_without_dropout_routers_have_no_jitter(tmp_path):
    actor = load_actor(
        tiny_model_dir(tmp_path / "model", architecture="mixtral", router_jitter_noise=0.9), dtype="float32"
    )
    batch = TokenBatch.padded([list(range(1, 20))], pad_id=0)
    expected = actor.eval()(batch).logprobs
    assert not torch.equal(actor.train()(batch).logprobs, expected)
    assert torch.equal(without_dropout(actor).train()(batch).logprobs, expected)
