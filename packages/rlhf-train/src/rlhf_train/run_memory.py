"""The memory that the processes of an online run need on their GPUs: `memory` for each process, added up by GPU.

The dry run prints this estimate, and notices on sleep follow from it. Torch is imported with the first model's config.
"""

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from rlhf_train.cluster.places import ProcessPlan
from rlhf_train.costs import count_parameters
from rlhf_train.learning.learning_spec import is_teacher
from rlhf_train.memory import ITEM_BYTES, Model, Need, Passes, engine_memory, trainer_memory
from rlhf_train.online_job import OnlineJob
from rlhf_train.specs import ModelSpec

STEPS = 10  # whose longest responses are expected
_DRAWS = 20  # of so many steps


@dataclass(frozen=True, slots=True)
class CardMemory:
    """What the processes on one GPU need.

    Attributes:
        node, gpu: its numbers in the plan.
        counts: number of processes by the name of their kind.
        together: bytes with all processes at work.
        others: the part of `together` that is not for engines.
        phases: bytes by phase, if engines and trainers sleep in turn, and trained models take turns, too.
    """

    node: int
    gpu: int
    counts: Mapping[str, int]
    together: int
    others: int
    phases: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class RunMemory:
    """What the processes of a run need.

    Attributes:
        needs: of each process, by the name of its kind, with the run's flags for sleep.
        together: bytes on the GPU that needs most, with all processes at work.
        in_turn: likewise, if engines and trainers sleep in turn, and trained models take turns, too.
        others: the part of `together` that is not for engines.
        cards: what each GPU has.
    """

    needs: Mapping[str, Need]
    together: int
    in_turn: int
    others: int
    cards: tuple[CardMemory, ...]


def run_memory(job: OnlineJob, gpu_bytes: int | None = None, mean_response_tokens: float | None = None) -> RunMemory:
    """Return what the processes of a run need on GPUs, of `gpu_bytes` each if that is known.

    With `mean_response_tokens`, it is what they are expected to need within `STEPS` steps; see `largest_passes`.
    """
    trainers = job.plan.trainers
    at_once = {placed.name: _trainer(job, placed, mean_response_tokens, in_turn=False) for placed in trainers}
    in_turn = {placed.name: _trainer(job, placed, mean_response_tokens, in_turn=True) for placed in trainers}
    draft = _config(job.engine.draft_model) if job.engine.draft_model else None
    engine = engine_memory(_config(job.models["actor"].path), job.engine, gpu_bytes, draft)
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
        passes = sum(need.forward * number[name] for name, need in in_turn.items())
        updates = max(asleep + (need.total - need.asleep) * number[name] for name, need in in_turn.items())
        phases = {
            "generation and rewards": asleep + engine.total * engines,
            "log-probs and values": passes + engine.asleep * engines,
            "updates": updates + engine.asleep * engines,
        }
        phases = {name: scorers + size for name, size in phases.items()}
        found.append(CardMemory(*card, number, rest + engine.total * engines, rest, phases))
    fullest = max(found, key=lambda card: (card.together, card.others))
    trainers = in_turn if job.trainer_sleep else at_once
    most_in_turn = max(max(card.phases.values()) for card in found)
    return RunMemory(trainers | others, fullest.together, most_in_turn, fullest.others, tuple(found))


