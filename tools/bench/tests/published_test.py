"""Benchmarks of what published models learn: which commands they run, on which rows, and what they report."""

import json
import shutil
import subprocess
import sys
from argparse import Namespace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from rlhf_train.algorithms.table import ALGORITHMS
from runner import Metrics, UsageError, read_lines
from workloads.learning import beside_openrlhf, beside_trl
from workloads.learning.openrlhf_parts import flash_attention, reward

OPTIMIZER = (
    'optim_dict = {\n                "type": "AdamW",\n                "params": {\n                    "lr": 1e-3\n'
)
LABEL = json.dumps({"subject": "rivers", "demands": {"end": "today", "words": 9}})
# What its process prints: lines as OpenRLHF 0.11.2 writes them, those of two steps and of an evaluation.
PROGRAM = """
import sys, time
prefix = "\\x1b[36m(PPOTrainer pid=7)\\x1b[0m INFO 11-30 21:00:00 ppo_trainer.py:480] \\u2728 "
def step(number, seconds):
    print(prefix + f"Global step {number}: {{'kl': nan, 'score': {number / 8}, 'rollout/response_length_mean': 20.5,"
        f" 'timing/broadcast': np.float64(1.5), 'timing/step_total': {seconds}}}", flush=True)
def evaluation(number, accuracy):
    print(prefix + f"Evaluation completed in 0:00:01, global_step {number}, eval_metrics: {{'eval_default_pass1':"
        f" {accuracy}, 'eval_num_samples': 6.0}}", flush=True)
step(1, 0.25); step(2, 1e-01); evaluation(2, 0.5); step(3, 0.5); step(4, 0.5)
"""


def test_seconds_beside_trl_are_those_of_steps_without_starts_and_evaluations(bench, monkeypatch):
    asked = {}

    def run_ppo(flags, folder):
        asked["ppo"] = " ".join(flags)
        lines = [{"step": step, "eval/accuracy": 0.1 * step} for step in (0, 2)]
        steps = [{"time/step": 5.0, "time/evaluate": 2.0}, {"time/step": 4.0}]
        steps = [step | {"rollout/response_tokens": 8.0, "rollout/score": 0.5} for step in steps]
        return Metrics([*lines, *steps], steps, {"time/startup": 9.0})

    def train(_, options, seed, train, held_out, folder):
        asked["trl"] = (seed, len(train.read_text().splitlines()), len(held_out.read_text().splitlines()))
        return {"curve": []}

    monkeypatch.setattr(beside_trl, "run_ppo", run_ppo)
    monkeypatch.setattr(beside_trl, "run_trl", lambda *args: train(None, *args))
    _, report = bench(
        "beside_trl", "--model", "m", "--seeds", "7", "--prompts", "2", "--held_out", "5", "--", "--x", "1"
    )
    [found] = report["rlhf"].values()
    assert found["curve"] == [
        {"step": 0, "seconds": 0, "accuracy": 0.0},
        {"step": 2, "seconds": 7.0, "accuracy": pytest.approx(0.2)},
    ]
    assert found["step_seconds"] == [3.0, 4.0] and found["seconds_startup"] == 9.0
    assert found["train_accuracy"] == [0.5, 0.5] and "--lr_warmup_ratio 0" in asked["ppo"]
    assert asked["trl"] == (7, 4000, 5) and report["trl"]["7"] == {"curve": []}
    assert "--rollout_batch_size 2 --n_samples_per_prompt 8 --train_batch_size 16" in asked["ppo"]
    assert "--seed 7" in asked["ppo"] and asked["ppo"].endswith("--x 1")


