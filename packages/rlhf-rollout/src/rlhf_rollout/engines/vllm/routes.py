"""The experts that vLLM's kernels choose on a CPU, where vLLM itself tells none. Runs in vLLM's workers.

On GPUs, vLLM asks its routers. On CPUs, one kernel chooses the experts and computes them.
"""

from typing import Any

import torch
from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts

_choose = CPUUnquantizedExperts._select_experts


def _choose_and_tell(self: CPUUnquantizedExperts, *args: Any, **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
    weights, routes = _choose(self, *args, **options)
    if self.routing_replay_capture_fn is not None:
        self.routing_replay_capture_fn(routes)
    return weights, routes


def capture_on_cpu() -> None:
    """Let vLLM be built with `enable_return_routed_experts` on a CPU, by having its kernels tell what they choose."""
    CPUUnquantizedExperts._select_experts = _choose_and_tell
    CPUUnquantizedExperts.supports_routing_replay_capture = lambda self: True
