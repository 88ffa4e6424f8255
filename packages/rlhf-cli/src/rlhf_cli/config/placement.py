"""Where processes run."""

from rlhf_data.options import Section, flag


class PlacementSection(Section, title="placement"):
    """Processes and devices. Without GPUs a process takes CPU cores instead."""

    actor_num_nodes: int = flag(1, "nodes of the policy's training processes", ge=1)
    actor_num_gpus_per_node: int = flag(1, "training processes of the policy a node", ge=1)
    critic_num_nodes: int = flag(1, "nodes of the critic's processes", ge=0)
    critic_num_gpus_per_node: int = flag(1, "processes of the critic a node", ge=0)
    ref_num_nodes: int = flag(1, "nodes of the reference's processes", ge=0)
    ref_num_gpus_per_node: int = flag(1, "processes of the reference a node", ge=0)
    reward_num_nodes: int = flag(1, "nodes of the reward models' processes", ge=0)
    reward_num_gpus_per_node: int = flag(1, "processes of the reward models a node, each with all of them", ge=0)
    colocate_all_models: bool = flag(False, "all models and engines share the same GPUs, taking turns")
    colocate_actor_ref: bool = flag(False, "policy and reference share processes")
    colocate_critic_reward: bool = flag(False, "critic and reward models share GPUs")
    deepspeed_enable_sleep: bool = flag(
        False, "optimizer states leave the GPU while engines generate; with --colocate_all_models"
    )

    def num_ranks(self, role: str) -> int:
        """Return the processes of "actor", "critic", "ref" or "reward"."""
        return getattr(self, f"{role}_num_nodes") * getattr(self, f"{role}_num_gpus_per_node")


class EngineSection(Section, title="generation engine (vLLM)"):
    """vLLM."""

    vllm_num_engines: int = flag(1, "engines", ge=1)
    vllm_tensor_parallel_size: int = flag(1, "GPUs an engine", ge=1)
    vllm_gpu_memory_utilization: float | None = flag(
        None,
        "share of a GPU's memory for an engine; None: 0.9, or beside models 0.6 if it sleeps, else 0.4",
        gt=0,
        le=1,
    )
    vllm_max_num_seqs: int = flag(256, "responses that an engine writes at the same time", ge=1)
    enforce_eager: bool = flag(False, "no CUDA graphs: quicker start, slower generation")
    enable_prefix_caching: bool = flag(False, "keep the attention state of prompt beginnings in common")
    vllm_enable_sleep: bool = flag(
        False, "engines give their GPU memory back while models train; with --colocate_all_models"
    )
    weight_sync_checksum: bool = flag(False, "check every weight that reaches an engine; slower, for debugging")
