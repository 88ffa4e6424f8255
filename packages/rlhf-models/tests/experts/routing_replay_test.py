"""Given experts: values and gradients by dense float64, the router's own choice bit by bit, and what is refused."""

import numpy as np
import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, OlmoeConfig

from rlhf_data.errors import ConfigError, DataError
from rlhf_models.batch import TokenBatch
from rlhf_models.experts.routing import watch_routers
from rlhf_models.experts.routing_replay import check_replays, replay_routes, replayed_choice
from rlhf_models.loading import load_actor, load_config
from rlhf_models.testing import tiny_model_dir

LAYERS, EXPERTS, TOP_K = 2, 4, 2
# Whether the weights of a token's experts add up to 1.
NORMALIZES = {"qwen3_moe": True, "qwen2_moe": False, "mixtral": True}


@pytest.fixture(scope="module", params=list(NORMALIZES))
def moe_dir(request, tmp_path_factory):
    return tiny_model_dir(tmp_path_factory.mktemp(request.param), architecture=request.param)


def random_routes(num_tokens, seed=0):
    """Experts of tokens, different ones in each row, in no order."""
    draws = np.random.default_rng(seed).random((num_tokens, LAYERS, EXPERTS))
    return draws.argsort(-1)[..., :TOP_K].astype(np.uint8)


def replaying(path, **options):
    actor = load_actor(path, **({"dtype": "float32"} | options))
    replay_routes(actor.model.base_model)
    return actor


class Dense(nn.Module):
    """A layer of experts in float64 that runs all of them on all tokens, and weighs those that are not used by 0.

    Args:
        block: of transformers.
        routes: [R, top_k], of the first R tokens.
        normalizes: see `NORMALIZES`.
    """

    def __init__(self, block, routes, normalizes):
        super().__init__()
        self.block, self.routes, self.normalizes = block, torch.as_tensor(routes).long(), normalizes

    def forward(self, hidden):
        [tokens] = hidden
        experts = self.block.experts
        scores = tokens @ self.block.gate.weight.T
        probs = scores.exp() / scores.exp().sum(-1, keepdim=True)
        rest = probs[len(self.routes) :].argsort(-1, descending=True)[:, :TOP_K]
        used = torch.zeros_like(probs)
        for row, chosen in enumerate([*self.routes, *rest]):
            used[row, chosen] = 1.0
        weights = probs * used
        if self.normalizes:
            weights = weights / weights.sum(-1, keepdim=True)
        gate, up = (tokens @ experts.gate_up_proj.transpose(1, 2)).chunk(2, dim=-1)
        each = (gate / (1 + (-gate).exp()) * up) @ experts.down_proj.transpose(1, 2)
        output = (weights.T[..., None] * each).sum(0)
        if hasattr(self.block, "shared_expert"):
            output = output + self.block.shared_expert_gate(tokens).sigmoid() * self.block.shared_expert(tokens)
        return output[None]


def dense_logprobs(path, sequences, routes):
    """Log-probs of sequences one at a time in float64, and the gradients of their weighted sum."""
    model = AutoModelForCausalLM.from_pretrained(path).double()
    blocks = [layer.mlp for layer in model.model.layers]
    found, loss = [], 0.0
    for sequence, own in zip(sequences, routes, strict=True):
        for index, layer in enumerate(model.model.layers):
            layer.mlp = Dense(blocks[index], own[:, index], NORMALIZES[model.config.model_type])
        ids = torch.as_tensor(sequence)[None]
        found.append(model(input_ids=ids).logits[0, :-1].log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0])
        loss = loss + found[-1] @ weights_of(len(sequence))
    loss.backward()
    for block, layer in zip(blocks, model.model.layers, strict=True):
        layer.mlp = block
    return found, {name: weight.grad for name, weight in model.named_parameters()}


def weights_of(length):
    return torch.linspace(-1, 1, length, dtype=torch.float64)[1:]


def loss_of(batch, output):
    values = batch.split(output.logprobs)
    return sum(own[1:].double() @ weights_of(len(own)) for own in values)


