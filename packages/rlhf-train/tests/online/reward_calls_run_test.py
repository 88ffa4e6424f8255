"""The calls of a reward function in a run: those of a step are together, however few prompts generate at once."""

import json

import pytest

from rlhf_rollout.rewards.sources import CallOptions, RewardSource
from rlhf_train.generation.run_spec import AsyncSpec, RewardSpec
from rlhf_train.online import train_and_save

COUNTING = """
def reward_func(queries, prompts, labels):
    return {"rewards": [float(len(query) % 2) for query in queries], "extra_logs": {"size": len(queries)}}
"""


@pytest.mark.parametrize(
    ("max_in_flight", "batch_size", "size"), [(1, 64, 64), (3, 64, 64), (3, 40, 32), (256, 16, 16)]
)
def test_calls_hold_what_is_complete_of_a_step(make_run, tmp_path, max_in_flight, batch_size, size):
    (tmp_path / "counting.py").write_text(COUNTING)
    sources = (RewardSource(kind="function", targets=(str(tmp_path / "counting.py"),)),)
    calls = CallOptions(timeout_s=60.0, batch_size=batch_size, step_prompts=16, num_samples=4)
    run = make_run(reward=RewardSpec(sources=sources, calls=calls), num_steps=2, max_in_flight=max_in_flight)
    train_and_save(run.job, run.controller, run.recorder)
    records = [json.loads(line) for line in run.recorder.path("rollouts").read_text().splitlines()]
    # 16 prompts with 4 responses each per step.
    assert {one["extra"]["size"] for one in records} == {size}


def test_calls_of_a_run_that_generates_ahead_hold_a_step_at_most(make_run, tmp_path):
    (tmp_path / "counting.py").write_text(COUNTING)
    sources = (RewardSource(kind="function", targets=(str(tmp_path / "counting.py"),)),)
    calls = CallOptions(timeout_s=60.0, batch_size=1000, step_prompts=16, num_samples=4)
    ahead = {"asynchronous": AsyncSpec(max_staleness=1), "max_in_flight": 4}
    run = make_run(reward=RewardSpec(sources=sources, calls=calls), num_steps=3, **ahead)
    train_and_save(run.job, run.controller, run.recorder)
    records = [json.loads(line) for line in run.recorder.path("rollouts").read_text().splitlines()]
    assert records
    assert all(4 <= one["extra"]["size"] <= 64 for one in records)
