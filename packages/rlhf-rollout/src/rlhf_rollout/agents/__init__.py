"""Workflows turn one prompt into episodes. They send requests to a router and depend on no engine.

`interface` is what users' agents are written against, `user_agent` finds and runs them in the processes of `workers`.
"""

from rlhf_rollout.agents.agent_spec import AgentSpec, check_agent, make_workflow
from rlhf_rollout.agents.base import Workflow
from rlhf_rollout.agents.hosted import HostedAgent
from rlhf_rollout.agents.recorder import EpisodeLimits, EpisodeRecorder
from rlhf_rollout.agents.single_turn import SingleTurn

__all__ = [
    "AgentSpec",
    "EpisodeLimits",
    "EpisodeRecorder",
    "HostedAgent",
    "SingleTurn",
    "Workflow",
    "check_agent",
    "make_workflow",
]
