"""Examples of functions of one's own in a run of the built-in model, which is repeatable."""

import os
import subprocess
from pathlib import Path

import pytest

from record_testing import read_jsonl
from rlhf_cli.config.paths import OWN_CODE

EXAMPLES = Path(__file__).parents[2] / "examples"
FILES = {
    "policy_loss_path": EXAMPLES / "spo_loss.py",
    "advantage_path": EXAMPLES / "median_advantage.py",
    "metrics_path": EXAMPLES / "pass_at_k.py",
}
# The length limit ends all responses of this run, so the filter of the examples would keep none.
FILTER = "def keep_group(group): return group.scores.max() > group.scores.min()\n"
# Responses of an untrained model differ in it.
REWARD = """
def reward_func(queries, prompts, labels):
    return {"rewards": [sum(letter in "02468" for letter in query) / len(query) for query in queries]}
"""
FLAGS = (
    "--init_kl_coef 0 --rollout_batch_size 8 --n_samples_per_prompt 4 --train_batch_size 16 --micro_train_batch_size 4"
    " --generate_max_len 16 --eval_data None --train_steps 1 --save_steps 1 --remote_rm_url reward.py"
    " --success_threshold 0.06"
)


def test_examples_train_the_built_in_model_and_the_run_keeps_their_content(rlhf, words, tmp_path):
    (tmp_path / "reward.py").write_text(REWARD)
    own = {}
    for option, function in OWN_CODE.items():
        own[f"--{option}"] = tmp_path / f"{function}.py"
        own[f"--{option}"].write_text(FILES[option].read_text() if option in FILES else FILTER)
    flags = [word for option, path in own.items() for word in (option, str(path))]
    rlhf("ppo", *FLAGS.split(), *flags, "--save_path", "out", folder=tmp_path)
    [line] = [line for line in read_jsonl(tmp_path / "out/metrics.jsonl") if "time/step" in line]
    assert line["policy/grad_norm"] > 0 and line["samples/trained"] == 32
    # SPO's distance of the ratio from 1: none in the first update of a step, a little in the second.
    assert 0 < line["policy/own_distance"] < 0.1
    assert "value/loss" not in line and "policy/clip_fraction" not in line
    for path in own.values():
        assert (tmp_path / "out/own_code" / path.name).read_bytes() == path.read_bytes()

    # Prompts whose responses have equal scores made room for others.
    assert line["samples/filtered"] == line["samples/generated"] - 32 > 0
    [records] = [read_jsonl(tmp_path / "out/rollouts.jsonl")]
    right = {}
    for record in records:
        right.setdefault(record["group_id"], []).append(record["verdict"] == "ok")
    assert line["own/pass_at_1"] == pytest.approx(sum(map(sum, right.values())) / len(records))
    assert line["own/pass_at_4"] == pytest.approx(sum(map(any, right.values())) / len(right))

    for path in own.values():  # other metrics are no reason to refuse the run, another filter is
        path.write_text(path.read_text() + "# another content\n" * (path.stem in ("keep_group", "step_metrics")))
    environment = os.environ | {"BUILD_WORKING_DIRECTORY": str(tmp_path)}
    again = [*words, "ppo", "--resume", "out", "--train_steps", "2"]
    refused = subprocess.run(again, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300)
    assert refused.returncode == 2 and "keep_group.py (SHA-256" in refused.stderr.replace("\n", "")
    repeated = rlhf("replay", "out", "--step", "1", folder=tmp_path)  # from the copy
    assert "metrics agree within 0" in repeated and "differs" not in repeated
