"""A rank that has nothing to train: it keeps in step and changes nothing."""

from typing import Any

import numpy as np

from rlhf_models.testing import tiny_model_dir
from rlhf_rollout.host import free_port
from rlhf_train.algorithms import make_algorithm
from rlhf_train.batching import plan_batches
from rlhf_train.columns import RolloutColumns
from rlhf_train.specs import ModelSpec, OptimizerSpec
from trainer_testing import random_rollouts, run_ranks

VOCAB_SIZE = 512


def two_updates(rank: int, num_ranks: int, master: Any, path: str) -> dict[int, dict[str, np.ndarray]]:
    """Train on two rollouts, each in an update of its own, at two ZeRO stages; return the actor's weights."""
    from rlhf_train.online.worker import TrainWorker

    rollouts = random_rollouts(2, vocab_size=VOCAB_SIZE)
    plan = plan_batches(
        [rollout.num_tokens for rollout in rollouts],
        [rollout.num_response_tokens for rollout in rollouts],
        num_ranks=num_ranks, num_mini_batches=2, micro_train_batch_size=4, micro_rollout_batch_size=4,
        max_response_tokens=24, seed=0,
    )[rank]  # fmt: skip
    assert bool(plan.rows) == (rank == 0)
    weights = {}
    for zero_stage, packing in ((2, True), (3, False)):
        spec = ModelSpec(path=path, zero_stage=zero_stage, packing=packing)
        # As in tests/invariants/split_test.py, an epsilon above rounding.
        trained = ModelSpec(
            path=path, zero_stage=zero_stage, packing=packing,
            optimizer=OptimizerSpec(learning_rate=1e-2, eps=1e-4, scheduler="constant"),
        )  # fmt: skip
        worker = TrainWorker(
            {"actor": trained, "critic": trained, "reference": spec},
            make_algorithm(kl_coef=0.05, use_kl_loss=True, kl_estimator="k3"),
            temperature=1.0, rank=rank, num_ranks=num_ranks, master=master, device="cpu", seed=0,
        )  # fmt: skip
        worker.load_rollouts(
            RolloutColumns.of([rollouts[row] for row in plan.rows], [float(row + 1) for row in plan.rows]), plan
        )
        for role in ("actor", "reference", "critic"):
            worker.run_model(role)
        worker.assign_advantages(kl_coef=0.05)
        for role in ("critic", "actor"):
            worker.update(role, max_epochs=1, seed=0, kl_coef=0.05)
        weights[zero_stage] = {name: t.numpy() for name, t in worker.engines["actor"].state_dict().items()}
    return weights


def test_rank_without_rollouts_takes_part_and_changes_nothing(tmp_path):
    path = str(tiny_model_dir(tmp_path / "model", vocab_size=VOCAB_SIZE))
    together = run_ranks(two_updates, 2, path)
    alone = two_updates(0, 1, ("127.0.0.1", free_port()), path)
    for rank in together:
        for stage, weights in rank.items():
            gaps = {name: float(np.abs(weights[name] - alone[stage][name]).max()) for name in weights}
            assert max(gaps.values()) < 2e-5, (stage, gaps)
