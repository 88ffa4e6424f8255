"""The offline loop: what is seen how often, how portions add up, and what ranks agree on."""

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch

from rlhf_data.errors import ConfigError
from rlhf_train.engine.protocol import StepStats
from rlhf_train.offline.epochs import Objective, OfflineSchedule, evaluate, learn_once, this_ranks_part, train_offline
from rlhf_train.run.metrics import Mean, Sum
from trainer_testing import run_ranks


class FakeEngine:
    """One weight, trained by plain gradient descent with rate 1."""

    device = torch.device("cpu")

    def __init__(self) -> None:
        self.module = torch.nn.Linear(1, 1, bias=False)
        torch.nn.init.zeros_(self.module.weight)
        self.boundaries: list[bool] = []

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.module(*args, **kwargs)

    def backward(self, loss: torch.Tensor, *, is_last: bool) -> None:
        loss.backward()
        self.boundaries.append(is_last)

    def step(self) -> StepStats:
        weight = self.module.weight
        norm = float(weight.grad.norm())
        with torch.no_grad():
            weight -= weight.grad
        weight.grad = None
        return StepStats(norm, 1.0)


@dataclass(frozen=True)
class PullTo(Objective[float]):
    """Each example x pulls the weight w towards x: (w - x)^2 / 2, averaged over the examples."""

    def num_tokens(self, example: float) -> int:
        return 1

    def num_trained_tokens(self, example: float) -> int:
        return 1

    def loss(self, engine, examples, denominators):
        ones = torch.ones(len(examples), 1)
        errors = engine.forward(ones)[:, 0] - torch.tensor(examples)
        loss = (errors**2 / 2).sum() / denominators.num_tokens
        return loss, {"x": Mean(float(sum(examples)), len(examples)), "seen": Sum(float(len(examples)))}


def passes(micro: int, **changes: Any) -> OfflineSchedule:
    return OfflineSchedule(train_batch_size=99, micro_train_batch_size=micro, **changes)


@pytest.fixture(autouse=True)
def one_rank(monkeypatch):
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 1)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 0)


@pytest.mark.parametrize(("size", "epochs", "batch"), [(10, 1, 4), (10, 3, 4), (3, 2, 8), (8, 2, 4)])
def test_schedule_shows_every_example_exactly_max_epochs_times(size, epochs, batch):
    schedule = OfflineSchedule(train_batch_size=batch, micro_train_batch_size=1, max_epochs=epochs)
    batches = list(schedule.mini_batches(size))
    assert len(batches) == schedule.num_updates(size)
    assert np.bincount(np.concatenate(batches), minlength=size).tolist() == [epochs] * size
    assert all(len(members) == batch for members in batches[:-1])


def test_schedule_order_follows_the_seed():
    def order(seed):
        schedule = OfflineSchedule(train_batch_size=4, micro_train_batch_size=1, seed=seed)
        return np.concatenate(list(schedule.mini_batches(32))).tolist()

    assert order(1) == order(1)
    assert order(1) != order(2)


class Picture(float):
    """An example with an image of its name."""

    @property
    def images(self):
        return (str(float(self)),)


class AskedFor:
    """A reader of images that notes which it was asked to read ahead."""

    def __init__(self):
        self.names = []

    def read_ahead(self, names):
        self.names += names


class Noting(PullTo):
    """Notes what was asked for when each pass begins."""

    def loss(self, engine, examples, denominators):
        self.reader.seen.append((examples, list(self.reader.names)))
        return super().loss(engine, examples, denominators)


def test_images_are_asked_for_a_pass_ahead_and_those_of_the_next_update_before_the_step():
    reader = AskedFor()
    reader.seen = []
    engine = FakeEngine()
    plain_step = engine.step

    def step():
        reader.seen.append((None, list(reader.names)))
        return plain_step()

    engine.step = step
    objective = Noting(reader=reader)
    schedule = OfflineSchedule(train_batch_size=4, micro_train_batch_size=2)
    items = [*map(Picture, range(8))]
    train_offline(engine, objective, items, schedule, on_update=lambda *_: None)
    passes_seen = [part for part in reader.seen if part[0]]
    assert len(passes_seen) == 4
    evaluated = len(reader.seen)
    reader.names.clear()
    evaluate(engine, objective, items[:4], schedule)
    for run in (reader.seen[:evaluated], reader.seen[evaluated:]):
        for (_, names), (examples, _) in pairwise(run):
            assert {str(float(item)) for item in examples or ()} <= set(names)


