"""The packed operator of `rlhf_kernels` computes what the trainer's own terms do: loss, gradients and metrics."""

import itertools

import pytest
import torch

from rlhf_kernels import POLICY_METRICS, PolicyObjective, PolicyStream, packed_policy_loss
from rlhf_kernels.ops.packed_policy_loss import terms
from rlhf_train import kl
from rlhf_train.algorithms import POLICY_LOSSES, REDUCTIONS, AlgorithmSpec
from rlhf_train.batching import Denominators
from rlhf_train.corrections import bounded_weights, importance_weights
from rlhf_train.losses import policy
from rlhf_train.metrics import results
from rlhf_train.online.terms import actor_loss

DENOMINATORS = Denominators(num_tokens=60, num_sequences=7, max_tokens=12)
LENGTHS = [12, 3, 9, 1]


def batch():
    """Padded columns [4, 12] in float32: random, with equal, far and extreme ratios, and a rollout of no tokens."""
    torch.manual_seed(0)
    mask = torch.rand(4, 12) < 0.8
    mask &= torch.arange(12) < torch.tensor(LENGTHS)[:, None]
    mask[3] = False
    logprobs = -3 * torch.rand(4, 12)
    columns = {name: logprobs + 0.4 * torch.randn(4, 12) for name in ("old", "ref", "rollout")}
    columns["old"][0, :3] = logprobs[0, :3]
    columns["old"][2, 0] -= 30.0
    columns["ref"][2, 1] += 30.0
    return mask, columns | {"logprobs": logprobs, "advantages": torch.randn(4, 12), "entropy": torch.rand(4, 12)}


def packed(column):
    return torch.cat([row[:length] for row, length in zip(column, LENGTHS, strict=True)])


def compare(spec, objective, level="off", mode="truncate"):
    mask, columns = batch()
    leaves = {name: columns[name].clone().requires_grad_() for name in ("logprobs", "entropy")}
    inputs = {"advantages": columns["advantages"], "old_logprobs": columns["old"], "ref_logprobs": columns["ref"]}
    kept = mask
    if level != "off":
        weights = importance_weights(columns["old"], columns["rollout"], mask, level=level)
        inputs["weights"], kept, outside = bounded_weights(weights, mask, mode=mode, low=0.7, high=1.4)
    want, want_metrics = actor_loss(leaves, kept, inputs, spec, spec.kl_coef, DENOMINATORS)
    want.backward()

    stream = PolicyStream(
        advantages=packed(columns["advantages"]),
        loss_mask=packed(mask),
        cu_seqlens=torch.tensor([0, *itertools.accumulate(LENGTHS)]),
        num_tokens=DENOMINATORS.num_tokens,
        num_sequences=DENOMINATORS.num_sequences,
        max_tokens=DENOMINATORS.max_tokens,
        old_logprobs=packed(columns["old"]),
        ref_logprobs=packed(columns["ref"]) if spec.use_kl_loss else None,
        rollout_logprobs=packed(columns["rollout"]) if level != "off" else None,
    )
    flat = {name: packed(columns[name]).requires_grad_() for name in leaves}
    loss, metrics = packed_policy_loss(flat["logprobs"], stream, objective, entropy=flat["entropy"])
    loss.backward()
    torch.testing.assert_close(loss, want)
    for name, leaf in leaves.items():
        if leaf.grad is not None:
            torch.testing.assert_close(flat[name].grad, packed(leaf.grad))
    found = dict(zip(POLICY_METRICS, metrics.tolist(), strict=True))
    shown = {"policy/loss": found["policy_loss"]}
    for name, entry in (("ratio", "ratio"), ("kl_to_old", "kl_to_old"), ("clip_fraction", "clipped")):
        shown[f"policy/{name}"] = found[entry] / max(found["tokens"], 1)
    shown |= {"kl/loss": found["kl_loss"], "entropy/loss": -found["entropy_bonus"]}
    expected = results(want_metrics)
    assert {name: shown[name] for name in expected} == pytest.approx(expected, rel=1e-5, abs=1e-6)
    assert found["tokens"] == kept.sum() and found["masked_tokens"] == mask.sum()
    if level != "off":
        assert found["out_of_bounds"] == outside.sum()
        assert found["weight"] == pytest.approx(float(inputs["weights"][kept].sum()), rel=1e-5)


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("policy_loss", POLICY_LOSSES)
def test_packed_policy_loss_equals_actor_loss_for_every_loss_and_reduction(policy_loss, reduction):
    dual = 1.3 if policy_loss == "ppo" else None
    numbers = {"policy_loss": policy_loss, "reduction": reduction, "clip_high": 0.28, "dual_clip": dual}
    numbers |= {"kl_coef": 0.2, "kl_estimator": "k3", "entropy_coef": 0.05}
    compare(AlgorithmSpec(use_kl_loss=True, **numbers), PolicyObjective(**numbers))


@pytest.mark.parametrize("unbiased", [False, True])
@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_packed_policy_loss_equals_actor_loss_for_every_kl(estimator, unbiased):
    numbers = {"kl_coef": 0.5, "kl_estimator": estimator, "kl_unbiased_gradient": unbiased}
    compare(AlgorithmSpec(use_kl_loss=True, reduction="token_mean", **numbers), PolicyObjective(**numbers))


@pytest.mark.parametrize("policy_loss", ["ppo", "gspo"])
@pytest.mark.parametrize("mode", ["truncate", "mask"])
@pytest.mark.parametrize("level", ["token", "sequence", "geometric"])
def test_packed_policy_loss_equals_actor_loss_for_every_correction(level, mode, policy_loss):
    numbers = {"policy_loss": policy_loss, "reduction": "seq_mean_token_mean", "kl_coef": 0.0}
    bounds = {"weight_level": level, "weight_mode": mode, "weight_low": 0.7, "weight_high": 1.4}
    compare(AlgorithmSpec(**numbers), PolicyObjective(**numbers, **bounds), level, mode)


def test_packed_policy_loss_clamps_where_the_trainer_does():
    assert (terms.MAX_LOG_RATIO, terms.MAX_WEIGHT) == (policy.MAX_LOG_RATIO, kl.MAX_WEIGHT)
