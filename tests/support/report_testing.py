"""Folders of runs, made by hand, for the tests of the report."""

import contextlib
import json
from pathlib import Path

from record_testing import make_group, make_prompt, make_rollout, write_jsonl
from rlhf_data.records import Verdict, VerdictKind
from rlhf_rollout.records_io import RolloutWriter


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
