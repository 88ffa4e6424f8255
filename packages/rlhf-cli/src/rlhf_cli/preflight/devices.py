"""What there is to run on."""

import os
from collections.abc import Collection

from rlhf_cli.config.ppo import PpoConfig, with_places
from rlhf_data.checks import without_effect
from rlhf_data.errors import ConfigError
from rlhf_rollout.host import local_gpus

_GPU_OPTIONS = (
    "vllm_gpu_memory_utilization",
    "enforce_eager",
    "vllm_enable_sleep",
    "deepspeed_enable_sleep",
    "colocate_all_models",
    "colocate_actor_ref",
    "colocate_critic_reward",
)
_RANK_OPTIONS = ("critic_num_nodes", "critic_num_gpus_per_node", "ref_num_nodes", "ref_num_gpus_per_node")
GPU_FLAGS = frozenset(
    {
        "actor_num_nodes",
        "actor_num_gpus_per_node",
        "reward_num_nodes",
        "reward_num_gpus_per_node",
        "vllm_tensor_parallel_size",
        *_RANK_OPTIONS,
    }
    | {name for name in _GPU_OPTIONS if name != "enforce_eager"}
)
"""Options that say on which or on how many GPUs something runs."""


def find_gpus() -> tuple[int, str | None]:
    """Return how many GPUs there are, and the address of the Ray cluster that has them; None is this machine alone."""
    from rlhf_train.online.ray_session import find_cluster, join

    address = find_cluster()
    if address is None:
        return local_gpus(), None
    join(address)

    import ray

    return int(ray.cluster_resources().get("GPU", 0)), address


def gpus_per_node(address: str | None) -> int | None:
    """Return the GPUs of the largest node of a joined cluster; None when there is this machine alone, or no GPU."""
    if address is None:
        return None
    import ray

    return int(max((node["Resources"].get("GPU", 0) for node in ray.nodes() if node["Alive"]), default=0)) or None


def cluster_notices(address: str | None) -> list[str]:
    """Return a notice when the run joins a cluster that nobody named."""
    if address is None or os.environ.get("RAY_ADDRESS"):
        return []
    return [f"joins the Ray cluster at {address}; set RAY_ADDRESS=local to start one for this run"]


def check_device(config: PpoConfig, given: Collection[str], num_gpus: int) -> list[str]:
    """Return notices for options that a machine without GPUs does not heed. Raises ConfigError for one it cannot."""
    if num_gpus:
        return []
    if config.engine.vllm_tensor_parallel_size > 1:
        message = f"--vllm_tensor_parallel_size is {config.engine.vllm_tensor_parallel_size} and there is no GPU"
        raise ConfigError(message, hint="use --vllm_num_engines for more engines")
    return on_cpu(with_places(config, given))


def on_cpu(given: Collection[str]) -> list[str]:
    """Return notices for options that concern GPUs only."""
    return without_effect(
        given,
        (True, _GPU_OPTIONS, "there is no GPU, everything shares the CPU"),
        (True, _RANK_OPTIONS, "without GPUs every model runs in the policy's processes"),
    )
