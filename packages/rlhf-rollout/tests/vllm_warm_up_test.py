"""vLLM warms up for the requests that are expected, and as it likes once an engine is built."""

import pytest

pytest.importorskip("vllm")

from vllm.model_executor.warmup import kernel_warmup
from vllm.sampling_params import SamplingParams as VllmSamplingParams

from rlhf_rollout.engines.vllm.warm_up import limited_warm_up
from rlhf_rollout.protocols import SamplingParams

DENSE = {"model_type": "qwen2", "num_hidden_layers": 2}
EXPERTS = DENSE | {"num_experts": 4}
ROUTERS = "_warmup_ll_bf16_router_gemm"


def test_the_warm_up_samples_as_requests_will_and_asks_for_the_log_prob_of_the_sampled_token_alone():
    sampling = SamplingParams(num_samples=8, max_tokens=33, min_tokens=4, temperature=0.7, top_p=0.9, top_k=20)
    with limited_warm_up(sampling, DENSE):
        found = VllmSamplingParams.for_sampler_warmup()
    assert (found.temperature, found.top_p, found.top_k, found.max_tokens, found.min_tokens) == (0.7, 0.9, 20, 33, 4)
    assert (found.logprobs, found.prompt_logprobs, found.logit_bias) == (0, None, None)
    assert (found.repetition_penalty, found.presence_penalty, found.frequency_penalty) == (1.0, 0.0, 0.0)


def test_vllm_warms_up_by_itself_without_expected_requests_and_after_a_build_that_failed():
    own = VllmSamplingParams.for_sampler_warmup()
    assert own.repetition_penalty != 1.0  # or the comparisons below show nothing
    with limited_warm_up(None, DENSE):
        assert VllmSamplingParams.for_sampler_warmup() == own
    with pytest.raises(ZeroDivisionError), limited_warm_up(SamplingParams(), DENSE):
        1 / (VllmSamplingParams.for_sampler_warmup() == own)
    assert VllmSamplingParams.for_sampler_warmup() == own


@pytest.mark.parametrize(
    ("config", "compile_kernels", "is_left_out"),
    [
        (DENSE, lambda: "compiled", True),
        (EXPERTS, lambda: "compiled", False),
        ({"text_config": EXPERTS}, lambda: "compiled", False),
        (DENSE, lambda model: "compiled", False),  # as in versions that look at the model
    ],
)
def test_kernels_of_routers_are_left_out_for_a_model_without_experts(config, compile_kernels, is_left_out, monkeypatch):
    monkeypatch.setattr(kernel_warmup, ROUTERS, compile_kernels, raising=False)
    with limited_warm_up(None, config):
        assert (getattr(kernel_warmup, ROUTERS) is not compile_kernels) == is_left_out
        if is_left_out:
            assert getattr(kernel_warmup, ROUTERS)() is None
    assert getattr(kernel_warmup, ROUTERS) is compile_kernels
