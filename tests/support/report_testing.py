"""Folders of runs, made by hand, for the tests of the report."""

import contextlib
import json
from pathlib import Path

import numpy as np

from record_testing import make_group, make_prompt, make_rollout, write_jsonl
from rlhf_data.records import Verdict, VerdictKind
from rlhf_rollout.records_io import RolloutWriter
from rlhf_train.tracing.token_values import TokenValues, halves, write_values


def write_run(
    folder: Path, num_steps: int = 3, *, prompt="2+2=", answer="4", suffix=".jsonl", learning_rate=1e-3
) -> Path:
    """Write a run: each step has a group with a right answer of reward `step` and a wrong one without tokens twice."""
    folder.mkdir(parents=True)
    metrics = [{"step": 0, "eval/accuracy": 0.25}]
    for step in range(1, num_steps + 1):
        metrics.append({"step": step, "rollout/reward": step / 2, "policy/entropy": None if step == 2 else 0.5})
    metrics.append({"step": num_steps, "time/total": 12.5})
    write_jsonl(folder / "metrics.jsonl", metrics)
    config = ["[model]", f"pretrain = {json.dumps(prompt)}", "bf16 = false", "[training]"]
    (folder / "config.toml").write_text("\n".join([*config, f"actor_learning_rate = {learning_rate}", ""]))
    asked = make_prompt(prompt, "4")
    with contextlib.closing(RolloutWriter(folder / f"rollouts{suffix}")) as writer:
        for step in range(1, num_steps + 1):
            group_id = f"step{step}/0"
            right = Verdict(VerdictKind.OK, float(step))
            wrong = Verdict(VerdictKind.WRONG, 0.0, detail=f"no {answer}")
            rollouts = [
                make_rollout(asked, answer, group_id=group_id, verdict=right),
                make_rollout(asked, answer + "!", group_id=group_id, index=1, verdict=wrong, policy_version=step),
            ]
            writer.write(make_group(group_id, asked, rollouts), step=step, kept=True)
    return folder


def write_timeline(folder: Path, name: str = "timeline.json", *, num_passes: int = 3) -> Path:
    """Write the timeline of a run that was killed: a step of 10 s with passes of 1 s in a call, and a phase in it."""
    events = [
        {"name": "process_name", "ph": "M", "pid": 1, "tid": 1, "ts": 0, "args": {"name": "controller"}},
        {"name": "thread_name", "ph": "M", "pid": 1, "tid": 1, "ts": 0, "args": {"name": "steps"}},
        {"name": "process_name", "ph": "M", "pid": 2, "tid": 3, "ts": 0, "args": {"name": "actor: rank 0"}},
        {"name": "thread_name", "ph": "M", "pid": 2, "tid": 3, "ts": 0, "args": {"name": "calls"}},
        {"name": "step 1", "ph": "X", "pid": 1, "tid": 1, "ts": 0, "dur": 10_000_000},
        {
            "name": "wait",
            "ph": "X",
            "pid": 2,
            "tid": 3,
            "ts": 0,
            "dur": 2_000_000,
            "args": {"waits for": "generate 2.000 s"},
        },
        {"name": "update actor", "ph": "B", "pid": 2, "tid": 3, "ts": 2_000_000},
        *(
            {
                "name": "pass",
                "ph": "X",
                "pid": 2,
                "tid": 3,
                "ts": (2 + at) * 1_000_000,
                "dur": 1_000_000,
                "args": {"tokens": 7},
            }
            for at in range(num_passes)
        ),
        {"name": "update actor", "ph": "E", "pid": 2, "tid": 3, "ts": 8_000_000},
        {"name": "prompt", "ph": "b", "cat": "prompt", "id": "a", "pid": 2, "tid": 3, "ts": 8_500_000},
        {"name": "<b>open</b>", "ph": "B", "pid": 2, "tid": 3, "ts": 9_000_000},
        {"name": "size", "ph": "C", "pid": 2, "tid": 3, "ts": 9_500_000, "args": {"value": 1}},
    ]
    text = ",\n".join(json.dumps(event) for event in events)
    path = folder / name
    path.write_text(f'[\n{text},\n{{"name": "cut o', encoding="utf-8")
    return path


def write_token_values(folder: Path, step: int) -> None:
    """Add what a trainer computed for the right answer of two bytes of a step of `write_run`, whose last token it left
    out; and numbers for another one that has more tokens than it was recorded with."""
    columns = {
        "gap": [0.5, -0.25, np.nan],
        "log_ratio": [np.log(2), 0.0, np.nan],
        "advantage": [-1.5] * 3,
        "entropy": [2.0**-20, 3.5, np.nan],
        "kl": [np.nan] * 3,
    }
    right = TokenValues([f"step{step}/0/0"], np.array([3]), {name: halves(np.array(v)) for name, v in columns.items()})
    wrong = TokenValues([f"step{step}/0/1"], np.array([9]), dict.fromkeys(columns, halves(np.ones(9))))
    write_values(
        folder / "token_values",
        step,
        [right, wrong._replace(columns=wrong.columns | {"kl": halves(np.full(9, np.nan))})],
    )
