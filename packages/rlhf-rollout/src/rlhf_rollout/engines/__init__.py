"""Generation engines behind one Protocol; each is imported only when it is built."""

from rlhf_rollout.engines.build import build_engine
from rlhf_rollout.engines.spec import ENGINE_KINDS, EngineSpec

__all__ = ["ENGINE_KINDS", "EngineSpec", "build_engine"]
