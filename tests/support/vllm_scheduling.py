"""A scheduler of vLLM with a made-up model, for tests of what replaces parts of the scheduler."""

import dataclasses
import random
from typing import Any

import numpy as np
import torch
from vllm.config import CacheConfig, ModelConfig, SchedulerConfig, VllmConfig
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import LogprobsLists, ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager

from rlhf_rollout.engines.vllm.patches.bulk_admission import patch as start_together
from rlhf_rollout.engines.vllm.patches.bulk_decoding import patch as decode_in_bulk
from rlhf_rollout.engines.vllm.patches.idle_slots import patch as skip_idle_slots
from rlhf_rollout.engines.vllm.patches.list_logprobs import patch as list_logprobs
from rlhf_rollout.engines.vllm.patches.multi_step import joined, single_steps
from rlhf_rollout.engines.vllm.patches.multi_step import patch as decode_several

BLOCK_SIZE = 4
MAX_LENGTH = 64
STOPS = (1, 2)


def full_attention():
    return FullAttentionSpec(block_size=BLOCK_SIZE, num_kv_heads=1, head_size=8, dtype=torch.float32)


def make_scheduler(model, kind, *, num_blocks=200, num_slots=6, num_tokens=32, max_length=MAX_LENGTH, spec=None):
    init_none_hash(sha256)
    scheduling = SchedulerConfig(
        max_num_seqs=num_slots, max_num_batched_tokens=num_tokens, max_model_len=max_length, is_encoder_decoder=False
    )
    cache = CacheConfig(block_size=BLOCK_SIZE, enable_prefix_caching=True)
    cache.num_gpu_blocks = num_blocks
    of_model = ModelConfig(model=model, skip_tokenizer_init=True, dtype="float32", max_model_len=max_length, seed=0)
    config = VllmConfig(model_config=of_model, scheduler_config=scheduling, cache_config=cache)
    groups = [KVCacheGroupSpec(["layer"], spec or full_attention())]
    return kind(
        vllm_config=config,
        kv_cache_config=KVCacheConfig(num_blocks=num_blocks, kv_cache_tensors=[], kv_cache_groups=groups),
        structured_output_manager=StructuredOutputManager(config),
        block_size=BLOCK_SIZE,
        log_stats=False,
    )