def test_held_out_answers_of_trl_come_from_its_engine_with_the_current_weights(monkeypatch):
    clock = iter([0.0, 3.0, 10.0, 11.5, 20.0, 24.0, 24.0])
    monkeypatch.setattr(beside_trl, "time", SimpleNamespace(perf_counter=lambda: next(clock)))
    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(SamplingParams=lambda **settings: settings))
    calls = []

    def chat(chats, settings, **_):
        assert settings == {"temperature": 0, "max_tokens": 64}
        calls.append("chat")
        return [SimpleNamespace(outputs=[SimpleNamespace(text=f" {each[0]['content']} ")]) for each in chats]

    generation = SimpleNamespace(sync_weights=lambda: calls.append("sync"), llm=SimpleNamespace(chat=chat))
    rules = SimpleNamespace(met=lambda text, label: [True, text == label])
    rows = [{"input": "a", "label": "a"}, {"input": "b", "label": "c"}]
    meter = beside_trl._Meter(SimpleNamespace(vllm_generation=generation), rows, rules, eval_steps=2)
    meter.start()
    meter.end_step(1)
    meter.end_step(2)
    assert calls == ["sync", "chat"] and meter.step_seconds == [3.0, 1.5]
    assert meter.curve == [{"step": 2, "seconds": 4.5, "accuracy": 0.5}] and meter.evaluation_seconds == [4.0]


@pytest.fixture
def openrlhf(tmp_path, monkeypatch):
    """Return a function that runs a program in place of OpenRLHF's command, with a GPU that is not there."""
    package = tmp_path / "installed/openrlhf"
    (package / "cli").mkdir(parents=True)
    (package / "utils/deepspeed").mkdir(parents=True)
    (package / "utils/deepspeed/deepspeed.py").write_text(OPTIMIZER)
    (package / "__init__.py").touch()
    info = tmp_path / "installed/openrlhf-0.11.2.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: openrlhf\nVersion: 0.11.2\n")
    monkeypatch.syspath_prepend(str(tmp_path / "installed"))
    monkeypatch.setattr(beside_openrlhf, "local_gpus", lambda: [0])

    def run_program(program, **options):
        shutil.rmtree(tmp_path / "run", ignore_errors=True)
        (package / "cli/train_ppo_ray.py").write_text(program)
        (tmp_path / "train.jsonl").write_text("{}\n" * 8)
        (tmp_path / "held_out.jsonl").write_text(json.dumps({"input": "b", "label": LABEL}) + "\n")
        sizes = {"model": Path("m"), "prompts": 2, "steps": 4, "eval_steps": 2, "only": None, "flags": ["--x", "1"]}
        limits = {"openrlhf_seconds": 600.0, "openrlhf_memory": 0.25, "openrlhf_batch": 128}
        files = (tmp_path / "train.jsonl", tmp_path / "held_out.jsonl", tmp_path / "run")
        return beside_openrlhf.run_openrlhf(Namespace(**{**sizes, **limits, **options}), 7, *files)

    return run_program


def test_curve_is_that_of_openrlhfs_log_and_ends_with_the_last_evaluation(openrlhf, tmp_path):
    found = openrlhf(PROGRAM + "evaluation(4, 0.75); time.sleep(600)")
    assert found["curve"] == [
        {"step": 2, "seconds": pytest.approx(0.35), "accuracy": 0.5},
        {"step": 4, "seconds": pytest.approx(1.35), "accuracy": 0.75},
    ]
    assert found["step_seconds"] == [0.25, 0.1, 0.5, 0.5] and found["response_tokens"] == [20.5] * 4
    assert found["train_accuracy"] == [0.125, 0.25, 0.375, 0.5]
    assert found["median"] == {"timing/broadcast": 1.5, "timing/step_total": pytest.approx(0.375)}
    assert len(found["wall_seconds"]) == 4 and found["wall_seconds"][0] > 0.2 and found["version"] == "0.11.2"
    assert (
        "--train.seed 7" in found["flags"] and "--x" not in found["flags"] and "--data.max_samples 8" in found["flags"]
    )
    assert "--rollout.batch_size 2 --rollout.n_samples_per_prompt 8" in found["flags"]
    reduction = ALGORITHMS["group_norm"].reduction.replace("_", "-")
    assert f"--actor.loss_agg_mode {reduction}" in found["flags"] and "dynamic" not in found["flags"]
    assert "--rollout.micro_batch_size 16" in found["flags"] and "--train.micro_batch_size 16" in found["flags"]
    assert [json.loads(row["label"])["held_out"] for row in read_lines(tmp_path / "run/held_out.jsonl")] == [True]
    changed = (tmp_path / "run/site/openrlhf/utils/deepspeed/deepspeed.py").read_text()
    assert '"torch_adam": True, "fused": True,' in changed and '"lr": 1e-3' in changed


