"""Random groups of rollouts for tests of their records, and what tests do with files of them."""

import contextlib
import dataclasses

import numpy as np

from rlhf_data.records import (
    Episode,
    FinishReason,
    Prompt,
    Rollout,
    RolloutGroup,
    Span,
    SpanSource,
    Verdict,
    VerdictKind,
)
from rlhf_rollout.records_io import RolloutWriter, read_batches


def random_verdict(rng, rollout):
    """A verdict of a random kind for a rollout: none, failed, or with rewards of turns, tokens or sources."""
    seconds = float(rng.integers(0, 9)) / 8
    kind = rng.choice(7)
    if kind == 0:
        return None
    if kind == 1:
        return Verdict(VerdictKind.TIMEOUT, detail="no answer\nwithin 1 s \u2028 \u00e9", seconds=seconds)
    if kind == 2:
        return Verdict(VerdictKind.CRASH, -1.0, 0.25, source_rewards=(0.1, -0.7))
    values = rng.normal(size=len(rollout.turn_ends)).tolist()
    if kind == 3 and values:
        before, later = rng.normal(size=2).tolist()
        total = sum(values) + before + later
        return Verdict(VerdictKind.OK, total, turn_rewards=tuple(values), earned_elsewhere=(before, later))
    if kind == 4:
        pairs = tuple((int(at), float(rng.normal())) for at in rng.choice(rollout.num_tokens, 2, replace=False))
        return Verdict(VerdictKind.WRONG, float(rng.normal()), token_rewards=tuple(sorted(pairs)))
    if kind == 5:
        return Verdict(VerdictKind.OK, 1 / 3, 2.0, "", {"length": float(rng.normal()), "n": 3.0}, seconds)
    return Verdict(VerdictKind.UNSCORED, 0.0)


def random_group(rng, number):
    """A group with episodes of one or several rollouts, of several spans each, and log-probs of every float32."""
    group_id = f"step1/{number}"

    def tokens(low=1):
        return rng.integers(0, 2**31 - 1, rng.integers(low, 5))

    def policy():
        ids = tokens()
        logprobs = rng.integers(0, 2**32, len(ids), dtype=np.uint32).view(np.float32)
        odd = rng.choice([np.nan, np.inf, -np.inf, -0.0], len(ids))
        return Span(SpanSource.POLICY, ids, np.where(rng.random(len(ids)) < 0.2, odd, logprobs), int(rng.integers(9)))

    messages = ({"role": "user", "content": "a\nb"},) if rng.random() < 0.5 else None
    images = ("a b.png", "/\u00e9.png")[: number % 3]
    label = None if rng.random() < 0.3 else "4"
    prompt = Prompt(f"p{number}", tokens(), "2+2=\u00e9", label, "sums", messages, images=images)
    episodes = []
    for index in range(3):
        rollouts = []
        for part in range(rng.integers(1, 4)):
            first = prompt.token_ids if rng.random() < 0.5 else tokens()
            spans = [Span(SpanSource.PROMPT, first)]
            for _ in range(rng.integers(1, 3)):
                spans += [policy(), policy(), Span(SpanSource.ENVIRONMENT, tokens(0))]
            reason = list(FinishReason)[rng.integers(3)]
            rollout = Rollout(f"{group_id}/{index}.{part}", group_id, tuple(spans), reason, '4"\n')
            routes = None
            if rng.random() < 0.5:
                routes = rng.integers(0, rng.choice([4, 256, 257]), (rng.integers(rollout.num_tokens + 1), 3, 2))
            found = {
                "verdict": random_verdict(rng, rollout),
                "routes": routes,
                "images": images + ("shown.png",) * (number % 2),
            }
            rollouts.append(dataclasses.replace(rollout, **found))
        episodes.append(Episode(f"{group_id}/e{index}", group_id, tuple(rollouts)))
    return RolloutGroup(group_id, prompt, tuple(episodes))


def plain(record):
    """A record as nested tuples that compare equal exactly when all values are equal; a NaN equals any NaN."""
    if isinstance(record, np.ndarray):
        return str(record.dtype), [repr(value) for value in record.tolist()]
    if dataclasses.is_dataclass(record):
        names = [field.name for field in dataclasses.fields(record)]
        return type(record).__name__, [(name, plain(getattr(record, name))) for name in names]
    if isinstance(record, tuple):
        return [plain(value) for value in record]
    return type(record).__name__, dict(record) if isinstance(record, dict) else record


def write_steps(path, steps, **options):
    """Append a batch of two groups for each step; return all groups."""
    rng = np.random.default_rng(steps[0])
    written = []
    with contextlib.closing(RolloutWriter(path, **options)) as writer:
        for step in steps:
            groups = [random_group(rng, 10 * step + number) for number in range(2)]
            writer.write(*groups, step=step)
            written.extend(groups)
    return written


def read_groups(path):
    return tuple(group for batch in read_batches(path) for group in batch.groups)
