"""Variants are read and kept apart when one fails; engines share prompts; the time of a step is divided into parts."""

import argparse
import json
import math

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from models import Place
from rlhf_data.errors import ConfigError
from rlhf_models.testing import tiny_model_dir
from workloads.speed import generation


def test_variant_has_typed_settings():
    words = ["v2", "VLLM_USE_V2_MODEL_RUNNER=1", "mps=true", "block_size=64", "kv_cache_dtype=fp8"]
    settings = {"VLLM_USE_V2_MODEL_RUNNER": 1, "mps": True, "block_size": 64, "kv_cache_dtype": "fp8"}
    assert generation.parse_variant(words) == ("v2", settings)
    assert generation.parse_variant(["base"]) == ("base", {})
    with pytest.raises(ConfigError, match="KEY=VALUE"):
        generation.parse_variant(["base", "fast"])


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
