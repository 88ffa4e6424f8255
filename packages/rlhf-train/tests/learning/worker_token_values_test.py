"""What a step records of each token, against transformers' own forward passes in float64."""

import dataclasses

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from rlhf_models.testing import tiny_model_dir
from rlhf_rollout.host import free_port
from rlhf_train.algorithms.table import make_algorithm
from rlhf_train.batching import plan_batches
from rlhf_train.learning.columns import RolloutColumns
from rlhf_train.learning.worker import TrainWorker
from rlhf_train.specs import ModelSpec, OptimizerSpec
from rlhf_train.tracing.token_values import read_values, write_values
from trainer_testing import random_rollouts, run_ranks

VOCAB_SIZE = 512
TEMPERATURE = 0.7
# A float16 has eleven bits; below it is the rounding of float32 models.
TOLERANCE = {"rtol": 1e-3, "atol": 1e-4}


@pytest.fixture(scope="module")
def paths(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    return [str(tiny_model_dir(folder / str(seed), vocab_size=VOCAB_SIZE, seed=seed)) for seed in (0, 1)]


def exact(path, rollouts):
    """Return log-probs and entropies of the policy's tokens by rollout id, [2, n] float64, one rollout at a time."""
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float64)
    found = {}
    for rollout in rollouts:
        ids = torch.from_numpy(rollout.token_ids.astype(np.int64))
        with torch.no_grad():
            logprobs = (model(ids[None]).logits[0, :-1].double() / TEMPERATURE).log_softmax(-1)
        own = np.flatnonzero(rollout.loss_mask) - 1
        chosen = logprobs[own, ids[own + 1]]
        found[rollout.rollout_id] = torch.stack([chosen, -(logprobs.exp() * logprobs).sum(-1)[own]]).numpy()
    return found


def step(rank, num_ranks, master, paths, old_logprobs, packing, max_epochs, after):
    """Do a step of 9 rollouts on one of the ranks; return its values, and write the model after it to a folder."""
    kl = {"kl_coef": 0.01, "use_kl_loss": True}
    spec = dataclasses.replace(make_algorithm("rloo", **kl), old_logprobs=old_logprobs)
    optimizer = OptimizerSpec(learning_rate=1e-2, scheduler="constant")
    actor = ModelSpec(path=paths[0], optimizer=optimizer, zero_stage=0, packing=packing)
    models = {"actor": actor, "reference": ModelSpec(path=paths[1], packing=packing)}
    place = {"rank": rank, "num_ranks": num_ranks, "master": master, "device": "cpu"}
    worker = TrainWorker(models, spec, temperature=TEMPERATURE, seed=0, **place)
    rollouts = random_rollouts(9, vocab_size=VOCAB_SIZE)
    lengths = [[rollout.num_tokens for rollout in rollouts], [rollout.num_response_tokens for rollout in rollouts]]
    plan = plan_batches(
        *lengths, num_ranks=num_ranks, num_mini_batches=1, micro_train_batch_size=2, micro_rollout_batch_size=3,
        max_response_tokens=24, seed=0,
    )[rank]  # fmt: skip
    shard = [rollouts[row] for row in plan.rows]
    worker.load_rollouts(RolloutColumns.of(shard, [rollout.verdict.reward for rollout in shard]), plan)
    for role in models:
        if role != "actor" or spec.runs_actor:
            worker.run_model(role)
    worker.assign_advantages(0.0)
    worker.update("actor", max_epochs=max_epochs, seed=0, kl_coef=0.01)
    worker.save("actor", after)
    return worker.token_values()


@pytest.mark.parametrize(
    ("num_ranks", "old_logprobs", "packing"),
    [(1, "recompute", False), (1, "skip", True), (1, "rollout", True), (2, "recompute", True)],
)
def test_values_are_those_of_transformers_in_float64(num_ranks, old_logprobs, packing, paths, tmp_path):
    rollouts = random_rollouts(9, vocab_size=VOCAB_SIZE)
    path = paths[0]  # of the model before the last pass
    for max_epochs in (1,) if old_logprobs == "skip" else (1, 2):
        arguments = (paths, old_logprobs, packing, max_epochs, str(tmp_path / f"after{max_epochs}"))
        alone = ("127.0.0.1", free_port())
        ranks = run_ranks(step, num_ranks, *arguments) if num_ranks > 1 else [step(0, 1, alone, *arguments)]
        write_values(tmp_path, max_epochs, ranks)
        recorded = read_values(tmp_path, max_epochs)
        before, reference, last = (exact(each, rollouts) for each in (*paths, path))
        path = arguments[-1]
        assert recorded.keys() == last.keys()
        for rollout in rollouts:
            engine = rollout.rollout_logprobs[rollout.loss_mask]
            name = rollout.rollout_id
            # Without a pass before the updates, the trainer's log-probs are those of the last one.
            trainer = (before if old_logprobs == "recompute" else last)[name][0]
            old = {"recompute": trainer, "skip": trainer, "rollout": engine}[old_logprobs]
            expected = {
                "gap": trainer - engine,
                "log_ratio": last[name][0] - old,
                "advantage": np.full(len(engine), rollout.verdict.reward),
                "entropy": last[name][1],
                "kl": trainer - reference[name][0],
            }
            assert recorded[name].keys() == expected.keys()
            for column, values in expected.items():
                np.testing.assert_allclose(recorded[name][column], values, **TOLERANCE, err_msg=f"{name} {column}")
