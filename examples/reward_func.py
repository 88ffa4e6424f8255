"""A reward function, in OpenRLHF's form: 1 if the last number behind #### is the label's, else 0.

rlhf ppo --remote_rm_url examples/reward_func.py
"""

import re

import torch

NUMBER = re.compile(r"####\s*(-?\d+)")


def reward_func(queries, prompts, labels):
    """Score responses. `queries` are prompts with their responses."""
    responses = [query[len(prompt) :] for query, prompt in zip(queries, prompts, strict=True)]
    found = [NUMBER.findall(response) for response in responses]
    right = [bool(numbers) and numbers[-1] == label for numbers, label in zip(found, labels, strict=True)]
    rewards = torch.tensor(right, dtype=torch.float)
    answered = torch.tensor([bool(numbers) for numbers in found], dtype=torch.float)
    return {"rewards": rewards, "scores": rewards, "extra_logs": {"answered": answered}}
