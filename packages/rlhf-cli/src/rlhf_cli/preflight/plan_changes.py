"""Which flags make a run fit on its GPUs: the fewest of a list that is tried from cheap to dear."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rlhf_cli.preflight.models import check_attention
from rlhf_data.errors import ConfigError
from rlhf_train.memory import SPARE

if TYPE_CHECKING:
    from rlhf_cli.config.ppo import PpoConfig
    from rlhf_train.online_job import OnlineJob
    from rlhf_train.run_memory import CardMemory, RunMemory

_RANK = "64"  # of adapters
_MICRO_SIZES = ("--micro_train_batch_size", "--micro_rollout_batch_size")
_PASS_TOKENS = ("16384", "32768", "65536")
_SIMILAR = 1.03  # times the least seconds


@dataclass(frozen=True, slots=True)
class Planned:
    """A run that is planned.

    Attributes:
        config: its configuration, with folders for models.
        job: what would run.
        memory: what its processes need; None without GPUs.
    """

    config: "PpoConfig"
    job: "OnlineJob"
    memory: "RunMemory | None"

    @property
    def sleeps(self) -> bool:
        """Whether engines and trainers sleep in turn."""
        return self.job.engine.enable_sleep and self.job.trainer_sleep

    @property
    def peak(self) -> int:
        """Bytes on the fullest GPU."""
        return max(map(self.peak_of, self.memory.cards))

    def peak_of(self, card: "CardMemory") -> int:
        """Return the bytes of a GPU at the peak of the run."""
        return max(card.phases.values()) if self.sleeps else card.together

    def lacks(self, gpu_bytes: int) -> str:
        """Return why the run does not fit on GPUs of so many bytes, with `SPARE` left; empty if it does."""
        engine = self.memory.needs.get(self.job.plan.engines.name)
        share = int(self.job.engine.gpu_memory_utilization * gpu_bytes)
        if engine is not None and engine.total > share:
            return f"an engine needs {_gib(engine.total)}, and its share of a GPU is {_gib(share)}"
        if self.peak * (1 + SPARE) > gpu_bytes:
            return f"the fullest GPU needs {_gib(self.peak)}, and {SPARE:.0%} to spare, of {_gib(gpu_bytes)}"
        return ""


def changes(words: Sequence[str], plan: Callable[[Sequence[str]], Planned], gpu_bytes: int) -> list[str] | None:
    """Return flags that make a run fit, to add to `words`; None if no flags of the list do.

    Args:
        words: flags that do not fit.
        plan: makes a plan of flags; raises ConfigError for those that contradict each other.
        gpu_bytes: of a GPU.
    """
    added: list[list[str]] = []

    def fits(these: Sequence[Sequence[str]]) -> bool | None:
        """Return whether the run fits with `these` flags; None if it cannot have them."""
        try:
            return not plan([*words, *(word for flags in these for word in flags)]).lacks(gpu_bytes)
        except ConfigError:
            return None

    for change in _list(plan(words).job):
        found = fits([*added, change])
        if found is not None:
            added.append(change)
        if found:
            break
    else:
        return None
    # What a dearer change has made superfluous goes again, the dearest first.
    for change in reversed(added[:-1]):
        rest = [other for other in added if other is not change]
        if fits(rest):
            added = rest
    last = {change[0]: change for change in added}  # a flag that was lowered twice
    return [word for change in last.values() for word in change]


def adapters(words: Sequence[str], plan: Callable[[Sequence[str]], Planned], gpu_bytes: int) -> list[str] | None:
    """Return flags that make a run fit by LoRA adapters, trained instead of all weights; None if no flags do.

    Args:
        words, plan, gpu_bytes: see `changes`.
    """
    models = plan(words).job.models
    flags = {"actor": "--lora_rank", "critic": "--critic_lora_rank"}
    added = [word for role, flag in flags.items() if role in models and not models[role].lora for word in (flag, _RANK)]
    try:
        is_enough = not plan([*words, *added]).lacks(gpu_bytes)
    except ConfigError:
        return None
    more = [] if is_enough else changes([*words, *added], plan, gpu_bytes)
    return [*added, *more] if added and more is not None else None


def passes(
    words: Sequence[str], plan: Callable[[Sequence[str]], Planned], gpu_bytes: int, seconds: Callable[[Planned], float]
) -> list[str]:
    """Return flags of training passes with which a step takes less time; none if `words` choose the size of passes.

    Small models need large passes. Of passes that differ little, the smallest are taken: they need the least memory.

    Args:
        words, plan, gpu_bytes: see `changes`.
        seconds: returns what a step takes.
    """
    from rlhf_models.loading import load_config

    names = {word.partition("=")[0] for word in words}
    now = plan(words)
    if names & {"--micro_batch_tokens", *_MICRO_SIZES} or not now.job.models["actor"].packing:
        return []
    found: list[tuple[float, list[str]]] = [(seconds(now), [])]
    for size in _PASS_TOKENS:
        for more in (["--micro_batch_tokens", size], ["--micro_batch_tokens", size, "--share_prompts"]):
            with suppress(ConfigError):  # as where a sample is longer, or the model's attention cannot share prompts
                planned = plan([*words, *more])
                check_attention(planned.config.model, load_config(planned.job.models["actor"].path))
                if not planned.lacks(gpu_bytes):
                    found.append((seconds(planned), more))
    least = min(found)[0]
    return next(flags for taken, flags in found if taken <= _SIMILAR * least)


def _list(job: "OnlineJob") -> Iterator[list[str]]:
    """Yield changes of a job from cheap to dear, each of which may be added to those before it."""
    batch = job.batch
    if job.plan.shares_gpus and not job.max_staleness:
        yield ["--vllm_enable_sleep", "--deepspeed_enable_sleep"]
    if any(spec.optimizer is None for spec in job.models.values()) or job.reward.models:
        yield ["--ref_reward_offload"]
    yield ["--packing_samples"]
    most = max(batch.micro_train_batch_size, batch.micro_rollout_batch_size) if batch.micro_batch_tokens is None else 1
    size = most // 2
    while size >= max(most // 4, 1):
        yield ["--micro_train_batch_size", str(size), "--micro_rollout_batch_size", str(size)]
        size //= 2
    yield ["--gradient_checkpointing"]
    while size:
        yield ["--micro_train_batch_size", str(size), "--micro_rollout_batch_size", str(size)]
        size //= 2
    yield ["--zero_stage", "3"]
    num_gpus = job.engine.tensor_parallel_size * job.plan.engines.num_ranks
    parallel = 2 * job.engine.tensor_parallel_size
    while parallel <= num_gpus:  # a size that no node has is an error of the plan
        yield ["--vllm_tensor_parallel_size", str(parallel), "--vllm_num_engines", str(num_gpus // parallel)]
        parallel *= 2
    yield ["--bf16_moments"]
    yield ["--adam_offload"]
    slots = job.engine.max_num_seqs // 2
    while slots >= 16:
        yield ["--vllm_max_num_seqs", str(slots)]
        slots //= 2


def _gib(size: int) -> str:
    return f"{size / (1 << 30):.1f} GiB"