def _trainer(job: OnlineJob, placed: ProcessPlan, mean_response_tokens: float | None, *, in_turn: bool) -> Need:
    """Return what a process of a rank set needs; see `run_memory`, and `trainer_memory` for `in_turn`."""
    actor = job.models["actor"]
    num_shards = placed.num_ranks // actor.ranks_per_batch
    models = []
    for role in placed.roles:
        spec = job.models[role]
        is_base = role == "reference" and "actor" in placed.roles and spec.is_base_of(actor)
        is_adapted = is_base or spec.is_average
        runs_forward = role in job.column_roles
        config = _config(spec.path)
        # With a teacher's distributions: the logits, their gradient by the policy loss, and that by the teacher's term.
        distribution = job.algorithm.distribution
        num_logits = 3 * (distribution is not None)
        columns = 0
        if is_teacher(role) and distribution is not None:
            num_rows = math.ceil(job.batch.num_rollouts / num_shards)
            columns = 4 * num_rows * job.engine.max_model_len * distribution.num_columns
        models.append(Model(config, spec, role != "critic", is_adapted, runs_forward, num_logits, columns))
    passes = largest_passes(job, num_shards, mean_response_tokens)
    copies = {"ipc": 1, "nccl": 2}.get(job.engine.weight_transfer, 0) if "actor" in placed.roles else 0
    copies = copies if job.plan.engines.places else 0
    return trainer_memory(models, passes, placed.num_ranks, copies, in_turn=in_turn)


def largest_passes(job: OnlineJob, num_shards: int, mean_response_tokens: float | None = None) -> Passes:
    """Return the largest passes of a rank, if every prompt and response is as long as it may be.

    With `mean_response_tokens`, lengths of responses are geometric with this mean. Passes are then those expected
    within `STEPS` steps: a rank sorts its rollouts of an update by length, so that its first pass has the longest ones.
    The rollouts of a prompt that they share stay together.
    """
    batch = job.batch
    longest = job.engine.max_model_len
    response = job.sampling.max_tokens if job.agent is None else longest - 1
    prompt = longest - response
    together = batch.n_samples_per_prompt if job.models["actor"].share_prompts else 1

    def tokens_of(num_rows: int, num_rollouts: int, num_shards: int, unit: int) -> int:
        if mean_response_tokens is None or batch.micro_batch_tokens:
            return num_rows * response
        # With staleness, short responses are trained before long ones that began earlier, so that one batch may get the
        # long ones of all batches that are under way.
        under_way = 1 + job.max_staleness
        num_units = max(num_rollouts // num_shards * under_way // unit, 1)
        num_shares = math.ceil(STEPS * batch.num_rollouts / num_rollouts / under_way) * num_shards
        shape = _DRAWS, num_shares, num_units, unit
        lengths = np.random.default_rng(0).geometric(1 / mean_response_tokens, shape)
        of_units = np.minimum(lengths, response).sum(axis=3)
        longest = np.sort(of_units, axis=2)[:, :, -(num_rows // unit) :].sum(axis=2)
        return int(longest.max(axis=1).mean())

    def of(num_rows: int, num_rollouts: int) -> tuple[int, int]:
        num_rows = num_rows if batch.micro_batch_tokens is None else num_rollouts
        num_rows = min(num_rows, math.ceil(num_rollouts / num_shards))
        num_prompts = math.ceil(num_rows / together)
        num_tokens = tokens_of(num_rows, num_rollouts, num_shards, min(together, num_rows))
        most = batch.micro_batch_tokens or math.inf
        return min(num_tokens + num_prompts * prompt, most), min(num_tokens, most)

    most = max(batch.micro_train_batch_size, batch.micro_rollout_batch_size)
    num_rows = batch.num_rollouts if batch.micro_batch_tokens else min(most, batch.num_rollouts)
    return Passes(
        train=of(batch.micro_train_batch_size, batch.train_batch_size),
        forward=of(batch.micro_rollout_batch_size, batch.num_rollouts),
        most_targets=min(tokens_of(num_rows, batch.num_rollouts, 1, 1), batch.micro_batch_tokens or math.inf),
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


def reward_model_bytes(path: str, dtype: str) -> int:
    """Return the bytes of the weights of a reward model that is loaded in `dtype`."""
    return ITEM_BYTES[dtype] * count_parameters(_config(path), has_head=False).total


def _config(path: str) -> Any:
    from rlhf_models.loading import load_config  # imports torch

    return load_config(path)
