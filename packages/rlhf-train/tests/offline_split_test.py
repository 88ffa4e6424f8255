"""Every offline objective: however its work is laid out and split, over passes, ranks and ZeRO stages, the weights
after two steps and what evaluations say are the same; and a run starts at the model and gets better."""

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rlhf_data.preference import PreferenceExample, ProcessExample, UnpairedExample
from rlhf_data.sft import SftExample
from rlhf_models.lora import LoraSpec
from rlhf_models.testing import tiny_model_dir
from rlhf_train.offline.distillation import DistillationObjective
from rlhf_train.offline.job import OfflineJob, run_offline
from rlhf_train.offline.kto import KtoObjective
from rlhf_train.offline.loop import OfflineSchedule
from rlhf_train.offline.preference import PreferenceObjective
from rlhf_train.offline.process_reward import ProcessRewardObjective
from rlhf_train.offline.reward_model import RewardModelObjective
from rlhf_train.offline.supervised import SupervisedObjective
from rlhf_train.specs import ModelSpec, OptimizerSpec
from rlhf_train.testing import run_ranks

GOOD, BAD, STEP = 300, 301, 302
# Adam divides by the gradient's own size; this epsilon keeps an update smooth where a gradient is near 0.
OPTIMIZER = OptimizerSpec(learning_rate=1e-2, eps=1e-4, scheduler="constant")

OBJECTIVES = {
    "sft": SupervisedObjective(),
    "rm": RewardModelObjective(),
    "rm with margin": RewardModelObjective(use_margins=True),
    "dpo": PreferenceObjective(beta=0.5, label_smoothing=0.1, nll_coef=0.2),
    "ipo": PreferenceObjective(loss_type="ipo", beta=0.5, length_average=True),
    "simpo": PreferenceObjective(loss_type="simpo", beta=2.0, gamma=0.5),
    "orpo": PreferenceObjective(loss_type="orpo", beta=0.5),
    "kto": KtoObjective(beta=0.5, undesirable_weight=1.5),
    "prm": ProcessRewardObjective(reward_tokens=(GOOD, BAD)),
    "kd": DistillationObjective(kd_coef=0.3),
}


def answer(rng: np.random.Generator, prompt: np.ndarray, low: int, high: int) -> SftExample:
    """A prompt with an answer of tokens in a range."""
    tokens = np.concatenate([prompt, rng.integers(low, high, rng.integers(1, 9))])
    return SftExample("answer", tokens, np.arange(len(tokens)) >= len(prompt))


def examples_for(name: str, count: int = 12, seed: int = 0) -> list[Any]:
    """Return examples for an objective; good answers are of low tokens, bad ones of high tokens."""
    rng = np.random.default_rng(seed)
    examples: list[Any] = []
    for index in range(count):
        prompt = rng.integers(3, 250, rng.integers(1, 7))
        good, bad = answer(rng, prompt, 3, 60), answer(rng, prompt, 400, 460)
        if name in ("sft", "kd"):
            examples.append(good)
        elif name == "kto":
            judged = good if index % 3 else bad
            examples.append(UnpairedExample(f"e{index}", judged.token_ids, judged.loss_mask, bool(index % 3)))
        elif name == "prm":
            steps = [np.append(rng.integers(3, 60, 3) + 400 * (k % 2), STEP) for k in range(rng.integers(1, 4))]
            tokens = np.concatenate([prompt, *steps])
            labels = [1.0 if k % 2 == 0 else 0.25 for k in range(len(steps))]
            examples.append(ProcessExample(f"e{index}", tokens, np.flatnonzero(tokens == STEP), labels))
        else:
            examples.append(PreferenceExample(f"e{index}", good, bad, margin=0.1 * index))
    return examples


class Watch:
    """Keeps what a run reports."""

    def __init__(self) -> None:
        self.steps: list[dict[str, float]] = []
        self.evaluations: dict[int, dict[str, float]] = {}

    def step(self, step: int, num_steps: int, metrics: dict[str, float]) -> None:
        self.steps.append(metrics)

    def evaluation(self, step: int, metrics: dict[str, float]) -> None:
        self.evaluations[step] = metrics


def job_for(name: str, model_path: str, folder: Path, master: Any, **changes: Any) -> OfflineJob:
    """Return a job over all of an objective's examples in each of two steps; evaluated on others."""
    model = ModelSpec(path=model_path, zero_stage=0, optimizer=OPTIMIZER)
    job = OfflineJob(
        objective=OBJECTIVES[name],
        model=model,
        reference=dataclasses.replace(model, optimizer=None) if name == "kd" else None,
        examples=examples_for(name),
        eval_examples=examples_for(name, 5, seed=1),
        schedule=OfflineSchedule(train_batch_size=12, micro_train_batch_size=12, max_epochs=2),
        model_path=folder / "model",
        master=master,
    )
    return dataclasses.replace(job, **changes)


def run(job: OfflineJob) -> Watch:
    """Carry a job out."""
    watch = Watch()
    run_offline(job, watch)
    return watch


def weights(folder: Path) -> dict[str, np.ndarray]:
    """Return all weights of a saved model, its head included."""
    from safetensors.numpy import load_file

    return {
        f"{file.name}:{name}": value for file in folder.glob("*.safetensors") for name, value in load_file(file).items()
    }


# Largest difference of a weight after two updates of about 1e-2 each, in float32.
TOLERANCE = 2e-5
REFERENCED = ("dpo", "ipo", "kto")


