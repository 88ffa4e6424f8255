"""Tensors go to host memory and come back, with their values, their places and the views of them."""

import torch

from rlhf_train.engine.host_states import HostStates


def test_tensors_come_back_to_their_places_as_often_as_they_leave():
    states = HostStates()
    moment, sums = torch.arange(6.0), torch.zeros(4)
    view, address = moment[2:4], moment.data_ptr()
    for round_number in range(3):
        states.offload([moment], [sums])
        assert moment.tolist() == [value + round_number for value in range(6)]  # it can be read where it is
        assert moment.data_ptr() != address
        assert view.untyped_storage().nbytes() == sums.untyped_storage().nbytes() == 0  # the memory is free
        states.reload()
        moment += 1
        assert view.tolist() == [3.0 + round_number, 4.0 + round_number]
        assert sums.tolist() == [0.0] * 4
        sums += 7.0  # what is in cleared tensors is lost
        assert sums.untyped_storage().nbytes() == 16


def test_tensor_that_joins_later_goes_along():
    states = HostStates()
    first, second = torch.ones(2), torch.full((3,), 5.0)
    states.offload([first], [])
    states.reload()
    states.offload([first, second], [])
    states.reload()
    assert (first.tolist(), second.tolist()) == ([1.0, 1.0], [5.0, 5.0, 5.0])
