"""A policy that learns from the average of its own weights: the average by float64, its own passes, and resuming."""

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from rlhf_data.errors import ConfigError
from rlhf_models.lora import LoraSpec
from rlhf_models.testing import tiny_model_dir
from rlhf_rollout.host import free_port
from rlhf_train.algorithms.table import make_algorithm
from rlhf_train.specs import ModelSpec, OptimizerSpec
from trainer_testing import exact_logprobs, lone_worker, random_rollouts, run_ranks, shard_of, tiny_job

BETA = 0.75
ROLLOUTS = random_rollouts(6, vocab_size=512)


def updated(rank: int, num_ranks: int, master: Any, path: str, folder: str, stage: int) -> dict[str, Any]:
    """Train for three updates, continue in another worker, and train for one more in both.

    Returns the weights before and after each of the three updates, the log-probs of the teacher and of the policy
    before and after it, by rollout, and what both workers have at the end.
    """
    from rlhf_train.learning.worker import TrainWorker

    rewards = [row - 2.0 for row in range(len(ROLLOUTS))]
    _, columns, plan = shard_of(ROLLOUTS, 2, rank=rank, num_ranks=num_ranks, forward_size=4, rewards=rewards)
    trained = ModelSpec(
        path=path, zero_stage=stage, optimizer=OptimizerSpec(learning_rate=1e-2, eps=1e-4, scheduler="constant")
    )
    models = {"actor": trained, "teacher": ModelSpec(path=path, zero_stage=stage, is_average=True)}

    def started() -> TrainWorker:
        return TrainWorker(
            models, make_algorithm("reinforce", kl_coef=0.0, teacher_coef=0.5), temperature=1.0, rank=rank,
            num_ranks=num_ranks, master=master, device="cpu", seed=0, ema_beta=BETA,
        )  # fmt: skip

    def weights(worker: TrainWorker) -> dict[str, np.ndarray]:
        state = worker.engines["actor"].state_dict()
        trained = {name.removeprefix("model."): part for name, part in state.items() if "rotary_emb" not in name}
        return {name: part.float().numpy().copy() for name, part in trained.items()}

    def column(worker: TrainWorker, role: str) -> dict[str, np.ndarray]:
        worker.run_model(role)
        name = {"actor": "old_logprobs", "teacher": "teacher_logprobs"}[role]
        return worker.export_columns([name])[name]

    def update(worker: TrainWorker) -> None:
        worker.load_rollouts(columns, plan)
        column(worker, "actor")
        column(worker, "teacher")
        worker.assign_advantages(0.0)
        worker.update("actor", max_epochs=1, seed=0)

    worker = started()
    history = [weights(worker)]
    for _ in range(3):
        update(worker)
        history.append(weights(worker))
    worker.load_rollouts(columns, plan)
    found = {"history": history, "before": column(worker, "actor"), "teacher": column(worker, "teacher")}
    found["after"] = column(worker, "actor")
    worker.save_state(folder)
    worker.finish_state()
    torch.distributed.barrier()
    other = started()
    other.load_state(folder)
    ends = []
    for each in (worker, other):
        update(each)
        each.load_rollouts(columns, plan)
        ends.append((weights(each), column(each, "teacher")))
    return found | {"ends": ends}


@pytest.mark.parametrize(("num_ranks", "stage"), [(1, 0), (2, 2), (2, 3)])
def test_the_teacher_is_the_average_of_the_weights_after_each_update(tmp_path, num_ranks, stage):
    path = str(tiny_model_dir(tmp_path / "model"))
    (tmp_path / "state").mkdir()
    arguments = (path, str(tmp_path / "state"), stage)
    if num_ranks == 1:
        ranks = [updated(0, 1, ("127.0.0.1", free_port()), *arguments)]
    else:
        ranks = run_ranks(updated, num_ranks, *arguments)
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float64).eval()
    average, *later = ({n: p.astype(np.float64) for n, p in part.items()} for part in ranks[0]["history"])
    for each in later:
        average = {name: BETA * part + (1 - BETA) * each[name] for name, part in average.items()}
    seen = set()
    for found in ranks:
        for rollout in ROLLOUTS:
            if rollout.rollout_id not in found["teacher"]:
                continue
            seen.add(rollout.rollout_id)
            for name, state in (("teacher", average), ("before", later[-1])):
                loaded = {n: torch.from_numpy(part) for n, part in state.items()}
                assert model.load_state_dict(loaded, strict=False) == (["lm_head.weight"], [])  # the embedding
                with torch.no_grad():
                    logprobs, tokens = exact_logprobs(model, rollout)
                expected = logprobs.gather(1, tokens[:, None])[:, 0].numpy()
                own = found[name][rollout.rollout_id]
                np.testing.assert_allclose(own[rollout.loss_mask], expected, atol=2e-4)
                assert not own[~rollout.loss_mask].any()
            moved = found["teacher"][rollout.rollout_id] - found["before"][rollout.rollout_id]
            assert np.abs(moved).max() > 1e-2
            # The policy has its own weights again, bit by bit, and a run that continues has the same average.
            np.testing.assert_array_equal(found["after"][rollout.rollout_id], found["before"][rollout.rollout_id])
            own, other = (end[1][rollout.rollout_id] for end in found["ends"])
            np.testing.assert_array_equal(own, other)
        own, other = (end[0] for end in found["ends"])
        assert all(np.array_equal(part, other[name]) for name, part in own.items())
    assert len(seen) == len(ROLLOUTS)


