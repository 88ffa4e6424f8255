"""Speculative decoding: vLLM drafts tokens, and the model checks them in one pass.

A draft's token is accepted with its probability under the policy; a token that takes the place of the first one that is
not, is drawn from what the policy's distribution has left without it. Tokens then have the policy's distribution, and
log-probs are the policy's.
"""

from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from rlhf_data.errors import ConfigError, EngineError
from rlhf_data.pretrained import check_same_tokenizer
from rlhf_data.stored_weights import stored_weights
from rlhf_rollout.engines.model_files import read_config, resolve_model_dir
from rlhf_rollout.engines.spec import EngineSpec
from rlhf_rollout.engines.vllm.internals import require
from rlhf_rollout.private_names import missing
from rlhf_rollout.protocols import SamplingParams

NAMES = {
    "vllm.v1.spec_decode.draft_model:DraftModelProposer": ("_create_draft_vllm_config",),
    "vllm.v1.core.sched.scheduler:Scheduler": ("make_spec_decoding_stats",),
    "vllm.v1.sample.rejection_sampler": ("apply_sampling_constraints", "expand_batch_to_tokens"),
    "vllm.v1.worker.gpu_model_runner:GPUModelRunner": ("_build_attention_metadata", "get_draft_model"),
}
# Tokens before a draft that must have stood before, in the same order: with one, most drafts are wrong.
_NGRAM = {"method": "ngram", "prompt_lookup_min": 2, "prompt_lookup_max": 4}
# In the names of classes of models that read the policy's hidden states, and write nothing without them.
_HEADS = ("eagle", "mtp", "medusa", "speculator", "dflash")
_OTHERS = "draft with a smaller model of the policy's family, or with ``speculative=ngram``"


def check_drafts() -> None:
    """Raise EngineError if this vLLM lacks what speculative decoding needs."""
    require(missing(NAMES))


def check_sampling(sampling: SamplingParams) -> None:
    """Raise EngineError for samples that vLLM draws otherwise where it drafts tokens.

    For the token behind an accepted draft, it compares `min_tokens` with the length before the draft. It then masks end
    tokens that are allowed, and log-probs are those of the masked distribution.
    """
    if sampling.min_p:
        raise EngineError("vLLM drafts no tokens for ``min_p``", hint="use ``min_p=0``, or draft no tokens")
    if 0 < sampling.min_tokens < sampling.max_tokens:
        message = f"vLLM holds end tokens back for longer than min_tokens {sampling.min_tokens} where it drafts tokens"
        raise EngineError(message, hint="use min_tokens 0 or that of max_tokens, or draft no tokens")


def draft_options(spec: EngineSpec) -> dict[str, Any]:
    """Return the arguments of an engine that drafts tokens; none if it does not."""
    if not spec.has_drafts:
        return {}
    # vLLM has graphs of a draft model's passes only with compiled layers.
    model = {"method": "draft_model", "model": spec.draft_model, "enforce_eager": True}
    ways = {"ngram": _NGRAM, "mtp": {"method": "mtp", "enforce_eager": True}}
    own = ways[spec.speculative] if spec.speculative else model
    return {
        "speculative_config": {**own, "num_speculative_tokens": spec.speculative_tokens},
        "async_scheduling": False,
    }


def draft_model_dir(name: str, config: Mapping[str, Any], tokenizer: Any = None) -> Path:
    """Return the folder of a draft model, given the policy's config and, if its tokens are to be compared, `tokenizer`.

    Raises:
        ConfigError: there is none, or it is no whole language model, or it has another vocabulary.
        EngineError: its download fails.
    """
    folder = resolve_model_dir(name)
    own = read_config(folder)
    for kind in own.get("architectures") or ():
        if any(head in kind.lower() for head in _HEADS):
            message = (
                f"{name} is a {kind}, which drafts from the policy's hidden states and is no language model by itself"
            )
            raise ConfigError(message, hint=_OTHERS)
    sizes = [int(each["vocab_size"]) for each in (own, config)]
    if sizes[0] != sizes[1]:
        message = f"the draft model {name} has a vocabulary of {sizes[0]} tokens, and the policy one of {sizes[1]}"
        raise ConfigError(message, hint=_OTHERS)
    if tokenizer is not None:
        check_same_tokenizer(name, tokenizer, _OTHERS)
    return folder


