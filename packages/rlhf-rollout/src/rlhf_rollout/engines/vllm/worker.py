"""vLLM's worker, which an engine has one of per GPU. It may run in a process of its own."""

from typing import Any

from vllm.platforms import current_platform

from rlhf_rollout.engines.vllm.internals import check_worker
from rlhf_rollout.engines.vllm.masking import mask_logits
from rlhf_rollout.engines.vllm.memory import kv_cache_limit
from rlhf_rollout.engines.vllm.warm_up import WarmUp

if current_platform.is_cpu():
    from vllm.v1.worker.cpu_worker import CPUWorker as PlatformWorker
else:
    from vllm.v1.worker.gpu_worker import Worker as PlatformWorker

check_worker(PlatformWorker)


class Worker(PlatformWorker):  # type: ignore[misc, valid-type]
    """Loads a model with masked ids, allocates and warms up what the requests that the engine expects need.

    vLLM takes it by its name.
    """

    def determine_available_memory(self) -> int:
        """See vLLM. The KV cache takes as many bytes."""
        available = int(super().determine_available_memory())
        limit = kv_cache_limit(self.get_kv_cache_spec(), self.vllm_config)
        return available if limit is None else min(available, limit)

    def load_model(self, *args: Any, **options: Any) -> None:
        """See vLLM. The model then gives the ids that the engine masks the logit -inf."""
        super().load_model(*args, **options)
        mask_logits(self.get_model(), self.vllm_config)

    def compile_or_warm_up_model(self) -> Any:
        """See vLLM."""
        with WarmUp.of(self.vllm_config).limited():
            return super().compile_or_warm_up_model()
