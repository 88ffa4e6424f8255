"""Sums over the routers of a mixture of experts: by hand in float64, without padding, in training passes alone."""

import pytest
import torch

from rlhf_data.errors import ConfigError
from rlhf_models.batch import TokenBatch
from rlhf_models.experts.routing import check_balances, router_sums, watch_routers
from rlhf_models.loading import load_actor, load_config, load_critic
from rlhf_models.testing import tiny_model_dir

SEQUENCES = [[5, 6, 7, 8, 9], [10, 11], [12, 13, 14]]


def counted_by_hand(logits, top_k, is_real):
    """Counts [E] and sums of probabilities [E], token by token in Python's float64, and the number of rows."""
    num_experts = logits[0].shape[1]
    counts, probs, rows = [0] * num_experts, [0.0] * num_experts, 0
    for layer in logits:
        for token, real in zip(layer.tolist(), is_real, strict=True):
            if not real:
                continue
            powers = [2.718281828459045**value for value in token]
            rows += 1
            for expert in range(num_experts):
                probs[expert] += powers[expert] / sum(powers)
                counts[expert] += sum(other > token[expert] for other in token) < top_k
    return counts, probs, rows


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("top_k", [1, 2, 5])
def test_router_sums_equal_those_by_hand(masked, top_k):
    generator = torch.Generator().manual_seed(0)
    logits = [3 * torch.randn(7, 5, generator=generator) for _ in range(3)]
    is_real = [True, True, False, True, False, False, True] if masked else [True] * 7
    sums = router_sums(logits, top_k, torch.tensor(is_real) if masked else None)
    counts, probs, rows = counted_by_hand(logits, top_k, is_real)
    assert sums.counts.tolist() == counts and float(sums.num_rows) == rows
    assert sum(counts) == rows * top_k
    assert sums.probs.tolist() == pytest.approx(probs, rel=1e-6)


def test_router_sums_have_the_gradient_of_the_probabilities_alone():
    logits = torch.randn(4, 3, generator=torch.Generator().manual_seed(1), requires_grad=True)
    sums = router_sums([logits], 2)
    assert not sums.counts.requires_grad and not sums.num_rows.requires_grad
    weights = torch.tensor([1.0, -2.0, 0.5], dtype=torch.float64)
    (sums.probs @ weights).backward()
    probs = logits.detach().double().softmax(-1)
    # d/dz_j sum_e w_e p_e = p_j (w_j - sum_e w_e p_e)
    expected = probs * (weights - (probs @ weights)[:, None])
    torch.testing.assert_close(logits.grad.double(), expected, rtol=0, atol=1e-6)


def test_router_sums_of_bfloat16_are_those_of_its_values():
    logits = torch.randn(40, 4, generator=torch.Generator().manual_seed(2)).bfloat16()
    sums, exact = router_sums([logits], 2), router_sums([logits.double()], 2)
    assert torch.equal(sums.counts, exact.counts)
    torch.testing.assert_close(sums.probs, exact.probs, rtol=1e-6, atol=0)


@pytest.fixture(scope="module", params=["qwen3_moe", "qwen2_moe", "mixtral"])
def moe_dir(request, tmp_path_factory):
    return tiny_model_dir(tmp_path_factory.mktemp(request.param), architecture=request.param)


def router_logits_of(model, sequence):
    """The router logits of one sequence in each layer, by hooks on the modules that hold the routers' weights."""
    seen = []
    routers = [module for name, module in model.named_modules() if name.endswith("mlp.gate")]
    hooks = [
        router.register_forward_hook(lambda module, inputs, _: seen.append(inputs[0].reshape(-1, 64) @ module.weight.T))
        for router in routers
    ]
    model(input_ids=torch.tensor([sequence]))
    for hook in hooks:
        hook.remove()
    return seen


@pytest.mark.parametrize("packing", [False, True])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_watch_sums_up_the_real_tokens_of_a_pass(moe_dir, packing, checkpointing):
    actor = load_actor(moe_dir, dtype="float32", packing=packing, gradient_checkpointing=checkpointing)
    plain = load_actor(moe_dir, dtype="float32").model
    layers = zip(*(router_logits_of(plain, sequence) for sequence in SEQUENCES), strict=True)
    logits = [torch.cat(layer).detach() for layer in layers]
    assert len(logits) == 2
    expected = router_sums(logits, 2)
    watch = watch_routers(actor.model.base_model)
    actor(TokenBatch.packed(SEQUENCES) if packing else TokenBatch.padded(SEQUENCES, 0))
    assert torch.equal(watch.sums.counts, expected.counts)
    assert float(watch.sums.num_rows) == 2 * 10
    torch.testing.assert_close(watch.sums.probs, expected.probs, rtol=1e-5, atol=0)
    watch.sums.probs.square().sum().backward()
    gates = [weight for name, weight in actor.named_parameters() if name.endswith("mlp.gate.weight")]
    assert len(gates) == 2 and all(weight.grad.abs().max() > 0 for weight in gates)


def test_watch_leaves_outputs_as_they_are_and_ignores_evaluation(moe_dir):
    actor = load_actor(moe_dir, dtype="float32")
    batch = TokenBatch.padded(SEQUENCES, 0)
    before = actor(batch).logprobs
    watch = watch_routers(actor.model.base_model)
    actor.eval()
    actor(batch)
    assert watch.sums is None
    actor.train()
    assert torch.equal(actor(batch).logprobs, before)
    assert watch.sums is not None


def test_watch_of_a_critic(moe_dir):
    critic = load_critic(moe_dir, dtype="float32")
    watch = watch_routers(critic.model.base_model)
    critic(TokenBatch.packed([[5, 6, 7]]))
    assert float(watch.sums.num_rows) == 6


def test_watch_of_a_model_that_returns_no_router_logits_is_refused(tmp_path):
    folder = tiny_model_dir(tmp_path, architecture="qwen3_moe", mlp_only_layers=[0, 1])
    actor = load_actor(folder, dtype="float32")
    watch_routers(actor.model.base_model)
    with pytest.raises(ConfigError, match=r"(?s)no layers with experts.*hint: drop ``aux_loss_coef``"):
        actor(TokenBatch.padded(SEQUENCES, 0))


def test_models_without_a_loss_are_refused(tmp_path):
    config = load_config(tiny_model_dir(tmp_path))
    with pytest.raises(ConfigError, match=r"(?s)a qwen2 model has none\n\nhint: drop ``aux_loss_coef``"):
        check_balances(config)
    from transformers import DeepseekV3Config

    with pytest.raises(ConfigError, match=r"(?s)no load-balancing loss for a deepseek_v3 model\n\nhint"):
        check_balances(DeepseekV3Config())
