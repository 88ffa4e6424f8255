"""What the worker of an engine changes in vLLM: masked ids, the warm-up, the KV cache, and the modules of a model."""

import contextlib
import json
from types import SimpleNamespace

import pytest

pytest.importorskip("vllm")

import torch
from torch import nn
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.model_executor.layers.logits_processor import LogitsProcessor
from vllm.model_executor.warmup import kernel_warmup
from vllm.sampling_params import SamplingParams as VllmSamplingParams
from vllm.v1.worker.cpu_worker import CPUWorker
from vllm.v1.worker.worker_base import CompilationTimes

from families import write_tiny
from rlhf_data.errors import EngineError
from rlhf_models.testing import tiny_model_dir
from rlhf_rollout.engines.model_files import read_config
from rlhf_rollout.engines.spec import EngineSpec
from rlhf_rollout.engines.vllm.core import build_core, prepare_environment, worker_settings
from rlhf_rollout.engines.vllm.worker import complete_logits, limited_warm_up, mask_logits
from rlhf_rollout.protocols import SamplingParams

ROUTERS = "_warmup_ll_bf16_router_gemm"


class Model(nn.Module):
    """Has vLLM's layer of logits for a vocabulary of 8, which returns what it is given."""

    def __init__(self):
        super().__init__()
        with set_current_vllm_config(VllmConfig()):
            self.logits_processor = LogitsProcessor(8, logits_as_input=True)

    def compute_logits(self, logits):
        return self.logits_processor(None, logits)


def test_masked_ids_get_no_probability_and_the_others_share_all_of_it():
    model = Model()
    mask_logits(model, [(1, 3), (6, 8)])
    logits = torch.linspace(-2, 2, 16).view(2, 8)
    expected = torch.zeros(2, 8, dtype=torch.float64)
    kept = [0, 3, 4, 5]
    expected[:, kept] = logits[:, kept].double().exp()
    expected /= expected.sum(1, keepdim=True)
    torch.testing.assert_close(model.compute_logits(logits.clone()).double().softmax(1), expected)
    assert model.compute_logits(None) is None  # in a worker whose logits another one gathers


def test_an_engine_that_masks_nothing_adds_nothing_to_its_model():
    model = Model()
    mask_logits(model, [])
    assert not model.logits_processor._forward_hooks
    mask_logits(nn.Linear(2, 2), [])


def test_a_model_without_vllms_layer_of_logits_is_refused():
    with pytest.raises(EngineError, match=r"Linear of vLLM has no layer in which ids .* can be masked\n\nhint: "):
        mask_logits(nn.Linear(2, 2), [(1, 3)])


@pytest.mark.parametrize(
    ("name", "own_cap", "cap"),
    [
        ("TransformersForCausalLM", None, 2.0),
        ("TransformersMoEForCausalLM", 5.0, 5.0),  # as in versions of vLLM that have it
        ("LlamaForCausalLM", None, None),
    ],
)
def test_the_backend_for_models_of_transformers_caps_logits(name: str, own_cap: float | None, cap: float | None):
    model = type(name, (Model,), {})()
    model.logits_processor.soft_cap = own_cap
    complete_logits(model, SimpleNamespace(final_logit_softcapping=2.0))
    logits = torch.linspace(-3, 3, 16).view(2, 8)
    expected = logits if cap is None else cap * (logits / cap).tanh()
    torch.testing.assert_close(model.compute_logits(logits.clone()), expected)


def test_a_model_without_a_cap_and_one_without_a_layer_of_logits_stay_as_they_are():
    model = type("TransformersForCausalLM", (Model,), {})()
    complete_logits(model, SimpleNamespace())
    assert model.logits_processor.soft_cap is None
    complete_logits(type("TransformersForCausalLM", (nn.Linear,), {})(2, 2), SimpleNamespace())


