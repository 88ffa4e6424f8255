"""One rank in this process: modes, metrics, columns it is given, and what it saves."""

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from rlhf_models.testing import tiny_model_dir
from rlhf_rollout.host import free_port
from rlhf_train.algorithms import make_algorithm
from rlhf_train.batching import plan_batches
from rlhf_train.columns import RolloutColumns
from rlhf_train.online.worker import TrainWorker
from rlhf_train.run.metrics import results
from rlhf_train.specs import ModelSpec, OptimizerSpec
from trainer_testing import random_rollouts

VOCAB_SIZE = 512


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return str(tiny_model_dir(tmp_path_factory.mktemp("model"), vocab_size=VOCAB_SIZE))


@pytest.fixture
def worker(path):
    """An actor with an average, without a critic or a reference, and eight rollouts in two updates."""
    model = ModelSpec(path=path, optimizer=OptimizerSpec(learning_rate=1e-2, scheduler="constant"), zero_stage=0)
    worker = TrainWorker(
        {"actor": model}, make_algorithm("rloo", kl_coef=0), temperature=1.0, rank=0, num_ranks=1,
        master=("127.0.0.1", free_port()), device="cpu", seed=0, ema_beta=0.5,
    )  # fmt: skip
    rollouts = random_rollouts(8, vocab_size=VOCAB_SIZE)
    lengths = [[r.num_tokens for r in rollouts], [r.num_response_tokens for r in rollouts]]
    [plan] = plan_batches(
        *lengths, num_ranks=1, num_mini_batches=2, micro_train_batch_size=2, micro_rollout_batch_size=3,
        max_response_tokens=24, seed=0,
    )  # fmt: skip
    worker.shard = [rollouts[row] for row in plan.rows]
    worker.load_rollouts(RolloutColumns.of(worker.shard, [float(row) for row in plan.rows]), plan)
    return worker


def test_old_logprobs_come_from_evaluation_mode_and_updates_from_training_mode(worker):
    modes: list[bool] = []
    module = worker.engines["actor"].module
    module.register_forward_pre_hook(lambda model, _: modes.append(model.training))
    worker.run_model("actor")
    assert modes == [False] * 3
    worker.assign_advantages(0.0)
    worker.update("actor", max_epochs=1, seed=0)
    assert modes == [False] * 3 + [True] * 4


@pytest.mark.parametrize("is_large", [False, True])
def test_old_and_new_logprobs_of_a_step_come_from_the_same_head_path(worker, monkeypatch, is_large):
    # Passes of three rollouts for old log-probs and of two for updates: the limit lies between them, or above all.
    lengths = sorted((rollout.num_response_tokens for rollout in worker.shard), reverse=True)
    num_bytes = VOCAB_SIZE * 4
    limit = sum(lengths[:3]) * num_bytes - is_large
    assert sum(lengths[:2]) * num_bytes < limit
    monkeypatch.setattr("rlhf_models.actor.MAX_LOGITS_BYTES", limit)
    actor = worker.engines["actor"].module
    chosen = []
    after = actor._after
    monkeypatch.setattr(actor, "_after", lambda *args: chosen.append(args[-1]) or after(*args))
    worker.run_model("actor")
    worker.assign_advantages(0.0)
    worker.update("actor", max_epochs=1, seed=0)
    assert chosen == [is_large] * (3 + 4)


def test_entropy_is_the_mean_over_trained_tokens_of_all_forward_passes(worker, path):
    found = results(worker.run_model("actor"))["policy/entropy"]
    plain = AutoModelForCausalLM.from_pretrained(path).double()
    total, count = 0.0, 0
    for rollout in worker.shard:
        with torch.no_grad():
            logits = plain(torch.from_numpy(rollout.token_ids.astype(np.int64))[None]).logits[0]
        entropies = torch.distributions.Categorical(logits=logits).entropy()
        trained = np.flatnonzero(rollout.loss_mask) - 1  # the distribution that a token is drawn from is the one before
        total += entropies[trained].sum().item()
        count += len(trained)
    assert found == pytest.approx(total / count, rel=1e-5)


def test_column_of_trained_tokens_from_another_rank_restricts_the_shard(worker):
    before = worker._experience.loss_mask.clone()
    kept = {r.rollout_id: r.loss_mask.astype(np.float32) for r in worker.shard}
    first = worker.shard[0].rollout_id
    kept[first][np.flatnonzero(kept[first])[0]] = 0.0
    worker.adopt_columns({"trained": kept})
    left = worker._experience.loss_mask
    assert left.sum() == before.sum() - 1 and not (left & ~before).any()
    assert left[0].sum() == before[0].sum() - 1


def test_saved_model_has_the_weights_and_the_average_those_of_all_updates(worker, path, tmp_path):
    first = {name: weight.clone() for name, weight in worker.engines["actor"].named_weights()}
    worker.run_model("actor")
    worker.assign_advantages(0.0)
    steps = []
    engine = worker.engines["actor"]
    step = engine.step

    def noting():
        stats = step()
        steps.append({name: weight.clone() for name, weight in engine.named_weights()})
        return stats

    engine.step = noting
    worker.update("actor", max_epochs=1, seed=0)
    worker.save("actor", str(tmp_path / "model"))
    worker.save_average(str(tmp_path / "average"))
    saved, averaged = (
        dict(AutoModelForCausalLM.from_pretrained(tmp_path / name).named_parameters()) for name in ("model", "average")
    )
    assert len(steps) == 2
    for name, weight in saved.items():
        torch.testing.assert_close(weight.detach(), steps[-1][name])
        by_hand = 0.5 * (0.5 * first[name] + 0.5 * steps[0][name]) + 0.5 * steps[1][name]
        torch.testing.assert_close(averaged[name].detach(), by_hand, rtol=0, atol=1e-6)
        assert (saved[name] - averaged[name]).abs().max() > 1e-4


def test_rank_that_is_not_the_first_writes_nothing(worker, tmp_path):
    worker.rank = 1
    worker.save("actor", str(tmp_path / "model"))
    assert not (tmp_path / "model").exists()


def test_worker_on_a_cpu_has_no_device_memory(worker):
    assert worker.peak_memory_bytes() == 0
