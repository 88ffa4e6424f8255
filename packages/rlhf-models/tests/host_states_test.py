"""Tensors go to host memory and come back, with their values, their places and the views of them."""

import errno
import mmap
import os
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from rlhf_data.errors import EngineError
from rlhf_models import host_states
from rlhf_models.host_states import HostStates, RestingModel, awake, zeros_on_host


def test_tensors_come_back_to_their_places_as_often_as_they_leave():
    states = HostStates()
    moment, sums = torch.arange(6.0), torch.ones(4)
    view, address = moment[2:4], moment.data_ptr()
    for round_number in range(3):
        states.offload([moment], [sums])
        assert moment.tolist() == [value + round_number for value in range(6)]  # it can be read where it is
        assert moment.data_ptr() != address
        assert view.untyped_storage().nbytes() == sums.untyped_storage().nbytes() == 0  # the memory is free
        states.reload()
        moment += 1
        assert view.tolist() == [3.0 + round_number, 4.0 + round_number]
        assert sums.untyped_storage().nbytes() == 16  # its values are lost


def test_memory_of_a_file_holds_states_and_leaves_nothing_in_the_folder(tmp_path):
    folder = tmp_path / "deep" / "states"
    states = HostStates(folder=str(folder))
    moment = torch.arange(50_000.0)
    states.offload([moment])
    assert f"{folder}/" in Path("/proc/self/maps").read_text()
    assert list(folder.iterdir()) == []  # so that a process that is killed leaves nothing
    moment += 1
    assert torch.equal(moment, torch.arange(50_000.0) + 1)
    states.reload()
    assert torch.equal(moment, torch.arange(50_000.0) + 1)
    assert zeros_on_host([torch.empty(0)], pinned=False, folder=str(tmp_path / "unused"))[0].tolist() == []
    assert not (tmp_path / "unused").exists()


def test_folder_without_place_for_the_states_is_refused(tmp_path, monkeypatch):
    def full(descriptor, offset, size):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(EngineError) as caught:
        zeros_on_host([torch.empty(3 << 29, dtype=torch.int8, device="meta")], pinned=False, folder=str(tmp_path))
    assert str(caught.value).startswith(f"{tmp_path} has no place for 1.5 GiB of the optimizer's states: No space left")
    assert "hint: name a folder on a disk with more space in ``OptimizerSpec.offload_path``" in str(caught.value)
    monkeypatch.undo()
    (tmp_path / "file").touch()
    with pytest.raises(EngineError, match=r"has no place .*: (Not a directory|File exists)"):
        zeros_on_host([torch.ones(1)], pinned=False, folder=str(tmp_path / "file"))


def test_tensor_that_joins_later_goes_along():
    states = HostStates()
    first, second = torch.ones(2), torch.full((3,), 5.0)
    states.offload([first])
    states.reload()
    states.offload([first, second])
    states.reload()
    assert (first.tolist(), second.tolist()) == ([1.0, 1.0], [5.0, 5.0, 5.0])


def test_frozen_tensor_is_copied_to_host_memory_once():
    states = HostStates(is_frozen=True)
    weight = torch.ones(2)
    states.offload([weight])
    states.reload()
    weight.fill_(3.0)  # against the promise
    states.offload([weight])
    assert weight.tolist() == [1.0, 1.0]


def test_tensors_of_all_types_and_shapes_keep_their_values_in_one_piece_of_memory():
    states = HostStates()
    tensors = [
        torch.arange(5, dtype=torch.int8),
        torch.randn(3, 7),
        torch.randn(33).bfloat16(),
        torch.empty(0),
        torch.tensor(2.5, dtype=torch.float64),
        torch.arange(6.0).view(2, 3).t(),
    ]
    before = [tensor.clone() for tensor in tensors]
    states.offload(tensors)
    assert len({tensor.untyped_storage().data_ptr() for tensor in tensors}) == 1
    for tensor, want in zip(tensors, before, strict=True):
        assert torch.equal(tensor, want) and tensor.dtype == want.dtype
    states.reload()
    for tensor, want in zip(tensors, before, strict=True):
        assert torch.equal(tensor, want)
    assert zeros_on_host([], pinned=False) == []


def resting():
    """A layer whose weights rest in host memory, the layer's own result, and the bytes on the device by run."""
    layer = torch.nn.Linear(3, 2).requires_grad_(False)
    rows = torch.randn(4, 3)
    want = layer(rows)
    places = [weight.data for weight in layer.parameters()]
    seen = []

    def run(given):
        seen.append(sum(place.untyped_storage().nbytes() for place in places))
        return layer(given)

    return RestingModel(run, layer.parameters()), rows, want, places, seen


