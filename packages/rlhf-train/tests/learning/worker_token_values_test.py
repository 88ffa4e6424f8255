"""What a step records of each token, against transformers' own forward passes in float64."""

import dataclasses

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from rlhf_models.testing import tiny_model_dir
from rlhf_rollout.host import free_port
from rlhf_train.algorithms.table import make_algorithm
from rlhf_train.learning.worker import TrainWorker
from rlhf_train.specs import ModelSpec, OptimizerSpec
from rlhf_train.tracing.token_values import read_values, write_values
from trainer_testing import exact_logprobs, random_rollouts, run_ranks, shard_of

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
        with torch.no_grad():
            logprobs, tokens = exact_logprobs(model, rollout, TEMPERATURE)
        chosen = logprobs.gather(1, tokens[:, None])[:, 0]
        found[rollout.rollout_id] = torch.stack([chosen, -(logprobs.exp() * logprobs).sum(-1)]).numpy()
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
    worker.load_rollouts(*shard_of(rollouts, 2, rank=rank, num_ranks=num_ranks, forward_size=3)[1:])
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
