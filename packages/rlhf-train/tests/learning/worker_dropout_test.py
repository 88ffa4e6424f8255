"""Online training computes the same log-probs in training mode as in eval mode."""

import copy
import json

import torch
import transformers

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


def test_without_dropout_routers_of_a_phimoe_choose_the_best_experts_and_keep_their_bound(tmp_path):
    """In train mode they draw experts, and `router_jitter_noise` says in both modes which experts are too weak."""
    torch.manual_seed(0)
    config = transformers.PhimoeConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        num_local_experts=4,
        router_jitter_noise=0.4,
        initializer_range=0.5,
    )
    model = transformers.PhimoeForCausalLM(config)
    ids = torch.arange(1, 20)[None]
    with torch.no_grad():
        expected = model.eval()(ids).logits
        drawn = model.train()(ids).logits
    for router in (module for module in model.modules() if hasattr(module, "router_jitter_noise")):
        router.router_jitter_noise = 0.0
    without_bound = model.eval()(ids).logits
    assert not torch.allclose(drawn, expected) and not torch.allclose(without_bound, expected)
    for router in (module for module in model.modules() if hasattr(module, "router_jitter_noise")):
        router.router_jitter_noise = 0.4
    model = without_dropout(model).train()
    logits = model(ids).logits
    assert torch.equal(logits, expected) and model.model.layers[0].training
    logits.sum().backward()
    assert all(layer.mlp.router.weight.grad.abs().sum() > 0 for layer in model.model.layers)
    assert torch.equal(copy.deepcopy(model).train()(ids).logits, expected)
