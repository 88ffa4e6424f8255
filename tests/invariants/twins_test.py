"""Invariant 4: every loss and estimator equals a slow version, written token by token in float64 from its formula."""

import itertools
import math
import random
from functools import partial
from typing import Any

import pytest
import torch

from rlhf_kernels import PolicyObjective, PolicyStream, packed_policy_loss
from rlhf_kernels.ops.packed_policy_loss.reference import packed_policy_loss_reference
from rlhf_train.algorithms.correction import bounded_weights, importance_weights
from rlhf_train.algorithms.gae import generalized_advantages
from rlhf_train.algorithms.kl import kl_estimate
from rlhf_train.algorithms.table import REDUCTIONS
from rlhf_train.algorithms.token_specs import CORRECTION_LEVELS, CORRECTION_MODES
from rlhf_train.batching import Denominators
from rlhf_train.losses.aggregate import token_mean
from rlhf_train.losses.value import clipped_value_loss

NUM_ROWS, NUM_COLUMNS, MAX_TOKENS = 7, 11, 13
MOVED = 0.02  # nats per token, the limit of the off-policy mask: below some means of rows, above others


@pytest.fixture(params=range(3))
def batch(request) -> dict[str, torch.Tensor]:
    """Random tensors; one row trains nothing, one a single token."""
    generator = torch.Generator().manual_seed(request.param)

    def draw(scale: float = 1.0) -> torch.Tensor:
        return torch.randn(NUM_ROWS, NUM_COLUMNS, generator=generator, dtype=torch.float64) * scale

    mask = torch.rand(NUM_ROWS, NUM_COLUMNS, generator=generator) < 0.6
    mask[1], mask[2] = False, False
    mask[2, 4] = True
    names = ("logprobs", "old", "reference", "engine", "advantages", "values", "old_values", "returns", "rewards")
    policies = ("logprobs", "old", "reference", "engine")
    return {"mask": mask, **{name: draw(0.4 if name in policies else 1.0) for name in names}}


def trained(mask: torch.Tensor) -> list[tuple[int, int]]:
    return [(i, t) for i in range(NUM_ROWS) for t in range(NUM_COLUMNS) if mask[i, t]]


def slow_policy_loss(x: dict[str, torch.Tensor], i: int, t: int) -> float:
    ratio, advantage = math.exp(x["logprobs"][i, t] - x["old"][i, t]), float(x["advantages"][i, t])
    return -min(ratio * advantage, min(max(ratio, 0.8), 1.3) * advantage)


def slow_value_loss(x: dict[str, torch.Tensor], i: int, t: int) -> float:
    value, old, target = (float(x[name][i, t]) for name in ("values", "old_values", "returns"))
    clipped = old + min(max(value - old, -0.5), 0.5)
    return max((value - target) ** 2, (clipped - target) ** 2) / 2


def slow_kl(estimator: str, x: dict[str, torch.Tensor], i: int, t: int) -> float:
    d = float(x["logprobs"][i, t] - x["old"][i, t])
    return {"k1": d, "k2": d * d / 2, "k3": math.exp(-d) - 1 + d}[estimator]


def slow_aggregate(losses: dict[tuple[int, int], float], reduction: str) -> float:
    rows: dict[int, list[float]] = {}
    for (i, _), loss in losses.items():
        rows.setdefault(i, []).append(loss)
    if reduction == "token_mean":
        return sum(losses.values()) / len(losses)
    if reduction == "seq_mean_token_mean":
        return sum(sum(row) / len(row) for row in rows.values()) / len(rows)
    total = sum(sum(row) for row in rows.values()) / len(rows)
    return total if reduction == "seq_mean_token_sum" else total / MAX_TOKENS


def fast_policy_loss(
    x: dict[str, torch.Tensor], mask: torch.Tensor, reduction: str, counts: Denominators, **options: Any
) -> torch.Tensor:
    """Return the policy loss by the operator, or, in float64, by its twin; a row is a sequence."""
    columns = {"advantages": "advantages", "old_logprobs": "old", "ref_logprobs": "reference"}
    columns |= {name: name for name in ("weights", "penalties")}
    stream = PolicyStream(
        **{name: x[key].flatten() for name, key in columns.items() if key in x},
        loss_mask=mask.flatten(),
        cu_seqlens=torch.arange(NUM_ROWS + 1) * NUM_COLUMNS,
        num_tokens=counts.num_tokens,
        num_sequences=counts.num_sequences,
        max_tokens=counts.max_tokens,
    )
    logprobs, objective = x["logprobs"].flatten(), PolicyObjective(reduction=reduction, **options)
    if logprobs.dtype == torch.float64:
        return packed_policy_loss_reference(logprobs, None, stream, objective)[0]
    return packed_policy_loss(logprobs, stream, objective)[0]


