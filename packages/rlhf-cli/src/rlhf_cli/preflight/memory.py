"""What a run needs of the memory of its GPUs: a table, and notices on whether engines and trainers have to sleep."""

import math
import subprocess
from collections import Counter

from rlhf_rollout.commands.sections import SHARE_ALONE
from rlhf_rollout.host import local_gpus
from rlhf_train.memory import SPARE
from rlhf_train.online_job import OnlineJob
from rlhf_train.run_memory import run_memory

_GIB = 1 << 30
_QUERY = ("nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits")
_SUM = "fullest GPU"


def describe_memory(job: OnlineJob, gpu_bytes: int | None) -> str:
    """Return a table of what each process needs per GPU, and of what a GPU has, if `gpu_bytes` is known."""
    found = run_memory(job, gpu_bytes)
    width = max(map(len, [*found.needs, _SUM]))
    rows = []
    for name, need in found.needs.items():
        parts = sorted(need.items.items(), key=lambda item: -item[1])
        text = ", ".join(f"{part} {size / _GIB:.1f}" for part, size in parts if size >= 0.05 * _GIB)
        rows.append(f"  {name.ljust(width)} {need.total / _GIB:7.1f}" + (f"  {text}" if text else ""))
    sleeps = all(_sleep_flags(job).values())
    peak = found.in_turn if sleeps else found.together
    has = "" if gpu_bytes is None else f" of {gpu_bytes / _GIB:.1f}, {_verdict(peak, gpu_bytes)}"
    if sleeps:
        other = f"; {found.together / _GIB:.1f} without sleep"
    else:
        other = f"; {found.in_turn / _GIB:.1f} if engines and trainers sleep in turn" if job.plan.shares_gpus else ""
    rows.append(f"  {_SUM.ljust(width)} {peak / _GIB:7.1f}{has}{other}")
    return "\n".join(["memory per process and GPU, estimated, in GiB", *rows])


def sleep_notices(job: OnlineJob, gpu_bytes: int | None) -> list[str]:
    """Return a notice if sleep is on and not needed, or if the run does not fit on its GPUs, of `gpu_bytes` each."""
    if job.plan.device != "cuda" or gpu_bytes is None:
        return []
    found = run_memory(job, gpu_bytes)
    has = f"of {gpu_bytes / _GIB:.1f} GiB"
    if found.together * (1 + SPARE) <= gpu_bytes:
        if not job.takes_turns:
            return []
        given = " and ".join(flag for flag, is_on in _sleep_flags(job).items() if is_on)
        # The default share of engines that never sleep may be more than trainers leave.
        left = (1 - (1 + SPARE) * found.others / gpu_bytes) / max(Counter(job.plan.engines.cards).values())
        share = math.floor(100 * min(left, SHARE_ALONE)) / 100
        return [
            f"engines and trainers fit together: {found.together / _GIB:.1f} {has}; without {given}, and with"
            f" --vllm_gpu_memory_utilization {share:g} or less, no time goes into sleep and waking"
        ]
    if found.together <= gpu_bytes:
        return []
    needs = f"at their peaks, the processes on one GPU need {found.together / _GIB:.1f} {has}"
    if job.plan.shares_gpus and not job.max_staleness:  # they may take turns
        missing = [flag for flag, is_on in _sleep_flags(job).items() if not is_on]
        needs += f", and {found.in_turn / _GIB:.1f} if engines and trainers take turns"
        if found.in_turn <= gpu_bytes:
            return [f"{needs}: add {' '.join(missing)}"] if missing else []
    return [f"{needs}: lower --micro_train_batch_size or --vllm_max_num_seqs, or add {_remedies(job)}"]


def _remedies(job: OnlineJob) -> str:
    """Return the flags that save memory and that the run does not have."""
    actor = job.models["actor"]
    learning = actor.optimizer
    is_adam = learning.muon_momentum is None and actor.dtype == "bfloat16"
    critic = job.models.get("critic")
    is_whole = actor.tensor_parallel_size == actor.expert_parallel_size == 1
    most_ranks = max(placed.num_ranks for placed in job.plan.trainers)
    frozen = [spec for spec in job.models.values() if spec.optimizer is None and not spec.is_base_of(actor)]
    offloads = [spec.offload for spec in frozen]
    offloads += [job.reward.offload_models] if job.reward.models else []
    helps = {
        "--gradient_checkpointing": not actor.gradient_checkpointing,
        "--bf16_moments": is_adam and not learning.bf16_moments,
        "--adam_offload": is_adam and not learning.offload and (actor.zero_stage != 2 or most_ranks == 1),
        "--critic_lora_rank 64": critic is not None and critic.lora is None and is_whole,
        "--ref_reward_offload": not all(offloads),
        "--zero_stage 3 on more GPUs": actor.zero_stage < 3 and is_whole,
    }
    return ", ".join(flag for flag, is_new in helps.items() if is_new) or "GPUs"


def gpu_memory_bytes() -> int | None:
    """Return the memory of the smallest GPU of this machine, as its driver says; None if there is none or it does not
    say. Without CUDA, whose context would take memory from the run."""
    if not local_gpus():
        return None
    try:
        said = subprocess.run(_QUERY, capture_output=True, text=True, timeout=20, check=True).stdout
        return min(int(line) for line in said.split()) << 20
    except (OSError, subprocess.SubprocessError, ValueError):
        return None


def _verdict(need: int, gpu_bytes: int) -> str:
    if need > gpu_bytes:
        return "does not fit"
    return "fits" if need * (1 + SPARE) <= gpu_bytes else f"fits with less than {SPARE:.0%} to spare"


def _sleep_flags(job: OnlineJob) -> dict[str, bool]:
    return {"--vllm_enable_sleep": job.engine.enable_sleep, "--deepspeed_enable_sleep": job.trainer_sleep}
