"""Starts engines; each kind's library is imported only when it is chosen."""

from importlib import import_module

from rlhf_data.errors import ConfigError, unknown
from rlhf_rollout.engines.spec import ENGINE_KINDS, EngineSpec
from rlhf_rollout.protocols import RolloutEngine

_CLASSES = {
    "fake": ("fake", "FakeEngine"),
    "http": ("http", "HttpEngine"),
    "transformers": ("transformers", "TransformersEngine"),
    "vllm": ("vllm.engine", "VllmEngine"),
}


def build_engine(kind: str, spec: EngineSpec) -> RolloutEngine:
    """Return a running engine of a kind named in `ENGINE_KINDS`. Raises ConfigError for an unknown kind or a spec that
    does not suit it, EngineError when the engine does not start."""
    if kind not in ENGINE_KINDS:
        raise ConfigError(unknown("engine", kind, ENGINE_KINDS))
    if (kind == "http") != (spec.base_url is not None):
        message = f"engine {kind} got base_url {spec.base_url}; engine http needs one, the other engines take none"
        raise ConfigError(message)
    module, name = _CLASSES[kind]
    return getattr(import_module(f"rlhf_rollout.engines.{module}"), name)(spec)
