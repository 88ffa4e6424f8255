"""Starts engines; each kind's library is imported only when it is chosen."""

from rlhf_data.errors import ConfigError, unknown
from rlhf_rollout.engines.spec import ENGINE_KINDS, EngineSpec
from rlhf_rollout.protocols import RolloutEngine


def build_engine(kind: str, spec: EngineSpec) -> RolloutEngine:
    """Return a running engine of a kind named in `ENGINE_KINDS`. Raises ConfigError for an unknown kind or a spec that
    does not suit it, EngineError when the engine does not start."""
    if kind not in ENGINE_KINDS:
        raise ConfigError(unknown("engine", kind, ENGINE_KINDS))
    if (kind == "http") != (spec.base_url is not None):
        message = f"engine {kind} got base_url {spec.base_url}; engine http needs one, the other engines take none"
        raise ConfigError(message)
    if kind == "vllm":
        from rlhf_rollout.engines.vllm.engine import VllmEngine

        return VllmEngine(spec)
    if kind == "transformers":
        from rlhf_rollout.engines.transformers import TransformersEngine

        return TransformersEngine(spec)
    if kind == "http":
        from rlhf_rollout.engines.http import HttpEngine

        return HttpEngine(
            spec.base_url or "", model=spec.model, max_model_len=spec.max_model_len, timeout_s=spec.request_timeout_s
        )
    from rlhf_rollout.engines.fake import FakeEngine

    return FakeEngine(
        max_model_len=spec.max_model_len,
        enable_sleep=spec.enable_sleep,
        request_timeout_s=spec.request_timeout_s,
        control_timeout_s=spec.control_timeout_s,
    )
