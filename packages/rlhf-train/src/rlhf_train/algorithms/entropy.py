"""What the policy's entropy decides: how many tokens the policy loss keeps, and the weight of the entropy bonus."""

import math


def num_kept(num_tokens: int, share: float) -> int:
    """Return how many tokens of the highest entropy the policy loss keeps, at least 1.

        l_t = 0 unless H_t >= tau,   tau = the quantile 1 - share of the entropies of all trained tokens of the batch

    Without equal entropies, as many are at least the quantile, which is interpolated between two of them.

    Args:
        num_tokens: n, of the batch of all ranks.
        share: of the tokens, in (0, 1).

    Source: Wang et al. 2025, arXiv:2506.01939; TRL takes the same quantile.
    """
    return int(share * max(num_tokens - 1, 0)) + 1


def bonus_weight(coef: float, entropy: float, *, target: float) -> float:
    """Return the weight of the entropy bonus in a step: `coef`, and 0 while the entropy is above its target.

    Args:
        coef: c_k, >= 0, reward units per nat.
        entropy: of the policy before the updates of the step, mean over its tokens in nats.
        target: nats per token, > 0.

    Source: He et al. 2025 (Skywork-OR1), arXiv:2505.22312.
    """
    return coef if entropy <= target else 0.0


def adapted_entropy_coef(coef: float, entropy: float, *, target: float, step: float) -> float:
    """Return the coefficient of the next step: larger while the entropy is below its target, smaller above.

        c_k+1 = max(c_k + step, 0) if H_k < target,   max(c_k - step, 0) if H_k > target

    Args:
        coef, entropy, target: see `bonus_weight`. An entropy that is not finite changes nothing.
        step: > 0.

    Source: He et al. 2025 (Skywork-OR1), arXiv:2505.22312.
    """
    if entropy == target or not math.isfinite(entropy):
        return coef
    return max(coef + math.copysign(step, target - entropy), 0.0)
