"""Every offline objective: however its work is laid out and split, over passes, ranks and ZeRO stages, the weights
after two steps and what evaluations say are the same; and a run starts at the model and gets better."""

import dataclasses
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rlhf_data.examples.preference import PreferenceExample, ProcessExample, UnpairedExample
from rlhf_data.examples.sft import SftExample
from rlhf_models.lora import LoraSpec
from rlhf_models.testing import tiny_model_dir
from rlhf_rollout.host import free_port
from rlhf_train.offline.epochs import OfflineSchedule
from rlhf_train.offline.job import OfflineJob, run_offline
from rlhf_train.offline.objectives.distillation import DistillationObjective
from rlhf_train.offline.objectives.dpo import PreferenceObjective
from rlhf_train.offline.objectives.kto import KtoObjective
from rlhf_train.offline.objectives.process_reward import ProcessRewardObjective
from rlhf_train.offline.objectives.reward_model import RewardModelObjective
from rlhf_train.offline.objectives.supervised import SupervisedObjective
from rlhf_train.specs import ModelSpec, OptimizerSpec
from trainer_testing import Watch, run_ranks

GOOD, BAD, STEP = 300, 301, 302
# Adam divides by the gradient's own size; this epsilon keeps an update smooth where a gradient is near 0.
OPTIMIZER = OptimizerSpec(learning_rate=3e-3, eps=1e-4, scheduler="constant")

OBJECTIVES = {
    "sft": SupervisedObjective(),
    "rm": RewardModelObjective(),
    "rm with margin": RewardModelObjective(margin_loss=True),
    "dpo": PreferenceObjective(beta=0.5, label_smoothing=0.1, nll_loss_coef=0.2),
    "ipo": PreferenceObjective(loss_type="ipo", beta=0.1, length_average=True),
    "simpo": PreferenceObjective(loss_type="simpo", beta=2.0, simpo_gamma=0.5),
    "orpo": PreferenceObjective(loss_type="orpo", beta=0.5),
    "kto": KtoObjective(beta=0.5, undesirable_loss_weight=1.5),
    "prm": ProcessRewardObjective(reward_tokens=(GOOD, BAD)),
    "kd": DistillationObjective(kd_coef=0.3),
}
# Other losses of the same pairs as rm's and dpo's: what a split does to them shows in a few cases.
VARIANTS = ("rm with margin", "ipo", "simpo", "orpo")


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


def job_for(
    name: str, model_path: str, folder: Path, master: Any, *, layout: Mapping[str, Any], **changes: Any
) -> OfflineJob:
    """Return a job over all of an objective's examples in each of two steps; evaluated on others."""
    teacher = ModelSpec(path=model_path)
    fields = {
        "objective": OBJECTIVES[name],
        "model": ModelSpec(path=model_path, optimizer=OPTIMIZER, **layout),
        "reference": teacher if name == "kd" else None,
        "examples": examples_for(name),
        "eval_examples": examples_for(name, 5, seed=1),
        "model_path": folder / "model",
        "master": master,
    }
    return OfflineJob(**(fields | changes))


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


# Largest difference of a weight after two updates of about 3e-3 each, in float32.
TOLERANCE = 2e-5


@dataclasses.dataclass(frozen=True)
class Case:
    """One way to lay out and split the same work; the plain one is whole.

    `only` names the objectives that it is for; without any, it is for all but the `VARIANTS`.
    """

    micro_train_batch_size: int = 12
    micro_batch_tokens: int | None = None
    packing: bool = False
    zero_stage: int = 0
    gradient_checkpointing: bool = False
    precompute_reference: bool = False
    lora: LoraSpec | None = None
    sequence_parallel_size: int = 1
    tensor_parallel_size: int = 1
    experts: bool = False  # a mixture of experts, with the load-balancing loss
    only: tuple[str, ...] = ()

    @property
    def names(self) -> list[str]:
        """The objectives that it is for."""
        names = self.only or [name for name in OBJECTIVES if name not in VARIANTS]
        return [name for name in names if OBJECTIVES[name].needs_reference or not self.precompute_reference]

    @property
    def unsplit(self) -> str:
        """The case that does the same work in one pass."""
        words = [*(["experts"] if self.experts else []), *(["adapters"] if self.lora else [])]
        return ", ".join(words) or "whole"


