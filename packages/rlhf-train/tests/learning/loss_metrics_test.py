"""What the losses of actor and critic are given of a shard, and their metrics."""

import pytest
import torch
from torch import Tensor

from experience_testing import ADVANTAGES, COUNTS, MASK, experience_of
from rlhf_kernels import packed_policy_loss
from rlhf_train.algorithms.kl import kl_estimate
from rlhf_train.algorithms.table import AlgorithmSpec, make_algorithm
from rlhf_train.learning.loss_metrics import critic_loss, policy_metrics, reference_kl_metrics
from rlhf_train.learning.micro_batches import policy_stream
from rlhf_train.run.metrics import Metric, Sum, results

ON_POLICY = torch.where(MASK, -1.0, 0.0)


def learned(spec: AlgorithmSpec, **columns: Tensor) -> tuple[float, dict[str, Metric], Tensor]:
    """Return the loss of log-probs of -1 and entropies of 2, its metrics, and the gradients by both, [2, 2, 4]."""
    experience = experience_of(ON_POLICY, ON_POLICY, advantages=ADVANTAGES, **columns)
    if spec.old_logprobs == "skip":
        del experience.columns["old_logprobs"]
    stream = policy_stream(experience, [0, 1], spec, COUNTS, "cpu")
    leaves = torch.stack([torch.full((2, 4), -1.0), torch.full((2, 4), 2.0)]).requires_grad_()
    logprobs, entropy = leaves[:, MASK]
    loss, sums = packed_policy_loss(logprobs, stream, spec.objective, entropy=entropy)
    loss.backward()
    return loss.item(), policy_metrics(sums, spec), leaves.grad


def test_policy_stream_has_the_tokens_of_the_policys_mask_row_after_row():
    experience = experience_of(ON_POLICY, ON_POLICY, advantages=ADVANTAGES, ref_logprobs=2 * ON_POLICY)
    experience.policy_mask[0, 2] = False
    stream = policy_stream(experience, [1, 0], make_algorithm(), COUNTS, "cpu")
    assert stream.advantages.tolist() == [-4.0, 1.0, 3.0] and stream.cu_seqlens.tolist() == [0, 1, 3]
    assert stream.old_logprobs.tolist() == [-1.0] * 3 and stream.loss_mask.tolist() == [True] * 3
    assert stream.ref_logprobs is stream.weights is None
    assert (stream.num_tokens, stream.num_sequences, stream.max_tokens) == (4, 2, 3)
    spec = make_algorithm(use_kl_loss=True)
    stream = policy_stream(experience, [0], spec, COUNTS, "cpu")
    assert stream.ref_logprobs.tolist() == [-2, -2]


def test_actors_loss_adds_its_terms_by_their_weights():
    spec = make_algorithm(use_kl_loss=True, kl_coef=0.5, kl_estimator="k1", entropy_coef=0.25, estimator="reinforce")
    loss, metrics, grads = learned(spec, ref_logprobs=torch.where(MASK, -1.5, 0.0))
    # Policy: -(1 + 2 + 3 - 4) / 4 = -0.5; KL: 0.5 everywhere, times 0.5; entropy: 2 everywhere, times 0.25, a bonus.
    assert loss == pytest.approx(-0.5 + 0.25 - 0.5)
    assert {name: metric.value for name, metric in metrics.items() if isinstance(metric, Sum)} == pytest.approx(
        {"policy/loss": -0.5, "kl/loss": 0.5, "entropy/loss": -2.0}
    )
    # -A / 4 of the policy, 0.5 x 1 / 4 of the KL; the bonus pushes entropy up.
    assert torch.allclose(grads[0], torch.where(MASK, (-ADVANTAGES + 0.5) / 4, 0.0))
    assert torch.allclose(grads[1], torch.where(MASK, -0.25 / 4, 0.0))


