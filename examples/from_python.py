"""Trains the built-in model from Python: the reward is a function of this file, as it would be of a notebook's cell.

python examples/from_python.py FOLDER
"""

import re
import sys

import rlhf_cli


def carries(queries, prompts, labels):
    """Reward 1 for the right sum behind ####, and 0.2 for any number there."""
    found = [re.findall(r"#### (\d+)", query[len(prompt) :]) for query, prompt in zip(queries, prompts, strict=True)]
    rewards = [
        0.2 * bool(numbers) + 0.8 * (numbers[-1:] == [label]) for numbers, label in zip(found, labels, strict=True)
    ]
    return {"rewards": rewards, "extra_logs": {"answered": [float(bool(numbers)) for numbers in found]}}


run = rlhf_cli.ppo(
    remote_rm_url=carries,
    advantage_estimator="group_norm",
    init_kl_coef=0,
    train_steps=2,
    save_steps=1,
    eval_data=None,
    save_path=sys.argv[1],
)
print("reward by step:", [round(reward, 3) for _, reward in run.curves["rollout/reward"]])
best = max(rlhf_cli.read_rollouts(run), key=lambda rollout: rollout["reward"])
print("the best answer:", best["text"])
print("the model:", run.folder / "model")
