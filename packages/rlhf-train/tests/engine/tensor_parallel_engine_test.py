"""Engines on ranks that divide the weights of layers, or the experts of a mixture, do what one rank does: its updates,
its files, and what it sends."""

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from rlhf_data.errors import CheckpointError
from rlhf_models.loading import load_actor
from rlhf_models.testing import tiny_model_dir
from rlhf_rollout.host import free_port
from rlhf_train.engine.shards import COLUMN_PARTS, ShardReader, Shards, WeightPart, column_parts, load_weights
from rlhf_train.specs import ModelSpec, OptimizerSpec
from trainer_testing import run_ranks

SPEC = OptimizerSpec(learning_rate=1e-2, eps=1e-3, weight_decay=0.1, scheduler="constant", max_norm=0.5)


@dataclasses.dataclass(frozen=True)
class Layout:
    size: int = 1
    zero_stage: int = 1
    dtype: str = "float32"
    offload: bool = False
    experts: int = 1

    def spec(self, path: str) -> ModelSpec:
        optimizer = dataclasses.replace(SPEC, offload=self.offload)
        sizes = {"tensor_parallel_size": self.size, "expert_parallel_size": self.experts}
        return ModelSpec(path=path, dtype=self.dtype, zero_stage=self.zero_stage, optimizer=optimizer, **sizes)


LAYOUTS = {
    "weights": {
        "ZeRO 0": Layout(2, zero_stage=0),
        "ZeRO 1": Layout(2),
        "ZeRO 2": Layout(2, zero_stage=2),
        "bfloat16": Layout(2, dtype="bfloat16"),
        "bfloat16, ZeRO 2": Layout(2, zero_stage=2, dtype="bfloat16"),
        "bfloat16, offloaded": Layout(2, dtype="bfloat16", offload=True),
    },
    "experts": {
        "ZeRO 0": Layout(experts=2, zero_stage=0),
        "ZeRO 2": Layout(experts=2, zero_stage=2),
        "bfloat16": Layout(experts=2, dtype="bfloat16"),
        "bfloat16, ZeRO 2": Layout(experts=2, zero_stage=2, dtype="bfloat16"),
    },
}
MODELS = {
    "weights": {"num_attention_heads": 4, "num_key_value_heads": 4},
    "experts": {"architecture": "mixtral"},
}


def new_engine(path: str, num_ranks: int, layout: Layout, groups: dict[str, Any]) -> Any:
    from rlhf_train.engine.accelerate import start_engine

    model = load_actor(path, dtype=layout.dtype)
    return start_engine(model, layout.spec(path), num_ranks=num_ranks, device="cpu", pack_tokens=None, **groups)


