"""Measure held-out accuracy on the built-in task before and after training, by algorithm and seed.

    python tools/bench/algorithms.py --out algorithms.json

Runs `rlhf ppo` on the built-in task for 40 steps, once for each seed and row of `RECIPES`. Accuracy is measured as in
`learning.py`.
"""

import tempfile
from pathlib import Path

from learning import run
from runner import arguments, over_seeds, write

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


def main() -> None:
    """Run every recipe with every seed, and write the report after each recipe."""
    parser = arguments(__doc__, seeds=[1, 2])
    parser.add_argument("--only", nargs="+", choices=RECIPES, default=list(RECIPES), metavar="NAME")
    options = parser.parse_args()
    table = []
    for name in options.only:
        runs = []
        for seed in options.seeds:
            with tempfile.TemporaryDirectory() as folder:
                runs.append(run([*RECIPES[name].split(), "--seed", str(seed)], Path(folder, "run")))
        table.append({"name": name, "flags": RECIPES[name], **over_seeds(runs)})
        print(f"{name}: {table[-1]['mean_before']:.3f} -> {table[-1]['mean_after']:.3f}", flush=True)
        write(options, "algorithms", {"table": table})


if __name__ == "__main__":
    main()
