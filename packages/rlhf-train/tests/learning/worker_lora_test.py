"""A rank that trains adapters: what it trains and sends, what its reference is, what it saves, and how it goes on."""

from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from rlhf_models.loading import load_actor, load_reference
from rlhf_models.lora import LoraSpec, add_lora, merge_adapter, save_adapter
from rlhf_models.testing import tiny_model_dir
from rlhf_train.algorithms.table import make_algorithm
from rlhf_train.engine.shards import ShardReader
from rlhf_train.learning.worker import TrainWorker
from rlhf_train.specs import ModelSpec, OptimizerSpec
from trainer_testing import lone_worker, random_rollouts, shard_of

pytest.importorskip("peft")

VOCAB_SIZE = 512
KL_COEF = 0.05
ADAPTERS = LoraSpec(rank=3, alpha=6.0)
# The second has its base in 4 bits.
SPECS = [ADAPTERS, replace(ADAPTERS, load_in_4bit=True)][: 2 if find_spec("bitsandbytes") else 1]


@pytest.fixture(scope="module")
def path(tmp_path_factory) -> str:
    return str(tiny_model_dir(tmp_path_factory.mktemp("model"), vocab_size=VOCAB_SIZE))


def make_worker(path: str, *, estimator: str = "gae", lora: LoraSpec | None = ADAPTERS, seed: int = 0) -> TrainWorker:
    optimizer = OptimizerSpec(learning_rate=1e-2, scheduler="constant", max_norm=0.0)
    frozen = ModelSpec(path=path, zero_stage=0)
    models = {"actor": ModelSpec(path=path, zero_stage=0, optimizer=optimizer, lora=lora)}
    if estimator == "gae":
        models |= {"critic": models["actor"], "reference": frozen}
    algorithm = make_algorithm(estimator, kl_coef=KL_COEF if len(models) > 1 else 0)
    worker = lone_worker(models, algorithm, seed=seed, ema_beta=0.5)
    worker.load_rollouts(*shard_of(random_rollouts(8, vocab_size=VOCAB_SIZE), 4, rewards=range(8))[1:])
    return worker


def step(worker: TrainWorker) -> None:
    for role in worker._specs:
        worker.run_model(role)
    worker.assign_advantages(KL_COEF)
    for role in worker.engines:
        worker.update(role, max_epochs=3, seed=0)  # the first moves B and the value head, the critic's third A


def state(worker: TrainWorker) -> dict[str, torch.Tensor]:
    roles = worker.engines.items()
    return {f"{role}.{name}": weight for role, engine in roles for name, weight in engine.state_dict().items()}


def sent(worker: TrainWorker) -> dict[str, torch.Tensor]:
    return {name: weight.clone() for name, weight in worker.engines["actor"].named_weights()}


def loaded(folder: str | Path) -> dict[str, torch.Tensor]:
    return {name: weight.detach() for name, weight in AutoModelForCausalLM.from_pretrained(folder).named_parameters()}


def assert_equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    assert one.keys() == other.keys()
    assert not differing(one, other)


