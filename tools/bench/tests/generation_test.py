"""Variants are read and kept apart when one fails; engines share prompts; the time of a step is divided into parts."""

import argparse
import json
import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from models import Place
from rlhf_data.errors import ConfigError, EngineError
from rlhf_models.testing import tiny_model_dir
from workloads.speed import generation, generation_engine


class FakeEngine:
    """Answers as an engine's process does, and notes what it gets in a log that all share."""

    def __init__(self, number, log, *, fails=False):
        self.number = number
        self.log = log
        self.fails = fails
        self.answers = [2.5]  # seconds of its start

    def send(self, task):
        if task == "begin":
            self.log.append(("begin", self.number))
            return
        self.log.append(("task", self.number))
        self.task = task
        figures = {"steps": 3, "milliseconds_per_step": {}, "profile": {} if task["profile"] else None}
        self.answers += [None, {"tokens": 10 * len(task["prompts"])} | figures]

    def receive(self, timeout_s):
        if self.fails:
            raise EngineError("out of memory")
        return self.answers.pop(0)

    def end(self):
        self.log.append(("end", self.number))


def test_variant_has_typed_settings():
    words = ["v2", "VLLM_USE_V2_MODEL_RUNNER=1", "mps=true", "block_size=64", "kv_cache_dtype=fp8"]
    settings = {"VLLM_USE_V2_MODEL_RUNNER": 1, "mps": True, "block_size": 64, "kv_cache_dtype": "fp8"}
    assert generation.parse_variant(words) == ("v2", settings)
    assert generation.parse_variant(["base"]) == ("base", {})
    with pytest.raises(ConfigError, match="KEY=VALUE"):
        generation.parse_variant(["base", "fast"])


def test_engines_share_the_prompts_of_a_round_and_begin_together():
    log = []
    engines = [FakeEngine(number, log) for number in range(3)]
    for engine in engines:
        engine.answers.clear()
    work = generation.Work(prompts=np.arange(7)[:, None], lengths=10 * np.arange(7)[:, None])
    result = generation.run_round(engines, work, 1.0, profile=True)
    assert sorted(np.concatenate([engine.task["prompts"] for engine in engines])[:, 0]) == list(range(7))
    for engine in engines:
        assert np.array_equal(engine.task["lengths"], 10 * engine.task["prompts"])
    assert [len(engine.task["prompts"]) for engine in engines] == [3, 2, 2]
    assert log == [("task", 0), ("task", 1), ("task", 2), ("begin", 0), ("begin", 1), ("begin", 2)]
    assert result["tokens"] == 70


def drawn(mean=None, sigma=None):
    sizes = {"prompts": 500, "samples": 8, "prompt_tokens": 3, "response_tokens": 100}
    options = argparse.Namespace(**sizes, mean_response_tokens=mean, sigma=sigma)
    return generation.Work.drawn(options, 50, np.random.default_rng(0))


def test_lengths_are_full_or_geometric_up_to_the_full_length():
    full, mixed = drawn(), drawn(20.0)
    assert full.prompts.shape == (500, 3) and full.prompts.max() < 50
    assert np.array_equal(full.lengths, np.full((500, 8), 100))
    assert mixed.lengths.min() == 1 and mixed.lengths.max() == 100
    # The mean of a geometric distribution with mean m, cut at n, is m (1 - (1 - 1 / m)^n).
    assert mixed.lengths.mean() == pytest.approx(20 * (1 - (1 - 1 / 20) ** 100), rel=0.03)


def test_logarithms_of_lengths_are_normal_up_to_the_full_length():
    lengths = drawn(20.0, 0.5).lengths.ravel()
    # A log-normal of mean m has the median m exp(-sigma^2 / 2), and 84 % lie below exp(sigma) times as much.
    median = 20 * math.exp(-0.125)
    assert np.median(lengths) == pytest.approx(median, abs=1)  # whole tokens
    assert np.quantile(lengths, 0.8413) == pytest.approx(median * math.exp(0.5), rel=0.05)
    assert lengths.max() <= 100 and np.mean(drawn(20.0, 2.0).lengths == 100) > 0.02


