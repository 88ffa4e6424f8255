"""What is saved of the scheduler's work, beside vLLM's own: the same blocks, cached prefixes and log-probs."""

from types import SimpleNamespace

import pytest

pytest.importorskip("vllm")

import numpy as np
import torch
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec, SlidingWindowSpec
from vllm.v1.outputs import LogprobsLists
from vllm.v1.request import Request

from rlhf_rollout.engines.vllm.patches.bulk_admission import patch as start_together
from rlhf_rollout.engines.vllm.patches.idle_slots import patch as skip_idle_slots
from rlhf_rollout.engines.vllm.patches.list_logprobs import patch as list_logprobs
from rlhf_rollout.engines.vllm.patches.shared_hashes import patch as share_hashes

BLOCK_SIZE = 4


def make_scheduler(spec):
    config = KVCacheConfig(num_blocks=64, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(["layer"], spec)])
    manager = KVCacheManager(config, max_model_len=64, scheduler_block_size=BLOCK_SIZE, hash_block_size=BLOCK_SIZE)
    return SimpleNamespace(kv_cache_manager=manager, num_lookahead_tokens=0, num_spec_tokens=0, connector=None)


def full_attention():
    return FullAttentionSpec(block_size=BLOCK_SIZE, num_kv_heads=1, head_size=8, dtype=torch.float32)


def decode(scheduler, num_prompt_tokens, num_tokens, *, lag):
    """Return blocks and number of cached blocks after each token; `lag` tokens are known after they are scheduled."""
    init_none_hash(sha256)
    manager = scheduler.kv_cache_manager
    hasher = get_request_block_hasher(BLOCK_SIZE, sha256)
    prompt = list(range(num_prompt_tokens))
    request = Request("a", prompt, SamplingParams(max_tokens=64), None, block_hasher=hasher)
    manager.allocate_slots(request, num_prompt_tokens, num_new_computed_tokens=0, num_lookahead_tokens=0)
    request.num_computed_tokens = num_prompt_tokens
    seen = []
    for token in range(num_tokens):
        if token >= lag:
            request.append_output_token_ids([100 + token])
            if lag:
                manager.cache_blocks(request, request.num_computed_tokens - 1)
        assert manager.allocate_slots(request, 1, num_lookahead_tokens=0) is not None
        request.num_computed_tokens += 1
        [group] = manager.coordinator.single_type_managers
        seen.append((manager.get_block_ids("a"), group.num_cached_block["a"]))
    if lag:  # the last token becomes known, and none follows
        request.append_output_token_ids([99])
        manager.cache_blocks(request, request.num_computed_tokens)
    return [*seen, group.num_cached_block["a"]]


@pytest.mark.parametrize("lag", [0, 1])
@pytest.mark.parametrize("num_prompt_tokens", [7, 8, 9])
def test_blocks_and_cached_prefixes_are_those_of_vllm(num_prompt_tokens, lag, monkeypatch):
    own = make_scheduler(full_attention())
    shortened = make_scheduler(full_attention())
    calls = []
    allocate = shortened.kv_cache_manager.allocate_slots
    shortened.kv_cache_manager.allocate_slots = lambda *a, **k: calls.append(a) or allocate(*a, **k)
    skip_idle_slots(shortened)
    expected = decode(own, num_prompt_tokens, 17, lag=lag)
    assert decode(shortened, num_prompt_tokens, 17, lag=lag) == expected
    assert expected[-1] >= 5  # blocks of generated tokens are cached, too
    assert len(calls) < 12  # of 18


def test_samples_of_a_prompt_share_its_hashes_which_are_those_of_vllm():
    init_none_hash(sha256)
    own = get_request_block_hasher(BLOCK_SIZE, sha256)
    hashed = []
    core = SimpleNamespace(
        request_block_hasher=lambda request: hashed.append(request.request_id) or own(request),
        scheduler=SimpleNamespace(hash_block_size=BLOCK_SIZE, lora_config=None),
        vllm_config=SimpleNamespace(cache_config=SimpleNamespace(prefix_caching_hash_algo="sha256")),
    )
    share_hashes(core)

    def hashes(name, prompt, hasher, **more):
        request = Request(name, prompt, SamplingParams(max_tokens=64), None, block_hasher=hasher, **more)
        yield list(request.block_hashes)
        request.append_output_token_ids(list(range(ord(name), ord(name) + 9)))
        yield request.block_hashes

    prompt, other = list(range(10)), list(range(1, 11))
    image = MultiModalFeatureSpec(None, "image", "hash of it", PlaceholderRange(offset=1, length=2))
    counts = {}
    samples = {"a": prompt, "b": prompt, "c": other, "d": prompt[:6], "e": other, "i": other, "s": [5]}
    for name, tokens in samples.items():
        more = {"mm_features": [image]} if name == "i" else {}
        found = list(hashes(name, tokens, core.request_block_hasher, **more))
        assert found == list(hashes(name, list(tokens), own, **more)), name
        counts[name] = len(found[0]), len(found[1])
    assert counts["a"] == counts["b"] == (2, 4) and counts["s"] == (0, 2)
    # "b" begins with the list of the sample before it. Blocks behind others, without images, are hashed here.
    assert "".join(hashed) == "acdeiiss"


