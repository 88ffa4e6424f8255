"""The recipe of an update, and the losses of its tokens in float64, with derivatives written out by hand.

Like `update_oracle`, which sums them up, it shares no code with `rlhf_train`, `rlhf_kernels` or `rlhf_models`.
"""

import dataclasses
import math
from typing import Any

MAX_K3 = 10.0  # nats per token; the bound of verl and OpenRLHF


@dataclasses.dataclass(frozen=True, kw_only=True)
class Recipe:
    """What is computed. Names and meanings are those of the command line; None stands for "off" or "the default"."""

    estimator: str
    policy_loss: str = "ppo"
    reduction: str | None = None
    gamma: float = 1.0
    turn_gamma: float | None = None
    lambd: float = 1.0
    clip_low: float = 0.2
    clip_high: float = 0.2
    dual_clip: float | None = None
    entropy_coef: float = 0.0
    value_clip: float | None = None
    bootstrap_truncated: bool = False
    kl_coef: float = 0.0
    kl_estimator: str = "k1"
    use_kl_loss: bool = False
    kl_unbiased_gradient: bool = False
    teacher_coef: float = 0.0
    distribution: tuple[Any, ...] | None = None  # top_k, divergence, beta; without it the teacher judges sampled tokens
    old_logprobs: str = "recompute"
    correction: tuple[Any, ...] | None = None  # level, mode, low, high, and whether masked tokens are not counted
    mask_stale: int | None = None
    whiten_std: bool = True
    top_quantile: float | None = None


def kl_of_token(recipe: Recipe, logprob: float, ref_logprob: float) -> tuple[float, float]:
    """Return the estimate of one token and its derivative by the log-prob."""
    d = logprob - ref_logprob
    k3 = math.exp(-d) - 1 + d
    return {
        "k1": (d, 1.0),
        "k2": (d * d / 2, d),
        "k3": (k3, 1 - math.exp(-d)) if k3 < MAX_K3 else (MAX_K3, 0.0),
    }[recipe.kl_estimator]


def token_term(recipe: Recipe, logprob: float, ratio: float, advantage: float) -> tuple[float, float]:
    """Return the policy loss of one token and its derivative by the log-prob; `ratio` is GSPO's or the token's."""
    bounded = min(max(ratio, 1 - recipe.clip_low), 1 + recipe.clip_high)
    if recipe.policy_loss == "reinforce":
        return -advantage * logprob, -advantage
    if recipe.policy_loss == "cispo":
        return -bounded * advantage * logprob, -bounded * advantage
    if recipe.policy_loss == "sapo":
        tau = 1.0 if advantage > 0 else 1.05
        gate = 1 / (1 + math.exp(-tau * (ratio - 1)))
        return -4 / tau * gate * advantage, -4 * gate * (1 - gate) * ratio * advantage
    if recipe.policy_loss == "kimi":
        slope = 0.0 if bounded != ratio else -ratio * advantage
        return -bounded * advantage + 1e-3 * math.log(ratio) ** 2, slope + 2e-3 * math.log(ratio)
    loss, slope = -ratio * advantage, -ratio * advantage
    if recipe.policy_loss.startswith("dppo"):
        p, q = math.exp(logprob), math.exp(logprob) / ratio
        kl = q * math.log(q / p) + (1 - q) * math.log((1 - q) / (1 - p))
        distance = abs(p - q) if recipe.policy_loss == "dppo_tv" else kl
        limit = recipe.clip_high if advantage > 0 else recipe.clip_low
        return (0.0, 0.0) if distance > limit and (p > q) == (advantage > 0) else (loss, slope)
    if bounded * advantage < ratio * advantage:
        loss, slope = -bounded * advantage, 0.0
    if recipe.dual_clip is not None and advantage < 0 and loss > -recipe.dual_clip * advantage:
        loss, slope = -recipe.dual_clip * advantage, 0.0
    return loss, slope


def sequence_term(
    recipe: Recipe, logprob: float, gap: float, advantage: float, gaps: list[float], advantages: list[float]
) -> tuple[float, float]:
    """Return what `token_term` does for losses of a whole response with these log ratios and advantages."""
    name, low, high = recipe.policy_loss, 1 - recipe.clip_low, 1 + recipe.clip_high
    if name == "gmpo":
        pairs = zip(gaps, advantages, strict=True)
        ratios = [min(math.exp(g), high) if a > 0 else max(math.exp(g), low) for g, a in pairs]
        loss = -advantage * math.prod(ratios) ** (1 / len(ratios))
        return loss, 0.0 if (math.exp(gap) > high if advantage > 0 else math.exp(gap) < low) else loss
    if name == "topr":
        weight = 1.0 if advantage >= 0 else min(math.exp(sum(gaps) / len(gaps)), 1.0)
    else:
        whole, (c1, c2) = math.exp(sum(gaps)), (2, 3) if advantage > 0 else (3, 2)
        weight = whole**c1 * math.exp(c2 * (1 - whole))
    return -weight * advantage * logprob, -weight * advantage
