"""The distance from a teacher over its likeliest tokens and the rest, against distributions of torch in float64."""

import pytest
import torch
from torch.distributions import Categorical, kl_divergence

from rlhf_train.algorithms.token_specs import DistributionSpec
from rlhf_train.losses import teacher as teacher_file
from rlhf_train.losses.teacher import TeacherTerm, coarse_divergence, most_likely

N, V = 6, 11


@pytest.fixture
def logits():
    """Of the policy and of the teacher, [2, N, V] float64."""
    return 2 * torch.randn(2, N, V, dtype=torch.float64, generator=torch.Generator().manual_seed(3))


@pytest.mark.parametrize("rows", [100, 4])
def test_most_likely_tokens_are_those_of_the_distribution_at_the_temperature(logits, rows, monkeypatch):
    monkeypatch.setattr(teacher_file, "MAX_BLOCK", V * rows)
    found = most_likely(logits[0].float(), 3, 0.7)
    expected = Categorical(logits=logits[0] / 0.7).probs.log()
    order = expected.argsort(dim=1, descending=True)[:, :3]
    assert found[:, :3].long().equal(order)
    assert found[:, 3:6].double().allclose(expected.gather(1, order), atol=1e-6)
    others = expected.exp().scatter(1, order, 0.0).sum(1).log()
    assert found[:, 6].double().allclose(others, atol=1e-6)


@pytest.mark.parametrize("top_k", [4, V])
def test_log_probs_of_tokens_that_have_none_are_finite_and_those_of_a_broken_teacher_are_not(logits, top_k):
    logits[0, :, 3:] = -torch.inf  # ids without a token; with all V there is no other either
    logits[0, 0, 1] = torch.nan
    finite = most_likely(logits[0].float(), top_k, 1.0).isfinite()
    assert finite[1:].all() and not finite[0].all()


def grouped(probs, ids):
    """The distribution over the tokens `ids` and all others, if there are any, as one."""
    chosen = probs.gather(1, ids)
    rest = [] if ids.shape[1] == V else [1 - chosen.sum(1, keepdim=True)]
    return Categorical(probs=torch.cat([chosen, *rest], dim=1))


@pytest.mark.parametrize("top_k", [1, 4, V])
@pytest.mark.parametrize(("divergence", "beta"), [("forward_kl", 0.5), ("reverse_kl", 0.5), ("jsd", 0.2)])
def test_divergence_and_its_gradient_equal_those_of_the_grouped_distributions(logits, top_k, divergence, beta):
    policy, teacher = logits[0].requires_grad_(), logits[1].softmax(-1)
    column = most_likely(logits[1], top_k, 1.0).detach()
    term = TeacherTerm(column, DistributionSpec(top_k=top_k, divergence=divergence, jsd_beta=beta), 1.0)
    p, q = grouped(policy.softmax(-1), term.ids), grouped(teacher, term.ids)
    if divergence == "jsd":
        m = Categorical(probs=beta * q.probs + (1 - beta) * p.probs)
        expected = beta * kl_divergence(q, m) + (1 - beta) * kl_divergence(p, m)
    else:
        expected = kl_divergence(q, p) if divergence == "forward_kl" else kl_divergence(p, q)
    own = policy.detach().float().requires_grad_()
    found = term(own.log_softmax(-1).gather(1, term.ids))
    assert found.tolist() == pytest.approx(expected.tolist(), abs=2e-6) and found.min() > -1e-6
    assert term.divergence.equal(found.detach())
    weights = torch.arange(1.0, N + 1)
    (found * weights).sum().backward()
    (exact,) = torch.autograd.grad((expected * weights).sum(), policy)
    assert own.grad.double().allclose(exact, atol=1e-5)


def test_grouping_never_adds_to_the_divergence_and_leaves_it_whole_with_all_tokens(logits):
    whole = kl_divergence(Categorical(logits=logits[0]), Categorical(logits=logits[1])).tolist()
    found = []
    for top_k in range(1, V + 1):
        column = most_likely(logits[1], top_k, 1.0)
        ids, target = column[:, :top_k].long(), column[:, top_k:]
        logprobs = logits[0].log_softmax(-1).gather(1, ids)
        found.append(coarse_divergence(logprobs, target, DistributionSpec(top_k=top_k)))
    assert found[-1].tolist() == pytest.approx(whole, abs=1e-5)
    assert (torch.stack(found).diff(dim=0) > -1e-5).all()


@pytest.mark.parametrize("divergence", ["forward_kl", "reverse_kl", "jsd"])
def test_tokens_without_probability_and_equal_distributions_have_no_distance(divergence):
    logprobs = torch.tensor([[0.5, 0.5, 0.0], [1.0, 0.0, 0.0]]).log().requires_grad_()
    target = torch.cat([logprobs.detach(), torch.full((2, 1), -torch.inf)], dim=1)
    found = coarse_divergence(logprobs, target, DistributionSpec(divergence=divergence))
    (gradient,) = torch.autograd.grad(found.sum(), logprobs)
    assert found.tolist() == pytest.approx([0.0, 0.0], abs=1e-6)
    assert gradient.isfinite().all()