def differing(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> set[str]:
    """The names of tensors that differ in a bit. 4 bits each, read as numbers, may be no numbers."""
    bits = torch.uint8
    return {
        name for name in one if not torch.equal(one[name].reshape(-1).view(bits), other[name].reshape(-1).view(bits))
    }


@pytest.fixture(scope="module", params=SPECS, ids=lambda spec: "4 bits" if spec.load_in_4bit else "whole")
def lora(request) -> LoraSpec:
    return request.param


@pytest.fixture(scope="module")
def base(lora, path, tmp_path_factory) -> str:
    """The folder of the weights that the base computes with: those of `path`, or rounded by an adapter of zeros."""
    if not lora.load_in_4bit:
        return path
    actor, folder = load_actor(path, dtype="float32"), tmp_path_factory.mktemp("rounded")
    add_lora(actor, ADAPTERS)
    adapter = save_adapter(actor, actor.state_dict(), folder / "adapter")
    return str(merge_adapter(path, adapter, folder / "model", dtype="float32", load_in_4bit=True))


@pytest.fixture(scope="module")
def stepped(lora, path, base) -> tuple[TrainWorker, set[str]]:
    """A worker after a step, and the names of the weights that the step moved."""
    worker = make_worker(path, lora=lora)
    before = state(worker)
    assert_equal(sent(worker), loaded(base))  # B starts at zero
    step(worker)
    moved = differing(state(worker), before)
    return worker, moved


def test_updates_move_adapters_and_the_value_head_alone(stepped):
    worker, moved = stepped
    trained = {name for name in state(worker) if ".lora_" in name or "value_head" in name}
    assert moved == trained
    assert {name.split(".")[0] for name in moved} == {"actor", "critic"}


def test_reference_is_the_actor_without_adapters_and_equals_a_loaded_one_exactly(stepped, base):
    worker, _ = stepped
    batch = worker._batch("reference", range(4))
    with torch.no_grad():
        own = worker._frozen["reference"](batch).logprobs
        adapted = worker.engines["actor"].forward(batch).logprobs
        assert torch.equal(own, load_reference(base, dtype="float32")(batch).logprobs)
    assert not isinstance(worker._frozen["reference"], torch.nn.Module)
    assert (adapted - own).abs().max() > 1e-3


def test_sent_weights_are_those_that_peft_merges_and_sending_changes_nothing(stepped, base, tmp_path):
    worker, _ = stepped
    before, numbers = state(worker), torch.get_rng_state()
    weights = sent(worker)
    assert_equal(state(worker), before)
    worker.save("actor", str(tmp_path / "model"))  # merged by peft
    assert torch.equal(torch.get_rng_state(), numbers)
    assert_equal(weights, loaded(tmp_path / "model"))
    assert (tmp_path / "model/adapter/adapter_config.json").is_file()
    changed = {name for name, weight in loaded(base).items() if not torch.equal(weight, weights[name])}
    assert {name.split(".")[-2] for name in changed} == {
        *("q_proj", "k_proj", "v_proj", "o_proj"), *("gate_proj", "up_proj", "down_proj"),
    }  # fmt: skip


def test_sent_adapters_are_those_of_peft_with_their_scale_and_sending_changes_nothing(stepped, tmp_path):
    worker, _ = stepped
    before = state(worker)
    adapters = {name: tensor.clone() for name, tensor in worker.engines["actor"].named_adapters()}
    assert_equal(state(worker), before)
    worker.save("actor", str(tmp_path / "model"))
    saved = load_file(tmp_path / "model/adapter/adapter_model.safetensors")
    assert_equal(
        {f"base_model.model.{name}": tensor for name, tensor in adapters.items()},
        {name: tensor * (2.0 if ".lora_B." in name else 1.0) for name, tensor in saved.items()},
    )


def test_moving_average_has_the_adapters_alone_and_is_saved_merged(stepped, base, tmp_path):
    worker, _ = stepped
    average = worker._average.values()
    assert average and all(".lora_" in name for name in average)
    before = state(worker)
    worker.save_average(str(tmp_path / "average"))
    assert_equal(state(worker), before)
    merged = loaded(tmp_path / "average")["model.layers.0.self_attn.q_proj.weight"]
    a, b = (average[f"model.model.layers.0.self_attn.q_proj.lora_{letter}.default.weight"] for letter in "AB")
    weight = loaded(base)["model.layers.0.self_attn.q_proj.weight"]
    torch.testing.assert_close(merged.double(), weight.double() + 2.0 * b.double() @ a.double(), rtol=0, atol=1e-6)


def test_rank_with_adapters_goes_on_bit_for_bit_from_files_that_hold_them_alone(stepped, lora, path, tmp_path):
    worker, _ = stepped
    worker.save_state(str(tmp_path))
    worker.finish_state()
    names = [*ShardReader([tmp_path / "actor-0-of-1.safetensors"])._parts]
    assert all(".lora_" in name or name.startswith("random/") for name in names)
    other = make_worker(path, lora=lora, seed=7)  # other first adapters
    other.load_state(str(tmp_path))
    assert_equal(state(other), state(worker))
    for each in (worker, other):
        step(each)
    assert_equal(state(other), state(worker))
    assert_equal(other._average.values(), worker._average.values())


def test_gradients_of_adapters_follow_from_those_of_the_merged_weights(lora, path, tmp_path):
    worker = make_worker(path, estimator="rloo", lora=lora)
    step(worker)
    worker.save("actor", str(tmp_path / "model"))
    full = make_worker(str(tmp_path / "model"), estimator="rloo", lora=None)
    weights = state(worker)
    adapted, whole = gradients(worker), gradients(full)
    pairs = [name for name in adapted if ".lora_A." in name]
    assert len(adapted) == 2 * len(pairs) == 2 * 2 * 7
    for name in pairs:
        # With W + s B A, the chain rule gives s B^T G and s G A^T, where G is the gradient of the merged weight.
        of_weight = whole[name.replace(".lora_A.default", "")].double()
        a, b = (weights[f"actor.{key}"].double() for key in (name, name.replace("lora_A", "lora_B")))
        for key, expected in ((name, 2.0 * b.T @ of_weight), (name.replace("lora_A", "lora_B"), 2.0 * of_weight @ a.T)):
            assert expected.abs().max() > 0
            torch.testing.assert_close(adapted[key].double(), expected, rtol=1e-3, atol=1e-4 * expected.abs().max())


def gradients(worker: TrainWorker) -> dict[str, torch.Tensor]:
    """Return the gradients of one update of the actor, by weight."""
    worker.run_model("actor")
    worker.assign_advantages(0.0)
    engine, found = worker.engines["actor"], {}
    update = engine.step

    def noting():
        found.update({name: w.grad.clone() for name, w in engine.module.named_parameters() if w.grad is not None})
        return update()

    engine.step = noting
    worker.update("actor", max_epochs=1, seed=0)
    return found
