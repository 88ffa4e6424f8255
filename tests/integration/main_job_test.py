"""The main job as a user types it, shortened."""

import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

import pytest

from record_testing import read_jsonl

ROOT = Path(__file__).parents[2]
TIMEOUT_S = 600


def rlhf(*words: str, folder: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run a command in `folder`: Bazel's binary where there is one, else the module."""
    binary = ROOT / "packages/rlhf-cli/rlhf"
    command = [str(binary)] if binary.is_file() else [sys.executable, "-m", "rlhf_cli.main"]
    environment = os.environ | {"BUILD_WORKING_DIRECTORY": str(folder), **variables}
    return subprocess.run(
        [*command, *words], cwd=folder, env=environment, capture_output=True, text=True, timeout=TIMEOUT_S
    )


@pytest.fixture(scope="module")
def main_job(tmp_path_factory: pytest.TempPathFactory) -> tuple[subprocess.CompletedProcess[str], Path, float]:
    """The command as it ended, its folder, and its seconds."""
    folder = tmp_path_factory.mktemp("main")
    started = time.monotonic()
    flags = ["--seed", "1", "--train_steps", "12", "--eval_steps", "6", "--best_metric_key", "eval/accuracy"]
    flags += ["--save_steps", "10"]
    done = rlhf("ppo", *flags, "--save_path", "out", folder=folder)
    seconds = time.monotonic() - started
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    return done, folder / "out", seconds


def test_main_job_learns(main_job):
    final = read_jsonl(main_job[1] / "metrics.jsonl")[-1]
    assert final["eval/accuracy_before"] <= 0.40
    assert final["eval/accuracy_after"] >= 0.60


def test_main_job_shows_steps_evaluations_samples_and_where_everything_lies(main_job):
    shown, out = main_job[0].stdout + main_job[0].stderr, main_job[1]
    assert "12/12" in shown
    assert shown.count("held-out accuracy") >= 4
    assert "Held-out samples before training" in shown
    assert "Held-out samples after training" in shown
    last_block = shown[shown.rindex("Done") :]
    for name in ("metrics.jsonl", "tensorboard", "config.toml", "rollouts.jsonl", "model"):
        assert f"{out}/{name}" in last_block


def test_main_job_logs_every_phase_and_loses_no_rollout(main_job):
    steps = [line for line in read_jsonl(main_job[1] / "metrics.jsonl") if "time/step" in line]
    assert [line["step"] for line in steps] == list(range(1, 13))
    for line in steps:
        assert line["samples/generated"] == line["samples/trained"] == 128
        for phase in ("generate", "reward", "experience", "train", "sync"):
            assert line[f"time/{phase}"] >= 0
        assert line["mismatch/logprob_gap_max"] < 1e-3
    assert any((main_job[1] / "tensorboard").iterdir())


def test_main_job_every_second_belongs_to_a_phase_of_a_step_or_to_a_part_of_the_run(main_job):
    lines = read_jsonl(main_job[1] / "metrics.jsonl")
    steps = [line for line in lines if "time/step" in line]
    for line in steps:
        phases = {name: value for name, value in line.items() if name.startswith("time/") and name != "time/step"}
        assert sum(phases.values()) == pytest.approx(line["time/step"], abs=1e-3)
        assert min(phases.values()) > -1e-6
    assert statistics.median(line["time/other"] / line["time/step"] for line in steps) < 0.1
    assert [line["step"] for line in steps if "time/evaluate" in line] == [6, 12]
    assert [line["step"] for line in steps if "time/save" in line]  # the best model
    assert not [line for line in lines if "eval/accuracy" in line and "time/evaluate" in line]
    final = lines[-1]
    parts = ("startup", "first_evaluation", "steps", "final_save")
    seconds = [final[f"time/{part}"] for part in parts]
    assert min(seconds) > 0
    assert final["time/steps"] == pytest.approx(sum(line["time/step"] for line in steps), abs=1e-3)
    assert sum(seconds) + final["time/remainder"] == pytest.approx(final["time/total"], abs=1e-3)
    assert 0 <= final["time/remainder"] < max(0.02 * final["time/total"], 5.0)
    assert final["time/total"] < main_job[2]


def test_main_job_rollouts_are_records_with_tokens_logprobs_reward_and_version(main_job):
    records = read_jsonl(main_job[1] / "rollouts.jsonl")
    assert len(records) == 12 * 128
    for record in records[:: len(records) // 20]:
        assert record["verdict"] in ("ok", "wrong", "unparsable")
        assert len(record["token_ids"]) == len(record["logprobs"])
        assert record["policy_version"] == 2 * (record["step"] - 1)  # two updates per step
        assert record["reward"] == float(record["text"].rpartition("####")[2].strip() == record["label"])


def test_main_job_final_model_loads_in_plain_transformers(main_job):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    path = main_job[1] / "model"
    tokenizer = AutoTokenizer.from_pretrained(path)
    model = AutoModelForCausalLM.from_pretrained(path)
    messages = [{"role": "user", "content": "What is 47 + 38?"}]
    ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    text = tokenizer.decode(model.generate(**ids, max_new_tokens=32, do_sample=False)[0], skip_special_tokens=True)
    assert "7+8=15" in text


@pytest.fixture
def without_vllm(tmp_path: Path) -> dict[str, str]:
    """Variables with which `import vllm` ends a process."""
    (tmp_path / "poison").mkdir()
    (tmp_path / "poison/vllm.py").write_text("import os\n\nos._exit(99)\n")
    return {"PYTHONPATH": os.pathsep.join(filter(None, [str(tmp_path / "poison"), os.environ.get("PYTHONPATH")]))}


def test_repeated_step_has_the_same_metrics_and_changes_nothing_in_the_run(main_job, tmp_path, without_vllm):
    run = main_job[1]
    before = {path: (path.stat().st_mtime_ns, path.stat().st_size) for path in run.rglob("*")}
    done = rlhf("replay", str(run), "--step", "12", folder=tmp_path, **without_vllm)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    assert f"the run continues from {run}/checkpoints/step-10" in done.stderr
    *rows, last = done.stdout.splitlines()
    found = {row.split()[0]: row.split()[1:] for row in rows[1:]}
    assert last == f"step 12: {len(found)} of {len(found)} metrics agree within 0"
    recorded = next(line for line in read_jsonl(run / "metrics.jsonl") if line["step"] == 12 and "time/step" in line)
    for name in ("policy/loss", "policy/grad_norm", "value/loss", "kl/reference", "policy/clip_fraction"):
        assert found[name] == [repr(recorded[name])] * 2 + ["0.0"]
    assert {path: (path.stat().st_mtime_ns, path.stat().st_size) for path in run.rglob("*")} == before
