"""Packs filled up to one shape give the hidden states and gradients of packs as they come; a GPU test adds graphs."""

import numpy as np
import pytest
import torch

from rlhf_models.backbone import last_hidden_state, replay_full_packs, run_backbone
from rlhf_models.batch import TokenBatch
from rlhf_models.fast import pack_graph
from rlhf_models.fast.pack_graph import _NUM_SEEN, PackGraph, PackShape
from rlhf_models.loading import load_actor
from rlhf_models.testing import tiny_model_dir

NUM_TOKENS = 64


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny_model_dir(tmp_path_factory.mktemp("model"))


def packed(*lengths):
    rng = np.random.default_rng(sum(lengths))
    return TokenBatch.packed([rng.integers(5, 60, length) for length in lengths])


def graphed(folder):
    """A backbone whose passes have learned their shape from packs of two or three, and the sums of its gradients."""
    backbone = load_actor(folder, dtype="float32", packing=True).model.base_model
    sums = {weight: torch.zeros_like(weight) for weight in backbone.parameters()}
    backbone.pack_graph = PackGraph(backbone, NUM_TOKENS, sums, uses_graphs=False)
    for index in range(_NUM_SEEN):
        assert backbone.pack_graph(packed(30, 31) if index % 2 else packed(20, 10, 33)) is None
    return backbone, sums


def learn(backbone, batch):
    """Hidden states, and the gradient of a weighted sum of them."""
    hidden = last_hidden_state(backbone, batch)
    torch.manual_seed(0)
    (hidden * torch.randn(hidden.shape)).sum().backward()
    return hidden.detach().clone()


def flat(tensors):
    return torch.cat([tensor.flatten() for tensor in tensors])


def gradients(backbone):
    return flat(weight.grad for weight in backbone.parameters())


@pytest.mark.parametrize(
    ("lengths", "bounds"),
    [
        ((5, 5), [0, 5, 10, 10, 10]),
        ((5, 1), [0, 5, 6, 10, 10]),
        ((1,), [0, 1, 6, 10, 10]),
        ((1, 1, 3, 5), [0, 1, 2, 5, 10]),
        ((6, 1), None),
        ((5, 5, 1), None),
        ((1, 1, 1, 1), None),
    ],
)
def test_bounds_fill_a_pack_up(lengths, bounds):
    assert PackShape(num_tokens=10, num_sequences=4, longest=5).bounds(lengths) == bounds


@pytest.mark.parametrize("lengths", [(30, 34), (64,), (32,), (20, 20, 19), (1, 50)])
def test_filled_packs_give_hidden_states_and_gradients_of_plain_ones(folder, lengths):
    plain = load_actor(folder, dtype="float32", packing=True).model.base_model
    backbone, sums = graphed(folder)
    batch = packed(*lengths)
    for _ in range(2):
        got = learn(backbone, batch)
        want = learn(plain, batch)
        torch.testing.assert_close(got, want, atol=2e-5, rtol=1e-4)
        torch.testing.assert_close(flat(sums.values()), gradients(plain), atol=2e-5, rtol=1e-4)
    assert all(weight.grad is None for weight in backbone.parameters())


def test_layers_get_positions_of_one_form_from_plain_and_from_filled_packs(folder):
    """torch.compile would compile them again for another stride or offset, or for a view."""
    backbone, _ = graphed(folder)
    forms = []

    def note(layer, args, arguments):
        positions = arguments["position_ids"]
        forms.append((positions.stride(), positions.storage_offset(), positions._base))

    backbone.layers[0].register_forward_pre_hook(note, with_kwargs=True)
    run_backbone(backbone, packed(30, 34))
    last_hidden_state(backbone, packed(30, 34))
    assert forms == [((NUM_TOKENS, 1), 0, None)] * 2


def test_filled_packs_follow_weights_that_change_in_place(folder):
    plain = load_actor(folder, dtype="float32", packing=True).model.base_model
    backbone, _ = graphed(folder)
    learn(backbone, packed(30, 31))
    for model in (plain, backbone):
        for weight in model.parameters():
            weight.data.mul_(1.5)
    torch.testing.assert_close(learn(backbone, packed(20, 40)), learn(plain, packed(20, 40)), atol=2e-5, rtol=1e-4)