ALL = tuple(OBJECTIVES)
ADAPTED = {"lora": LoraSpec(rank=4), "only": ("sft", "rm", "dpo", "kto")}  # one loss of each kind of examples
EXPERTS = {"experts": True, "only": ("rm", "kto")}  # whose loss is added to that of any objective
ADAPTED_EXPERTS = EXPERTS | {"lora": LoraSpec(rank=4)}
ONE_RANK = {
    "whole": Case(only=ALL),
    "passes of 5, checkpointed": Case(micro_train_batch_size=5, gradient_checkpointing=True),
    "packed to 60 tokens": Case(packing=True, zero_stage=2, micro_batch_tokens=60, only=ALL),
    "reference computed up front": Case(packing=True, micro_train_batch_size=5, precompute_reference=True),
    "adapters": Case(**ADAPTED),
    "experts": Case(**EXPERTS),
    "experts, adapters": Case(**ADAPTED_EXPERTS),
    "experts, adapters, passes of 5": Case(**ADAPTED_EXPERTS, micro_train_batch_size=5),
    "adapters, checkpointed": Case(**ADAPTED, gradient_checkpointing=True, micro_train_batch_size=5),
}
TWO_RANKS = {
    "ZeRO 0": Case(micro_train_batch_size=5, only=("rm", "kto")),
    "ZeRO 3, packed to 60 tokens": Case(packing=True, zero_stage=3, micro_batch_tokens=60, only=ALL),
    "ZeRO 2, reference computed up front": Case(micro_train_batch_size=4, zero_stage=2, precompute_reference=True),
    "divided sequences": Case(packing=True, zero_stage=2, micro_train_batch_size=5, sequence_parallel_size=2),
    "experts, divided": Case(**EXPERTS, packing=True, micro_train_batch_size=5, sequence_parallel_size=2),
    "experts, ZeRO 3, packed to 60 tokens": Case(**EXPERTS, packing=True, zero_stage=3, micro_batch_tokens=60),
    "adapters, ZeRO 3": Case(**ADAPTED, packing=True, zero_stage=3, micro_train_batch_size=5),
    "adapters, reference computed up front": Case(**ADAPTED, zero_stage=2, precompute_reference=True),
}
# DeepSpeed keeps the groups of a process: these have processes of their own.
DIVIDED_WEIGHTS = {
    "divided weights": Case(
        micro_train_batch_size=5, gradient_checkpointing=True, tensor_parallel_size=2, only=("rm", "kto", "kd")
    ),
    "divided weights, packed, up front": Case(
        packing=True, zero_stage=2, micro_train_batch_size=5, precompute_reference=True, tensor_parallel_size=2
    ),
}
CASES = ONE_RANK | TWO_RANKS | DIVIDED_WEIGHTS
SPLITS = [(case, name) for case in CASES for name in CASES[case].names if case != CASES[case].unsplit]
UNSPLIT = [(case, name) for case in ("whole", "adapters", "experts") for name in CASES[case].names]
# A coefficient far above a useful one, so that a wrong loss shows.
AUX_LOSS_COEF = 1.0


def run_all(rank: int, num_ranks: int, master: Any, paths: Any, folder: str, cases: Mapping[str, Case]) -> Any:
    """Run each case of each objective; return weights, metrics of the steps and of evaluations (rank 0's)."""
    results = {}
    for key, case in cases.items():
        plan = OfflineSchedule(
            train_batch_size=12,
            micro_train_batch_size=case.micro_train_batch_size,
            micro_batch_tokens=case.micro_batch_tokens,
            max_epochs=2,
        )
        fields = (
            "packing",
            "sequence_parallel_size",
            "tensor_parallel_size",
            "zero_stage",
            "gradient_checkpointing",
            "lora",
        )
        layout = {name: getattr(case, name) for name in fields}
        layout["aux_loss_coef"] = AUX_LOSS_COEF if case.experts else 0.0
        path = paths[case.experts]
        extras = {"precompute_reference": case.precompute_reference}
        for name in case.names:
            target = Path(folder) / f"{key}-{name}"
            split = {"rank": rank, "num_ranks": num_ranks, "schedule": plan}
            watch = run(job_for(name, path, target, master, layout=layout, **split, **extras))
            if rank == 0:
                results[key, name] = (weights(target / "model"), watch.steps, watch.evaluations)
    return results


