"""The seconds of a step of an online run, by phase: measured rates, times the operations and bytes of the shapes.

The rates of GPUs come from the phases of `FITTED`, reports in tools/bench/results: most by least squares of relative
errors, with less weight for large ones, the others as their comments say. The test
tools/bench/tests/plan_against_reports_test.py compares these reports and the others, which are predicted.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

from rlhf_train.costs import cached_size, count_adapters, count_parameters, mlps_of, pass_costs, sizes_of
from rlhf_train.learning.learning_spec import is_teacher
from rlhf_train.memory import ITEM_BYTES, layer_bytes
from rlhf_train.online_job import OnlineJob
from rlhf_train.specs import ModelSpec

FITTED = (
    *("online-h200-w1-options", "online-h200-w1-reference", "online-h200-w2", "online-h200-w3", "online-h200-w4"),
    *("online-h200-lr0", "online-h200-7b-ppo", "online-h200x2-7b-apart", "online-h100x2-7b-ppo", "online-h200x4-seeds"),
    *("online-h100-w1-sleep", "online-h100-w1-start-plain", "online-h200-w1-start", "online-h200-w1-tail"),
    *("online-h200-w1-mixed", "online-h200-w2-mixed", "online-h200x2-w9-in-turn"),
    *("online-h200-0.5b-short", "online-h200x2-0.5b-short", "online-h200x2-7b-zero3", "online-h100x2-tail-in-turn"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """What a device does per second, and the seconds of what has no size.

    An engine's parts on host and GPU overlap, so that `decode_flops` is above what the chip does.

    Attributes:
        flops: operations of passes in training processes.
        moved_bytes: bytes that layers keep for a backward pass, as the measure of what norms and activations move.
        decode_flops, read_bytes: operations of an engine that decodes, and bytes of weights and KV cache that it reads.
        updated_bytes: bytes of optimizer states in host memory, in updates.
        copied_bytes: bytes copied between host and GPU.
        link_bytes: bytes of weights and gradients that ranks exchange, and of tokens that go to others' experts.
        synced_bytes: bytes of weights that engines get.
        decode_step_s, decode_row_s: of a decode step on the host, and of each sequence in it.
        single_step_s, single_row_s: the same in engines that decode one token at a time.
        pass_s: of a forward pass, besides its operations; backward likewise.
        host_layer_s: the least for a layer in a pass with gradients, in which the host launches its kernels; a third of
            it without.
        column_s: of a column of log-probs or values, besides its passes.
        zero3_layer_s: the least for a layer in a pass with gradients at ZeRO 3, a third of it without and in a sync.
        sync_s: of a weight sync, besides `synced_bytes`.
        turn_s: in which engines go to sleep and wake up.
        crowding: how many times as long the GPU's part of an engine takes with other engines on that GPU, besides their
            own parts, and that of a trainer beside an engine.
    """

    flops: float
    moved_bytes: float
    decode_flops: float
    read_bytes: float
    updated_bytes: float
    copied_bytes: float
    link_bytes: float
    synced_bytes: float
    decode_step_s: float
    decode_row_s: float
    single_step_s: float
    single_row_s: float
    pass_s: float
    host_layer_s: float
    column_s: float
    zero3_layer_s: float
    sync_s: float
    turn_s: float
    crowding: float


_H200 = Rates(
    flops=7.0e14,
    moved_bytes=2.47e12,
    decode_flops=1.54e15,
    read_bytes=4.2e12,  # this, decode_step_s and decode_row_s: the -short reports, -zero3, -w2 and -7b-ppo
    updated_bytes=4.7e10,
    copied_bytes=4.2e10,  # online-h100-w1-sleep: 12 bytes for each of 0.49 billion weights, in 0.14 s
    link_bytes=4.1e11,
    synced_bytes=2e11,  # online-h200-7b-ppo and -w1-options: 15.2 and 1.0 GB in 0.11 and 0.05 s, with sync_s
    decode_step_s=1.0e-3,
    decode_row_s=3.3e-6,
    single_step_s=2.1e-3,  # this and single_row_s: those of FITTED that the test calls OLDER_ENGINES
    single_row_s=4.6e-6,
    pass_s=0.0197,
    host_layer_s=1.4e-3,  # host-time-h200: 30 layers of a small model, 15 passes in 0.65 s
    column_s=0.0181,
    zero3_layer_s=0.0165,  # zero3-h100x2-7b: 28 layers in 0.46 s
    sync_s=0.03,
    crowding=1.48,
    turn_s=0.2,  # online-h100-w1-sleep 0.06, online-h100x2-7b-ppo 0.84
)
_MEMORY = 3.35 / 4.8  # TB/s of an H100 and of an H200, as NVIDIA states them; both have the same operations
RATES: Mapping[str, Rates] = {
    "h200": _H200,
    "h100": replace(
        _H200,
        moved_bytes=_MEMORY * _H200.moved_bytes,
        read_bytes=_MEMORY * _H200.read_bytes,
        host_layer_s=5.0e-3,  # online-h100x2-tail-in-turn: 28 layers, 16 passes in 2.25 s
    ),
    # Two cores, busy-cpu; decode_step_s and sync_s are costs of the simulator in asynchronous-cpu.
    "cpu": replace(
        _H200,
        **dict.fromkeys(("flops", "decode_flops"), 2e11),
        **dict.fromkeys(("moved_bytes", "read_bytes", "updated_bytes", "copied_bytes"), math.inf),
        **dict.fromkeys(("link_bytes", "synced_bytes"), math.inf),
        decode_step_s=2.4e-3,
        decode_row_s=6e-5,
        single_step_s=2.4e-3,
        single_row_s=6e-5,
        pass_s=0.019,
        host_layer_s=0.0,
        column_s=0.0,
        sync_s=0.037,
    ),
}


@dataclass(frozen=True, slots=True)
class _Lengths:
    """Tokens of a prompt, of a response on average, and of the longest response."""

    prompt: int
    mean: float
    most: int

    def longest_of(self, count: float) -> float:
        """Return the tokens of the longest of `count` responses, if lengths are geometric."""
        if self.mean >= self.most:
            return self.most
        return min(self.most, self.mean * (math.log(max(count, 1)) + 0.577))


def step_seconds(
    job: OnlineJob, rates: Rates, mean_response_tokens: float | None = None, moved_bytes: int = 0
) -> dict[str, float]:
    """Return the seconds of each phase of a step, and of the whole step as "step".

    Rank sets work at the same time, and with staleness engines on GPUs of their own do so beside them. Updates of the
    optimizer, unless it is in host memory, and rewards other than models are not counted.

    Args:
        job: what runs.
        rates: of its devices.
        mean_response_tokens: length of a response on average; None if all are as long as they may be.
        moved_bytes: what a training process copies to host memory when it goes to sleep.
    """
    most = job.sampling.max_tokens if job.agent is None else job.engine.max_model_len - 1
    lengths = _Lengths(job.engine.max_model_len - most, min(mean_response_tokens or most, most), most)
    phases = {"generation": _generation(job, rates, lengths) if job.plan.engines.places else 0.0}
    phases["rewards"] = sum(_reward_model(job, path, rates, lengths) for path in job.reward.models)
    titles = {"actor": "old log-probs", "critic": "values"}  # others have their roles
    learning = []
    at_once = rates.crowding if job.max_staleness and job.plan.shares_gpus else 1.0
    trained = replace(rates, flops=rates.flops / at_once, moved_bytes=rates.moved_bytes / at_once)
    for placed in job.plan.trainers:
        found = {}
        for role in placed.roles:
            if role in job.column_roles:
                found[titles.get(role, role)] = rates.column_s + _passes(job, role, trained, lengths, is_trained=False)
            if job.models[role].optimizer is not None:
                title = "policy training" if role == "actor" else f"{role} training"
                found[title] = _passes(job, role, trained, lengths, is_trained=True)
        phases |= found
        learning.append(sum(found.values()))
    actor = job.models["actor"]
    if job.plan.engines.places:
        size = ITEM_BYTES[actor.dtype] * count_parameters(_config(actor.path)).total
        if job.engine.adapter_rank:
            size = ITEM_BYTES[actor.dtype] * count_adapters(
                _config(actor.path), job.engine.adapter_rank, actor.lora.target_modules
            )
        gathering = _gathering(actor, rates)
        if (draft := job.models.get("draft")) is not None:  # its weights follow those of the policy
            size += ITEM_BYTES[draft.dtype] * count_parameters(_config(draft.path)).total
            gathering += _gathering(draft, rates)
        phases["weight sync"] = rates.sync_s + size / rates.synced_bytes
        if _is_divided(actor, job.plan.trainers_of("actor").num_ranks):
            phases["weight sync"] += size / rates.link_bytes + gathering
    made = phases["generation"] + phases["rewards"]
    learned = max(learning)
    if job.takes_turns:
        phases["sleep and waking"] = rates.turn_s + 2 * moved_bytes / rates.copied_bytes
    are_beside = job.max_staleness and not job.plan.shares_gpus
    step = max(made, learned) if are_beside else made + learned
    step += phases.get("weight sync", 0.0) + phases.get("sleep and waking", 0.0)
    return {name: seconds for name, seconds in phases.items() if seconds} | {"step": step}


def describe_seconds(job: OnlineJob, kind: str, mean_response_tokens: float | None, moved_bytes: int) -> str:
    """Return a table of `step_seconds` on devices of a `kind` of `RATES`, and the tokens per second."""
    found = step_seconds(job, RATES[kind], mean_response_tokens, moved_bytes)
    most = job.sampling.max_tokens
    tokens = job.batch.num_rollouts * min(mean_response_tokens or most, most)
    rows = (f"  {name:<24}{seconds:8.2f}" for name, seconds in found.items())
    speed = f"  response tokens/s       {tokens / found['step']:8,.0f}"
    lines = [f"seconds per step, estimated for {kind.upper()}", *rows, speed]
    if len({place.node for placed in [*job.plan.trainers, job.plan.engines] for place in placed.places}) > 1:
        lines.append("  links between nodes are counted like those within a node, as they were not measured")
    if any(spec.is_in_4bit for spec in job.models.values()):
        lines.append("  the time to restore weights from 4 bits is not counted")
    return "\n".join(lines)


def _generation(job: OnlineJob, rates: Rates, lengths: _Lengths) -> float:
    """Return the seconds of the decode steps of an engine, and of the prompts, once per group.

    A step reads all weights, and the KV cache of each sequence. Engines of one GPU read and compute in turn, and do the
    host's part at the same time.
    """
    engine = job.engine
    config = _config(job.models["actor"].path)
    sizes = sizes_of(config)
    costs = pass_costs(config)
    counts = count_parameters(config)
    parts = engine.tensor_parallel_size
    item = ITEM_BYTES[engine.dtype]
    rows = job.batch.num_rollouts / job.plan.engines.num_ranks
    active = min(rows, engine.max_num_seqs)
    longest = lengths.longest_of(active * job.plan.engines.num_ranks)  # engines wait for each other
    last = 0.0 if job.max_staleness else longest - lengths.mean  # others have ended meanwhile
    steps = rows * lengths.mean / active + last
    cards = job.plan.engines.cards
    neighbours = max((cards.count(card) for card in cards), default=1)
    weights = item * counts.total
    if engine.quantization == "fp8":
        weights -= (item - 1) * counts.matrices
    kv_per_token = sizes.num_layers * cached_size(config, parts) * item
    of_step = weights / parts / rates.read_bytes
    of_token = kv_per_token * (lengths.prompt + lengths.mean / 2) / rates.read_bytes
    of_token += costs.of(1, 1) / parts / rates.decode_flops
    of_prompt = costs.of(lengths.prompt) / parts / rates.flops
    on_device = steps * of_step + rows * (lengths.mean * of_token + of_prompt / job.batch.n_samples_per_prompt)
    on_device *= neighbours * (rates.crowding if neighbours > 1 else 1)
    if "multi_step" in engine.skip_patches:
        return steps * rates.single_step_s + rows * lengths.mean * rates.single_row_s + on_device
    return steps * rates.decode_step_s + rows * lengths.mean * rates.decode_row_s + on_device


def _reward_model(job: OnlineJob, path: str, rates: Rates, lengths: _Lengths) -> float:
    num_scorers = job.plan.scorers.num_ranks if job.plan.scorers else 1
    dtype = job.engine.dtype
    spec = ModelSpec(path=path, dtype=dtype, packing=True)
    rows = job.batch.num_rollouts / num_scorers
    calls = rows / job.reward.calls.batch_size
    weights = ITEM_BYTES[dtype] * count_parameters(_config(path)).total
    seconds = _computing(spec, rates, lengths, rows, lengths.prompt + lengths.mean, 0) + calls * rates.pass_s
    seconds += calls * weights / rates.copied_bytes * job.reward.offload_models
    return seconds + calls * weights / rates.link_bytes * (path in job.reward.divided_models)


def _passes(job: OnlineJob, role: str, rates: Rates, lengths: _Lengths, *, is_trained: bool) -> float:
    """Return the seconds of a rank in which a model runs over the rollouts of a step, or learns from them.

    A backward pass has the operations of two forward passes, and checkpointing those of one more. Ranks gather weights
    at ZeRO 3, and add up gradients.
    """
    spec = job.models[role]
    batch = job.batch
    num_ranks = job.plan.trainers_of(role).num_ranks
    rows = batch.num_rollouts * spec.ranks_per_batch / num_ranks * (batch.max_epochs if is_trained else 1)
    if is_teacher(role):  # how many rollouts are of which source is not known
        rows /= len(job.teacher_roles)
    micro = batch.micro_train_batch_size if is_trained else batch.micro_rollout_batch_size
    mean = lengths.mean if spec.packing else lengths.longest_of(micro)
    tokens = mean + lengths.prompt / (batch.n_samples_per_prompt if spec.share_prompts else 1)
    updates = batch.num_updates if is_trained else 1
    per_pass = batch.micro_batch_tokens / tokens if batch.micro_batch_tokens else micro
    passes = updates * math.ceil(rows / updates / per_pass)
    times = 3 + spec.gradient_checkpointing if is_trained else 1
    targets = lengths.mean * (role != "critic")
    seconds = times * _computing(spec, rates, lengths, rows, tokens, targets)
    counts = count_parameters(_config(spec.path), has_head=role != "critic")
    item = ITEM_BYTES[spec.dtype]
    num_layers = sizes_of(_config(spec.path)).num_layers
    is_divided = _is_divided(spec, num_ranks)
    if is_divided:
        seconds += passes * (2 * item + 4 if is_trained else item) * counts.total / rates.link_bytes
        seconds = max(seconds, passes * (3 if is_trained else 1) * _gathering(spec, rates))
    seconds += (times - is_trained) * rows * tokens * _exchanged_bytes(spec) / rates.link_bytes
    seconds += passes * rates.pass_s * (1 + is_trained)
    seconds = max(seconds, passes * (3 if is_trained else 1) * rates.host_layer_s / 3 * num_layers)
    if spec.offload:
        seconds += item * counts.total / (num_ranks if is_divided else 1) / rates.copied_bytes
    if is_trained and spec.lora is None:
        of_rank = counts.total - counts.experts * (1 - 1 / spec.expert_parallel_size)
        own = counts.total / num_ranks if spec.zero_stage else of_rank
        seconds += updates * 16 * own / rates.updated_bytes * spec.optimizer.offload
        is_summed = num_ranks > 1 and not is_divided
        seconds += updates * (4 + item) * of_rank / rates.link_bytes * is_summed
    return seconds


def _exchanged_bytes(spec: ModelSpec) -> float:
    """Return the bytes that a rank sends per token in a forward pass, and as many in a backward pass: the hidden state
    to each of its experts and back, in each layer with experts, if experts spread tokens evenly over the ranks."""
    config = _config(spec.path)
    away = 1 - 1 / spec.expert_parallel_size
    mlps = mlps_of(config.get_text_config())
    visits = sum(count * mlp.per_token * (mlp.num_experts > 0) for mlp, count in mlps.items())
    return 2 * ITEM_BYTES[spec.dtype] * sizes_of(config).hidden * visits * away


def _is_divided(spec: ModelSpec, num_ranks: int) -> bool:
    """Return whether ranks have a part of each weight."""
    return spec.zero_stage == 3 and num_ranks > 1


def _gathering(spec: ModelSpec, rates: Rates) -> float:
    """Return the least seconds in which ranks gather all weights once."""
    return rates.zero3_layer_s / 3 * sizes_of(_config(spec.path)).num_layers


def _computing(spec: ModelSpec, rates: Rates, lengths: _Lengths, rows: float, tokens: float, targets: float) -> float:
    """Return the seconds that a rank computes in forward passes of `rows` rollouts.

    A rollout has `tokens` in the layers and `targets` in the head. The ranks of a sequence or tensor group share them.
    Packed attention scores a prompt with a response of mean length, padded attention all pairs of tokens in a row.
    """
    config = _config(spec.path)
    costs = pass_costs(config)
    context = math.ceil(lengths.prompt + lengths.mean)
    if spec.packing:
        flops = costs.of(context) + costs.token_flops * (tokens - context)
    else:
        flops = 2 * costs.of(math.ceil(tokens)) - costs.token_flops * tokens
    flops += costs.target_flops * targets
    moved = sum(count * layer_bytes(config, spec, mlp) for mlp, count in mlps_of(config.get_text_config()).items())
    moved *= tokens / spec.sequence_parallel_size
    return rows * (flops / spec.ranks_per_batch / rates.flops + moved / rates.moved_bytes)


@cache
def _config(path: str) -> Any:
    from rlhf_models.loading import load_config  # imports torch

    return load_config(path)
