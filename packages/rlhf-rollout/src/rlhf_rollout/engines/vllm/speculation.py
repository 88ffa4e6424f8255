"""Speculative decoding: vLLM drafts tokens, and the model checks them in one pass.

A draft's token is accepted with its probability under the policy; a token that takes the place of the first one that is
not, is drawn from what the policy's distribution has left without it. Tokens then have the policy's distribution, and
log-probs are the policy's.
"""

from collections.abc import Mapping
from typing import Any

from rlhf_data.errors import EngineError
from rlhf_rollout.engines.spec import EngineSpec
from rlhf_rollout.engines.vllm.internals import require
from rlhf_rollout.private_names import missing
from rlhf_rollout.protocols import SamplingParams

NAMES = {
    "vllm.v1.core.sched.scheduler:Scheduler": ("make_spec_decoding_stats",),
    "vllm.v1.sample.rejection_sampler": ("apply_sampling_constraints", "expand_batch_to_tokens"),
}
# Tokens before a draft that must have stood before, in the same order: with one, most drafts are wrong.
_NGRAM = {"method": "ngram", "prompt_lookup_min": 2, "prompt_lookup_max": 4}


def check_drafts() -> None:
    """Raise EngineError if this vLLM lacks what speculative decoding needs."""
    require(missing(NAMES))


def check_sampling(sampling: SamplingParams) -> None:
    """Raise EngineError for samples that vLLM draws otherwise where it drafts tokens.

    For the token behind an accepted draft, it compares `min_tokens` with the length before the draft. It then masks end
    tokens that are allowed, and log-probs are those of the masked distribution.
    """
    if sampling.min_p:
        raise EngineError("vLLM drafts no tokens for ``min_p``", hint="use ``min_p=0``, or drop ``speculative``")
    if 0 < sampling.min_tokens < sampling.max_tokens:
        message = f"vLLM holds end tokens back for longer than min_tokens {sampling.min_tokens} where it drafts tokens"
        raise EngineError(message, hint="use min_tokens 0 or that of max_tokens, or drop ``speculative``")


def draft_options(spec: EngineSpec) -> dict[str, Any]:
    """Return the arguments of an engine that drafts tokens; none if it does not."""
    if not spec.speculative:
        return {}
    return {"speculative_config": {**_NGRAM, "num_speculative_tokens": spec.speculative_tokens}}


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
