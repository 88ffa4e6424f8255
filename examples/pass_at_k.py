"""Metrics of your own: pass@k, the chance that one of k responses to a prompt is right, by its unbiased estimator.

    1 - C(n - c, k) / C(n, k)   of n responses of which c are right        Chen et al. 2021, arXiv:2107.03374

rlhf check examples/pass_at_k.py
rlhf ppo --metrics_path examples/pass_at_k.py
"""

from math import comb


def step_metrics(groups, left_out):
    """Return the mean pass@k over the prompts of the step, also over those that a filter left out."""
    counts = [(len(group.is_right), int(group.is_right.sum())) for group in (*groups, *left_out)]
    metrics = {}
    for k in (1, 2, 4):
        chances = [1 - comb(n - c, k) / comb(n, k) for n, c in counts if n >= k]
        if chances:
            metrics[f"pass_at_{k}"] = sum(chances) / len(chances)
    return metrics
