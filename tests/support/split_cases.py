"""One step of PPO, split in many ways over passes and ranks."""

import dataclasses
import functools
import os
from pathlib import Path
from typing import Any

import numpy as np

from rlhf_data.records import Rollout
from rlhf_models.testing import tiny_model_dir
from rlhf_rollout.host import local_gpus
from rlhf_train.algorithms.group import relative_rewards
from rlhf_train.algorithms.table import AlgorithmSpec, make_algorithm
from rlhf_train.algorithms.token_specs import CovarianceSpec, DistributionSpec, EntropySpec
from rlhf_train.batching import RankPlan, plan_batches
from rlhf_train.learning.columns import RolloutColumns
from rlhf_train.specs import ModelSpec, OptimizerSpec
from trainer_testing import random_rollouts

NUM_ROLLOUTS, VOCAB_SIZE = 32, 512
MASKED_IDS = (range(VOCAB_SIZE, VOCAB_SIZE + 32),)
# Adam divides by the gradient's own size, which turns rounding of a gradient near 0 into a step of full size; this
# epsilon, above that rounding, keeps the update a smooth function of the gradient.
OPTIMIZER = OptimizerSpec(learning_rate=1e-2, eps=1e-4, scheduler="constant", max_norm=1.0)
# Largest difference of a weight after two updates of about 1e-2 each, in float32.
TOLERANCE = 2e-5


# In bfloat16 the steps of Adam are large and about proportional to the gradient (its epsilon is far above it): a sum of
# gradients that was rounded to bfloat16 then changes many weights. There is no clipping, because the last digits of its
# factor differ between the stages.
BFLOAT16_OPTIMIZER = OptimizerSpec(learning_rate=1.0, eps=1.0, scheduler="constant", max_norm=0.0)
# Clip-Cov leaves a tenth of the tokens out, KL-Cov holds a tenth, and 0.6 are kept by entropy: a split chooses alike.
BY_COVARIANCE = CovarianceSpec(clip_cov=(0.1, 0.0, 100.0), kl_cov=(0.1, 0.5))
PPO_WITH_KL_LOSS = make_algorithm(
    kl_coef=0.05, use_kl_loss=True, kl_estimator="k3", covariance=BY_COVARIANCE, entropy=EntropySpec(top_quantile=0.6),
    teacher_coef=0.1, distribution=DistributionSpec(top_k=5, divergence="jsd"),
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Case:
    """One way to split the same work."""

    zero_stage: int = 0
    micro_batch_size: int = 32
    packing: bool = False
    micro_batch_tokens: int | None = None
    algorithm: AlgorithmSpec = PPO_WITH_KL_LOSS
    dtype: str = "float32"
    num_rollouts: int = NUM_ROLLOUTS
    num_mini_batches: int = 2
    first_reward: float | None = None  # in place of the first rollout's own
    lora_rank: int = 0
    sequence_parallel_size: int = 1
    share_prompts: bool = False
    zpg: int = 1
    tensor_parallel_size: int = 1
    has_draft: bool = False  # a draft model that is trained along

    @property
    def ranks_per_batch(self) -> int:
        """Ranks that have the same rollouts."""
        return self.sequence_parallel_size * self.tensor_parallel_size


@functools.cache
def device_of(rank: int, num_ranks: int) -> str:
    """Return where a rank computes: on a GPU of its own where there are enough. Call it before torch is imported."""
    if local_gpus() < num_ranks:
        return "cpu"
    if num_ranks > 1:
        visible = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(num_ranks)))).split(",")
        os.environ["CUDA_VISIBLE_DEVICES"] = visible[rank]
    return "cuda"


def split_model(folder: Path) -> str:
    """Return the path of a new model whose heads four ranks can divide into pairs, and whose vocabulary is padded.

    The folder "teacher" in it has another one.
    """
    sizes = {"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": MASKED_IDS[0].stop}
    tiny_model_dir(folder / "teacher", seed=1, **sizes)
    return str(tiny_model_dir(folder, **sizes))


def grouped_rollouts(count: int) -> list[Rollout]:
    """Return random rollouts, four to a prompt."""
    rollouts = random_rollouts(count, vocab_size=VOCAB_SIZE)
    prompts = [rollouts[index - index % 4].spans[0] for index in range(count)]
    return [
        dataclasses.replace(rollout, spans=(prompt, *rollout.spans[1:]))
        for rollout, prompt in zip(rollouts, prompts, strict=True)
    ]


def has_copies(model: Any) -> bool:
    """Return whether passes of a model gather its weights from a second copy on some of the ranks."""
    return getattr(next(model.parameters()), "ds_zero_param_process_group", None) is not None