def test_filled_packs_leave_frozen_weights(folder):
    backbone, sums = graphed(folder)
    frozen = next(backbone.layers[0].parameters())
    frozen.requires_grad_(False)
    del sums[frozen]
    learn(backbone, packed(30, 31))
    assert all(total.any() for total in sums.values())


@pytest.mark.parametrize("lengths", [(31,), (65,), (60, 5), (2,) * 28])
def test_packs_that_do_not_fit_are_run_as_they_come(folder, lengths):
    backbone, sums = graphed(folder)
    assert backbone.pack_graph(packed(*lengths)) is None
    assert learn(backbone, packed(*lengths)).shape[1] == sum(lengths)
    assert not flat(sums.values()).any()


def sizes(backbone):
    return [shape.num_tokens for shape in backbone.pack_graph._passes]


def test_first_graph_takes_packs_of_all_sizes_and_the_last_is_kept_for_a_longer_sequence(folder, monkeypatch):
    monkeypatch.setattr(pack_graph, "_LONGEST_STEP", 16)
    monkeypatch.setattr(pack_graph, "_MAX_GRAPHS", 8)
    backbone, _ = graphed(folder)
    for total in range(40, 50):
        learn(backbone, packed(20, total - 20))
    shapes = list(backbone.pack_graph._passes)
    assert [(shape.num_tokens, shape.longest) for shape in shapes] == [
        (NUM_TOKENS, 48),
        *((total, 32) for total in range(41, 47)),
    ]
    learn(backbone, packed(50))
    assert [(shape.num_tokens, shape.longest) for shape in backbone.pack_graph._passes][-1] == (NUM_TOKENS, 64)
    for lengths, number in (((20, 19), 1), ((40, 2), 0), ((20, 40), 0), ((1, 60), -1)):
        hidden = last_hidden_state(backbone, packed(*lengths))
        assert list(backbone.pack_graph._passes.values())[number].awaits_backward
        hidden.sum().backward()
    assert len(backbone.pack_graph._passes) == 8


def test_packs_with_longer_sequences_have_a_graph_of_their_own(folder, monkeypatch):
    monkeypatch.setattr(pack_graph, "_LONGEST_STEP", 16)
    plain = load_actor(folder, dtype="float32", packing=True).model.base_model
    backbone, _ = graphed(folder)
    for lengths in ((30, 34), (30, 30), (10, 50), (31, 29), (20, 20, 20)):
        torch.testing.assert_close(
            learn(backbone, packed(*lengths)), learn(plain, packed(*lengths)), atol=2e-5, rtol=1e-4
        )
    assert [(shape.num_tokens, shape.longest) for shape in backbone.pack_graph._passes] == [
        (64, 48),
        (60, 32),
        (60, 64),
    ]


def test_padding_token_gets_no_gradient_where_the_embedding_leaves_it_out(folder):
    plain = load_actor(folder, dtype="float32", packing=True).model.base_model
    backbone, sums = graphed(folder)
    for model in (plain, backbone):
        model.get_input_embeddings().padding_idx = 7
    batch = TokenBatch.packed([[7, 9, 7, 11] * 8, [7] * 3 + [9] * 25])
    learn(plain, batch)
    learn(backbone, batch)
    torch.testing.assert_close(flat(sums.values()), gradients(plain), atol=2e-5, rtol=1e-4)
    assert sums[backbone.get_input_embeddings().weight][9].any()
    assert not sums[backbone.get_input_embeddings().weight][7].any()


class Scaled(torch.nn.Embedding):
    """As in models that scale what they look up."""

    def forward(self, token_ids):
        return super().forward(token_ids) * 3.0


