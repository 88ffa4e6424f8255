"""Draws tokens from hidden states and the LM head by one operator, so that a step's logits are never in memory.

vLLM writes the logits of a step, draws with Gumbel noise, and reads the logits three more times for the log-probs and
ranks of the tokens. `rlhf_kernels.linear_sample` draws from the same distribution, and computes the log-probs from
logits in float32, where vLLM rounds them to the model's dtype. It has other random numbers: with one seed, a request
gets other tokens than from vLLM's sampler. A request that is alone, or beside others that the operator can draw for,
gets the same tokens again from the same seed.
"""

import inspect
import logging
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from rlhf_kernels.ops.linear_sample import is_fused, linear_sample
from rlhf_rollout.engines.vllm.names import UnquantizedEmbeddingMethod
from rlhf_rollout.engines.vllm.patches.runner_names import (
    LogitsProcessor,
    LogprobsTensors,
    Sampler,
    SamplerOutput,
    envs,
    get_num_sampled_and_rejected,
)

# Of the model runner.
NEEDS = (
    "device",
    "dtype",
    "lora_config",
    "max_num_reqs",
    "model.compute_logits",
    "model_config.get_hidden_size",
    "parallel_config.pipeline_parallel_size",
    "parallel_config.tensor_parallel_size",
    "req_states.prefill_len.gpu",
    "sample",
    "sampler.bad_words_state.num_bad_words.np",
    "sampler.compute_nans",
    "sampler.logit_bias_state.use_logit_bias",
    "sampler.logprob_token_ids_state.max_num_token_ids",
    "sampler.logprobs_mode",
    "sampler.penalties_state.use_penalty",
    "sampler.sampling_states.max_num_logprobs",
    "sampler.sampling_states.min_p.np",
    "sampler.sampling_states.seeds.gpu",
    "sampler.sampling_states.temperature.gpu",
    "sampler.sampling_states.top_k.np",
    "sampler.sampling_states.top_p.np",
    "sampler.sampling_states.vocab_size",
    "sampler.use_fp64_gumbel",
    "speculative_config",
)
# What a sampler has: it may change logits by a part that is not among them.
_PARTS = {
    "bad_words_state",
    "compute_nans",
    "logit_bias_state",
    "logprob_token_ids_state",
    "logprobs_mode",
    "needs_logits_processing",  # of `sampling_states`, penalties, biases and bad words
    "num_speculative_tokens",
    "penalties_state",
    "req_states",
    "return_sampling_mask",
    "sampling_states",
    "thinking_budget_state",
    "use_flashinfer",
    "use_fp64_gumbel",
}

_logger = logging.getLogger(__name__)


class UnfitError(Exception):
    """Says why vLLM's sampler has to draw all tokens of an engine."""


def patch(runner: Any, masked_ids: Sequence[Sequence[int]]) -> None:
    """Have a model runner of vLLM, which has loaded its model, draw the tokens of most steps by the operator.

    It leaves a runner as it is whose logits are more than the product of hidden states and head, or whose GPU or dtype
    does not suit the operator, and says so in the log at level INFO. A step with a request that asks for more than
    temperature and the log-prob of its own tokens goes to vLLM's sampler, see `SamplingHead.takes`.

    Args:
        runner: vLLM's.
        masked_ids: ranges, each with its end, of ids that are never drawn.
    """
    try:
        head = SamplingHead(runner, masked_ids)
    except UnfitError as reason:
        _logger.info("vLLM's sampler draws all tokens: %s", reason)
        return
    runner.sample = head.sample


class _Rows(NamedTuple):
    """The rows of a step that the operator draws for.

    Attributes:
        batch: vLLM's inputs of the step.
        temperature: [rows].
        seeds: [rows].
        with_logprobs: whether log-probs are asked for.
        counts: how many tokens each row samples, and how many drafts it rejects, [rows] each.
    """

    batch: Any
    temperature: Tensor
    seeds: Tensor
    with_logprobs: bool
    counts: tuple[Tensor, Tensor]