def plan_of(rank: int, num_ranks: int, case: Case, rollouts: list[Rollout]) -> RankPlan:
    """Return the part of the work that this rank gets."""
    return plan_batches(
        [rollout.num_tokens for rollout in rollouts],
        [rollout.num_response_tokens for rollout in rollouts],
        num_ranks=num_ranks // case.ranks_per_batch,
        num_mini_batches=case.num_mini_batches,
        micro_train_batch_size=case.micro_batch_size,
        micro_rollout_batch_size=case.micro_batch_size,
        max_response_tokens=24,
        seed=3,
        micro_batch_tokens=case.micro_batch_tokens,
    )[rank // case.ranks_per_batch]


def one_step(rank: int, num_ranks: int, master: Any, path: str, case: Case) -> dict[str, Any]:
    """Run one step of PPO, usually of two updates per model; return the weights and the metrics."""
    device_of(rank, num_ranks)
    import torch

    from rlhf_models.lora import LoraSpec
    from rlhf_train.engine.shards import part_of
    from rlhf_train.learning.worker import TrainWorker
    from rlhf_train.run.metrics import merge_metrics, results

    spec = ModelSpec(
        path=path,
        packing=case.packing,
        sequence_parallel_size=case.sequence_parallel_size,
        share_prompts=case.share_prompts,
        zero_stage=case.zero_stage,
        zpg=case.zpg,
        tensor_parallel_size=case.tensor_parallel_size,
        dtype=case.dtype,
        masked_ids=MASKED_IDS,
    )
    optimizer = OPTIMIZER if case.dtype == "float32" else BFLOAT16_OPTIMIZER
    lora = LoraSpec(rank=case.lora_rank) if case.lora_rank else None
    trained = dataclasses.replace(spec, optimizer=optimizer, lora=lora)
    models = {"actor": trained, "critic": trained, "reference": spec}
    if case.algorithm.uses_teacher:
        models["teacher"] = dataclasses.replace(spec, path=f"{path}/teacher")
    draft = {"draft": trained} if case.has_draft else {}
    worker = TrainWorker(
        models | draft,
        case.algorithm,
        temperature=0.8,
        rank=rank,
        num_ranks=num_ranks,
        master=master,
        device=device_of(rank, num_ranks),
        seed=0,
    )
    rollouts = grouped_rollouts(case.num_rollouts)
    rewards = [rollout.verdict.reward for rollout in rollouts]
    if case.first_reward is not None:
        rewards[0] = case.first_reward
    group_ids = [rollout.group_id for rollout in rollouts]
    rewards = relative_rewards(np.array(rewards), group_ids, case.algorithm.row.baseline)
    plan = plan_of(rank, num_ranks, case, rollouts)
    worker.load_rollouts(
        RolloutColumns.of([rollouts[row] for row in plan.rows], [rewards[row] for row in plan.rows]), plan
    )
    metrics = [worker.run_model(role) for role in models]
    experience = worker._experience
    before = {name: column.clone() for name, column in experience.columns.items()}
    metrics.append(worker.assign_advantages(case.algorithm.kl_coef))
    options = {"max_epochs": 1, "seed": 5, "kl_coef": case.algorithm.kl_coef}
    metrics += [worker.update(role, **options) for role in ("critic", *draft, "actor")]
    models = [engine.module for engine in worker.engines.values()]
    reference = worker._frozen["reference"]
    # Adapters are left out of the policy for the reference, which is then a function; ZeRO-3 wraps a model.
    models += [getattr(reference, "module", reference)] if isinstance(reference, torch.nn.Module) else []
    weights = {
        f"{role}.{name}": tensor.float().cpu().numpy().copy()
        for role in worker.engines
        for name, tensor in worker.engines[role].state_dict().items()
    }
    actor = worker.engines["actor"]
    return {
        "weights": weights,
        "num_divided": sum(model.sequence_group is not None for model in models),
        "num_in_parts": sum(part_of(weight).count > 1 for model in models for weight in model.parameters()),
        "num_copied": sum(has_copies(model) for model in models),
        "sent": {name: weight.float().cpu().numpy().copy() for name, weight in actor.named_weights()},
        "sent_adapters": {name: matrix.float().cpu().numpy().copy() for name, matrix in actor.named_adapters()},
        "metrics": results(merge_metrics(metrics)),
        "same_as_reference": bool(torch.equal(before["old_logprobs"], before["ref_logprobs"])),
        "advantages": experience.export(["advantages"])["advantages"],
        "moved": max(float(np.abs(weights[f"actor.{n}"]).max()) for n in worker.engines["actor"].state_dict()),
    }


def all_cases(rank: int, num_ranks: int, master: Any, path: str, cases: dict[str, Case]) -> dict[str, Any]:
    """Run every case in one process, for the imports take longer than the work."""
    return {name: one_step(rank, num_ranks, master, path, case) for name, case in cases.items()}


def largest_difference(one: dict[str, np.ndarray], other: dict[str, np.ndarray]) -> float:
    assert one.keys() == other.keys()
    return max(float(np.abs(one[name] - other[name]).max()) for name in one)