def test_model_that_rests_is_on_the_device_only_while_it_runs():
    model, rows, want, places, seen = resting()
    for _ in range(2):
        assert {place.untyped_storage().nbytes() for place in places} == {0}
        assert torch.equal(model(rows), want)
    assert seen == [8 * 4] * 2  # 6 weights and 2 biases
    assert {place.untyped_storage().nbytes() for place in places} == {0}


def test_model_that_rests_comes_once_for_several_passes_and_leaves_after_an_error():
    model, rows, want, places, seen = resting()
    with awake(model):
        first = [place.data_ptr() for place in places]
        for _ in range(3):
            assert torch.equal(model(rows), want)
            assert [place.data_ptr() for place in places] == first
    assert {place.untyped_storage().nbytes() for place in places} == {0}
    with pytest.raises(RuntimeError, match="shapes"), awake(model):
        model(rows[:, :1])
    assert {place.untyped_storage().nbytes() for place in places} == {0}
    with awake(model):
        places[0].fill_(9.0)  # against the promise: the weights are copied to host memory once
    assert torch.equal(model(rows), want)
    assert seen == [8 * 4] * 5


def test_model_that_never_rests_is_awake():
    layer = torch.nn.Linear(3, 2)
    for model in (layer, None):
        with awake(model):
            pass
    assert layer.weight.untyped_storage().nbytes() == 24


def runtime(status=0):
    """A CUDA that notes the bytes that it pins, by address."""
    pinned = {}
    register = lambda address, num_bytes, flags: pinned.setdefault(address, num_bytes) and status  # noqa: E731
    return SimpleNamespace(pinned=pinned, cudaHostRegister=register, cudaHostUnregister=pinned.pop)


def test_pinned_memory_is_one_piece_and_free_when_the_last_tensor_in_it_is_gone(monkeypatch):
    cuda = runtime()
    monkeypatch.setattr(torch.cuda, "cudart", lambda: cuda)
    first, second = zeros_on_host([torch.ones(3, dtype=torch.bfloat16), torch.ones(2, 500)], pinned=True)
    assert first.tolist() == [0.0] * 3 and second.shape == (2, 500) and not second.any()
    assert cuda.pinned == {first.data_ptr(): 256 + 4096}  # whole units of 256 bytes
    assert second.data_ptr() == first.data_ptr() + 256
    del first
    second += 1.0
    assert len(cuda.pinned) == 1
    del second
    assert not cuda.pinned
    assert zeros_on_host([], pinned=True) == []


def test_pinned_memory_stays_in_its_pages_when_the_process_forks(monkeypatch):
    monkeypatch.setattr(torch.cuda, "cudart", runtime)
    [memory] = zeros_on_host([torch.empty(1 << 20, device="meta")], pinned=True)

    def access():
        for line in Path("/proc/self/maps").read_text().splitlines():
            start, end = (int(address, 16) for address in line.split()[0].split("-"))
            if start <= memory.data_ptr() < end:
                return line.split()[1]
        return None

    assert access() == "rw-p"  # private: the system gives shared memory in small pages
    child = os.fork()
    if not child:
        os._exit(access() is not None)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    memory += 1
    assert bool((memory == 1).all())


@pytest.mark.parametrize(("num_cores", "before", "meanwhile"), [(4, 1, 4), (40, 1, 16), (4, 6, 6)])
def test_pinned_memory_is_got_by_all_cores_of_a_worker_with_one_thread(monkeypatch, num_cores, before, meanwhile):
    monkeypatch.setattr(torch.cuda, "cudart", runtime)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(num_cores)))
    monkeypatch.setattr(torch, "get_num_threads", lambda: before)
    done = []
    monkeypatch.setattr(torch, "set_num_threads", done.append)
    monkeypatch.setattr(torch.Tensor, "zero_", lambda _: done.append("write"))
    zeros_on_host([torch.ones(3)], pinned=True)
    assert done == [meanwhile, "write", before]


def test_pinned_memory_asks_for_large_pages_and_does_without(monkeypatch):
    monkeypatch.setattr(torch.cuda, "cudart", runtime)
    asked = []

    def madvise(_, option):
        asked.append(option)
        if option == mmap.MADV_HUGEPAGE:
            raise OSError(errno.EINVAL, "no large pages")

    monkeypatch.setattr(host_states._Pinned, "madvise", madvise, raising=False)
    assert zeros_on_host([torch.ones(3)], pinned=True)[0].tolist() == [0.0] * 3
    assert asked == [mmap.MADV_DONTFORK, mmap.MADV_HUGEPAGE]


def test_memory_that_cannot_be_pinned_is_an_error(monkeypatch):
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime(status=2))
    with pytest.raises(
        EngineError, match=r"^0\.1 GiB .* pinned: CUDA error 2(.|\n)*hint: use a machine with more memory"
    ):
        zeros_on_host([torch.empty(1 << 26, dtype=torch.int8, device="meta")], pinned=True)  # a sixteenth of a GiB
