"""Imports what a process with vLLM imports on a CPU, for `family_engines`. It starts no engine."""

import gc

gc.disable()  # it would look at all imported modules again and again, here and in each fork

from rlhf_rollout.engines.vllm.core import prepare_environment  # noqa: E402

prepare_environment()

import vllm.v1.engine.core_client  # noqa: E402
import vllm.v1.worker.cpu_worker  # noqa: E402

import family_engines  # noqa: E402
import rlhf_rollout.engines.vllm.engine  # noqa: E402

__all__ = ["family_engines", "rlhf_rollout", "vllm"]

gc.freeze()
gc.enable()
