"""vLLM's warm-up before the first request, without kernels that an engine will not run."""

import inspect
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass
from typing import Any

from vllm.sampling_params import SamplingParams as VllmSamplingParams

from rlhf_rollout.protocols import SamplingParams

_NAME = "rlhf_warm_up"  # in vLLM's additional configuration


@dataclass(frozen=True)
class WarmUp:
    """What an engine warms up for.

    Attributes:
        sampling: how requests will mostly sample; None if that is not known.
        has_experts: whether the model is a mixture of experts.
    """

    sampling: SamplingParams | None
    has_experts: bool

    def config(self) -> dict[str, Any]:
        """Return this as a part of vLLM's configuration, which all of its processes get."""
        return {_NAME: asdict(self)}

    @classmethod
    def of(cls, vllm_config: Any) -> "WarmUp":
        """Return what the configuration of an engine says."""
        found = vllm_config.additional_config[_NAME]
        sampling = found["sampling"]
        return cls(None if sampling is None else SamplingParams(**sampling), found["has_experts"])

    @contextmanager
    def limited(self) -> Iterator[None]:
        """Have vLLM warm up for `sampling` in this process, for the time of a `with` block.

        vLLM's own warm-up compiles all that its sampler can do, such as penalties, top-k and top-p, which takes 15 s on
        a machine that has not compiled it before. None leaves that as it is. What is left out is compiled when a
        request first needs it.
        """
        own = VllmSamplingParams.for_sampler_warmup
        sampling = self.sampling
        try:
            if sampling is not None:
                VllmSamplingParams.for_sampler_warmup = staticmethod(lambda: sampler_params(sampling))
            with nullcontext() if self.has_experts else _no_router_kernels():
                yield
        finally:
            VllmSamplingParams.for_sampler_warmup = staticmethod(own)


@contextmanager
def _no_router_kernels() -> Iterator[None]:
    """Keep versions of vLLM before 0.28 from compiling kernels of other models' routers, which takes 10 s."""
    from vllm.model_executor.warmup import kernel_warmup

    own = getattr(kernel_warmup, "_warmup_ll_bf16_router_gemm", None)
    # Later versions take the model and see for themselves whether it has a router.
    if own is None or inspect.signature(own).parameters:
        yield
        return
    kernel_warmup._warmup_ll_bf16_router_gemm = lambda: None
    try:
        yield
    finally:
        kernel_warmup._warmup_ll_bf16_router_gemm = own


def sampler_params(sampling: SamplingParams, **options: Any) -> VllmSamplingParams:
    """Return vLLM's parameters of one sample of a request. `options` are further ones."""
    return VllmSamplingParams(
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        min_p=sampling.min_p,
        repetition_penalty=sampling.repetition_penalty,
        max_tokens=sampling.max_tokens,
        min_tokens=sampling.min_tokens,
        logprobs=0,
        detokenize=False,
        **options,
    )
