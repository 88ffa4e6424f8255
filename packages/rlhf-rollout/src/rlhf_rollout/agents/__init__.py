"""Workflows turn one prompt into episodes. They send requests to a router and depend on no engine.

`interface` is what users' agents are written against, `user_agent` finds and runs them in the processes of `workers`.
"""

from rlhf_rollout.agents.agent_spec import AgentSpec as AgentSpec
from rlhf_rollout.agents.agent_spec import check_agent as check_agent
from rlhf_rollout.agents.agent_spec import make_workflow as make_workflow
from rlhf_rollout.agents.base import Workflow as Workflow
from rlhf_rollout.agents.hosted import HostedAgent as HostedAgent
from rlhf_rollout.agents.recorder import EpisodeLimits as EpisodeLimits
from rlhf_rollout.agents.recorder import EpisodeRecorder as EpisodeRecorder
from rlhf_rollout.agents.single_turn import SingleTurn as SingleTurn