class SamplingHead:
    """Stands in for the method `sample` of a model runner.

    Raises:
        UnfitError: vLLM's sampler has to draw all tokens.
    """

    def __init__(self, runner: Any, masked_ids: Sequence[Sequence[int]]) -> None:
        _check_runner(runner)
        hidden = torch.linspace(-1, 1, 2 * runner.model_config.get_hidden_size(), device=runner.device)
        self._head = plain_head(runner.model, hidden.view(2, -1).to(runner.dtype))
        weight = self._head.weight
        if not is_fused(hidden.view(2, -1).to(runner.dtype), weight):
            raise UnfitError(f"the operator does not take a head {list(weight.shape)} {weight.dtype} on this GPU")
        self._runner = runner
        self._sample = runner.sample
        # This memory stays while the engine sleeps.
        self._bias = _bias(weight, masked_ids)
        self._ranks = torch.zeros(runner.max_num_reqs, dtype=torch.int64, device=weight.device)
        self._rows: _Rows | None = None  # of the last step, if the operator drew its tokens

    def sample(self, hidden_states: Tensor, batch: Any, grammar_output: Any) -> tuple[Any, Tensor, Tensor]:
        """See vLLM. Ranks of the tokens are 0: an engine does not read them."""
        if self._rows is None or self._rows.batch is not batch:  # else a later step of the same batch: `replayed_steps`
            self._rows = self._rows_of(batch) if self.takes(batch, grammar_output) else None
        if self._rows is None:
            return self._sample(hidden_states, batch, grammar_output)
        _, temperature, seeds, with_logprobs, counts = self._rows
        places = slice(batch.num_reqs) if batch.num_tokens == batch.num_reqs else batch.logits_indices
        drawn = linear_sample(
            hidden_states[places], self._head.weight, temperature, seeds, batch.positions[places], bias=self._bias
        )
        token_ids = drawn.token_ids[:, None]
        logprobs = None
        if with_logprobs:
            logprobs = LogprobsTensors(token_ids, drawn.logprobs[:, None], self._ranks[: len(token_ids)])
        output = SamplerOutput(
            sampled_token_ids=token_ids,
            logprobs_tensors=logprobs,
            num_nans=None,
            num_sampled=counts[0],
            num_rejected=counts[1],
        )
        return output, *counts

    def _rows_of(self, batch: Any) -> "_Rows":
        states = self._runner.sampler.sampling_states
        rows = batch.expanded_idx_mapping
        # A prompt of which more chunks follow has a row, and samples nothing.
        counts = get_num_sampled_and_rejected(
            batch.seq_lens.new_ones(batch.num_reqs),
            batch.seq_lens,
            batch.cu_num_logits,
            batch.idx_mapping,
            self._runner.req_states.prefill_len.gpu,
        )
        with_logprobs = states.max_num_logprobs(batch.idx_mapping_np) == 0
        return _Rows(batch, states.temperature.gpu[rows], states.seeds.gpu[rows], with_logprobs, counts)

    def takes(self, batch: Any, grammar_output: Any) -> bool:
        """Return whether the operator draws the tokens of a step.

        It does unless a request has a grammar, drafted tokens, a penalty, a bias of tokens (`min_tokens` is one, too),
        forbidden words, a `top_k`, `top_p` or `min_p` that has an effect, or asks for log-probs of other tokens.
        """
        rows = batch.idx_mapping_np
        if grammar_output is not None or batch.num_draft_tokens or len(batch.logits_indices) != len(rows):
            return False
        sampler = self._runner.sampler
        states = sampler.sampling_states
        return not (
            (states.top_p.np[rows] != 1).any()
            or (states.top_k.np[rows] != states.vocab_size).any()
            or (states.min_p.np[rows] != 0).any()
            or sampler.penalties_state.use_penalty[rows].any()
            or sampler.logit_bias_state.use_logit_bias[rows].any()
            or sampler.bad_words_state.num_bad_words.np[rows].any()
            or states.max_num_logprobs(rows) > 0
            or sampler.logprob_token_ids_state.max_num_token_ids(rows) > 0
        )