@pytest.mark.parametrize("layout", ["padded", "packed", "packed, checkpointed"])
def test_logprobs_and_gradients_are_those_of_all_experts_weighed_in_float64(moe_dir, sequences, layout):
    # All tokens but the last one have routes, as the engine gives them; half of them; none.
    counts = [len(one) - 1 if index != 3 else len(one) // 2 for index, one in enumerate(sequences)]
    routes = [random_routes(count, seed) for seed, count in enumerate(counts)]
    packing = layout != "padded"
    actor = replaying(moe_dir, packing=packing, gradient_checkpointing="check" in layout).train()
    batch = TokenBatch.packed(sequences) if packing else TokenBatch.padded(sequences, 0)
    output = actor(batch.routed(routes))
    expected, gradients = dense_logprobs(moe_dir, sequences, routes)
    for own, want in zip(batch.split(output.logprobs), expected, strict=True):
        torch.testing.assert_close(own[1:].double(), want, atol=2e-5, rtol=0)
    loss_of(batch, output).backward()
    for name, weight in actor.model.named_parameters():
        torch.testing.assert_close(weight.grad.double(), gradients[name], atol=5e-5, rtol=1e-4, msg=name)
    # The router's own choice is another one.
    assert (output.logprobs - actor(batch).logprobs).abs().max() > 0.05


def own_routes(path, sequences):
    """The experts that the routers of plain transformers choose, weakest first."""
    model = AutoModelForCausalLM.from_pretrained(path)
    found = []
    for sequence in sequences:
        with torch.no_grad():
            logits = model(input_ids=torch.as_tensor(sequence)[None], output_router_logits=True).router_logits
        found.append(np.stack([layer.numpy().argsort(-1)[:, -TOP_K:] for layer in logits], axis=1))
    return found


@pytest.mark.parametrize("packing", [False, True])
def test_experts_that_the_router_would_choose_change_no_bit(moe_dir, sequences, packing):
    plain, given = load_actor(moe_dir, dtype="float32", packing=packing), replaying(moe_dir, packing=packing)
    batch = TokenBatch.packed(sequences) if packing else TokenBatch.padded(sequences, 0)
    outputs = []
    for actor, own in ((plain, batch), (given, batch.routed(own_routes(moe_dir, sequences)))):
        outputs.append(actor(own).logprobs)
        outputs[-1].sum().backward()
    assert torch.equal(*outputs)
    for (name, one), other in zip(plain.named_parameters(), given.parameters(), strict=True):
        assert torch.equal(one.grad, other.grad), name


def test_pass_without_routes_is_the_routers_own_after_one_with_them(moe_dir, sequences):
    batch = TokenBatch.padded(sequences, 0)
    expected = load_actor(moe_dir, dtype="float32")(batch).logprobs
    actor = replaying(moe_dir)
    routed = actor(batch.routed([random_routes(len(one)) for one in sequences])).logprobs
    assert torch.equal(actor(batch).logprobs, expected) and not torch.allclose(routed, expected, atol=1e-2)
    nothing = [random_routes(0) for _ in sequences]
    assert torch.equal(actor(batch.routed(nothing)).logprobs, expected)


@torch.no_grad()
def test_logprobs_of_weights_that_differ_in_rounding_come_closer(moe_dir):
    rng = np.random.default_rng(1)
    sequences = [rng.integers(3, 512, 40) for _ in range(12)]
    batch = TokenBatch.padded(sequences, 0)
    engine = load_actor(moe_dir, dtype="float32")(batch).logprobs
    actor = replaying(moe_dir)
    for weight in actor.parameters():  # bfloat16 rounds about as much
        weight.mul_(1 + 2**-8 * torch.randn(weight.shape, generator=torch.Generator().manual_seed(2)))
    with_routes = (actor(batch.routed(own_routes(moe_dir, sequences))).logprobs - engine).abs()
    without = (actor(batch).logprobs - engine).abs()
    assert 0 < with_routes.mean() < without.mean() and with_routes.max() < 0.5 * without.max()


def test_only_layers_with_experts_read_their_routes(tmp_path, sequences):
    path = tiny_model_dir(tmp_path, architecture="qwen3_moe", mlp_only_layers=[0])
    actor = replaying(path)
    batch = TokenBatch.padded(sequences, 0)
    one, other = ([random_routes(len(sequence), seed) for sequence in sequences] for seed in (1, 2))
    mixed = [np.stack([a[:, 0], b[:, 1]], axis=1) for a, b in zip(one, other, strict=True)]
    first, second, third = (actor(batch.routed(routes)).logprobs for routes in (one, other, mixed))
    assert torch.equal(second, third) and not torch.equal(first, second)


def test_load_balancing_loss_counts_what_the_router_itself_would_choose(moe_dir, sequences):
    actor = load_actor(moe_dir, dtype="float32").train()
    watch = watch_routers(actor.model.base_model)
    batch = TokenBatch.padded(sequences, 0)
    actor(batch)
    expected = watch.sums.counts
    replay_routes(actor.model.base_model)
    own = own_routes(moe_dir, sequences)
    actor(batch.routed(own))
    assert torch.equal(watch.sums.counts, expected)
    assert expected.tolist() == [sum((routes == expert).sum() for routes in own) for expert in range(EXPERTS)]


def test_replayed_choice_of_four_experts_by_hand():
    logits = torch.tensor([[0.0, np.log(2.0), np.log(5.0), np.log(2.0)]] * 3)  # probabilities 0.1, 0.2, 0.5, 0.2
    own = torch.tensor([[2, 1]] * 3)
    routes = torch.tensor([[0, 3], [-1, -1], [1, 2]], dtype=torch.int16)
    weights, experts = replayed_choice(logits, own, routes.long(), normalize=False)
    assert experts.tolist() == [[3, 0], [2, 1], [2, 1]]
    torch.testing.assert_close(weights, torch.tensor([[0.2, 0.1], [0.5, 0.2], [0.5, 0.2]]))
    weights, _ = replayed_choice(logits, own, routes.long(), normalize=True)
    torch.testing.assert_close(weights, torch.tensor([[2 / 3, 1 / 3], [5 / 7, 2 / 7], [5 / 7, 2 / 7]]))


def test_routes_lie_where_the_tokens_are():
    routes = [np.array([[[1], [2]]]), np.zeros((0, 2, 1), np.uint8), np.array([[[300], [4]], [[5], [6]]], np.uint16)]
    sequences = [[7, 8], [9], [10, 11]]
    packed = TokenBatch.packed(sequences).routed(routes).routes
    assert packed.dtype == torch.int16
    assert packed[0, :, :, 0].tolist() == [[1, 2], [-1, -1], [-1, -1], [300, 4], [5, 6]]
    padded = TokenBatch.padded(sequences, 0).routed(routes).routes
    assert padded[..., 0].tolist() == [[[1, 2], [-1, -1]], [[-1, -1], [-1, -1]], [[300, 4], [5, 6]]]


@pytest.mark.parametrize(("routes", "message"), [([2, 1], r"\(2, 1\) tokens"), ([3, 1, 2], r"\(3, 1, 2\)")])
def test_routes_of_more_tokens_or_other_sequences_are_refused(routes, message):
    batch = TokenBatch.packed([[7, 8], [9], [10, 11]])
    with pytest.raises(DataError, match=message):
        batch.routed([random_routes(count) for count in routes])


def test_routes_of_another_model_are_refused(moe_dir):
    replay = replaying(moe_dir).model.base_model.router_replay
    replay.check(np.full((5, LAYERS, TOP_K), EXPERTS - 1, np.uint8))
    replay.check(random_routes(0))
    others = [np.zeros((rows, 3, TOP_K), int) for rows in (5, 0)]
    for routes in (*others, np.zeros((5, LAYERS, 1), int), np.full((5, LAYERS, TOP_K), EXPERTS)):
        with pytest.raises(DataError, match=r"(?s)the model has 2 layers with 2 .*, of 4\n\nhint: generate with"):
            replay.check(routes)


def test_models_without_experts_or_with_unknown_routers_are_refused(qwen2_dir, moe_dir):
    check_replays(load_config(moe_dir))
    with pytest.raises(ConfigError, match=r"(?s)a qwen2 model has none\n\nhint: drop ``routing_replay``"):
        replay_routes(load_actor(qwen2_dir, dtype="float32").model.base_model)
    with pytest.raises(ConfigError, match=r"(?s)not those of a olmoe model\n\nhint: drop ``routing_replay``"):
        check_replays(OlmoeConfig())
