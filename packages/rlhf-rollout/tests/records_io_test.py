"""Rollouts as JSON lines."""

import contextlib
import json

import numpy as np

from record_testing import make_group, make_prompt, make_rollout
from rlhf_data.records import Episode, FinishReason, Rollout, RolloutGroup, Span, SpanSource, Verdict, VerdictKind
from rlhf_rollout.records_io import RolloutWriter, rollout_record


def record_of(group):
    (episode,) = group.episodes
    return rollout_record(group, episode, episode.rollouts[0])


def group_of(verdict=None, logprobs=None):
    prompt = make_prompt("2+2=", "4")
    return make_group("g0", prompt, (make_rollout(prompt, "4", logprobs=logprobs, verdict=verdict),))


def test_rollout_record_holds_everything_as_plain_json():
    verdict = Verdict(VerdictKind.OK, 0.5, 1.0, "fine", {"length": 1.0}, seconds=0.25, turn_rewards=(0.5,))
    group = group_of(verdict, [-0.1, -2.5])
    record = json.loads(json.dumps(record_of(group), allow_nan=False))
    assert record == {
        "rollout_id": "g0/0",
        "episode_id": "g0/0",
        "group_id": "g0",
        "prompt_id": "p-2+2=",
        "source": "default",
        "prompt": "2+2=",
        "label": "4",
        "text": "4",
        "token_ids": [2, *b"2+2=", ord("4"), 0],
        "logprobs": [0.0, 0.0, 0.0, 0.0, 0.0, -0.1, -2.5],
        "spans": [
            {"source": "prompt", "num_tokens": 5, "policy_version": None},
            {"source": "policy", "num_tokens": 2, "policy_version": 0},
        ],
        "finish_reason": "stop",
        "policy_version": 0,
        "reward": 0.5,
        "score": 1.0,
        "verdict": "ok",
        "detail": "fine",
        "extra": {"length": 1.0},
        "turn_rewards": [0.5],
        "earned_elsewhere": [0.0, 0.0],
        "token_rewards": [],
        "score_seconds": 0.25,
    }


def test_rollout_record_token_rewards_are_pairs():
    record = record_of(group_of(Verdict(VerdictKind.OK, 0.5, token_rewards=((5, 0.25), (6, 0.125)))))
    assert json.loads(json.dumps(record))["token_rewards"] == [[5, 0.25], [6, 0.125]]


def test_rollout_record_log_probs_are_the_exact_float32():
    logprobs = np.random.default_rng(0).normal(-2, 3, size=2).astype(np.float32)
    group = group_of(logprobs=logprobs)
    written = record_of(group)["logprobs"][-2:]
    assert np.array_equal(np.array(written, np.float32), logprobs)


def test_rollout_record_without_verdict_and_with_an_infinite_log_prob_is_null():
    group = group_of(logprobs=[-np.inf, -1.0])
    record = record_of(group)
    assert (record["reward"], record["score"], record["verdict"], record["score_seconds"]) == (None,) * 4
    assert record["turn_rewards"] == record["token_rewards"] == []
    assert record["logprobs"][-2:] == [None, -1.0]


def test_rollout_record_failed_verdict_has_null_reward():
    group = group_of(Verdict(VerdictKind.TIMEOUT, detail="no answer within 1 s"))
    record = record_of(group)
    assert (record["reward"], record["verdict"], record["detail"]) == (None, "timeout", "no answer within 1 s")


def test_rollout_record_tells_the_environments_tokens():
    spans = (
        Span(SpanSource.PROMPT, [1]),
        Span(SpanSource.POLICY, [2], [-1.0], 4),
        Span(SpanSource.ENVIRONMENT, [3, 5]),
    )
    group = make_group("g", make_prompt(), (Rollout("g/0", "g", spans, FinishReason.LENGTH),))
    record = record_of(group)
    assert [span["source"] for span in record["spans"]] == ["prompt", "policy", "environment"]
    assert sum(span["num_tokens"] for span in record["spans"]) == len(record["token_ids"]) == len(record["logprobs"])


def test_rollout_writer_appends_whole_lines_with_fields(tmp_path):
    path = tmp_path / "new" / "rollouts.jsonl"
    with contextlib.closing(RolloutWriter(path)) as writer:
        writer.write(group_of(), step=1)
        assert len(path.read_text().splitlines()) == 1  # on disk at once
    with contextlib.closing(RolloutWriter(path)) as writer:
        writer.write(group_of(), step=2)
    assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == [1, 2]


def test_rollout_writer_names_the_episode_of_every_rollout(tmp_path):
    prompt = make_prompt()
    first, second, third = (make_rollout(prompt, str(index), index=index) for index in range(3))
    group = RolloutGroup("g0", prompt, (Episode("branched", "g0", (first, second)), Episode("plain", "g0", (third,))))
    path = tmp_path / "rollouts.jsonl"
    with contextlib.closing(RolloutWriter(path)) as writer:
        writer.write(group)
    records = [json.loads(line) for line in path.read_text().splitlines()]
    assert [(record["episode_id"], record["rollout_id"]) for record in records] == [
        ("branched", "g0/0"),
        ("branched", "g0/1"),
        ("plain", "g0/2"),
    ]
