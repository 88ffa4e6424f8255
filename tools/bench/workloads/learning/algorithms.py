"""Held-out accuracy on the built-in task before and after training, by algorithm and seed.

    python tools/bench/run.py algorithms --out algorithms.json

Runs `rlhf ppo` on the built-in task for 40 steps, once for each seed and row of `RECIPES`. Accuracy is measured as by
`learning`.
"""

from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from runner import over_seeds
from workloads.learning.learning import run

GROUP = "--advantage_estimator group_norm"
RECIPES = {
    "gae": "--advantage_estimator gae",
    "reinforce": "--advantage_estimator reinforce",
    "reinforce_baseline": "--advantage_estimator reinforce_baseline",
    "group_norm": GROUP,
    "dr_grpo": "--advantage_estimator dr_grpo",
    "rloo": "--advantage_estimator rloo",
    "ppo loss, dual clip": f"{GROUP} --dual_clip 3",
    "gspo": f"{GROUP} --policy_loss_type gspo",
    "cispo": f"{GROUP} --policy_loss_type cispo --clip_eps_low 0.999",
    "reinforce loss": f"{GROUP} --policy_loss_type reinforce",
    "preset dapo": "--preset dapo",
    "preset grpo": "--preset grpo",
    "gae, bootstrap of truncated": "--bootstrap_truncated",
    "gae, adaptive KL": "--kl_target 0.02 --kl_horizon 1000",
    "KL loss, unbiased gradient": f"{GROUP} --use_kl_loss --kl_unbiased_gradient",
    "entropy bonus": f"{GROUP} --entropy_loss_coef 0.001",
    "correction token truncate": f"{GROUP} --is_correction_level token",
    "correction geometric mask": f"{GROUP} --is_correction_level geometric --is_correction_mode mask",
    "old log-probs of the rollout": f"{GROUP} --old_logprobs rollout",
    "old log-probs skipped": f"{GROUP} --old_logprobs skip --use_kl_loss --kl_estimator k3 --train_batch_size 128",
}


FLAGS = {
    "seeds": [1, 2],
    "only": {"nargs": "+", "choices": RECIPES, "default": list(RECIPES), "metavar": "NAME"},
}


def measure(options: Namespace, folder: Path) -> Iterator[dict[str, Any]]:
    """Run every recipe with every seed."""
    table = []
    for number, name in enumerate(options.only):
        flags = RECIPES[name].split()
        runs = [run([*flags, "--seed", str(seed)], folder / f"{number}-{seed}") for seed in options.seeds]
        table.append({"name": name, "flags": RECIPES[name], **over_seeds(runs)})
        yield {"table": table}
