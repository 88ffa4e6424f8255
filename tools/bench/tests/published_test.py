"""Benchmarks of what published models learn: which commands they run, on which rows, and what they report."""

import gzip
import json
import sys
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import pytest

from runner import Metrics
from workloads.learning import beside_trl, preferences, published

REWARDS = {"sft": (0.0, 1.0), "dpo": (0.5, 2.0), "ppo0.1": (3.0, 4.0)}  # of the reward model and of the judge


def test_a_published_model_is_fine_tuned_first_on_gsm8k_and_measured_by_seed(bench, monkeypatch):
    asked = []

    def run_ppo(flags, folder):
        asked.append(" ".join(map(str, flags)))
        seed = int(folder.name.removeprefix("seed"))
        lines = [{"step": 0, "eval/accuracy": 0.1}, {"step": 2, "eval/accuracy": 0.1 * seed}]
        steps = [{"time/step": 2.0, "rollout/reward": 0.5, "mismatch/logprob_gap_max": 0.01 * seed}]
        final = {"eval/accuracy_before": 0.1, "eval/accuracy_after": 0.1 * seed, "time/total": 9.0}
        return Metrics([*lines, *steps, final], steps, final)

    monkeypatch.setattr(published, "run_ppo_in_turn", run_ppo)
    _, report = bench(
        "published", "--model", "m", "--seeds", "3", "4", "--prompts", "2", "--", "--vllm_max_num_seqs", "8"
    )
    assert report["mean_after"] == pytest.approx(0.35) and report["worst_after"] == pytest.approx(0.3)
    assert report["runs"][0]["accuracy_by_step"] == {"0": 0.1, "2": pytest.approx(0.3)}
    assert report["runs"][1]["curves"]["rollout/reward"] == [0.5]
    assert all("--pretrain m" in words and "--rollout_batch_size 2 --train_batch_size 16" in words for words in asked)
    assert "examples/instructions.py" in asked[0] and asked[1].endswith("--vllm_max_num_seqs 8 --seed 4")

    commands = []
    monkeypatch.setattr(published, "subprocess", SimpleNamespace(run=lambda words, **_: commands.append(words)))
    asked.clear()
    bench("published", "--model", "m", "--task", "gsm8k", "--data", "rows", "--seeds", "5")
    [words] = commands
    assert words[3:6] == ["sft", "--pretrain", "m"] and "rows/train.jsonl" in words
    assert (
        "/sft5/model" in asked[0] and "--eval_data rows/test.jsonl" in asked[0] and "--remote_rm_url math" in asked[0]
    )


def test_seconds_beside_trl_are_those_of_steps_without_starts_and_evaluations(bench, monkeypatch):
    asked = {}

    def run_ppo(flags, folder):
        asked["ppo"] = " ".join(flags)
        lines = [{"step": step, "eval/accuracy": 0.1 * step} for step in (0, 2)]
        steps = [{"time/step": 5.0, "time/evaluate": 2.0}, {"time/step": 4.0}]
        steps = [step | {"rollout/response_tokens": 8.0} for step in steps]
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


def test_policies_learn_from_the_first_pairs_and_are_judged_on_the_last(bench, monkeypatch, tmp_path):
    commands, ppo, rows = [], [], {}

    def rlhf(words, **_):
        words = list(map(str, words[3:]))
        flags = dict(pairwise(words))
        commands.append((words[0], flags))
        for name in ("--dataset", "--eval_dataset", "--prompt_data"):
            if name in flags:
                rows[name] = [json.loads(line)["chosen"] for line in Path(flags[name]).read_text().splitlines()]
        if words[0] == "generate":
            reward, judge = REWARDS[Path(flags["--pretrain"]).parent.name]
            lines = [
                {"source_rewards": [reward - 1, judge], "text": "four", "finish_reason": "stop"},
                {"source_rewards": [reward + 1, judge], "text": "longer", "finish_reason": "length"},
            ]
            out = Path(flags["--output_path"])
        else:
            lines = [{"eval/accuracy": 0.5}, {"eval/accuracy": 0.7 if "judge" in flags["--save_path"] else 0.8}, {}]
            out = Path(flags["--save_path"]) / "metrics.jsonl"
            out.parent.mkdir()
        out.write_text("".join(json.dumps(line) + "\n" for line in lines))

    def run_ppo(flags, folder):
        ppo.append(" ".join(map(str, flags)))
        return Metrics([], [{"kl/reference": 0.0, "loss/policy": 3.0}, {"kl/reference": 0.25, "loss/policy": 2.0}], {})

    monkeypatch.setattr(preferences, "subprocess", SimpleNamespace(run=rlhf))
    monkeypatch.setattr(preferences, "run_ppo_in_turn", run_ppo)
    with gzip.open(tmp_path / "pairs.gz", "wt", encoding="utf-8") as out:
        out.writelines(json.dumps({"chosen": number, "rejected": -number}) + "\n" for number in range(1, 6))
    inputs = [
        "--model",
        "m",
        "--pairs",
        str(tmp_path / "pairs.gz"),
        "--held_out",
        "2",
        "--kl",
        "0.1",
        "--seeds",
        "4",
        "5",
    ]
    _, report = bench("preferences", *inputs, "--", "--vllm_max_num_seqs", "8")

    assert rows == {"--dataset": [1, 2, 3], "--eval_dataset": [4, 5], "--prompt_data": [4, 5]}
    trained = [
        (command, Path(flags["--save_path"]).name, flags["--seed"], "/".join(flags["--pretrain"].split("/")[-3:]))
        for command, flags in commands
        if command != "generate"
    ]
    assert sorted(trained) == [
        ("dpo", "dpo", "4", "seed4/sft/model"),
        ("dpo", "dpo", "5", "seed5/sft/model"),
        ("rm", "judge", "104", "seed4/sft/model"),
        ("rm", "judge", "105", "seed5/sft/model"),
        ("rm", "reward", "4", "seed4/sft/model"),
        ("rm", "reward", "5", "seed5/sft/model"),
        ("sft", "sft", "4", "m"),
        ("sft", "sft", "5", "m"),
    ]
    assert "--init_kl_coef 0.1" in ppo[0] and "--vllm_max_num_seqs 8" in ppo[0] and ppo[0].count("/reward/model") == 2
    assert "--seed 4" in ppo[0] and "--seed 5" in ppo[1]
    assert [found["seed"] for found in report["runs"]] == [4, 5]
    for found in report["runs"]:
        assert found["accuracy"] == {"reward": 0.8, "judge": 0.7}
        assert found["curves"] == {"ppo0.1": {"kl/reference": [0.0, 0.25]}}
        policies = found["policies"]
        assert {name: (row["reward"], row["judge"]) for name, row in policies.items()} == REWARDS
        assert all((row["characters"], row["cut"], row["answers"]) == (5, 0.5, 2) for row in policies.values())
