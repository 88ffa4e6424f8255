"""Weights from a trainer to a vLLM engine on the same GPU, by CUDA IPC and by shared memory; sleep and wake-up."""

import asyncio
import threading
from collections.abc import Coroutine, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch

from rlhf_data.errors import EngineError
from rlhf_models.testing import tiny_model_dir
from rlhf_rollout.engines import EngineSpec
from rlhf_rollout.protocols import Completion, SamplingParams
from rlhf_rollout.weights.ipc import room
from rlhf_rollout.weights.source import WeightSource

PROMPTS = [np.arange(3, 3 + length, dtype=np.int32) for length in (1, 7, 40)]
# bfloat16 keeps 8 bits of a logit; the logits of this model stay below 8 in size.
LOGPROB_TOLERANCE = 0.1


@dataclass(frozen=True)
class Pair:
    """An engine in a process of its own, and the trainer's model in this one, on the same GPU."""

    engine: Any
    model: Any
    medium: str
    loop: asyncio.AbstractEventLoop

    def run(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop).result(300)

    def generate(self, **sampling: Any) -> list[list[Completion]]:
        # One prompt after another: in bfloat16 a row's logits depend on what else is in its batch.
        params = SamplingParams(**({"num_samples": 4, "max_tokens": 24, "seed": 3} | sampling))
        return [self.run(self.engine.generate(prompt, params)) for prompt in PROMPTS]

    def send(self, policy_version: int) -> Any:
        sender = WeightSource(self.medium, bucket_bytes=400_000, checksum=True)
        return sender.send(iter(self.model.named_parameters()), [self.engine], policy_version)


@pytest.fixture(scope="module", params=["ipc", "shared_memory"])
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    import ray
    from transformers import AutoModelForCausalLM

    from rlhf_rollout.ray_actors import RayEngine, RemoteEngine

    path = tmp_path_factory.mktemp(request.param)
    heads = {"hidden_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 512}
    tiny_model_dir(path, tied=True, vocab_size=1024, dtype=torch.bfloat16, **heads)
    ray.init(include_dashboard=False, log_to_driver=True)
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, daemon=True).start()
    spec = EngineSpec(
        model=str(path),
        dtype="bfloat16",
        max_model_len=256,
        max_num_seqs=64,
        kv_cache_memory_bytes=1 << 30,
        gpu_memory_utilization=0.2,
        # One with CUDA graphs, which must see the new weights, and one without, which starts sooner.
        enforce_eager=request.param == "shared_memory",
        enable_sleep=True,
        weight_transfer=request.param,
    )
    handle = RemoteEngine.options(num_gpus=0.4).remote("vllm", spec)
    engine = RayEngine(handle)
    # The engine measures the GPU's free memory as it starts, so the trainer comes after it.
    ray.get(handle.ready.remote(), timeout=600)
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16).cuda().eval()
    yield Pair(engine, model, request.param, loop)
    ray.shutdown()
    loop.call_soon_threadsafe(loop.stop)


def perturb(model: Any, seed: int) -> None:
    generator = torch.Generator("cuda").manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator, device="cuda")
            parameter.add_(noise.to(parameter.dtype), alpha=0.05)


@torch.no_grad()
def mean_difference(model: Any, groups: list[list[Completion]], temperature: float = 1.0) -> float:
    """The mean distance between the engine's log-probs and the model's, in nats."""
    distances = []
    for prompt, group in zip(PROMPTS, groups, strict=True):
        for completion in group:
            tokens = torch.tensor(np.concatenate([prompt, completion.token_ids]), dtype=torch.long, device="cuda")[None]
            logprobs = (model(tokens).logits[0].float() / temperature).log_softmax(-1)
            expected = logprobs[len(prompt) - 1 : -1].gather(1, tokens[0, len(prompt) :, None])[:, 0]
            distances.append((torch.tensor(completion.logprobs, device="cuda") - expected).abs())
    return float(torch.cat(distances).mean())


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_engine_logprobs_are_those_after_temperature(pair: Pair, temperature: float) -> None:
    assert mean_difference(pair.model, pair.generate(temperature=temperature), temperature) < LOGPROB_TOLERANCE


