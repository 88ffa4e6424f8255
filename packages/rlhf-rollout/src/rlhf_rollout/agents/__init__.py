"""Workflows turn one prompt into episodes. They send requests to a router and depend on no engine."""

from rlhf_rollout.agents.base import Workflow
from rlhf_rollout.agents.single_turn import SingleTurn

__all__ = ["SingleTurn", "Workflow"]
