"""Rollouts as JSON lines."""

import contextlib
import json

import numpy as np

from rlhf_data.records import FinishReason, Rollout, RolloutGroup, Span, SpanSource, Verdict, VerdictKind
from rlhf_data.testing import make_prompt, make_rollout
from rlhf_rollout.records_io import RolloutWriter, rollout_record


def group_of(verdict=None, logprobs=None):
    prompt = make_prompt("2+2=", "4")
    return RolloutGroup("g0", prompt, (make_rollout(prompt, "4", logprobs=logprobs, verdict=verdict),))


def test_rollout_record_holds_everything_as_plain_json():
    group = group_of(Verdict(VerdictKind.OK, 0.5, 1.0, "fine", {"length": 1.0}), [-0.1, -2.5])
    record = json.loads(json.dumps(rollout_record(group, group.rollouts[0]), allow_nan=False))
    assert record == {
        "rollout_id": "g0/0",
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
    }


def test_rollout_record_log_probs_are_the_exact_float32():
    logprobs = np.random.default_rng(0).normal(-2, 3, size=2).astype(np.float32)
    group = group_of(logprobs=logprobs)
    written = rollout_record(group, group.rollouts[0])["logprobs"][-2:]
    assert np.array_equal(np.array(written, np.float32), logprobs)


def test_rollout_record_without_verdict_and_with_an_infinite_log_prob_is_null():
    group = group_of(logprobs=[-np.inf, -1.0])
    record = rollout_record(group, group.rollouts[0])
    assert (record["reward"], record["score"], record["verdict"]) == (None, None, None)
    assert record["logprobs"][-2:] == [None, -1.0]


def test_rollout_record_failed_verdict_has_null_reward():
    group = group_of(Verdict(VerdictKind.TIMEOUT, detail="no answer within 1 s"))
    record = rollout_record(group, group.rollouts[0])
    assert (record["reward"], record["verdict"], record["detail"]) == (None, "timeout", "no answer within 1 s")


def test_rollout_record_tells_the_environments_tokens():
    spans = (
        Span(SpanSource.PROMPT, [1]),
        Span(SpanSource.POLICY, [2], [-1.0], 4),
        Span(SpanSource.ENVIRONMENT, [3, 5]),
    )
    group = RolloutGroup("g", make_prompt(), (Rollout("g/0", "g", spans, FinishReason.LENGTH),))
    record = rollout_record(group, group.rollouts[0])
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
