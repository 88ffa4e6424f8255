"""The load-balancing loss against transformers' own and against float64 by hand, gradients included; and how
`LoadBalance` puts it together from passes."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

from rlhf_data.errors import ConfigError
from rlhf_models.batch import TokenBatch
from rlhf_models.experts.routing import RouterWatch, router_sums
from rlhf_rollout.host import free_port
from rlhf_train.engine import accelerate
from rlhf_train.engine.process_group import init_process_group
from rlhf_train.losses.balance import balance_loss
from rlhf_train.run.load_balance import LoadBalance, load_balance
from rlhf_train.specs import ModelSpec

TOP_K = 2


@pytest.fixture(scope="module", autouse=True)
def alone():
    init_process_group(rank=0, world_size=1, master=("127.0.0.1", free_port()), device="cpu")


def some_logits(num_tokens, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(num_tokens, 4, generator=generator, requires_grad=True) for _ in range(3)]


def loss_of(logits, mask=None):
    sums = router_sums(logits, TOP_K, mask)
    return balance_loss(sums.probs, sums.counts, sums.num_rows)


@pytest.mark.parametrize("masked", [False, True])
def test_balance_loss_of_one_pass_is_that_of_transformers_with_its_gradient(masked):
    ours, theirs = some_logits(9), some_logits(9)
    mask = torch.tensor([True, True, False] * 3) if masked else None
    loss = loss_of(ours, mask)
    expected = load_balancing_loss_func(tuple(theirs), 4, TOP_K, mask)
    assert float(loss) == pytest.approx(float(expected), rel=1e-6)
    loss.backward()
    expected.backward()
    for one, other in zip(ours, theirs, strict=True):
        assert one.grad.abs().max() > 1e-4
        torch.testing.assert_close(one.grad, other.grad, rtol=1e-4, atol=1e-8)


def test_balance_loss_by_hand():
    # Experts 0 and 1 get 3 and 1 of 4 rows: loss = 2 (3/4 (2.5/4) + 1/4 (1.5/4)), and its slopes are 2 f_e / 4.
    probs = torch.tensor([2.5, 1.5], dtype=torch.float64, requires_grad=True)
    loss = balance_loss(probs, torch.tensor([3.0, 1.0], dtype=torch.float64), torch.tensor(4.0))
    loss.backward()
    assert float(loss) == pytest.approx(2 * (0.75 * 0.625 + 0.25 * 0.375), abs=1e-12)
    assert probs.grad.tolist() == pytest.approx([2 * 0.75 / 4, 2 * 0.25 / 4], abs=1e-12)


def test_balance_loss_is_k_when_experts_are_used_equally_and_0_without_tokens():
    even = torch.full((4,), 0.25, dtype=torch.float64)  # of one row
    assert float(balance_loss(even, 2 * even, torch.tensor(1.0))) == pytest.approx(2.0, abs=1e-12)
    nothing = torch.zeros(4, dtype=torch.float64)
    assert float(balance_loss(nothing, nothing, torch.tensor(0.0))) == 0.0


def see(watch, logits):
    """Have a watch see a pass of one sequence."""
    watch.see(logits, TokenBatch.packed([[0] * len(logits[0])]))


def learn(parts, coef=0.3):
    """Run passes over parts of the tokens, given as logits and whether they count; return total loss and metric."""
    watch = RouterWatch(TOP_K)
    balance = LoadBalance(watch, coef)
    balance.count([(lambda logits=logits: see(watch, logits), has_rows) for logits, has_rows in parts])
    total, metric = torch.tensor(0.0), 0.0
    for logits, has_rows in parts:
        see(watch, logits)
        loss, part = balance.add_to(torch.tensor(1.0), has_rows=has_rows)
        total = total + loss
        metric += part.result()
    return total, metric


def test_split_into_passes_changes_neither_loss_nor_gradient():
    whole, split = some_logits(10), some_logits(10)
    expected = loss_of(whole)
    expected.backward()
    total, metric = learn([([layer[:7] for layer in split], True), ([layer[7:] for layer in split], True)])
    total.backward()
    assert metric == pytest.approx(float(expected), rel=1e-9)
    assert float(total) == pytest.approx(2.0 + 0.3 * float(expected), rel=1e-6)
    for one, other in zip(whole, split, strict=True):
        torch.testing.assert_close(other.grad, 0.3 * one.grad, rtol=1e-5, atol=1e-9)
    # The mean of the parts' own losses is another number.
    own = [float(loss_of([layer[a:b] for layer in whole])) for a, b in ((0, 7), (7, 10))]
    assert abs(0.7 * own[0] + 0.3 * own[1] - float(expected)) > 1e-3


def test_pass_of_a_rank_without_rows_adds_nothing():
    tokens, idle = some_logits(6), some_logits(2, seed=9)
    total, metric = learn([(tokens, True), (idle, False)])
    assert metric == pytest.approx(float(loss_of(some_logits(6))), rel=1e-9)
    total.backward()
    assert all(layer.grad.abs().max() > 0 for layer in tokens)
    assert all(float(layer.grad.abs().max()) == 0.0 for layer in idle)


def test_update_of_one_pass_needs_no_pass_before():
    watch = RouterWatch(TOP_K)
    balance = LoadBalance(watch, 0.5)
    for seed in (0, 1):  # each update counts anew
        balance.count([(lambda: pytest.fail("the only pass ran twice"), True)])
        see(watch, some_logits(5, seed))
        loss, metric = balance.add_to(torch.tensor(0.0), has_rows=True)
        expected = float(loss_of(some_logits(5, seed)))
        assert metric.result() == pytest.approx(expected, rel=1e-9)
        assert float(loss) == pytest.approx(0.5 * expected, rel=1e-6)
        assert watch.sums is None  # the graph of a pass is not kept


def test_layers_of_a_model_whose_routers_are_read_are_not_compiled(monkeypatch):
    monkeypatch.setattr(accelerate, "compile_unavailable_reason", lambda *args, **kwargs: None)
    compiled = []
    monkeypatch.setattr(accelerate, "compile_layers", compiled.append)
    spec = ModelSpec(path="m", packing=True, torch_compile="auto")
    balanced = SimpleNamespace(model="balanced")
    assert accelerate.compile_model(SimpleNamespace(model="plain"), spec, "cuda")
    assert not accelerate.compile_model(balanced, replace(spec, aux_loss_coef=0.1), "cuda")
    assert compiled == ["plain"]
    with pytest.raises(ConfigError, match="the load-balancing loss reads what routers compute"):
        accelerate.compile_model(balanced, replace(spec, aux_loss_coef=0.1, torch_compile="on"), "cuda")


def test_load_balance_without_a_coefficient_watches_nothing():
    backbone = SimpleNamespace()
    model = SimpleNamespace(model=SimpleNamespace(base_model=backbone))
    assert load_balance(model, ModelSpec(path="m")) is None
    assert not vars(backbone)
