"""A user's own policy loss and advantages in updates: the same weights as the built-in ones that they spell out, for
every split of the work."""

import numpy as np
import pytest
import torch

from rlhf_train.algorithms.own_code import OwnCode, OwnCodeError
from rlhf_train.algorithms.table import make_algorithm
from rlhf_train.algorithms.token_specs import CorrectionSpec
from rlhf_train.learning.advantages import advantages_and_returns
from rlhf_train.learning.columns import RolloutColumns
from rlhf_train.learning.experience import Experience
from rlhf_train.losses.own import OwnTokenLoss, own_advantages
from split_cases import NUM_ROLLOUTS, TOLERANCE, Case, all_cases, grouped_rollouts, largest_difference, split_model
from trainer_testing import random_rollouts, run_ranks

PPO = """
import torch

def policy_loss(logprobs, old_logprobs, advantages, loss_mask, rollout_logprobs):
    ratio = torch.exp((logprobs - old_logprobs).masked_fill(~loss_mask, 0.0))
    loss = -torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)
    return loss, {"ratio": ratio, "engine": rollout_logprobs}
"""
GRPO = """
import torch

def advantages(rewards, group_ids):
    result = torch.zeros_like(rewards)
    for group in group_ids.unique():
        own = rewards[group_ids == group]
        result[group_ids == group] = (own - own.mean()) / (own.std(correction=0) + 1e-6)
    return result
"""
# Everything that stands beside the loss of a token: weights of the correction, KL and entropy terms, a reduction.
TERMS = {
    "kl_coef": 0.05, "use_kl_loss": True, "kl_estimator": "k3", "entropy_coef": 0.01,
    "reduction": "seq_mean_token_mean", "correction": CorrectionSpec(level="token", low=0.5, high=1.5),
}  # fmt: skip
LOSS = {"own_policy_loss": OwnCode("policy_loss", "/nowhere/loss.py", PPO)}
ADVANTAGES = {"own_advantages": OwnCode("advantages", "/nowhere/advantages.py", GRPO)}
# By hand and built in.
PAIRS = {
    "loss": (make_algorithm("group_norm", **TERMS, **LOSS), make_algorithm("group_norm", **TERMS)),
    "advantages": (make_algorithm(**TERMS, **ADVANTAGES), make_algorithm("group_norm", **TERMS)),
}
SPLITS = {
    "whole": {},
    "packed": {"packing": True, "micro_batch_tokens": 60},
}
RANKS = {"ranks": {"micro_batch_size": 5}, "divided sequences": {"packing": True, "sequence_parallel_size": 2}}


def cases(splits):
    return {
        (split, name, kind): Case(algorithm=pair[kind == "built in"], **options)
        for split, options in splits.items()
        for name, pair in PAIRS.items()
        for kind in ("by hand", "built in")
    }


@pytest.fixture(scope="module")
def ran(tmp_path_factory):
    path = split_model(tmp_path_factory.mktemp("model"))
    return run_ranks(all_cases, 1, path, cases(SPLITS))[0] | run_ranks(all_cases, 2, path, cases(RANKS))[0]


@pytest.mark.parametrize("name", PAIRS)
@pytest.mark.parametrize("split", [*SPLITS, *RANKS])
def test_function_that_spells_a_built_in_one_out_gives_the_same_update(ran, split, name):
    mine, builtin = ran[split, name, "by hand"], ran[split, name, "built in"]
    if name == "loss":
        assert largest_difference(mine["weights"], builtin["weights"]) == 0.0
    # Advantages are computed in float32 here, and in float64 there.
    assert largest_difference(mine["weights"], builtin["weights"]) < TOLERANCE
    assert largest_difference(mine["advantages"], builtin["advantages"]) < 2e-5
    assert largest_difference(mine["weights"], ran["whole", name, "by hand"]["weights"]) < TOLERANCE


