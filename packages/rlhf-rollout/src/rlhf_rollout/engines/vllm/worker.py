"""vLLM's worker, which an engine has one of per GPU. It may run in a process of its own."""

from typing import Any

from vllm.platforms import current_platform

from rlhf_rollout.engines.vllm.warm_up import WarmUp

if current_platform.is_cpu():
    from vllm.v1.worker.cpu_worker import CPUWorker as PlatformWorker
else:
    from vllm.v1.worker.gpu_worker import Worker as PlatformWorker


class Worker(PlatformWorker):  # type: ignore[misc, valid-type]
    """Warms up for the requests that the engine expects; vLLM takes it by its name."""

    def compile_or_warm_up_model(self) -> Any:
        """See vLLM."""
        with WarmUp.of(self.vllm_config).limited():
            return super().compile_or_warm_up_model()
