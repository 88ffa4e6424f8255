"""Which optimizer states and frozen weights are on the device, and when its memory goes back to other processes."""

import pytest
import torch

from rlhf_train.engine import residence
from rlhf_train.engine.residence import Residence


class Engine:
    """Notes when its states leave the device and come back."""

    def __init__(self, role, events):
        self.offload = lambda: events.append(f"{role} away")
        self.reload = lambda: events.append(f"{role} back")


@pytest.fixture
def make(monkeypatch):
    """Return a function that makes a residence of two trained models and a frozen one; also its events and the latter.

    A release of memory is told as "release", or as "release, frozen away" while the frozen weights are in host memory.
    """

    def make(*, in_turn, device="cuda"):
        events = []
        frozen = torch.nn.Linear(2, 3)

        def release():
            places = {part.untyped_storage().data_ptr() for part in frozen.parameters()}
            # In host memory, all weights share one piece.
            events.append("release, frozen away" if len(places) == 1 else "release")

        monkeypatch.setattr(residence, "release_cache", release)
        engines = {role: Engine(role, events) for role in ("actor", "critic")}
        models = {"reference": frozen, "teacher": lambda: None}  # the second one is no module of this process
        made = Residence(engines, models, torch.device(device), in_turn)
        for role in engines:
            made.loaded(role)
        return made, events, frozen

    return make


def test_models_that_train_at_once_have_their_states_there_until_they_sleep(make):
    made, events, frozen = make(in_turn=False)
    weight = frozen.weight.clone()
    with made.in_turn("actor"):
        pass
    assert events == []
    for _ in range(2):  # the second time, nothing is left to move
        made.offload()
    assert events == ["actor away", "critic away", "release, frozen away", "release, frozen away"]
    events.clear()
    for _ in range(2):
        made.reload()
    assert sorted(events) == ["actor back", "critic back"]
    events.clear()
    residence.release_cache()
    assert events == ["release"] and frozen.weight.equal(weight)


def test_models_that_train_in_turn_have_their_states_there_in_their_own_updates_alone(make):
    made, events, _ = make(in_turn=True)
    assert events == ["actor away", "release", "critic away", "release"]
    events.clear()
    with made.in_turn("critic"):
        events.append("update")
    away = "release, frozen away"
    assert events == [away, "critic back", "update", "critic away", away]
    events.clear()
    made.reload_frozen()
    made.offload()
    made.reload()
    residence.release_cache()
    assert events == [away, "release"]


def test_frozen_weights_on_a_cpu_stay_in_their_files(make):
    made, events, _ = make(in_turn=False, device="cpu")
    made.offload()
    assert events == ["actor away", "critic away", "release"]
