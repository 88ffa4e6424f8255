"""The GPUs and the Ray cluster that a run can use, and checks of options against them."""

import os
from collections.abc import Collection

from rlhf_cli.config.ppo import PpoConfig, with_places
from rlhf_data.errors import ConfigError
from rlhf_data.options.checks import without_effect
from rlhf_rollout.host import local_gpus

# Options without effect on a machine without GPUs.
_GPU_OPTIONS = (
    "vllm_gpu_memory_utilization",
    "enforce_eager",
    "vllm_enable_sleep",
    "vllm_use_mps",
    "deepspeed_enable_sleep",
    "colocate_all_models",
    "colocate_actor_ref",
    "colocate_critic_reward",
)
_MEMORY_OPTIONS = ("adam_offload", "ref_reward_offload")
# Likewise: without GPUs, these models have no processes of their own.
_RANK_OPTIONS = (
    *("critic_num_nodes", "critic_num_gpus_per_node", "ref_num_nodes", "ref_num_gpus_per_node"),
    *("teacher_num_nodes", "teacher_num_gpus_per_node"),
)
# Options that say on how many GPUs, or on which ones, something runs.
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


def find_gpus() -> tuple[list[int], str | None]:
    """Return the number of GPUs of each node, and the address of the Ray cluster, or None for this machine alone."""
    from rlhf_train.cluster.ray_session import find_cluster, join

    address = find_cluster()
    if address is None:
        return [local_gpus()], None
    return [int(node.get("GPU", 0)) for node in join(address)], address


def cluster_notices(address: str | None) -> list[str]:
    """Return a notice if the run joins a cluster that was found, and not named by RAY_ADDRESS, or starts its own.

    Another one says that machines cannot join the cluster at `address` if its head named all of its addresses.
    """
    if address is None:
        return ["this run starts its own Ray, without a dashboard; `ray start --head` before a run starts one with it"]
    notices = []
    if address.startswith("0.0.0.0:"):
        notices.append(
            f"the Ray cluster says that it is at {address}, where no other machine finds it; for several machines, type"
            " `ray start --head` without --node-ip-address 0.0.0.0"
        )
    if os.environ.get("RAY_ADDRESS"):
        return notices
    return [*notices, f"joining the Ray cluster at {address}; set RAY_ADDRESS=local to start one for this run instead"]


def check_device(config: PpoConfig, given: Collection[str], num_gpus: int) -> list[str]:
    """Return a notice for each option that has no effect without GPUs. Raises ConfigError for one that needs a GPU."""
    if num_gpus:
        return []
    if config.engine.vllm_tensor_parallel_size > 1 and config.rollout.replay is None:
        message = f"--vllm_tensor_parallel_size is {config.engine.vllm_tensor_parallel_size} and there is no GPU"
        raise ConfigError(message, hint="use --vllm_num_engines for more engines")
    return on_cpu(with_places(config, given))


def on_cpu(given: Collection[str]) -> list[str]:
    """Return a notice for each option in `given` that has no effect without GPUs."""
    return without_effect(
        given,
        (True, _GPU_OPTIONS, "there is no GPU, everything shares the CPU"),
        (True, _MEMORY_OPTIONS, "there is no GPU, whose memory it saves"),
        (True, _RANK_OPTIONS, "without GPUs every model runs in the policy's processes"),
    )
