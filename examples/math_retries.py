"""An agent with three attempts at a sum: a wrong answer is answered by a request to try again.

    rlhf ppo --agent_func_path examples/math_retries.py --max_steps 3 --agent_max_len 192

With each of the seeds 1, 2 and 3 it reaches a held-out accuracy of at least 0.75 within three attempts.

The classes are those of OpenRLHF; `from openrlhf.utils.agent import ...` finds the same ones.
"""

import re

from rlhf_rollout.agents.interface import AgentInstanceBase, MultiTurnAgentExecutor

AGAIN = "\n<|im_start|>user\nThat is wrong. Try again.<|im_end|>\n<|im_start|>assistant\n"


class AgentInstance(AgentInstanceBase):
    """One episode: the prompt asks for a sum, and the policy has `max_attempts` attempts."""

    max_attempts = 3

    def __init__(self):
        self.attempts = 0

    async def step(self, states, **kwargs):
        """Compare the answer with the label: 1 point for the right one, less with every further attempt."""
        self.attempts += 1
        found = re.findall(r"####\s*(-?\d+)", states["action_text"])
        is_right = bool(found) and found[-1] == states["label"]
        return {
            "rewards": 1.0 if is_right else -0.1,
            "scores": float(is_right),
            "environment_feedback": AGAIN,
            "done": is_right or self.attempts == self.max_attempts,
            "extra_logs": {"attempts": self.attempts, "right_at_once": is_right and self.attempts == 1},
        }


class AgentExecutor(MultiTurnAgentExecutor):
    """Runs an `AgentInstance` per episode."""

    def __init__(self):
        super().__init__(AgentInstance)