@pytest.fixture(scope="module")
def model_paths(tmp_path_factory):
    """A model without experts, and one with them."""
    folder = tmp_path_factory.mktemp("models")
    plain = tiny_model_dir(folder / "tiny", num_key_value_heads=2)
    return str(plain), str(tiny_model_dir(folder / "experts", architecture="qwen3_moe"))


@pytest.fixture(scope="module")
def results(model_paths, tmp_path_factory):
    """What each case gives each objective: two ranks in processes of their own, while one rank works here."""
    folder = str(tmp_path_factory.mktemp("runs"))
    with ThreadPoolExecutor(1) as pool:
        pairs = [
            pool.submit(run_ranks, run_all, 2, model_paths, folder, cases) for cases in (TWO_RANKS, DIVIDED_WEIGHTS)
        ]
        alone = run_all(0, 1, ("127.0.0.1", free_port()), model_paths, folder, ONE_RANK)
        return alone | pairs[0].result()[0] | pairs[1].result()[0]


def measured(metrics: dict[str, float]) -> dict[str, float]:
    return {name: value for name, value in metrics.items() if not name.startswith(("time/", "throughput/"))}


@pytest.mark.parametrize(("case", "name"), SPLITS)
def test_offline_run_does_not_depend_on_how_it_is_split(results, case, name):
    split_weights, *split_metrics = results[case, name]
    whole_weights, *whole_metrics = results[CASES[case].unsplit, name]
    assert split_weights.keys() == whole_weights.keys()
    for key, value in whole_weights.items():
        assert np.abs(split_weights[key] - value).max() < TOLERANCE, key
    (split_steps, split_evaluations), (steps, evaluations) = split_metrics, whole_metrics
    assert len(split_steps) == len(steps) == 2
    for ours, theirs in zip(split_steps, steps, strict=True):
        assert measured(ours) == pytest.approx(measured(theirs), abs=1e-3, rel=1e-3)
    assert split_evaluations.keys() == evaluations.keys() == {0, 2}
    for step in evaluations:
        assert split_evaluations[step] == pytest.approx(evaluations[step], abs=1e-3, rel=1e-3)


@pytest.mark.parametrize(("case", "name"), UNSPLIT)
def test_offline_run_moves_the_model_and_lowers_its_loss(results, model_paths, case, name):
    trained, steps, _ = results[case, name]
    start = weights(Path(model_paths[CASES[case].experts]))
    (first,), (second,) = ([value for key, value in step.items() if key.endswith("/loss")] for step in steps)
    assert second < first  # of the same twelve examples
    assert all(step["samples/trained"] == 12 for step in steps)
    assert all((step.get("train/aux_loss", 0.0) > 1.9) == CASES[case].experts for step in steps)
    before, after = ({key.replace(":model.", ":"): value for key, value in them.items()} for them in (start, trained))
    moved = {key for key, value in after.items() if not np.array_equal(before.get(key), value)}
    assert any("q_proj" in key for key in moved)
    heads = {key for key in moved if key.endswith(":score.weight")}
    assert bool(heads) == name.startswith("rm")
    if case == "adapters":
        assert all("_proj" in key for key in moved - heads)


@pytest.mark.parametrize(("case", "name"), [(case, name) for case, name in UNSPLIT if OBJECTIVES[name].needs_reference])
def test_offline_run_before_training_equals_its_reference(results, case, name):
    _, _, evaluations = results[case, name]
    rewards = {key: value for key, value in evaluations[0].items() if key.endswith(("reward", "margin", "kl"))}
    assert rewards
    assert rewards == pytest.approx(dict.fromkeys(rewards, 0.0), abs=1e-5)