class Head(nn.Module):
    """Stands for vLLM's layer of logits, which wants a group of processes."""

    def forward(self, layer: nn.Linear, hidden_states: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        return nn.functional.linear(hidden_states, layer.weight, bias)


class PhiMoEForCausalLM(nn.Module):
    """As vLLM's class of this name: it has a bias of the LM head that it does not add."""

    def __init__(self):
        super().__init__()
        self.lm_head = nn.Linear(4, 8)
        self.logits_processor = Head()

    def compute_logits(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return self.logits_processor(self.lm_head, hidden_states)


@pytest.mark.parametrize("has_bias", [True, False])
def test_the_logits_of_a_phimoe_have_the_bias_of_its_head(has_bias: bool):
    model = PhiMoEForCausalLM()
    complete_logits(model, SimpleNamespace(lm_head_bias=has_bias))
    hidden = torch.randn(3, 4, generator=torch.Generator().manual_seed(1))
    model.lm_head.bias.data += 1.0  # an update
    exact = hidden.double() @ model.lm_head.weight.double().T + model.lm_head.bias.double() * has_bias
    torch.testing.assert_close(model.compute_logits(hidden).double(), exact, atol=1e-6, rtol=1e-6)


def test_the_warm_up_samples_as_requests_will_and_asks_for_the_log_prob_of_the_sampled_token_alone():
    sampling = SamplingParams(num_samples=8, max_tokens=33, min_tokens=4, temperature=0.7, top_p=0.9, top_k=20)
    with limited_warm_up(sampling, has_experts=False):
        found = VllmSamplingParams.for_sampler_warmup()
    assert (found.temperature, found.top_p, found.top_k, found.max_tokens, found.min_tokens) == (0.7, 0.9, 20, 33, 4)
    assert (found.logprobs, found.prompt_logprobs, found.logit_bias) == (0, None, None)
    assert (found.repetition_penalty, found.presence_penalty, found.frequency_penalty) == (1.0, 0.0, 0.0)


def test_vllm_warms_up_by_itself_without_expected_requests_and_after_a_build_that_failed():
    own = VllmSamplingParams.for_sampler_warmup()
    assert own.repetition_penalty != 1.0  # or the comparisons below show nothing
    with limited_warm_up(None, has_experts=False):
        assert VllmSamplingParams.for_sampler_warmup() == own
    with pytest.raises(ZeroDivisionError), limited_warm_up(SamplingParams(), has_experts=False):
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
    with limited_warm_up(None, has_experts=has_experts):
        assert (getattr(kernel_warmup, ROUTERS) is not compile_kernels) == is_left_out
        if is_left_out:
            assert getattr(kernel_warmup, ROUTERS)() is None
    assert getattr(kernel_warmup, ROUTERS) is compile_kernels


@pytest.mark.parametrize("sampling", [None, SamplingParams(temperature=0.5, stop_token_ids=(3, 4))])
def test_settings_of_workers_are_plain_data_of_which_the_sampling_can_be_made_again(sampling):
    settings = worker_settings(EngineSpec(model="m", expected_sampling=sampling, masked_ids=(range(2, 4),)), {})
    json.dumps(settings)  # vLLM hashes it
    found = settings["expected_sampling"]
    assert (SamplingParams(**found) if sampling else found) == sampling
    assert (settings["masked_ids"], settings["has_experts"]) == ([[2, 4]], False)
    assert worker_settings(EngineSpec(model="m"), {"num_experts": 8})["has_experts"]


@contextlib.contextmanager
def built(model, **options):
    """Yield the core of an engine, whose worker is in this process."""
    prepare_environment()
    spec = EngineSpec(model=str(model), seed=0, **options)
    core = build_core(spec, model, read_config(model), on_gpu=False)
    try:
        yield core.engine_core
    finally:
        core.shutdown()


def test_an_engine_asks_for_its_own_worker_which_limits_the_warm_up_and_the_kv_cache(tmp_path, monkeypatch):
    """A block of 128 tokens has 16 KiB: keys and values of 2 layers with 2 heads of 8 numbers in bfloat16."""
    found = []
    monkeypatch.setattr(
        CPUWorker,
        "compile_or_warm_up_model",
        lambda self: found.append(VllmSamplingParams.for_sampler_warmup()) or CompilationTimes(0.0, 0.0),
    )
    sizes = {"num_hidden_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2}
    model = tiny_model_dir(tmp_path / "model", **sizes)
    options = {"dtype": "bfloat16", "max_model_len": 300, "max_num_seqs": 2}
    with built(model, expected_sampling=SamplingParams(temperature=0.25), **options) as core:
        assert [params.temperature for params in found] == [0.25]
        assert VllmSamplingParams.for_sampler_warmup().temperature != 0.25
        cache = core.vllm_config.cache_config
        # As many blocks as four full sequences need for each of the two that run.
        assert (cache.block_size, cache.num_gpu_blocks) == (128, 4 * 2 * 3)


def test_an_engine_of_a_model_with_images_and_sounds_leaves_out_what_reads_them(tmp_path):
    """The folder has no files of a processor, which vLLM would need for them."""
    # vLLM imports the class; in some versions of transformers, such as 5.19, that needs torchvision.
    pytest.importorskip("transformers.models.gemma4.processing_gemma4")
    write_tiny("gemma4", tmp_path)
    with built(tmp_path, dtype="bfloat16", max_model_len=64, max_num_seqs=2) as core:
        model = core.model_executor.driver_worker.worker.model_runner.model
        assert {name.partition(".")[0] for name, _ in model.named_parameters()} == {"language_model"}
