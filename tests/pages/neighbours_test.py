"""Sentences about this project, in the pages for those who come from others, are what its code computes."""

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from page_commands import ROOT
from rlhf_cli.commands.ppo import COMMAND_LINE
from rlhf_cli.config.algorithm import AlgorithmSection
from rlhf_data.examples.preference import PreferenceExample
from rlhf_data.examples.sft import SftExample
from rlhf_kernels import PolicyStream, packed_policy_loss
from rlhf_models.loading import load_actor
from rlhf_models.testing import tiny_model_dir
from rlhf_train.algorithms.group import group_normalized
from rlhf_train.algorithms.kl import kl_estimate
from rlhf_train.batching import Denominators
from rlhf_train.offline.objectives.dpo import PreferenceObjective

GIVEN = ("--pretrain", "m", "--prompt_data", "p.jsonl", "--remote_rm_url", "r.py", "--n_samples_per_prompt", "4")


def page(name: str) -> str:
    return " ".join((ROOT / f"docs/coming-from-{name}.md").read_text(encoding="utf-8").split())


ALGORITHMS = " ".join((ROOT / "docs/algorithms.md").read_text(encoding="utf-8").split())
TRL, VERL, OPENRLHF = page("trl"), page("verl"), page("openrlhf")


def section(*flags: str) -> AlgorithmSection:
    return COMMAND_LINE.parse([*GIVEN, *flags]).config.algorithm


def gradients(spec, *, log_ratios: list[float], advantage: float, ref_gaps: list[float] | None = None):
    """Return the loss of one response and its gradient by each log-prob. `ref_gaps` are log pi - log ref."""
    old = -torch.tensor(log_ratios)
    count = len(log_ratios)
    stream = PolicyStream(
        advantages=torch.full((count,), advantage),
        loss_mask=torch.ones(count, dtype=torch.bool),
        cu_seqlens=torch.tensor([0, count]),
        num_tokens=count,
        num_sequences=1,
        max_tokens=count,
        old_logprobs=old,
        ref_logprobs=None if ref_gaps is None else -torch.tensor(ref_gaps),
    )
    logprobs = torch.zeros(count, requires_grad=True)
    loss, _ = packed_policy_loss(logprobs, stream, spec.objective)
    loss.backward()
    return loss.item(), logprobs.grad.tolist()


def test_deviation_of_two_rewards_and_of_one():
    for text, there in ((TRL, "0.7070"), (VERL, "0.7071")):
        assert f"two rewards 1 and 0 give {there} there and 0.999998 here" in text
    assert "For a group with the rewards 1 and 0 the advantages are 0.999998 and -0.999998 here" in ALGORITHMS
    assert group_normalized(np.array([1.0, 0.0]), ["a", "a"]).round(6).tolist() == [0.999998, -0.999998]
    # With n - 1 and their constants, by hand: 0.5 / (sqrt(1/2) + constant).
    assert [round(0.5 / (math.sqrt(0.5) + constant), 4) for constant in (1e-4, 1e-6)] == [0.7070, 0.7071]
    assert "A group of one response has the advantage 0 here" in ALGORITHMS and "its reward there and 0 here" in VERL
    assert group_normalized(np.array([3.0]), ["a"]).tolist() == [0.0]
    assert "the two differ by a factor of 1.07" in ALGORITHMS and round(math.sqrt(8 / 7), 2) == 1.07


@pytest.mark.parametrize(("estimator", "bound"), [("k1", 20.0), ("k2", 200.0), ("k3", 10.0)])
def test_bounds_of_the_kl(estimator, bound):
    assert "d is clamped to +-20 nats for all three, and k3 to at most 10 nats per token" in ALGORITHMS
    assert "verl bounds k3 alone, here all three are bounded" in VERL
    logprobs = torch.zeros(1, requires_grad=True)
    kl = kl_estimate(logprobs, torch.tensor([-50.0 if estimator != "k3" else 50.0]), estimator)
    kl.backward()
    assert kl.item() == bound and logprobs.grad.item() == 0.0  # "At a bound the gradient is 0."


def test_beta_is_k3_with_the_gradient_of_the_ratio_whose_weight_is_at_most_10():
    row = "`beta` | `--init_kl_coef`, with `--use_kl_loss --kl_estimator k3 --kl_unbiased_gradient` | 0.01 by default"
    assert row in TRL and "here the weight in this gradient is at most 10, and the metric stays k3" in TRL
    assert "use the gradient r d grad log pi for all estimators, with r at most 10" in ALGORITHMS
    given = section("--use_kl_loss", "--kl_estimator", "k3", "--kl_unbiased_gradient")
    assert given.init_kl_coef == 0.01
    spec = section(
        "--advantage_estimator", "reinforce", "--init_kl_coef", "1", "--use_kl_loss", "--kl_estimator", "k3",
        "--kl_unbiased_gradient",
    ).spec()  # fmt: skip
    for log_ratio, weight in ((math.log(2), 2.0), (9.0, 10.0)):
        loss, (slope,) = gradients(spec, log_ratios=[log_ratio], advantage=0.0, ref_gaps=[0.5])
        assert slope == pytest.approx(weight * 0.5)
        assert loss == pytest.approx(math.exp(-0.5) - 1 + 0.5)


def test_rloo_clips_the_ratio_of_each_token():
    assert "the ratio of each token is clipped, in TRL the ratio of the whole response" in TRL
    # The ratios 1.5 and 1 / 1.5 have the product 1: that of the whole response is not clipped.
    spec = section("--advantage_estimator", "rloo", "--init_kl_coef", "0").spec()
    gap = math.log(1.5)
    _, slopes = gradients(spec, log_ratios=[gap, -gap], advantage=1.0)
    assert slopes == pytest.approx([0.0, -1 / 1.5])


def test_likelihood_of_orpo_covers_the_chosen_answer_and_not_its_prompt(tmp_path):
    assert "the likelihood term covers the chosen answer, as in the paper, and in TRL also its prompt" in TRL
    actor = load_actor(str(tiny_model_dir(tmp_path)), dtype="float32")
    tokens = np.array([3, 7, 11, 5, 9, 4])
    pair = [SftExample("row", tokens[:length], np.arange(length) >= 3) for length in (6, 5)]
    engine = SimpleNamespace(forward=actor, device=torch.device("cpu"), module=actor)
    objective = PreferenceObjective(loss_type="orpo", beta=1e-9)  # the likelihood alone is left
    items = objective.items([PreferenceExample("pair", *pair)])
    loss, _ = objective.loss(engine, items, Denominators(5, 1, 6))
    with torch.no_grad():
        logprobs = actor.model(torch.from_numpy(tokens)[None]).logits[0].double().log_softmax(-1)
    own = [logprobs[at - 1, tokens[at]].item() for at in (3, 4, 5)]
    assert loss.item() == pytest.approx(-sum(own) / 3, rel=1e-5)
