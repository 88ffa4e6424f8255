"""What held-out answers say of the policy, by data source. Torch-free."""

import math
from collections.abc import Sequence

from rlhf_data.records import RolloutGroup, VerdictKind
from rlhf_train.online.summaries import lengths, summarize


def pass_at_k(num_samples: int, num_right: int, k: int) -> float:
    """Return the chance that one of `k` samples is right, estimated from more: 1 - C(n - c, k) / C(n, k).

    Args:
        num_samples: n, of one prompt.
        num_right: c, of them.
        k: at most n.

    Raises:
        ValueError: k is not in [1, n].

    Source: Chen et al. 2021, arXiv:2107.03374, eq. 1.
    """
    if not 1 <= k <= num_samples:
        raise ValueError(f"pass@{k} of {num_samples} samples")
    return 1.0 - math.comb(num_samples - num_right, k) / math.comb(num_samples, k)


def summarize_evaluation(groups: Sequence[RolloutGroup]) -> dict[str, float]:
    """Return the metrics of held-out groups under `eval/`, and with several data sources under `eval/<source>/`, too.

    `pass@k` is there for k = 1, 2, 4, ... and the number of samples a prompt; a rollout passes when its verdict is ok,
    so that one whose reward failed does not. `failed` is the share of these.
    """
    metrics = summarize(groups, "eval") | _passes(groups, "eval")
    verdicts = [rollout.verdict for group in groups for rollout in group.rollouts]
    metrics["eval/failed"] = sum(verdict is None or verdict.kind.failed for verdict in verdicts) / len(verdicts)
    by_source: dict[str, list[RolloutGroup]] = {}
    for group in groups:
        by_source.setdefault(group.prompt.source, []).append(group)
    if len(by_source) > 1:
        for source, members in sorted(by_source.items()):
            metrics |= _passes(members, f"eval/{source}")
            metrics |= lengths([rollout for group in members for rollout in group.rollouts], f"eval/{source}")
    return metrics


def _passes(groups: Sequence[RolloutGroup], prefix: str) -> dict[str, float]:
    num_samples = min(len(group.rollouts) for group in groups)
    ks = {2**power for power in range(num_samples.bit_length())} | {num_samples}
    counts = [
        (len(group.rollouts), sum(r.verdict is not None and r.verdict.kind is VerdictKind.OK for r in group.rollouts))
        for group in groups
    ]
    return {f"{prefix}/pass@{k}": sum(pass_at_k(n, c, k) for n, c in counts) / len(counts) for k in sorted(ks)}