def test_openrlhf_ends_after_its_limit_and_a_run_that_ends_early_is_an_error(openrlhf):
    found = openrlhf(PROGRAM + "time.sleep(600)", openrlhf_seconds=2.0, only="openrlhf", openrlhf_batch=4)
    assert len(found["curve"]) == 1 and len(found["step_seconds"]) == 4 and found["flags"].endswith(" --x 1")
    assert "--train.micro_batch_size 4" in found["flags"]
    with pytest.raises(subprocess.CalledProcessError, match="3"):
        openrlhf(PROGRAM + "sys.exit(3)")
    with pytest.raises(UsageError, match="5 steps take 10 prompts, and there are 8"):
        openrlhf(PROGRAM, steps=5)


def test_another_openrlhf_or_none_is_refused(openrlhf, monkeypatch, tmp_path):
    (tmp_path / "installed/openrlhf/utils/deepspeed/deepspeed.py").write_text("pass\n")
    with pytest.raises(UsageError, match="this OpenRLHF has another"):
        openrlhf(PROGRAM)
    monkeypatch.setattr(beside_openrlhf.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UsageError, match="not installed"):
        beside_openrlhf.write_packages(tmp_path / "site")
    monkeypatch.setattr(beside_openrlhf, "local_gpus", list)
    with pytest.raises(UsageError, match="GPU"):
        openrlhf(PROGRAM)


def test_reward_takes_special_tokens_off_and_asks_for_all_of_a_held_out_prompt():
    held_out = json.dumps(json.loads(LABEL) | {"held_out": True})
    prompt = "<|im_start|>user\nWrite.<|im_end|>\n"
    for text, label, expected in (
        ("Rivers run today.<|im_end|>", LABEL, (4.0, 0.0)),
        ("Rivers run today.<|im_end|>", held_out, (0.0, 0.0)),
        (" The rivers run slowly and are very cold today.<|im_end|>", held_out, (1.0, 1.0)),
        (" The rivers run slowly and are very cold today.", LABEL, (6.0, 1.0)),
    ):
        scored = reward.reward_func([prompt + text], [prompt], [label])
        assert (scored["rewards"], scored["scores"]) == expected


def test_stand_in_for_flash_attn_moves_tokens_and_takes_log_probs_as_plain_indexing_does():
    mask = torch.tensor([[0, 1, 1], [1, 1, 1], [0, 0, 1]])
    rows = torch.arange(9.0).reshape(3, 3, 1)
    tokens, indices, bounds, longest, counts = flash_attention.unpad_input(rows, mask)
    assert tokens.flatten().tolist() == [1, 2, 3, 4, 5, 8] and bounds.tolist() == [0, 2, 5, 6]
    assert (bounds.dtype, longest, counts.tolist()) == (torch.int32, 3, [2, 3, 1])
    assert torch.equal(flash_attention.pad_input(tokens, indices, 3, 3), rows * mask[..., None])
    assert torch.equal(flash_attention.index_first_axis(rows.flatten(0, 1), indices), tokens)
    logits, labels = torch.randn(4, 5, dtype=torch.float64), torch.tensor([0, 4, 2, 2])
    expected = [row.exp().sum().log() - row[label] for row, label in zip(logits, labels, strict=True)]
    torch.testing.assert_close(flash_attention.cross_entropy_loss(logits, labels)[0], torch.stack(expected))
