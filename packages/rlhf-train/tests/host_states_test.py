"""Tensors go to host memory and come back, with their values, their places and the views of them."""

import torch

from rlhf_train.engine.host_states import HostStates


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
