"""vLLM warms up for the requests that are expected, and as it likes once an engine is built."""

import json
import pickle

import pytest

pytest.importorskip("vllm")

from vllm.config import VllmConfig
from vllm.model_executor.warmup import kernel_warmup
from vllm.sampling_params import SamplingParams as VllmSamplingParams
from vllm.v1.worker.cpu_worker import CPUWorker
from vllm.v1.worker.worker_base import CompilationTimes

from rlhf_models.testing import tiny_model_dir
from rlhf_rollout.engines.spec import EngineSpec
from rlhf_rollout.engines.vllm.core import build_core, prepare_environment
from rlhf_rollout.engines.vllm.warm_up import WarmUp
from rlhf_rollout.protocols import SamplingParams

ROUTERS = "_warmup_ll_bf16_router_gemm"


def test_the_warm_up_samples_as_requests_will_and_asks_for_the_log_prob_of_the_sampled_token_alone():
    sampling = SamplingParams(num_samples=8, max_tokens=33, min_tokens=4, temperature=0.7, top_p=0.9, top_k=20)
    with WarmUp(sampling, has_experts=False).limited():
        found = VllmSamplingParams.for_sampler_warmup()
    assert (found.temperature, found.top_p, found.top_k, found.max_tokens, found.min_tokens) == (0.7, 0.9, 20, 33, 4)
    assert (found.logprobs, found.prompt_logprobs, found.logit_bias) == (0, None, None)
    assert (found.repetition_penalty, found.presence_penalty, found.frequency_penalty) == (1.0, 0.0, 0.0)


def test_vllm_warms_up_by_itself_without_expected_requests_and_after_a_build_that_failed():
    own = VllmSamplingParams.for_sampler_warmup()
    assert own.repetition_penalty != 1.0  # or the comparisons below show nothing
    with WarmUp(None, has_experts=False).limited():
        assert VllmSamplingParams.for_sampler_warmup() == own
    with pytest.raises(ZeroDivisionError), WarmUp(SamplingParams(), has_experts=False).limited():
        1 / (VllmSamplingParams.for_sampler_warmup() == own)
    assert VllmSamplingParams.for_sampler_warmup() == own


@pytest.mark.parametrize(
    ("has_experts", "compile_kernels", "is_left_out"),
    [
        (False, lambda: "compiled", True),
        (True, lambda: "compiled", False),
        (False, lambda model: "compiled", False),  # as in versions that look at the model
    ],
)
def test_kernels_of_routers_are_left_out_for_a_model_without_experts(
    has_experts, compile_kernels, is_left_out, monkeypatch
):
    monkeypatch.setattr(kernel_warmup, ROUTERS, compile_kernels, raising=False)
    with WarmUp(None, has_experts=has_experts).limited():
        assert (getattr(kernel_warmup, ROUTERS) is not compile_kernels) == is_left_out
        if is_left_out:
            assert getattr(kernel_warmup, ROUTERS)() is None
    assert getattr(kernel_warmup, ROUTERS) is compile_kernels


@pytest.mark.parametrize("sampling", [None, SamplingParams(temperature=0.5, stop_token_ids=(3, 4))])
def test_a_worker_in_another_process_warms_up_as_the_engine_says(sampling):
    wanted = WarmUp(sampling, has_experts=True)
    config = pickle.loads(pickle.dumps(VllmConfig(additional_config=wanted.config())))
    assert WarmUp.of(config) == wanted


def test_an_engine_asks_for_its_own_worker_which_limits_the_warm_up(tmp_path, monkeypatch):
    """The worker is in this process here, so that the test sees with what it warms up."""
    model, found = tiny_model_dir(tmp_path / "model"), []
    monkeypatch.setattr(
        CPUWorker,
        "compile_or_warm_up_model",
        lambda self: found.append(VllmSamplingParams.for_sampler_warmup()) or CompilationTimes(0.0, 0.0),
    )
    spec = EngineSpec(model=str(model), max_model_len=32, seed=0, expected_sampling=SamplingParams(temperature=0.25))
    config = json.loads((model / "config.json").read_text())
    prepare_environment()
    core = build_core(spec, model, config, on_gpu=False)
    try:
        assert [params.temperature for params in found] == [0.25]
        assert VllmSamplingParams.for_sampler_warmup().temperature != 0.25
    finally:
        core.shutdown()
