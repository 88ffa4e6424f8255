"""Rollouts as JSON lines: one record per rollout."""

import json
from pathlib import Path
from typing import Any

import numpy as np

from rlhf_data.records import Episode, Rollout, RolloutGroup


def rollout_record(group: RolloutGroup, episode: Episode, rollout: Rollout) -> dict[str, Any]:
    """Return a rollout with its prompt as plain JSON values.

    `token_ids` and `logprobs` hold the whole sequence, prompt included. Log-probs are the engine's: 0.0 for tokens that
    the policy did not write, null for values that are not finite. `spans` gives source, length and policy version of
    each run of tokens. `turn_rewards` and `earned_elsewhere` add up to `reward`. `token_rewards` holds pairs of a place
    in `token_ids` and a reward. `reward`, `score`, `verdict` and `score_seconds` are null for a rollout that was not
    scored.
    """
    verdict = rollout.verdict
    return {
        "rollout_id": rollout.rollout_id,
        "episode_id": episode.episode_id,
        "group_id": rollout.group_id,
        "prompt_id": group.prompt.prompt_id,
        "source": group.prompt.source,
        "prompt": group.prompt.text,
        "label": group.prompt.label,
        "text": rollout.text,
        "token_ids": rollout.token_ids.tolist(),
        "logprobs": [_number(value) for value in rollout.rollout_logprobs],
        "spans": [
            {"source": str(span.source), "num_tokens": len(span.token_ids), "policy_version": span.policy_version}
            for span in rollout.spans
        ],
        "finish_reason": str(rollout.finish_reason),
        "policy_version": rollout.policy_version,
        "reward": verdict.reward if verdict else None,
        "score": verdict.score if verdict else None,
        "verdict": str(verdict.kind) if verdict else None,
        "detail": verdict.detail if verdict else "",
        "extra": dict(verdict.extra) if verdict else {},
        "turn_rewards": list(verdict.turn_rewards) if verdict else [],
        "earned_elsewhere": list(verdict.earned_elsewhere) if verdict else [0.0, 0.0],
        "token_rewards": [list(pair) for pair in verdict.token_rewards] if verdict else [],
        "score_seconds": round(verdict.seconds, 6) if verdict else None,
    }


class RolloutWriter:
    """Appends groups to a JSONL file and creates its folder. The file is flushed after every group."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._file = self.path.open("a", encoding="utf-8")

    def write(self, group: RolloutGroup, **fields: Any) -> None:
        """Append the group's rollouts; each record begins with `fields`, such as the step and the phase."""
        for episode in group.episodes:
            for rollout in episode.rollouts:
                record = {**fields, **rollout_record(group, episode, rollout)}
                self._file.write(json.dumps(record, ensure_ascii=False, allow_nan=False) + "\n")
        self._file.flush()

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def _number(value: np.float32) -> float | None:
    # The shortest decimal that gives this float32 again; by way of float64, 0.1 would become 0.10000000149011612.
    return float(str(value)) if np.isfinite(value) else None
