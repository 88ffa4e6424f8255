"""Writing rollouts: tokens per second of processor time, and bytes per token, as JSON lines and in columns.

    python tools/bench/run.py records --out records.json

Groups of 8 responses are made up: token ids have the frequencies of words (Zipf), log-probs are gamma-distributed
float32 numbers, and the text has a word for four of five tokens. `columns` and `jsonl` are the formats of `rlhf ppo
--record_format`; `checkpoint` is the state of a run whose groups all wait to be trained on.

The second part saves checkpoints whose state has `--waiting_mb` of tokens, 8 bytes each with their log-probs. In
`waiting` they are in the same groups again and again, with texts; in `unfinished` in answers of `--unfinished_tokens`
that are still written. Seconds are those until the checkpoint is in force: written, flushed to the disk and read again
for its checksums; `cpu_s` is the processor time in them. Memory is what the process needs meanwhile above what it had.
"""

import itertools
import threading
import time
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from rlhf_data.records import Episode, FinishReason, Prompt, Rollout, RolloutGroup, Span, SpanSource
from rlhf_rollout.protocols import SamplingParams
from rlhf_rollout.records_io import RolloutWriter
from rlhf_rollout.unfinished import UnfinishedGroups
from rlhf_train.run.checkpoint import Checkpoints
from rlhf_train.run.saved.state import write_state
from runner import memory_mib

FLAGS = {
    "groups": 250,
    "response_tokens": 1024,
    "rounds": 3,
    "waiting_mb": (1000, "of tokens in a checkpoint"),
    "unfinished_tokens": 65_536,
}
GOAL_SAVE_S = 10.0
GOAL_SAVE_MIB = 200.0
_TOKEN_BYTES = 8
_PROMPT_TOKENS = 100
_SAMPLES = 8


def made_up_groups(number: int, num_tokens: int) -> list[RolloutGroup]:
    """Return groups of responses of `num_tokens` tokens each."""
    rng = np.random.default_rng(0)
    groups = []
    for group in map(str, range(number)):
        prompt = Prompt(f"p{group}", rng.integers(0, 50_000, _PROMPT_TOKENS), "prompt " * 70)
        episodes = []
        for name in (f"{group}/{index}" for index in range(_SAMPLES)):
            token_ids = np.minimum(rng.zipf(1.25, size=num_tokens), 49_151)
            logprobs = -rng.gamma(0.25, 2.0, size=num_tokens).astype(np.float32)
            spans = (Span(SpanSource.PROMPT, prompt.token_ids), Span(SpanSource.POLICY, token_ids, logprobs, 3))
            text = " ".join(f"w{token}" for token in token_ids[: int(0.8 * num_tokens)])
            rollout = Rollout(name, group, spans, FinishReason.STOP, text)
            episodes.append(Episode(name, group, (rollout,)))
        groups.append(RolloutGroup(group, prompt, tuple(episodes)))
    return groups


def record(path: Path, groups: Sequence[RolloutGroup]) -> None:
    """Write the groups as a run does, 16 per step."""
    writer = RolloutWriter(path)
    for start in range(0, len(groups), 16):
        writer.write(*groups[start : start + 16], step=start)
    writer.close()


def unfinished_groups(num_tokens: int, length: int) -> tuple[UnfinishedGroups, list[str]]:
    """Return groups of one unfinished answer of `length` tokens each, with `num_tokens` in all, and their ids."""
    [group] = made_up_groups(1, length)
    answer = group.rollouts[0].spans[1]
    groups = UnfinishedGroups()
    names = [f"g{number}" for number in range(-(-num_tokens // length))]
    for name in names:
        [draft] = groups.drafts(name, None, group.prompt.token_ids, SamplingParams())
        draft.go_on(3)
        draft.token_ids.frombytes(answer.token_ids.tobytes())
        draft.logprobs.frombytes(answer.logprobs.tobytes())
    return groups, names


def save(folder: Path, make_state: Callable[[], Any]) -> dict[str, float]:
    """Save a state in a checkpoint, as a run does; return seconds, bytes, and the MiB that it needed meanwhile."""
    checkpoints = Checkpoints(folder)
    checkpoints.begin(1)
    before = peak = memory_mib()
    ended = threading.Event()

    def watch() -> None:
        nonlocal peak
        while not ended.wait(0.02):
            peak = max(peak, memory_mib())

    watching = threading.Thread(target=watch)
    watching.start()
    start = time.monotonic()
    start_cpu = time.process_time()
    saved = checkpoints.commit(1, {"waiting": make_state()}, [], None)
    seconds = time.monotonic() - start
    cpu_s = time.process_time() - start_cpu
    ended.set()
    watching.join()
    start = time.monotonic()
    saved.state()
    read_s = time.monotonic() - start
    found = {"seconds": seconds, "cpu_s": cpu_s, "read_s": read_s}
    return found | {"memory_mib": peak - before, "size_bytes": saved.size_bytes}


def save_unfinished(folder: Path, num_tokens: int, length: int) -> dict[str, float]:
    """Return what a checkpoint of unfinished groups needs."""
    groups, names = unfinished_groups(num_tokens, length)
    return save(folder, lambda: groups.state(names))


def save_both(options: Namespace, folder: Path, groups: Sequence[RolloutGroup]) -> dict[str, Any]:
    """Return what checkpoints of waiting and of unfinished groups need."""
    num_tokens = options.waiting_mb * 10**6 // _TOKEN_BYTES
    num_groups = -(-num_tokens // sum(rollout.num_tokens for rollout in groups[0].rollouts))
    found: dict[str, Any] = {"num_tokens": num_tokens}
    found["unfinished"] = save_unfinished(folder / "unfinished", num_tokens, options.unfinished_tokens)
    found["waiting"] = save(folder / "waiting", lambda: list(itertools.islice(itertools.cycle(groups), num_groups)))
    return found


def measure(options: Namespace, folder: Path) -> Iterator[dict[str, Any]]:
    """Measure the formats in turn."""
    groups = made_up_groups(options.groups, options.response_tokens)
    num_tokens = options.groups * _SAMPLES * (options.response_tokens + _PROMPT_TOKENS)
    ways: dict[str, Callable[[Path], None]] = {
        "jsonl": lambda home: record(home / "rollouts.jsonl", groups),
        "columns": lambda home: record(home / "rollouts.columns", groups),
        "checkpoint": lambda home: write_state(home, {"waiting": groups}),
    }
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    found: dict[str, Any] = {"num_tokens": num_tokens}
    for number in range(options.rounds):
        for name, write in ways.items():
            home = folder / f"{name}{number}"
            home.mkdir()
            start = time.process_time()
            write(home)
            seconds[name].append(time.process_time() - start)
            size_bytes = sum(path.stat().st_size for path in home.iterdir())
            found[name] = {
                "tokens_per_s": num_tokens / min(seconds[name]),
                "bytes_per_token": size_bytes / num_tokens,
            }
    yield found
    saved = found["saved"] = save_both(options, folder, groups)
    missed = []
    for name in ("unfinished", "waiting"):
        for key, goal in (("seconds", GOAL_SAVE_S), ("memory_mib", GOAL_SAVE_MIB)):
            if saved[name][key] >= goal:
                missed.append(f"{key} of {name} is {saved[name][key]:.1f}, the goal is {goal:g}")
    yield found | {"goals": {"seconds": GOAL_SAVE_S, "memory_mib": GOAL_SAVE_MIB}, "missed": missed}
