"""Steps of vLLM's scheduler in which most sequences decode one token, with less time on the host for each sequence."""

from collections.abc import Mapping
from copy import copy
from dataclasses import dataclass, field
from typing import Any

from rlhf_rollout.engines.vllm.names import AsyncScheduler, EngineCoreOutput, EngineCoreOutputs, Request, RequestStatus
from rlhf_rollout.engines.vllm.patches.bulk_admission import SLOTS, WAITING_FIRST
from rlhf_rollout.engines.vllm.patches.idle_slots import PLAIN, is_plain_attention
from rlhf_rollout.private_names import known_name

# The names depend on vLLM's version.
_ROUTES = "aux_output_connector|enable_return_routed_experts"
# Where a request counts tokens in flight that it has lost to a preemption.
_LOST = ("num_stale_output_tokens", "async_tokens_to_discard")
NEEDS = (
    *PLAIN,
    SLOTS,
    WAITING_FIRST,
    _ROUTES,
    "_make_cached_request_data",
    "_pause_state.value",
    "_preempt_request",
    "_update_after_schedule",
    "block_size",
    "defer_block_free",
    "ec_connector",
    "hash_block_size",
    "kv_cache_manager.cache_blocks",
    "log_stats",
    "lora_config",
    "max_model_len",
    "max_num_encoder_input_tokens",
    "max_num_scheduled_tokens",
    "num_sampled_tokens_per_step",
    "num_spec_tokens",
    "num_waiting_for_streaming_input",
    "parallel_config.pipeline_parallel_size",
    "requests",
    "running",
    "schedule",
    "scheduler_config.max_num_seqs",
    "update_from_output",
    "use_v2_model_runner",
    "waiting",
)
# Attributes of requests, which have them from their start.
_OF_REQUESTS = (
    "_all_token_ids",
    "_output_token_ids",
    "client_index",
    "is_prefill_chunk",
    "max_tokens",
    "mm_features",
    "num_computed_tokens",
    "num_in_flight_tokens",
    "num_nans_in_logits",
    "num_output_placeholders",
    "num_output_tokens",
    "num_prompt_tokens",
    "num_tokens_with_spec",
    "prefill_stats",
    "resumable",
    "sampling_params",
    "status",
    "trace_headers",
    "update_block_hashes",
    "use_structured_output",
)
_made = Request.__init__.__code__.co_names  # what it sets
if _lost := [name for name in _OF_REQUESTS if name not in _made and not hasattr(Request, name)]:
    raise ImportError(f"its requests have no {', '.join(_lost)}")
# What a step's output has beside tokens and log-probs, where the engine asks for it.
_EXTRAS = (
    "prompt_logprobs_dict",
    "pooler_output",
    "kv_connector_output",
    "ec_connector_output",
    "num_nans_in_logits",
    "aux_output_connector_output",
    "prompt_token_id_logprobs_dict",
    "routed_experts",
    "sampling_masks",
)


def patch(scheduler: Any) -> None:
    """Replace the scheduler's work for sequences that only decode by short loops, which have the same results.

    vLLM decides anew for each sequence in each step how many tokens it computes, which blocks it needs and whether it
    has ended. With hundreds of sequences, this can take as long as the GPU's work on a small model. This function
    leaves a scheduler as it is if the engine uses anything but full attention, speculative decoding, connectors, LoRA
    adapters, pipeline parallelism, statistics, or the routes of experts.

    Args:
        scheduler: vLLM's.
    """
    if is_plain(scheduler):
        _BulkDecoding(scheduler)


def is_plain(scheduler: Any) -> bool:
    """Return whether sequences that decode differ in nothing but their lengths and samplings."""
    if not is_plain_attention(scheduler):
        return False
    [group] = scheduler.kv_cache_manager.coordinator.single_type_managers
    return (
        scheduler.block_size == scheduler.hash_block_size == group.block_size > 1
        and not scheduler.num_spec_tokens
        and scheduler.num_sampled_tokens_per_step == 1
        and scheduler.lora_config is None
        and scheduler.ec_connector is None
        and scheduler.parallel_config.pipeline_parallel_size == 1
        and not scheduler.max_num_encoder_input_tokens
        and not scheduler.log_stats
        and not getattr(scheduler, known_name(scheduler, _ROUTES))
        and not scheduler.defer_block_free
    )


