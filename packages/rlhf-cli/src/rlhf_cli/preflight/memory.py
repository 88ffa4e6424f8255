"""What a run needs of the memory of its GPUs: a table, and notices on whether engines and trainers have to sleep."""

import math
import subprocess
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rlhf_rollout.commands.sections import SHARE_ALONE
from rlhf_rollout.host import local_gpus
from rlhf_train.cluster.places import ProcessPlan
from rlhf_train.memory import SPARE, Model, Need, Passes, engine_memory, trainer_memory
from rlhf_train.online_job import OnlineJob
from rlhf_train.specs import ModelSpec

_GIB = 1 << 30
_QUERY = ("nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits")
_SUM = "fullest GPU"


@dataclass(frozen=True, slots=True)
class RunMemory:
    """What the processes of a run need.

    Attributes:
        needs: of each process, by the name of its kind, with the run's flags for sleep.
        together: bytes on the GPU that needs most, with all processes at work.
        in_turn: likewise, if engines and trainers sleep in turn, and trained models take turns, too.
        others: the part of `together` that is not for engines.
    """

    needs: Mapping[str, Need]
    together: int
    in_turn: int
    others: int


def run_memory(job: OnlineJob, gpu_bytes: int | None = None) -> RunMemory:
    """Return what the processes of a run need on GPUs, of `gpu_bytes` each if that is known."""
    at_once = {placed.name: _trainer(job, placed, in_turn=False) for placed in job.plan.trainers}
    in_turn = {placed.name: _trainer(job, placed, in_turn=True) for placed in job.plan.trainers}
    engine = engine_memory(_config(job.models["actor"].path), job.engine, gpu_bytes)
    others: dict[str, Need] = {}
    if job.plan.engines.places:
        others[job.plan.engines.name] = engine
    if job.plan.scorers is not None:
        others[job.plan.scorers.name] = _scorers(job)
    counts = {placed.name: Counter(placed.cards) for placed in job.plan.all_processes}
    cards = sorted({card for count in counts.values() for card in count})
    found = []
    for card in cards:
        number = {name: count[card] for name, count in counts.items()}
        engines = number.get(job.plan.engines.name, 0)
        scorers = sum(need.total * number[name] for name, need in others.items() if need is not engine)
        rest = scorers + sum(need.total * number[name] for name, need in at_once.items())
        asleep = sum(need.asleep * number[name] for name, need in in_turn.items())
        # Processes run models at the same time; in updates one process is awake.
        at_work = [sum(need.forward * number[name] for name, need in in_turn.items())]
        at_work += [asleep + (need.total - need.asleep) * number[name] for name, need in in_turn.items()]
        turns = max(max(at_work) + engine.asleep * engines, asleep + engine.total * engines)
        found.append((rest + engine.total * engines, rest, scorers + turns))
    together, rest, _ = max(found)
    trainers = in_turn if job.trainer_sleep else at_once
    return RunMemory(trainers | others, together, max(turns for *_, turns in found), rest)


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
    is_whole = actor.tensor_parallel_size == 1
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


def _config(path: str) -> Any:
    from rlhf_models.loading import load_config  # imports torch

    return load_config(path)


def _verdict(need: int, gpu_bytes: int) -> str:
    if need > gpu_bytes:
        return "does not fit"
    return "fits" if need * (1 + SPARE) <= gpu_bytes else f"fits with less than {SPARE:.0%} to spare"


def _sleep_flags(job: OnlineJob) -> dict[str, bool]:
    return {"--vllm_enable_sleep": job.engine.enable_sleep, "--deepspeed_enable_sleep": job.trainer_sleep}


def _trainer(job: OnlineJob, placed: ProcessPlan, *, in_turn: bool) -> Need:
    """Return what a process of a rank set needs; see `trainer_memory` for `in_turn`."""
    actor = job.models["actor"]
    models = []
    for role in placed.roles:
        spec = job.models[role]
        is_adapted = role == "reference" and "actor" in placed.roles and spec.is_base_of(actor)
        runs_forward = role != "actor" or job.algorithm.runs_actor
        config = _config(spec.path)
        models.append(Model(config, spec, role != "critic", is_adapted, runs_forward))
    passes = largest_passes(job, placed.num_ranks // actor.ranks_per_batch)
    copies = {"ipc": 1, "nccl": 2}.get(job.engine.weight_transfer, 0) if "actor" in placed.roles else 0
    copies = copies if job.plan.engines.places else 0
    return trainer_memory(models, passes, placed.num_ranks, copies, in_turn=in_turn)


def largest_passes(job: OnlineJob, num_shards: int) -> Passes:
    """Return the largest passes of a rank, if every prompt and response is as long as it may be."""
    batch = job.batch
    longest = job.engine.max_model_len
    response = job.sampling.max_tokens if job.agent is None else longest - 1
    prompt = longest - response

    def of(num_rows: int, num_rollouts: int) -> tuple[int, int]:
        num_rows = num_rows if batch.micro_batch_tokens is None else num_rollouts
        num_rows = min(num_rows, math.ceil(num_rollouts / num_shards))
        num_prompts = num_rows
        if job.models["actor"].share_prompts:
            num_prompts = math.ceil(num_rows / batch.n_samples_per_prompt)
        most = batch.micro_batch_tokens or math.inf
        return min(num_rows * response + num_prompts * prompt, most), min(num_rows * response, most)

    most = max(batch.micro_train_batch_size, batch.micro_rollout_batch_size)
    num_rows = batch.num_rollouts if batch.micro_batch_tokens else min(most, batch.num_rollouts)
    return Passes(
        train=of(batch.micro_train_batch_size, batch.train_batch_size),
        forward=of(batch.micro_rollout_batch_size, batch.num_rollouts),
        most_targets=min(num_rows * response, batch.micro_batch_tokens or math.inf),
    )


def _scorers(job: OnlineJob) -> Need:
    """Return what a process needs that has one replica of each reward model, or its part of a divided one."""
    from rlhf_models.reward import MAX_BATCH_TOKENS  # imports torch

    dtype = job.engine.dtype
    reward = job.reward
    longest = job.engine.max_model_len
    num_tokens = min(reward.calls.batch_size * longest, max(MAX_BATCH_TOKENS, longest))
    passes = Passes(train=(0, 0), forward=(num_tokens, 0), most_targets=0)
    num_ranks = job.plan.scorers.num_ranks if job.plan.scorers else 1
    items: Counter[str] = Counter()
    for path in reward.models:
        # Each model is in a process of its own, which keeps the memory of its passes.
        is_divided = path in reward.divided_models
        spec = ModelSpec(path=path, dtype=dtype, zero_stage=3 if is_divided else 0, offload=reward.offload_models)
        need = trainer_memory([Model(_config(path), spec, has_head=False)], passes, num_ranks if is_divided else 1)
        items.update(need.items)
    return Need(items)