def test_sync_makes_the_engines_logprobs_the_models(pair: Pair) -> None:
    before = pair.generate()
    perturb(pair.model, seed=1)
    assert mean_difference(pair.model, before) > 2 * LOGPROB_TOLERANCE
    report = pair.send(1)
    assert report.num_buckets > 1
    after = pair.generate()
    assert mean_difference(pair.model, after) < LOGPROB_TOLERANCE
    assert {completion.policy_version for group in after for completion in group} == {1}


def test_sync_in_a_buffer_that_is_kept_brings_what_was_written_last(pair: Pair) -> None:
    sender = WeightSource(pair.medium, bucket_bytes=400_000, checksum=True, keep_buffer=True)
    # The engine's process starts again for the trainer when its name changes, and gets another buffer.
    for version, name in enumerate(["one", "one", "one", "two", "two"], start=10):
        perturb(pair.model, seed=version)
        sender.send(iter(pair.model.named_parameters()), [pair.engine], version, [name])
        assert mean_difference(pair.model, pair.generate()) < LOGPROB_TOLERANCE
    sender.close()


def test_sync_in_one_large_bucket_brings_the_models_weights(pair: Pair) -> None:
    sender = WeightSource(pair.medium, bucket_bytes=400_000, room=room)
    num_buckets = []
    for version in (20, 21, 22):
        perturb(pair.model, seed=version)
        report = sender.send(iter(pair.model.named_parameters()), [pair.engine], version, ["one"])
        num_buckets.append(report.num_buckets)
        assert mean_difference(pair.model, pair.generate()) < LOGPROB_TOLERANCE
    assert num_buckets[0] > 2 and num_buckets[1:] == [1, 1]


def test_sync_perturbed_and_reverted_gives_the_same_tokens(pair: Pair) -> None:
    pair.send(2)
    original = {name: parameter.detach().clone() for name, parameter in pair.model.named_parameters()}
    before = pair.generate()
    perturb(pair.model, seed=2)
    pair.send(3)
    moved = pair.generate()
    with torch.no_grad():
        for name, parameter in pair.model.named_parameters():
            parameter.copy_(original[name])
    pair.send(4)
    reverted = pair.generate()
    tokens = [[c.token_ids.tolist() for group in groups for c in group] for groups in (before, moved, reverted)]
    assert tokens[0] != tokens[1]
    assert tokens[0] == tokens[2]


def test_sleep_gives_memory_back_and_wake_up_keeps_the_weights(pair: Pair) -> None:
    before = pair.generate()
    free_awake, _ = torch.cuda.mem_get_info()
    pair.run(pair.engine.sleep())
    free_asleep, _ = torch.cuda.mem_get_info()
    pair.run(pair.engine.wake_up())
    # The KV cache alone is 1 GiB.
    assert free_asleep - free_awake > 900 << 20
    after = pair.generate()
    for group, again in zip(before, after, strict=True):
        for first, second in zip(group, again, strict=True):
            np.testing.assert_array_equal(first.token_ids, second.token_ids)


def test_weights_that_sleep_drops_come_back_with_a_sync(pair: Pair) -> None:
    before = pair.generate()
    pair.run(pair.engine.sleep(keep_weights=False))
    pair.run(pair.engine.wake_up())
    with pytest.raises(EngineError, match="they were dropped when it fell asleep"):
        pair.generate()
    pair.send(7)
    after = pair.generate()
    for group, again in zip(before, after, strict=True):
        for first, second in zip(group, again, strict=True):
            np.testing.assert_array_equal(first.token_ids, second.token_ids)
            np.testing.assert_allclose(first.logprobs, second.logprobs, atol=1e-6)


def test_sync_after_a_nap_reaches_the_engine(pair: Pair) -> None:
    pair.run(pair.engine.sleep())
    perturb(pair.model, seed=3)
    pair.run(pair.engine.wake_up())
    pair.send(6)
    assert mean_difference(pair.model, pair.generate()) < LOGPROB_TOLERANCE


def test_sync_many_times_keeps_the_gpus_memory(pair: Pair) -> None:
    for version in range(3):
        pair.send(version)
    torch.cuda.synchronize()
    free_before, _ = torch.cuda.mem_get_info()
    for version in range(20):
        pair.send(version)
    torch.cuda.synchronize()
    # 20 leaked copies of 3 MB would be 60 MB.
    assert free_before - torch.cuda.mem_get_info()[0] < 32 << 20