def _check_runner(runner: Any) -> None:
    """Raise UnfitError if a runner does more with the logits of any step than to draw from their softmax."""
    sampler = runner.sampler
    parallel = runner.parallel_config
    thinking = getattr(sampler, "thinking_budget_state", None)
    unknown = vars(sampler).keys() - _PARTS
    obstacles = {
        "several GPUs share the model": parallel.tensor_parallel_size * parallel.pipeline_parallel_size > 1,
        "the model has adapters": runner.lora_config is not None,
        "tokens are drafted": runner.speculative_config is not None,
        "the model has a sampler of its own": type(sampler) is not Sampler,
        f"the sampler has {', '.join(sorted(unknown))}": bool(unknown),
        "log-probs are not those after the temperature": sampler.logprobs_mode != "processed_logprobs",
        "NaNs are counted": sampler.compute_nans,
        "noise is in float64": sampler.use_fp64_gumbel,
        "what could be sampled is told": getattr(sampler, "return_sampling_mask", False),
        "thoughts have budgets": thinking is not None and thinking.enabled,
        "kernels are vLLM's that do not depend on the batch": envs.VLLM_BATCH_INVARIANT,
    }
    for reason, is_there in obstacles.items():
        if is_there:
            raise UnfitError(reason)


class Head(NamedTuple):
    """An LM head of vLLM.

    Attributes:
        layer: holds the weight. An update may put another tensor in its place.
        vocab_size: rows of the weight that are tokens; the others pad it.
    """

    layer: nn.Module
    vocab_size: int

    @property
    def weight(self) -> Tensor:
        """The weight as it is now, [V, H]."""
        return self.layer.weight[: self.vocab_size]


def plain_head(model: nn.Module, hidden: Tensor) -> Head:
    """Return the head of a model of vLLM whose logits are the product of hidden states and the head's weight alone.

    Computes the logits of `hidden` [N, H] and looks at what passes through vLLM's layer of logits: a model may scale
    hidden states before it, or logits after it.

    Raises:
        UnfitError: the logits are something else.
    """
    calls: list[tuple[nn.Module, dict[str, Any], Any, Tensor]] = []

    def note(layer: nn.Module, given: tuple[Any, ...], options: dict[str, Any], logits: Tensor) -> None:
        arguments = inspect.signature(layer.forward).bind(*given, **options).arguments
        calls.append((layer, arguments, logits, logits.clone()))

    layers = [module for module in model.modules() if isinstance(module, LogitsProcessor)]
    hooks = [layer.register_forward_hook(note, with_kwargs=True) for layer in layers]
    given = hidden.clone()
    try:
        with torch.inference_mode():
            logits = model.compute_logits(hidden)
    except Exception as error:  # such as a width that is not the hidden size; vLLM's sampler needs none of this
        raise UnfitError(f"the logits of hidden states {list(hidden.shape)} failed: {error}") from error
    finally:
        for hook in hooks:
            hook.remove()
    if len(calls) != 1:
        raise UnfitError(f"the logits are made of {len(calls)} products")
    [(processor, arguments, product, kept)] = calls
    if type(processor) is not LogitsProcessor:
        raise UnfitError(f"a {type(processor).__name__} makes the logits")
    if arguments.get("hidden_states") is not hidden or not torch.equal(hidden, given):
        raise UnfitError(f"{type(model).__name__} changes hidden states before the head")
    if logits is not product or not torch.equal(logits, kept):
        raise UnfitError(f"{type(model).__name__} changes logits behind the head")
    layer = arguments["lm_head"]
    obstacles = {
        "scaled": processor.scale != 1.0,
        "capped": processor.soft_cap is not None,
        "no product": processor.logits_as_input,
        "biased": arguments.get("embedding_bias") is not None,
        "of another dtype": processor.head_dtype not in (None, hidden.dtype),
        "quantized": type(getattr(layer, "quant_method", None)) is not UnquantizedEmbeddingMethod,
    }
    if found := [reason for reason, is_there in obstacles.items() if is_there]:
        raise UnfitError(f"logits are {' and '.join(found)}")
    return Head(layer, processor.org_vocab_size)


def _bias(weight: Tensor, masked_ids: Sequence[Sequence[int]]) -> Tensor | None:
    """Return -inf for each masked id and 0 for the others, [V]; None if there are no masked ids."""
    if not masked_ids:
        return None
    bias = torch.zeros(len(weight), dtype=weight.dtype, device=weight.device)
    for start, stop in masked_ids:
        bias[start:stop] = -torch.inf
    return bias
