"""Sequences that live through a weight update in vLLM, compared with transformers on the same weights."""

import asyncio
import dataclasses

import numpy as np
import pytest

from engine_testing import stopped_amid
from rlhf_models.testing import tiny_model_dir
from rlhf_rollout.engines import EngineSpec, build_engine
from rlhf_rollout.protocols import SamplingParams
from rollout_testing import shared_memory_bucket

BLOCK_SIZE = 128  # tokens, on a CPU: the cache holds whole blocks
MAX_NUM_SEQS = 4
PROMPTS = [(np.arange(300, dtype=np.int32) * (7 + shift) + shift) % 500 for shift in range(7)]
LONG = SamplingParams(max_tokens=150)


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    pytest.importorskip("vllm")
    path = tiny_model_dir(tmp_path_factory.mktemp("model"), max_position_embeddings=1024, eos_token_id=None)
    for name in ("generation_config.json", "tokenizer_config.json"):  # no token ends a sequence
        (path / name).write_text("{}")
    return path


def load(model_dir, seed=None):
    """Return the model, with a seed perturbed far enough that its log-probs differ clearly."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32).eval().requires_grad_(False)
    if seed is not None:
        generator = torch.Generator().manual_seed(seed)
        for parameter in model.parameters():
            parameter += 0.05 * torch.randn(parameter.shape, generator=generator)
    return model


def adapted(model_dir, seed=None):
    """Return the model with adapters by peft, whose B is zero without a seed."""
    import peft
    import torch

    model = peft.get_peft_model(load(model_dir), peft.LoraConfig(r=8, lora_alpha=8, target_modules="all-linear"))
    generator = torch.Generator().manual_seed(seed or 0)
    for name, parameter in model.requires_grad_(False).named_parameters():
        if ".lora_" in name and seed is not None:
            parameter += 0.1 * torch.randn(parameter.shape, generator=generator)
    return model.eval()


async def update(engine, version, model):
    tied = {"lm_head.weight"}
    weights = {name: value.numpy() for name, value in model.state_dict().items() if name not in tied}
    if engine._spec.adapter_rank:
        names = {name: name.removeprefix("base_model.model.").replace(".default", "") for name in weights}
        weights = {names[name]: value for name, value in weights.items() if ".lora_" in name}
    await engine.begin_weight_update(version)
    with shared_memory_bucket(weights) as bucket:
        await engine.receive_weights(bucket)
    await engine.finish_weight_update()


def differences(models, prompt, completion):
    """For each span its version and the largest distance, in nats, of its log-probs from those of its weights."""
    import torch

    tokens = torch.tensor(np.concatenate([prompt, completion.token_ids]), dtype=torch.long)[None]
    found = {}
    start = len(prompt)
    for span in completion.spans:
        end = start + len(span.token_ids)
        logprobs = models[span.policy_version](tokens).logits[0, start - 1 : end - 1].log_softmax(-1)
        expected = logprobs.gather(1, tokens[0, start:end, None])[:, 0]
        found[span.policy_version] = float((torch.tensor(span.logprobs) - expected).abs().max())
        start = end
    return found


async def pause_amid(engine, mode, count):
    """Ask `count` prompts, and pause when each sequence that runs has written; return what runs and waits then."""
    requests = [engine.generate(prompt, LONG) for prompt in PROMPTS[:count]]
    async with stopped_amid(engine, requests, num_sequences=MAX_NUM_SEQS) as tasks:
        assert len(engine._loop._samples) == count
        running = num_running(engine)
        pausing = asyncio.create_task(engine.pause(mode))
    return tasks, running, await pausing


def num_running(engine):
    return len(engine._loop._core.engine_core.scheduler.running)


def note_running(engine):
    """Return a list to which the engine's thread adds after each step how many sequences run."""
    found, take = [], engine._loop._take_outputs

    def take_and_note(outputs):
        take(outputs)
        found.append(num_running(engine))

    engine._loop._take_outputs = take_and_note
    return found


@pytest.mark.parametrize(("make", "rank"), [(load, 0), (adapted, 8)], ids=["weights", "adapters"])
def test_vllm_tokens_after_an_update_are_those_of_the_new_weights_unless_the_cache_is_kept(model_dir, make, rank):
    models = [make(model_dir), *(make(model_dir, seed) for seed in (1, 2, 3))]
    # More memory than four sequences need: nothing is evicted from the cache.
    options = {"max_model_len": 512, "max_num_seqs": MAX_NUM_SEQS, "kv_cache_memory_bytes": 16 << 20}
    engine = build_engine("vllm", EngineSpec(model=str(model_dir), seed=3, adapter_rank=rank, **options))
    old = PROMPTS[-1]

    async def cached():
        [completion] = await engine.generate(old, SamplingParams(max_tokens=8))
        return completion.num_cached_tokens, next(iter(differences(models, old, completion).values())) < 1e-4

    async def update_amid(mode, version, count):
        """Return for each sequence its versions, and for each of these whether its log-probs are those of the model."""
        tasks, running, found = await pause_amid(engine, mode, count)
        assert (running, found) == (MAX_NUM_SEQS, count)
        await update(engine, version, models[version])
        running = note_running(engine)
        await engine.resume()
        completions = [(await task)[0] for task in tasks]
        del engine._loop._take_outputs
        assert max(running) == MAX_NUM_SEQS  # not fewer than before
        assert [len(completion.token_ids) for completion in completions] == [LONG.max_tokens] * count
        found = [differences(models, *pair) for pair in zip(PROMPTS, completions, strict=False)]
        assert all(distance < 1e-4 or distance > 1e-3 for spans in found for distance in spans.values()), found
        return [{version: distance < 1e-4 for version, distance in spans.items()} for spans in found]

    async def scenario():
        # Two whole blocks of the prompt are in the cache from here on.
        assert [await cached(), await cached()] == [(0, True), (2 * BLOCK_SIZE, True)]
        # Four sequences run and two wait in vLLM.
        assert await update_amid("keep", 1, 6) == [{0: True, 1: True}] * 4 + [{1: True}] * 2
        assert [await cached(), await cached()] == [(0, True), (2 * BLOCK_SIZE, True)]
        assert await update_amid("restart", 2, 5) == [{1: True, 2: True}] * 4 + [{2: True}]
        assert [await cached(), await cached()] == [(0, True), (2 * BLOCK_SIZE, True)]
        engine._spec = dataclasses.replace(engine._spec, keep_kv=True)
        assert await update_amid("keep", 3, 4) == [{2: True, 3: False}] * 4
        assert await cached() == (2 * BLOCK_SIZE, False)
        await engine.close()

    asyncio.run(asyncio.wait_for(scenario(), 300))
