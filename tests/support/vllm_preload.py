"""Imports what a process with vLLM imports on a CPU, for `family_engines`. It starts no engine."""

from rlhf_rollout.engines.vllm.core import prepare_environment

prepare_environment()

import vllm.v1.engine.core_client  # noqa: E402
import vllm.v1.worker.cpu_worker  # noqa: E402

import family_engines  # noqa: E402
import rlhf_rollout.engines.vllm.engine  # noqa: E402

__all__ = ["family_engines", "rlhf_rollout", "vllm"]
