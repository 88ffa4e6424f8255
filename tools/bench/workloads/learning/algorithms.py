"""Held-out accuracy on the built-in task before and after training, by algorithm and seed.

    python tools/bench/run.py algorithms --out algorithms.json

Runs `rlhf ppo` on the built-in task for 40 steps, once for each seed and row of `RECIPES`. Accuracy is measured as by
`learning`. Each row has the hardware, versions and commit of its runs: with `--add_to`, rows of an earlier
report stay, and those that are measured anew take their place.
"""

import json
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from runner import environment, over_seeds
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
    **{name: f"--advantage_estimator {name}" for name in ("maxrl", "lite_ppo", "opo", "remax", "max_at_k")},
    **{
        name: f"{GROUP} --policy_loss_type {name}"
        for name in ("sapo", "dppo_tv", "dppo_kl", "gmpo", "topr", "vespo", "kimi")
    },
    "truncated left out": f"{GROUP} --mask_truncated",
    "off-policy failures left out": f"{GROUP} --mask_off_policy 0.01",
    "clip-cov": f"{GROUP} --clip_cov 0.002 1 5",
    "kl-cov": f"{GROUP} --kl_cov 0.002 1",
    "tokens of high entropy": f"{GROUP} --top_entropy_quantile 0.2",
    "adaptive entropy": f"{GROUP} --entropy_target 0.1 --entropy_coef_step 0.001",
    "preset mis_po": "--preset mis_po",
    "online_dpo": "--advantage_estimator online_dpo --init_kl_coef 0.1",
}


FLAGS = {
    "seeds": [1, 2],
    "only": {"nargs": "+", "choices": RECIPES, "default": list(RECIPES), "metavar": "NAME"},
    "add_to": (Path, "a report whose rows stay before those that are measured"),
}


def measure(options: Namespace, folder: Path) -> Iterator[dict[str, Any]]:
    """Run every recipe with every seed."""
    table: dict[str, dict[str, Any]] = {}
    if options.add_to is not None:
        earlier = json.loads(options.add_to.read_text(encoding="utf-8"))
        table = {row["name"]: {"environment": earlier["environment"], **row} for row in earlier["table"]}
    for number, name in enumerate(options.only):
        flags = RECIPES[name].split()
        runs = [run([*flags, "--seed", str(seed)], folder / f"{number}-{seed}") for seed in options.seeds]
        table[name] = {"name": name, "flags": RECIPES[name], **over_seeds(runs), "environment": environment()}
        yield {"table": [*table.values()]}