def test_figures_are_medians_of_the_rounds_that_count():
    parts = {"steps": 5, "milliseconds_per_step": {"wait": 1.0}}
    rounds = [{"seconds": seconds, "tokens": 100} | parts for seconds in (4.0, 2.0, 5.0)]
    figures = generation.figures_of(rounds)
    assert figures["seconds"] == 4.0 and figures["tokens_per_second"] == 25.0 and figures["rounds"] == [4.0, 2.0, 5.0]


def test_variant_that_fails_is_reported_beside_the_others(monkeypatch):
    log = []

    def start(settings, number, *_):
        return [FakeEngine(index, log, fails="broken" in settings) for index in range(number)]

    monkeypatch.setattr(generation, "start_engines", start)
    options = argparse.Namespace(engines=[2, 1], samples=2, response_tokens=4, rounds=1, timeout_s=1.0, questions=None)
    variants = {name: {"settings": {name: 1}} for name in ("base", "broken", "later")}
    work = generation.Work(np.zeros((4, 3), int), np.ones((4, 2), int))
    assert len(list(generation.measure_variants(variants, None, lambda: work, options))) == 4
    numbers = {name: list(variant.get("engines", {})) for name, variant in variants.items()}
    assert numbers == {"base": ["1", "2"], "broken": [], "later": ["1", "2"]}
    assert variants["broken"]["error"] == "out of memory"
    assert ["profile" in figures for figures in variants["base"]["engines"].values()] == [True, False]
    assert variants["later"]["seconds_start"] == [2.5, 2.5]
    assert len([entry for entry in log if entry[0] == "end"]) == 8  # the first one ends before the others start


def test_questions_get_the_chat_template_and_long_ones_are_left_out(tmp_path):
    model = tiny_model_dir(tmp_path / "model")
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps({"question": word}) + "\n" for word in ("a", "b" * 40, "c")))
    tokenizer = AutoTokenizer.from_pretrained(model)
    found = generation.read_questions(str(file), model, 30)
    assert [tokenizer.decode(ids) for ids in found] == [
        tokenizer.apply_chat_template([{"role": "user", "content": word}], add_generation_prompt=True, tokenize=False)
        for word in "ac"
    ]
    options = argparse.Namespace(prompts=2, samples=1, response_tokens=5, mean_response_tokens=None)
    work = generation.Work.drawn(options, 512, np.random.default_rng(0), found)
    assert sorted(map(list, work.prompts)) == sorted(map(list, found)) and work.lengths.tolist() == [[5], [5]]


def test_gap_is_the_distance_from_log_probs_of_transformers(tmp_path, monkeypatch):
    monkeypatch.setattr(generation, "place", lambda: Place(torch.device("cpu"), torch.float32))
    model = tiny_model_dir(tmp_path / "model")
    reference = AutoModelForCausalLM.from_pretrained(model).double().requires_grad_(False)
    prompt, tokens = np.array([5, 6, 7]), np.array([8, 9])
    logits = reference(torch.tensor([[5, 6, 7, 8]])).logits[0]
    logprobs = [float(logits[2].log_softmax(-1)[8]) + 0.25, float(logits[3].log_softmax(-1)[9])]
    gap = generation.logprob_gap(model, [(prompt, tokens, np.array(logprobs))])
    assert gap == {"largest": pytest.approx(0.25, abs=1e-4), "mean": pytest.approx(0.125, abs=1e-4), "tokens": 2}


def test_time_of_a_step_outside_its_parts_is_waiting(monkeypatch):
    clock = iter([0.0, 1.0, 1.5, 2.0, 4.0, 10.0, 20.0, 23.0])
    monkeypatch.setattr(generation_engine, "time", SimpleNamespace(perf_counter=lambda: next(clock)))
    parts = SimpleNamespace(schedule=lambda: None, update_from_output=lambda: None)
    executor = SimpleNamespace(execute_model=lambda: None, sample_tokens=lambda: None)
    inner = SimpleNamespace(scheduler=parts, model_executor=executor)
    core = SimpleNamespace(engine_core=inner, get_output=lambda: (parts.schedule(), executor.execute_model()))
    loop = SimpleNamespace(_take_outputs=lambda: None)
    watch = generation_engine.Watch(SimpleNamespace(_loop=loop), core)
    core.get_output()  # 0 to 10, of which schedule takes 0.5 and launch 2
    loop._take_outputs()
    watch.steps *= 2  # as if it had been two steps
    assert watch.milliseconds_per_step() == {"launch": 1000, "schedule": 250, "take_outputs": 1500, "wait": 3750}