def join(rank: int, num_ranks: int, master: Any, layout: Layout) -> tuple[dict[str, Any], tuple[int, int]]:
    """Return the groups of this rank, and the part of the rows that it trains on."""
    from rlhf_train.engine.accelerate import join_groups
    from rlhf_train.engine.process_group import init_process_group

    init_process_group(rank=rank, world_size=num_ranks, master=master, device="cpu")
    groups = join_groups(layout.spec(""))
    return groups, (rank // layout.size, num_ranks // layout.size)


def train(engine: Any, updates: range, data_rank: int, data_size: int) -> list[float]:
    """Two micro-batches of each half of the rows per update; returns the norms."""
    from rlhf_models.batch import TokenBatch

    norms = []
    for update in updates:
        rng = np.random.default_rng(update)
        rows = [rng.integers(3, 300, 8) for _ in range(8)]
        own = rows[data_rank::data_size]
        for part in (0, 1):
            batch = TokenBatch.padded(own[part::2], 0)
            output = engine.forward(batch)
            engine.backward(-output.logprobs.sum() / 56, is_last=part == 1)
        norms.append(engine.step().grad_norm)
    return norms


def arrays(tensors: dict[str, torch.Tensor]) -> dict[str, np.ndarray]:
    return {name: tensor.detach().float().numpy().copy() for name, tensor in tensors.items()}


def trained(rank: int, num_ranks: int, master: Any, path: str, folder: str, layouts: dict[str, Layout]) -> Any:
    """Train, save, average, sleep; go on from the files of other layouts."""
    from rlhf_train.run.ema import WeightAverage
    from rlhf_train.run.rank_state import StateWriter

    groups, place = join(rank, num_ranks, master, next(iter(layouts.values())))
    results = {}
    for name, layout in layouts.items():
        home = Path(folder, f"{name}-{num_ranks}")
        home.mkdir(exist_ok=True)
        engine = new_engine(path, num_ranks, layout, groups)
        found: dict[str, Any] = {"norms": train(engine, range(2), *place), "has sums": bool(engine.gradient_sums)}
        average = WeightAverage(0.5, engine.local_weights())
        found["norms"] += train(engine, range(2, 3), *place)
        average.update(engine.local_weights())
        found["weights"] = arrays(engine.state_dict())
        engine.offload()
        found["sent"] = {key: weight.float().numpy().copy() for key, weight in engine.named_weights()}
        engine.reload()
        with average.in_place_of(engine.local_weights()):
            found["average"] = arrays(engine.state_dict())
        assert engine.state_dict(wanted=False) == {}
        writer = StateWriter(rank, num_ranks)
        writer.save({"actor": engine}, home, average)
        writer.finish()
        torch.distributed.barrier()
        found["norms"] += train(engine, range(3, 5), *place)
        found["after"] = arrays(engine.state_dict())
        results[name] = found
    return results


def resumed(rank: int, num_ranks: int, master: Any, path: str, folder: str, layout: Layout, files: list[str]) -> Any:
    """Go on from the state in each of the folders."""
    from rlhf_train.run.ema import WeightAverage
    from rlhf_train.run.rank_state import StateWriter

    groups, place = join(rank, num_ranks, master, layout)
    results = {}
    for name in files:
        engine = new_engine(path, num_ranks, layout, groups)
        average = WeightAverage(0.5, engine.local_weights())
        train(engine, range(1), *place)
        StateWriter(rank, num_ranks).load({"actor": engine}, Path(folder, name), average)
        with average.in_place_of(engine.local_weights()):
            kept = arrays(engine.state_dict())
        norms = train(engine, range(3, 5), *place)
        results[name] = {"average": kept, "norms": norms, "after": arrays(engine.state_dict())}
    return results


@dataclasses.dataclass(frozen=True)
class Runs:
    """What ranks found that divide weights or experts, and one rank that has them all."""

    model_path: str
    states: str
    whole: dict[str, Any]
    divided: dict[int, list[Any]]


def run_all(folder: Path, what: str) -> Runs:
    path = str(tiny_model_dir(folder / "model", vocab_size=320, hidden_size=32, **MODELS[what]))
    (folder / "states").mkdir()
    states = str(folder / "states")
    alone = {"float32": Layout(), "bfloat16": Layout(dtype="bfloat16")}
    whole = trained(0, 1, ("127.0.0.1", free_port()), path, states, alone)
    divided = {number: run_ranks(trained, number, path, states, LAYOUTS[what]) for number in (2, 4)}
    return Runs(path, states, whole, divided)


@pytest.fixture(scope="module")
def weights(tmp_path_factory) -> Runs:
    return run_all(tmp_path_factory.mktemp("weights"), "weights")


@pytest.fixture(scope="module")
def experts(tmp_path_factory) -> Runs:
    return run_all(tmp_path_factory.mktemp("experts"), "experts")


def assert_close(found: dict[str, np.ndarray], wanted: dict[str, np.ndarray], tolerance: float) -> None:
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        assert np.abs(found[name] - value).max() < tolerance, name


@pytest.mark.parametrize("num_ranks", [2, 4])
@pytest.mark.parametrize(("what", "name"), [(what, name) for what, layouts in LAYOUTS.items() for name in layouts])
def test_engine_that_divides_trains_sends_and_averages_as_one_that_has_all(request, what, name, num_ranks):
    runs = request.getfixturevalue(what)
    dtype = LAYOUTS[what][name].dtype
    tolerance, norm_tolerance = (2e-5, 1e-5) if dtype == "float32" else (1e-2, 2e-2)
    wanted, ranks = runs.whole[dtype], runs.divided[num_ranks]
    assert min(wanted["norms"]) > SPEC.max_norm  # every gradient is clipped
    for rank in ranks:
        found = rank[name]
        assert found["norms"] == pytest.approx(wanted["norms"], rel=norm_tolerance)
        assert found["norms"] == ranks[0][name]["norms"]
        for part in ("weights", "sent", "after"):
            assert_close(found[part], wanted[part], tolerance)
    assert_close(ranks[0][name]["average"], wanted["average"], tolerance)


def test_stage_2_does_as_stage_1_where_no_ranks_have_the_same_weights(weights):
    names = ("bfloat16", "bfloat16, ZeRO 2")
    assert [weights.divided[2][0][name]["has sums"] for name in names] == [True, True]
    assert [weights.divided[4][0][name]["has sums"] for name in names] == [True, False]


# -- files -------------------------------------------------------------------------------------------------------


def assert_goes_on(found: dict[str, Any], wanted: dict[str, Any], tolerance: float) -> None:
    assert found["norms"] == pytest.approx(wanted["norms"][3:], rel=1e-5 if tolerance < 1e-4 else 2e-2)
    assert_close(found["after"], wanted["after"], tolerance)
    assert_close(found["average"], wanted["average"], tolerance)


@pytest.mark.parametrize(
    ("num_ranks", "layout"),
    [(1, Layout()), (2, Layout(2, zero_stage=2)), (4, Layout(4, zero_stage=0)), (4, Layout(2)), (2, Layout(1))],
    ids=str,
)
def test_run_goes_on_from_files_of_any_division(weights, num_ranks, layout):
    files = ["ZeRO 0-2", "ZeRO 1-4", "ZeRO 2-4", "float32-1"]
    first = run_ranks(resumed, num_ranks, weights.model_path, weights.states, layout, files)[0]
    for name in files:
        assert_goes_on(first[name], weights.whole["float32"], 3e-5)


def test_run_in_bfloat16_goes_on_from_files_of_any_division(weights):
    files = ["bfloat16-4", "bfloat16, ZeRO 2-2", "bfloat16, offloaded-4", "bfloat16-1"]
    for layout in (Layout(2, dtype="bfloat16", offload=True), Layout(2, 2, dtype="bfloat16")):
        first = run_ranks(resumed, 2, weights.model_path, weights.states, layout, files)[0]
        for name in files:
            assert_goes_on(first[name], weights.whole["bfloat16"], 1e-2)
    # Where nothing differs, the run that goes on is the uninterrupted one to the last bit.
    own = weights.divided[2][0]["bfloat16, ZeRO 2"]
    assert_close(first["bfloat16, ZeRO 2-2"]["after"], own["after"], 1e-9)
    assert first["bfloat16, ZeRO 2-2"]["norms"] == own["norms"][3:]


def test_files_hold_each_weight_once_and_load_into_a_whole_model(weights):
    sizes = {}
    for name in ("ZeRO 0-4", "ZeRO 1-4", "ZeRO 2-2", "float32-1"):
        reader = ShardReader(sorted(Path(weights.states, name).glob("actor-*.safetensors")))
        model = load_actor(weights.model_path, dtype="float32")
        load_weights(model, reader)
        read = arrays(dict(model.named_parameters()))
        assert_close(read, {key: weights.whole["float32"]["weights"][key] for key in read}, 2e-5)
        kept = [key for key in reader._parts if not key.startswith(("random", "average"))]
        sizes[name] = sum(size for key in kept for _, size, _ in reader._parts[key])
    assert len(set(sizes.values())) == 1


def test_run_goes_on_from_files_of_any_division_of_experts(experts):
    place = experts.model_path, experts.states
    files = ["ZeRO 0-2", "ZeRO 2-4", "float32-1"]
    for num_ranks, layout in ((1, Layout()), (4, Layout(experts=4))):
        first = run_ranks(resumed, num_ranks, *place, layout, files)[0]
        for name in files:
            assert_goes_on(first[name], experts.whole["float32"], 3e-5)
    # Where nothing differs, the run that goes on is the uninterrupted one to the last bit.
    for name in ("ZeRO 2", "bfloat16"):
        found = run_ranks(resumed, 4, *place, LAYOUTS["experts"][name], [f"{name}-4"])[0][f"{name}-4"]
        own = experts.divided[4][0][name]
        assert_close(found["after"], own["after"], 1e-9)
        assert found["norms"] == own["norms"][3:]


def test_columns_in_parts_are_put_together_and_cut_anew(tmp_path):
    matrix = torch.arange(24.0).view(3, 8)
    for rank, part in enumerate(matrix.chunk(2, dim=1)):
        shards = Shards()
        shards.add("weight/rows", part[:1].flatten(), rank * 4)
        for kind in ("weight", "exp_avg"):
            shards.add(f"{kind}/columns", part.flatten()[:5], rank * 12)
            shards.add(f"{kind}/columns", part.flatten(), rank * 12)
        shards.numbers[COLUMN_PARTS] = {"columns": [2, 3, 8]}
        shards.write(tmp_path / f"{rank}.safetensors")
    reader = ShardReader(sorted(tmp_path.iterdir()))
    assert reader.read("weight/columns", 0, 24).tolist() == matrix.flatten().tolist()
    assert reader.read("exp_avg/columns", 7, 5).tolist() == [7, 8, 9, 10, 11]
    assert reader.read("weight/rows", 0, 8).tolist() == [0, 1, 2, 3, 4, 5, 6, 7]
    for count in (2, 4):
        reader.column_parts = {"columns": [count, 3, 8]}
        flat = torch.cat([part.flatten() for part in matrix.chunk(count, dim=1)])
        assert reader.read("weight/columns", 4, 11).tolist() == flat[4:15].tolist()
    with pytest.raises(CheckpointError, match="lacks elements 0 to 3 of weight/others"):
        reader.read("weight/others", 0, 4)
    with pytest.raises(CheckpointError, match="lacks elements 12 to 23 of weight/columns"):
        ShardReader([tmp_path / "0.safetensors"]).read("weight/columns", 0, 4)


def test_parts_of_a_weight_are_told_from_those_of_another():
    module = nn.Linear(4, 6)
    assert column_parts(module) == {}
    module.weight.part = WeightPart(1, 1, 2)
    module.bias.part = WeightPart(0, 1, 2)
    assert column_parts(module) == {"weight": [2, 6, 8]}
