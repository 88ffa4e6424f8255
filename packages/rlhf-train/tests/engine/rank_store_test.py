"""Where the ranks of a set meet: on one address, and nowhere for a rank alone."""

import socket
import sys

import psutil
import pytest
import torch

from listening import LOOPBACK, listening
from rlhf_data.errors import EngineError
from rlhf_rollout.host import free_port
from rlhf_train.engine.deepspeed import DeepSpeedEngine
from rlhf_train.engine.process_group import _open_store, init_process_group
from rlhf_train.specs import OptimizerSpec
from trainer_testing import run_ranks

SLOW = {"mlflow", "torch._inductor.compile_fx"}


def meet(rank, num_ranks, master):
    """Add the ranks up, so that they are connected.

    Returns the sum, the addresses that are listened on, and what DeepSpeed imported of `SLOW`.
    """
    init_process_group(rank=rank, world_size=num_ranks, master=master, device="cpu")
    optimizer = OptimizerSpec(learning_rate=0.1)
    DeepSpeedEngine(torch.nn.Linear(2, 2), optimizer, zero_stage=2, dtype=torch.float32, device="cpu")
    total = torch.tensor(float(rank + 1))
    torch.distributed.all_reduce(total)
    return total.item(), listening([psutil.Process()]), SLOW & sys.modules.keys()


def test_ranks_of_one_machine_listen_on_the_loopback_address_only():
    met = run_ranks(meet, 2)
    assert [total for total, _, _ in met] == [3.0, 3.0]
    heard = [addresses for _, addresses, _ in met]
    assert heard[0] and set.union(*heard) <= LOOPBACK
    # Each takes more than a second to import, and a name in `sys.modules` without a module would hide it from the user.
    assert [imported for _, _, imported in met] == [set(), set()]


def test_store_answers_at_its_address_and_at_no_other():
    port = free_port()
    store = _open_store(0, 2, ("127.0.0.3", port))
    with socket.create_connection(("127.0.0.3", port), timeout=10):
        pass
    for other in ("127.0.0.1", "127.0.0.4"):
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection((other, port), timeout=10)
    store.set("key", "value")
    assert _open_store(1, 2, ("127.0.0.3", port)).get("key") == b"value"


def test_rank_alone_opens_no_port():
    assert isinstance(_open_store(0, 1, ("203.0.113.1", 1)), torch.distributed.HashStore)


@pytest.mark.parametrize("host", ["203.0.113.1", "no-such-host.invalid"])
def test_address_of_another_machine_is_refused_with_a_hint(host):
    with pytest.raises(EngineError, match=rf"(?s)rank 0 cannot listen on {host}:29500: .*hint: .*MASTER_ADDR"):
        _open_store(0, 2, (host, 29500))
