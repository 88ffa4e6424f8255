"""A rank that has nothing to train: it keeps in step and changes nothing, and keeps its part of a sharded reference."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from rlhf_models.host_states import RestingModel
from rlhf_models.testing import tiny_model_dir
from rlhf_rollout.host import free_port
from rlhf_train.algorithms.table import make_algorithm
from rlhf_train.specs import ModelSpec, OptimizerSpec
from trainer_testing import random_rollouts, run_ranks, shard_of

VOCAB_SIZE = 512


def two_updates(rank: int, num_ranks: int, master: Any, path: str) -> dict[int, dict[str, Any]]:
    """Train on two rollouts, each in an update of its own, at two ZeRO stages.

    Returns by stage the actor's weights, the number of the reference's elements that the rank keeps, and the
    reference's log-probs before and after they were in host memory.
    """
    from rlhf_train.engine.deepspeed_internals import local_part
    from rlhf_train.learning.worker import TrainWorker

    rollouts = random_rollouts(2, vocab_size=VOCAB_SIZE)
    _, columns, plan = shard_of(rollouts, 4, rank=rank, num_ranks=num_ranks, num_mini_batches=2, rewards=(1.0, 2.0))
    assert bool(plan.rows) == (rank == 0)
    found = {}
    for zero_stage, packing in ((2, True), (3, False)):
        spec = ModelSpec(path=path, zero_stage=zero_stage, packing=packing)
        # As in tests/support/split_cases.py, an epsilon above rounding.
        optimizer = OptimizerSpec(learning_rate=1e-2, eps=1e-4, scheduler="constant")
        trained = replace(spec, optimizer=optimizer)
        worker = TrainWorker(
            {"actor": trained, "critic": trained, "reference": spec},
            make_algorithm(kl_coef=0.05, use_kl_loss=True, kl_estimator="k3"),
            temperature=1.0, rank=rank, num_ranks=num_ranks, master=master, device="cpu", seed=0,
        )  # fmt: skip
        worker.load_rollouts(columns, plan)
        for role in ("actor", "reference", "critic"):
            worker.run_model(role)
        parts = [local_part(weight) for weight in worker._frozen["reference"].parameters()]
        logprobs = [worker._experience.columns["ref_logprobs"].numpy().copy()]
        if zero_stage == 3 and num_ranks > 1:
            worker._frozen["reference"] = RestingModel(worker._frozen["reference"], parts)
        worker.run_model("reference")
        logprobs.append(worker._experience.columns["ref_logprobs"].numpy().copy())
        worker.assign_advantages(kl_coef=0.05)
        for role in ("critic", "actor"):
            worker.update(role, max_epochs=1, seed=0, kl_coef=0.05)
        weights = {name: t.numpy() for name, t in worker.engines["actor"].state_dict().items()}
        found[zero_stage] = {"weights": weights, "kept": sum(part.numel() for part in parts), "logprobs": logprobs}
    return found


@pytest.fixture(scope="module")
def alone_and_together(tmp_path_factory):
    path = str(tiny_model_dir(tmp_path_factory.mktemp("model"), vocab_size=VOCAB_SIZE))
    return two_updates(0, 1, ("127.0.0.1", free_port()), path), run_ranks(two_updates, 2, path)


def test_rank_without_rollouts_takes_part_and_changes_nothing(alone_and_together):
    alone, together = alone_and_together
    for rank in together:
        for stage, found in rank.items():
            want = alone[stage]["weights"]
            gaps = {name: float(np.abs(weight - want[name]).max()) for name, weight in found["weights"].items()}
            assert max(gaps.values()) < 2e-5, (stage, gaps)


def test_reference_lies_in_parts_on_the_ranks_and_computes_what_the_whole_computes(alone_and_together):
    alone, together = alone_and_together
    num_weights = alone[3]["kept"]
    assert [rank[2]["kept"] for rank in together] == [num_weights] * 2
    for rank in together:
        assert num_weights / 2 <= rank[3]["kept"] < num_weights / 2 * 1.01
        before, after = rank[3]["logprobs"]
        assert (before == after).all()
    np.testing.assert_allclose(together[0][3]["logprobs"][0], alone[3]["logprobs"][0], atol=1e-5, rtol=0)