@pytest.mark.parametrize(("hasher", "adapters"), [(None, None), (len, "any")], ids=["no cache", "adapters"])
def test_hashes_are_left_to_vllm_where_there_are_none_or_where_they_depend_on_an_adapter(hasher, adapters):
    core = SimpleNamespace(request_block_hasher=hasher, scheduler=SimpleNamespace(lora_config=adapters))
    share_hashes(core)
    assert core.request_block_hasher is hasher


@pytest.mark.parametrize("case", ["window", "speculative", "looked up", "connector"])
def test_anything_but_plain_full_attention_is_left_to_vllm(case):
    window = SlidingWindowSpec(BLOCK_SIZE, num_kv_heads=1, head_size=8, dtype=torch.float32, sliding_window=8)
    scheduler = make_scheduler(window if case == "window" else full_attention())
    scheduler.num_lookahead_tokens = 2 if case == "speculative" else 0
    scheduler.num_spec_tokens = 2 if case == "looked up" else 0
    scheduler.connector = object() if case == "connector" else None
    skip_idle_slots(scheduler)
    assert not {"allocate_slots", "cache_blocks"} & vars(scheduler.kv_cache_manager).keys()


class Slots:
    """A scheduler of 64 slots, of which a step fills as many as it may, with the names of vLLM 0.32 or of 0.28."""

    def __init__(self, num_waiting, is_new=True):
        self.slots = "max_num_active_reqs" if is_new else "max_num_running_reqs"
        self.max_num_running_reqs = 64
        setattr(self, self.slots, 64)
        self.running = []
        self.waiting = list(range(num_waiting))
        self.waits_first = "kv_holding_waiting" if is_new else "skipped_waiting"
        setattr(self, self.waits_first, [])
        self.started = []

    def schedule(self, throttle_prefills=False):
        num_free = getattr(self, self.slots) - len(self.running)
        started = self.waiting[:num_free]
        del self.waiting[:num_free]
        self.running += started
        self.started.append(len(started))
        return throttle_prefills


def test_sequences_start_several_at_a_time_while_more_wait_than_slots_are_free():
    scheduler = Slots(80)
    start_together(scheduler)
    for _ in range(20):
        assert scheduler.schedule(throttle_prefills=True) is True
        scheduler.running.pop()
    # All slots at once; then 4 of 64 as soon as they are free. None wait in the end.
    assert scheduler.started == [64, *[0, 0, 0, 4] * 4, 0, 0, 0]


@pytest.mark.parametrize("is_new", [True, False])
def test_sequences_start_at_once_when_there_is_a_slot_for_each(is_new):
    scheduler = Slots(63, is_new)
    start_together(scheduler)
    scheduler.schedule()
    scheduler.waiting = ["a"]
    scheduler.schedule()
    scheduler.running = scheduler.running[:61]
    scheduler.waiting = ["b", "c"]
    setattr(scheduler, scheduler.waits_first, ["d", "e"])  # four wait for the three slots
    scheduler.schedule()
    assert scheduler.started == [63, 1, 0]


def test_a_free_slot_is_held_for_sixteen_steps_at_most():
    scheduler = Slots(80)
    start_together(scheduler)
    scheduler.schedule()
    for _ in range(2):
        scheduler.running.pop()
        scheduler.started.clear()
        for _ in range(20):
            scheduler.schedule()
        assert scheduler.started == [*[0] * 16, 1, 0, 0, 0]


def test_few_slots_are_filled_one_at_a_time():
    scheduler = Slots(5)
    scheduler.max_num_active_reqs = 2
    start_together(scheduler)
    for _ in range(4):
        scheduler.schedule()
        scheduler.running.pop()
    assert scheduler.started == [2, 1, 1, 1]


@pytest.mark.parametrize("starts", [None, [0, 2, 3]])
def test_log_probs_of_a_request_are_those_that_vllm_slices(starts):
    logprobs = -np.arange(8, dtype=np.float32).reshape(4, 2)
    rows = LogprobsLists(np.zeros((4, 2), np.int32), logprobs, np.zeros(4, np.int32), starts)
    scheduler = SimpleNamespace(update_from_output=lambda _, output: output.logprobs)
    list_logprobs(scheduler)
    listed = scheduler.update_from_output(None, SimpleNamespace(logprobs=rows))
    for index, num_tokens in enumerate([2, 1, 1]):
        assert listed.slice_request(index, num_tokens) == rows.slice_request(index, num_tokens).logprobs[:, 0].tolist()
    assert scheduler.update_from_output(None, SimpleNamespace(logprobs=None)) is None
