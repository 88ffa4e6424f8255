"""Share of games that an agent wins before and after GRPO, by what `--group_by` compares, and by seed.

    python tools/bench/run.py group_by --out group-by.json

The environment is that of `ranges.py`, in which the episodes of a group meet the same states. `rlhf sft` shows the
built-in model games of a player who often forgets the range. From this model, `rlhf ppo` trains with each `--group_by`
and seed, with the same number of updates and episodes; `--turn_gamma` is 0.95, as in the paper of GiGPO
(arXiv:2505.10978). Accuracy is the share of 200 games that are won, at temperature 1.
"""

import json
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from runner import ROOT, over_seeds
from workloads.learning import ranges
from workloads.learning.learning import fine_tune, run

GROUP_BY = ("episode", "turn", "state")
FLAGS = {"seeds": [1, 2, 3]}
SFT = (
    "--pretrain builtin --dataset games.jsonl --input_key messages --output_key None --multiturn --apply_chat_template"
    " --max_len 192 --train_batch_size 16 --micro_train_batch_size 16 --max_epochs 3 --learning_rate 2e-3"
    " --zero_stage 0 --save_path sft"
)
PPO = (
    "--advantage_estimator group_norm --label_key number --rollout_batch_size 16 --n_samples_per_prompt 8"
    " --num_episodes 10 --train_steps 20 --eval_steps 10 --turn_gamma 0.95 --actor_learning_rate 1e-3"
    " --generate_max_len 4 --max_steps 4 --agent_max_len 192 --disable_ds_ckpt"
)


def measure(options: Namespace, folder: Path) -> Iterator[dict[str, Any]]:
    """Make the model to begin with; run every seed with each comparison."""
    for name, rows in {"games": ranges.games(1280), "numbers": ranges.prompts(200)}.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    fine_tune(SFT, folder)
    numbers = str(folder / "numbers.jsonl")
    files = ["--config", str(ROOT / "examples/tiny.toml"), "--pretrain", str(folder / "sft/model")]
    files += ["--prompt_data", numbers, "--eval_data", numbers, "--agent_func_path", ranges.__file__]
    runs: dict[str, list[dict[str, Any]]] = {name: [] for name in GROUP_BY}
    for seed in options.seeds:
        for name, own in runs.items():
            flags = [*PPO.split(), "--group_by", name, "--seed", str(seed)]
            found = run([*files, *flags], folder / f"{name}-{seed}")
            own.append(found | {"flags": " ".join(flags)})
        yield {"sft": SFT, "group_by": {name: over_seeds(own) for name, own in runs.items()}}
