"""Workflows: how one prompt becomes episodes. They ask a router and know no engine."""

from rlhf_rollout.agents.base import Workflow
from rlhf_rollout.agents.single_turn import SingleTurn

__all__ = ["SingleTurn", "Workflow"]