class Engine:
    """A scheduler with a made-up model, whose next token follows from the request and the number of tokens before it.

    `workers` is what the steps have told workers of each request: its blocks, and how many tokens they have computed.
    """

    def __init__(self, model, kind, *, in_bulk, is_v2, stop_rate, num_steps=None, **options):
        self.scheduler = make_scheduler(model, kind, **options)
        self.scheduler.use_v2_model_runner = is_v2
        self.is_async = kind is AsyncScheduler
        self.stop_rate = stop_rate
        self.pending: list[Any] = []
        self.workers: dict[str, tuple[list[int], int]] = {}
        self.hasher = get_request_block_hasher(BLOCK_SIZE, sha256)
        self.num_scheduled = dict.fromkeys(["whole", "part"], 0)
        skip_idle_slots(self.scheduler)
        self.num_taken = dict.fromkeys(["whole", "part"], 0)
        if in_bulk:
            self.count_what_vllm_schedules()
            self.count_what_vllm_takes()
            decode_in_bulk(self.scheduler)
        list_logprobs(self.scheduler)
        if num_steps is not None:
            decode_several(self.scheduler)
            self.control = self.scheduler.update_from_output.__self__
            self.control.number = num_steps
        start_together(self.scheduler)

    def count_what_vllm_takes(self):
        own = self.scheduler.update_from_output

        def update(step, output):
            self.num_taken["part"] += len(step.num_scheduled_tokens)
            return own(step, output)

        self.scheduler.update_from_output = update

    def count_what_vllm_schedules(self):
        own = self.scheduler.schedule

        def schedule(*args, **options):
            self.num_scheduled["part"] += len(self.scheduler.running)
            return own(*args, **options)

        self.scheduler.schedule = schedule

    def add(self, name, prompt, **options):
        params = SamplingParams(temperature=1.0, stop_token_ids=list(STOPS), **options)
        self.scheduler.add_request(Request(name, prompt, params, None, block_hasher=self.hasher))

    def begin(self):
        """Schedule a step; return all that it says to workers."""
        self.num_scheduled["whole"] += len(self.scheduler.running)
        step = self.scheduler.schedule()
        outputs = [
            self.compute(single) for single in (single_steps(step) if getattr(step, "num_steps", 1) > 1 else [step])
        ]
        output = joined(outputs) if len(outputs) > 1 else outputs[0]
        said = plain(step)
        self.pending.append((step, output))
        return said

    def compute(self, step):
        """Return the output of a step of one token per sequence, or of prompts; note what workers learn from it."""
        tokens = []
        cached = step.scheduled_cached_reqs
        known = {new.req_id: (list(new.block_ids[0]), new.num_computed_tokens) for new in step.scheduled_new_reqs}
        for name, blocks, computed in zip(
            cached.req_ids, cached.new_block_ids, cached.num_computed_tokens, strict=True
        ):
            had = [] if name in cached.resumed_req_ids else self.workers[name][0]
            known[name] = (had + list(blocks[0] if blocks else []), computed)
        for name, number in step.num_scheduled_tokens.items():
            blocks, computed = known[name]
            request = self.scheduler.requests[name]
            self.workers[name] = (blocks, computed + number)
            assert len(blocks) * BLOCK_SIZE >= computed + number <= self.scheduler.max_model_len
            tokens.append([] if request.is_prefill_chunk else [self.token(name, computed + number)])
        names = list(step.num_scheduled_tokens)
        values = np.asarray([[-float(sum(row))] for row in tokens], np.float32).reshape(-1, 1)
        nothing = np.zeros((len(names), 1), np.int32)
        return ModelRunnerOutput(
            req_ids=names,
            req_id_to_index={name: place for place, name in enumerate(names)},
            sampled_token_ids=tokens,
            logprobs=LogprobsLists(nothing, values, nothing[:, 0], None),
            prompt_logprobs_dict={},
        )

    def token(self, name, length):
        drawn = random.Random(f"{name} {length}")
        return drawn.choice(STOPS) if drawn.random() < self.stop_rate else drawn.randrange(3, 100)

    def end(self):
        """Take in the outputs of the oldest step; return what each request gets."""
        step, output = self.pending.pop(0)
        self.num_taken["whole"] += len(step.num_scheduled_tokens)
        found = self.scheduler.update_from_output(step, output)
        outputs = [output for client in found.values() for output in client.outputs]
        assert len({output.request_id for output in outputs}) == len(outputs)
        names = ("new_token_ids", "new_logprobs", "finish_reason", "stop_reason", "prefill_stats")
        return {output.request_id: [plain(getattr(output, name)) for name in names] for output in outputs}

    def state(self):
        scheduler = self.scheduler
        manager = scheduler.kv_cache_manager
        [group] = manager.coordinator.single_type_managers
        requests = {}
        for name, request in scheduler.requests.items():
            numbers = {key: value for key, value in vars(request).items() if isinstance(value, int | list)}
            numbers.pop("events", None)
            numbers["blocks"] = manager.get_block_ids(name)
            requests[name] = numbers | {"status": request.status, "hashes": list(request.block_hashes)}
        queues = [[request.request_id for request in queue] for queue in (scheduler.running, scheduler.waiting)]
        return requests, queues, dict(group.num_cached_block), manager.block_pool.get_num_free_blocks()


def plain(value):
    """Return a copy of what a step says, as values that can be compared."""
    if dataclasses.is_dataclass(value):
        return {field.name: plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, dict):
        return [(key, plain(item)) for key, item in value.items()]  # in their order
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    return set(value) if isinstance(value, set) else value
