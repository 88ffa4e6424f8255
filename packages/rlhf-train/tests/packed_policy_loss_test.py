"""What the trainer corrects before an update is what the policy loss of `rlhf_kernels` would correct by itself."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from rlhf_kernels import POLICY_METRICS, PolicyStream, packed_policy_loss
from rlhf_kernels.ops.packed_policy_loss import terms
from rlhf_train import algorithms, kl
from rlhf_train.algorithms import AlgorithmSpec, CorrectionSpec
from rlhf_train.batching import Denominators
from rlhf_train.experience import Experience
from rlhf_train.online.terms import correct_mismatch, policy_metrics, policy_objective, policy_stream
from rlhf_train.run.metrics import results

DENOMINATORS = Denominators(num_tokens=60, num_sequences=7, max_tokens=12)
ROWS = [2, 0, 3, 1]


def shard() -> tuple[Experience, torch.Tensor]:
    """Four rollouts of 12 places, random with far and extreme ratios, one without a trained token; and log-probs."""
    torch.manual_seed(0)
    mask = torch.rand(4, 12) < 0.8
    mask[3] = False
    logprobs = -3 * torch.rand(4, 12)
    old, reference, rollout = (logprobs + 0.4 * torch.randn(4, 12) for _ in range(3))
    old[0, :3] = logprobs[0, :3]
    old[2, 0] -= 30.0
    experience = Experience(
        rollout_ids=list("abcd"),
        token_ids=[np.zeros(12, np.int32)] * 4,
        loss_mask=mask,
        policy_mask=mask.clone(),
        rollout_logprobs=rollout.masked_fill(~mask, 0.0),
        rewards=torch.zeros(4),
        truncated=torch.zeros(4, dtype=torch.bool),
    )
    for name, column in (("old_logprobs", old), ("ref_logprobs", reference), ("advantages", torch.randn(4, 12))):
        experience.set_column(name, column)
    return experience, logprobs


@pytest.mark.parametrize("reduction", algorithms.REDUCTIONS)
@pytest.mark.parametrize("policy_loss", ["ppo", "gspo"])
@pytest.mark.parametrize("mode", algorithms.CORRECTION_MODES)
@pytest.mark.parametrize("level", algorithms.CORRECTION_LEVELS[1:])
def test_corrected_shard_has_the_loss_of_an_objective_that_corrects(level, mode, policy_loss, reduction):
    low, high = (0.05, 20.0) if level == "sequence" else (0.7, 1.4)
    correction = CorrectionSpec(level=level, mode=mode, low=low, high=high)
    spec = AlgorithmSpec(policy_loss=policy_loss, reduction=reduction, use_kl_loss=True, correction=correction)
    experience, logprobs = shard()
    mask = experience.loss_mask[ROWS]
    columns = experience.columns | {"rollout_logprobs": experience.rollout_logprobs}
    raw = PolicyStream(
        **{name: column[ROWS].flatten() for name, column in columns.items()},
        loss_mask=mask.flatten(),
        cu_seqlens=torch.arange(5) * 12,
        num_tokens=DENOMINATORS.num_tokens,
        num_sequences=DENOMINATORS.num_sequences,
        max_tokens=DENOMINATORS.max_tokens,
    )
    bounds = {"weight_level": level, "weight_mode": mode, "weight_low": low, "weight_high": high}
    objective = policy_objective(spec, 0.2)
    dense = logprobs[ROWS].flatten().requires_grad_()
    want, sums = packed_policy_loss(dense, raw, replace(objective, **bounds))
    want.backward()

    mismatch = results(correct_mismatch(experience, spec))
    stream = policy_stream(experience, ROWS, spec, DENOMINATORS, "cpu")
    kept = experience.policy_mask[ROWS]
    assert (0 < kept.sum() < mask.sum()) if mode == "mask" else torch.equal(kept, mask)
    sparse = logprobs[ROWS][kept].requires_grad_()
    loss, own_sums = packed_policy_loss(sparse, stream, objective)
    loss.backward()
    torch.testing.assert_close(loss, want)
    torch.testing.assert_close(torch.zeros(4, 12).masked_scatter(kept, sparse.grad).flatten(), dense.grad)
    assert results(policy_metrics(own_sums, spec)) == pytest.approx(results(policy_metrics(sums, spec)), rel=1e-5)
    found = dict(zip(POLICY_METRICS, sums.tolist(), strict=True))
    assert mismatch["mismatch/out_of_bounds"] == pytest.approx(found["out_of_bounds"] / mask.sum())
    assert mismatch["mismatch/weight"] == pytest.approx(found["weight"] / found["tokens"], rel=1e-5)


def test_operator_clamps_where_the_trainer_does_and_knows_the_same_names():
    assert terms.MAX_LOG_RATIO == kl.MAX_LOG_RATIO
    names = {"policy_loss": tuple(algorithms.POLICY_LOSSES), "reduction": algorithms.REDUCTIONS}
    names |= {"kl_estimator": algorithms.KL_ESTIMATORS, "weight_level": algorithms.CORRECTION_LEVELS}
    names |= {"weight_mode": algorithms.CORRECTION_MODES}
    assert names == terms._CHOICES
