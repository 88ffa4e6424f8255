"""A trained model goes on from its files as if it had never stopped, also on other ranks and at other ZeRO stages."""

import itertools
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from rlhf_data.errors import CheckpointError
from rlhf_train.engine.shards import ShardReader, Shards
from rlhf_train.specs import OptimizerSpec
from small_net import same
from trainer_testing import run_ranks

# Muon trains the matrices of the layers, one more than there are ranks, and AdamW the rest.
SPEC = OptimizerSpec(
    learning_rate=0.05, weight_decay=0.1, muon_momentum=0.9, scheduler="linear", warmup_steps=2, total_steps=9
)
STAGES = (0, 1, 2, 3)
DTYPES = (torch.float32, torch.bfloat16)


class Net(nn.Module):
    """Odd sizes, so that no weight divides evenly over two ranks."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.layers = nn.ModuleList([nn.Linear(5, 7), nn.Linear(7, 3), nn.Linear(3, 7)])
        self.second = nn.Linear(7, 3, bias=False)
        self.frozen = nn.Parameter(torch.ones(3), requires_grad=False)
        self.to(dtype)

    def forward(self, rows):
        return self.second(torch.tanh(nn.Sequential(*self.layers)(rows))) * self.frozen


def new_engine(stage: int, dtype: torch.dtype):
    from rlhf_train.engine.deepspeed import DeepSpeedEngine

    return DeepSpeedEngine(Net(dtype), SPEC, zero_stage=stage, dtype=dtype, device="cpu")


def train(engine, rank: int, updates) -> list[float]:
    norms = []
    for update in updates:
        rows = torch.randn(8, 5, generator=torch.Generator().manual_seed(100 * update + rank))
        engine.backward(engine.forward(rows.to(engine.module.second.weight.dtype)).float().square().sum(), is_last=True)
        norms.append(engine.step().grad_norm)
    return norms


def weights(engine) -> dict[str, torch.Tensor]:
    return {name: weight.float() for name, weight in engine.state_dict().items()}


def files(folder: Path, stage: int, dtype: torch.dtype) -> list[Path]:
    return sorted(folder.glob(f"{stage}-{dtype}-*.safetensors"))


def train_save_and_go_on(rank: int, num_ranks: int, master, folder: str) -> list[str]:
    """Per stage and dtype: four updates; two, files, an engine of its own, two more; and two after rests.

    Returns what differs.
    """
    from rlhf_train.engine.process_group import init_process_group

    init_process_group(rank=rank, world_size=num_ranks, master=master, device="cpu")
    wrong = []
    for stage, dtype in itertools.product(STAGES, DTYPES):
        straight = new_engine(stage, dtype)
        norms = train(straight, rank, range(4))
        first = new_engine(stage, dtype)
        shards, away = Shards(), Shards()
        for update in range(2):
            train(first, rank, [update])
            first.save_shards(shards)
            before = weights(first)
            first.offload()
            first.save_shards(away)  # from host memory
            if not same(shards.tensors, away.tensors) or not same(before, weights(first)):
                wrong.append(f"rank {rank}, stage {stage}, {dtype}: states that are away")
            first.reload()
        if shards.tensors:
            shards.write(Path(folder, f"{stage}-{dtype}-{rank}.safetensors"))
        torch.distributed.barrier()
        resumed = new_engine(stage, dtype)
        train(resumed, rank, range(7, 8))  # everything of this update must be gone
        resumed.load_shards(ShardReader(files(Path(folder), stage, dtype)))
        if train(resumed, rank, range(2, 4)) != norms[2:]:
            wrong.append(f"rank {rank}, stage {stage}, {dtype}: norms")
        if train(first, rank, range(2, 4)) != norms[2:]:
            wrong.append(f"rank {rank}, stage {stage}, {dtype}: norms after rests")
        for name, engine in (("resumed", resumed), ("rested", first)):
            if not same(weights(straight), weights(engine)):
                wrong.append(f"rank {rank}, stage {stage}, {dtype}: {name} weights")
    return wrong


def go_on_elsewhere(rank: int, num_ranks: int, master, folder: str) -> list[str]:
    """Read the files of each stage into itself and into the next one, on another number of ranks; two more updates."""
    from rlhf_train.engine.process_group import init_process_group

    init_process_group(rank=rank, world_size=num_ranks, master=master, device="cpu")
    wrong = []
    for dtype in DTYPES:
        results = {}
        for saved, stage in sorted({(one, other) for one in STAGES for other in (0, one, (one + 1) % 4)}):
            engine = new_engine(stage, dtype)
            engine.load_shards(ShardReader(files(Path(folder), saved, dtype)))
            if engine._num_steps != 2:
                wrong.append(f"{saved} to {stage}, {dtype}: {engine._num_steps} updates")
            before = weights(engine)
            train(engine, rank, range(2, 4))
            results[saved, stage] = before, weights(engine)
        for (saved, stage), (before, after) in results.items():
            # What was saved at one stage is read equally at all; updates then differ by rounding.
            for name, one in results[saved, 0][0].items():
                if not torch.equal(one, before[name]):
                    wrong.append(f"{saved} to {stage}, {dtype}: {name} as read")
            for name, one in results[0, 0][1].items():
                if not torch.allclose(one, after[name], rtol=0, atol=1e-5 if dtype == torch.float32 else 0.02):
                    wrong.append(f"{saved} to {stage}, {dtype}: {name} after two updates")
    return wrong


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_engine_goes_on_bit_for_bit_and_its_files_fit_other_ranks_and_stages(tmp_path, num_ranks):
    assert [*itertools.chain(*run_ranks(train_save_and_go_on, num_ranks, str(tmp_path)))] == []
    with_all_ranks = {len(files(tmp_path, stage, torch.float32)) for stage in STAGES[1:]}
    assert with_all_ranks == {num_ranks}
    assert [*itertools.chain(*run_ranks(go_on_elsewhere, 3 - num_ranks, str(tmp_path)))] == []


def load_into_other_models(rank: int, num_ranks: int, master, folder: str) -> dict[str, str]:
    """Per stage and change of the model: what loading the files of the unchanged one says."""
    from rlhf_train.engine.deepspeed import DeepSpeedEngine
    from rlhf_train.engine.process_group import init_process_group

    init_process_group(rank=rank, world_size=num_ranks, master=master, device="cpu")
    said = {}
    for stage in STAGES:
        shards = Shards()
        new_engine(stage, torch.float32).save_shards(shards)
        shards.write(Path(folder, f"{stage}-{torch.float32}-{rank}.safetensors"))
        torch.distributed.barrier()
        for change in ("narrower", "wider", "fewer"):
            net = Net(torch.float32)
            if change == "fewer":
                net.layers = net.layers[:1]
            else:
                net.layers[0] = nn.Linear(5, 6 if change == "narrower" else 8)
            engine = DeepSpeedEngine(net, SPEC, zero_stage=stage, dtype=torch.float32, device="cpu")
            try:
                engine.load_shards(ShardReader(files(Path(folder), stage, torch.float32)))
                said[f"{stage} {change}"] = "nothing"
            except CheckpointError as error:
                said[f"{stage} {change}"] = str(error)
    return said


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_files_of_another_model_are_refused(tmp_path, num_ranks):
    for said in run_ranks(load_into_other_models, num_ranks, str(tmp_path)):
        assert len(said) == 3 * len(STAGES)
        for case, text in said.items():
            name, found, wanted = {
                "narrower": ("layers.0.bias", 7, 6), "wider": ("layers.0.bias", 7, 8), "fewer": ("layers.1.bias", 3, 0),
            }[case.partition(" ")[2]]  # fmt: skip
            assert f"the checkpoint has {found} elements of {name}, and the model {wanted}" in text, case
            assert "hint: it belongs to another model" in text, case


def two_files(folder: Path) -> list[Path]:
    """Ten numbers, the first four in one file and the others in another."""
    paths = [folder / "0.safetensors", folder / "1.safetensors"]
    for path, low, high in zip(paths, (0, 4), (4, 10), strict=True):
        shards = Shards()
        shards.add("weight/w", torch.arange(low, high).float(), low)
        shards.numbers["num_updates"] = 3
        shards.write(path)
    return paths


def test_reader_puts_parts_together(tmp_path):
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    reader = ShardReader(two_files(folder))
    for start in range(10):
        for size in range(1, 11 - start):
            assert reader.read("weight/w", start, size).tolist() == list(range(start, start + size))
    assert "weight/w" in reader
    (folder / "new").touch()
    assert {path.stat().st_mode for path in folder.iterdir()} == {(folder / "new").stat().st_mode}
    assert "exp_avg/w" not in reader
    assert reader.numbers == {"num_updates": 3}


def test_numbers_by_weight_come_from_the_ranks_that_keep_the_weights(tmp_path):
    """Without ZeRO, all ranks but the first have no weight and write their random numbers only."""
    for rank, kept in enumerate(({"a": 3}, {"b": 2}, None)):
        shards = Shards()
        shards.add("random/cpu", torch.zeros(2, dtype=torch.uint8))
        shards.numbers["num_updates"] = 3
        if kept is not None:
            shards.numbers["updates_by_weight"] = kept
        shards.write(tmp_path / f"{rank}.safetensors")
    reader = ShardReader(sorted(tmp_path.iterdir()))
    assert reader.numbers == {"num_updates": 3, "updates_by_weight": {"a": 3, "b": 2}}


@pytest.mark.parametrize(
    ("kept", "name", "start", "size", "message"),
    [
        ((0,), "weight/w", 2, 4, "lacks elements 4 to 5 of weight/w"),
        ((1,), "weight/w", 2, 4, "lacks elements 2 to 5"),
        ((0, 1), "weight/w", 8, 3, "lacks elements 10 to 10"),
        ((0, 1), "weight/v", 0, 1, "lacks elements 0 to 0 of weight/v"),
    ],
)
def test_reader_names_what_is_missing(tmp_path, kept, name, start, size, message):
    paths = two_files(tmp_path)
    with pytest.raises(CheckpointError, match=message):
        ShardReader([paths[index] for index in kept]).read(name, start, size)


def test_files_that_cannot_be_read_are_named(tmp_path):
    with pytest.raises(CheckpointError, match="no files"):
        ShardReader([])
    [path, _] = two_files(tmp_path)
    path.write_bytes(path.read_bytes()[:-8])
    with pytest.raises(
        CheckpointError, match=r"0\.safetensors cannot be read(.|\n)*hint: remove the folder of this checkpoint"
    ):
        ShardReader([path])
    save_file({"weight/w": torch.zeros(2)}, path)  # without our metadata
    with pytest.raises(CheckpointError, match="cannot be read"):
        ShardReader([path])