def fast_kl(x: dict[str, torch.Tensor], *rest: Any, **options: Any) -> torch.Tensor:
    """Return the KL term alone: with advantages of 0 there is no other."""
    return fast_policy_loss(x | {"advantages": torch.zeros_like(x["advantages"])}, *rest, kl_coef=1.0, **options)


CASES = {
    "policy": (
        slow_policy_loss,
        "logprobs",
        lambda *args: fast_policy_loss(*args, clip_low=0.2, clip_high=0.3),
    ),
    **{
        f"{name} loss": (
            lambda x, i, t, name=name: slow_kl(name, x | {"old": x["reference"]}, i, t),
            "logprobs",
            lambda *args, name=name: fast_kl(*args, kl_estimator=name),
        )
        for name in ("k1", "k2", "k3")
    },
}
# What is reduced to the mean over tokens and no other.
MEAN_CASES = {
    "value": (
        slow_value_loss,
        "values",
        lambda x, mask, _, counts: token_mean(
            clipped_value_loss(x["values"], x["old_values"], x["returns"], value_clip=0.5), mask, counts
        ),
    ),
    **{
        name: (
            lambda x, i, t, name=name: slow_kl(name, x, i, t),
            "logprobs",
            lambda x, mask, _, counts, name=name: token_mean(kl_estimate(x["logprobs"], x["old"], name), mask, counts),
        )
        for name in ("k1", "k2", "k3")
    },
}


@pytest.mark.parametrize(
    ("name", "reduction"), [*itertools.product(CASES, REDUCTIONS), *((name, "token_mean") for name in MEAN_CASES)]
)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_loss_and_gradient_equal_the_slow_twin(batch, name, reduction, dtype):
    slow, variable, fast = (CASES | MEAN_CASES)[name]
    places = trained(batch["mask"])
    expected = slow_aggregate({place: slow(batch, *place) for place in places}, reduction)

    inputs = {key: value if key == "mask" else value.to(dtype) for key, value in batch.items()}
    inputs[variable] = inputs[variable].clone().requires_grad_()
    counts = Denominators(len(places), len({i for i, _ in places}), MAX_TOKENS)
    loss = fast(inputs, batch["mask"], reduction, counts)
    loss.backward()
    tolerance = 1e-12 if dtype is torch.float64 else 1e-5
    assert loss.item() == pytest.approx(expected, rel=tolerance, abs=tolerance)

    # The gradient by central differences of the slow twin, at a few tokens; none outside of the mask.
    gradient = inputs[variable].grad
    assert (gradient[~batch["mask"]] == 0).all()
    for i, t in random.Random(0).sample(places, 6):
        step, ends = 1e-6, []
        for sign in (1, -1):
            moved = dict(batch)
            moved[variable] = batch[variable].clone()
            moved[variable][i, t] += sign * step
            ends.append(slow_aggregate({place: slow(moved, *place) for place in places}, reduction))
        assert gradient[i, t].item() == pytest.approx((ends[0] - ends[1]) / (2 * step), rel=1e-4, abs=1e-6)


# Losses in which some factor is a constant to the gradient: the twin gives value and gradient of a token by formula.


def slow_dual_clip(x: dict[str, torch.Tensor], i: int, t: int) -> tuple[float, float]:
    ratio, advantage = math.exp(x["logprobs"][i, t] - x["old"][i, t]), float(x["advantages"][i, t])
    if advantage < 0 and ratio > 1.5:
        return -1.5 * advantage, 0.0
    flat = (ratio > 1.3 and advantage > 0) or (ratio < 0.8 and advantage < 0)
    return slow_policy_loss(x, i, t), 0.0 if flat else -ratio * advantage


def slow_gspo(x: dict[str, torch.Tensor], i: int, t: int) -> tuple[float, float]:
    gaps = [float(x["logprobs"][i, k] - x["old"][i, k]) for k in range(NUM_COLUMNS) if x["mask"][i, k]]
    ratio, advantage = math.exp(sum(gaps) / len(gaps)), float(x["advantages"][i, t])
    flat = (ratio > 1.04 and advantage > 0) or (ratio < 0.97 and advantage < 0)
    return -min(ratio * advantage, min(max(ratio, 0.97), 1.04) * advantage), 0.0 if flat else -ratio * advantage