def schedule(**changes: Any) -> OfflineSchedule:
    return OfflineSchedule(**({"train_batch_size": 12, "micro_train_batch_size": 12, "max_epochs": 2} | changes))


# name -> (packing, ZeRO stage, schedule, other changes of the job); without a name of an objective, for all of them
ONE_RANK = {
    "whole": (False, 0, schedule(), {}),
    "passes of 5": (False, 0, schedule(micro_train_batch_size=5), {}),
    "packed": (True, 0, schedule(), {}),
    "packed to 60 tokens": (True, 2, schedule(micro_batch_tokens=60), {}),
    "reference computed up front": (True, 0, schedule(micro_train_batch_size=5), {"precompute_reference": True}),
}
TWO_RANKS = {
    "ZeRO 0": (False, 0, schedule(micro_train_batch_size=5), {}),
    "ZeRO 3, packed to 60 tokens": (True, 3, schedule(micro_batch_tokens=60), {}),
    "ZeRO 2, reference computed up front": (
        False,
        2,
        schedule(micro_train_batch_size=4),
        {"precompute_reference": True},
    ),
}
WITH_LORA = {
    "adapters, whole": (False, 0, schedule(), {}),
    "adapters, ZeRO 3": (True, 3, schedule(micro_train_batch_size=5), {}),
    "adapters, reference computed up front": (False, 2, schedule(), {"precompute_reference": True}),
}


def run_all(rank: int, num_ranks: int, master: Any, path: str, folder: str, cases: Any, names: Any) -> Any:
    """Run each case of each objective; return weights, metrics of the steps and evaluations (rank 0's)."""
    results = {}
    for case, (packing, zero_stage, plan, changes) in cases.items():
        for name in names:
            if changes.get("precompute_reference") and name not in REFERENCED:
                continue
            target = Path(folder) / f"{num_ranks}-{case}-{name}"
            job = job_for(name, path, target, master, rank=rank, num_ranks=num_ranks, schedule=plan, **changes)
            model = dataclasses.replace(job.model, packing=packing, zero_stage=zero_stage)
            watch = run(dataclasses.replace(job, model=model))
            if rank == 0:
                results[case, name] = (weights(target / "model"), watch.steps, watch.evaluations)
    return results


@pytest.fixture(scope="module")
def model_path(tmp_path_factory):
    return str(tiny_model_dir(tmp_path_factory.mktemp("models") / "tiny"))


@pytest.fixture(scope="module")
def results(model_path, tmp_path_factory):
    folder = str(tmp_path_factory.mktemp("runs"))
    lora = {case: (*fields, changes | {"lora": LoraSpec(rank=4)}) for case, (*fields, changes) in WITH_LORA.items()}
    names = list(OBJECTIVES)
    found = run_ranks(run_all, 1, model_path, folder, ONE_RANK, names)[0]
    found |= run_ranks(run_all, 2, model_path, folder, TWO_RANKS | lora, names)[0]
    return found


def same(ours: Any, whole: Any) -> None:
    our_weights, our_steps, our_evaluations = ours
    weights_, steps, evaluations = whole
    assert our_weights.keys() == weights_.keys()
    for name, value in weights_.items():
        assert np.abs(our_weights[name] - value).max() < TOLERANCE, name
    for ours_, theirs in zip([*our_steps, *our_evaluations.values()], [*steps, *evaluations.values()], strict=True):
        measured = {name: value for name, value in theirs.items() if not name.startswith(("time/", "throughput/"))}
        assert {name: ours_[name] for name in measured} == pytest.approx(measured, abs=1e-3, rel=1e-3)


@pytest.mark.parametrize("name", OBJECTIVES)
@pytest.mark.parametrize("case", [*list(ONE_RANK)[1:], *TWO_RANKS])
def test_offline_run_does_not_depend_on_how_it_is_split(results, case, name):
    if (case, name) not in results:
        assert name not in REFERENCED
        pytest.skip("has no reference")
    same(results[case, name], results["whole", name])


@pytest.mark.parametrize("name", OBJECTIVES)
@pytest.mark.parametrize("case", list(WITH_LORA)[1:])
def test_offline_run_with_adapters_does_not_depend_on_how_it_is_split(results, case, name):
    if (case, name) not in results:
        assert name not in REFERENCED
        pytest.skip("has no reference")
    same(results[case, name], results["adapters, whole", name])


@pytest.mark.parametrize("name", OBJECTIVES)
@pytest.mark.parametrize("case", ["whole", "adapters, whole"])
def test_offline_run_starts_at_the_model_and_gets_better(results, model_path, case, name):
    trained, steps, evaluations = results[case, name]
    assert evaluations[2]["eval/loss"] < evaluations[0]["eval/loss"]
    assert all(step["samples/trained"] == 12 for step in steps)
    moved = [key for key, value in weights(Path(model_path)).items() if not np.array_equal(trained.get(key), value)]
    assert moved


@pytest.mark.parametrize("name", REFERENCED)
@pytest.mark.parametrize("case", ["whole", "adapters, whole"])
def test_offline_run_before_training_equals_its_reference(results, case, name):
    _, _, evaluations = results[case, name]
    rewards = {key: value for key, value in evaluations[0].items() if key.endswith(("reward", "margin", "kl"))}
    assert rewards
    assert rewards == pytest.approx(dict.fromkeys(rewards, 0.0), abs=1e-5)
