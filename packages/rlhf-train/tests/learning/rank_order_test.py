"""Weights are sent on one thread while another one trains: all ranks take the calls in the same order."""

import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

from rlhf_train.learning.rank_actor import RankActor
from rlhf_train.learning.ranks import RankSet
from rlhf_train.learning.worker import TrainWorker


def test_call_reaches_all_ranks_before_the_call_of_another_thread_reaches_any():
    taken: list[list[str]] = [[], []]
    has_begun, is_between = threading.Event(), threading.Event()

    def train(rank: int) -> None:
        if rank == 1:
            has_begun.set()
            is_between.wait(0.5)  # in vain, because the other call has to wait
        taken[rank].append("train")

    def send(rank: int) -> None:
        taken[rank].append("send")
        if rank == 1:
            is_between.set()

    handles = [
        SimpleNamespace(
            work=SimpleNamespace(remote=lambda name, rank=rank: train(rank)),
            send_weights=SimpleNamespace(remote=lambda rank=rank: send(rank)),
        )
        for rank in range(2)
    ]
    ranks = RankSet(("actor",), handles)
    with ThreadPoolExecutor(1) as pool:
        training = pool.submit(ranks.start, TrainWorker.reload)
        assert has_begun.wait(60)
        ranks.start_each(RankActor.send_weights, [(), ()])
        training.result(60)
    assert taken == [["train", "send"]] * 2