def gaps_of(x: dict[str, torch.Tensor], i: int) -> dict[int, float]:
    return {t: float(x["logprobs"][i, t] - x["old"][i, t]) for t in range(NUM_COLUMNS) if x["mask"][i, t]}


def slow_gmpo(x: dict[str, torch.Tensor], i: int, t: int) -> tuple[float, float]:
    def is_cut(k: int, gap: float) -> bool:
        return math.exp(gap) > 1.3 if x["advantages"][i, k] > 0 else math.exp(gap) < 0.8

    gaps = gaps_of(x, i)
    limits = {k: math.log(1.3 if x["advantages"][i, k] > 0 else 0.8) for k in gaps}
    ratios = [math.exp(limits[k] if is_cut(k, gap) else gap) for k, gap in gaps.items()]
    loss = -float(x["advantages"][i, t]) * math.prod(ratios) ** (1 / len(ratios))
    return loss, 0.0 if is_cut(t, gaps[t]) else loss


def slow_weighted(x: dict[str, torch.Tensor], i: int, t: int, *, name: str) -> tuple[float, float]:
    gaps, advantage = [*gaps_of(x, i).values()], float(x["advantages"][i, t])
    whole = math.prod(map(math.exp, gaps))
    c1, c2 = (2, 3) if advantage > 0 else (3, 2)
    weight = whole**c1 * math.exp(c2 - c2 * whole)
    if name == "topr":
        weight = 1.0 if advantage > 0 else min(whole ** (1 / len(gaps)), 1.0)
    return -weight * advantage * float(x["logprobs"][i, t]), -weight * advantage


def slow_cispo(x: dict[str, torch.Tensor], i: int, t: int) -> tuple[float, float]:
    ratio, advantage = math.exp(x["logprobs"][i, t] - x["old"][i, t]), float(x["advantages"][i, t])
    weight = min(max(ratio, 0.8), 1.3)
    return -weight * advantage * float(x["logprobs"][i, t]), -weight * advantage


def slow_sapo(x: dict[str, torch.Tensor], i: int, t: int) -> tuple[float, float]:
    ratio, advantage = math.exp(x["logprobs"][i, t] - x["old"][i, t]), float(x["advantages"][i, t])
    tau = 2.0 if advantage > 0 else 3.0
    # The derivative of the gate by the ratio is sech^2 of half its argument.
    slope = 1 / math.cosh(tau * (ratio - 1) / 2) ** 2
    return -advantage * 4 / tau / (1 + math.exp(-tau * (ratio - 1))), -advantage * slope * ratio


def slow_dppo(x: dict[str, torch.Tensor], i: int, t: int, *, by_kl: bool) -> tuple[float, float]:
    new, old = (float(x[name][i, t]) - 1.5 for name in ("logprobs", "old"))
    p, q, advantage = math.exp(new), math.exp(old), float(x["advantages"][i, t])
    both = [(q, p), (1 - q, 1 - p)]
    distance = sum(a * math.log(a / b) for a, b in both) if by_kl else sum(abs(a - b) for a, b in both) / 2
    limit = (0.01 if by_kl else 0.08) if advantage > 0 else (0.005 if by_kl else 0.04)
    left = distance > limit and (p > q) == (advantage > 0)
    return (0.0, 0.0) if left else (-p / q * advantage, -p / q * advantage)


def fast_dppo(x: dict[str, torch.Tensor], *rest: Any, by_kl: bool) -> torch.Tensor:
    """Return the loss for log-probs lower by 1.5 nats, all of them below 0."""
    low, high = (0.005, 0.01) if by_kl else (0.04, 0.08)
    x = x | {name: x[name] - 1.5 for name in ("logprobs", "old")}
    return fast_policy_loss(x, *rest, policy_loss="dppo_kl" if by_kl else "dppo_tv", clip_low=low, clip_high=high)


def slow_kimi(x: dict[str, torch.Tensor], i: int, t: int) -> tuple[float, float]:
    gap, advantage = float(x["logprobs"][i, t] - x["old"][i, t]), float(x["advantages"][i, t])
    ratio, inside = math.exp(gap), 0.8 <= math.exp(gap) <= 1.3
    loss = -min(max(ratio, 0.8), 1.3) * advantage + 0.7 * gap**2
    return loss, (-ratio * advantage if inside else 0.0) + 1.4 * gap