@pytest.mark.parametrize("change", ["scaled", "frozen", "changed in place", "by frequency"])
def test_embeddings_of_other_kinds_get_their_gradients(folder, change):
    plain = load_actor(folder, dtype="float32", packing=True).model.base_model
    backbone, sums = graphed(folder)
    for model in (plain, backbone):
        embedding = model.get_input_embeddings()
        if change == "scaled":
            embedding.__class__ = Scaled
        elif change == "frozen":
            embedding.weight.requires_grad_(False)
        elif change == "changed in place":
            model.layers[0].register_forward_pre_hook(lambda layer, inputs: (inputs[0].mul_(2.0), *inputs[1:]))
        else:
            embedding.scale_grad_by_freq = True
    if change == "frozen":
        del sums[backbone.get_input_embeddings().weight]
    batch = TokenBatch.packed([[7, 9, 7, 11] * 8, [7] * 3 + [9] * 25])
    torch.testing.assert_close(learn(backbone, batch), learn(plain, batch), atol=2e-5, rtol=1e-4)
    want = [weight.grad for weight in plain.parameters() if weight.requires_grad]
    torch.testing.assert_close(flat(sums.values()), flat(want), atol=1e-4, rtol=1e-4)


def test_padded_batches_evaluation_and_passes_without_gradient_are_run_as_they_come(folder):
    backbone, _ = graphed(folder)
    assert backbone.pack_graph(TokenBatch.padded([range(5, 61)], 0)) is None
    with torch.no_grad():
        assert backbone.pack_graph(packed(30, 30)) is None
    assert backbone.eval().pack_graph(packed(30, 30)) is None


def test_pass_is_kept_until_its_backward_pass(folder):
    plain = load_actor(folder, dtype="float32", packing=True).model.base_model
    backbone, sums = graphed(folder)
    first, second = packed(30, 31), packed(20, 40)
    hidden = last_hidden_state(backbone, first)
    assert backbone.pack_graph(second) is None
    assert learn(backbone, second) is not None
    backbone.zero_grad()
    hidden.sum().backward()
    last_hidden_state(plain, first).sum().backward()
    torch.testing.assert_close(flat(sums.values()), gradients(plain), atol=2e-5, rtol=1e-4)
    assert backbone.pack_graph(second) is not None


def test_pass_whose_result_is_dropped_does_not_hold_the_next_up(folder):
    plain = load_actor(folder, dtype="float32", packing=True).model.base_model
    backbone, sums = graphed(folder)
    hidden = last_hidden_state(backbone, packed(30, 31))
    assert backbone.pack_graph(packed(20, 40)) is None
    del hidden
    torch.testing.assert_close(learn(backbone, packed(20, 40)), learn(plain, packed(20, 40)), atol=2e-5, rtol=1e-4)
    torch.testing.assert_close(flat(sums.values()), gradients(plain), atol=2e-5, rtol=1e-4)
    assert all(weight.grad is None for weight in backbone.parameters())


def test_passes_whose_graphs_cannot_be_captured_are_run_as_they_come(folder, caplog, monkeypatch):
    def fail(*passes):
        raise torch.OutOfMemoryError("no memory")

    monkeypatch.setattr(pack_graph, "capture", fail)
    backbone, sums = graphed(folder)
    backbone.pack_graph.uses_graphs = True
    for _ in range(2):
        assert learn(backbone, packed(30, 30)).shape[1] == 60
    assert caplog.text.count("no memory") == 1
    assert not flat(sums.values()).any()


def test_graphs_beside_which_a_plain_pass_does_not_fit_are_given_up(folder, caplog, monkeypatch):
    # Each takes 10 MiB: three times 10 are within 50 of 1.5 times what is left, four are not.
    monkeypatch.setattr(pack_graph, "capture", lambda warm_up, passes, pool: (10 << 20, 50 << 20))
    backbone, _ = graphed(folder)
    backbone.pack_graph.uses_graphs = True
    for total in (60, 40, 44, 48, 52):
        learn(backbone, packed(total))
    assert sizes(backbone) == [NUM_TOKENS, 40, 44]
    assert caplog.text.count("they take 40 MiB, 50 MiB are left") == 1
    assert backbone.pack_graph(packed(46)) is not None


@pytest.mark.parametrize(
    ("fields", "is_replayed"),
    [({}, True), ({"num_local_experts": 8}, False), ({"_attn_implementation": "sdpa"}, False)],
)
def test_replay_full_packs_leaves_models_with_experts_or_other_attention(folder, fields, is_replayed):
    backbone = load_actor(folder, dtype="float32", packing=True).model.base_model
    for name, value in fields.items():
        setattr(backbone.config, name, value)
    replay_full_packs(backbone, NUM_TOKENS, {})
    assert hasattr(backbone, "pack_graph") == is_replayed
