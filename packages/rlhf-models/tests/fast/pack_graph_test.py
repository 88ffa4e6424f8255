"""Packs filled up to one shape give the hidden states and gradients of packs as they come; a GPU test adds graphs."""

import numpy as np
import pytest
import torch

from rlhf_models.backbone import last_hidden_state, replay_full_packs, run_backbone
from rlhf_models.batch import TokenBatch
from rlhf_models.fast import pack_graph
from rlhf_models.fast.pack_graph import _NUM_EAGER, PackGraph, PackShape
from rlhf_models.loading import load_actor
from rlhf_models.testing import tiny_model_dir

NUM_TOKENS = 64


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny_model_dir(tmp_path_factory.mktemp("model"))


def packed(*lengths):
    rng = np.random.default_rng(sum(lengths))
    return TokenBatch.packed([rng.integers(5, 60, length) for length in lengths])


def graphed(folder, num_tokens=NUM_TOKENS):
    """A backbone that has run packs of two or three, and captures a shape at the next; the sums of its gradients."""
    backbone = load_actor(folder, dtype="float32", packing=True).model.base_model
    sums = {weight: torch.zeros_like(weight) for weight in backbone.parameters()}
    backbone.pack_graph = PackGraph(backbone, num_tokens, sums, uses_graphs=False)
    for index in range(_NUM_EAGER - 1):
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


@pytest.mark.parametrize("lengths", [(31,), (65,), (60, 5)])
def test_packs_that_do_not_fit_are_run_as_they_come(folder, lengths):
    backbone, sums = graphed(folder)
    assert backbone.pack_graph(packed(*lengths)) is None
    assert learn(backbone, packed(*lengths)).shape[1] == sum(lengths)
    assert not flat(sums.values()).any()


def shape_run(backbone, *lengths):
    """The shape that runs a pack: tokens and longest sequence; None without one."""
    hidden = backbone.pack_graph(packed(*lengths))
    if hidden is None:
        return None
    [shape] = [shape for shape, passes in backbone.pack_graph._passes.items() if passes.awaits_backward]
    return shape.num_tokens, shape.longest


FULL = (NUM_TOKENS, 48)  # the longest sequence of `graphed` has 33 tokens
SMALL = (20, 24)  # it needs fillers of 20 tokens


# A capture costs as much as the fillers of three packs, which are 192 tokens, unless `limits` say otherwise.
@pytest.mark.parametrize(
    ("limits", "packs", "shapes"),
    [
        ({}, [SMALL] * 12, [FULL] * 9 + [(44, 32)] * 3),
        ({"_CAPTURE_FLOP": 6 * 100}, [SMALL] * 16, [FULL] * 14 + [(44, 32)] * 2),  # 100 tokens more
        ({}, [(33, 8)] * 8 + [(20, 12)] * 3, [FULL] * 8 + [(32, 32)] * 3),  # 8 x 23 + 32
        ({}, [(n, 20) for n in range(20, 36)], [FULL] * 9 + [(49, 32)] + [FULL] * 6),  # 24 + 23 + ... + 15
        ({}, [(49, 1)] * 16 + [(50, 2), SMALL], [None] * 15 + [(64, 64)] * 2 + [FULL]),  # too long for the first
        ({}, [(2,) * 30] * 17, [None] * 15 + [FULL] * 2),  # too many for the first
        ({"_IDLE_SHARE": 0.5}, [(16,) * 4] * 4, [FULL] * 2 + [(64, 16)] * 2),  # (6 x 48 - 7 x 16) / 2 each
        ({"_MAX_GRAPHS": 2}, [SMALL] * 12 + [(49, 1)] * 17, [FULL] * 12 + [(64, 64)] * 17),
        ({"_MAX_GRAPHS": 1}, [SMALL] * 12 + [(49, 1)] * 17, [FULL] * 12 + [None] * 17),
    ],
)
def test_shapes_are_captured_when_they_would_have_spared_what_a_capture_costs(
    folder, monkeypatch, limits, packs, shapes
):
    backbone, _ = graphed(folder)
    num_weights = sum(weight.numel() for weight in backbone.parameters())
    monkeypatch.setattr(pack_graph, "_LONGEST_STEP", 16)
    for name, value in ({"_IDLE_SHARE": 0, "_CAPTURE_FLOP": 0} | limits).items():
        monkeypatch.setattr(pack_graph, name, value * num_weights if name == "_CAPTURE_FLOP" else value)
    assert [shape_run(backbone, *lengths) for lengths in [(30, 33), *packs]] == [FULL, *shapes]


def test_packs_far_below_the_budget_have_shapes_of_their_own_size(folder):
    backbone, _ = graphed(folder, 1280)
    shapes = [shape_run(backbone, *lengths) for lengths in ((30, 33), (40, 30), (36,), (1200,), (36,))]
    # 63 tokens and 7 more, in steps of 10; 36 are less than half of 1200.
    assert shapes == [(70, 128), (70, 128), (70, 128), None, None]


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
    monkeypatch.setattr(pack_graph, "_CAPTURE_FLOP", 0)
    monkeypatch.setattr(pack_graph, "_CAPTURE_PASSES", 1e-3)
    backbone, _ = graphed(folder)
    backbone.pack_graph.uses_graphs = True
    found = [shape_run(backbone, total)[0] for total in (60, 48, 44, 40, 36)]
    assert found == [NUM_TOKENS, 48, 44, 44, 44]
    assert caplog.text.count("they take 40 MiB, 50 MiB are left") == 1


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
