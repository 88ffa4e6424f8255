"""Where processes run."""

from typing import ClassVar

from pydantic import Field

from rlhf_cli.config.base import Section


class PlacementSection(Section):
    """Processes and devices. Without GPUs a process takes CPU cores instead."""

    TITLE: ClassVar[str] = "placement"

    actor_num_nodes: int = Field(1, ge=1, description="nodes of the policy's training processes")
    actor_num_gpus_per_node: int = Field(1, ge=1, description="training processes of the policy a node")
    critic_num_nodes: int = Field(1, ge=0, description="nodes of the critic's processes")
    critic_num_gpus_per_node: int = Field(1, ge=0, description="processes of the critic a node")
    ref_num_nodes: int = Field(1, ge=0, description="nodes of the reference's processes")
    ref_num_gpus_per_node: int = Field(1, ge=0, description="processes of the reference a node")
    reward_num_nodes: int = Field(1, ge=0, description="nodes of the reward models' processes")
    reward_num_gpus_per_node: int = Field(
        1, ge=0, description="processes of the reward models a node, each with all of them"
    )
    colocate_all_models: bool = Field(False, description="all models and engines share the same GPUs, taking turns")
    colocate_actor_ref: bool = Field(False, description="policy and reference share processes")
    colocate_critic_reward: bool = Field(False, description="critic and reward models share GPUs")
    deepspeed_enable_sleep: bool = Field(
        False, description="optimizer states leave the GPU while engines generate; with --colocate_all_models"
    )


class EngineSection(Section):
    """vLLM."""

    TITLE: ClassVar[str] = "generation engine (vLLM)"

    vllm_num_engines: int = Field(1, ge=1, description="engines")
    vllm_tensor_parallel_size: int = Field(1, ge=1, description="GPUs an engine")
    vllm_gpu_memory_utilization: float | None = Field(
        None,
        gt=0,
        le=1,
        description="share of a GPU's memory for an engine; None: 0.9, or beside models 0.6 if it sleeps, else 0.4",
    )
    vllm_max_num_seqs: int = Field(256, ge=1, description="responses that an engine writes at the same time")
    enforce_eager: bool = Field(False, description="no CUDA graphs: quicker start, slower generation")
    enable_prefix_caching: bool = Field(False, description="keep the attention state of prompt beginnings in common")
    vllm_enable_sleep: bool = Field(
        False, description="engines give their GPU memory back while models train; with --colocate_all_models"
    )
    weight_sync_checksum: bool = Field(
        False, description="check every weight that reaches an engine; slower, for debugging"
    )