def slow_reinforce(x: dict[str, torch.Tensor], i: int, t: int) -> tuple[float, float]:
    advantage = float(x["advantages"][i, t])
    return -advantage * float(x["logprobs"][i, t]), -advantage


def slow_unbiased_kl(estimator: str, x: dict[str, torch.Tensor], i: int, t: int) -> tuple[float, float]:
    difference = float(x["logprobs"][i, t] - x["reference"][i, t])
    weight = min(math.exp(x["logprobs"][i, t] - x["old"][i, t]), 10.0)
    return slow_kl(estimator, x | {"old": x["reference"]}, i, t), weight * difference


def slow_shares(mask: torch.Tensor, reduction: str) -> dict[tuple[int, int], float]:
    """Return what a token's loss is multiplied by in the reduced one."""
    rows = {i: int(mask[i].sum()) for i, _ in trained(mask)}
    shares = {
        "token_mean": lambda i: 1 / sum(rows.values()),
        "seq_mean_token_mean": lambda i: 1 / rows[i] / len(rows),
        "seq_mean_token_sum": lambda i: 1 / len(rows),
        "seq_mean_token_sum_norm": lambda i: 1 / len(rows) / MAX_TOKENS,
    }
    return {(i, t): shares[reduction](i) for i, t in trained(mask)}


def slow_off_policy(x: dict[str, torch.Tensor], i: int, t: int) -> tuple[float, float]:
    gaps = [float(x["old"][i, k] - x["logprobs"][i, k]) for k in range(NUM_COLUMNS) if x["mask"][i, k]]
    left_out = x["advantages"][i, t] < 0 and sum(gaps) / len(gaps) > MOVED
    return (0.0, 0.0) if left_out else slow_dual_clip(x, i, t)


def slow_penalty(x: dict[str, torch.Tensor], i: int, t: int) -> tuple[float, float]:
    loss, slope = slow_dual_clip(x, i, t)
    distance, penalty = float(x["logprobs"][i, t] - x["old"][i, t]), abs(float(x["engine"][i, t]))
    return loss + penalty * abs(distance), slope + math.copysign(penalty, distance)


BY_FORMULA = {
    "penalty": (
        slow_penalty,
        lambda x, *args: fast_policy_loss(x | {"penalties": x["engine"].abs()}, *args, clip_high=0.3, dual_clip=1.5),
    ),
    "off-policy mask": (
        slow_off_policy,
        lambda *args: fast_policy_loss(*args, clip_high=0.3, dual_clip=1.5, mask_off_policy=MOVED),
    ),
    "dual clip": (slow_dual_clip, lambda *args: fast_policy_loss(*args, clip_high=0.3, dual_clip=1.5)),
    "gspo": (slow_gspo, lambda *args: fast_policy_loss(*args, policy_loss="gspo", clip_low=0.03, clip_high=0.04)),
    "gmpo": (slow_gmpo, lambda *args: fast_policy_loss(*args, policy_loss="gmpo", clip_high=0.3)),
    "topr": (partial(slow_weighted, name="topr"), lambda *args: fast_policy_loss(*args, policy_loss="topr")),
    "vespo": (partial(slow_weighted, name="vespo"), lambda *args: fast_policy_loss(*args, policy_loss="vespo")),
    "cispo": (slow_cispo, lambda *args: fast_policy_loss(*args, policy_loss="cispo", clip_high=0.3)),
    "sapo": (slow_sapo, lambda *args: fast_policy_loss(*args, policy_loss="sapo", sapo_tau=(2.0, 3.0))),
    "dppo_tv": (partial(slow_dppo, by_kl=False), partial(fast_dppo, by_kl=False)),
    "dppo_kl": (partial(slow_dppo, by_kl=True), partial(fast_dppo, by_kl=True)),
    "kimi": (
        slow_kimi,
        lambda *args: fast_policy_loss(*args, policy_loss="kimi", clip_high=0.3, log_ratio_coef=0.7),
    ),
    "reinforce": (slow_reinforce, lambda *args: fast_policy_loss(*args, policy_loss="reinforce")),
    **{
        f"unbiased {name}": (
            lambda x, i, t, name=name: slow_unbiased_kl(name, x, i, t),
            lambda *args, name=name: fast_kl(*args, kl_estimator=name, kl_unbiased_gradient=True),
        )
        for name in ("k1", "k2", "k3")
    },
}


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("name", BY_FORMULA)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_loss_with_constants_and_gradient_equal_the_slow_twin(batch, name, reduction, dtype):
    slow, fast = BY_FORMULA[name]
    mask, shares = batch["mask"], slow_shares(batch["mask"], reduction)
    inputs = {key: value if key == "mask" else value.to(dtype) for key, value in batch.items()}
    inputs["logprobs"] = inputs["logprobs"].clone().requires_grad_()
    counts = Denominators(len(shares), len({i for i, _ in shares}), MAX_TOKENS)
    loss = fast(inputs, mask, reduction, counts)
    loss.backward()
    tolerance = 1e-12 if dtype is torch.float64 else 1e-5
    expected = sum(share * slow(batch, *place)[0] for place, share in shares.items())
    assert loss.item() == pytest.approx(expected, rel=tolerance, abs=tolerance)
    gradient = inputs["logprobs"].grad
    assert (gradient[~mask] == 0).all()
    for place, share in shares.items():
        wanted = share * slow(batch, *place)[1]
        assert gradient[place].item() == pytest.approx(wanted, rel=tolerance, abs=tolerance)


