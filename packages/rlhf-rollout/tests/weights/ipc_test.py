"""The parts of CUDA IPC that need no GPU: which of a sender's exports an engine opens, and as which device."""

from types import SimpleNamespace

import pytest
import torch

from rlhf_data.errors import EngineError, WeightSyncError
from rlhf_rollout.weights import ipc

# As torch exports a tensor: six arguments, the index of the sender's device, and two more.
EXPORTS = [(f"GPU-{uuid}", (*range(10, 16), 5, uuid, "more")) for uuid in "abc"]


@pytest.fixture(autouse=True)
def gpus(monkeypatch):
    """Two GPUs with their UUIDs, of which the second is the current one."""
    uuids = {0: "GPU-a", 1: "GPU-b", 2: "GPU-z"}
    uuid_of = {**uuids, **{torch.device("cuda", index): uuid for index, uuid in uuids.items()}}.get
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda gpu: SimpleNamespace(uuid=uuid_of(gpu)))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    monkeypatch.setattr(ipc, "rebuild_cuda_tensor", lambda *arguments: arguments)


@pytest.mark.parametrize(("device", "index", "uuid"), [("cuda:0", 0, "a"), ("cuda:1", 1, "b"), ("cuda", 1, "b")])
def test_worker_opens_the_export_of_its_own_gpu_by_its_own_index(device, index, uuid):
    opened = ipc.Buffer.open_memory(EXPORTS, torch.device(device))
    assert opened == (*range(10, 16), index, uuid, "more")


def test_worker_on_another_gpu_than_all_senders_is_told_both_and_the_other_medium():
    with pytest.raises(WeightSyncError, match=r"on GPU GPU-a, GPU-b, GPU-c, but .* on GPU GPU-z\n\nhint: .*shared_mem"):
        ipc.Buffer.open_memory(EXPORTS, torch.device("cuda:2"))


def test_memory_that_cuda_cannot_open_is_an_error_of_this_engine(monkeypatch):
    def refuse(*arguments):
        raise RuntimeError("invalid resource handle")

    monkeypatch.setattr(ipc, "rebuild_cuda_tensor", refuse)
    with pytest.raises(EngineError, match="cannot open the buffer of weights: invalid resource handle"):
        ipc.Buffer.open_memory(EXPORTS, torch.device("cuda:0"))


@pytest.fixture
def calls(monkeypatch):
    """What is asked of CUDA, while buffers lie in the memory of the CPU."""
    made = []
    stand_in = SimpleNamespace(
        cuda=SimpleNamespace(
            current_device=lambda: 1,
            get_device_properties=torch.cuda.get_device_properties,
            current_stream=lambda device: SimpleNamespace(synchronize=lambda: made.append(f"wait for {device}")),
            ipc_collect=lambda: made.append("collect"),
        ),
        device=torch.device,
        uint8=torch.uint8,
    )

    def empty(size, *, dtype, device):
        made.append(f"{size} {dtype} on {device}")
        return torch.zeros(size, dtype=dtype)

    stand_in.empty = empty
    monkeypatch.setattr(ipc, "torch", stand_in)
    return made


def test_each_engine_has_an_export_of_its_own_which_is_written_before_it_is_read(calls, monkeypatch):
    numbers = iter(range(9))
    monkeypatch.setattr(ipc, "reduce_tensor", lambda data: (None, (data.numel(), next(numbers))))
    buffer = ipc.Buffer(7, ["one", "other"])
    assert buffer.handles == [(("GPU-b", (7, 0)),), (("GPU-b", (7, 1)),)]
    buffer.publish()
    buffer.close()
    assert calls == ["7 torch.uint8 on cuda:1", "wait for cpu", "collect"]
    assert (buffer.handles, buffer.data.numel()) == ([], 0)
    assert ipc.Buffer.is_mapped  # so that a source may keep it for later updates


def test_memory_that_cuda_cannot_export_names_the_setting_that_may_be_why(calls, monkeypatch):
    def refuse(data):
        raise RuntimeError("not supported")

    monkeypatch.setattr(ipc, "reduce_tensor", refuse)
    with pytest.raises(WeightSyncError, match="export the weight buffer: not supported\n\nhint: unset expandable_seg"):
        ipc.Buffer(7, ["one"])