def test_actors_loss_weights_are_of_the_policy_term_alone():
    spec = make_algorithm(use_kl_loss=True, kl_coef=1.0, estimator="reinforce")
    _, metrics, _ = learned(spec, ref_logprobs=torch.where(MASK, -1.5, 0.0), weights=torch.full((2, 4), 0.5))
    assert metrics["policy/loss"].value == pytest.approx(-0.25)
    assert metrics["kl/loss"].value == pytest.approx(0.5)


def test_actors_loss_without_old_logprobs_is_that_of_the_policy_itself():
    _, metrics, grads = learned(make_algorithm(kl_coef=0, old_logprobs="skip", estimator="reinforce"))
    assert torch.allclose(grads[0], torch.where(MASK, -ADVANTAGES / 4, 0.0))
    assert results(metrics) == {
        "policy/loss": -0.5, "policy/ratio": 1.0, "policy/kl_to_old": 0.0, "policy/clip_fraction": 0.0,
        "policy/kl_bounded_fraction": 0.0,
    }  # fmt: skip


def test_policy_metrics_of_a_loss_without_a_ratio_have_no_clip_fraction():
    _, metrics, _ = learned(make_algorithm(kl_coef=0, policy_loss="reinforce", estimator="reinforce"))
    assert set(metrics) == {"policy/loss", "policy/ratio", "policy/kl_to_old", "policy/kl_bounded_fraction"}


def test_bounded_fractions_count_the_tokens_whose_kl_is_at_its_bound():
    # Three of four tokens are far from the old policy, in either direction: 3 nats above, 12 and 30 below.
    gaps = torch.tensor([[0.0, 3.0, -12.0, -30.0], [0.0, 0.1, 0.0, 0.0]])
    _, metrics, _ = learned(make_algorithm(kl_coef=0, estimator="reinforce"), old_logprobs=ON_POLICY - gaps)
    assert results(metrics)["policy/kl_bounded_fraction"] == 3 / 4
    for estimator, fraction in (("k1", 1 / 4), ("k2", 1 / 4), ("k3", 3 / 4)):
        kl = kl_estimate(-gaps, torch.zeros(2, 4), estimator)
        found = results(reference_kl_metrics(kl, MASK, estimator))
        assert found == pytest.approx({"kl/reference": kl[MASK].mean().item(), "kl/bounded_fraction": fraction})


@pytest.mark.parametrize(
    ("options", "fraction"),
    [({}, 1 / 4), ({"dual_clip": 2.0}, 2 / 4), ({"policy_loss": "cispo", "clip_low": 0.2}, 3 / 4)],
)
def test_clip_fraction_counts_what_each_loss_cuts(options, fraction):
    # Ratios 1.5, 0.5, 1.1 and 3 at advantages 1, 2, 3 and -4: PPO cuts the first; a dual clip the last, too; CISPO
    # bounds all but the third.
    ratios = torch.tensor([[1.0, 1.5, 0.5, 1.1], [1.0, 3.0, 1.0, 1.0]])
    _, metrics, _ = learned(
        make_algorithm(kl_coef=0, estimator="reinforce", **options), old_logprobs=ON_POLICY - ratios.log()
    )
    assert results(metrics)["policy/clip_fraction"] == fraction
    assert results(metrics)["policy/ratio"] == pytest.approx((1.5 + 0.5 + 1.1 + 3) / 4)


def test_critic_loss_is_a_mean_over_tokens_whatever_the_actors_reduction():
    spec = make_algorithm(value_clip=None, reduction="seq_mean_token_sum")
    values = torch.where(MASK, 1.0, 99.0).requires_grad_()
    inputs = {"values": torch.zeros(2, 4), "returns": torch.tensor([[0.0, 1.0, 2.0, 3.0], [0.0, 1.0, 0.0, 0.0]])}
    loss, metrics = critic_loss(values, MASK, inputs, spec, COUNTS)
    loss.backward()
    assert loss.item() == pytest.approx((0 + 1 + 4 + 0) / 2 / 4)
    assert values.grad.tolist() == [[0, 0, -0.25, -0.5], [0, 0, 0, 0]]
    assert results({"mean": metrics["value/mean"]}) == {"mean": 1.0}
