"""A second copy of the weights on neighbouring ranks (`ModelSpec.zpg`): passes gather from it, never an old value, and
nothing else changes."""

from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils._pytree import tree_map_only

from rlhf_data.errors import ConfigError
from rlhf_train.engine.shards import ShardReader, Shards
from rlhf_train.specs import ModelSpec, OptimizerSpec
from trainer_testing import run_ranks

SPEC = OptimizerSpec(learning_rate=0.05, eps=1e-4, scheduler="constant", max_norm=1.0)
# Matrices of more than 100 000 weights: DeepSpeed leaves smaller ones gathered between passes.
WIDE, NARROW = 401, 257


class Net(nn.Module):
    """Of odd sizes, so that no weight divides evenly over ranks; the last layer is frozen."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.first, self.second = nn.Linear(NARROW, WIDE), nn.Linear(WIDE, NARROW)
        self.last = nn.Linear(NARROW, WIDE).requires_grad_(False)
        self.to(dtype)

    def forward(self, rows):
        return self.last(torch.tanh(self.second(torch.tanh(self.first(rows)))))


def rows_of(update: int, rank: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(4, NARROW, generator=torch.Generator().manual_seed(100 * update + rank)).to(dtype)


def train(engine: Any, rank: int, updates: range, dtype: torch.dtype) -> list[float]:
    norms = []
    for update in updates:
        for number, half in enumerate(rows_of(update, rank, dtype).split(2)):
            engine.backward(engine.forward(half).float().square().mean(), is_last=number == 1)
        norms.append(engine.step().grad_norm)
    return norms


def num_copies(engine: Any) -> int:
    return sum(weight.ds_secondary_tensor is not None for weight in engine.module.parameters())


def trained(rank: int, num_ranks: int, folder: str, dtype: torch.dtype, zpg: int) -> dict[str, Any]:
    """Train, sync, save, go on in another engine, and write to the shards as a moving average does."""
    from rlhf_train.engine.deepspeed import DeepSpeedEngine, place_frozen
    from rlhf_train.engine.deepspeed_internals import frozen_parts

    def new_engine() -> Any:
        return DeepSpeedEngine(Net(dtype), SPEC, zero_stage=3, dtype=dtype, device="cpu", zpg=zpg)

    found = {}
    engine = new_engine()
    found["norms"] = train(engine, rank, range(2), dtype)
    found["copies"] = num_copies(engine)  # of frozen weights: an update drops the others
    engine.offload()
    found["copies at rest"] = num_copies(engine)
    engine.reload()
    found["weights"] = engine.state_dict()
    found["output"] = engine.forward(rows_of(9, rank, dtype)).detach()
    shards = Shards()
    engine.save_shards(shards)
    path = Path(folder, f"{zpg}-{rank}.safetensors")
    shards.write(path)
    torch.distributed.barrier()
    resumed = new_engine()
    train(resumed, rank, range(5, 6), dtype)
    resumed.load_shards(ShardReader([f"{folder}/{zpg}-{other}.safetensors" for other in range(num_ranks)]))
    found["resumed output"] = resumed.forward(rows_of(9, rank, dtype)).detach()
    found["norms"] += train(resumed, rank, range(2, 4), dtype)
    kept = {name: part.clone() for name, part in engine.local_weights()}
    for _, part in engine.local_weights():
        part.mul_(0.5)
    found["halved"] = engine.state_dict()
    found["halved output"] = engine.forward(rows_of(9, rank, dtype)).detach()
    for name, part in engine.local_weights():
        part.copy_(kept[name])
    found["restored output"] = engine.forward(rows_of(9, rank, dtype)).detach()
    frozen = place_frozen(
        Net(dtype).requires_grad_(False),
        ModelSpec(path="", dtype=str(dtype).removeprefix("torch."), zero_stage=3, zpg=zpg),
        torch.device("cpu"),
    )
    found["frozen output"] = torch.stack([frozen(rows_of(9, rank, dtype)) for _ in range(2)])
    found["share kept"] = sum(part.numel() for part in frozen_parts(frozen)) / sum(
        weight.ds_numel for weight in frozen.parameters()
    )
    return found


def all_settings(rank: int, num_ranks: int, master: Any, folder: str) -> dict[Any, dict[str, Any]]:
    """Train with each size that divides the ranks; add how many ranks took part in each gathering of a pass."""
    from deepspeed.runtime.zero import partition_parameters

    from rlhf_train.engine.process_group import init_process_group

    init_process_group(rank=rank, world_size=num_ranks, master=master, device="cpu")
    gather, results = partition_parameters._dist_allgather_fn, {}
    for dtype in (torch.float32, torch.bfloat16):
        results[dtype, 1] = trained(rank, num_ranks, folder, dtype, 1)
    # The groups of a process are made once.
    for dtype in (torch.float32, torch.bfloat16):
        sizes: Counter[int] = Counter()

        def counted(*tensors: Any, sizes: Counter[int] = sizes, **options: Any) -> Any:
            sizes[torch.distributed.get_world_size(tensors[2])] += 1
            return gather(*tensors, **options)

        partition_parameters._dist_allgather_fn = counted
        results[dtype, 2] = trained(rank, num_ranks, folder, dtype, 2) | {"sizes": sizes}
    # Tensors would go through memory that ends with this process.
    to_numpy = partial(tree_map_only, torch.Tensor, lambda tensor: tensor.detach().float().numpy())
    return to_numpy(results)


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_copies_on_neighbours_change_nothing_but_who_gathers(tmp_path, num_ranks):
    for results in run_ranks(all_settings, num_ranks, str(tmp_path)):
        for dtype in (torch.float32, torch.bfloat16):
            plain, copied = results[dtype, 1], results[dtype, 2]
            sizes = copied.pop("sizes")
            assert sizes[2] > 0 and (num_ranks == 2 or 0 < sizes[4] < sizes[2])
            assert plain.pop("share kept") == pytest.approx(1 / num_ranks, rel=0.01)
            assert copied.pop("share kept") == pytest.approx(1 / num_ranks + 1 / 2, rel=0.01)
            assert (plain.pop("copies"), copied.pop("copies"), copied["copies at rest"]) == (0, 2, 0)
            assert np.array_equal(copied["output"], copied["resumed output"])
            assert np.array_equal(copied["output"], copied["restored output"])
            assert not np.array_equal(copied["output"], copied["halved output"])
            np.testing.assert_equal(copied, plain)


@pytest.mark.parametrize(
    ("zero_stage", "zpg", "num_ranks", "message"),
    [
        (2, 2, 2, "``zero_stage`` is 2\n\nhint: add ``zero_stage=3``, or drop ``zpg``"),
        (3, 3, 4, "which is 4\n\nhint: use one of 1, 2, 4, or another number of processes"),
        (3, 2, 1, "which is 1\n\nhint: use one of 1, or another"),
        (3, 4, 2, "which is 2\n\nhint: use one of 1, 2, or another"),
    ],
)
def test_copies_that_cannot_be_are_refused(zero_stage, zpg, num_ranks, message):
    with pytest.raises(ConfigError) as caught:
        ModelSpec(path="", zero_stage=zero_stage, zpg=zpg).check_ranks(num_ranks)
    assert message in str(caught.value)