def test_schedule_sizes_below_one_are_refused():
    with pytest.raises(ConfigError, match="``micro_train_batch_size`` is 0"):
        OfflineSchedule(train_batch_size=4, micro_train_batch_size=0)
    with pytest.raises(ConfigError, match="``micro_batch_tokens`` is 0"):
        OfflineSchedule(train_batch_size=4, micro_train_batch_size=1, micro_batch_tokens=0)


class Lengths(PullTo):
    """Examples that are as long as they say."""

    def num_tokens(self, example: float) -> int:
        return int(example)


def test_micro_batches_under_a_token_budget_are_full_and_equally_many_on_each_rank(monkeypatch):
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    lengths, seen, counts = [9.0, 1.0, 8.0, 2.0, 3.0, 3.0, 4.0], [], set()
    for rank in (0, 1):
        monkeypatch.setattr(torch.distributed, "get_rank", lambda rank=rank: rank)
        batches, denominators = this_ranks_part(Lengths(), lengths, passes(1, micro_batch_tokens=10))
        assert all(sum(batch.items) <= 10 for batch in batches)
        assert denominators.num_sequences == 7
        counts.add(len(batches))
        seen += [row for batch in batches for row in batch.rows]
    # 30 tokens in passes of 10: two on each rank, where one a sequence would be four on one of them.
    assert counts == {2}
    assert sorted(seen) == list(range(7))


@pytest.mark.parametrize("micro", [1, 2, 3, 5])
def test_learn_once_moves_the_weight_alike_for_every_micro_batch_size(micro):
    engine = FakeEngine()
    items = [1.0, 2.0, 3.0, 4.0, 5.0]
    metrics = learn_once(engine, PullTo(), items, this_ranks_part(PullTo(), items, passes(micro)))
    # The gradient at w = 0 is -mean(x) = -3; rate 1 makes w = 3.
    assert engine.module.weight.item() == pytest.approx(3.0)
    assert metrics["train/grad_norm"] == pytest.approx(3.0)
    assert (metrics["x"], metrics["seen"], metrics["samples/trained"]) == (3.0, 5.0, 5.0)
    assert engine.boundaries == [False] * (len(engine.boundaries) - 1) + [True]


def test_learn_once_lets_the_host_work_between_the_passes_and_the_step():
    engine, seen, items = FakeEngine(), [], [2.0, 4.0]

    def meanwhile():
        seen.append((list(engine.boundaries), engine.module.weight.item()))

    learn_once(engine, PullTo(), items, this_ranks_part(PullTo(), items, passes(1)), meanwhile=meanwhile)
    assert seen == [([False, True], 0.0)]
    assert engine.module.weight.item() == pytest.approx(3.0)


def test_evaluate_leaves_the_weight_alone_and_the_gradient_empty():
    engine = FakeEngine()
    assert evaluate(engine, PullTo(), [1.0, 2.0, 6.0], passes(2)) == {"x": 3.0, "seen": 3.0}
    assert engine.module.weight.item() == 0.0
    assert engine.module.weight.grad is None


def test_train_offline_reports_each_step_once():
    engine, seen = FakeEngine(), []
    schedule = OfflineSchedule(train_batch_size=2, micro_train_batch_size=1, max_epochs=2)
    train_offline(
        engine,
        PullTo(),
        [1.0, 1.0, 1.0],
        schedule,
        on_update=lambda update, total, _: seen.append((update, total)),
    )
    assert seen == [(1, 3), (2, 3), (3, 3)]  # 3 examples x 2 epochs / 2
    assert engine.module.weight.item() == pytest.approx(1.0)


def test_learn_once_on_three_ranks_equals_one_even_when_one_has_nothing_to_do():
    # Two examples on three ranks: the third runs one for nothing. mean(2, 4) = 3.
    results = run_ranks(_step_on_rank, 3)
    assert [weight for weight, _ in results] == pytest.approx([3.0] * 3)
    assert [metrics["x"] for _, metrics in results] == [3.0] * 3
    assert [metrics["seen"] for _, metrics in results] == [2.0] * 3


def _step_on_rank(rank: int, num_ranks: int, master: tuple[str, int]) -> tuple[float, dict[str, float]]:
    store = torch.distributed.TCPStore(master[0], master[1], num_ranks, rank == 0)
    torch.distributed.init_process_group("gloo", store=store, rank=rank, world_size=num_ranks)

    class Engine(FakeEngine):
        def step(self) -> StepStats:
            torch.distributed.all_reduce(self.module.weight.grad)
            return super().step()

    engine = Engine()
    items = [2.0, 4.0]
    metrics = learn_once(engine, PullTo(), items, this_ranks_part(PullTo(), items, passes(1)))
    torch.distributed.destroy_process_group()
    return engine.module.weight.item(), metrics
