"""Loss and gradient of one batch, of supervised fine-tuning and DPO, as TRL's trainers compute them and as ours do.

TRL is a dependency of these tests alone, in the workspace's lock; where it is not installed they are skipped.
"""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("trl")

from rlhf_data.examples.preference import PreferenceExample
from rlhf_data.examples.sft import SftExample
from rlhf_models.loading import load_actor, load_reference, load_tokenizer
from rlhf_models.testing import tiny_model_dir
from rlhf_train.batching import Denominators
from rlhf_train.losses.preference_table import PREFERENCE_LOSSES
from rlhf_train.offline.epochs import Objective
from rlhf_train.offline.objectives.dpo import PreferenceObjective
from rlhf_train.offline.objectives.supervised import SupervisedObjective


@pytest.fixture(scope="module")
def paths(tmp_path_factory):
    """A policy, and another model for the reference, so that no log-ratio is 0."""
    folder = tmp_path_factory.mktemp("models")
    return [str(tiny_model_dir(folder / name, seed=seed)) for seed, name in enumerate(("policy", "reference"))]


def sequences(count: int, seed: int) -> list[SftExample]:
    rng = np.random.default_rng(seed)
    lengths = rng.integers(4, 20, count)
    return [SftExample("row", rng.integers(3, 500, n), np.arange(n) >= rng.integers(1, n - 1)) for n in lengths]


def ours(objective: Objective[Any], examples: list[Any], path: str) -> tuple[float, dict[str, torch.Tensor]]:
    actor = load_actor(path, dtype="float32")
    engine = SimpleNamespace(forward=actor, device=torch.device("cpu"), module=actor)
    items = objective.items(examples)
    denominators = Denominators(sum(map(objective.num_trained_tokens, items)), len(items), 20)
    loss, _ = objective.loss(engine, items, denominators)
    loss.backward()
    return loss.item(), {name: p.grad for name, p in actor.model.named_parameters()}


def theirs(trainer: Any, rows: list[SftExample]) -> tuple[float, dict[str, torch.Tensor]]:
    width = max(row.num_tokens for row in rows)

    def padded(arrays: list[np.ndarray], fill: int) -> torch.Tensor:
        return torch.tensor([[*map(int, array), *[fill] * (width - len(array))] for array in arrays])

    tokens, mask = padded([row.token_ids for row in rows], 0), padded([row.loss_mask for row in rows], 0)
    inputs = {"input_ids": tokens, "attention_mask": padded([np.ones(row.num_tokens) for row in rows], 0)}
    if type(trainer).__name__ == "DPOTrainer":
        inputs["completion_mask"] = mask
    else:
        inputs["labels"] = tokens.masked_fill(mask == 0, -100)
    loss = trainer.compute_loss(trainer.model, inputs)
    loss.backward()
    return loss.item(), {name: p.grad for name, p in trainer.model.named_parameters()}


def options(config: Any, folder: Any, **fields: Any) -> Any:
    return config(
        output_dir=str(folder), use_cpu=True, report_to=[], bf16=False, gradient_checkpointing=False, **fields
    )


def same(our_result: Any, their_result: Any) -> None:
    (loss, gradients), (expected, expected_gradients) = our_result, their_result
    assert loss == pytest.approx(expected, rel=1e-5)
    assert gradients.keys() == expected_gradients.keys()
    largest = max(float(gradient.abs().max()) for gradient in gradients.values())
    assert largest > 1e-3
    for name, gradient in gradients.items():
        torch.testing.assert_close(gradient, expected_gradients[name], rtol=1e-3, atol=1e-6 * max(largest, 1))


def test_supervised_loss_and_gradient_equal_trls(paths, tmp_path):
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer

    rows = sequences(6, seed=0)
    dummy = Dataset.from_list([{"prompt": "a", "completion": "b"}])
    trainer = SFTTrainer(
        load_actor(paths[0], dtype="float32").model,
        args=options(SFTConfig, tmp_path),
        train_dataset=dummy,
        processing_class=load_tokenizer(paths[0]),
    )
    same(ours(SupervisedObjective(), rows, paths[0]), theirs(trainer, rows))


@pytest.mark.parametrize("kind", [row.name for row in PREFERENCE_LOSSES.values() if row.needs_reference])
def test_preference_loss_and_gradient_equal_trls(paths, tmp_path, kind):
    from datasets import Dataset
    from trl import DPOConfig, DPOTrainer

    chosen, rejected = sequences(5, seed=1), sequences(5, seed=2)
    smoothing = {"label_smoothing": 0.2} if PREFERENCE_LOSSES[kind].needs_smoothing else {}
    dummy = Dataset.from_list([{"prompt": "a", "chosen": "b", "rejected": "c"}])
    trainer = DPOTrainer(
        load_actor(paths[0], dtype="float32").model,
        ref_model=load_reference(paths[1], dtype="float32").model,
        args=options(DPOConfig, tmp_path, beta=0.3, loss_type="sigmoid" if kind == "dpo" else kind, **smoothing),
        train_dataset=dummy,
        processing_class=load_tokenizer(paths[0]),
    )
    fields = smoothing | {"loss_type": kind, "length_average": kind == "ipo"}
    objective = PreferenceObjective(beta=0.3, reference=load_reference(paths[1], dtype="float32"), **fields)
    pairs = [PreferenceExample("pair", *pair) for pair in zip(chosen, rejected, strict=True)]
    same(ours(objective, pairs, paths[0]), theirs(trainer, [*chosen, *rejected]))
