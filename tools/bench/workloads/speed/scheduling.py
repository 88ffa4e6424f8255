"""The time of vLLM's scheduler on the host for steps in which all sequences decode.

    python tools/bench/run.py scheduling --sequences 256 512 --out scheduling.json

A scheduler for asynchronous steps, as engines have on a GPU, gets random tokens in place of a model's. "vllm" is
vLLM's own, "slots" what `skip_idle_slots` and `list_logprobs` leave to do, and "bulk" what `decode_in_bulk` does in
addition, as engines have it. Ways take turns. Seconds are medians of steps: "schedule" of the beginning of a step,
"update" of its end. "ratio" is the sum of both over that of "vllm".
"""

import statistics
import time
from argparse import Namespace
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from runner import progress

FLAGS = {
    "sequences": ([256, 512], "sequences that decode"),
    "steps": (200, "of each round"),
    "rounds": 3,
}
WAYS = ("vllm", "slots", "bulk")
BLOCK_SIZE = 16  # tokens, as on a GPU
NUM_FIRST = 40  # steps that start sequences
MOST_TOKENS = 2048
PROMPT_TOKENS = 256
STOP = 1


def make_scheduler(model: str, way: str, num_sequences: int) -> Any:
    """Return a scheduler with slots and blocks for all sequences, for the text model in the folder `model`."""
    import torch
    from vllm.config import CacheConfig, ModelConfig, SchedulerConfig, VllmConfig
    from vllm.v1.core.sched.async_scheduler import AsyncScheduler
    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
    from vllm.v1.structured_output import StructuredOutputManager

    from rlhf_rollout.engines.vllm.patches.bulk_decoding import patch as decode_in_bulk
    from rlhf_rollout.engines.vllm.patches.idle_slots import patch as skip_idle_slots
    from rlhf_rollout.engines.vllm.patches.list_logprobs import patch as list_logprobs

    num_blocks = num_sequences * MOST_TOKENS // BLOCK_SIZE
    cache = CacheConfig(block_size=BLOCK_SIZE, enable_prefix_caching=True)
    cache.num_gpu_blocks = num_blocks
    config = VllmConfig(
        model_config=ModelConfig(model=model, skip_tokenizer_init=True, dtype="float32", max_model_len=MOST_TOKENS),
        scheduler_config=SchedulerConfig(
            max_num_seqs=num_sequences,
            max_num_batched_tokens=8192,
            max_model_len=MOST_TOKENS,
            is_encoder_decoder=False,
        ),
        cache_config=cache,
    )
    layer = FullAttentionSpec(block_size=BLOCK_SIZE, num_kv_heads=1, head_size=8, dtype=torch.float32)
    groups = [KVCacheGroupSpec(["layer"], layer)]
    scheduler = AsyncScheduler(
        vllm_config=config,
        kv_cache_config=KVCacheConfig(num_blocks=num_blocks, kv_cache_tensors=[], kv_cache_groups=groups),
        structured_output_manager=StructuredOutputManager(config),
        block_size=BLOCK_SIZE,
        log_stats=False,
    )
    scheduler.use_v2_model_runner = True
    changes = {
        "vllm": (),
        "slots": (skip_idle_slots, list_logprobs),
        "bulk": (skip_idle_slots, decode_in_bulk, list_logprobs),
    }
    for change in changes[way]:
        change(scheduler)
    return scheduler


def seconds_of(model: str, way: str, num_sequences: int, num_steps: int) -> dict[str, list[float]]:
    """Return the seconds of each step's beginning and end."""
    from vllm.sampling_params import SamplingParams
    from vllm.utils.hashing import sha256
    from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
    from vllm.v1.request import Request

    init_none_hash(sha256)
    hasher = get_request_block_hasher(BLOCK_SIZE, sha256)
    scheduler = make_scheduler(model, way, num_sequences)
    rng = np.random.default_rng(0)
    sampling = SamplingParams(max_tokens=MOST_TOKENS, logprobs=0, stop_token_ids=[STOP])
    for number in range(num_sequences):
        # Different lengths, so that the blocks of sequences end in different steps.
        prompt = rng.integers(STOP + 1, 1000, PROMPT_TOKENS - number % BLOCK_SIZE).tolist()
        scheduler.add_request(Request(str(number), prompt, sampling, None, block_hasher=hasher))
    seconds: dict[str, list[float]] = {"schedule": [], "update": []}
    pending: list[tuple[Any, Any]] = []
    for _ in range(NUM_FIRST + num_steps):
        start = time.perf_counter()
        step = scheduler.schedule()
        seconds["schedule"].append(time.perf_counter() - start)
        pending.append((step, made_up_output(scheduler, step, rng)))
        if len(pending) > 1:
            start = time.perf_counter()
            scheduler.update_from_output(*pending.pop(0))
            seconds["update"].append(time.perf_counter() - start)
    return {part: values[NUM_FIRST:] for part, values in seconds.items()}


def made_up_output(scheduler: Any, step: Any, rng: np.random.Generator) -> Any:
    """Return random tokens, with random log-probs, for all sequences whose prompts are done."""
    from vllm.v1.outputs import LogprobsLists, ModelRunnerOutput

    names = list(step.num_scheduled_tokens)
    tokens = rng.integers(STOP + 1, 1000, len(names)).tolist()
    nothing = np.zeros((len(names), 1), np.int32)
    return ModelRunnerOutput(
        req_ids=names,
        req_id_to_index={name: place for place, name in enumerate(names)},
        sampled_token_ids=[
            [] if scheduler.requests[name].is_prefill_chunk else [token]
            for name, token in zip(names, tokens, strict=True)
        ],
        logprobs=LogprobsLists(nothing, rng.random((len(names), 1), np.float32), nothing[:, 0], None),
        prompt_logprobs_dict={},
    )


def measure(options: Namespace, folder: Path) -> Iterator[dict[str, Any]]:
    """Measure all ways in turn, for each number of sequences."""
    from rlhf_models.testing import tiny_model_dir
    from rlhf_rollout.engines.vllm.core import prepare_environment

    prepare_environment()
    model = str(tiny_model_dir(folder / "model"))
    report: dict[str, Any] = {}
    for number in options.sequences:
        found: dict[str, dict[str, list[float]]] = {way: defaultdict(list) for way in WAYS}
        for _ in range(options.rounds):
            for way in WAYS:
                for part, seconds in seconds_of(model, way, number, options.steps).items():
                    found[way][part] += seconds
        ways = report[str(number)] = {}
        for way in WAYS:
            parts = {part: statistics.median(seconds) for part, seconds in found[way].items()}
            ways[way] = parts | {"seconds": sum(parts.values())}
            ways[way]["ratio"] = ways[way]["seconds"] / ways["vllm"]["seconds"]
            progress({"sequences": number, "way": way} | ways[way])
        yield {"sequences": report}