def test_an_average_that_cannot_be_the_teacher_is_refused(tmp_path):
    job = tiny_job("model", tmp_path)
    teacher = dataclasses.replace(job.models["reference"], is_average=True)
    [placed] = job.plan.trainers
    plan = dataclasses.replace(job.plan, trainers=(dataclasses.replace(placed, roles=("actor", "teacher")),))
    changes = {
        "models": {"actor": job.models["actor"], "teacher": teacher},
        "plan": plan,
        "algorithm": make_algorithm("reinforce", kl_coef=0.0, teacher_coef=0.5),
        "ema_beta": 0.9,
    }
    dataclasses.replace(job, **changes)
    apart = tuple(dataclasses.replace(placed, roles=(role,)) for role in ("actor", "teacher"))
    zpg = {"actor": job.models["actor"], "teacher": dataclasses.replace(teacher, zero_stage=3, zpg=1)}
    zpg["teacher"] = dataclasses.replace(zpg["teacher"], zpg=2)
    for more, message in (
        ({"ema_beta": None}, "and there is none[^`]*hint: set ``ema_beta``"),
        ({"plan": dataclasses.replace(plan, trainers=apart)}, "it has processes of its own"),
        ({"early_forwards": True}, "``early_forwards`` would move it for each prompt"),
        ({"models": zpg}, "``zpg`` copies weights before they are averaged"),
    ):
        with pytest.raises(ConfigError, match=f"(?s)the teacher is the average of.*{message}"):
            dataclasses.replace(job, **(changes | more))


def test_with_adapters_the_teacher_is_the_model_that_is_saved_as_the_average(tmp_path):
    path = str(tiny_model_dir(tmp_path / "model"))
    optimizer = OptimizerSpec(learning_rate=5e-2, scheduler="constant")
    models = {
        "actor": ModelSpec(path=path, zero_stage=0, optimizer=optimizer, lora=LoraSpec(rank=4, alpha=16)),
        "teacher": ModelSpec(path=path, zero_stage=0, is_average=True),
    }
    algorithm = make_algorithm("reinforce", kl_coef=0.0, teacher_coef=0.5)
    worker = lone_worker(models, algorithm, ema_beta=BETA)
    shard, *loaded = shard_of(ROLLOUTS, 2, rewards=range(6))
    for _ in range(3):
        worker.load_rollouts(*loaded)
        worker.run_model("actor")
        worker.run_model("teacher")
        worker.assign_advantages(0.0)
        worker.update("actor", max_epochs=1, seed=0)
    worker.load_rollouts(*loaded)
    worker.run_model("teacher")
    found = worker.export_columns(["teacher_logprobs"])["teacher_logprobs"]
    gaps = []
    for name, save in (("average", worker.save_average), ("last", lambda folder: worker.save("actor", folder))):
        save(str(tmp_path / name))
        model = AutoModelForCausalLM.from_pretrained(tmp_path / name, dtype=torch.float64).eval()
        own = []
        for rollout in shard:
            with torch.no_grad():
                logprobs, tokens = exact_logprobs(model, rollout)
            expected = logprobs.gather(1, tokens[:, None])[:, 0].numpy()
            own.append(np.abs(found[rollout.rollout_id][rollout.loss_mask] - expected).max())
        gaps.append(max(own))
    assert gaps[0] < 1e-3 < 1e-2 < gaps[1]
