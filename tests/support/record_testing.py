"""Makers of the records and files that tests need, and a clock."""

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from rlhf_data.records import Episode, FinishReason, Prompt, Rollout, RolloutGroup, Span, SpanSource, Verdict
from rlhf_data.testing import EOS_ID, ByteTokenizer


class ManualClock:
    """A clock that stands at `now` seconds until a test moves it."""

    def __init__(self, now: float = 1000.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now


def write_jsonl(path: str | Path, rows: Iterable[Any]) -> Path:
    """Write one JSON value per line and return the path."""
    path = Path(path)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def read_jsonl(path: Path) -> list[Any]:
    """Return the values of a file's lines."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def make_prompt(text: str = "2+2=", label: str | None = "4", *, prompt_id: str | None = None) -> Prompt:
    """Return a prompt with the tokens of `ByteTokenizer`."""
    return Prompt(prompt_id or f"p-{text}", ByteTokenizer().encode(text), text, label)


def make_rollout(
    prompt: Prompt,
    text: str,
    *,
    group_id: str = "g0",
    index: int = 0,
    logprobs: Sequence[float] | None = None,
    policy_version: int = 0,
    verdict: Verdict | None = None,
) -> Rollout:
    """Return a single-turn rollout that answers with `text` and `<eos>`. Log-probs are -1.0 unless given."""
    token_ids = [*ByteTokenizer().encode(text, add_special_tokens=False), EOS_ID]
    logprobs = [-1.0] * len(token_ids) if logprobs is None else logprobs
    answer = Span(SpanSource.POLICY, token_ids, logprobs, policy_version)
    spans = (Span(SpanSource.PROMPT, prompt.token_ids), answer)
    return Rollout(f"{group_id}/{index}", group_id, spans, FinishReason.STOP, text, verdict)


def short_rollout(
    name: str = "r",
    group_id: str = "g",
    *,
    tokens: int = 1,
    version: int = 0,
    reason: FinishReason = FinishReason.STOP,
    verdict: Verdict | None = None,
) -> Rollout:
    """Return a rollout of a prompt of one token and `tokens` of the policy, which all have the log-prob -1.0."""
    answer = Span(SpanSource.POLICY, [2] * tokens, [-1.0] * tokens, version)
    return Rollout(name, group_id, (Span(SpanSource.PROMPT, [1]), answer), reason, verdict=verdict)


def make_group(group_id: str, prompt: Prompt, rollouts: Iterable[Rollout]) -> RolloutGroup:
    """Return a group in which each rollout is an episode."""
    return RolloutGroup(group_id, prompt, tuple(Episode(r.rollout_id, group_id, (r,)) for r in rollouts))


def named_programs(table: str) -> dict[str, str]:
    """Return programs by their names; in the table, each follows a line `# NAME`, and a blank line ends it."""
    parts = [part.partition("\n") for part in table.strip().removeprefix("# ").split("\n\n# ")]
    return {name: program for name, _, program in parts}