def check_own_layers(folder: Path) -> None:
    """Raise ConfigError unless a model's folder has layers that predict several tokens (arXiv:2404.19737).

    They are behind the others, or have `mtp` in the names of their weights.
    """
    config = read_config(folder)
    behind = f".layers.{config.get('num_hidden_layers')}."
    is_said = any(config.get(name) for name in ("num_nextn_predict_layers", "mtp_num_hidden_layers"))
    if not (is_said and any("mtp" in name or behind in name for name in stored_weights(folder))):
        message = f"{folder} has no layers that predict several tokens, with which ``speculative=mtp`` drafts"
        raise ConfigError(message, hint=_OTHERS)


def count_drafts(core: Any, samples: Mapping[str, Any]) -> None:
    """Have a core of vLLM count the drafts of `samples`, by the ids of their requests, in `Draft.drafts` of each.

    vLLM itself counts only for its log.
    """

    def count(stats: Any, *, num_draft_tokens: int, num_accepted_tokens: int, request_id: str, **_: Any) -> Any:
        if (sample := samples.get(request_id)) is not None:
            drafts, drafted, accepted = sample.draft.drafts
            sample.draft.drafts = drafts + 1, drafted + num_draft_tokens, accepted + num_accepted_tokens
        return stats

    core.engine_core.scheduler.make_spec_decoding_stats = count


def plan_as_captured(runner: Any) -> None:
    """Have vLLM plan the attention of a step for the kernel in the CUDA graph that the step replays.

    FlashAttention 3 chooses its kernel, and the form of the plan that the kernel reads, by the longest query of a step.
    vLLM captures a graph of N tokens of any sequences with N for the longest query, and made plans for that of the
    step: where each sequence decodes one token, for a kernel without a causal mask if heads have 64 numbers or fewer,
    or more than 128. The kernel in the graph then attended to wrong places.

    Args:
        runner: vLLM's first model runner, which is the one that drafts tokens.
    """
    build = runner._build_attention_metadata

    def build_as_captured(*args: Any, num_tokens_padded: int | None = None, **options: Any) -> Any:
        # Tokens are padded for graphs of whole steps alone.
        if num_tokens_padded is not None and runner.cudagraph_dispatcher.cudagraph_mode.mixed_mode().name == "FULL":
            options["max_query_len"] = num_tokens_padded
        return build(*args, num_tokens_padded=num_tokens_padded, **options)

    runner._build_attention_metadata = build_as_captured


@cache
def expand_rows_on_cpu() -> None:
    """Have vLLM's sampler repeat temperature, top-p and top-k for the tokens of each draft on a CPU.

    Its own kernel for CPUs writes into a copy, unless the numbers are int64, so that drafts were checked with whatever
    memory held. Steps of vLLM 0.32 may have drafts without a token, which its top-k fails on.
    """
    from rlhf_rollout.engines.vllm.names import rejection_sampler

    constrain = rejection_sampler.apply_sampling_constraints

    def constrain_drafted(logits: Any, *others: Any) -> Any:
        return constrain(logits, *others) if len(logits) else logits

    def expand(values: Any, ends: Any, num_tokens: int, replace_from: float = 0, replace_to: float = 0) -> Any:
        values = values.masked_fill(values == replace_from, replace_to)
        return values.repeat_interleave(ends.diff(prepend=ends.new_zeros(1)), output_size=num_tokens)

    rejection_sampler.expand_batch_to_tokens = expand
    rejection_sampler.apply_sampling_constraints = constrain_drafted
