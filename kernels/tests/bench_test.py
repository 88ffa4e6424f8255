"""The benchmarks run without a GPU at a tiny size, check what they time, and find what is wrong."""

import json
import re
import sys
from importlib import import_module
from pathlib import Path

import pytest
import torch

import rlhf_kernels

BENCH = Path(__file__).parents[1] / "bench"


@pytest.fixture
def run(monkeypatch, tmp_path, capsys):
    """Return a function that runs a benchmark in this process, which has imported the libraries.

    It returns the report, and what was printed.
    """
    if torch.cuda.is_available():
        pytest.skip("would measure")
    monkeypatch.syspath_prepend(str(BENCH))

    def run(name, *options):
        out = tmp_path / "report.json"
        words = [str(BENCH / f"{name}.py"), "--seconds", "0", "--out", str(out), *options]
        monkeypatch.setattr(sys, "argv", words)
        import_module(name).main()
        return json.loads(out.read_text()), capsys.readouterr().out

    return run


@pytest.fixture
def linear(monkeypatch):
    """The module, as the script sees itself."""
    monkeypatch.syspath_prepend(str(BENCH))
    return import_module("linear")


def status(name):
    """What a report says of an operator: ok where the package has it."""
    return "ok" if name in rlhf_kernels.__all__ else "skipped"


def test_linear_bench_runs_ours_and_torch_and_says_why_others_are_missing(run):
    report, printed = run("linear")
    (size,) = report["sizes"]
    assert report["command"].startswith("python kernels/bench/linear.py --seconds 0")
    assert torch.__version__.startswith(report["environment"]["versions"]["torch"])  # without "+cu130"
    assert size["products"]["ms"].keys() == {"1", "3", "4"}
    results = {name: {key: passed["status"] for key, passed in two.items()} for name, two in size["contenders"].items()}
    assert results["torch"] == {"forward": "ok", "step": "ok"}
    assert results["liger"] == results["quack"] == {"forward": "skipped", "step": "skipped"}
    assert results["linear_policy_loss"] == {"step": status("linear_policy_loss")}
    assert results["logprob_kl"] == results["logprob_kl, full"] == {"forward": status("logprob_kl")}
    assert results["linear_token_logprobs"] == dict.fromkeys(("forward", "step"), status("linear_token_logprobs"))
    for name in set(rlhf_kernels.__all__) & {"linear_token_logprobs", "linear_policy_loss"}:
        step = size["contenders"][name]["step"]
        assert step["small_gradient_error"] < 1e-5 and step["over_best_peer"] > 0
    assert "| liger |" in printed and "needs CUDA" in printed


def test_elementwise_bench_runs_every_operator(run):
    report, printed = run("elementwise", "--quick")
    operators = report["operators"]
    assert {name.partition(",")[0] for name in operators} == {
        *("token_logprobs", "packed_policy_loss", "segmented_scan", "packed_gae", "accumulate_", "adamw_bf16_moments_")
    }
    for name, result in operators.items():
        assert result["status"] == status(name.partition(",")[0]), result
        assert result["status"] == "skipped" or result["share_of_copy"] > 0
    assert "| packed_gae |" in printed


def test_sampling_bench_checks_and_times_our_draw_and_torchs(run):
    report, printed = run("sampling")
    (size,) = report["sizes"]
    assert {name: result["status"] for name, result in size["contenders"].items()} == {
        "product alone": "ok",
        "linear_sample": status("linear_sample"),
        "torch": "ok",
    }
    assert size["contenders"]["torch"]["logprob_error"] < 1e-5
    assert "| 4 | 16 | 150 |" in printed


def plain(inputs, scale=1.0, floor=0.0):
    """The loss, its gradient off by a factor, or without what is small in it."""
    logits = inputs.hidden @ inputs.weight.T
    if logits.requires_grad:
        logits.register_hook(lambda grad: scale * grad * (grad.abs() >= floor))
    logprobs = logits.log_softmax(dim=-1)
    return -(logprobs.gather(1, inputs.ids.clamp(min=0)[:, None])[:, 0] * inputs.mask).sum() / inputs.count


@pytest.mark.parametrize(
    ("options", "ours", "status"),
    [
        ({}, True, "ok"),
        ({"scale": 1.05}, True, "wrong"),
        ({"scale": 1.2}, False, "wrong"),
        ({"scale": float("nan")}, False, "wrong"),
        ({"floor": 1e-3}, True, "wrong"),
        ({"floor": 1e-3}, False, "ok"),
    ],
)
def test_linear_bench_finds_wrong_gradients_and_of_ours_also_small_ones(linear, options, ours, status):
    sets = linear.draw(96, 256, 5003)
    contender = linear.Contender(lambda: lambda inputs: plain(inputs, **options), ours=ours)
    result = linear.attempt(lambda: linear.measure(contender, sets, 0.0, backward=True))
    assert result["status"] == status, result
    assert ("ms" in result) == (status == "ok")


def test_linear_bench_finds_a_wrong_loss(linear):
    sets = linear.draw(96, 32, 101)
    contender = linear.Contender(lambda: lambda inputs: plain(inputs) + 0.1)
    result = linear.attempt(lambda: linear.measure(contender, sets, 0.0, backward=False))
    error = float(re.fullmatch(r".*loss_error ([0-9.]+).*", result["note"])[1])
    # A GPU rounds both losses to bfloat16.
    assert result["status"] == "wrong" and error == pytest.approx(0.1, rel=0.25)


def test_bench_one_failure_is_a_note(linear):
    def fail():
        raise RuntimeError("first line\nsecond line")

    assert linear.attempt(fail) == {"status": "failed", "note": "RuntimeError: first line"}
