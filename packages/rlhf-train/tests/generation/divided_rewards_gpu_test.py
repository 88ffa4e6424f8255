"""A reward model that two GPUs divide: the scores of the whole model, also with weights that rest in host memory."""

import asyncio
from functools import partial

import numpy as np
import pytest
import ray
import torch

from rlhf_models.loading import load_reward_model
from rlhf_models.reward import score_sequences
from rlhf_models.testing import tiny_reward_model_dir
from rlhf_train.cluster.ray_session import started_cluster
from rlhf_train.generation.divided_rewards import DividedScorer, RewardRank

DEVICE = "cuda"
SIZES = {"vocab_size": 1003, "hidden_size": 512, "num_attention_heads": 8, "num_key_value_heads": 2}

pytestmark = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")


def start(path: str, rank: int, offload: bool) -> ray.actor.ActorHandle:
    actor = ray.remote(RewardRank).options(num_cpus=0)
    return actor.remote(path, dtype="bfloat16", device=DEVICE, offload=offload, gpus=[str(rank)])


@pytest.mark.parametrize("offload", [False, True])
def test_two_gpus_give_the_scores_of_one(tmp_path, offload):
    path = str(tiny_reward_model_dir(tmp_path / "model", dtype=torch.bfloat16, **SIZES))
    rng = np.random.default_rng(0)
    sequences = [rng.integers(3, 1003, length).astype(np.int32) for length in (300, 1, 77, 129, 200, 64, 5)]
    exact, plain = (
        score_sequences(load_reward_model(path, dtype=dtype).to(DEVICE), sequences, batch_size=1)
        for dtype in ("float32", "bfloat16")
    )
    with started_cluster(4, 2):
        scorer = DividedScorer([partial(start, path, rank, offload) for rank in range(2)], batch_size=2)
        found = [asyncio.run(scorer.score(sequences)) for _ in range(2)]
    assert found[0] == found[1]
    rounding = np.abs(np.subtract(plain, exact)).max()
    assert np.abs(np.subtract(found[0], exact)).max() < 2 * rounding
    assert rounding < 0.1 * np.std(exact)
