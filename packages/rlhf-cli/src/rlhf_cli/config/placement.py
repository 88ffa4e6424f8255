"""Options of placement: how many processes each model has, and which of them share devices."""

from rlhf_data.options.declare import Section, flag, one_of
from rlhf_rollout.commands import sections
from rlhf_rollout.mps import USE_MPS_HELP

SyncBackend = one_of(("host", "nccl"))
LoraSync = one_of(("merge", "adapter"))
_ROLES = ("actor", "critic", "ref", "teacher", "reward")


class PlacementSection(Section, title="placement"):
    """Processes and their GPUs. Without GPUs, processes run on CPU cores."""

    actor_num_nodes: int = flag(1, "nodes for the policy's training processes", ge=1)
    actor_num_gpus_per_node: int = flag(1, "training processes of the policy per node", ge=1)
    critic_num_nodes: int | None = flag(
        None,
        "nodes for the critic's processes; 0: run it in the policy's processes; None: as many as the policy has if they"
        " share GPUs, else 1",
        ge=0,
    )
    critic_num_gpus_per_node: int | None = flag(
        None, "processes of the critic per node; 0 and None: see --critic_num_nodes", ge=0
    )
    ref_num_nodes: int | None = flag(
        None,
        "nodes for the reference's processes; 0 and None: see --critic_num_nodes",
        ge=0,
    )
    ref_num_gpus_per_node: int | None = flag(
        None, "processes of the reference per node; 0 and None: see --critic_num_nodes", ge=0
    )
    teacher_num_nodes: int | None = flag(
        None, "nodes for the teacher's processes; 0 and None: see --critic_num_nodes", ge=0
    )
    teacher_num_gpus_per_node: int | None = flag(
        None, "processes of the teacher per node; 0 and None: see --critic_num_nodes", ge=0
    )
    reward_num_nodes: int | None = flag(
        None,
        "nodes for the reward models' processes; 0: use the policy's GPUs; None: as many as the critic or the policy"
        " has if they share GPUs, else 1",
        ge=0,
    )
    reward_num_gpus_per_node: int | None = flag(
        None,
        "processes of the reward models per node, each with all reward models; 0 and None: see --reward_num_nodes",
        ge=0,
    )
    colocate_all_models: bool = flag(False, "all models and engines share the same GPUs and take turns")
    colocate_actor_ref: bool = flag(False, "policy and reference share processes")
    colocate_critic_reward: bool = flag(False, "critic and reward models share GPUs")
    deepspeed_enable_sleep: bool = flag(
        False,
        "with --colocate_all_models: keep optimizer states in CPU memory except in updates of their model, and frozen"
        " models while engines generate or models train",
    )

    plan_gpus: int | None = flag(
        None, "with --dry_run: number of GPUs to plan for; None: the GPUs here, or as many as the flags ask for", ge=0
    )

    plan_gpu_memory: float | None = flag(
        None,
        "with --dry_run: GiB of memory of a GPU to plan for, such as 80; None: what the smallest GPU here has",
        gt=0,
    )

    def num_ranks(self, role: str) -> int:
        """Return the number of processes of "actor", "critic", "ref", "teacher" or "reward"; 0: the actor's."""
        return self.count(role, "num_nodes") * self.count(role, "num_gpus_per_node")

    def count(self, role: str, what: str) -> int:
        """Return "num_nodes" or "num_gpus_per_node" (`what`) of a role.

        The default is the value of the role with which it shares GPUs, else 1.
        """
        count = getattr(self, f"{role}_{what}")
        if count is not None:
            return count
        if self.colocate_all_models or (role == "ref" and self.colocate_actor_ref):
            return getattr(self, f"actor_{what}")
        return self.count("critic", what) if role == "reward" and self.colocate_critic_reward else 1

    @property
    def most_gpus_per_node(self) -> int:
        """The largest number of GPUs per node that a model asks for."""
        return max(self.count(role, "num_gpus_per_node") for role in _ROLES)


class EngineSection(sections.EngineSection):
    """vLLM engines beside trained models."""

    vllm_num_engines: int = flag(
        1,
        "number of vLLM engines; with --colocate_all_models they spread over the policy's GPUs, several on one if there"
        " are more",
        ge=1,
    )
    vllm_enable_sleep: bool = flag(
        False, "with --colocate_all_models: engines free their GPU memory while models train"
    )
    vllm_use_mps: bool = flag(False, USE_MPS_HELP)
    vllm_sync_backend: SyncBackend | None = flag(
        None,
        "how new weights reach engines on GPUs of their own. host: through host memory, and TCP between machines; nccl:"
        " from GPU to GPU by NCCL, on CPUs by gloo; None: nccl on GPUs of several machines, else host",
    )
    lora_sync: LoraSync = flag(
        "merge",
        "with --lora_rank, what engines get of new weights. merge: all weights, with the adapters merged; adapter: the"
        " adapters alone, which vLLM applies to the weights of --pretrain as it computes: fewer bytes, slower"
        " generation",
    )
    weight_sync_checksum: bool = flag(False, "verify a checksum of all weights sent to engines: slower, for debugging")
