"""The example of an agent learns on the real stack, and its episodes are recorded token by token."""

from pathlib import Path

import pytest

from record_testing import read_jsonl

ROOT = Path(__file__).parents[2]
NUM_STEPS = 6


def test_agent_with_three_attempts_learns(rlhf, tmp_path):
    flags = ["--agent_func_path", str(ROOT / "examples/math_retries.py"), "--max_steps", "3", "--agent_max_len", "192"]
    flags += ["--packing_samples", "--seed", "1", "--actor_learning_rate", "8e-4", "--train_steps", str(NUM_STEPS)]
    rlhf("ppo", *flags, "--eval_steps", "-1", "--save_path", "out", folder=tmp_path)
    lines = read_jsonl(tmp_path / "out/metrics.jsonl")
    assert lines[-1]["eval/accuracy_before"] <= 0.40
    assert lines[-1]["eval/accuracy_after"] >= 0.50
    steps = [line for line in lines if "time/step" in line]
    assert len(steps) == NUM_STEPS
    for line in steps:
        assert line["samples/generated"] == line["samples/trained"] == 128
        assert line["mismatch/logprob_gap_max"] < 1e-3  # also behind the agent's text
        assert 0 <= line["throughput/cached_prompt_share"] < 1
    assert steps[-1]["rollout/attempts"] < steps[0]["rollout/attempts"]

    records = read_jsonl(tmp_path / "out/rollouts.jsonl")
    assert len(records) == NUM_STEPS * 128
    for record in records[::37]:
        sources = [span["source"] for span in record["spans"]]
        num_attempts = sources.count("policy")
        assert sources == ["prompt", "policy", *["environment", "policy"] * (num_attempts - 1)]
        is_right = record["score"] == 1.0
        assert record["reward"] == pytest.approx(is_right - 0.1 * (num_attempts - is_right))
        assert is_right or num_attempts == 3
        assert record["text"].count("That is wrong. Try again.") == num_attempts - 1
