"""Writing rollouts: tokens per second of processor time, and bytes per token, as JSON lines and in columns.

    python tools/bench/run.py records --out records.json

Groups of 8 responses are made up: token ids have the frequencies of words (Zipf), log-probs are gamma-distributed
float32 numbers, and the text has a word for four of five tokens. `columns` and `jsonl` are the formats of `rlhf ppo
--record_format`; `checkpoint` is the state of a run whose groups all wait to be trained on.
"""

import time
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from rlhf_data.records import Episode, FinishReason, Prompt, Rollout, RolloutGroup, Span, SpanSource
from rlhf_rollout.records_io import RolloutWriter
from rlhf_train.run.checkpoint import write_state

FLAGS = {"groups": 250, "response_tokens": 1024, "rounds": 3}
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