# On ranks with rollouts of their own, each has the metrics of its part.
@pytest.mark.parametrize("split", [*SPLITS, "divided sequences"])
def test_metrics_of_a_loss_are_means_over_the_trained_tokens_of_the_step(ran, split):
    metrics = ran[split, "loss", "by hand"]["metrics"]
    rollouts = grouped_rollouts(NUM_ROLLOUTS)
    sampled = np.concatenate(
        [span.logprobs for rollout in rollouts for span in rollout.spans if span.logprobs is not None]
    )
    assert metrics["policy/own_engine"] == pytest.approx(sampled.mean(), rel=1e-5)
    assert metrics["policy/own_ratio"] == pytest.approx(metrics["policy/ratio"], rel=1e-6)
    assert "policy/clip_fraction" not in metrics and "policy/clip_fraction" in ran[split, "loss", "built in"]["metrics"]


def divided_loss(by_place, rows):
    """Run a loss that divides by numbers of tokens: `by_place` of the trained ones, 2 and 1 in a row."""
    code = OwnCode(
        "policy_loss", "/nowhere/l.py", "def policy_loss(logprobs, advantages): return logprobs / advantages"
    )
    loss = OwnTokenLoss(code, torch.tensor([2, 1]), {"advantages": torch.tensor(by_place)})
    return loss(torch.tensor(rows, requires_grad=True))


def divided_advantages(monkeypatch, rewards, body):
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 1)
    monkeypatch.setattr(torch.distributed, "all_gather_object", lambda parts, own: parts.__setitem__(0, own))
    mask = torch.tensor([[True, True], [True, False], [False, False]])
    own = {"rewards": torch.tensor(rewards), "group_ids": ["a", "a", "b"], "loss_mask": mask}
    code = OwnCode("advantages", "/nowhere/a.py", f"def advantages(rewards, loss_mask): return {body}")
    return own_advantages(code, range(3), own, counts=True)


def test_function_that_makes_nan_of_finite_tensors_is_blamed_and_not_the_model(monkeypatch):
    assert torch.equal(divided_loss([1.0, 2.0, 4.0], [2.0, 2.0, 2.0]), torch.tensor([2.0, 1.0, 0.5]))
    with pytest.raises(OwnCodeError, match=r"policy_loss of /nowhere/l.py gave NaN or infinity.*\n\nhint: "):
        divided_loss([1.0, 0.0, 4.0], [2.0, 2.0, 2.0])
    assert divided_loss([1.0, 2.0, 4.0], [2.0, np.nan, 2.0])[1].isnan()  # a model that has diverged

    # What a rollout without trained tokens gets is not used.
    by_length = divided_advantages(monkeypatch, [4.0, 5.0, 6.0], "rewards / loss_mask.sum(1)")
    assert torch.equal(by_length, torch.tensor([[2.0, 2.0], [5.0, 0.0], [0.0, 0.0]]))
    for body in ("rewards / (rewards - 4)", "(rewards / (rewards - 4))[:, None].expand(3, 2)"):
        with pytest.raises(OwnCodeError, match=r"advantages of /nowhere/a.py gave NaN or infinity.*\n\nhint: "):
            divided_advantages(monkeypatch, [4.0, 5.0, 6.0], body)
    assert divided_advantages(monkeypatch, [np.nan, 5.0, 6.0], "rewards * 1.0")[0].isnan().all()


def test_kl_of_the_reward_is_charged_to_advantages_of_your_own():
    experience = Experience(RolloutColumns.of(random_rollouts(8, vocab_size=9), [100.0] * 8))
    mask = experience.loss_mask
    rng = np.random.default_rng(0)
    old, reference, own = (torch.from_numpy(rng.normal(size=mask.shape)).float() for _ in range(3))
    experience.set_column("old_logprobs", old)
    experience.set_column("ref_logprobs", reference)
    spec = make_algorithm(kl_coef=0.5, **ADVANTAGES)
    device = torch.device("cpu")
    found, returns, _ = advantages_and_returns(experience, spec, None, kl_coef=0.25, device=device, own=own * mask)
    for row, places in enumerate(mask.numpy()):
        charged = 0.0
        for place in reversed(np.flatnonzero(places)):  # k1, of the tokens from here on
            charged += 0.25 * float(old[row, place] - reference[row, place])
            assert found[row, place] == pytest.approx(float(own[row, place]) - charged, abs=1e-5)
    assert not found[~mask].any() and torch.equal(found, returns)
