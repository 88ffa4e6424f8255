"""How long ranks wait for each other: long for one that works, and not at all for one that has died."""

import os
import time
from datetime import timedelta
from typing import Any

import torch
from torch.distributed import distributed_c10d

from rlhf_rollout.host import free_port
from rlhf_train.engine.process_group import RANK_TIMEOUT, _open_store, init_process_group
from rlhf_train.specs import OptimizerSpec
from trainer_testing import run_ranks


def limits_of_all_groups(rank: int, num_ranks: int, master: Any) -> dict[str, Any]:
    """Form every kind of group, ours and DeepSpeed's; return how many there are, and the limits that they have."""
    from rlhf_train.engine.deepspeed import DeepSpeedEngine
    from rlhf_train.engine.process_group import join_sequence_group
    from rlhf_train.engine.tensor_parallel import join_tensor_group

    init_process_group(rank=rank, world_size=num_ranks, master=master, device="cpu")
    counts = [len(distributed_c10d._world.pg_map)]

    def engine() -> DeepSpeedEngine:
        optimizer = OptimizerSpec(learning_rate=0.1)
        options = {"dtype": torch.float32, "device": "cpu", "zpg": num_ranks}
        return DeepSpeedEngine(torch.nn.Linear(2, 2), optimizer, zero_stage=3, **options)

    for form in (lambda: join_sequence_group(num_ranks), lambda: join_tensor_group(num_ranks), engine):
        form()
        counts.append(len(distributed_c10d._world.pg_map))
    groups = distributed_c10d._world.pg_map
    return {
        "counts": counts,
        "limits": {group._get_backend(torch.device("cpu")).options._timeout for group in groups},
        "nccl": distributed_c10d._get_default_timeout("nccl"),
    }


def limit_under_a_launcher(rank: int, num_ranks: int, master: Any) -> timedelta:
    """Meet where a launcher such as torchrun listens, and let DeepSpeed form the group."""
    store = torch.distributed.TCPStore(*master, None, True, wait_for_workers=False)
    os.environ |= {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "0"}
    init_process_group(rank=rank, world_size=num_ranks, master=master, device="cpu")
    [group] = distributed_c10d._world.pg_map
    assert store.num_keys() > 0
    return group._get_backend(torch.device("cpu")).options._timeout


def seconds_until_a_death_is_noticed(rank: int, num_ranks: int, master: Any) -> float:
    """End on all ranks but the first, which waits for them in a collective; return how long."""
    init_process_group(rank=rank, world_size=num_ranks, master=master, device="cpu")
    total = torch.ones(1)
    torch.distributed.all_reduce(total)
    if rank:
        return 0.0
    started = time.monotonic()
    try:
        torch.distributed.all_reduce(total)
    except RuntimeError:
        return time.monotonic() - started
    raise AssertionError("the collective ended without the other ranks")


def test_all_groups_wait_two_hours_for_a_rank():
    for found in run_ranks(limits_of_all_groups, 2):
        assert sorted(set(found["counts"])) == found["counts"]  # each step forms groups
        assert found["limits"] == {timedelta(hours=2)} == {RANK_TIMEOUT}
        assert found["nccl"] == RANK_TIMEOUT


def test_group_that_deepspeed_forms_waits_as_long():
    assert run_ranks(limit_under_a_launcher, 1) == [RANK_TIMEOUT]


def test_ranks_wait_as_long_where_they_meet():
    assert _open_store(0, 2, ("127.0.0.1", free_port())).timeout == RANK_TIMEOUT


def test_rank_that_ends_is_noticed_at_once():
    assert run_ranks(seconds_until_a_death_is_noticed, 2)[0] < 120
