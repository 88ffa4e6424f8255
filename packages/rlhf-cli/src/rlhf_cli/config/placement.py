"""Where processes run."""

from rlhf_data.options import Section, flag
from rlhf_rollout.commands import sections

_ROLES = ("actor", "critic", "ref", "reward")


class PlacementSection(Section, title="placement"):
    """Processes and devices. Without GPUs a process takes CPU cores instead."""

    actor_num_nodes: int = flag(1, "nodes of the policy's training processes", ge=1)
    actor_num_gpus_per_node: int = flag(1, "training processes of the policy per node", ge=1)
    critic_num_nodes: int | None = flag(
        None,
        "nodes of the critic's processes; 0: it lives in the policy's; None: 1, or those of whom it shares GPUs with",
        ge=0,
    )
    critic_num_gpus_per_node: int | None = flag(
        None, "processes of the critic per node; 0 and None: as for its nodes", ge=0
    )
    ref_num_nodes: int | None = flag(
        None,
        "nodes of the reference's processes; 0 and None: as for the critic",
        ge=0,
    )
    ref_num_gpus_per_node: int | None = flag(
        None, "processes of the reference per node; 0 and None: as for its nodes", ge=0
    )
    reward_num_nodes: int | None = flag(
        None,
        "nodes of the reward models' processes; 0: they live where the policy does; None: as for the critic",
        ge=0,
    )
    reward_num_gpus_per_node: int | None = flag(
        None, "processes of the reward models per node, each with all of them; 0 and None: as for their nodes", ge=0
    )
    colocate_all_models: bool = flag(False, "all models and engines share the same GPUs, taking turns")
    colocate_actor_ref: bool = flag(False, "policy and reference share processes")
    colocate_critic_reward: bool = flag(False, "critic and reward models share GPUs")
    deepspeed_enable_sleep: bool = flag(
        False, "optimizer states leave the GPU while engines generate; with --colocate_all_models"
    )

    plan_gpus: int | None = flag(
        None, "with --dry_run: GPUs to plan for; None: those that are here, or that the other flags name", ge=0
    )

    def num_ranks(self, role: str) -> int:
        """Return the processes of "actor", "critic", "ref" or "reward"; 0 when they live in the actor's."""
        return self._count(role, "num_nodes") * self._count(role, "num_gpus_per_node")

    def _count(self, role: str, what: str) -> int:
        count = getattr(self, f"{role}_{what}")
        if count is not None:
            return count
        if self.colocate_all_models or (role == "ref" and self.colocate_actor_ref):
            return getattr(self, f"actor_{what}")
        return self._count("critic", what) if role == "reward" and self.colocate_critic_reward else 1

    @property
    def most_nodes(self) -> int:
        """The most nodes that a model asks for."""
        return max(self._count(role, "num_nodes") for role in _ROLES)

    @property
    def most_gpus_per_node(self) -> int:
        """The most GPUs that a model asks for on one node."""
        return max(self._count(role, "num_gpus_per_node") for role in _ROLES)


class EngineSection(sections.EngineSection):
    """vLLM engines beside trained models."""

    vllm_num_engines: int = flag(1, "engines", ge=1)
    vllm_enable_sleep: bool = flag(
        False, "engines give their GPU memory back while models train; with --colocate_all_models"
    )
    weight_sync_checksum: bool = flag(False, "check every weight that reaches an engine; slower, for debugging")
