"""Sequence parallelism on one rank whose neighbour is made up; rlhf-train has the tests on several ranks."""

from types import SimpleNamespace

import pytest
import torch
from transformers import Gemma4TextConfig

from rlhf_data.errors import ConfigError
from rlhf_models.attention.sequence_parallel import _Gather, check_heads, distributed, layer_configs

PARTS = {0: torch.tensor([[1.0, 2.0]]), 1: torch.tensor([[3.0, 4.0], [5.0, 6.0], [7.0, 8.0]])}
COUNTS = (1, 3)
GROUP = object()


@pytest.mark.parametrize("rank", [0, 1])
def test_gathered_values_are_those_of_all_ranks_in_order_and_a_rank_gets_its_own_gradient(monkeypatch, rank):
    def exchange(gathered, padded, group):
        assert group is GROUP
        whole = [torch.cat([part, torch.zeros(3 - len(part), 2)]) for part in PARTS.values()]
        assert torch.equal(padded, whole[rank])
        gathered.copy_(torch.cat(whole))

    monkeypatch.setattr(distributed, "get_rank", lambda group: rank)
    monkeypatch.setattr(distributed, "all_gather_into_tensor", exchange)
    own = PARTS[rank].clone().requires_grad_()
    found = _Gather.apply(own, COUNTS, GROUP)
    assert found.tolist() == [[1.0, 2.0], [3.0, 4.0], [5.0, 6.0], [7.0, 8.0]]
    weights = torch.arange(8.0).view(4, 2)
    (found * weights).sum().backward()
    assert torch.equal(own.grad, weights[:1] if rank == 0 else weights[1:])


def test_nothing_is_sent_where_no_rank_has_a_value(monkeypatch):
    monkeypatch.setattr(distributed, "get_rank", lambda group: 0)
    monkeypatch.setattr(distributed, "all_gather_into_tensor", lambda *parts, group: pytest.fail("sent"))
    assert _Gather.apply(torch.zeros(0, 2), (0, 0), GROUP).shape == (0, 2)


def test_ranks_must_divide_the_heads_of_every_layer():
    """Heads of keys and values are four in layers with a window and two in those without one, for eight of queries."""
    config = Gemma4TextConfig(num_attention_heads=8, num_global_key_value_heads=2, attention_k_eq_v=True)
    assert {own.num_key_value_heads for own in config.per_layer_config} == {2, 4}
    check_heads(config, 8)
    with pytest.raises(ConfigError, match=r"over 3 ranks .* the model has 8\n\nhint: use 2 or 4 or 8 ranks"):
        check_heads(config, 3)


def test_config_of_a_transformers_without_sizes_by_layer_is_that_of_all_layers():
    text = SimpleNamespace(num_attention_heads=4)
    assert layer_configs(SimpleNamespace(get_text_config=lambda: text)) == [text]