def slow_weight(level: str, x: dict[str, torch.Tensor], i: int, t: int) -> float:
    weights = [math.exp(x["old"][i, k] - x["engine"][i, k]) for k in range(NUM_COLUMNS) if x["mask"][i, k]]
    whole = math.prod(weights)
    return {
        "token": math.exp(x["old"][i, t] - x["engine"][i, t]),
        "sequence": whole,
        "geometric": whole ** (1 / len(weights)),
    }[level]


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("mode", CORRECTION_MODES)
@pytest.mark.parametrize("level", CORRECTION_LEVELS[1:])
def test_corrected_loss_and_gradient_equal_the_slow_twin(batch, level, mode, reduction):
    low, high = (0.9, 1.1) if level == "geometric" else (0.6, 1.5)
    mask = batch["mask"]
    weights = importance_weights(batch["old"], batch["engine"], mask, level=level)
    weights, kept, outside = bounded_weights(weights, mask, mode=mode, low=low, high=high)
    exact = {place: slow_weight(level, batch, *place) for place in trained(mask)}
    beyond = {place for place, weight in exact.items() if not low <= weight <= high}
    assert beyond and len(beyond) < len(exact)
    assert set(trained(outside)) == beyond
    assert set(trained(kept)) == set(exact) - (set() if mode == "truncate" else beyond)

    logprobs = batch["logprobs"].clone().requires_grad_()
    counts = Denominators(int(kept.sum()), int(kept.any(dim=1).sum()), MAX_TOKENS)
    inputs = batch | {"logprobs": logprobs, "weights": weights}
    loss = fast_policy_loss(inputs, kept, reduction, counts, clip_high=0.3, dual_clip=1.5)
    loss.backward()
    value = 0.0
    for place, share in slow_shares(kept, reduction).items():
        token, slope = slow_dual_clip(batch, *place)
        factor = share * min(max(exact[place], low), high)
        value += factor * token
        assert logprobs.grad[place].item() == pytest.approx(factor * slope, rel=1e-10, abs=1e-12)
    assert loss.item() == pytest.approx(value, rel=1e-10)
    assert (logprobs.grad[~kept] == 0).all()


@pytest.mark.parametrize("goes_on", [False, True])
@pytest.mark.parametrize(("gamma", "lambd"), [(1.0, 1.0), (0.99, 0.95), (0.9, 0.0), (0.0, 0.5)])
def test_generalized_advantages_equal_the_slow_twin(batch, gamma, lambd, goes_on):
    last = batch["returns"][:, 0].float() if goes_on else None
    fast, returns = generalized_advantages(
        batch["rewards"].float(), batch["values"].float(), batch["mask"], gamma=gamma, lambd=lambd, last_values=last
    )
    for i in range(NUM_ROWS):
        places = [t for t in range(NUM_COLUMNS) if batch["mask"][i, t]]
        rewards = [float(batch["rewards"][i, t]) for t in places]
        values = [float(batch["values"][i, t]) for t in places]
        values.append(float(batch["returns"][i, 0]) if goes_on else 0.0)
        for k, t in enumerate(places):
            # The definition as a sum, not the recursion: A_k = sum_j (gamma lambda)^j delta_{k+j}.
            deltas = [rewards[j] + gamma * values[j + 1] - values[j] for j in range(k, len(places))]
            expected = sum((gamma * lambd) ** j * delta for j, delta in enumerate(deltas))
            assert fast[i, t].item() == pytest.approx(expected, abs=1e-5)
            assert returns[i, t].item() == pytest.approx(expected + values[k], abs=1e-5)
