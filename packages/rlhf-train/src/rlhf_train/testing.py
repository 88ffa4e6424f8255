"""What tests of the trainer share: made-up rollouts, and ranks in processes of their own."""

import multiprocessing
import queue
import socket
import traceback
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from rlhf_data.records import FinishReason, Rollout, Span, SpanSource, Verdict, VerdictKind

RANK_TIMEOUT_S = 300.0


def random_rollouts(
    count: int, *, vocab_size: int, seed: int = 0, max_prompt: int = 9, max_response: int = 12
) -> list[Rollout]:
    """Return rollouts of random tokens and lengths with random rewards, four to a group; every fifth has two turns with
    environment tokens in between, and one has a response of a single token."""
    rng = np.random.default_rng(seed)

    def tokens(low: int, high: int) -> np.ndarray:
        return rng.integers(0, vocab_size, rng.integers(low, high + 1))

    def policy(low: int = 1) -> Span:
        ids = tokens(low, max_response)
        return Span(SpanSource.POLICY, ids, rng.uniform(-4, -1, len(ids)), policy_version=0)

    rollouts = []
    for index in range(count):
        spans = [Span(SpanSource.PROMPT, tokens(1, max_prompt)), policy()]
        if index % 5 == 4:
            spans += [Span(SpanSource.ENVIRONMENT, tokens(1, 3)), policy()]
        if index == 1:
            spans[1] = Span(SpanSource.POLICY, tokens(1, 1), [-2.0], policy_version=0)
        reward = float(rng.normal())
        rollouts.append(
            Rollout(
                rollout_id=f"rollout{index}",
                group_id=f"group{index // 4}",
                spans=tuple(spans),
                finish_reason=FinishReason.STOP,
                verdict=Verdict(VerdictKind.OK if reward > 0 else VerdictKind.WRONG, reward),
            )
        )
    return rollouts


def run_ranks(function: Callable[..., Any], num_ranks: int, *arguments: Any) -> list[Any]:
    """Call `function(rank, num_ranks, (host, port), *arguments)` in `num_ranks` fresh processes; return their results.

    Raises:
        RuntimeError: a rank raised (its traceback is the message), died, or took longer than RANK_TIMEOUT_S.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        master = ("127.0.0.1", probe.getsockname()[1])
    context = multiprocessing.get_context("spawn")
    outbox = context.Queue()
    processes = [
        context.Process(target=_run_rank, args=(outbox, function, rank, num_ranks, master, arguments))
        for rank in range(num_ranks)
    ]
    for process in processes:
        process.start()
    results: dict[int, Any] = {}
    try:
        for _ in processes:
            rank, result, failure = outbox.get(timeout=RANK_TIMEOUT_S)
            if failure:
                raise RuntimeError(f"rank {rank} failed:\n{failure}")
            results[rank] = result
    except queue.Empty:
        raise RuntimeError(
            f"only ranks {sorted(results)} of {num_ranks} answered within {RANK_TIMEOUT_S:g} s"
        ) from None
    finally:
        for process in processes:
            process.join(timeout=5)
            process.kill()
    return [results[rank] for rank in range(num_ranks)]


def _run_rank(
    outbox: Any, function: Callable[..., Any], rank: int, num_ranks: int, master: Any, arguments: Sequence[Any]
) -> None:
    try:
        outbox.put((rank, function(rank, num_ranks, master, *arguments), None))
    except BaseException:
        outbox.put((rank, None, traceback.format_exc()))