@dataclass
class _Split:
    """The running sequences of a step that is being scheduled, of which vLLM itself schedules a part.

    Attributes:
        whole: all of them.
        part: those that vLLM schedules.
        part_tokens: tokens that vLLM has given to each of the part; one that it has skipped is missing.
        in_bulk: the others, which get one token each.
    """

    whole: list[Any]
    part: list[Any]
    part_tokens: dict[str, int] = field(default_factory=dict)
    in_bulk: list[Any] = field(default_factory=list)


class _BulkDecoding:
    """Splits the running sequences of each step: vLLM schedules one part, and loops here schedule the rest.

    A sequence that decodes inside a block of the KV cache needs no new block, and takes one token of the step. A step
    takes this course:

    1. `schedule` chooses the part and calls vLLM's, which sees no other running sequences.
    2. vLLM's calls `make_cached`, for what it tells its workers of running sequences: the rest is added here.
    3. vLLM's calls `finish_schedule`, which counts the tokens of the step as computed: those of the rest here.
    4. The model computes the step. `update` gives sequences that go on their tokens, and leaves to vLLM's those that
       may have ended, and first tokens.
    """

    def __init__(self, scheduler: Any) -> None:
        self._scheduler = scheduler
        self._manager = scheduler.kv_cache_manager
        self._block_size = scheduler.block_size
        self._is_async = isinstance(scheduler, AsyncScheduler)
        self._slots = known_name(scheduler, SLOTS)
        self._waiting_first = known_name(scheduler, WAITING_FIRST)
        self._steps_left = 0  # for which `_others` need not be found again
        self._others: set[Any] = set()  # the running sequences that vLLM itself must look at
        self._split: _Split | None = None  # while vLLM schedules a part
        self._known: dict[str, tuple[Any, int, frozenset[int], bool]] = {}  # see `_learn`
        self._num_in_flight = 0  # steps without output
        self._last_step: Any = None  # that was scheduled
        self._schedule = scheduler.schedule
        self._make_cached = scheduler._make_cached_request_data
        self._finish_schedule = scheduler._update_after_schedule
        self._update = scheduler.update_from_output
        self._preempt = scheduler._preempt_request
        scheduler.schedule = self.schedule
        scheduler._make_cached_request_data = self.make_cached
        scheduler._update_after_schedule = self.finish_schedule
        scheduler.update_from_output = self.update
        scheduler._preempt_request = self.preempt

    # -- a step begins -----------------------------------------------------------------------------------------------

    def schedule(self, *args: Any, **options: Any) -> Any:
        """See vLLM."""
        scheduler = self._scheduler
        whole = scheduler.running
        self._steps_left -= getattr(self._last_step, "num_steps", 1)  # more than one by `multi_step`
        part = self._part_for_vllm(whole)
        self._num_in_flight += 1
        if part is None:
            self._steps_left = 0
            self._last_step = self._schedule(*args, **options)
            return self._last_step
        self._split = _Split(whole, part)
        most_running = getattr(scheduler, self._slots)
        scheduler.running = part
        setattr(scheduler, self._slots, len(part))  # all slots are taken, or nothing waits for one
        num_part = len(part)
        try:
            self._last_step = self._schedule(*args, **options)
            assert len(part) == num_part, "a sequence was preempted, or started, beside those that decode in bulk"
            return self._last_step
        finally:
            scheduler.running = whole
            setattr(scheduler, self._slots, most_running)
            self._split = None

    def _part_for_vllm(self, whole: list[Any]) -> list[Any] | None:
        """Return the running sequences that vLLM must look at in this step; None if it must look at everything."""
        scheduler = self._scheduler
        waits = scheduler.waiting or getattr(scheduler, self._waiting_first)
        if (
            not whole
            or bool(self._num_in_flight) != self._is_async
            or scheduler._pause_state.value
            or (waits and len(whole) + scheduler.num_waiting_for_streaming_input < getattr(scheduler, self._slots))
            or len(whole) > scheduler.max_num_scheduled_tokens
        ):
            return None
        if self._steps_left <= 0:
            self._look_at(whole)
        others, size = self._others, self._block_size
        if any(request.is_prefill_chunk for request in others):
            return None  # it takes what the others leave of a step's tokens, and several blocks
        # The first token of a block needs the block. Its last one lets vLLM cache it, here if not in `update`.
        if self._is_async:
            part = [request for request in whole if not request.num_computed_tokens % size or request in others]
        else:
            part = [request for request in whole if (request.num_computed_tokens + 1) % size < 2 or request in others]
        if part[:1] != whole[:1]:
            part.insert(0, whole[0])  # vLLM asks with how many blocks all sequences begin by the first of them
        has_blocks = self._manager.block_pool.get_num_free_blocks() >= len(part)  # nothing needs to be preempted
        return part if has_blocks and len(part) < len(whole) else None

    def _look_at(self, whole: list[Any]) -> None:
        """Find the sequences that do more than decode one token, and for how many steps the rest does only that."""
        steps = [self._steps_of(request) for request in whole]
        self._others = {request for request, number in zip(whole, steps, strict=True) if number <= 0}
        self._steps_left = min((number for number in steps if number > 0), default=0)
        if any(request.num_output_tokens and not self._is_ahead(request) for request in self._others):
            self._steps_left = 1  # after this step, a step in flight computes its last token

    def _steps_of(self, request: Any) -> int:
        """Return for how many steps, from this one on, a sequence decodes a token and does not reach its limits."""
        computed = request.num_computed_tokens
        num_new = request.num_tokens_with_spec + request.num_output_placeholders - computed
        is_plain = num_new == 1 and not request.is_prefill_chunk and not request.use_structured_output
        if not is_plain or not self._is_ahead(request) or _num_lost(request) or request.mm_features:
            return 0
        most_tokens = min(request.num_prompt_tokens + request.max_tokens, self._scheduler.max_model_len)
        return most_tokens - 1 - computed

    def _is_ahead(self, request: Any) -> bool:
        """Return whether a step in flight computes the last token of a sequence; True if steps are not asynchronous."""
        return request.num_output_placeholders > 0 or not self._is_async

    def make_cached(
        self,
        running: list[Any],
        resumed: list[Any],
        num_scheduled_tokens: dict[str, int],
        drafts: Mapping[str, list[int]],
        new_blocks: dict[str, Any],
    ) -> Any:
        """See vLLM. This adds the sequences that vLLM has not seen to what it says to its workers."""
        cached = self._make_cached(running, resumed, num_scheduled_tokens, drafts, new_blocks)
        split = self._split
        if split is None:
            return cached
        split.part_tokens = dict(num_scheduled_tokens)
        skipped = {request.request_id for request in split.part} - split.part_tokens.keys()
        whole = [request for request in split.whole if request.request_id not in skipped] if skipped else split.whole
        names = [request.request_id for request in whole]
        blocks = dict(zip(cached.req_ids, cached.new_block_ids, strict=True))
        # vLLM goes on with this dictionary.
        num_scheduled_tokens.clear()
        num_scheduled_tokens.update(dict.fromkeys(names, 1) | split.part_tokens)
        cached.req_ids = names
        cached.new_block_ids = [blocks.get(name) for name in names]
        cached.num_computed_tokens = [request.num_computed_tokens for request in whole]
        cached.num_output_tokens = [request.num_output_tokens + request.num_output_placeholders for request in whole]
        if not self._scheduler.use_v2_model_runner:
            new = [
                request for request in whole if request.request_id not in self._scheduler.prev_step_scheduled_req_ids
            ]
            cached.all_token_ids = {request.request_id: request.all_token_ids.copy() for request in new}
        split.in_bulk = [request for request in whole if request.request_id not in split.part_tokens]
        return cached

    def finish_schedule(self, step: Any) -> None:
        """See vLLM."""
        split = self._split
        if split is None:
            self._finish_schedule(step)
            return
        scheduler = self._scheduler
        counts = step.num_scheduled_tokens
        step.num_scheduled_tokens = split.part_tokens
        self._finish_schedule(step)
        step.num_scheduled_tokens = counts
        step.total_num_scheduled_tokens = sum(counts.values())
        next_step = scheduler.current_step + 1 if self._is_async and scheduler.use_v2_model_runner else None
        for request in split.in_bulk:
            request.num_computed_tokens += 1
            request.num_in_flight_tokens += 1
            if self._is_async:
                request.num_output_placeholders += 1
            if next_step is not None:
                request.next_decode_eligible_step = next_step

    # -- a step has ended --------------------------------------------------------------------------------------------

    def update(self, step: Any, output: Any) -> Any:
        """See vLLM."""
        self._num_in_flight -= 1
        has_more = any(getattr(output, name, None) for name in _EXTRAS) or step.scheduled_spec_decode_tokens
        if has_more or not output.sampled_token_ids:
            return self._update(step, output)
        rest: dict[str, int] = {}
        taken = self._take(step, output, rest)
        if taken:
            step = copy(step)
            step.num_scheduled_tokens = rest
        found = self._update(step, output)
        for name in rest:
            if name not in self._scheduler.requests:  # it has ended
                self._known.pop(name, None)
        if not self._scheduler.requests:  # an idle engine keeps none
            self._others = set()
        if taken and 0 in found:
            taken += found[0].outputs
            found[0].outputs = taken
        elif taken:
            found[0] = EngineCoreOutputs(outputs=taken)
        return found

    def _take(self, step: Any, output: Any, rest: dict[str, int]) -> list[EngineCoreOutput]:
        """Give sequences that go on their new tokens, and return these; leave the other sequences in `rest`."""
        taken = []
        known, size, cache, is_async = self._known, self._block_size, self._manager.cache_blocks, self._is_async
        places, sampled, logprobs = output.req_id_to_index, output.sampled_token_ids, output.logprobs
        running = RequestStatus.RUNNING
        num_steps = getattr(step, "num_steps", 1)
        for name, num_tokens in step.num_scheduled_tokens.items():
            request, limit, stops, has_logprobs = known.get(name) or self._learn(name)
            if request is None or request.status is not running or num_tokens != num_steps:
                rest[name] = num_tokens
                continue
            tokens = sampled[places[name]]
            length = len(request._all_token_ids) + num_steps
            if len(tokens) != num_steps or length >= limit or not stops.isdisjoint(tokens):
                rest[name] = num_tokens
                continue
            request.num_in_flight_tokens -= num_steps
            request._output_token_ids += tokens
            request._all_token_ids += tokens
            if length % size < num_steps:
                request.update_block_hashes()
            if is_async:
                request.num_output_placeholders -= num_steps
                if (num_computed := request.num_computed_tokens - request.num_output_placeholders) % size < num_steps:
                    cache(request, num_computed)
            chosen = logprobs.slice_request(places[name], num_steps) if has_logprobs and logprobs is not None else None
            taken.append(EngineCoreOutput(name, tokens, chosen))
        return taken

    def preempt(self, request: Any, *args: Any, **options: Any) -> None:
        """See vLLM."""
        self._known.pop(request.request_id, None)
        self._preempt(request, *args, **options)

    def _learn(self, name: str) -> tuple[Any, int, frozenset[int], bool]:
        """Return a sequence, the length at which vLLM must look at it, its stop tokens, and if it wants log-probs."""
        request = self._scheduler.requests.get(name)
        if request is None:
            return _UNKNOWN
        if len(self._known) >= 2 * self._scheduler.scheduler_config.max_num_seqs:  # some have ended
            for ended in self._known.keys() - self._scheduler.requests.keys():
                del self._known[ended]
        params = request.sampling_params
        has_more = (
            not request.num_output_tokens  # the first token comes with statistics of the prompt
            or request.prefill_stats is not None
            or params.repetition_detection is not None
            or request.use_structured_output
            or request.client_index
            or request.trace_headers is not None
            or request.num_nans_in_logits
            or request.mm_features
            or request.resumable
            or _num_lost(request)
        )
        if has_more:
            return _UNKNOWN
        limit = min(request.num_prompt_tokens + request.max_tokens, self._scheduler.max_model_len)
        stops = frozenset([*(params.stop_token_ids or ()), params.eos_token_id])
        self._known[name] = found = request, limit, stops, params.num_logprobs is not None
        return found


_UNKNOWN: tuple[Any, int, frozenset[int], bool] = None, 0, frozenset(), False


def _num_lost(request: Any) -> int:
    return sum(getattr(request, name, 0) for name in _LOST)
